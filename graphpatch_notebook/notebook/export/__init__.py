"""The chosen patches as Python code. Nothing here runs a model or evaluates an expression."""
