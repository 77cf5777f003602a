"""Runs the cells of a sweep, so that cells share work where this does not change a number.

`purity` makes the patch maps, and finds the cells that may share work: those with pure patches, unless making them has
`side_effects`. `sweep_setup` runs the model a few times without patches (`clean_run`, with `trimming` to skip outputs).
It returns a frozen setup: the request, the baseline, recorded results, and where each cell has its `rows` in a batch
(`batching`). `runner` is where cells share work: it runs chunks of them with that setup, in one of three ways: plain,
replayed (with recorded results, see `execution/replay`), or batched. In a batch, modules compute only the positions
that patches changed (`changed_positions`). If a check fails while cells run, `runner` switches to a simpler setup, and
a remark gives the reason. `cells`, `inputs` and `measurements` define the cells, the inputs of the model, and the
results.
"""
