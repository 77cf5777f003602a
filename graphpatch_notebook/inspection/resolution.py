"""Resolves the text of a node path, or of a component name, to a node, or to a message; and `pg.nodes`, every path.

"h_0.attn.output|sub_0"       "layers[0].attn.heads[*].z"   text
  -> ParsedPath                 -> Component, ...           names and dig (`paths`); path and index (`components`)
  -> Target                     -> Target, ...              frame, node, real keys and index (`resolve`, `resolve_all`)

Names from elsewhere, and what they are here:

blocks.0.hook_resid_post, hook_embed     TransformerLens       -> the component of that kind
layers_output[3], attentions_output[0]   nnterp                -> the component of that kind
layers.3.mlp_out, block[3].mlp_out       lists as in paths     -> the component with this name
embed, resid_post                        without @, or layers  -> the component with this name
attn.probs, attn_weights                 inside attention      -> the component

A node whose value is a container has an entry for each tensor and number in it, but not for the container
(`output|sub_0.logits`).
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

import torch
from torch.nn import Module

from graphpatch_notebook.capture.records import HELD_KINDS, CallNode, Frame, Node, Site, SourceLine
from graphpatch_notebook.components import find
from graphpatch_notebook.components.dimensions import fixed_sizes
from graphpatch_notebook.components.names import part_shape
from graphpatch_notebook.errors import UnknownPathError, cut
from graphpatch_notebook.patches.slices import part_sizes, selection_problem
from graphpatch_notebook.paths import (
    ParsedPath,
    call_name,
    format_path,
    format_segment,
    is_component_name,
    nearest,
    parse_path,
    path_pattern,
    shared_parts,
)
from graphpatch_notebook.values import ContainerSpec, Key, TensorSpec, ValueSpec, leaves

if TYPE_CHECKING:
    from graphpatch_notebook.components import Component
    from graphpatch_notebook.components.components import Layout

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
    "attn.hook_result": "attn.result",
    **{f"hook_{part}_input": f"attn.{part}" for part in ("q", "k", "v")},
    "hook_attn_in": "resid_pre",
    "ln1.hook_normalized": "ln1",
    "ln2.hook_normalized": "ln2",
    "hook_in": "resid_pre",
    "hook_out": "resid_post",
    "hook_mlp_in": "resid_mid",
    "mlp.hook_in": "ln2",
    "mlp.hook_out": "mlp_out",
    "attn.hook_in": "ln1",
    "attn.hook_out": "attn_out",
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
_IN_EVERY_LAYER = {
    **{part: part for part in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")},
    **{name: f"attn.{part}" for part in ("q", "k", "v", "z") for name in (part, f"attn.{part}")},
    **{name: f"mlp.{part}" for part in ("pre", "post") for name in (part, f"mlp.{part}")},
}
_HOOKED = "with pg.patch({path: patch}): pg(*inputs)"
METHODS = {
    # TransformerLens
    "run_with_cache": "pg.record(pg.components, *inputs)",
    **dict.fromkeys(("run_with_hooks", "hooks", "add_hook", "reset_hooks"), _HOOKED),
    **{
        name: f"pg.weights.{name}"
        for name in ("W_E", "W_pos", "W_U", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_OV")
    },
    "OV": "pg.weights.W_OV",
    "QK": "pg.weights.W_QK",
    "all_composition_scores": "composition_scores(pg, kind)",
    **dict.fromkeys(
        ("logit_attrs", "decompose_resid", "get_full_resid_decomposition", "apply_ln_to_stack"),
        "direct_logit_attribution(pg, *inputs, target=token)",
    ),
    "stack_activation": "recording.stack(kind)",
    "tokens_to_residual_directions": "pg.weights.W_U[:, token]",
    "to_string": "pg.tokenizer.decode(ids)",
    "get_token_position": "pg.to_str_tokens(text).index(token)",
    "hook_dict": "pg.components",
    "cfg": "pg.config, or pg.components.layers",
    # SAELens
    **dict.fromkeys(("add_sae", "saes", "run_with_saes"), "pg.splice({path: sae})"),
    # nnsight
    "trace": _HOOKED,
}
"""What methods and attributes of models in other tools are here."""
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
        return str(error) if certain or text.rpartition(".")[2] in _PATTERNS else None
    return f"nearest: {(found[0].name if len(found) == 1 else name)!r}"


def component_of_hook(root: Frame, text: str) -> str | None:
    """Returns the component at a hook of TransformerLens, `blocks.5.hook_resid_post`; `None` for other texts."""
    return _name_of_alias(root, text) if "hook_" in text else None


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
    return _in_layer(root, "*", _IN_EVERY_LAYER[text]) if text in _IN_EVERY_LAYER else None


def _in_layer(root: Frame, number: str, part: str) -> str:
    # With several stacks: the decoder, which is the last one, as in tools for single stacks.
    stack = (list(find(root).layers) or [""])[-1]
    return f"{stack}.layers[{number}].{part}" if stack else f"layers[{number}].{part}"


@dataclass(frozen=True, slots=True)
class Target:
    """The value that a node path or a component name refers to.

    Attributes:
        path: The path as the package writes it.
        dig: The keys that lead from the node's value to the value at the path.
        dig_text: The same keys as the path writes them.
        whole: What was recorded of the value at the path. `ScalarSpec(None)` for an input that the example did not
            have.
        component: The component, if it was named by one: the value meant is the part that its `index` takes of the
            value at the path, seen in the component's axes.
    """

    path: str
    frame: Frame
    node: Node
    dig: tuple[Key, ...]
    dig_text: tuple[str, ...]
    whole: ValueSpec
    component: Component | None = None

    @property
    def text(self) -> str:
        """The name of the component, or the path."""
        return self.path if self.component is None else self.component.name

    @property
    def index(self) -> tuple[Any, ...]:
        """The selected part of the value, in the component's axes; `()` for all of it."""
        return () if self.component is None else self.component.index

    @property
    def layout(self) -> Layout | None:
        """How the value at the path is seen in the component's axes; `None` if it is seen as it is."""
        return None if self.component is None else self.component.layout

    @property
    def seen_as(self) -> tuple[Any, ...]:
        """Which value it is, which part of it, and how it is seen: of equal targets, patches get the same tensor."""
        return self.node, self.dig, self.index, self.layout

    @property
    def spec(self) -> ValueSpec:
        """The spec of the selected value."""
        if self.component is None or not (self.index or self.layout) or not isinstance(self.whole, TensorSpec):
            return self.whole
        return replace(self.whole, shape=part_shape(torch.Size(self.component.shape), self.index))

    @property
    def kept_dims(self) -> list[int]:
        """The dimensions of the value at the path that the part has, in the order of the part."""
        if self.component is None:
            return list(range(len(self.whole.shape) if isinstance(self.whole, TensorSpec) else 0))
        return [self._at_path(dim) for dim in self.component.kept_dims]

    @property
    def whole_dims(self) -> list[int]:
        """The dimensions among `kept_dims` that have the full length of the value at the path, at all sizes."""
        if self.component is None:
            return self.kept_dims
        kept = self.component.kept_dims
        return [self._at_path(dim) for dim in kept if dim >= len(self.index) or self.index[dim] == slice(None)]

    def _at_path(self, dim: int) -> int:
        """Returns the dimension of the value at the path of a dimension that is seen."""
        return dim if self.layout is None else self.layout.dims[dim]


