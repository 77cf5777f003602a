"""The chosen patches as Python code. Nothing here runs a model or evaluates an expression.

`patch_code` writes code that uses this package, `hook_code` a script with plain forward hooks of torch. Both use
`source_parts` (names, values, inputs, comments) and `source_code` (layout and display of the result).
"""
