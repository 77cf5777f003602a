"""Where the cells of a sweep run: threads, processes, or a cluster; and the checkpoint of a sweep."""
