"""How far a capture is: a count for whoever wants to show it."""

from __future__ import annotations

from contextvars import ContextVar


class FrameCount:
    """Counts the frames that captures in its context are done with; may be read from another thread meanwhile.

    Attributes:
        frames: How many there are so far.
    """

    def __init__(self) -> None:
        self.frames = 0


frame_count: ContextVar[FrameCount | None] = ContextVar("graphpatch_frame_count", default=None)
"""Looked at once for each capture: set it before."""
