"""Models that are sharded over several processes: the same paths, shapes and numbers as in one process.

`sharding` holds what is known of such a model: its records are those of a copy on the meta device, of one process, and
how each value is distributed is found in a run on all processes. `placements` joins the parts of a value before its
patches, and splits the result. `agreement` makes sure that all processes call the model with the same patches.
`processes` lets one of them write files, also under FSDP, and knows which has which stage of a pipeline.
"""
