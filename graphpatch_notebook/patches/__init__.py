"""What changes a value. This room knows tensors and numbers only: no graphs, no models, no notebook.

A patch (`kinds`) is applied to the value of a node: `op` returns the new value. A patch may be limited to a slice of
the value (`slices` checks it against shapes), and to steps of a generation and positions of a sequence (`selections`).
`problem` says before a run why a patch cannot be used for a value.
"""
