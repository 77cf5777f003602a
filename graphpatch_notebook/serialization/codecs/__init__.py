"""Writes and reads `values`, `tensors`, functions and classes (`names`) and `value_reads`; `reading` is for JSON."""
