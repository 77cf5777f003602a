"""Patches, which change values. This package depends only on tensors and numbers.

A patch (`kinds`) is applied to the value of a node: `op` returns the new value. A patch may be limited to a slice of
the value and to steps of a generation and positions of a sequence (`slices` checks all of these).
`problem` returns, before a run, the reason why a patch cannot be used for a value.
"""
