"""What notebooks display, except for the tree and the views.

`tables` as text or HTML, with short labels of values, ops and source lines, and the line of progress; `tokens` as text.
`displayed_widget` is the base class of all widgets and sends the bundled front end, which also draws what a notebook
has saved, without a kernel; elsewhere, its HTML is shown.
"""
