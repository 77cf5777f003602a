"""Activation patching in the notebook, on any PyTorch model, at any intermediate value.

A `PatchableGraph` is made of a model and example inputs, and is used like the model. `PatchableGraph.graph`,
`PatchableGraph.nodes` and `PatchableGraph.browse` show the values that have a name; `PatchableGraph.patch` is given
what to do with them: `ZeroPatch`, `AddPatch`, `ReplacePatch`, `CustomPatch`, `ProbePatch`, `RecordPatch`, `StopPatch`,
or a `Patch` of your own. `PatchableGraph.record` keeps many values of one run. `ExtractionOptions` say how a model is
captured. `graphpatch_notebook.experiments` runs thousands of patches. Each error is a `GraphPatchError`, and each
warning a `GraphPatchWarning`. In IPython, `%load_ext graphpatch` brings `%graphpatch help`.

Example:
    >>> import torch
    >>> from graphpatch_notebook import PatchableGraph, ZeroPatch
    >>> pg = PatchableGraph(torch.nn.Linear(2, 2), torch.ones(1, 2))
    >>> with pg.patch({"output": ZeroPatch()}):
    ...     pg(torch.ones(1, 2)).tolist()
    [[0.0, 0.0]]
"""

from __future__ import annotations

import typing as _typing
from importlib.util import find_spec as _find_spec
from typing import Any as _Any

from graphpatch_notebook._version import __version__ as __version__
from graphpatch_notebook.errors import (
    CaptureError,
    ExperimentError,
    GraphError,
    GraphPatchError,
    GraphPatchWarning,
    PatchMapError,
    PatchNotFiredError,
    PatchValueError,
    SerializationError,
    UnknownPathError,
)
from graphpatch_notebook.errors import removed as _removed
from graphpatch_notebook.graphs import (
    CompiledGraphModule,
    GraphInterpreter,
    MultiplyInvokedModule,
    OpaqueGraphModule,
    UnusedModule,
)
from graphpatch_notebook.inspection.resolution import NodeMeta
from graphpatch_notebook.lazy_names import lazy_names as _lazy_names
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import (
    AddPatch,
    CustomPatch,
    FromPatch,
    Patch,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    SkipPatch,
    StopPatch,
    ZeroPatch,
)
from graphpatch_notebook.patching import Recording

if _typing.TYPE_CHECKING:
    from graphpatch_notebook.files import load_patches, save_patches
    from graphpatch_notebook.inspection.node_path import NodePath
    from graphpatch_notebook.patching import CompiledModel

__all__ = [
    "AddPatch",
    "CaptureError",
    "CompiledGraphModule",
    "CompiledModel",
    "CustomPatch",
    "ExperimentError",
    "ExtractionOptions",
    "FromPatch",
    "GraphError",
    "GraphInterpreter",
    "GraphPatchError",
    "GraphPatchWarning",
    "MultiplyInvokedModule",
    "NodeMeta",
    "NodePath",
    "OpaqueGraphModule",
    "Patch",
    "PatchMapError",
    "PatchNotFiredError",
    "PatchValueError",
    "PatchableGraph",
    "ProbePatch",
    "RecordPatch",
    "Recording",
    "ReplacePatch",
    "SerializationError",
    "SkipPatch",
    "StopPatch",
    "UnknownPathError",
    "UnusedModule",
    "ZeroPatch",
    "load_patches",
    "save_patches",
]


# Few programs wait for all of these.
_lazy_name = _lazy_names(__name__, __all__, ("patching", "inspection.node_path", "files"))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> _Any:
    if name in __all__:
        return _lazy_name(name)
    if name.isidentifier() and not name.startswith("_") and _find_spec(f"{__name__}.{name}") is None:
        from graphpatch_notebook import experiments

        if name in experiments.__all__:
            # `from graphpatch import causal_trace` would replace the text of an AttributeError by its own.
            raise ImportError(f"{name!r} is one of the experiments: from graphpatch_notebook.experiments import {name}")
    raise _removed(name) or AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: _Any) -> None:
    """Adds `%graphpatch` to an IPython shell: what `%load_ext graphpatch` calls."""
    from graphpatch_notebook.notebook.extension import load

    load(shell)


def unload_ipython_extension(shell: _Any) -> None:
    """Removes `%graphpatch` from the shell: what `%unload_ext graphpatch` calls."""
    from graphpatch_notebook.notebook.extension import unload

    unload(shell)
