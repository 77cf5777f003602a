"""What earlier sweeps of a graph have shown, which need not be shown again while its model is as it was."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

from graphpatch_notebook.checks.call_signature import CallSignature
from graphpatch_notebook.checks.model_state import Fingerprint, ModuleState
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.patchable_graph import PatchableGraph

_known: WeakKeyDictionary[PatchableGraph, tuple[Fingerprint, dict[Hashable, Any]]] = WeakKeyDictionary()


def shown_earlier(pg: PatchableGraph, state: ModuleState) -> dict[Hashable, Any]:
    """Returns what is known of a graph, by what was asked; all is forgotten when its model is changed.

    Args:
        pg: The graph.
        state: Its model as it is.
    """
    fingerprint = Fingerprint(state)
    known = _known.get(pg)
    if known is None or known[0] != fingerprint:
        known = _known[pg] = (fingerprint, {})
    return known[1]


def kind_of_run(inputs: Inputs) -> Hashable:
    """Returns what two runs of a model have in common that do the same, as long as Python looks at no values."""
    signature = CallSignature.of({**{str(i): value for i, value in enumerate(inputs.args)}, **inputs.kwargs})
    return object() if signature.objects else signature
