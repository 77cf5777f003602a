"""Attention: a product of queries and keys, a softmax, and a product with the values; or a fused call of all three."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from graphpatch_notebook.capture.records import Node, Ref
from graphpatch_notebook.components.axes import (
    PAIR,
    Axes,
    axes_before,
    axes_before_map,
    axes_of_split_heads,
    batch_axes,
    einsum_letters,
    product_axes,
)
from graphpatch_notebook.components.chain import Region, Trails, region
from graphpatch_notebook.components.flow import Flow, Value, walk
from graphpatch_notebook.components.operations import (
    ADDITIONS,
    CREATIONS,
    FUSED_ATTENTION,
    MOMENTS,
    NORMS,
    PRODUCTS,
    ROTATIONS,
    SAME_VALUES,
    SCALINGS,
    SCORE_STEPS,
    SOFTMAXES,
    VIEWS,
)
from graphpatch_notebook.values import TensorSpec

_FARTHEST = 60
_TILINGS = frozenset("repeat tile cat concat concatenate".split())
_WHOLE = "multi_head_attention_forward"
_OUTPUT_STEPS = VIEWS | SAME_VALUES | SCALINGS | ADDITIONS | NORMS | PRODUCTS
_PATTERN_STEPS = SAME_VALUES | VIEWS | SCALINGS | frozenset(["sub"])


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """One attention of the model.

    Attributes:
        q, k, v: What its products read, as the product reads them.
        z: What it returns, before the output projection.
        scores: What the softmax reads.
        pattern: What the values are multiplied with.
        dot: The product of queries and keys; `None` in a fused call.
        softmax: The softmax; `None` in a fused call.
        has_keys_first: Whether the product of queries and keys has the keys in its rows.
        has_values_first: Whether the product with the pattern has the values as its first factor.
        scores_order: The dimensions of that product, in the order in which the softmax has them; empty for the same.
    """

    q: Value
    k: Value
    v: Value
    z: Value
    scores: Value | None = None
    pattern: Value | None = None
    dot: Value | None = None
    softmax: Node | None = None
    has_keys_first: bool = False
    has_values_first: bool = False
    scores_order: tuple[int, ...] = ()


def attentions(flow: Flow) -> list[Attention]:
    """Returns all attentions, in order of execution."""
    found = []
    for node in flow.order:
        if node.kind != "op" or not isinstance(node.spec, TensorSpec):
            continue
        attention = None
        if node.op in FUSED_ATTENTION:
            attention = _fused(flow, node)
        elif node.op in SOFTMAXES:
            attention = _by_hand(flow, node)
        if attention is not None:
            found.append(attention)
    return sorted(found, key=lambda each: flow.order[each.z.node])


def _fused(flow: Flow, node: Node) -> Attention | None:
    names = ("query", "key", "value")
    given = [_argument(flow, node, position, name) for position, name in enumerate(names)]
    q, k, v = given
    if q is None or k is None or v is None:
        return None
    inner = {step.base_name: Value(step) for step in node.inner}
    return Attention(q, k, v, Value(node), inner.get("scores"), inner.get("pattern"))


def _argument(flow: Flow, node: Node, position: int, name: str) -> Value | None:
    given: Any = node.args[position] if position < len(node.args) else node.kwargs.get(name)
    return flow.resolve(given.node, given.dig) if isinstance(given, Ref) else None


def _by_hand(flow: Flow, softmax: Node) -> Attention | None:
    products = _products_before(flow, softmax)
    after = _products_after(flow, softmax)
    if not products or len(after) != 1 or _products_after(flow, after[0][0].node):
        return None  # a pattern that is read in parts, or multiplied with another one, is not the pattern of the heads
    z, pattern, v = after[0]
    own = Value(softmax)
    # A model may merge batch and heads for the product, and separate them for the softmax.
    if len(pattern.shape) < 4 <= len(own.shape):
        pattern = own
    dot, (q, k) = next((found for found in products if found[0].size == own.size), products[0])
    order = _order_before(flow, softmax, dot)
    has_keys_first = _has_keys_first(softmax, dot, order)
    if has_keys_first:
        q, k = k, q
    has_values_first = flow.reads(z.node)[-2:][0].node is v.node
    order = () if order == tuple(range(len(order))) else order
    scores = _scores(flow, softmax, pattern)
    return Attention(q, k, v, z, scores, pattern, dot, softmax, has_keys_first, has_values_first, order)


def _softmax_dim(softmax: Node) -> int:
    """Returns the dimension along which a softmax sums to one: that of the keys."""
    given = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else -1)
    return given % len(Value(softmax).shape) if isinstance(given, int) else len(Value(softmax).shape) - 1


def _order_before(flow: Flow, softmax: Node, dot: Value) -> tuple[int, ...]:
    """Returns the dimensions of a product in the order in which a softmax of it has them; empty if it is not known."""
    first = flow.reads(softmax)[0]
    names = tuple(map(str, range(len(first.shape))))

    def before(found: tuple[Value, Axes]) -> Iterator[tuple[Value, Axes]]:
        value, axes = found
        if value.node.kind == "op" and value.op not in PRODUCTS:
            for read in flow.moving(value.node) or flow.reads(value.node):
                if read.size == value.size and (known := axes_before(value.node, axes, read)) is not None:
                    yield read, known

    axes = next((axes for value, axes in walk([(first, names)], before, _FARTHEST) if value == dot), ())
    return tuple(map(axes.index, names)) if sorted(axes) == sorted(names) else ()


def _has_keys_first(softmax: Node, dot: Value, order: tuple[int, ...]) -> bool:
    """Whether the first factor of a product has the keys: the dimension along which its softmax sums to one."""
    dim = _softmax_dim(softmax)
    rank = len(dot.shape)
    from_end = dim - len(Value(softmax).shape)  # batch and heads may be one dimension of the product
    keys = order[dim] if order else rank + from_end
    if dot.op == "einsum":
        factors, result = einsum_letters(dot.node)
        return len(factors) == 2 and len(result) == rank and result[keys] in factors[0]
    return keys == rank - 2


def _scores(flow: Flow, softmax: Node, pattern: Value) -> Value:
    """Returns the input of the softmax; of scores with a learned sink, the scores without the sink."""
    scores = flow.reads(softmax)[0]

    def before(value: Value) -> list[Value]:
        return flow.moving(value.node) if value.node.kind == "op" and value.op not in PRODUCTS else []

    return next((value for value in walk([scores], before, _FARTHEST) if value.shape == pattern.shape), scores)


def _products_before(flow: Flow, softmax: Node) -> list[tuple[Value, tuple[Value, Value]]]:
    """Returns the products that the scores are computed from, nearest first, each with its factors."""
    found = []
    for value in walk(
        flow.reads(softmax)[:1],
        lambda each: flow.moving(each.node) or flow.reads(each.node) if each.op in SCORE_STEPS else [],
        _FARTHEST,
    ):
        if value.op in PRODUCTS:
            reads = flow.reads(value.node)[1:] if value.op == "baddbmm" else flow.reads(value.node)
            if len(reads) > 1 and (flow.is_held(reads[0]) == flow.is_held(reads[1]) or _is_projected(flow, reads[0])):
                found.append((value, (reads[0], reads[1])))
    return found


def _is_projected(flow: Flow, value: Value) -> bool:
    """Whether a constant is the result of a linear map, as in a first layer that begins with learned queries."""
    if not flow.is_held(value):
        return False
    sources = walk([value], lambda each: flow.reads(each.node) if each.op else [], _FARTHEST)
    return any(map(flow.is_linear_map, sources))


def _products_after(flow: Flow, start: Node) -> list[tuple[Value, Value, Value]]:
    """Returns the products of a value and others, the value as each reads it, and the others."""
    waiting = deque([start])
    seen: set[Node] = set()
    found = []
    while waiting and len(seen) < _FARTHEST:
        node = waiting.popleft()
        for user in flow.users.get(node, ()):
            if user in seen:
                continue
            seen.add(user)
            if user.op in PRODUCTS:
                reads = flow.reads(user)
                others = [value for value in reads if value.node is not node]
                is_alike = bool(others) and flow.is_held(others[0]) == flow.is_held(Value(start))
                if is_alike or (others and _is_projected(flow, others[0])):
                    own = next(value for value in reads if value.node is node)
                    found.append((Value(user), own, others[0]))
            elif user.op in _PATTERN_STEPS:
                waiting.append(user)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A value of an attention, with the meaning of its dimensions."""

    value: Value
    axes: Axes

    def size_of(self, axis: str) -> int:
        """Returns the size of a dimension; 0 if no dimension has this name."""
        return self.value.shape[self.axes.index(axis)] if axis in self.axes else 0


