"""`%graphpatch` and `%%graphpatch`.

`notebook/extension` receives a line. `commands` has one parser for each command (of argparse, on words of
`command_line`), and the function that carries it out. `cells` rewrites a `%%graphpatch` cell so that it runs inside a
patch context, and fills the variables of its probes.
"""
