"""Reports on the patches of a run: patches that did not fire, and repeated calls without a patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn import Module

from graphpatch_notebook.capture.records import Frame, SourceLine
from graphpatch_notebook.errors import (
    DataLoopWarning,
    GraphPatchError,
    PatchNotFiredError,
    PatchNotFiredWarning,
    RepeatedCallWarning,
    SharedGradientWarning,
)
from graphpatch_notebook.execution.plan import Entry, FramePlan, RunPlan
from graphpatch_notebook.execution.steps import GenerationSteps, Unreached
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.warning_places import level_of_caller, warn, warn_each_time

_STOP_HANDLED = (
    "the forward was to end at {path!r}, but the model handled that as an error and went on (`except:` or `except "
    "BaseException:`), so that it returned another value: probe the value, or write `except Exception:` in the model"
)


class FiredPatches:
    """Which patches fired in a run."""

    __slots__ = ("ended_at", "has_changed", "has_stopped", "ids", "missing", "reached", "skipped", "with_other_uses")

    def __init__(self) -> None:
        self.ids: set[int] = set()  # the entries that fired (by id)
        self.missing: dict[int, str] = {}  # why entries did not find a value to patch (by id)
        self.reached: set[int] = set()  # the planned frames that ran (by id)
        self.skipped: set[int] = set()  # the frames that were skipped (by id)
        # The paths of probed inputs whose gradients include those of other uses of the tensor.
        self.with_other_uses: list[str] = []
        self.has_changed = False  # whether a patch changed a value
        self.has_stopped = False  # whether a patch ended the run
        self.ended_at = ""  # the path at which a patch ended the forward; the model may have gone on

    def changes(self, plan: RunPlan) -> list[str]:
        """Returns descriptions of the patches that were applied so far, except for those that only observe."""
        fired = (entry for frame_plan in plan.root.walk() for entry in frame_plan.entries if id(entry) in self.ids)
        return [
            f"{entry.target.path!r} ({type(patch).__name__})"
            for entry in fired
            for patch in entry.patches
            if not patch.observes_only
        ]

    def check_end(self) -> None:
        """Raises a `GraphPatchError` if the model went on after a patch had ended the forward."""
        if self.ended_at and not self.has_stopped:
            raise GraphPatchError(_STOP_HANDLED.format(path=self.ended_at))

    def others(self, plan: RunPlan, needed: Sequence[Entry], steps: GenerationSteps | None) -> list[tuple[Entry, str]]:
        """Returns the needed entries that never fired in a run that has ended, with the reasons."""
        if len(self.ids) == len(plan.entries):
            return []
        ids = set(map(id, needed))
        return [
            (entry, self.missing.get(id(entry)) or (steps and steps.why_not(entry)) or self._why(plan, planned.frame))
            for planned in plan.root.walk()
            for entry in planned.entries
            if id(entry) in ids and id(entry) not in self.ids and not entry.is_source
        ]

    def _why(self, plan: RunPlan, frame: Frame) -> str:
        if self.has_stopped:
            return "the run was stopped before it"
        skipped = next((above for above in frame.frames_above() if id(above) in self.skipped), None)
        if skipped is not None:
            return f"{format_path(skipped.path)!r} was skipped"
        if id(frame) in self.reached:
            return "its module ran, but did not come to this operation"
        planned = {id(frame_plan.frame) for frame_plan in plan.root.walk()}
        outermost = above = frame
        while above.parent is not None and id(above.parent) not in self.reached:
            above = above.parent
            outermost = above if id(above) in planned else outermost
        return f"{format_path(outermost.path) or 'the model'!r} was not called"


class Reports:
    """Reports patches of a context that do not fire: each message once, as an error if `is_strict`."""

    def __init__(self, *, is_strict: bool, is_quiet: bool) -> None:
        self.is_strict = is_strict
        self.is_quiet = is_quiet
        self.repetitions = Repetitions()  # reports calls beyond those of the example
        self._given: set[str] = set()

    def unfired(self, unfired: Sequence[tuple[Entry, str]], where: str) -> None:
        """Reports patches that never fired, each with the reason."""
        reasons = "; ".join(f"{entry.target.text!r}: {why}" for entry, why in unfired)
        self.give(f"{count_of_patches(unfired)} never fired {where}: {reasons}", [entry for entry, _ in unfired])

    def unreached(self, unreached: Unreached, where: str) -> None:
        """Reports patches whose steps or positions were not reached."""
        if unreached.idle:
            self.unfired(unreached.idle, where)
        if missed := unreached.missed:
            listed = "; ".join(f"{entry.target.text!r}: {what}" for entry, what in missed)
            self.give(
                f"{count_of_patches(missed)} fired only at some of the listed steps or positions {where}: {listed}",
                [entry for entry, _ in missed],
            )

    def give(self, message: str, entries: Sequence[Entry]) -> None:
        """Gives one message about patches."""
        if self.is_quiet:
            return
        if self.is_strict:
            error = PatchNotFiredError(message)
            error.paths = tuple(entry.target.text for entry in entries)
            raise error
        if message not in self._given:
            self._given.add(message)
            warn_each_time(message, PatchNotFiredWarning)


def count_of_patches(unfired: Sequence[object]) -> str:
    """Returns "a patch" or "n patches"."""
    return "a patch" if len(unfired) == 1 else f"{len(unfired)} patches"


def warn_of_other_uses(paths: Sequence[str]) -> None:
    """Warns that the gradients of probed inputs also contain those of other uses of the tensor."""
    shown = ", ".join(map(repr, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    warn(
        f"the gradients of probed inputs include those of other uses of the same tensors: {shown}. Their modules are "
        "given one tensor as several inputs, or in a list or dict, or run without gradients; probe what they compute",
        SharedGradientWarning,
        stacklevel=level_of_caller(),
    )


class Repetitions:
    """Warns about calls that the example did not have, which are not patched: once for each module and call site.

    Only if *all* captured calls are patched: then the user probably meant each call.
    """

    def __init__(self) -> None:
        self._told: set[int] = set()

    def of_module(self, module: Module, index: int, by_index: Mapping[int, FramePlan] | None) -> None:
        """Checks a call of `module` without a plan, in a frame where other calls of it have one."""
        if not by_index or id(module) in self._told:
            return
        call = by_index[min(by_index)].frame.call
        if call is None or index < call.call_count or sum(p.is_needed for p in by_index.values()) < call.call_count:
            return
        self._told.add(id(module))
        paths = [format_path(by_index[i].frame.path) for i in sorted(by_index)]
        _warn(paths, f"this {type(module).__name__}", "called", call.call_count)

    def of_op(self, occurrence: int, by_occurrence: Mapping[int, Sequence[Entry]]) -> None:
        """Checks an op without entries, at a call site where other occurrences have some."""
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
    """Warns of paths that name iterations of loops over data, by the head of the loop.

    Each time if the user's code enters the context (`is_by_user`), and once for an experiment.
    """
    for loop, paths in found.items():
        message = (
            f"{_listed(paths)}: computed in a loop over data ({loop.text or loop}). Such a path names one iteration of "
            "the loop (the third expert that was chosen, say): on other inputs it may be for something else, or "
            "missing. Patch a value outside of the loop, or decide by the values in a CustomPatch"
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
        "more often in this run: the calls after that are not patched; to patch each call, make the PatchableGraph "
        "with inputs that need as many calls",
        RepeatedCallWarning,
    )
