"""What changes a value: the patch kinds, slices, and the steps and positions that a patch is limited to."""
