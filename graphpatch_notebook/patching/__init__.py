"""Patching: patched runs of the user's own model, its state before and after them, and comparisons of runs.

`patch_map` checks a patch map before anything runs, `plan` sorts its patches by frame, and `context` makes them active
in a `with` block. `run` is a call in the block, on the model's own code: `apply` patches one value, and `stand_in` lets
a forward run on other tensors than its module holds. `positions` limits patches to parts of a generation, `recording`
keeps many values of one run, `replay` reuses results of frames in sweeps, and `compiled_model` writes the patches into
graphs for compilers. `model_state` has `preserved(model)`, which restores what a run changed, `comparison` compares two
runs, or calls, and `sharding` tells whether several processes run the model together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphpatch_notebook.lazy_names import lazy_names

if TYPE_CHECKING:
    from graphpatch_notebook.patching.apply import apply_to_rows
    from graphpatch_notebook.patching.captured_model import CapturedModel
    from graphpatch_notebook.patching.compiled_model import (
        CompiledModel,
        CompiledPatches,
        check_compilable,
        verified_fx_module,
    )
    from graphpatch_notebook.patching.context import PatchContext, active_patches, innermost
    from graphpatch_notebook.patching.patch_map import check_call, target_of_call
    from graphpatch_notebook.patching.plan import FUSED_MODULES, Entry, is_part_of_splice
    from graphpatch_notebook.patching.positions import (
        DECODER_TOKENS,
        TokenDims,
        caches_of,
        row_and_position_dims,
        row_dimension,
        sequence_dim,
        takes_tokens,
        token_dims,
        token_inputs,
    )
    from graphpatch_notebook.patching.recording import Recording, record
    from graphpatch_notebook.patching.replay import (
        NEVER,
        FrameNode,
        FrameRecording,
        FrameReplay,
        FrameTree,
        TensorCall,
        does_nothing,
        has_hooks,
        leaves_of,
        own_tensors,
    )
    from graphpatch_notebook.patching.run import frames_seen
    from graphpatch_notebook.patching.stand_in import (
        GENERATION_CONFIG,
        copied_config,
        generating_with,
        held_value,
        no_compile_arguments,
        tensor_at,
    )

__all__ = [
    "DECODER_TOKENS",
    "FUSED_MODULES",
    "GENERATION_CONFIG",
    "NEVER",
    "CapturedModel",
    "CompiledModel",
    "CompiledPatches",
    "Entry",
    "FrameNode",
    "FrameRecording",
    "FrameReplay",
    "FrameTree",
    "PatchContext",
    "Recording",
    "TensorCall",
    "TokenDims",
    "active_patches",
    "apply_to_rows",
    "caches_of",
    "check_call",
    "check_compilable",
    "copied_config",
    "does_nothing",
    "frames_seen",
    "generating_with",
    "has_hooks",
    "held_value",
    "innermost",
    "is_part_of_splice",
    "leaves_of",
    "no_compile_arguments",
    "own_tensors",
    "record",
    "row_and_position_dims",
    "row_dimension",
    "sequence_dim",
    "takes_tokens",
    "target_of_call",
    "tensor_at",
    "token_dims",
    "token_inputs",
    "verified_fx_module",
]

# All of them are imported when they are first asked for: rooms below import `model_state`, `comparison` and `sharding`.
_MODULES = "positions plan patch_map apply stand_in run captured_model context recording replay compiled_model".split()
__getattr__ = lazy_names(__name__, __all__, _MODULES)
