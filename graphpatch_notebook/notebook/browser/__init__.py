"""The tree browser that `pg.browse()` returns.

The `widget` sends the rows of the tree (`skeleton`), the chosen patches and scores to the front end in js/, and answers
its requests: about rows with `details`, about edits and runs with `notebook/views/requests`. `static_tree` is the HTML
that a saved notebook shows where no script may run; where one may, the front end itself draws what was saved.
"""
