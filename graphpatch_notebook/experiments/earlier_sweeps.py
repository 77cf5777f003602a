"""What earlier sweeps of a graph have shown, which need not be shown again for runs of the same kind."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from graphpatch_notebook.execution.frame_effects import leaves_of
from graphpatch_notebook.experiments.inputs import Inputs
from graphpatch_notebook.patchable_graph import PatchableGraph

_known: WeakKeyDictionary[PatchableGraph, dict[Hashable, Any]] = WeakKeyDictionary()

_PLAIN = frozenset({bool, int, float, str, type(None)})


def shown_earlier(pg: PatchableGraph) -> dict[Hashable, Any]:
    """Returns what is known of a graph, by what was asked; there is nothing of the kind in the graph itself."""
    return _known.setdefault(pg, {})


def kind_of_run(pg: PatchableGraph, inputs: Inputs) -> Hashable:
    """Returns what two runs have in common that do the same, as long as Python looks at no values.

    These are shapes and dtypes of the inputs, all else in the inputs, and the plain attributes of the modules, such as
    `training`.
    """
    leaves = leaves_of((inputs.args, inputs.kwargs))
    forms = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    settings = tuple(
        tuple([value for value in module.__dict__.values() if type(value) in _PLAIN]) for module in pg._module.modules()
    )
    return forms, tuple(inputs.kwargs), settings
