"""Both ends of the residual stream: the embeddings at its start, and the norm and the logits at its end."""

from __future__ import annotations

from collections.abc import Sequence

from graphpatch_notebook.components.chain import Trails
from graphpatch_notebook.components.flow import Flow, Value, walk
from graphpatch_notebook.components.operations import (
    ADDITIONS,
    CONVOLUTIONS,
    NORMS,
    PRODUCTS,
    SAME_VALUES,
    SCALINGS,
    VIEWS,
)
from graphpatch_notebook.components.roles import Rerun
from graphpatch_notebook.components.stacks import Stack
from graphpatch_notebook.components.writes import Writes

_MOST_NODES = 200
_FARTHEST = 60
_WRITTEN_INTO = frozenset("setitem index_put masked_scatter index_put_ index_copy scatter masked_scatter_".split())
_LOOKUPS = frozenset("index_select getitem gather".split())
_INDEX_STEPS = SAME_VALUES | VIEWS | frozenset("long int index_put setitem".split())
_STEPS = SAME_VALUES | VIEWS | NORMS
_MAPS = SCALINGS | PRODUCTS | {"linear", "addmm"}


def find_ends(writes: Writes, stacks: Sequence[Stack]) -> None:
    """Finds the embeddings at the start of the stream of each stack, and the norm and the logits at its end."""
    for stack in stacks:
        stack.tokens, stack.positions = _embeddings(writes, stack.first.start.value)
        stack.norm = _norm_behind(writes.trails, stack, stacks)
        places = (place for place in writes.flow.outputs(writes.flow.root) if place.value.is_float)
        stack.logits = next((place for place in places if _is_mapped(writes.flow, place.value, stack)), None)


def _embeddings(writes: Writes, first: Value) -> tuple[list[Value], list[Value]]:
    """Returns the embeddings of tokens, and those of positions, whose sum a value is, up to norms and scalings."""
    flow, tokens, positions = writes.flow, list[Value](), list[Value]()

    def is_token(value: Value) -> bool:
        return value.op in CONVOLUTIONS or (table_of(flow, value) is not None and _is_of_inputs(flow, value))

    def before(value: Value) -> list[Value]:
        return [] if is_token(value) or value.op == "embedding" else _before(writes.trails, value)

    for value in walk([first], before, _MOST_NODES):
        if is_token(value):
            tokens.append(value)
        elif value.op == "embedding":
            positions += [value] if _differs_by_position(writes, value) else []  # not kinds of tokens
        elif not before(value) and (flow.is_held(value) or value.op in _LOOKUPS):
            held = [each for each in walk([value], lambda each: flow.reads(each.node)) if each.node.kind == "parameter"]
            is_vector = bool(held) and all(each.size <= first.shape[-1] for each in held)  # as that of a class
            has_rows = len(value.shape) > 1 and value.shape[-1] == first.shape[-1]
            positions += [value] if has_rows and not is_vector else []
    # Tables of segments, and registers, have fewer rows than there are positions.
    length = max((value.shape[-2] for value in positions if len(value.shape) > 1), default=0)
    return tokens, [each for each in positions if (table_of(flow, each) or each).shape[-2] >= length]


def _differs_by_position(writes: Writes, embedding: Value) -> bool:
    """Whether the rows that an embedding takes differ at small sizes, where there are several positions."""
    index = next(each for each in writes.flow.reads(embedding.node) if not each.is_float)
    nodes = [each.node for each in walk([index], lambda each: writes.flow.reads(each.node))]
    sizes = writes.dimensions.small_sizes
    numbers = Rerun(writes.flow, nodes, writes.dimensions, sizes).base.get(index.node)
    return numbers is None or len(numbers.unique()) > 1


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
    flow, op = trails.flow, value.op
    if (norm := trails.norms.get(value)) is not None:
        return [norm.given.value]
    reads = [read for read in flow.reads(value.node) if read.is_float] if op else []
    moving = [read for read in reads if not flow.is_held(read)]
    if op in ADDITIONS:
        return reads if moving else []
    if op in _LOOKUPS and reads and flow.is_held(reads[0]):
        return []
    if op in _STEPS:
        return [read for read in reads if not flow.is_held(value) or read.size == value.size]
    return reads[:1] if op in _WRITTEN_INTO else moving[:1] if op in _MAPS else []


def _is_of_inputs(flow: Flow, embedding: Value) -> bool:
    """Whether the indices of an embedding are an input of the model, as it is."""

    def before(value: Value) -> list[Value]:
        reads = [read for read in flow.moving(value.node) if not read.is_mask] if value.op in _INDEX_STEPS else []
        return reads[:1]

    for value in walk(flow.moving(embedding.node)[:1], before, _FARTHEST):
        is_shifted = value.op in ADDITIONS and any(read.node.kind == "input" for read in flow.reads(value.node))
        if value.node.kind == "input" or is_shifted:
            return True
    return False


def _norm_behind(trails: Trails, stack: Stack, stacks: Sequence[Stack]) -> Value | None:
    """Returns the norm after the last layer of a stack; the layers of others may have norms that read it, too."""
    order, last = trails.flow.order, stack.last.end.value
    others = [layer for other in stacks if other is not stack for layer in other.layers.values()]
    spans = [range(layer.low + 1, order[layer.end.value.node] + 1) for layer in others]
    norms = (value for value, found in trails.norms.items() if trails.is_same(found.given.value, last))
    return next((value for value in norms if not any(order[value.node] in span for span in spans)), None)


def _is_mapped(flow: Flow, result: Value, stack: Stack) -> bool:
    """Whether a result of the model comes from the end of the stream by a linear map."""
    last = stack.last.end.value

    def before(value: Value) -> list[Value]:
        reads = [read for read in flow.moving(value.node) if read.is_float] if value.node.kind == "op" else []
        is_after = flow.order[value.node] > flow.order[last.node]
        return reads[:1] if is_after and not (value.op in PRODUCTS and len(reads) > 1) else []

    trail = list(walk([result], before, _FARTHEST))
    ends = [number for number, value in enumerate(trail) if value in (last, stack.norm)]
    return bool(ends) and any(map(flow.is_linear_map, trail[: ends[0]]))
