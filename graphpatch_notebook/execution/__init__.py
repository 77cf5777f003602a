"""Execution: patched runs of the user's own model.

`patch_map` checks the patches before anything runs, `plan` sorts them by frame, and `context` says what is active
where. `live` runs module calls and patches their boundaries (`module_hooks`); `live_mode` patches the operations
inside; `apply` patches one value, after it has checked that the value is the one that was captured. `steps` and
`positions` limit a patch to parts of a generation. `replay/` reuses recorded results in sweeps.
"""
