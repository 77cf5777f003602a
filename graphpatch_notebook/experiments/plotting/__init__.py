"""Plots of results.

A result becomes a grid of numbers with a color scale (`grids`), with short labels for rows and columns (`labels`).
`plots` draws the grid with matplotlib, or passes it to the heatmap widget of notebooks.
"""
