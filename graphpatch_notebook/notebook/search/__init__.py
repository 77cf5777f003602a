"""The search for nodes: the query grammar, and what matches a query."""
