"""Interventions that come from data: directions by means of examples, and modules whose parameters are trained.

`directions` finds directions and removes them, `modules` has what is trained, and `training` runs and fits it.
"""
