"""Execution: patched runs of the user's own model.

patch_map.py      a patch map, checked whole before anything runs
plan.py           the same, laid out by frame
context.py        what is active where: entering, leaving, calling
live.py           a run: module calls, their inputs, parameters and outputs
live_mode.py      the operations inside them
steps.py          which step of a generation runs; `positions.py`: where a patch for some of them has its effect
apply.py          patches on a value, if it is still the value that was captured
stand_in.py       a module with other parameters; `module_hooks.py`, `python_stack.py`: who called, and what follows
repetitions.py    what is told of calls beyond those of the example, and of turns of loops over data
tracebacks.py     which node raised an error
"""
