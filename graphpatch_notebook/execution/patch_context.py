"""`PatchContext`: what `PatchableGraph.patch` returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from graphpatch_notebook.capture.call_sites import is_own
from graphpatch_notebook.errors import PatchNotFiredWarning
from graphpatch_notebook.execution.captured_model import CapturedModel
from graphpatch_notebook.execution.context import ActiveContext, enter, entered_by, leave, report_idle, take_back
from graphpatch_notebook.execution.patch_map import Snapshot
from graphpatch_notebook.execution.plan import Prepared
from graphpatch_notebook.execution.repetitions import warn_of_data_loops
from graphpatch_notebook.interrupts import Block, discards_value
from graphpatch_notebook.warning_places import warn_each_time


class PatchContext:
    """What `PatchableGraph.patch` returns: enter it with `with`; may be entered again, also by several threads.

    Attributes:
        after_call: Called after each call of the `PatchableGraph` in the context that returns, in its thread, before
            the caller has the result; not for calls that such a call makes. Set it before the context is entered.
        is_quiet: Whether patches that never fire are not reported. Set it before the context is entered.
    """

    after_call: Callable[[], None] | None = None
    is_quiet = False
    _was_entered = False

    def __init__(self, captured: CapturedModel, patch_map: Mapping[Any, Any], *, is_strict: bool = False) -> None:
        self._captured = captured
        self._patch_map = patch_map
        self._is_strict = is_strict
        self._known: tuple[Snapshot, Prepared] | None = None

    def quiet(self) -> PatchContext:
        """Returns this context, which will not report patches that never fire."""
        self.is_quiet = True
        return self

    def __enter__(self) -> None:
        __tracebackhide__ = True
        self._was_entered = True
        before = entered_by(self)
        try:
            context = enter(self._captured, self._prepared(), is_strict=self._is_strict, origin=self)
            context.block = Block.entered_by(sys._getframe(1))
            context.is_quiet = self.is_quiet
            if self.after_call is not None:
                context.after_call = (*context.after_call, self.after_call)
            if context.data_loops and not self.is_quiet:
                warn_of_data_loops(context.data_loops, is_by_user=not is_own(sys._getframe(1).f_code))
        except BaseException:
            self._leave_all_but(before)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            context = self._leave_innermost()
        except BaseException:  # an interrupt that came in between
            self._leave_innermost()
            raise
        if kind is None and context is not None:
            report_idle(context)

    def __repr__(self) -> str:
        if entered_by(self):
            return "<PatchContext, active>"
        return "<PatchContext, not active: its patches hold inside of a block, `with pg.patch(...):`>"

    def __del__(self) -> None:
        """Tells of a line that is `pg.patch(...)` and no more: its value is dropped at once."""
        if self._was_entered:
            return
        frame = sys._getframe().f_back
        if frame is not None and discards_value(frame):
            warn_each_time(
                "pg.patch(...) patches nothing by itself: call the model inside of `with pg.patch(...):`",
                PatchNotFiredWarning,
            )

    def _prepared(self) -> Prepared:
        """Returns what is needed to run with the patch map: the same as before, unless it or a graph has changed."""
        __tracebackhide__ = True
        known = self._known
        if known is None or not self._captured.is_current(known[1]) or not known[0].is_current(self._patch_map):
            entries = self._captured.entries_of(self._patch_map)
            known = self._known = Snapshot(self._patch_map), self._captured.prepare(entries)
        return known[1]

    def _leave_innermost(self) -> ActiveContext | None:
        context = next(reversed(entered_by(self)), None)
        if context is not None:
            leave(context)
        return context

    def _leave_all_but(self, before: tuple[ActiveContext, ...]) -> None:
        """Takes back what was entered before an interrupt came."""
        for context in entered_by(self):
            if context not in before:
                take_back(context)
