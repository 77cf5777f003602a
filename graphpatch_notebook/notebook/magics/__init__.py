"""`%graphpatch` and `%%graphpatch`.

`notebook/extension` receives a line. `commands` has one parser for each command (`argparse`, on words of
`command_line`), and calls the function of the command in `actions`. `cells` rewrites a `%%graphpatch` cell so that it
runs inside a patch context, and fills the variables of its probes.
"""
