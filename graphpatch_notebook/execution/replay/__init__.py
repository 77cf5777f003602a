"""Recorded results of module calls, which later runs reuse instead of computing them again."""
