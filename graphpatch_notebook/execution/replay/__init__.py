"""Recorded results of module calls, which later runs reuse instead of computing them again.

`frame_results` holds the frames of a model that were seen in runs, as a `FrameTree`, and a `FrameReplay`, which skips
frames with a known result. A `FrameRecording` (`frame_recording`) records what each frame returns and changes
(`frame_effects`). `execution.frames_seen` gives one of the two to a run.
"""

from __future__ import annotations

from graphpatch_notebook.execution.replay.frame_effects import (
    all_modules,
    has_hooks,
    leaves_of,
    storage_of,
    tensors_among,
)
from graphpatch_notebook.execution.replay.frame_recording import FrameFlow, FrameRecording
from graphpatch_notebook.execution.replay.frame_results import (
    NEVER,
    FrameNode,
    FrameReplay,
    FrameTree,
    SeenFrames,
    own_tensors,
    tensors_in,
)

__all__ = [
    "NEVER",
    "FrameFlow",
    "FrameNode",
    "FrameRecording",
    "FrameReplay",
    "FrameTree",
    "SeenFrames",
    "all_modules",
    "has_hooks",
    "leaves_of",
    "own_tensors",
    "storage_of",
    "tensors_among",
    "tensors_in",
]
