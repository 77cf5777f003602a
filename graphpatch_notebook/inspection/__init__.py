"""Looks at a capture: node paths and the nodes they mean, `pg.nodes`, `pg.graph`, the tree, and source code.

`resolution` turns the text of a path into a node, with the help of `aliases` for names from other tools. `locations` go
from a graph or a value to its children; `node_path` makes `pg.graph` of them, and `node_map` makes `pg.nodes`. `tree`
lays out the lines of the tree and colors them. `source_text` has the code of a graph and the user's lines, `data_flow`
finds where a value comes from and goes, and `error_notes` describes the node that raised an error.
"""
