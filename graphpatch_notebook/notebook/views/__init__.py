"""The views of a graph, which share one selection: an attention view, and the tree browser (`notebook/browser`).

`linked` is the base class of the views. `selection` is what is selected in them, and `actions` makes patches of it.
`requests` answers the front end, for all views. `attention` is the attention view, of the `patterns` of a run.
"""