class Unresolvable(Exception):  # noqa: N818  # no error that a user sees
    """A node path does not mean a value that can be patched (caught inside the package, which adds the context).

    All functions here that take the text of a path raise it, and so does `resolve` if a path means several values.

    Attributes:
        message: What is wrong, and what may be meant.
        output: The path of the first value that a module returns, if the path is that of a module.
    """

    def __init__(self, message: str, output: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.output = output


def resolve(root: Frame, path: str | ParsedPath) -> Target:
    """Returns the value that `path`, a node path or a component name, refers to in the capture with this root frame."""
    found = resolve_all(root, path)
    if len(found) > 1:
        raise Unresolvable(f"{path!r} means {len(found)} values; give one of them, such as {found[0].text!r}")
    return found[0]


def resolve_all(root: Frame, path: str | ParsedPath) -> list[Target]:
    """Returns all values that `path` refers to: several for a component name with several layers, heads or experts."""
    if not isinstance(path, str) or not is_component_name(path):
        if isinstance(path, str) and "]" in path and (answer := answer_to_alias(root, path) or _of_items(root, path)):
            raise Unresolvable(f"{path!r} is not a path; {answer}")
        return [_at_path(root, parse(path) if isinstance(path, str) else path)]
    if "[" not in path:  # a path may have an @
        with contextlib.suppress(Unresolvable):
            return [_at_path(root, parse(path))]
    try:
        components = find(root).lookup(path)
    except UnknownPathError as error:
        meant = _of_items(root, path)
        raise Unresolvable(f"{error}; {meant}" if meant else str(error)) from None
    return [_in_range(replace(_at_path(root, parse(one.path)), component=one)) for one in components]


def _of_items(root: Frame, path: str) -> str | None:
    """Returns what `model.layers[3].mlp` may mean, as Python writes items of lists; `None` if it means nothing."""
    if '"' in path:  # brackets in quotes are those of a name
        return None
    with contextlib.suppress(ValueError):
        parsed = parse_path(path.replace("[", ".").replace("]", ""))
        for respelled in _respelled(root, (), parsed.names, parsed.dig):
            return f"did you mean {respelled!r}?"
    return None


def _in_range(target: Target) -> Target:
    """Returns a component, if the part that its name selects exists in some run."""
    problem = None
    if target.index and target.component is not None and isinstance(target.whole, TensorSpec):
        problem = selection_problem(target.index, target.component.shape, "")
    if problem is not None:  # runs of the model find out which sizes depend on the inputs: only if the answer does
        shown = repr(target.path) if target.layout is None else "the value"
        problem = selection_problem(target.index, _seen_sizes(target), shown)
    if problem is not None:
        raise Unresolvable(f"{target.text!r}: {problem}")
    return target


def _at_path(root: Frame, parsed: ParsedPath) -> Target:
    frame = root
    for depth, name in enumerate(parsed.names):
        node = frame.names.get(name)
        if node is None:
            raise _unknown_name(root, frame, parsed, depth)
        rest = parsed.names[depth + 1 :]
        if not isinstance(node, CallNode):
            if rest:
                raise _beyond_node(root, parsed, depth + 1)
            return _dug(frame, node, parsed)
        frame = node.frame
    raise _stops_at_graph(frame, parsed)


def axes_of(root: Frame, target: Target) -> tuple[str | None, ...]:
    """Returns the names of the dimensions of the value at the path (`query`, ...), if there is a component."""
    return find(root).axes_at(target.path) if target.component is None else target.component.path_axes


def fixed_sizes_of(target: Target) -> list[int | None] | None:
    """Returns the sizes of the value, with `None` for those that depend on the inputs."""
    sizes = _seen_sizes(target)
    return None if sizes is None else part_sizes(sizes, target.index)


def _seen_sizes(target: Target) -> Sequence[int | None] | None:
    sizes = fixed_sizes(target.frame, target.node, target.whole)
    return sizes if sizes is None or target.layout is None else target.layout.sizes(sizes)


def parse(text: str) -> ParsedPath:
    """Parses `text` as `parse_path` does; `<root>`, as in the tree, is the root graph."""
    if text in ("", "<root>"):
        return ParsedPath(())
    try:
        return parse_path(text)
    except ValueError as error:
        hint = "; a position in a sequence is written output|sub_0" if "[" in text else ""
        raise Unresolvable(f"{error}{hint}") from None


def is_patchable(node: Node) -> bool:
    """Whether a live run sees the value of `node`."""
    return node.is_live and node.kind not in ("constant", "call")


def graph_class(frame: Frame | None) -> str:
    """Returns the name of the class of the graph module of `frame`."""
    return "OpaqueGraphModule" if frame is None or frame.opaque_reason is not None else "CompiledGraphModule"


def with_nearest(root: Frame, path: str, message: str) -> str:
    """Returns the message on an unknown path with the nearest paths, unless it already names them."""
    close = [] if "nearest: " in message else [near for near in nearest_paths(root, path, 4) if near != path][:3]
    return f"{message}; nearest: {_listed(close, 3)}" if close else message


# --------------------------------------------------------------------------------------------------------------------
# Into a container


def _dug(frame: Frame, node: Node, parsed: ParsedPath) -> Target:
    if not is_patchable(node):
        raise Unresolvable(f"{format_path(parsed.names)!r} is {_WHAT.get(node.kind, _SIZE)}")
    keys: list[Key] = []
    spec = node.spec
    for depth, text in enumerate(parsed.dig):
        child = spec.child(text) if isinstance(spec, ContainerSpec) else None
        if child is None:
            raise Unresolvable(_unknown_key(node, spec, parsed, depth))
        key, spec = child
        keys.append(key)
    if isinstance(spec, ContainerSpec):
        inside = [format_path(parsed.names, (*parsed.dig, *dig)) for dig, _ in leaves(spec)]
        which = f"say which value: {_listed(inside, 4)}" if inside else "there is no tensor or number in it to patch"
        raise Unresolvable(f"{str(parsed)!r} is a {spec}; {which}")
    return Target(str(parsed), frame, node, tuple(keys), parsed.dig, spec)


_WHAT = {
    "constant": "a constant in the code of the model, not a value that its run computes; patch the node that uses it",
    "input": "an input that was the same tensor as another one when this graph was captured, and the graph in the file "
    "cannot distinguish them; patch the value where it is computed, or make a PatchableGraph of the model",
    "output": "what forward hooks made of the output when this graph was captured, and the graph in the file has their "
    "operations in the caller: patch these, or make a PatchableGraph of the model",
}
_SIZE = "arithmetic on sizes, which happens in plain Python; patch a tensor that is computed from it"


def _unknown_key(node: Node, spec: ValueSpec, parsed: ParsedPath, depth: int) -> str:
    here, text = format_path(parsed.names, parsed.dig[:depth]), parsed.dig[depth]
    keys = [key for key, _, _ in spec.children] if isinstance(spec, ContainerSpec) else []
    there = f"keys: {_listed(nearest(text, keys, len(keys)) if len(keys) > 8 else keys, 8)}" if keys else "it has none"
    hint = ""
    if isinstance(spec, TensorSpec):
        hint = "; to patch a part of it, give the patch slice=..."
    elif node.kind in ("input", "output"):
        hint = "; if other example inputs have it, make the PatchableGraph with those"
    asked = "" if depth == len(parsed.dig) - 1 else f"{str(parsed)!r}: "
    return f"{asked}no {text!r} in {here!r}, which is {spec} in the example; {there}{hint}"


# --------------------------------------------------------------------------------------------------------------------
# What the names may refer to


def _unknown_name(root: Frame, frame: Frame, parsed: ParsedPath, depth: int) -> Unresolvable:
    where = format_path(parsed.names[:depth]) if depth else "the root graph"
    hint = hint_on(root, frame, parsed, depth)
    asked = "" if depth == len(parsed.names) - 1 and not parsed.dig else f"{str(parsed)!r}: "
    return Unresolvable(f"{asked}no node {cut(repr(parsed.names[depth]))} in {where}{hint}")


def hint_on(root: Frame, frame: Frame, parsed: ParsedPath, depth: int) -> str:
    """Returns what an error adds on a path of which the name at `depth` is not in `frame`: what it may mean."""
    if respelled := list(_respelled(frame, parsed.names[:depth], parsed.names[depth:], parsed.dig)):
        return f"; nearest: {_listed(respelled, 4)}"
    before, name = parsed.names[:depth], parsed.names[depth]
    if (weight := frame.names.get(f"parametrizations_{name}")) is not None:
        return f"; nearest: {format_path((*before, weight.name, 'output'))!r}"
    path, module = _submodule(frame, name)
    if module is not None:
        held = ".".join((path, *parsed.names[depth + 1 :]))
        if used := [node.name for node in frame.nodes if node.kind in HELD_KINDS and node.target == held]:
            return f"; nearest: {format_path((*before, used[0]))!r}"
        called = [inner for inner in root.walk() if inner.module is module]
        rest = parsed.names[depth + 1 :]
        if meant := [text for inner in called for text in _respelled(inner, inner.path, rest, parsed.dig)]:
            return f"; nearest: {_listed(meant, 4)}"
        if id(module) in root.capture.unseen:
            return (
                f"; the submodule {path!r} ran in another thread or inside of an operation (an autograd.Function), "
                "where calls have no names: patch what its caller does with the result"
            )
        if not called and not any(inner.module in module.modules() for inner in root.walk()):
            return (
                f"; the submodule {path!r} did not run on the example inputs: make the PatchableGraph with inputs that "
                "reach it"
            )
    answer = answer_to_alias(root, str(parsed))
    if answer is not None:
        return f"; {answer}"
    close = nearest_paths(root, str(parsed))
    return f"; nearest: {_listed(close, 4)}" if close else ""


def _submodule(frame: Frame, name: str) -> tuple[str, Module | None]:
    """Returns the submodule that `name` refers to by its attribute path in the module of a frame, with that path."""
    found = ((path, module) for path, module in frame.module.named_modules() if path)
    return next(((path, module) for path, module in found if name in (path, call_name(path))), ("", None))


def _respelled(frame: Frame, before: tuple[str, ...], names: tuple[str, ...], dig: tuple[str, ...]) -> Iterator[str]:
    """Yields the paths for names of modules in the model's own form (`h.0.mlp` for `h_0.mlp`)."""
    if not names:
        yield from _leaf_paths(before, frame.output_node)
    elif node := frame.names.get(names[0]):
        if isinstance(node, CallNode):
            yield from _respelled(node.frame, (*before, names[0]), names[1:], dig)
        elif len(names) == 1:
            yield format_path((*before, names[0]), dig)
    else:
        for call in frame.calls():
            attributes = tuple(str(call.target).split("."))
            if attributes == names[: len(attributes)]:
                yield from _respelled(call.frame, (*before, call.name), names[len(attributes) :], dig)


def _stops_at_graph(frame: Frame, parsed: ParsedPath) -> Unresolvable:
    path = format_path(parsed.names) or "<root>"
    outputs = _leaf_paths(parsed.names, frame.output_node)
    candidates = [*outputs, *(path for node in _shown(frame) for path in _leaf_paths(parsed.names, node))]
    such_as = f", such as {candidates[0]!r}" if candidates else ""
    output = outputs[0] if outputs and not parsed.dig else None
    return Unresolvable(f"{path!r} is a graph ({graph_class(frame)}); patch a node in it{such_as}", output)


def _beyond_node(root: Frame, parsed: ParsedPath, depth: int) -> Unresolvable:
    close = _listed(nearest_paths(root, str(parsed)), 3)
    return Unresolvable(
        f"{format_path(parsed.names[:depth])!r} is a node, not a graph: no {str(parsed)!r}; nearest: {close}"
    )


def nearest_paths(root: Frame, path: str, count: int = 3) -> list[str]:
    """Returns the paths in the capture that `path` may refer to, best first. They are only suggested in messages."""
    asked = re.sub(r"\.(\d+)(?=\.|$)", r"_\1", path)
    shared, names, ends = shared_parts(asked), {*re.split(r"[.|]", asked), "output"}, (f".{asked}", f".{asked}.output")
    ending: list[str] = []
    # Most of 50,000 nodes share as much with the path as the next node in their frame, and need no text.
    ranked: defaultdict[float, list[tuple[Frame, Node, tuple[str, ...]]]] = defaultdict(list)
    for frame in root.walk():
        above = frame.path
        usual = ranked[shared((*above, "\n"))]  # of a node with another name
        for node in _shown(frame):
            if node.name in names or type(node.spec) is not TensorSpec:
                for dig, _ in leaves(node.spec):
                    ranked[shared((*above, node.name, *dig))].append((frame, node, dig))
                if f".{format_path((*above, node.name))}".endswith(ends):
                    ending += _leaf_paths(above, node)
            elif len(usual) < _RANKED:
                usual.append((frame, node, ()))
    best = [each for _, equal in sorted(ranked.items(), reverse=True) for each in equal][:_RANKED]
    candidates = [format_path((*frame.path, node.name), dig) for frame, node, dig in best]
    return list(dict.fromkeys([*ending[:count], *nearest(asked, candidates, count)]))[:count]


_RANKED = 200
"""How many paths are compared letter by letter."""


def _shown(frame: Frame) -> list[Node]:
    """Returns the nodes in the graph of `frame` itself that can be patched; sizes only if there are no others."""
    own = [node for node in frame.nodes if is_patchable(node)]
    return [node for node in own if not node.is_size] or own


def _leaf_paths(names: tuple[str, ...], node: Node) -> list[str]:
    return [format_path((*names, node.name), dig) for dig, _ in leaves(node.spec)]


def _listed(items: Sequence[str], most: int) -> str:
    more = f", ... ({len(items) - most} more)" if len(items) > most else ""
    return ", ".join(map(repr, items[:most])) + more


T = TypeVar("T")
NodeKind: TypeAlias = Literal["input", "parameter", "buffer", "attribute", "op", "output"]


@dataclass(frozen=True, slots=True)
class NodeMeta:
    """Facts about a value that can be patched, from the run on the example inputs.

    Attributes:
        path: The node path, as `pg.patch` takes it.
        name: The name of the node: the last one in the path before `|`.
        kind: The kind: `input`, `parameter`, `buffer`, `attribute` (another tensor of the module), `op`, `output`.
        op: The name of the torch function (`linear`, `mul`); for other kinds that of the input, parameter, ...
        shape: The recorded shape; `None` for numbers. So are `dtype` and `device`.
        dtype: The recorded dtype.
        device: The recorded device.
        value: The value, as the tree shows it: `Tensor(3, 2)`, `int(5)`.
        frame_path: The path of the graph that the node is in; empty for the root.
        module_class: The name of the class of the user's module that this is the graph of.
        is_size: Whether the value only carries sizes; the tree hides it.
        is_mutated_later: Whether the model writes into this tensor after the node.
        is_view_filled_later: Whether that tensor is a view, so that a patch of it is cut off from its base.
        opens: The function that runs step by step in calls in which this value is patched or probed, as it is one of
            its steps: the result then equals that of the function within rounding. `None` for all other values.
        placement: Of a model that is sharded over processes: `replicated`, `split along dimension 2`, or `refused:`
            with the reason why the value cannot be patched. Empty for all other models.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> node = PatchableGraph(torch.nn.Linear(2, 3), torch.ones(1, 2)).nodes["linear"]
        >>> node.op, node.kind, tuple(node.shape)
        ('linear', 'op', (1, 3))
    """

    path: str
    name: str
    kind: NodeKind
    op: str
    shape: torch.Size | None
    dtype: torch.dtype | None
    device: torch.device | None
    value: str
    frame_path: str
    module_class: str
    is_size: bool
    is_mutated_later: bool
    is_view_filled_later: bool
    opens: str | None
    placement: str
    _site: Site | None = field(repr=False, compare=False)

    @property
    def source_lines(self) -> tuple[SourceLine, ...]:
        """The lines of the user's code that made the value, outermost first; empty where no line did (inputs, ...)."""
        return () if self._site is None else tuple(self._site.source_lines())


class NodeMap(Mapping[str, NodeMeta]):
    """Every path of a capture that can be patched, with its `NodeMeta`, in order of execution. Read-only.

    The nodes of a submodule follow at the place of its call. A look-up takes the same time in any model.

    Args:
        root: The frame of the whole model.

    Raises:
        UnknownPathError: (on look-up) The path does not exist, or does not lead to a single value; a `KeyError`.

    Example:
        >>> from graphpatch_notebook.values import TensorSpec
        >>> spec = TensorSpec(torch.Size([3, 2]), torch.float32, torch.device("cpu"))
        >>> node = Node(kind="input", op="x", target="x", spec=spec, name="x")
        >>> nodes = NodeMap(Frame(torch.nn.Identity(), "", None, nodes=[node], names={"x": node}))
        >>> list(nodes), nodes["x"].value
        (['x'], 'Tensor(3, 2)')
    """

    def __init__(self, root: Frame) -> None:
        self._root = root
        self._metas: dict[str, NodeMeta] = {}
        self._built: tuple[NodeRows, dict[str, int]] | None = None
        self._kept: dict[Callable[[NodeMap], Any], Any] = {}

    @property
    def root(self) -> Frame:
        """The frame of the whole model."""
        return self._root

    def __getitem__(self, path: object) -> NodeMeta:
        text = str(path)
        meta = self._metas.get(text)
        if meta is None:
            row = self._built[1].get(text) if self._built is not None else None
            meta = self._found(text) if self._built is None or row is None else self._built[0].meta(row)
            meta = self._metas[text] = self._metas.setdefault(meta.path, meta)
        return meta

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows()[1])

    def __len__(self) -> int:
        return len(self._rows()[1])

    def __contains__(self, path: object) -> bool:
        return str(path) in self._rows()[1]

    def matching(self, pattern: str) -> list[str]:
        """Returns the paths that match a pattern, in order of execution; empty if none does.

        Args:
            pattern: A path in which `*` is any text within a name, and `**` any text: `h_*.mlp.output`, `**.attn.*`.

        Example:
            >>> from graphpatch_notebook import PatchableGraph
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
            >>> PatchableGraph(model, torch.ones(1, 2)).nodes.matching("sub_*.output")
            ['sub_0.output', 'sub_1.output']
        """
        wanted = path_pattern(pattern)
        return [path for path in self if wanted.fullmatch(path)]

    def __repr__(self) -> str:
        few = list(self)[:3]
        shown = ", ".join(f"{path!r}: {self[path].value}" for path in few) + (", ..." if len(self) > len(few) else "")
        return f"<{type(self).__name__} of {type(self._root.module).__name__}, {len(self):,} nodes: {{{shown}}}>"

    def _rows(self) -> tuple[NodeRows, dict[str, int]]:
        if self._built is None:
            rows = NodeRows(self._root)
            self._built = (rows, {path: row for row, path in enumerate(rows.paths)})
        return self._built

    def _found(self, text: str) -> NodeMeta:
        # By walking down: a look-up of one path does not wait for a list of all.
        try:
            target = resolve(self._root, text)
        except Unresolvable as problem:
            raise UnknownPathError(problem.message) from None
        if all(dig for dig, _ in leaves(target.spec)):
            raise UnknownPathError(
                f"the value recorded at {target.path!r} is neither a tensor nor a number: it has no entry"
            )
        return _meta(target.path, target.frame, target.node, target.spec)


