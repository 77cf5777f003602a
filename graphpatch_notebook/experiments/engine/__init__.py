"""Runs the cells of a sweep, so that they share forwards.

`cells` has the cells and their results, and tells which patch maps declare themselves pure. `runner` runs cells: alone,
or by `shared` forwards. In these, each cell has its rows, modules before the first patched value return what they
returned without patches, and others compute only the positions that patches changed (`frames`).
"""
