"""Whether a name still means the same kind of value: other sizes are fine where they follow the inputs' sizes.

Sizes are followed from the inputs through the recorded nodes by their *values*: a dimension of an op's result follows
the inputs if its size is one that follows the inputs among the op's arguments, and is fixed if it is the size of a
fixed dimension (of a weight, say). A dimension that is neither is taken to follow the inputs wherever any of the
arguments does: this check may pass too much, and is only asked when a shape differs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from graphpatch_notebook.capture.containers import map_leaves
from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import Frame, Node, Ref, Structure
from graphpatch_notebook.resolution import Target
from graphpatch_notebook.values import ContainerSpec, ObjectSpec, TensorSpec, ValueSpec, describe

_VIEWS = {"view", "reshape", "flatten", "unflatten"}
_WITH_WEIGHTS = {"linear", "addmm"}
_PERMUTATIONS = {"transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "T", "mT", "t"}


Inputs: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"
"""The arguments of a `forward`, positional and by keyword."""


def shape_problem(target: Target, shape: torch.Size) -> str | None:
    """Returns in words how `shape` differs from what was captured, or `None` where it may differ like that."""
    if not isinstance(target.spec, TensorSpec) or target.spec.shape == shape:
        return None
    captured = target.spec.shape
    if len(captured) != len(shape):
        dimensions = "1 dimension" if len(captured) == 1 else f"{len(captured)} dimensions"
        return f"it had {dimensions} when it was captured, and has {len(shape)} now"
    following = _of(target.frame, target.node, target.spec)
    for position, (then, now) in enumerate(zip(captured, shape, strict=True)):
        # A dimension of size one is broadcast by the model's own code.
        if then not in {now, 1} and then not in following:
            return f"dimension {position} does not follow the inputs' sizes, yet was {then} and is {now} now"
    return None


def fixed_sizes(target: Target) -> tuple[int | None, ...] | None:
    """Returns the sizes of a value that are the same for all inputs, `None` for the others; `None` for no tensor."""
    if not isinstance(target.spec, TensorSpec):
        return None
    following = _of(target.frame, target.node, target.spec)
    return tuple(None if size in following or size == 1 else size for size in target.spec.shape)


def problem_beside_cache(target: Target, shape: torch.Size, inputs: Inputs) -> str | None:
    """Returns in words how `shape` differs, in a frame that is given an object such as a cache; `None` where it may.

    There, one step may do under a name what another one does not: pack the heads that share keys into the sequence,
    say. So a size may differ only if it was that of an input whose size differs too, or such a size times another.
    """
    frame = target.frame
    given = [describe(given_input(frame.parameters, node.target, *inputs)) for node in frame.inputs()]
    if not isinstance(target.spec, TensorSpec) or not any(map(_holds_object, given)):
        return None
    sizes = [pair for node, spec in zip(frame.inputs(), given, strict=True) for pair in _size_pairs(node.spec, spec)]
    changed = {then for then, now in sizes if then not in {now, 1}}
    explained = changed | {one * other for one in changed for other, _ in sizes}
    for position, (then, now) in enumerate(zip(target.spec.shape, shape, strict=False)):
        if then not in {now, 1} and then not in explained:
            return f"dimension {position} was {then} and is {now}, though no input's size changed from {then}"
    return None


def _holds_object(spec: ValueSpec) -> bool:
    if isinstance(spec, ContainerSpec):
        return any(_holds_object(child) for _, _, child in spec.children)
    return isinstance(spec, ObjectSpec)


def _size_pairs(then: ValueSpec, now: ValueSpec) -> Iterator[tuple[int, int]]:
    if isinstance(then, TensorSpec) and isinstance(now, TensorSpec):
        yield from zip(then.shape, now.shape, strict=False)
    elif isinstance(then, ContainerSpec) and isinstance(now, ContainerSpec):
        by_name = {text: child for text, _, child in now.children}
        for text, _, child in then.children:
            if text in by_name:
                yield from _size_pairs(child, by_name[text])


def _of(frame: Frame, node: Node, spec: TensorSpec) -> set[int]:
    """Returns the sizes of `spec`, the value of `node`, that follow the inputs."""
    root = frame
    while root.parent is not None:
        root = root.parent
    with _lock:
        # From the root down: what a frame is given is known once its caller is known up to the call.
        _frame(root)
        known = frame.following_sizes or {}
        return known.get(id(node), set(spec.shape))


_lock = threading.Lock()


def _frame(frame: Frame) -> dict[int, set[int]]:
    known = frame.following_sizes
    if known is None:
        known = frame.following_sizes = {}
        for node in frame.nodes:
            known[id(node)] = _node(frame, node, known)
    return known


def _node(frame: Frame, node: Node, sizes: dict[int, set[int]]) -> set[int]:
    own = sizes_of(node.spec)
    if node.kind == "input":
        return _input(frame, own)
    if node.kind in ("parameter", "buffer", "attribute"):
        return set()
    if node.kind == "constant":  # of unknown origin: what comes out of `torch.vmap` follows the inputs, say
        return own & set().union(*sizes.values())
    if frame.opaque_reason is not None or frame.has_own_graph:  # what an op is made of is not recorded
        return own
    source = node.element[0] if node.element is not None else node
    arguments = [*_refs(frame.output if node.kind == "output" else source.args), *_refs(source.kwargs)]
    if node.kind == "output":
        return own & _union(sizes, arguments) if arguments else own
    if node.kind == "call":
        return _called(node, own)
    return _followed(node, own, arguments, sizes)


def _input(frame: Frame, own: set[int]) -> set[int]:
    if frame.parent is None or frame.call is None:
        return own
    # What the caller hands over: any of it, as arguments are not matched to parameters here.
    outside = frame.parent.following_sizes or {}
    arguments = [*_refs(frame.call.args), *_refs(frame.call.kwargs)]
    return own & _union(outside, arguments) if arguments else own


def _called(node: Node, own: set[int]) -> set[int]:
    if node.frame is None or not node.frame.nodes or node.frame.opaque_reason is not None:
        return own
    return own & _frame(node.frame).get(id(node.frame.output_node), own)


def _followed(node: Node, own: set[int], arguments: list[Ref], sizes: dict[int, set[int]]) -> set[int]:
    following = _union(sizes, arguments)
    if not following:
        return set()
    if node.op in _VIEWS and isinstance(node.spec, TensorSpec) and arguments:
        return _through_view(node, following)
    has_weight = node.op in _WITH_WEIGHTS and any(ref.node.kind == "parameter" for ref in arguments)
    if has_weight and isinstance(node.spec, TensorSpec):
        return following & set(node.spec.shape[:-1])  # the last dimension is the weight's
    fixed = _repeated(own, following, arguments) if node.op == "repeat_interleave" else set()
    if node.op == "expand":  # what is written as a number stays: heads that share keys, again
        fixed = _literal_sizes(node) - following
    for ref in arguments:
        theirs = sizes_of(ref.node.spec) - following
        if ref.node.kind not in ("parameter", "buffer") and node.op not in _PERMUTATIONS:
            theirs &= _aligned(ref.node.spec, node.spec)
        fixed |= theirs
    return own - fixed


def _repeated(own: set[int], following: set[int], arguments: list[Ref]) -> set[int]:
    """Returns the sizes that came of repeating what does not follow the inputs: heads that share keys, mostly."""
    grown = own - sizes_of(arguments[0].node.spec) - following
    return {size for size in grown if not any(base > 1 and size % base == 0 for base in following)}


def _aligned(argument: ValueSpec, result: ValueSpec) -> set[int]:
    """Returns the sizes that stand at the same place, from the right, in both shapes."""
    if not isinstance(argument, TensorSpec) or not isinstance(result, TensorSpec):
        return sizes_of(argument)
    return {a for a, b in zip(reversed(argument.shape), reversed(result.shape), strict=False) if a == b}


def _through_view(node: Node, following: set[int]) -> set[int]:
    """A view's `-1` is fixed where the other dimensions already take up all that follows the inputs."""
    assert isinstance(node.spec, TensorSpec)
    source = node.args[0].node.spec if node.args and isinstance(node.args[0], Ref) else None
    result = set(node.spec.shape) & following
    if not isinstance(source, TensorSpec):
        return set(node.spec.shape)
    before = math.prod(size for size in source.shape if size in following)
    after = math.prod(size for size in node.spec.shape if size in following)
    if before == after:
        return result
    literal = _literal_sizes(node)
    return result | {size for size in node.spec.shape if size not in literal}


def _literal_sizes(node: Node) -> set[int]:
    found: set[int] = set()
    map_leaves(node.args[1:], lambda leaf: found.add(leaf) if type(leaf) is int else None)
    return found


def _union(sizes: dict[int, set[int]], refs: list[Ref]) -> set[int]:
    return set().union(*(sizes.get(id(ref.node), set()) for ref in refs)) if refs else set()


def _refs(value: Any) -> Iterator[Ref]:
    found: list[Ref] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            found.append(leaf)
        elif isinstance(leaf, Structure):
            for _, child in leaf.children:
                map_leaves(child, note)
        return leaf

    map_leaves(list(value) if type(value) is torch.Size else value, note)
    return iter(found)


def sizes_of(spec: ValueSpec) -> set[int]:
    """Returns the sizes of the dimensions of a value, and of those in it; of an integer, that."""
    if isinstance(spec, TensorSpec):
        return set(spec.shape)
    if isinstance(spec, ContainerSpec):
        return set().union(*(sizes_of(child) for _, _, child in spec.children))
    value = getattr(spec, "value", None)
    return {value} if type(value) is int else set()
