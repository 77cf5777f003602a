"""Calls beyond those of the example: nothing stands on them, and where that may be a surprise the user is told.

It may be one where *all* that was captured of a repeated call is patched: "each call" is probably what was meant. Where
only some are, these and no others are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn import Module

from graphpatch_notebook.capture.records import SourceLine
from graphpatch_notebook.errors import DataLoopWarning, RepeatedCallWarning
from graphpatch_notebook.execution.plan import Entry, FramePlan
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.warning_places import level_of_caller, warn, warn_each_time


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


def warn_of_data_loops(found: Mapping[SourceLine, Sequence[str]], is_by_user: bool) -> None:
    """Warns that some paths mean turns of loops over data: each time for a block of the user's, once for an experiment.

    Args:
        found: The paths, by the head of the loop.
        is_by_user: Whether the user's code enters the context, not an experiment that enters many.
    """
    for loop, paths in found.items():
        message = (
            f"{_listed(paths)}: computed in a loop over data ({loop.text or loop}). Such a path means one turn of the "
            "loop (the third expert that was chosen, say): on other inputs it may be for something else, or not there. "
            "Patch what is outside of the loop, or decide by the values in a CustomPatch"
        )
        if is_by_user:
            warn_each_time(message, DataLoopWarning)
        else:
            warn(message, DataLoopWarning, stacklevel=level_of_caller())


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(map(repr, paths)) if len(paths) <= 3 else f"{paths[0]!r} to {paths[-1]!r}"


def _warn(paths: Sequence[str], what: str, verb: str, count: int) -> None:
    times = "once" if count == 1 else f"{count} times"
    warn_each_time(
        f"{_listed(paths)}: {what} was {verb} {times} when it was captured, but is {verb} "
        "more often in this run: there is no patch on the calls after that; make the PatchableGraph with inputs that "
        "come to it as often to patch each call",
        RepeatedCallWarning,
    )
