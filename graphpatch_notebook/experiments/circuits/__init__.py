"""Circuits: which edges between components carry an effect, and runs of the model with some of them only.

`stream` follows the sums that the residual stream consists of, and `nodes` finds the senders and receivers at their
ends. `edges` scores all edges by gradients (`attribute_edges`). `runs` chooses edges by their scores (`circuit`), has
the patches under which a model runs as a circuit (`circuit_patches`), and measures what circuits of several sizes keep
(`faithfulness`). `circuit` is a circuit as data, and its picture.
"""