_lock = threading.RLock()  # the browser computes values in another thread than the cells


def kept_for(nodes: NodeMap, make: Callable[[NodeMap], T]) -> T:
    """Returns `make(nodes)`, computed at first use. After an edit of the graphs, there is a new `NodeMap`."""
    with _lock:
        if make not in nodes._kept:
            nodes._kept[make] = make(nodes)
        return cast(T, nodes._kept[make])


class NodeRows:
    """The paths of a capture that can be patched, with their nodes, their frames, and the specs of the values.

    Attributes:
        paths: The paths.
        nodes: The node of each.
        frames: The frame of each.
        specs: The spec of each value.
    """

    def __init__(self, root: Frame, *, with_sizes: bool = True) -> None:
        rows = [row for row in _rows(root, "") if with_sizes or not row[1].is_size]
        self.paths: list[str] = [path for path, _, _, _ in rows]
        self.nodes: list[Node] = [node for _, node, _, _ in rows]
        self.frames: list[Frame] = [frame for _, _, frame, _ in rows]
        self.specs: list[ValueSpec] = [spec for _, _, _, spec in rows]

    def meta(self, row: int) -> NodeMeta:
        """Returns the facts about the node in a row."""
        return _meta(self.paths[row], self.frames[row], self.nodes[row], self.specs[row])


