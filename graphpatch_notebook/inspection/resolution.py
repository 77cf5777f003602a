"""Resolves the text of a node path, or of a component name, to a node, or to a message that describes the problem.

"h_0.attn.output|sub_0"       "layers[0].attn.heads[*].z"   text
  -> ParsedPath                 -> Component, ...           names and dig (`paths`); path and index (`components`)
  -> Target                     -> Target, ...              frame, node, real keys and index (`resolve`, `resolve_all`)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from graphpatch_notebook.capture.records import CallNode, Frame, Node
from graphpatch_notebook.checks.dimensions import fixed_sizes
from graphpatch_notebook.components import find
from graphpatch_notebook.components.names import is_component_name, part_shape
from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.inspection.aliases import (
    answer_to_alias,
    candidate_nodes,
    component_for_alias,
    fused_attention,
)
from graphpatch_notebook.patches.slices import part_sizes, selection_problem
from graphpatch_notebook.paths import ParsedPath, call_name, format_path, nearest, parse_path
from graphpatch_notebook.values import ContainerSpec, Key, ScalarSpec, TensorSpec, ValueSpec, leaves

if TYPE_CHECKING:
    from graphpatch_notebook.components import Component


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
            if respelled := list(islice(_respelled(root, (), parsed.names, parsed.dig), 3)):
                raise Unresolvable(f"{error}; did you mean {respelled[0]!r}?", is_unknown=True) from None
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
                raise _beyond_node(root, frame, node, rest, parsed)
            return _dug(frame, node, parsed)
        frame = node.frame
    raise _stops_at_graph(root, frame, parsed)


def axes_of(root: Frame, target: Target) -> tuple[str, ...]:
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
        if text.count("|") > 1 and (meant := _with_one_bar(text)) is not None:
            hint = f"; inside a container, use dots: {meant!r}"
        raise Unresolvable(f"{error}{hint}", is_unknown=True) from None


def _with_one_bar(text: str) -> str | None:
    first, _, rest = text.partition("|")
    try:
        return str(parse_path(f"{first}|{rest.replace('|', '.')}"))
    except ValueError:
        return None


def is_patchable(node: Node) -> bool:
    """Whether a live run sees the value of `node`."""
    return node.is_live and node.kind not in ("constant", "call")


def graph_class(frame: Frame | None) -> str:
    """Returns the name of the class of the graph module of `frame`."""
    return "OpaqueGraphModule" if frame is None or frame.opaque_reason is not None else "CompiledGraphModule"


def with_nearest(root: Frame, path: str, message: str) -> str:
    """Returns the message on an unknown path with the nearest paths, unless it already names them."""
    if "nearest: " in message:
        return message
    try:
        close = nearest_paths(root, parse(path))
    except Unresolvable:
        return message
    return f"{message}; nearest: {_listed(close, 3)}" if close else message


def operation_of(root: Frame, path: str) -> str | None:
    """Returns the operation whose value is at `path`; `None` for all but operations, and for names of components."""
    try:
        target = resolve(root, path)
    except Unresolvable:
        return None
    return _operation(target)


def _operation(target: Target) -> str | None:
    return target.node.op if target.node.kind == "op" and target.component is None else None


def other_operation(root: Frame, path: str, op: str | None) -> str | None:
    """Returns a message if `path` was stored for the operation `op` and may belong to another operation now.

    Names of operations count within a module: in another version of its code `attn_weights_3` may be another value.
    """
    target = resolve(root, path)
    here = _operation(target)
    if op is None or op == here:
        return None
    names = target.frame.path
    same = [leaf for node in target.frame.nodes if node.op == op for leaf in _leaf_paths(names, node)]
    close = [near for near in nearest_paths(root, parse(path), 4) if near not in (path, *same)]
    close = [*nearest(path, same), *(near for near in close if not is_component_name(near))]
    is_now = f"is of {here}" if here else "is of no operation"
    return f"{path!r} {is_now} here, and was of {op} where it was stored; nearest: {_listed(close[:3], 3)}"


# --------------------------------------------------------------------------------------------------------------------
# Into a container


def _dug(frame: Frame, node: Node, parsed: ParsedPath) -> Target:
    if not is_patchable(node):
        raise Unresolvable(_why_not_patchable(node, format_path(parsed.names)))
    keys: list[Key] = []
    spec = node.spec
    for depth, text in enumerate(parsed.dig):
        here = format_path(parsed.names, parsed.dig[:depth])
        if not isinstance(spec, ContainerSpec):
            raise _no_container(node, spec, text, here)
        if (child := spec.child(text)) is None:
            asked = "" if depth == len(parsed.dig) - 1 else f"{str(parsed)!r}: "
            raise Unresolvable(asked + _unknown_key(node, spec, text, here), is_unknown=True)
        key, spec = child
        keys.append(key)
    path = str(parsed)
    if isinstance(spec, ContainerSpec):
        raise _stops_at_container(spec, path, parsed)
    return Target(path, frame, node, tuple(keys), parsed.dig, spec)


def _why_not_patchable(node: Node, path: str) -> str:
    if node.kind == "constant":
        return (
            f"{path!r} is a constant in the code of the model, not a value that its run computes; "
            "patch the node that uses it"
        )
    if node.kind == "input":
        return (
            f"{path!r} was the same tensor as another input when this graph was captured, and the graph in the file "
            "cannot distinguish them; patch the value where it is computed, or make a PatchableGraph of the model"
        )
    return (
        f"{path!r} is arithmetic on sizes, which happens in plain Python and cannot be patched; "
        "patch a tensor that is computed from it"
    )


def _no_container(node: Node, spec: ValueSpec, text: str, here: str) -> Unresolvable:
    if node.kind == "input" and isinstance(spec, ScalarSpec) and spec.value is None:
        return Unresolvable(
            f"{here!r} was not given in the example, so what it holds is not known: make the PatchableGraph with "
            f"example inputs that have it to patch {text!r} in it",
            is_unknown=True,
        )
    hint = f"; to patch a part of it, use {here!r} with slice=..." if isinstance(spec, TensorSpec) else ""
    return Unresolvable(
        f"{here!r} is not a container but a value: {spec}; there is no {text!r} in it{hint}", is_unknown=True
    )


def _unknown_key(node: Node, spec: ContainerSpec, text: str, here: str) -> str:
    keys = [key for key, _, _ in spec.children]
    if not keys:
        absent = (
            " in the example: make the PatchableGraph with example inputs that fill it" if node.kind == "input" else ""
        )
        return f"no {text!r} in {here!r}, which is an empty {spec.type.__name__}{absent}"
    close = nearest(text, keys, 1)
    there = f"keys: {_listed(keys, 8)}"
    best = f"nearest: {_below(here, close[0])!r}; " if len(keys) > 8 else ""
    by_name = node.kind in ("input", "output") and not issubclass(spec.type, (tuple, list))
    other = "; if other example inputs have it, make the PatchableGraph with those" if by_name else ""
    return f"no {text!r} in {here!r}, a {spec}; {best}{there}{other}"


def _below(here: str, key: str) -> str:
    parsed = parse_path(here)
    return format_path(parsed.names, (*parsed.dig, key))


def _stops_at_container(spec: ContainerSpec, path: str, parsed: ParsedPath) -> Unresolvable:
    inside = [format_path(parsed.names, (*parsed.dig, *dig)) for dig, _ in leaves(spec)]
    if not inside:
        return Unresolvable(f"{path!r} is a {spec} without a tensor or number in it: there is nothing to patch")
    return Unresolvable(f"{path!r} is a {spec}; say which value: {_listed(inside, 4)}")


# --------------------------------------------------------------------------------------------------------------------
# What the names may refer to


def _unknown_name(root: Frame, frame: Frame, parsed: ParsedPath, depth: int) -> Unresolvable:
    where = format_path(parsed.names[:depth]) if depth else "the root graph"
    respelled = list(_respelled(frame, parsed.names[:depth], parsed.names[depth:], parsed.dig))
    close = respelled or nearest_paths(root, parsed)
    hint = f"; nearest: {_listed(close, 4)}" if close else ""
    if not respelled and not any(map(is_component_name, close)):
        if (fused := fused_attention(root, parsed.names)) is not None:
            hint = "; attention is one fused call in this model" + _inside(fused)
        elif (answer := answer_to_alias(root, str(parsed))) is not None:
            hint = f"; {answer}"
    if not respelled and (idle := _idle_submodule(frame, parsed.names[depth])) is not None:
        hint = (
            f"; the submodule {idle!r} did not run on the example inputs: make the PatchableGraph with inputs that "
            "reach it"
        )
    asked = "" if depth == len(parsed.names) - 1 and not parsed.dig else f"{str(parsed)!r}: "
    return Unresolvable(f"{asked}no node {parsed.names[depth]!r} in {where}{hint}", is_unknown=True)


def _inside(fused: Frame) -> str:
    """Returns a description of the nodes inside the fused calls of a frame, for messages."""
    inside = [format_path((*fused.path, node.name)) for node in fused.nodes if node.is_inner]
    if inside:
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


def _meant_elsewhere(root: Frame, parsed: ParsedPath) -> list[str]:
    """Returns the names here for the name of a hook point of TransformerLens, or for the end of a path."""
    if (component := component_for_alias(root, str(parsed))) is not None:
        return [component]
    found = (
        (names, node) for names, node in candidate_nodes(root, parsed.names) if is_patchable(node) and _has_tensor(node)
    )
    return [path for names, node in islice(found, 3) for path in _leaf_paths(names, node)[:1]]


def _has_tensor(node: Node) -> bool:
    return any(isinstance(spec, TensorSpec) for _, spec in leaves(node.spec))


def _respelled(frame: Frame, before: tuple[str, ...], names: tuple[str, ...], dig: tuple[str, ...]) -> Iterator[str]:
    """Yields the paths for names of modules in the model's own form (`h.0.mlp` for `h_0.mlp`)."""
    if not names:
        yield from _leaf_paths(before, frame.output_node)
        return
    if node := frame.names.get(names[0]):
        if isinstance(node, CallNode):
            yield from _respelled(node.frame, (*before, names[0]), names[1:], dig)
        elif len(names) == 1:
            yield format_path((*before, names[0]), dig)
        return
    for call in frame.calls():
        attributes = tuple(str(call.target).split("."))
        if attributes == names[: len(attributes)]:
            yield from _respelled(call.frame, (*before, call.name), names[len(attributes) :], dig)


