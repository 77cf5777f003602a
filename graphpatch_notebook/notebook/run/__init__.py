"""Runs of the tree browser: *Run* and *Show activation*.

`runs` starts a `Job` (`jobs`), which calls the model in a thread: without the patches and with them, on the same inputs
and from the same state (`model_calls`). `run_report` compares the outputs and the values of probes. `activation` gets
the value of one node, and `value_plots` plots it. All results are plain data for the front end.
"""