@dataclass(slots=True, eq=False)
class Parts:
    """The values of an attention that have names: `q`, `k`, `v`, `q_rot`, `k_rot`, `scores`, `pattern`, `z`.

    Attributes:
        found: Those that were found.
        missing: Why the others were not.
        operands: What the products read and return, as `q`, `k`, `v`, ...; `dot` is the product of queries and keys.
        output: What the linear map of `z` returns, if there is one.
        tiled: Which of `k` and `v` have heads that the heads of queries read by turns: `0, 1, 0, 1`, not `0, 0, 1, 1`.
    """

    found: dict[str, Part]
    missing: dict[str, str]
    operands: dict[str, Part]
    output: Value | None
    tiled: set[str] = field(default_factory=set)


_PLAIN = ("Tensor", "Parameter")
_UNKNOWN_DIMENSIONS = "the dimensions of the products of attention are not known"
_FUSED_REASON = "attention is one fused call that cannot be opened"
_FUSED_CLOSED = "attention is one fused call: leave decompose out of the ExtractionOptions to see the values inside"
_FUSED_GRAPH = (
    "attention is one fused call in this graph; it is opened in a PatchableGraph of the model, and apart in the graphs "
    'of a model with attn_implementation="eager"'
)


def parts_of(trails: Trails, attention: Attention, inside: frozenset[Node]) -> Parts:
    """Returns the parts of an attention that is computed by the nodes `inside`."""
    flow = trails.flow
    found, missing, tiled = dict[str, Part](), dict[str, str](), set[str]()
    operands = _operands(trails, attention, inside)
    for name, part in operands.items():
        if name in "qkv":
            between = region(trails, part.value, inside)
            known = _known_axes(between, part)
            _trace(name, part, between, known, found, missing)
            if name in found and _is_tiled(between, known, found[name].size_of("head")):
                tiled.add(name)
        else:
            found[name] = part
    for name in [name for name, part in found.items() if part.value.op in CREATIONS]:
        del found[name]
        missing[name] = "the model fills in this tensor part by part"
    found.pop("dot", None)
    for name in ("scores", "pattern"):
        if name not in found:
            missing[name] = _why_fused(flow, attention)
    for name in ("q", "k", "v", "z"):
        if name not in found:
            missing.setdefault(name, _UNKNOWN_DIMENSIONS)
    return Parts(found, missing, operands, _output_map(flow, attention), tiled)


