"""Saves graphs to a file, and loads them, without pickle. No code in a file is ever run.

A file is a safetensors file whose metadata holds a JSON document. `saving` checks the graphs against the model and
writes them; `loading` reads strictly, and finds the modules of a model if one is given. The parts of the document are
records of frames (`frames`), their graphs (`graphs`) and modules (`modules`). `forms` determines the calls that a
loaded graph is valid for, and `value_reads` the values that it depends on. `codecs/` writes and reads single values.
`patch_files` saves patch maps; it and graphs share `files`.

What reads raises a `SerializationError` for anything that it does not expect. What writes raises an `UnstorableError`,
whose message names what cannot be written; `saving` and `patch_files` catch it.
"""

from __future__ import annotations

from graphpatch_notebook.serialization.loading import Loaded, load
from graphpatch_notebook.serialization.patch_files import load_patches, save_patches
from graphpatch_notebook.serialization.saving import GraphToSave, save

__all__ = ["GraphToSave", "Loaded", "load", "load_patches", "save", "save_patches"]
