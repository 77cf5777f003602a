"""The chosen patches as Python code. Nothing here runs a model or evaluates an expression.

`patch_code` writes the code, and `source_code` has its layout and how it displays itself.
"""
