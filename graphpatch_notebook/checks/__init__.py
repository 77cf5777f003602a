"""Checks: questions that the whole package asks about calls, models and runs, each answered in one file.

call_signature   does this call look like that one?
model_state      has the model changed? ModelSnapshot, compare, restore
comparison       do two runs do the same?
dimensions       which dimension of a value is which? meta_runs: the runs at other sizes that answer it
hooks            whose hook is it?
equality         are two values equal, bit for bit?
sharding         is the model sharded over several processes?
"""
