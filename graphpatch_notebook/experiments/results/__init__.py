"""Results as labeled arrays, and in files."""
