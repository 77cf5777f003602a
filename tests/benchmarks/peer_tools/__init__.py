"""The tools that `tests.benchmarks.peers` compares, each used as its documentation says, and how they are measured."""
