"""Which patches fired in a patched run, and why the others did not."""

from __future__ import annotations

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.execution.plan import Entry, RunPlan
from graphpatch_notebook.execution.steps import Steps
from graphpatch_notebook.paths import format_path


class FiredPatches:
    """Which patches fired in a run.

    Attributes:
        ids: The entries that fired (by id).
        missing: Why entries had no value to be applied to (by id).
        reached: The frames that ran, of those that are planned (by id).
        with_other_uses: The paths of probed inputs whose gradients are those of other uses of the same tensor, too.
        has_changed: Whether a patch changed a value.
    """

    __slots__ = ("has_changed", "ids", "missing", "reached", "with_other_uses")

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.missing: dict[int, str] = {}
        self.reached: set[int] = set()
        self.with_other_uses: list[str] = []
        self.has_changed = False

    def changes(self, plan: RunPlan) -> list[str]:
        """Returns in words the patches that were applied so far, except those that only look."""
        fired = (entry for frame_plan in plan.root.walk() for entry in frame_plan.entries if id(entry) in self.ids)
        return [
            f"{entry.target.path!r} ({type(patch).__name__})"
            for entry in fired
            for patch in entry.patches
            if not patch.observes_only
        ]

    def others(self, plan: RunPlan, steps: Steps | None) -> list[tuple[Entry, str]]:
        """Returns the entries that never fired in a run that is over, each with the reason in words."""
        if len(self.ids) == len(plan.entries):
            return []
        return [
            (entry, self.missing.get(id(entry)) or _held_back(entry, steps) or self._why(plan, frame_plan.frame))
            for frame_plan in plan.root.walk()
            for entry in frame_plan.entries
            if id(entry) not in self.ids
        ]

    def _why(self, plan: RunPlan, frame: Frame) -> str:
        if id(frame) in self.reached:
            return "its module ran, but did not come to this operation"
        planned = {id(frame_plan.frame) for frame_plan in plan.root.walk()}
        outermost = above = frame
        while above.parent is not None and id(above.parent) not in self.reached:
            above = above.parent
            outermost = above if id(above) in planned else outermost
        return f"{format_path(outermost.path) or 'the model'!r} was not called"


def _held_back(entry: Entry, steps: Steps | None) -> str | None:
    return None if steps is None or entry.restriction is None else steps.why_not(entry)
