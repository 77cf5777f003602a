"""Calls beyond those of the example: nothing stands on them, and where that may be a surprise the user is told.

It may be one where *all* that was captured of a repeated call is patched: "each call" is probably what was meant. Where
only some are, these and no others are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn import Module

from graphpatch_notebook.errors import RepeatedCallWarning
from graphpatch_notebook.execution.plan import Entry, FramePlan
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.warning_places import warn_each_time


class Repetitions:
    """What was told in one patch context: each module and each call site once."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def of_module(self, module: Module, index: int, by_index: Mapping[int, FramePlan] | None) -> None:
        """Looks at a call of `module` that has no plan, in a frame where other calls of it do."""
        if not by_index or id(module) in self._told:
            return
        call = by_index[min(by_index)].frame.call
        if call is None or index < call.call_count or sum(p.is_needed for p in by_index.values()) < call.call_count:
            return
        self._told.add(id(module))
        paths = [format_path(by_index[i].frame.path) for i in sorted(by_index)]
        _warn(paths, f"this {type(module).__name__}", "called", call.call_count)

    def of_op(self, occurrence: int, by_occurrence: Mapping[int, Sequence[Entry]]) -> None:
        """Looks at an op without entries, at a call site where other occurrences have some."""
        if id(by_occurrence) in self._told or not all(by_occurrence.values()):  # some only of the steps inside
            return
        target = by_occurrence[min(by_occurrence)][0].target
        count = 1 + max(n.occurrence for n in target.frame.nodes if n.site is target.node.site)
        if occurrence < count or len(by_occurrence) < count:
            return
        self._told.add(id(by_occurrence))
        paths = [entries[0].target.path for _, entries in sorted(by_occurrence.items())]
        _warn(paths, f"this {target.node.op}", "reached", count)


def _warn(paths: Sequence[str], what: str, verb: str, count: int) -> None:
    shown = ", ".join(map(repr, paths)) if len(paths) <= 3 else f"{paths[0]!r} to {paths[-1]!r}"
    warn_each_time(
        f"{shown}: {what} was {verb} {'once' if count == 1 else f'{count} times'} when it was captured, but is {verb} "
        "more often in this run: there is no patch on the calls after that; make the PatchableGraph with inputs that "
        "come to it as often to patch each call",
        RepeatedCallWarning,
    )
