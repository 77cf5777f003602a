"""How the cells of a sweep run: which share work, and which run as in a plain loop.

`plans` makes the patch maps, and finds the cells that may share work: those whose patches do the same whenever they are
applied (`purity`). `sweep_setup` runs the model a few times without patches (`clean_run`, `trimming`) and returns a
frozen setup: the inputs, the number without patches, recorded results, and a plan of batches (`batching`, which asks
`checks.dimensions` where the batch is). `runner` runs chunks of cells by that setup, in one of three ways
(`strategies`): plain, replayed, or batched. In a batch, modules compute only the positions that patches changed
(`changed_positions`). Where a check shows that sharing would change a number, cells run alone, and a remark says why.
`cells`, `inputs` and `measurements` are the data that goes in and comes out.
"""
