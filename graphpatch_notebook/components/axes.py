"""What the dimensions of values are: batch, position, head, query, key, channel, ..."""

from __future__ import annotations

import string
from collections.abc import Collection, Sequence
from typing import TypeAlias

from graphpatch_notebook.capture.records import Node, Ref, refs_in
from graphpatch_notebook.components.flow import Flow, Value
from graphpatch_notebook.components.operations import CONVOLUTIONS, ROTATIONS
from graphpatch_notebook.values import TensorSpec, spec_at

Axes: TypeAlias = "tuple[str, ...]"

PAIR = "pair"
"""The axis of two numbers that rotary embeddings rotate as one: channels are divided into pairs, and joined again."""

_SPLITS = {"head": ("head", "repeat"), "batch_head": ("batch", "head"), "channel": ("channel", PAIR)}
_SWAPS = frozenset("transpose swapaxes swapdims".split())


def stream_axes(
    shape: Sequence[int],
    last: str = "channel",
    widths: Collection[int] = (),
    *,
    is_sequence_first: bool = False,
    has_streams: bool = False,
) -> Axes:
    """Returns the axes of a value with a vector of features for each position: the batch first, the features last.

    In a value with two dimensions, batch and positions are one: `token`.

    Args:
        shape: The shape of the value.
        last: What the features are.
        widths: The numbers of features, if the features may be second: they are if only that dimension has one.
        is_sequence_first: Whether positions come before the batch.
        has_streams: Whether each position has several vectors (hyper-connections).
    """
    if len(shape) == 2:
        return "token", last
    if len(shape) == 3 and is_sequence_first:
        return "position", "batch", last
    between = {3: ("position",), 4: ("position", "stream") if has_streams else ("height", "width")}.get(len(shape))
    if between is None:
        between = tuple(f"position_{number}" for number in range(len(shape) - 2))
    if len(shape) > 2 and shape[-1] not in widths and shape[1] in widths:
        return "batch", last, *between
    return ("batch", *between, last)[-len(shape) :]


def feature_axes(value: Value) -> Axes:
    """Returns the axes of a value of a convolution, which has the features after the batch."""
    axes = stream_axes(value.shape, "channel")
    return ("batch", "channel", *axes[1:-1]) if value.op in CONVOLUTIONS else axes


def product_axes(flow: Flow, product: Node, roles: tuple[str, str, str]) -> tuple[Axes, Axes, Axes] | None:
    """Returns the axes of the two factors of a product of attention, and of its result.

    The axes of its matrices are `(..., roles[0], roles[1])` and `(..., roles[1], roles[2])`.
    """
    reads = flow.reads(product)
    if product.op == "baddbmm":
        reads = reads[1:]
    if len(reads) < 2:
        return None
    if product.op == "einsum":
        return _einsum_axes(product, roles)
    row, inner, column = roles
    leading = batch_axes(len(Value(product).shape) - 2)
    return (*leading, row, inner), (*leading, inner, column), (*leading, row, column)


def batch_axes(count: int) -> Axes:
    """Returns the axes before those of the matrices of attention."""
    if count == 3:
        return "batch", "group", "head"
    return {0: (), 1: ("batch_head",), 2: ("batch", "head")}.get(count, ("batch", *["group"] * (count - 2), "head"))


def _einsum_axes(product: Node, roles: tuple[str, str, str]) -> tuple[Axes, Axes, Axes] | None:
    factors, result = einsum_letters(product)
    if len(factors) != 2:
        return None
    one, other = factors
    shared = [letter for letter in one if letter in other and letter in result]
    leading = batch_axes(len(shared))
    row = [letter for letter in one if letter in result and letter not in other]
    column = [letter for letter in other if letter in result and letter not in one]
    inner = [letter for letter in one if letter in other and letter not in result]
    if (len(row), len(inner), len(column)) != (1, 1, 1):
        return None
    names = dict(zip([*shared, *row, *inner, *column], [*leading, *roles], strict=True))
    return _named(one, names), _named(other, names), _named(result, names)