def _is_tiled(between: Region, known: Mapping[Value, Part], heads: int) -> bool:
    """Whether an operand has all heads again and again, and not each of them several times."""
    for before, waist in pairwise(between.waists):
        part, old = known.get(waist), known.get(before)
        if part is None or old is None or not 1 < heads == old.size_of("head") < part.size_of("head"):
            continue
        if waist.op in _TILINGS:
            return True
    return False


def _why_fused(flow: Flow, attention: Attention) -> str:
    """Returns why there are no scores and no pattern: mostly because they are inside a fused call of attention."""
    if attention.dot is not None:
        return _UNKNOWN_DIMENSIONS
    frame = flow.frame_of[attention.z.node]
    if frame.has_own_graph:
        return _FUSED_GRAPH
    if (options := frame.capture.options) is not None and options.decompose is not None:
        return _FUSED_CLOSED
    specs = [read.spec for read in flow.reads(attention.z.node)]
    kind = next((s.type_name for s in specs if isinstance(s, TensorSpec) and s.type_name not in _PLAIN), None)
    because = "" if kind is None else f": its arguments are {kind}s, and only plain tensors can be"
    return _FUSED_REASON + because


def is_sequence_first(trails: Trails, inside: frozenset[Node], own: tuple[Attention, ...], stream: Value) -> bool:
    """Whether attention, computed by the nodes `inside`, reads a stream with its positions before the batch."""
    queries = _queries(trails, inside, own)
    if queries is None:
        return False
    sizes = dict(zip(queries.axes, queries.value.shape, strict=True))
    if "batch" in sizes and sizes["batch"] != sizes["query"]:
        return len(stream.shape) == 3 and stream.shape[:2] == (sizes["query"], sizes["batch"])
    first = _at_stream(trails, _earliest(trails, queries, inside), inside)
    has_batch = bool({"batch", "batch_head"} & set(first.axes))
    return first.axes[0] == "query" and has_batch and first.value.shape[0] == stream.shape[0]


