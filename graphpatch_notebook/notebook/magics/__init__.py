"""The commands of `%graphpatch` and the cell magic `%%graphpatch`."""
