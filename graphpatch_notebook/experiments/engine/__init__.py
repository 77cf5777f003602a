"""Runs the cells of a sweep, so that they share forwards.

`cells` has the cells, and tells which patch maps declare themselves pure. `runner` runs cells: alone, or by a `plan`,
which is found by running the model without patches (`clean_run`), on `inputs` that skip outputs (`trimming`). In the
plan, each cell has its `rows` of one forward, modules before the first patched value return what they returned in the
clean run, and others compute only the positions that patches changed (`changed_positions`). Results are `measurements`.
"""
