"""What a run has changed at its probes: the same probes see the model without the patches, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.checks.model_state import copied
from graphpatch_notebook.notebook.display.statistics import bounded
from graphpatch_notebook.notebook.display.tokens import TokenLabels
from graphpatch_notebook.notebook.run.model_calls import PatchMap
from graphpatch_notebook.notebook.run.run_report import Buffers, Taken, compared
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, ChosenPatches
from graphpatch_notebook.notebook.session.session import ResolvedPatches
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.torch_compat import is_compiled

_FUSED = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
_NORMS = ("norm_before", "norm_after", "norm_difference")


class ProbedPasses:
    """The calls of a run: without the patches first, with them last.

    Where patches change something, the call before the last one has the probes, and nothing else. That is the first
    one, unless the model computes in another way where it is looked at: then there is one more before it.

    Args:
        root: The captured frame of the model.
        chosen: The chosen patches.
        resolved: The same, with their values.
        namespace: The user's variables.

    Attributes:
        maps: The patch map of each call.
        unpatched: The probes of the call before the last one; none, if nothing is to be compared.
    """

    def __init__(
        self, root: Frame, chosen: ChosenPatches, resolved: ResolvedPatches, namespace: dict[str, Any]
    ) -> None:
        self.maps: list[PatchMap] = [{}, resolved.patch_map] if resolved.patch_map else [{}]
        self.unpatched: list[tuple[ChosenPatch, Patch[Any]]] = []
        self._without: list[Taken] = []
        if not resolved.observing or all(one.definition.keeps is not None for one in chosen.enabled):
            return
        self.unpatched = [(one, one.patch(namespace)) for one, _ in resolved.observing]
        probes: dict[str, list[Patch[Any]]] = {}
        for one, patch in self.unpatched:
            probes.setdefault(one.path, []).append(patch)
        self.maps = [*([{}] if _rounds_where_looked_at(root) else []), probes, resolved.patch_map]

    def take(self, names: Mapping[str, Any]) -> None:
        """Notes what the probes of the call before the last one kept, apart from what the last one may write into.

        Args:
            names: The variables in their slices.
        """
        self._without = [_apart(Taken.of(one, patch, names, lambda value: value)) for one, patch in self.unpatched]

    def reports(self, taken: list[Taken], labels: TokenLabels | None, buffers: Buffers) -> list[dict[str, Any]]:
        """Returns the `ProbeReport`s of the front end, for what was kept in the last call."""
        reports = [one.report(labels, buffers) for one in taken]
        changes = [probe_change(*pair) for pair in zip(self._without, taken, strict=False)] or [None] * len(taken)
        return [{**report, "change": change} for report, change in zip(reports, changes, strict=True)]


def _apart(taken: Taken) -> Taken:
    try:
        return replace(taken, value=copied(taken.value))
    except Exception as error:
        return replace(taken, value=None, problem=f"the value cannot be copied ({type(error).__name__}: {error})")


def _rounds_where_looked_at(root: Frame) -> bool:
    """Whether a probe may change the last bits: what is fused, compiled or of a graph runs step by step with one."""
    return any(
        isinstance(frame.module, _FUSED)
        or is_compiled(frame.module)
        or frame.has_own_graph
        or any(node.composite is not None for node in frame.nodes)
        for frame in root.walk()
    )


def probe_change(before: Taken, after: Taken) -> dict[str, Any] | None:
    """Returns the `ProbeChange` of the front end; `None`: nothing was kept, or it has no numbers.

    Of a record it has the sums over all values.
    """
    if after.problem is not None:  # which is told
        return None
    if before.problem is not None:
        return _unknown(f"not compared: without the patches, {before.problem}")
    first, second = (_values(one) for one in (before, after))
    if len(first) != len(second):
        return _unknown(_of_other_length(before, after))
    pairs = [compared(*pair) for pair in zip(first, second, strict=True)]
    if all(pair["norm_before"] is None and pair["norm_after"] is None for pair in pairs):
        return None
    notes = [pair["note"] for pair in pairs if pair["note"] is not None]
    if len(pairs) > 1:
        notes.insert(0, f"sums of the norms of {len(pairs)} recorded values")
    return {
        **{what: _sum([pair[what] for pair in pairs]) for what in _NORMS},
        "note": "; ".join(dict.fromkeys(notes)) or None,
    }


def _values(taken: Taken) -> list[Any]:
    if taken.chosen.definition.keeps_list:
        return list(taken.value)
    return [] if taken.value is None else [taken.value]


def _of_other_length(before: Taken, after: Taken) -> str:
    if not _values(before) or not _values(after):
        return f"not compared: it fired only {'without' if _values(before) else 'with'} the patches"
    return f"not compared: {len(before.value)} values were recorded without the patches, {len(after.value)} with them"


def _sum(norms: list[float | None]) -> float | None:
    known = [norm for norm in norms if norm is not None]
    return bounded(math.fsum(known)) if len(known) == len(norms) else None


def _unknown(note: str) -> dict[str, Any]:
    return {**dict.fromkeys(_NORMS), "note": note}
