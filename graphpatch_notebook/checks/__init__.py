"""Checks: questions that the whole package asks about calls, models and runs, each answered in one file.

model_state   has the model changed? whose hook is it? are two values equal, bit for bit?
comparison    do two runs do the same? does this call look like that one?
dimensions    which dimension of a value is which? meta_runs: the runs at other sizes that answer it
sharding      is the model sharded over several processes?
"""
