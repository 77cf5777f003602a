"""Resolves the text of a node path, or of a component name, to a node, or to a message that describes the problem.

"h_0.attn.output|sub_0"       "layers[0].attn.heads[*].z"   text
  -> ParsedPath                 -> Component, ...           names and dig (`paths`); path and index (`components`)
  -> Target                     -> Target, ...              frame, node, real keys and index (`resolve`, `resolve_all`)

Names from elsewhere, and what they are here:

blocks.0.hook_resid_post, hook_embed     TransformerLens       -> the component of that kind
layers_output[3], attentions_output[0]   nnterp                -> the component of that kind
layers.3.mlp_out, block[3].mlp_out       lists as in paths     -> the component with this name
embed, resid_post                        without @, or layers  -> the component with this name
attn.probs, attn_weights                 inside attention      -> the component; or the values inside one fused call
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from graphpatch_notebook.capture.records import CallNode, Frame, Node
from graphpatch_notebook.components import find
from graphpatch_notebook.components.dimensions import fixed_sizes
from graphpatch_notebook.components.names import is_component_name, part_shape
from graphpatch_notebook.components.operations import FUSED_ATTENTION
from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.patches.slices import part_sizes, selection_problem
from graphpatch_notebook.paths import ParsedPath, call_name, format_path, nearest, parse_path
from graphpatch_notebook.values import ContainerSpec, Key, TensorSpec, ValueSpec, leaves

if TYPE_CHECKING:
    from graphpatch_notebook.components import Component

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


@dataclass(frozen=True, slots=True)
class Target:
    """The value that a node path or a component name refers to.

    Attributes:
        path: The path as the package writes it.
        dig: The keys that lead from the node's value to the value at the path.
        dig_text: The same keys as the path writes them.
        whole: What was recorded of the value at the path. `ScalarSpec(None)` for an input that the example did not
            have.
        component: The component, if it was named by one: the value meant is the part of the value at the path that its
            `index` takes.
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
        """The selected part of the value at the path; `()` for all of it."""
        return () if self.component is None else self.component.index

    @property
    def spec(self) -> ValueSpec:
        """The spec of the selected value."""
        if not self.index or not isinstance(self.whole, TensorSpec):
            return self.whole
        return replace(self.whole, shape=part_shape(self.whole.shape, self.index))

    @property
    def kept_dims(self) -> list[int]:
        """The dimensions of the value at the path that the part has, in order."""
        if self.component is not None:
            return self.component.kept_dims
        return list(range(len(self.whole.shape) if isinstance(self.whole, TensorSpec) else 0))

    @property
    def whole_dims(self) -> list[int]:
        """The dimensions among `kept_dims` that have the full length of the value at the path, at all sizes."""
        return [dim for dim in self.kept_dims if dim >= len(self.index) or self.index[dim] == slice(None)]


