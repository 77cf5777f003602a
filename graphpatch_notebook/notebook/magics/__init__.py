"""`%graphpatch` and `%%graphpatch`, and the functions that run their commands.

`magics` receives a line. `command_line` expands variables in paths and splits the line into options, `PATH[slice]`
and the rest. `commands` finds the command, or prints its help, and calls its function: `wrapping` creates and selects
graphs, `views` shows nodes, code and patches, `choosing` edits the chosen patches of the session, and `files`
exports, saves and loads them. `cells` rewrites a `%%graphpatch` cell so that it runs inside a patch context, and
fills the variables of its probes and records.
"""
