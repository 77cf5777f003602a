"""The notebook layer: chosen patches as data, magics, completion, code export. The only place that knows IPython."""
