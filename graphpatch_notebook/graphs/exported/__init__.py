"""Programs of `torch.export` as patchable graphs, with the module hierarchy of the model that was exported.

`conversion` groups the modules that `torch.export.unflatten` makes by the module of the model that they come from, and
makes our own (`modules`) of them, with their graphs. `frames` makes the records of the calls.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.graphs.exported.modules import ExportedRoot
from graphpatch_notebook.torch_compat import input_guards, unflattens_programs

__all__ = ["unflattened_program"]


def unflattened_program(program: Any, flat_args_adapter: Any = None) -> tuple[ExportedRoot, Frame]:
    """Returns an exported program, or the program in a file, as a module that runs it, and the record of its calls.

    Arguments and errors are those of `PatchableGraph.from_exported`. Torch raises its own for a file that it cannot
    read, and for a program that it cannot unflatten.
    """
    file = _checked_file(program) if isinstance(program, (str, os.PathLike)) else None
    if file is None and not isinstance(program, ExportedProgram):
        raise TypeError(
            "from_exported needs what torch.export.export returns, or a file that torch.export.save wrote, not "
            f"{type(program).__name__}; for a model, use PatchableGraph(model, *example_args)"
        )
    if not unflattens_programs():
        raise GraphError(
            f"exported programs need torch 2.6 or later, and this is {torch.__version__}, whose torch.export.unflatten "
            "fails on modules that are called twice, and on branches; upgrade torch, or use "
            "PatchableGraph(model, *example_args) on the model that was exported"
        )
    from graphpatch_notebook.graphs.exported.conversion import Converter  # older versions lack what it imports
    from graphpatch_notebook.graphs.exported.frames import FrameBuilder

    program = program if file is None else torch.export.load(file)
    converter = Converter(torch.export.unflatten(program, flat_args_adapter), input_guards(program))
    return converter.root, FrameBuilder(converter).build()


def _checked_file(file: str | os.PathLike[str]) -> str:
    """Returns the name of a file that may hold a program. For other files torch prints a traceback before it raises."""
    name = os.fspath(file)
    if not Path(name).is_file():
        raise FileNotFoundError(f"the file does not exist: {name!r}")
    if not zipfile.is_zipfile(name):
        raise GraphError(f"{name!r} is not a file that torch.export.save wrote")
    return name
