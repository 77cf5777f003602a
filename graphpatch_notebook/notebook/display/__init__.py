"""What notebooks display, except for the tree: each kind of output as a module.

`labels` returns short texts for values, ops and source lines, which `tables` arranges as text or HTML. `progress` shows
a progress bar during long operations. `statistics` and `tokens` compute what is shown for an activation: summary
statistics, token labels, and the most probable next tokens. `displayed_widget` is the base class of all widgets and
sends the bundled front end, which also draws what a notebook has saved, without a kernel; where no script may run, its
HTML is shown. `heatmap` is the widget for results of experiments, and `circuit` the one for circuits.
"""
