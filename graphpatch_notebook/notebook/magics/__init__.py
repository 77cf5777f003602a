"""`%graphpatch` and `%%graphpatch`, and the functions that run their commands.

`notebook/extension` receives a line. `commands` has one parser for each command (`argparse`, on words of
`command_line`), and calls the function of the command: `wrapping` creates and selects graphs, `views` shows nodes, code
and patches, `choosing` edits the chosen patches of the session, and `files` exports, saves and loads them. `cells`
rewrites a `%%graphpatch` cell so that it runs inside a patch context, and fills the variables of its probes.
"""