class Unresolvable(Exception):  # noqa: N818  # no error that a user sees
    """A node path does not mean a value that can be patched (caught inside the package, which adds the context).

    All functions here that take the text of a path raise it, and so does `resolve` if a path means several values.

    Attributes:
        message: What is wrong, and what may be meant.
        is_unknown: Whether the path does not exist at all (not: leads to a graph, a container, a constant).
    """

    def __init__(self, message: str, *, is_unknown: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.is_unknown = is_unknown


def resolve(root: Frame, path: str | ParsedPath) -> Target:
    """Returns the value that `path`, a node path or a component name, refers to in the capture with this root frame."""
    found = resolve_all(root, path)
    if len(found) > 1:
        raise Unresolvable(f"{path!r} means {len(found)} values; give one of them, such as {found[0].text!r}")
    return found[0]


def resolve_all(root: Frame, path: str | ParsedPath) -> list[Target]:
    """Returns all values that `path` refers to: several for a component name with several layers, heads or experts."""
    if not isinstance(path, str) or not is_component_name(path):
        if isinstance(path, str) and "]" in path and (answer := answer_to_alias(root, path)) is not None:
            raise Unresolvable(f"{path!r} is not a path; {answer}", is_unknown=True)
        return [_at_path(root, parse(path) if isinstance(path, str) else path)]
    if "[" not in path:  # a path may have an @
        with contextlib.suppress(Unresolvable):
            return [_at_path(root, parse(path))]
    try:
        components = find(root).lookup(path)
    except UnknownPathError as error:
        items = path.replace("[", ".").replace("]", "")  # `model.layers[3].mlp`, as Python writes items of lists
        with contextlib.suppress(ValueError):
            parsed = parse_path(items)
            for respelled in _respelled(root, (), parsed.names, parsed.dig):
                raise Unresolvable(f"{error}; did you mean {respelled!r}?", is_unknown=True) from None
        raise Unresolvable(str(error), is_unknown=True) from None
    return [_in_range(replace(_at_path(root, parse(one.path)), component=one)) for one in components]


def _in_range(target: Target) -> Target:
    """Returns a component, if the part that its name selects exists in some run."""
    problem = None
    if target.index and isinstance(target.whole, TensorSpec):
        problem = selection_problem(target.index, target.whole.shape, "")
    if problem is not None:  # runs of the model find out which sizes depend on the inputs: only if the answer does
        sizes = fixed_sizes(target.frame, target.node, target.whole)
        problem = selection_problem(target.index, sizes, repr(target.path))
    if problem is not None:
        raise Unresolvable(f"{target.text!r}: {problem}", is_unknown=True)
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
                raise _beyond_node(root, node, parsed, depth + 1)
            return _dug(frame, node, parsed)
        frame = node.frame
    raise _stops_at_graph(root, frame, parsed)


def axes_of(root: Frame, target: Target) -> tuple[str | None, ...]:
    """Returns the names of the dimensions of the value at the path (`query`, ...), if there is a component."""
    return find(root).axes_at(target.path) if target.component is None else target.component.axes


def fixed_sizes_of(target: Target) -> list[int | None] | None:
    """Returns the sizes of the value, with `None` for those that depend on the inputs."""
    sizes = fixed_sizes(target.frame, target.node, target.whole)
    return None if sizes is None else part_sizes(sizes, target.index)


def parse(text: str) -> ParsedPath:
    """Parses `text` as `parse_path` does; `<root>`, as in the tree, is the root graph."""
    if text in ("", "<root>"):
        return ParsedPath(())
    try:
        return parse_path(text)
    except ValueError as error:
        hint = "; a position in a sequence is written output|sub_0" if "[" in text else ""
        raise Unresolvable(f"{error}{hint}", is_unknown=True) from None


def is_patchable(node: Node) -> bool:
    """Whether a live run sees the value of `node`."""
    return node.is_live and node.kind not in ("constant", "call")


def graph_class(frame: Frame | None) -> str:
    """Returns the name of the class of the graph module of `frame`."""
    return "OpaqueGraphModule" if frame is None or frame.opaque_reason is not None else "CompiledGraphModule"


def with_nearest(root: Frame, path: str, message: str) -> str:
    """Returns the message on an unknown path with the nearest paths, unless it already names them."""
    close = [] if "nearest: " in message else nearest_paths(root, path)
    return f"{message}; nearest: {_listed(close, 3)}" if close else message


def operation_of(root: Frame, path: str) -> str | None:
    """Returns the operation whose value is at `path`; `None` for all but operations, and for names of components."""
    with contextlib.suppress(Unresolvable):
        target = resolve(root, path)
        return target.node.op if target.node.kind == "op" and target.component is None else None
    return None


def other_operation(root: Frame, path: str, op: str | None) -> str | None:
    """Returns a message if `path` was stored for the operation `op` and may belong to another operation now.

    Names of operations count within a module: in another version of its code `attn_weights_3` may be another value.
    """
    here = operation_of(root, path)
    if op is None or op == here:
        return None
    frame = resolve(root, path).frame
    same = [leaf for node in frame.nodes if node.op == op for leaf in _leaf_paths(frame.path, node)]
    close = nearest(path, same) or [near for near in nearest_paths(root, path, 4) if near != path]
    is_now = f"is of {here}" if here else "is of no operation"
    return f"{path!r} {is_now} here, and was of {op} where it was stored; nearest: {_listed(close[:3], 3)}"


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
            raise Unresolvable(_unknown_key(node, spec, parsed, depth), is_unknown=True)
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
    return Unresolvable(f"{asked}no node {parsed.names[depth]!r} in {where}{hint}", is_unknown=True)


def hint_on(root: Frame, frame: Frame, parsed: ParsedPath, depth: int) -> str:
    """Returns what an error adds on a path of which the name at `depth` is not in `frame`: what it may mean."""
    if respelled := list(_respelled(frame, parsed.names[:depth], parsed.names[depth:], parsed.dig)):
        return f"; nearest: {_listed(respelled, 4)}"
    if (idle := _idle_submodule(frame, parsed.names[depth])) is not None:
        return (
            f"; the submodule {idle!r} did not run on the example inputs: make the PatchableGraph with inputs that "
            "reach it"
        )
    answer = answer_to_alias(root, str(parsed))
    fused = fused_attention(root, parsed.names)
    if fused is not None and (answer is None or not answer.startswith("nearest")):
        return f"; attention is one fused call in this model{_inside(fused)}"
    if answer is not None:
        return f"; {answer}"
    close = nearest_paths(root, str(parsed))
    return f"; nearest: {_listed(close, 4)}" if close else ""


def _inside(fused: Frame) -> str:
    """Returns a description of the nodes inside the fused calls of a frame, for messages."""
    if inside := [format_path((*fused.path, node.name)) for node in fused.nodes if node.is_inner]:
        return f": the values inside are {_listed(inside, 4)}"
    if fused.has_own_graph:
        return ", which shows no weights where its graph runs (edited, or from a file): capture the model to see them"
    options = fused.capture.options
    is_off = options is not None and options.decompose is not None
    return ", which shows no weights" + (": leave decompose out of the ExtractionOptions to see them" if is_off else "")


def _idle_submodule(frame: Frame, name: str) -> str | None:
    """Returns the attribute path of the submodule that `name` refers to, if it is never called."""
    called = {str(call.target) for call in frame.calls()}
    for path, _ in frame.module.named_modules():
        if path and name in (path, call_name(path)):
            return None if any(f"{target}.".startswith(f"{path}.") for target in called) else path
    return None


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


def _stops_at_graph(root: Frame, frame: Frame, parsed: ParsedPath) -> Unresolvable:
    path = format_path(parsed.names) or "<root>"
    if parsed.dig:  # the bar follows a graph, not a value
        with contextlib.suppress(Unresolvable):
            meant = _at_path(root, ParsedPath((*parsed.names, *parsed.dig))).path
            return Unresolvable(f"{path!r} is a graph: its nodes follow a dot; did you mean {meant!r}?")
    candidates = [*_leaf_paths(parsed.names, frame.output_node), *_graph_paths(frame, parsed.names)]
    such_as = f", such as {candidates[0]!r}" if candidates else ""
    # BERT has modules called `output`, so the name that users try first leads into one.
    called_output = ""
    if parsed.names[-1:] == ("output",) and frame.parent is not None:
        returned = _leaf_paths(parsed.names[:-1], frame.parent.output_node)[:1]
        called_output = (
            f"; what {format_path(parsed.names[:-1]) or 'the model'} itself returns is {_listed(returned, 1)}"
        )
    return Unresolvable(f"{path!r} is a graph ({graph_class(frame)}); patch a node in it{such_as}{called_output}")


def _beyond_node(root: Frame, node: Node, parsed: ParsedPath, depth: int) -> Unresolvable:
    path, meant = format_path(parsed.names[:depth]), ParsedPath(parsed.names[:depth], parsed.names[depth:] + parsed.dig)
    hint = f"nearest: {_listed(nearest_paths(root, str(parsed)), 3)}"
    if isinstance(node.spec, ContainerSpec):
        hint = f"did you mean {str(meant)!r}? A dot does not lead into a container"
    return Unresolvable(f"{path!r} is a node, not a graph: no {str(parsed)!r}; {hint}", is_unknown=True)


def nearest_paths(root: Frame, path: str, count: int = 3) -> list[str]:
    """Returns the paths in the capture that `path` may refer to, best first. They are only suggested in messages.

    Paths that end with it come before paths of similar spelling. Frames are ranked before paths are compared, so that
    it stays fast in a model of 50,000 nodes.
    """
    parts = re.split(r"[.|]", path)
    named = ((frame.path, frame) for frame in root.walk())
    ranked = sorted(named, key=lambda item: _likeness(parts, *item), reverse=True)
    candidates = (leaf for names, frame in ranked[:10] for leaf in _graph_paths(frame, names))
    similar = nearest(path, list(islice(candidates, 1000)), count)
    return list(dict.fromkeys([*islice(_ending_with(root, path), count), *similar]))[:count]


def _ending_with(root: Frame, path: str) -> Iterator[str]:
    """Yields the values of modules, or else the values, whose path ends with `path`: `h.1.mlp`, `query_states`."""
    asked = "." + re.sub(r"\.(\d+)(?=\.|$)", r"_\1", path)
    last = asked.rpartition(".")[2]
    ends = [(frame.path, ".".join(("", *frame.path)), frame) for frame in root.walk()]
    whole = [_leaf_paths(names, frame.output_node)[:1] for names, text, frame in ends if text.endswith(asked)]
    inside = (
        _leaf_paths(names, node)[:1]
        for names, text, frame in ends
        if (node := frame.names.get(last)) is not None and is_patchable(node) and not node.is_size
        if frame.parent is not None and f"{text}.{last}".endswith(asked)
    )
    return (leaf for found in (whole or inside) for leaf in found)


def _likeness(parts: Sequence[str], names: tuple[str, ...], frame: Frame) -> float:
    leading = next(
        (i for i, (a, b) in enumerate(zip(parts, names, strict=False)) if a != b), min(len(parts), len(names))
    )
    has_last = bool(parts) and parts[-1] in frame.names
    return len(set(parts) & set(names)) + leading + has_last - 0.1 * max(0, len(names) - len(parts) + 1)


def _graph_paths(frame: Frame, names: tuple[str, ...]) -> Iterator[str]:
    """Yields the paths of the values in the graph of `frame` itself; sizes only if there are no other values."""
    own = [node for node in frame.nodes if is_patchable(node)]
    shown = [node for node in own if not node.is_size] or own
    return (path for node in shown for path in _leaf_paths(names, node))


def _leaf_paths(names: tuple[str, ...], node: Node) -> list[str]:
    return [format_path((*names, node.name), dig) for dig, _ in leaves(node.spec)]


def _listed(items: Sequence[str], most: int) -> str:
    more = f", ... ({len(items) - most} more)" if len(items) > most else ""
    return ", ".join(map(repr, items[:most])) + more
