"""What a user looks at: node paths and what they point to, `pg.nodes`, `pg.graph`, the tree, and source code."""
