"""The search for nodes in a capture.

`query` parses a query into terms. `search` tests the terms on the properties of all nodes, and returns the matching
nodes as a table.
"""
