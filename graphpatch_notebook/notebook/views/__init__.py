"""The views of a graph, which share one selection: attention, lens, generation; also the tree in `notebook/browser`.

`linked` has the base class of the views and what a new view starts with, and `computed` the base class of views whose
numbers are computed by runs. `selection` is what is selected in them, and the patches that are made of it. `requests`
answers the front end, for all views. `attention` is the attention view, of the `patterns` of a run, `lens` the logit
lens, `generation` generated tokens, and `result_view` the heatmap of a result.
"""