def _stops_at_graph(root: Frame, frame: Frame, parsed: ParsedPath) -> Unresolvable:
    path = format_path(parsed.names) or "<root>"
    if parsed.dig and parsed.dig[0] in frame.names:
        meant = _with_dots(root, parsed) or format_path((*parsed.names, parsed.dig[0]), parsed.dig[1:])
        return Unresolvable(
            f"{path!r} is a graph ({graph_class(frame)}): its nodes follow a dot; did you mean {meant!r}?"
        )
    output = frame.output_node
    candidates = [*_leaf_paths(parsed.names, output), *_graph_paths(frame, parsed.names)]
    if parsed.dig:
        meant = format_path((*parsed.names, output.name), parsed.dig)
        candidates = [meant] * (meant in candidates) + candidates
    such_as = f", such as {candidates[0]!r}" if candidates else ""
    # BERT has modules called `output`, so the name that users try first leads into one.
    called_output = ""
    if parsed.names[-1:] == ("output",) and frame.parent is not None:
        parents = next(iter(_leaf_paths(parsed.names[:-1], frame.parent.output_node)), None)
        caller = format_path(parsed.names[:-1]) or "the model"
        called_output = f"; what {caller} itself returns is {parents!r}" if parents else ""
    return Unresolvable(f"{path!r} is a graph ({graph_class(frame)}); patch a node in it{such_as}{called_output}")


