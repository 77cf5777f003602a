"""The session: the patches that a user chose in a notebook, as data.

A user names a patch of some kind for a node path, as text (`chosen_patch`, which also lists the kinds; `expressions`
parses its parts). A `session` holds the chosen patches of one graph, with undo, checks each edit against the graph, and
evaluates the values in the user's variables when a patch context is entered. `workspace` finds the graphs in these
variables, and `session_file` writes and reads sessions, safely.
"""
