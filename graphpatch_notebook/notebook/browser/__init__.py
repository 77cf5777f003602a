"""The tree browser: the widget, the requests it answers, and its static form."""
