"""Names from elsewhere: names of other tools, and the last part of a path.

blocks.0.hook_resid_post, hook_embed     TransformerLens       -> the component of that kind
layers_output[3], attentions_output[0]   nnterp                -> the component of that kind
layers.3.mlp_out, block[3].mlp_out       lists as in paths     -> the component with this name
embed, resid_post                        without @, or layers  -> the component with this name
attn.probs, attn_weights                 inside attention      -> the component; or the values inside one fused call
wte, mlp, attn.c_proj, layers.1.mlp      the end of paths      -> what these modules return
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.components import find
from graphpatch_notebook.components.operations import FUSED_ATTENTION
from graphpatch_notebook.errors import UnknownPathError

Found = tuple[tuple[str, ...], Node]
"""A node, and the names that lead to its frame."""

_FUSED = FUSED_ATTENTION | {"multi_head_attention_forward"}
_SCORES = {"attn_scores", "attention_scores", "scores"}
_PATTERNS = {"pattern", "probs", "attn_pattern", "attn_weights", "attn_weight", "attention_weights", "attn_probs"}
_PATTERNS |= {"attention_probs", *_SCORES}
INSIDE_ATTENTION = frozenset(_PATTERNS)
"""Names of the scores and the pattern."""

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


def component_for_alias(root: Frame, text: str) -> str | None:
    """Returns the name of the component that has the name `text` in another tool, if the model has it."""
    name = _name_of_alias(root, text) or _name_inside_attention(root, text)
    if name is None and (listed := _LISTED.fullmatch(text)) is not None:
        name = _in_layer(root, listed["number"], listed["part"])
    if name is None and text in _IN_EVERY_LAYER:
        name = _in_layer(root, "*", text)
    try:
        found = [] if name is None else find(root).lookup(name)
    except UnknownPathError:
        return None
    return found[0].name if len(found) == 1 else name


def answer_to_alias(root: Frame, text: str) -> str | None:
    """Returns the name here for a name of another tool, or why the model does not have it; `None` for other texts."""
    if (component := component_for_alias(root, text)) is not None:
        return f"nearest: {component!r}"
    name = _name_of_alias(root, text)
    try:
        return None if name is None else str(find(root).lookup(name))
    except UnknownPathError as error:
        return str(error)


def _name_of_alias(root: Frame, text: str) -> str | None:
    """Returns the name here of what has the name `text` in another tool, whether the model has it or not."""
    found = _HOOK.fullmatch(text) or _ITEM.fullmatch(text)
    if found is None or found["part"] not in _IN_LAYERS:
        return _OUTSIDE.get(text)
    return _in_layer(root, found["number"], _IN_LAYERS[found["part"]])


def _name_inside_attention(root: Frame, text: str) -> str | None:
    *above, last = text.split(".")
    if last not in _PATTERNS:
        return None
    number = (re.findall(r"\d+", ".".join(above)) or ["0"])[-1]
    return _in_layer(root, number, "attn.scores" if last in _SCORES else "attn.pattern")


def _in_layer(root: Frame, number: str, part: str) -> str:
    # With several stacks: the decoder, which is the last one, as in tools for single stacks.
    stack = (list(find(root).layers) or [""])[-1]
    return f"{stack}.layers[{number}].{part}" if stack else f"layers[{number}].{part}"


def candidate_nodes(root: Frame, names: Sequence[str]) -> Iterator[Found]:
    """Yields nodes that unknown names may refer to, in order of execution."""
    asked = _joined(names)
    whole: list[Found] = []
    inside: list[Found] = []
    for frame in root.walk():
        if frame.parent is None:
            continue
        if _ends_with(frame, asked):
            whole.append((frame.path, frame.output_node))
        if (node := frame.names.get(asked[-1])) is not None and node.kind != "call":
            is_there = len(asked) == 1 or _ends_with(frame, asked[:-1])
            inside += [(frame.path, node)] if is_there and not node.is_size else []
    yield from whole or inside


def fused_attention(root: Frame, names: Sequence[str]) -> Frame | None:
    """Returns the nearest frame whose attention is one fused call, if the names refer to values inside attention."""
    if names[-1].removeprefix("hook_") not in _PATTERNS:
        return None
    fused = [frame for frame in root.walk() if any(node.op in _FUSED for node in frame.nodes)]
    number = next((part for name in reversed(names) for part in re.findall(r"\d+", name)), "")
    there = [frame for frame in fused if number in re.findall(r"\d+", ".".join(frame.path))]
    return next(iter(there or (fused if names[-1] in _PATTERNS else [])), None)


def _joined(names: Sequence[str]) -> list[str]:
    """Returns names with numbers as calls have them: `h.0` as `h_0`."""
    joined: list[str] = []
    for name in names:
        if name.isdigit() and joined:
            joined[-1] += f"_{name}"
        else:
            joined.append(name)
    return joined


def _ends_with(frame: Frame, asked: Sequence[str]) -> bool:
    inner: Frame | None = frame
    for name in reversed(asked):
        if inner is None or inner.call is None:
            return False
        if name not in (inner.call.name, str(inner.call.target), str(inner.call.target).replace(".", "_")):
            return False
        inner = inner.parent
    return True
