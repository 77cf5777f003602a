"""Models and runs that several processes share: an optional room, which is loaded where one needs it.

`sharding` holds what is known of a sharded model: its records are those of a copy on the meta device, of one process,
and how each value is distributed is found in a run on all processes. `placements` joins the parts of a value before its
patches, and splits the result. `processes` makes sure that all processes call the model with the same patches, and lets
one of them write files, also under FSDP.

`executors` runs tasks in threads, in processes or on a cluster, and `checkpoint` keeps what is done. In `remote`, the
model itself runs in other processes.

Two seams lead here: `patching/sharding` (how a value is made whole) and `experiments/elsewhere` (where a run happens).
Workers import a module of this room first, so none of them imports `experiments` when it is loaded.
"""
