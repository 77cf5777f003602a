"""Benchmarks: each prints a table of ratios. `hatch run bench` runs them."""