def _rows(frame: Frame, prefix: str) -> Iterator[tuple[str, Node, Frame, ValueSpec]]:
    for node in frame.nodes_and_splices:
        if isinstance(node, CallNode):
            yield from _rows(node.frame, f"{prefix}{format_segment(node.name)}.")
        elif is_patchable(node):
            for path, leaf in _leaves(prefix + format_segment(node.name), node.spec).items():
                yield path, node, frame, leaf


def _leaves(path: str, spec: ValueSpec) -> dict[str, ValueSpec]:
    """Returns the leaves of the value at `path`, by their own paths."""
    inside: dict[str, ValueSpec] = {}
    for dig, leaf in leaves(spec):
        # If two keys have the same text (1 and "1"), a path refers to the first.
        inside.setdefault(f"{path}|{'.'.join(map(format_segment, dig))}" if dig else path, leaf)
    return inside


def _meta(path: str, frame: Frame, node: Node, spec: ValueSpec) -> NodeMeta:
    return NodeMeta(
        path=path,
        name=node.name,
        kind=cast(NodeKind, node.kind),
        op=node.op,
        shape=getattr(spec, "shape", None),
        dtype=getattr(spec, "dtype", None),
        device=getattr(spec, "device", None),
        value=str(spec),
        frame_path=format_path(frame.path),
        module_class=type(frame.module).__name__,
        is_size=node.is_size,
        is_mutated_later=node.is_mutated_later,
        is_view_filled_later=node.is_view_filled_later,
        opens=None if node.composite is None else node.composite.name,
        placement=getattr(spec, "placement", ""),
        _site=node.site,
    )
