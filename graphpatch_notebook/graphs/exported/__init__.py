"""Programs of `torch.export` as patchable graphs, with the module hierarchy of the model that was exported.

`inputs` reads the parameters of the program and runs its own checks. `groups` finds which of the modules that
`torch.export.unflatten` makes represent one module of the model. `conversion` makes our own modules (`modules`) and
their graphs, that of the whole program included. `frames` makes the records of the calls, with the shapes of the
program's fake tensors.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import GraphError, SerializationError
from graphpatch_notebook.graphs.exported.conversion import Converter
from graphpatch_notebook.graphs.exported.frames import frames_of
from graphpatch_notebook.graphs.exported.modules import ExportedRoot
from graphpatch_notebook.torch_compat import input_guards, unflattens_programs

__all__ = ["unflattened_program"]


def unflattened_program(program: Any, flat_args_adapter: Any = None) -> tuple[ExportedRoot, Frame]:
    """Returns an exported program as a module that runs it, and the record of the calls in it.

    Args:
        program: The program, or the `.pt2` file that `torch.export.save` wrote.
        flat_args_adapter: A `torch.export.FlatArgsAdapter`, for calls of another structure than the program's.

    Raises:
        TypeError: It is neither.
        FileNotFoundError: The file does not exist.
        SerializationError: The file is not an archive.
        GraphError: This torch is too old.
        Exception: Raised by torch for a file that it cannot read, or a program that it cannot unflatten.
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
    program = program if file is None else torch.export.load(file)
    converter = Converter(torch.export.unflatten(program, flat_args_adapter), input_guards(program))
    return converter.root, frames_of(converter)


def _checked_file(file: str | os.PathLike[str]) -> str:
    """Returns the name of a file that may hold a program. For other files torch prints a traceback before it raises."""
    name = os.fspath(file)
    if not Path(name).is_file():
        raise FileNotFoundError(f"the file does not exist: {name!r}")
    if not zipfile.is_zipfile(name):
        raise SerializationError(f"{name!r} is not a file that torch.export.save wrote")
    return name
