"""Looks at a capture: node paths and the nodes they mean, `pg.nodes`, `pg.graph`, the tree, and source code.

`resolution` turns the text of a path into a node, knows names from other tools, and makes `pg.nodes`. `node_path` goes
from a graph or a value to its children, which is `pg.graph`, has the code of a graph and the user's lines, and finds
where a value comes from and goes. `tree` lays out the lines of the tree, with plumbing folded.
"""
