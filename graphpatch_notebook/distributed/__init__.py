"""Models and runs that several processes share: an optional room, which is loaded where one needs it.

`sharding` holds what is known of a sharded model: its records are those of a copy on the meta device, of one process,
and how each value is distributed is found in a run on all processes. The parts of a value are joined before its
patches, and the result is split. `processes` makes sure that all processes call the model with the same patches, and
lets one of them write files, also under FSDP.

`executors` runs tasks in threads, in processes or on a cluster, and keeps what is done. In `remote`, the model itself
runs in other processes.

Two seams lead here: `patching/model_state` (how a value is made whole) and `experiments/engine` (where a run happens).
Workers import a module of this room first, so none of them imports `experiments` when it is loaded.
"""
