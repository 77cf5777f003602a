"""Names from elsewhere, and what they are here.

blocks.0.hook_resid_post, hook_embed     TransformerLens       -> the component of that kind
layers_output[3], attentions_output[0]   nnterp                -> the component of that kind
layers.3.mlp_out, block[3].mlp_out       lists as in paths     -> the component with this name
embed, resid_post                        without @, or layers  -> the component with this name
attn.probs, attn_weights                 inside attention      -> the component; or the values inside one fused call
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components import find
from graphpatch_notebook.components.operations import FUSED_ATTENTION
from graphpatch_notebook.errors import UnknownPathError

_FUSED = FUSED_ATTENTION | {"multi_head_attention_forward"}
_SCORES = {"attn_scores", "attention_scores", "scores"}
_PATTERNS = {"pattern", "probs", "attn_pattern", "attn_weights", "attn_weight", "attention_weights", "attn_probs"}
_PATTERNS |= {"attention_probs", *_SCORES}
_IN_LAYERS = {
    # TransformerLens
    **{f"hook_{part}": part for part in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")},
    **{f"attn.hook_{part}": f"attn.{part}" for part in ("q", "k", "v", "z", "pattern")},
    **{f"mlp.hook_{part}": f"mlp.{part}" for part in ("pre", "post")},
    "attn.hook_rot_q": "attn.q_rot",
    "attn.hook_rot_k": "attn.k_rot",
    "attn.hook_attn_scores": "attn.scores",
    "attn.hook_result": "attn.heads[*].result",
    "ln1.hook_normalized": "ln1",
    "ln2.hook_normalized": "ln2",
    # nnterp
    "layers_input": "resid_pre",
    "layers_output": "resid_post",
    "attentions_input": "ln1",
    "attentions_output": "attn_out",
    "attention_probabilities": "attn.pattern",
    "mlps_input": "ln2",
    "mlps_output": "mlp_out",
}
_OUTSIDE = {
    "hook_embed": "@embed",
    "hook_pos_embed": "@pos_embed",
    "ln_final.hook_normalized": "@final_norm",
    "token_embeddings": "@embed",
    **{name.removeprefix("@"): name for name in ("@embed", "@pos_embed", "@final_norm", "@logits")},
}
_IN_EVERY_LAYER = {"resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"}
_HOOKED = "with pg.patch({path: patch}): pg(*inputs)"
METHODS = {
    # TransformerLens
    "run_with_cache": "pg.record(pg.components, *inputs)",
    "run_with_hooks": _HOOKED,
    "hooks": _HOOKED,
    "add_hook": _HOOKED,
    # nnsight
    "trace": _HOOKED,
}
"""What methods of models in other tools are here."""
_HOOK = re.compile(r"blocks\.(?P<number>\d+|\*)\.(?P<part>\w+(?:\.\w+)?)")
_LISTED = re.compile(r"(?:.+\.)?(?:layers?|blocks?|h)(?:\.|\[)(?P<number>-?\d+|\*)\]?\.(?P<part>\w+(?:\.\w+)?)")
_ITEM = re.compile(r"(?P<part>\w+)\[(?P<number>-?\d+|\*)\]")


def answer_to_alias(root: Frame, text: str) -> str | None:
    """Returns the name here for a name of another tool, or why the model does not have it; `None` for other texts."""
    certain = _name_of_alias(root, text)
    name = certain or _name_like_a_component(root, text)
    if name is None:
        return None
    try:
        found = find(root).lookup(name)
    except UnknownPathError as error:
        return str(error) if certain else None
    return f"nearest: {(found[0].name if len(found) == 1 else name)!r}"


def _name_of_alias(root: Frame, text: str) -> str | None:
    """Returns the name here of what has the name `text` in another tool, whether the model has it or not."""
    found = _HOOK.fullmatch(text) or _ITEM.fullmatch(text)
    if found is None or found["part"] not in _IN_LAYERS:
        return _OUTSIDE.get(text)
    return _in_layer(root, found["number"], _IN_LAYERS[found["part"]])


def _name_like_a_component(root: Frame, text: str) -> str | None:
    """Returns the component that a text may mean: a part of attention, an item of a list of layers, or any layer's."""
    *above, last = text.split(".")
    if last in _PATTERNS:
        number = (re.findall(r"\d+", ".".join(above)) or ["0"])[-1]
        return _in_layer(root, number, "attn.scores" if last in _SCORES else "attn.pattern")
    if (listed := _LISTED.fullmatch(text)) is not None:
        return _in_layer(root, listed["number"], listed["part"])
    return _in_layer(root, "*", text) if text in _IN_EVERY_LAYER else None


def _in_layer(root: Frame, number: str, part: str) -> str:
    # With several stacks: the decoder, which is the last one, as in tools for single stacks.
    stack = (list(find(root).layers) or [""])[-1]
    return f"{stack}.layers[{number}].{part}" if stack else f"layers[{number}].{part}"


def fused_attention(root: Frame, names: Sequence[str]) -> Frame | None:
    """Returns the nearest frame whose attention is one fused call, if the names refer to values inside attention."""
    if names[-1].removeprefix("hook_") not in _PATTERNS:
        return None
    fused = [frame for frame in root.walk() if any(node.op in _FUSED for node in frame.nodes)]
    number = next((part for name in reversed(names) for part in re.findall(r"\d+", name)), "")
    there = [frame for frame in fused if number in re.findall(r"\d+", ".".join(frame.path))]
    return next(iter(there or (fused if names[-1] in _PATTERNS else [])), None)
