"""How the cells of a sweep run: which ones share work, and how a batch of cells runs in one forward."""
