"""Circuits: which edges between components carry an effect, and runs of the model with some of them only.

`stream` follows the linear paths between components through the captured graph, and `nodes` finds the senders and
receivers at their ends. `edges` scores all edges by gradients (`attribute_edges`). `selection` chooses edges by their
scores (`circuit`), and measures what the circuits of several sizes keep (`faithfulness`). `runs` has the patches under
which a model runs as a circuit (`circuit_patches`), and `circuit` a circuit as data. `layout` places its nodes and
edges in a picture, and `svg` draws that for papers.
"""
