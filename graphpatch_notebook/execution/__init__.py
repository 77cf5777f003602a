"""Execution: patched runs of the user's own model.

`patch_map` checks the patches before anything runs, `plan` sorts them by frame, and `context` says what is active
where. `live` runs module calls and patches their boundaries (`module_hooks`); `live_mode` patches the operations
inside; `apply` patches one value, after it has checked that the value is the one that was captured. `steps` and
`positions` limit a patch to parts of a generation. `replay/` reuses recorded results in sweeps.
"""

from __future__ import annotations

from graphpatch_notebook.execution.apply import apply_to_rows
from graphpatch_notebook.execution.captured_model import CapturedModel
from graphpatch_notebook.execution.context import PatchContext, call_patched, innermost
from graphpatch_notebook.execution.frame_watch import FrameWatch, frames_seen
from graphpatch_notebook.execution.generation_config import (
    GENERATION_CONFIG,
    compiling_nothing,
    copied_config,
    generating_with,
)
from graphpatch_notebook.execution.plain_fx import verified_fx_module
from graphpatch_notebook.execution.plan import Entry
from graphpatch_notebook.execution.positions import Restriction, restriction_of, token_inputs
from graphpatch_notebook.execution.stand_in import held_value, tensor_at
from graphpatch_notebook.execution.steps import Step, StepCount, Steps

__all__ = [
    "GENERATION_CONFIG",
    "CapturedModel",
    "Entry",
    "FrameWatch",
    "PatchContext",
    "Restriction",
    "Step",
    "StepCount",
    "Steps",
    "apply_to_rows",
    "call_patched",
    "compiling_nothing",
    "copied_config",
    "frames_seen",
    "generating_with",
    "held_value",
    "innermost",
    "restriction_of",
    "tensor_at",
    "token_inputs",
    "verified_fx_module",
]
