"""The patches that never fired during a patched run, each with the reason in words."""

from __future__ import annotations

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.execution.live import Run
from graphpatch_notebook.execution.plan import Entry
from graphpatch_notebook.paths import format_path


def unfired_entries(run: Run) -> list[tuple[Entry, str]]:
    """Returns the entries that never fired in a run that is over, each with the reason in words."""
    if len(run.fired) == run.plan.count:
        return []
    return [
        (entry, run.missing.get(id(entry)) or _held_back(run, entry) or _why(run, plan.frame))
        for plan in run.plan.walk()
        for entry in plan.entries
        if id(entry) not in run.fired
    ]


def _held_back(run: Run, entry: Entry) -> str | None:
    return None if run.steps is None or entry.restriction is None else run.steps.why_not(entry)


def _why(run: Run, frame: Frame) -> str:
    if id(frame) in run.reached:
        return "its module ran, but did not come to this operation"
    watched = {id(plan.frame) for plan in run.plan.walk()}
    outermost = above = frame
    while above.parent is not None and id(above.parent) not in run.reached:
        above = above.parent
        outermost = above if id(above) in watched else outermost
    return f"{format_path(outermost.path) or 'the model'!r} was not called"
