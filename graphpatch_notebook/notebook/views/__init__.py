"""The views of a graph, which share one selection: the tree (`browser`), attention, lens, generation, results.

`linked` has the base classes of the views, what a new view starts with, and the answers to requests of the front end.
`selection` is what is selected in them, and the patches that are made of it. `attention` is the attention view, `lens`
the logit lens, `generation` generated tokens, and `results` the heatmaps of results and pictures of circuits.
"""
