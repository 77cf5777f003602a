"""The views of a graph, which share one selection: attention, lens, and the tree browser (`notebook/browser`).

`linked` is the base class of the views, and `computed` that of views whose numbers are computed by runs; `opening` has
what a new view starts with. `selection` is what is selected in them, and `actions` makes patches of it. `requests`
answers the front end, for all views. `lens` is the logit lens, and
`attention` the attention view, of the `patterns` of a run.
"""
