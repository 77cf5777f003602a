"""`%graphpatch` and `%%graphpatch`, and the functions that run their commands.

`notebook/extension` receives a line. `commands` finds its command, or prints its help, expands variables in paths, and
calls the function of the command: `wrapping` creates and selects graphs, `views` shows nodes, code and patches,
`choosing` edits the chosen patches of the session, and `files` exports, saves and loads them. `command_line` splits the
line into options, `PATH[slice]` and the rest. `cells` rewrites a `%%graphpatch` cell so that it runs inside a patch
context, and fills the variables of its probes and records.
"""
