"""Tab completion of node paths and commands."""
