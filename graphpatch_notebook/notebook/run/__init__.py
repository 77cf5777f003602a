"""*Run* and *show activation* of the tree browser: the model runs in a thread, and reports what changed."""
