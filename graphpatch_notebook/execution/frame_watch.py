"""Patched runs whose frames are all seen by somebody: a sweep records what they return, or replays it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch.nn import Module

from graphpatch_notebook.capture.forward_swap import Swaps
from graphpatch_notebook.execution.live import Run
from graphpatch_notebook.execution.module_hooks import takes_hooks
from graphpatch_notebook.interrupts import afterwards, holding


class FrameWatch(Protocol):
    """Sees every frame of a run."""

    def begin(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        """A frame begins; returns what runs in place of its `forward`, if anything does."""

    def returned(self, output: Any) -> None:
        """The `forward` of the innermost frame returned; patches on its output come after this."""

    def end(self) -> None:
        """The innermost frame is over, also after an error."""


watch: ContextVar[FrameWatch | None] = ContextVar("graphpatch_frame_watch", default=None)
"""Who sees the frames of the patched runs that begin in this context."""


@contextmanager
def frames_seen(frame_watch: FrameWatch, modules: Iterable[Module]) -> Iterator[None]:
    """Shows `frame_watch` all frames of patched runs in the block, not only those of patched modules.

    Args:
        frame_watch: Sees the frames.
        modules: The modules whose calls are seen.
    """
    swaps = Swaps()
    with afterwards(swaps.let_go), holding(watch, frame_watch):
        swaps.hold(module for module in modules if takes_hooks(module))
        yield


class WatchedRun(Run):
    """A patched run whose frames are all seen by a `FrameWatch`."""

    frame_watch: FrameWatch

    def on_forward(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        __tracebackhide__ = True
        instead = self.frame_watch.begin(module, forward, args, kwargs)
        try:
            output = super().on_forward(module, instead or forward, args, kwargs)
            self.frame_watch.returned(output)
            return output
        finally:
            self.frame_watch.end()

    def run_frame(
        self, module: Module, plan: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        __tracebackhide__ = True
        output = super().run_frame(module, plan, forward, args, kwargs)
        self.frame_watch.returned(output)  # before the patches on the output
        return output


def new_run(*args: Any) -> Run:
    """Returns a patched run, whose frames are seen where somebody in this context wants to."""
    frames = watch.get()
    if frames is None:
        return Run(*args)
    run = WatchedRun(*args)
    run.frame_watch = frames
    return run
