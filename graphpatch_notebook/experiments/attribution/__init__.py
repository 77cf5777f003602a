"""Scores for all values of a model by gradients."""
