"""What depends on the interpreter: names and call sites read off bytecode, and lines of source.

Each module of checks has `problems()`, and needs neither pytest nor torch. `test_interpreters.py` runs them in this
Python; `npm test` runs them in CPython 3.12, 3.13 and 3.14, compiled to WebAssembly (`without_torch.py`).
"""
