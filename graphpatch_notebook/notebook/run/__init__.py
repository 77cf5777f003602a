"""Runs of the tree browser: *Run* and *Show activation*.

`runs` starts a `Job`, which calls the model in a thread: without the patches and with them, on the same inputs and from
the same state (`model_calls`). `run_report` compares the outputs and the values of probes, and plots values. All
results are plain data for the front end.
"""
