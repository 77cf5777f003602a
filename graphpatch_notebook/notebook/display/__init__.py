"""What notebooks show besides the tree: tables, progress bars, heatmaps, statistics, and tokens."""
