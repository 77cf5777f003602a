"""Circuits: which edges between components carry an effect, and runs of the model with some of them only.

- `attribute_edges(pg, metric, clean, corrupted, *, method="gradient", steps=5, senders=None, receivers=None,
  heads=True, max_bytes=2**30) -> DataArray`: a score for each edge, with the dimensions `receiver` and `sender`, and
  NaN where the model has no edge. Its attributes are those of `Circuit`: `feeds`, `clean`, `corrupted`, ...
- `circuit(pg, scores, edges=100, *, selection="top", prune=True) -> Circuit`: the edges with the largest scores.
- `circuit_patches(pg, circuit, corrupted) -> patch map`: `pg` under it runs as the circuit.
- `faithfulness(pg, scores, metric, clean, corrupted, *, sizes=None, ...) -> Dataset`: how much of the effect circuits
  of several sizes keep.

`circuit` has a circuit as data: its edges with their scores, JSON, and the removal of dead ends; its docstring says
what senders and receivers are called.
"""
