"""The views of a graph, which share one selection: attention, lens, generation; also the tree in `notebook/browser`.

`linked` has the base classes of the views, and what a new view starts with. `selection` is what is selected in them,
and the patches that are made of it. `requests` answers the front end, for all views. `attention` is the attention view,
`lens` the logit lens, `generation` generated tokens, and `results` the heatmaps of results and pictures of circuits.
"""
