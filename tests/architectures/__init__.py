"""The laws over every architecture of the installed transformers that can be built small from its config.

`python -m tests.architectures` runs them and prints a table; importing this imports no transformers.
"""
