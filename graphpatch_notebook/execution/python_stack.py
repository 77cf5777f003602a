"""What the Python stack tells a patched run about who called a swapped `forward`."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch.utils.checkpoint
from torch.nn import Module

from graphpatch_notebook.capture import call_sites

_MODULE_FILE = Module.__call__.__code__.co_filename
_MODULE_CALLERS = {"_call_impl", "inner", "_slow_forward"}
_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
_COLLECTING_FILE = os.path.join("transformers", "utils", "generic.py")


def is_called_by_module_call() -> bool:
    """Whether the swapped `forward` was called by `Module.__call__`, which runs the module's hooks afterwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _MODULE_FILE:
            return code.co_name in _MODULE_CALLERS
        if not (call_sites.is_own(code) or call_sites.is_offloading_code(code) or _is_collecting(code)):
            return False
        frame = frame.f_back
    return False


def collects_around_forwards(model: Module) -> bool:
    """Whether a module in `model` puts functions around the forwards of others, for a run, that collect what they give.

    Those of transformers 4 do (`check_model_inputs`), where 5 has hooks: so these see it before any hook of a user's.
    Told by: tests/laws/test_law_03_edits.py, with transformers 4.
    """
    if not hasattr(sys.modules.get("transformers.utils.generic"), "OutputRecorder"):  # lies elsewhere in version 5
        return False
    forwards = {type(module).forward for module in model.modules()}
    codes = (getattr(forward, "__code__", None) for forward in forwards)
    return any(code is not None and code.co_filename.endswith(_COLLECTING_FILE) for code in codes)


def _is_collecting(code: CodeType) -> bool:
    return code.co_name == "wrapped_forward" and code.co_filename.endswith(_COLLECTING_FILE)


def is_in_checkpoint() -> bool:
    """Whether activation checkpointing stands between the calling frame and this one: it will run again in backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not call_sites.is_invoke(frame.f_code):
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False
