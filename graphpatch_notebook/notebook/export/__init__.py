"""The chosen patches as Python code, with this package or as plain forward hooks."""
