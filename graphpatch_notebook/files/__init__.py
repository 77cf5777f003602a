"""Saves graphs and patches to files, and loads them, without pickle. No code in a file is ever run.

A file is a safetensors file whose metadata holds a JSON document. `documents` defines these, writes single values,
tensors and functions, and says which functions a file may name. `graph_files` writes graphs, and reads them into plain
modules. `patch_files` saves patch maps.
"""

from __future__ import annotations

from graphpatch_notebook.files.graph_files import load, save
from graphpatch_notebook.files.patch_files import load_patches, save_patches

__all__ = ["load", "load_patches", "save", "save_patches"]
