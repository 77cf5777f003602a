"""Quantized weights: the weight that a packed one represents, and calls of a module with another weight."""
