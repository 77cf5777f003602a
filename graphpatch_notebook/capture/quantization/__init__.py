"""Weights that are stored in another form than the one they are used in: what a packed weight stands for."""
