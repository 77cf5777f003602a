"""Both ends of the residual stream: the embeddings at its start, and the norm and the logits at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphpatch_notebook.components.chain import Stack, Trails
from graphpatch_notebook.components.flow import Flow, Place, Value
from graphpatch_notebook.components.operations import (
    ADDITIONS,
    CONVOLUTIONS,
    NORMS,
    PRODUCTS,
    SAME_VALUES,
    SCALINGS,
    VIEWS,
)

_MOST_NODES = 200
_FARTHEST = 60
_WRITTEN_INTO = frozenset("setitem index_put masked_scatter index_put_ index_copy scatter masked_scatter_".split())
_LOOKUPS = frozenset("index_select getitem gather".split())
_INDEX_STEPS = SAME_VALUES | VIEWS | frozenset("long int index_put setitem".split())


@dataclass(slots=True, eq=False)
class Start:
    """The values at the start of a stream: it is their sum, up to norms and scalings.

    Attributes:
        tokens: The embeddings of tokens, or of patches.
        positions: The embeddings of positions.
    """

    tokens: list[Value] = field(default_factory=list)
    positions: list[Value] = field(default_factory=list)


def start_of(trails: Trails, stack: Stack) -> Start:
    """Returns the embeddings at the start of the stream of a stack."""
    flow, found = trails.flow, Start()
    first = stack.layers[0].start.value
    waiting, seen = [first], set[Value]()
    while waiting and len(seen) < _MOST_NODES:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        if table_of(flow, value) is not None and _is_of_inputs(trails, value):
            found.tokens.append(value)
        elif value.op == "embedding":
            found.positions.append(value)
        elif value.op in CONVOLUTIONS:
            found.tokens.append(value)
        elif before := _before(trails, value):
            waiting += before
        elif flow.is_held(value) or value.op in _LOOKUPS:
            is_table = len(value.shape) > 1 and value.shape[-1] == first.shape[-1] and value.size > first.shape[-1]
            found.positions += [value] if is_table else []
    length = max((value.shape[-2] for value in found.positions if len(value.shape) > 1), default=0)
    tables = {value: table_of(flow, value) or value for value in found.positions}
    # Token types are fewer than positions.
    found.positions = [value for value, table in tables.items() if table.shape[-2] >= length]
    return found


def table_of(flow: Flow, value: Value) -> Value | None:
    """Returns the table whose rows a value has, one for each number in a tensor; `None` for other values."""
    reads = flow.reads(value.node)
    if value.op == "embedding":
        return next((read for read in reads if read.is_float and len(read.shape) == 2), None)
    if value.op not in ("getitem", "index_select") or len(reads) != 2 or not flow.is_held(reads[0]):
        return None
    table, index = reads
    has_rows = len(table.shape) == 2 and value.shape == (*index.shape, table.shape[1])
    return table if table.is_float and has_rows and not (index.is_float or index.is_mask) else None


def _before(trails: Trails, value: Value) -> list[Value]:
    """Returns the terms of a value that is a sum, up to norms, scalings and linear maps."""
    flow = trails.flow
    if (norm := trails.norms.get(value)) is not None:
        return [norm.given.value]
    if value.node.kind != "op":
        return []
    reads = [read for read in flow.reads(value.node) if read.is_float]
    if value.op in ADDITIONS:
        return reads if any(not flow.is_held(read) for read in reads) else []
    if value.op in _WRITTEN_INTO:
        return reads[:1]
    if value.op in _LOOKUPS and reads and flow.is_held(reads[0]):
        return []
    if value.op in SAME_VALUES or value.op in VIEWS or value.op in NORMS:
        return [read for read in reads if not flow.is_held(value) or read.size == value.size]
    if value.op in SCALINGS or value.op in PRODUCTS or value.op in ("linear", "addmm"):
        return [read for read in reads if not flow.is_held(read)][:1]
    return []


def _is_of_inputs(trails: Trails, embedding: Value) -> bool:
    """Whether the indices of an embedding are an input of the model, as it is."""
    flow = trails.flow
    at = next(iter(flow.moving(embedding.node)), None)
    for _ in range(_FARTHEST):
        if at is None:
            return False
        if at.node.kind == "input":
            return True
        if at.op not in _INDEX_STEPS:
            return any(read.node.kind == "input" for read in flow.reads(at.node)) and at.op in ADDITIONS
        indices = [read for read in flow.moving(at.node) if not read.is_mask]
        at = next(iter(indices), None)
    return False


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """What a stream ends in.

    Attributes:
        norm: The norm after the last layer.
        logits: What the model returns: the result of a linear map of the stream.
        unembedding: That linear map's result.
    """

    norm: Value | None
    logits: Place | None
    unembedding: Value | None


def end_of(trails: Trails, stack: Stack, stacks: Sequence[Stack]) -> End:
    """Returns the values at the end of the stream of one of `stacks`: the layers of others may read it, too."""
    flow = trails.flow
    last = stack.layers[-1].end.value
    others = {id(layer.frame) for other in stacks if other is not stack for layer in other.layers}
    norms = (value for value, found in trails.norms.items() if trails.is_same(found.given.value, last))
    norm = next((n for n in norms if others.isdisjoint(map(id, flow.frames_around(n)))), None)
    for place in flow.outputs(flow.root):
        if place.value.is_float and (unembedding := _unembedding(trails, place.value, last, norm)) is not None:
            return End(norm, place, unembedding)
    return End(norm, None, None)


def ends_alone(trails: Trails) -> tuple[Start, End]:
    """Returns the embedding and the logits of any model whose output has the size of the vocabulary."""
    flow = trails.flow
    tables = [(value, table_of(flow, value)) for value in map(Value, flow.order) if value.node.kind == "op"]
    lookups = [(value, table) for value, table in tables if table is not None and _is_of_inputs(trails, value)]
    for place in flow.outputs(flow.root):
        linear = trails.linear_map(place.value, is_whole=True)
        if not flow.is_linear_map(linear):
            continue
        fitting = [(value, table.shape) for value, table in lookups if table.shape[0] == linear.shape[-1]]
        width = flow.moving(linear.node)[0].shape[-1]
        tokens = [value for value, shape in fitting if len(fitting) == 1 or shape[1] == width]
        if len(tokens) == 1:
            return Start(tokens), End(None, place, linear)
    return Start(), End(None, None, None)


def _unembedding(trails: Trails, result: Value, last: Value, norm: Value | None) -> Value | None:
    """Returns the last linear map between the end of the stream and a result of the model."""
    flow = trails.flow
    found: Value | None = None
    value = result
    for _ in range(_FARTHEST):
        if value in (last, norm):
            return found
        if value.node.kind != "op" or flow.order[value.node] <= flow.order[last.node]:
            return None
        before = [read for read in flow.moving(value.node) if read.is_float]
        if not before or (value.op in PRODUCTS and len(before) > 1):
            return None
        if found is None and flow.is_linear_map(value):
            found = value
        value = before[0]
    return None
