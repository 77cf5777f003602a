"""Patching: patched runs of the user's own model, its state before and after them, and comparisons of runs.

`plan` checks a patch map before anything runs, and sorts its patches by frame; `context` makes them active in a `with`
block. `run` is a call in the block, on the model's own code, in which it patches values; `stand_in` lets a forward run
on other tensors than its module holds. `positions` limits patches to parts of a generation, `recording` keeps many
values of one run, `splices` adds modules that the model does not have, and `compiled_model` writes the patches into
graphs for compilers. `model_state` has `preserved(model)`, which restores what a run changed, and compares two runs, or
calls; it also tells whether several processes run the model together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphpatch_notebook.lazy_names import lazy_names

if TYPE_CHECKING:
    from graphpatch_notebook.patching.compiled_model import (
        CompiledModel,
        CompiledPatches,
        check_compilable,
        verified_fx_module,
    )
    from graphpatch_notebook.patching.context import CapturedModel, PatchContext, active_patches, innermost
    from graphpatch_notebook.patching.plan import FUSED_MODULES, Entry, check_call, target_of_call
    from graphpatch_notebook.patching.positions import (
        DECODER_TOKENS,
        TokenDims,
        caches_of,
        input_of,
        mask_of,
        padded_end,
        row_and_position_dims,
        row_dimension,
        sequence_dim,
        takes_tokens,
        token_dims,
        token_inputs,
    )
    from graphpatch_notebook.patching.recording import Recording, record
    from graphpatch_notebook.patching.run import apply_to_rows, frames_seen
    from graphpatch_notebook.patching.splices import CrossLayerDecoder, CrossLayerEncoder, SaeSplice
    from graphpatch_notebook.patching.stand_in import (
        GENERATION_CONFIG,
        generating_with,
        held_value,
        tensor_at,
    )

__all__ = [
    "DECODER_TOKENS",
    "FUSED_MODULES",
    "GENERATION_CONFIG",
    "CapturedModel",
    "CompiledModel",
    "CompiledPatches",
    "CrossLayerDecoder",
    "CrossLayerEncoder",
    "Entry",
    "PatchContext",
    "Recording",
    "SaeSplice",
    "TokenDims",
    "active_patches",
    "apply_to_rows",
    "caches_of",
    "check_call",
    "check_compilable",
    "frames_seen",
    "generating_with",
    "held_value",
    "innermost",
    "input_of",
    "mask_of",
    "padded_end",
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

# All of them are imported when they are first asked for: rooms below import `model_state`.
_MODULES = "positions plan stand_in run context recording splices compiled_model".split()
__getattr__ = lazy_names(__name__, __all__, _MODULES)