def einsum_letters(node: Node) -> tuple[list[str], str]:
    """Returns the letters of the factors and of the result of an einsum; empty if the result is not written out."""
    equation = next((given for given in node.args if isinstance(given, str)), "").replace(" ", "")
    before, _, result = equation.partition("->")
    factors = before.split(",")
    specs = [spec_at(ref.node.spec, ref.dig) for ref in refs_in(node.args)]
    ranks = [len(spec.shape) for spec in specs if isinstance(spec, TensorSpec)]
    if not result or len(ranks) != len(factors):
        return [], ""
    # An ellipsis is as many letters as are left; of fewer, the last ones, as dimensions are broadcast.
    left = [rank - len(letters.replace("...", "")) for rank, letters in zip(ranks, factors, strict=True)]
    free = "".join([letter for letter in string.ascii_letters if letter not in equation][: max(left)])
    factors = [letters.replace("...", free[len(free) - count :]) for letters, count in zip(factors, left, strict=True)]
    return factors, result.replace("...", free)


def product_letters(node: Node, one: Value, other: Value) -> tuple[str, str, str] | None:
    """Returns letters for the dimensions of two tensors and of their product, as those of an einsum."""
    if node.op == "einsum":
        factors, result = einsum_letters(node)
        return (factors[0], factors[1], result) if len(factors) == 2 else None
    if node.op not in ("linear", "addmm", "matmul", "mm", "bmm"):
        return None
    first, second = "RI"[-len(one.shape) :], "OI" if node.op == "linear" else "IO"[: len(other.shape)]
    leading = [tuple(value.shape[:-2]) for value in (one, other)]
    count = max(map(len, leading))
    sizes = list(zip(*((1,) * (count - len(each)) + each for each in leading), strict=True))
    names = string.ascii_lowercase[:count]
    # A dimension of one element that is broadcast to a dimension of the other tensor is not the same dimension.
    repeated = [
        "".join(name if pair[which] == max(pair) else name.upper() for name, pair in zip(names, sizes, strict=True))
        for which in range(2)
    ]
    own, others = (letters[count - len(each) :] for letters, each in zip(repeated, leading, strict=True))
    return own + first, others + second, names + "R" * ("R" in first) + "O" * ("O" in second)


def _named(letters: str, names: dict[str, str]) -> Axes:
    return tuple(names[letter] for letter in letters)


def axes_of_split_heads(shape: Sequence[int], axes: Axes, other: Sequence[int]) -> Axes | None:
    """Returns the axes of a view with batch and heads in two dimensions of a value that has them in one."""
    found = _before_view(tuple(shape), axes, tuple(other))
    return found if found is not None and "head" in found and "one" not in found else None


def axes_before(node: Node, axes: Axes, source: Value) -> Axes | None:
    """Returns the axes of the input of an operation, from those of its result; `None` if they are not known.

    It may be the last of several operations that keep the dimensions.
    """
    rank = len(source.shape)
    if node.op in _SWAPS and rank == len(axes):
        dims = _dims(node, ("dim0", "dim1", "axis0", "axis1"))[:2]
        if len(dims) < 2:
            return None
        swapped = list(axes)
        one, other = dims
        swapped[one], swapped[other] = swapped[other], swapped[one]
        return tuple(swapped)
    if node.op in ("mT", "T", "t") and rank == len(axes):
        return (*axes[:-2], axes[-1], axes[-2])
    if node.op == "permute" and rank == len(axes):
        dims = _dims(node, ("dims",))
        if len(dims) != rank:
            return None
        permuted = [""] * rank
        for position, dim in enumerate(dims):
            permuted[dim] = axes[position]
        return tuple(permuted)
    if node.op == "getitem":
        return _before_index(node, axes, rank)
    if node.op in ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand"):
        result = Value(node).shape
        is_same = rank == len(axes) and (source.shape == result or node.op == "expand")
        return axes if is_same else _before_view(result, axes, source.shape, is_repeated=source.op == "expand")
    return axes if rank == len(axes) else _before_pairs(node, axes, source)


