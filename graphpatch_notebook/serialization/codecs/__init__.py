"""Writes and reads `values`, `tensors`, functions and classes (`names`); `reading` checks JSON."""