def _earliest(trails: Trails, operand: Part, inside: frozenset[Node]) -> Part:
    """Returns the first value with known axes behind the linear maps that an operand is computed by."""
    between = region(trails, operand.value, inside)
    known = _known_axes(between, operand)
    return next(known[waist] for waist in between.waists if waist in known)


def _at_stream(trails: Trails, part: Part, inside: frozenset[Node]) -> Part:
    """Returns the value with known axes nearest to the stream that a part comes from, through linear maps and norms."""
    while part.value.node in inside and (source := trails.source(part.value)) is not None:
        axes = _axes_of_source(trails, part, source)
        if axes is None and _splits_last(part.value, source):
            axes = (*part.axes[: len(source.shape) - 1], "channel")  # of all heads
        if axes is None:
            break
        part = Part(source, axes)
    return part


def _axes_of_source(trails: Trails, part: Part, source: Value) -> Axes | None:
    if part.value in trails.norms:
        return part.axes
    of_step = axes_before_map if trails.flow.is_linear_map(part.value) else axes_before
    return of_step(part.value.node, part.axes, source)


def _splits_last(view: Value, source: Value) -> bool:
    """Whether a view has the last dimension of its source in several."""
    return view.op in VIEWS and source.shape[:-1] == view.shape[: len(source.shape) - 1]


def _queries(trails: Trails, inside: frozenset[Node], own: tuple[Attention, ...]) -> Part | None:
    """Returns the queries of an attention, or the input of their linear map if the attention is one function."""
    if own:
        return _operands(trails, own[-1], inside).get("q")
    for node in inside:
        if node.whole.op == _WHOLE and (given := trails.flow.reads(node.whole)) and len(given[0].shape) == 3:
            return Part(given[0], ("query", "batch", "channel"))
    return None


def _operands(trails: Trails, attention: Attention, inside: frozenset[Node]) -> dict[str, Part]:
    """Returns what the products of attention read and return."""
    found = _operands_by_place(trails.flow, attention)
    if "q" in found and _has_heads_first(trails, found["q"], inside):
        return _renamed(found, {"batch": "head", "head": "batch"})
    q, k = found.get("q"), found.get("k")
    if q is not None and k is not None and "group" in q.axes and k.size_of("head") == 1 < q.size_of("head"):
        return _renamed(found, {"group": "key_head", "head": "query_head"})  # neither has the heads alone
    return found


def _renamed(parts: dict[str, Part], names: dict[str, str]) -> dict[str, Part]:
    return {name: Part(part.value, tuple(names.get(axis, axis) for axis in part.axes)) for name, part in parts.items()}