def axes_before_map(node: Node, axes: Axes, source: Value) -> Axes | None:
    """Returns the axes of the input of a linear map of the model, from those of its result; `None` if not known."""
    shape = Value(node).shape
    if node.op == "einsum":
        factors, result = einsum_letters(node)
        read = next((factor for factor in factors if len(factor) == len(source.shape)), "")
        names = dict(zip(result, axes, strict=False))
        return tuple(names.get(letter, "channel") for letter in read) if read and len(result) == len(axes) else None
    is_alike = len(shape) == len(source.shape) and shape[-2] == source.shape[-2] and node.op not in CONVOLUTIONS
    return (*axes[:-1], "channel") if is_alike and axes[-1] not in ("query", "batch") else None


def _before_pairs(node: Node, axes: Axes, source: Value) -> Axes | None:
    """Returns the axes of channels that became pairs, or of pairs that became complex numbers, and the reverse."""
    result, shape = Value(node).shape, source.shape
    if axes[-1:] == (PAIR,) and shape[:-1] == result[:-2] and shape[-1] in (result[-2], result[-2] * 2):
        return axes[:-1]
    is_joined = node.op in ROTATIONS and axes[-1:] == ("channel",) and shape == (*result, 2)
    return (*axes, PAIR) if is_joined else None


def _dims(node: Node, names: tuple[str, ...]) -> list[int]:
    """Returns the dimensions that are arguments of an operation; empty if some are computed."""
    given = list(node.args[1:])
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = list(given[0])
    for name in names:
        found = node.kwargs.get(name, ())
        given += found if isinstance(found, (tuple, list)) else [found]
    return [] if any(isinstance(each, Ref) for each in given) else given


def _before_index(node: Node, axes: Axes, rank: int) -> Axes | None:
    index = node.args[1] if len(node.args) > 1 else ()
    index = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(each, (Ref, list)) for each in index):
        return axes if rank == len(axes) else None
    taken = sum(each is not None and each is not Ellipsis for each in index)
    if Ellipsis not in index:
        index.append(Ellipsis)
    at = index.index(Ellipsis)
    index[at : at + 1] = [slice(None)] * (rank - taken)
    rest, found = list(axes), []
    for each in index:
        if each is None:
            rest.pop(0)
        elif isinstance(each, slice):
            found.append(rest.pop(0) if rest else "")
        else:
            found.append("part")
    return tuple(found) if len(found) == rank and not rest and "" not in found else None


def _before_view(
    result: tuple[int, ...], axes: Axes, source: tuple[int, ...], *, is_repeated: bool = False
) -> Axes | None:
    """Returns the axes of the input of a reshape.

    Each of its dimensions is one of the result, or has one element, or is one of two that became one: batch and heads,
    the heads and how often each is repeated, or pairs of channels; or it is channels that became pairs. A batch of one
    and a single head that is repeated are dimensions, too.
    """
    sized = [(size, name) for size, name in zip(result, axes, strict=True) if size != 1]
    found = []
    for position, size in enumerate(source):
        next_size = source[position + 1] if position + 1 < len(source) else 0
        splits = ("batch_head", "head") if is_repeated else ("batch_head",)
        is_split = any(sized[:1] == [(next_size, name)] for name in splits)
        if size == 1 and not is_split:
            is_same = source[: position + 1] == result[: position + 1]
            found.append(axes[position] if is_same else "one")
        elif sized and sized[0][0] == size:
            found.append(sized.pop(0)[1])
        elif sized and sized[0][0] == size * next_size and sized[0][1] in _SPLITS:
            first, second = _SPLITS[sized[0][1]]
            found.append(first)
            sized[0] = (next_size, second)
        elif [name for _, name in sized[:2]] == ["channel", PAIR] and size == sized[0][0] * sized[1][0]:
            found.append("channel")
            del sized[:2]
        else:
            return None
    return tuple(found) if not sized else None
