"""What the Python stack tells a patched run about who called a swapped `forward`."""

from __future__ import annotations

import sys
from types import FrameType

import torch.utils.checkpoint
from torch.nn import Module

from graphpatch_notebook.capture import call_sites

_MODULE_FILE = Module.__call__.__code__.co_filename
_MODULE_CALLERS = {"_call_impl", "inner", "_slow_forward"}
_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


def is_called_by_module_call() -> bool:
    """Whether the swapped `forward` was called by `Module.__call__`, which runs the module's hooks afterwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _MODULE_FILE:
            return code.co_name in _MODULE_CALLERS
        if not (call_sites.is_own(code) or call_sites.is_offloading_code(code) or call_sites.is_collecting_code(code)):
            return False
        frame = frame.f_back
    return False


def forwards_may_be_wrapped() -> bool:
    """Whether models may put something around the forwards of their modules for a run, which hooks lie outside of.

    Transformers does before 5.2, to collect hidden states: they must not hold what a patch makes of them afterwards.
    """
    return hasattr(sys.modules.get("transformers.utils.generic"), "OutputRecorder")


def is_in_checkpoint() -> bool:
    """Whether activation checkpointing stands between the calling frame and this one: it will run again in backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not call_sites.is_invoke(frame.f_code):
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False
