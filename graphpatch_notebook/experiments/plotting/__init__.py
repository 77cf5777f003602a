"""Results as figures of matplotlib."""
