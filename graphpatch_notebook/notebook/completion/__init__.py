"""Tab completion of node paths and of all arguments of `%graphpatch`.

`cursor` parses the text before the cursor, without evaluating it: into the argument of a command, or into a key, item
or attribute of Python code. `completion` looks up what can be there in the captured graph, the chosen patches, the
user's variables or the file system, and returns it to the completer of IPython.
"""
