"""Recorded results of module calls, which later runs reuse instead of computing them again.

A `FrameTree` has the frames of a model that were seen in runs. `Recording` notes what each frame returns and changes,
and which of them can be left out; `Replay` leaves them out. A run is given one of these by `execution.frames_seen`.
"""

from __future__ import annotations

from graphpatch_notebook.execution.replay.frame_effects import (
    PLAIN,
    all_modules,
    has_hooks,
    leaves_of,
    storage_of,
    tensors_among,
)
from graphpatch_notebook.execution.replay.frame_recording import FrameFlow, Recording
from graphpatch_notebook.execution.replay.frame_results import (
    NEVER,
    FrameNode,
    FrameStack,
    FrameTree,
    Replay,
    own_tensors,
    tensors_in,
)

__all__ = [
    "NEVER",
    "PLAIN",
    "FrameFlow",
    "FrameNode",
    "FrameStack",
    "FrameTree",
    "Recording",
    "Replay",
    "all_modules",
    "has_hooks",
    "leaves_of",
    "own_tensors",
    "storage_of",
    "tensors_among",
    "tensors_in",
]
