"""Runs the cells of a sweep, so that cells share work where this does not change a number.

`plans` makes the patch maps, and finds the cells that may share work: those with pure patches (`purity`), unless making
them changes values that the metric refers to (`function_values`) or draws random numbers (`random_draws`).
`sweep_setup` runs the model a few times without patches (`clean_run`, with `value_reads` to record reads of values, and
`trimming` to skip outputs). It returns a frozen setup: the inputs, the baseline, recorded results, and a plan of
batches (`batching`). `runner` runs chunks of cells with that setup, in one of three ways (`strategies`): plain,
replayed, or batched. In a batch, modules compute only the positions that patches changed (`changed_positions`). If a
check fails while cells run, `runner` switches to a simpler setup, and a remark gives the reason. `cells`, `inputs` and
`measurements` define the cells, the inputs of the model, and the results.
"""
