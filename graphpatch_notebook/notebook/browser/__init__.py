"""The tree browser that `pg.browse()` returns.

The `widget` sends the rows of the tree (`skeleton`), the chosen patches and scores to the front end in js/, and answers
its requests: about rows by their details, about edits and runs with `notebook/views/requests`.
"""
