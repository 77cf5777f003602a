"""The search for nodes in a capture: `search` parses a query, tests its terms on all nodes, and returns a table."""
