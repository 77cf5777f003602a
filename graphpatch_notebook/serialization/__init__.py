"""Saves graphs to a file, and loads them, without pickle. Nothing in a file is ever run.

    saving.py           checks the graphs against the model (`trials`, `sizes`), writes the file
    loading.py          reads a file; `reattaching.py`: with the model that it is of
    document.py         what is written: frames (`frames`, `graphs`, `specs`, `values`), modules (`module_table`),
                        tensors (`tensors`)
    frame_reader.py     the same read back, strictly (`reading`); `module_reader.py`
    functions.py        which functions a file may call; `classes`, `names`: what the caller has to allow
    modules.py          the modules of a loaded graph
    forms.py            for which calls a loaded graph holds

A file is one of safetensors, whose metadata hold the document as JSON.
"""

from __future__ import annotations

from graphpatch_notebook.serialization.loading import Loaded, load
from graphpatch_notebook.serialization.saving import Source, save

__all__ = ["Loaded", "Source", "load", "save"]
