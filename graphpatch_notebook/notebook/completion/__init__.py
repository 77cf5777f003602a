"""Tab completion of node paths, also in Python code, and of all arguments of `%graphpatch`, as a matcher of IPython."""
