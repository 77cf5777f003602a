"""Saves graphs to a file, and loads them, without pickle. Nothing in a file is ever run.

A file is one of safetensors, whose metadata hold a JSON document. `saving` checks the graphs against the model and
writes; `loading` reads strictly, and `reattaching` gives a loaded graph its model again. `document` lays out frames
(`frames`, `graphs`) and modules (`module_table`); `forms` says for which calls a loaded graph holds; `codecs/` has the
single values.
"""

from __future__ import annotations

from graphpatch_notebook.serialization.loading import Loaded, load
from graphpatch_notebook.serialization.saving import Source, save

__all__ = ["Loaded", "Source", "load", "save"]