def _operands_by_place(flow: Flow, attention: Attention) -> dict[str, Part]:
    """Returns the values that the products of attention read and return, if the batch comes before the heads."""
    if attention.dot is None or attention.pattern is None or attention.scores is None:
        return _operands_of_fused(attention)
    has_keys_first, has_values_first = attention.has_keys_first, attention.has_values_first
    rows = ("key", "channel", "query") if has_keys_first else ("query", "channel", "key")
    dot = product_axes(flow, attention.dot.node, rows)
    columns = ("channel", "key", "query") if has_values_first else ("query", "key", "channel")
    out = product_axes(flow, attention.z.node, columns)
    if dot is None or out is None:
        return {}
    q, k = dot[1::-1] if has_keys_first else dot[:2]
    v, pattern = out[:2] if has_values_first else out[1::-1]
    found = {"q": Part(attention.q, q), "k": Part(attention.k, k), "v": Part(attention.v, v)}
    order = attention.scores_order
    scores = tuple(dot[2][dim] for dim in order) if len(order) == len(dot[2]) else dot[2]
    for name, value, axes in (
        ("dot", attention.dot, dot[2]),
        ("scores", attention.scores, scores),
        ("pattern", attention.pattern, pattern),
        ("z", attention.z, out[2]),
    ):
        is_apart = len(axes) == 3 and len(value.shape) == 4  # batch and heads are merged for the product only
        known = ("batch", "head", *axes[1:]) if is_apart else axes
        if len(value.shape) == len(known):
            found[name] = _with_heads_split(flow, Part(value, known))
    return found


def _has_heads_first(trails: Trails, queries: Part, inside: frozenset[Node]) -> bool:
    """Whether the dimension that seems to be the batch has heads: it is made of the features of a linear map."""
    if not {"batch", "head"} <= set(queries.axes):
        return False
    part = _earliest(trails, queries, inside)
    while part.value.node in inside and (source := trails.source(part.value)) is not None:
        if trails.flow.is_linear_map(part.value):
            return part.value.op == "einsum" and "batch" in _axes_of_weights(trails.flow, part)
        axes = _axes_of_source(trails, part, source)
        if axes is None:
            is_split = _splits_last(part.value, source) and len(source.shape) == len(part.axes) - 1
            return is_split and "batch" in part.axes[-2:]
        part = Part(source, axes)
    return False


def _axes_of_weights(flow: Flow, part: Part) -> set[str]:
    """Returns the axes of the result of a linear map that come from its weight only."""
    factors, result = einsum_letters(part.value.node)
    weights = flow.weights(part.value.node)
    given = [read for read in flow.reads(part.value.node) if read not in weights]
    if len(factors) != 2 or len(given) != 1 or len(result) != len(part.axes):
        return set()
    own = factors[flow.reads(part.value.node).index(given[0])]
    return {axis for letter, axis in zip(result, part.axes, strict=True) if letter not in own}


def _operands_of_fused(attention: Attention) -> dict[str, Part]:
    leading = batch_axes(len(attention.z.shape) - 2)
    found = {
        "q": Part(attention.q, (*leading, "query", "channel")),
        "k": Part(attention.k, (*leading, "key", "channel")),
        "v": Part(attention.v, (*leading, "key", "channel")),
        "z": Part(attention.z, (*leading, "query", "channel")),
    }
    for name, value in (("scores", attention.scores), ("pattern", attention.pattern)):
        if value is not None and len(value.shape) == len(attention.z.shape):
            found[name] = Part(value, (*leading, "query", "key"))
    return found


def _with_heads_split(flow: Flow, part: Part) -> Part:
    """Returns a view with batch and heads in two dimensions of a part that has them in one."""
    value = part.value
    if "batch_head" not in part.axes:
        return part
    users = flow.users.get(value.node, ())
    views = [Value(user) for user in users if user.op in VIEWS and len(users) == 1]
    views += flow.reads(value.node)[:1] if value.op in VIEWS else []
    for view in views:
        if view.size == value.size and (axes := axes_of_split_heads(value.shape, part.axes, view.shape)) is not None:
            return Part(view, axes)
    return part