def _with_dots(root: Frame, parsed: ParsedPath) -> str | None:
    """Returns the path with dots only, if it leads to a value: then the bar follows a graph, not a value."""
    try:
        return resolve(root, ParsedPath((*parsed.names, *parsed.dig))).path
    except Unresolvable:
        return None


def _beyond_node(root: Frame, frame: Frame, node: Node, rest: tuple[str, ...], parsed: ParsedPath) -> Unresolvable:
    names = parsed.names[: len(parsed.names) - len(rest)]
    path, meant = format_path(names), ParsedPath(names, (*rest, *parsed.dig))
    asked = str(parsed)
    try:
        hint = f"did you mean {_dug(frame, node, meant).path!r}?"
    except Unresolvable as problem:
        if isinstance(node.spec, ContainerSpec):
            hint = f"a dot does not lead into a container, write {str(meant)!r} ({problem.message})"
        else:
            close = nearest_paths(root, parsed)
            hint = f"nearest: {_listed(close, 3)}" if close else "there is nothing below it"
    return Unresolvable(f"{path!r} is a node, not a graph: no {asked!r}; {hint}", is_unknown=True)


def nearest_paths(root: Frame, path: ParsedPath, count: int = 3) -> list[str]:
    """Returns the paths in the capture that `path` may refer to, best first. They are only suggested in messages.

    Names from elsewhere, and ends of paths, come before paths of similar spelling. Frames are ranked before paths are
    compared, so that it stays fast in a model of 50,000 nodes.
    """
    meant = _meant_elsewhere(root, path) if path.names else []
    parts = (*path.names, *path.dig)
    named = ((frame.path, frame) for frame in root.walk())
    ranked = sorted(named, key=lambda item: _likeness(parts, *item), reverse=True)
    candidates = (leaf for names, frame in ranked[:10] for leaf in _graph_paths(frame, names))
    return list(dict.fromkeys([*meant, *nearest(str(path), list(islice(candidates, 1000)), count)]))[:count]


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
