"""Where a value of a capture comes from, and where it is used, from the records, frame by frame.

A value is a node and the keys that lead into it (a `Ref`). The flow continues inside a call: the input of a frame is
the argument that its caller gave, and the value of a call is the output of its frame.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphpatch_notebook.capture.inputs import inputs_of_call, passed_on
from graphpatch_notebook.capture.records import CallNode, ElementNode, Frame, Node, Ref, at_keys, refs_in
from graphpatch_notebook.inspection.node_path import Location
from graphpatch_notebook.values import ContainerSpec, Key


def sources(location: Location) -> list[Ref]:
    """Returns the values that the value at `location` is computed from; for a graph, the arguments of its call.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2))
        >>> root = Location.of_root(pg.nodes.root)
        >>> [source.node.name for source in sources(root.below("sub_0", "input"))]
        ['input']
    """
    node = location.node
    if node is None:
        return []
    keys = keys_of(location)
    if location.graph is None and node.kind in ("input", "output"):
        given = passed_on(node, location.frame)
        return _unique(refs_in(None if given is None else at_keys(given[0], keys)))
    if isinstance(node, ElementNode):
        return [Ref(node.whole, (node.position,))]
    return _unique(node.sources)


def users(location: Location) -> list[Ref]:
    """Returns the values that are computed from the value at `location`; for a graph, from the result of its call."""
    node, frame = location.node, location.frame
    if node is None:
        return []
    keys = keys_of(location)
    if location.graph is None and node.kind == "output":
        if frame.call is None or frame.parent is None:
            return []
        node, frame = frame.call, frame.parent
    return _unique(user for other in frame.nodes for user in _uses(other, frame, node, keys))


def keys_of(location: Location) -> tuple[Key, ...]:
    """Returns the keys that lead from the value of the node of `location` to the value there."""
    keys: list[Key] = []
    spec = location.node.spec if location.node is not None else None
    for text in location.dig:
        found = spec.child(text) if isinstance(spec, ContainerSpec) else None
        if found is None:
            break
        keys.append(found[0])
        spec = found[1]
    return tuple(keys)


def _uses(other: Node, frame: Frame, node: Node, keys: tuple[Key, ...]) -> Iterator[Ref]:
    """Yields what `other` makes of the value, if it uses it."""
    if other.kind == "output":
        if any(_is_in(ref, node, keys) for ref in refs_in(frame.output)):
            yield Ref(other)
    elif isinstance(other, ElementNode):
        base, position = other.whole, other.position
        if base is node and (not keys or keys[0] == position):
            yield Ref(other)
    elif any(_is_in(ref, node, keys) for ref in other.sources):
        inputs = _inputs_given(other, node, keys) if isinstance(other, CallNode) else []
        yield from inputs or [Ref(other)]


def _inputs_given(call: CallNode, node: Node, keys: tuple[Key, ...]) -> list[Ref]:
    """Returns the inputs of the called frame that receive the value."""
    bound = inputs_of_call(call.frame, call.args, call.kwargs)
    return [
        Ref(given)
        for given in call.frame.inputs()
        if any(_is_in(ref, node, keys) for ref in refs_in(bound.get(str(given.target))))
    ]


def _is_in(ref: Ref, node: Node, keys: tuple[Key, ...]) -> bool:
    """Whether `ref` refers to the value, to a part of it, or to a container of it."""
    shared = min(len(ref.dig), len(keys))
    return ref.node is node and ref.dig[:shared] == keys[:shared]


def _unique(refs: Iterator[Ref]) -> list[Ref]:
    """Returns each value once, in order."""
    found: dict[tuple[int, str], Ref] = {}
    for ref in refs:
        found.setdefault((id(ref.node), repr(ref.dig)), ref)
    return list(found.values())