def _trace(
    name: str,
    operand: Part,
    between: Region,
    known: Mapping[Value, Part],
    found: dict[str, Part],
    missing: dict[str, str],
) -> None:
    """Follows an operand of the products back to the linear map that it comes from."""
    place_of = between.waists.index
    rotated = [waist for waist in between.waists if _is_rotation(between, waist)]
    # A cache, or repeated heads, add to these: `k` and `v` have the positions and heads of the call.
    stop_at = [w for before, w in pairwise(between.waists) if w.size > before.size or between.ops[w] == ("cat",)]
    # Queries and keys are often scaled before the product; values are what the pattern is multiplied with.
    scaled = [w for w in between.waists if between.ops[w] and set(between.ops[w]) <= SCALINGS and name != "v"]
    if rotated:
        stop_at = [waist for waist in stop_at if place_of(waist) > place_of(rotated[-1])]
        after = {waist: part for waist, part in known.items() if place_of(waist) >= place_of(rotated[-1])}
        stop_at += [w for w in between.waists if place_of(w) > place_of(rotated[-1]) and between.is_norm(w)]
        stop_at += [w for w in scaled if place_of(w) > place_of(rotated[-1])]
        last = next(_before(after, between, stop_at), None)
        found[f"{name}_rot"] = last if last is not None else operand
        stop_at = [rotated[0]]
    elif name != "v":
        missing[f"{name}_rot"] = "nothing rotates it (as rotary embeddings do) before the product of queries and keys"
    part = next(_before(known, between, [*stop_at, *scaled]), None) or next(_before(known, between, stop_at), None)
    if part is not None:
        found[name] = part
    elif len(between.sources) > 1:
        missing[name] = "it is made of the results of several linear maps, or of their parts"
    else:
        missing[name] = "no value has heads as a dimension that is read whole, and not rotated yet"


def _known_axes(between: Region, operand: Part) -> dict[Value, Part]:
    """Returns the waists whose axes are known, from the operand back to where it is a part of something larger."""
    found = {operand.value: operand}
    axes: Axes | None = operand.axes
    for source, waist in reversed(list(pairwise(between.waists))):
        is_part = source.size > waist.size and waist.op != "view_as_complex"  # a complex number is two of the source
        axes = axes_before(waist.node, axes, source) if axes is not None and not is_part else None
        if axes is None:
            break
        found[source] = Part(source, axes)
    return found


def _before(known: Mapping[Value, Part], between: Region, stops: list[Value]) -> Iterator[Part]:
    """Yields the waists with all axes before the first of `stops`, last ones first, best axes first."""
    waists = list(between.waists)
    end = min((waists.index(stop) for stop in stops), default=len(waists))
    parts = [known[waist] for waist in reversed(waists[:end]) if waist in known]
    parts = [part for part in parts if not {"one", "part", "repeat", PAIR} & set(part.axes)]
    yield from sorted(parts, key=lambda part: ("head" not in part.axes, part.axes[-1] != "channel"))


def _is_rotation(between: Region, waist: Value) -> bool:
    """Whether a waist is a rotation of the one before: parts of it, times constants, put together again."""
    ops = set(between.ops[waist])
    return bool(ops & ROTATIONS) or (bool(ops & SCALINGS) and len(ops) > 1 and not ops & MOMENTS)


def _output_map(flow: Flow, attention: Attention) -> Value | None:
    """Returns the result of the linear map of `z`."""
    users = flow.users
    after = walk(
        users.get(attention.z.node, ()), lambda node: users.get(node, ()) if node.op in _OUTPUT_STEPS else (), _FARTHEST
    )
    return next(filter(flow.is_linear_map, map(Value, after)), None)
