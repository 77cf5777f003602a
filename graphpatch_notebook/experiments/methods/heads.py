"""The heads of an attention in values: equal parts of the last dimension, or a dimension of their own.

    q_proj -> q -> attention product -> z -> (reshaped, gated, normed, ...) -> output projection -> (added, ...)
    separate heads ........................................................    mixed heads ...............

A value has separate heads if nothing but elementwise operations and views lie between it and a component with heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.capture.records import CallNode
from graphpatch_notebook.components import Component, Weights, operations
from graphpatch_notebook.components.ends import table_of
from graphpatch_notebook.components.flow import Value, walk
from graphpatch_notebook.errors import ExperimentError, PatchNotFiredError, add_note
from graphpatch_notebook.experiments.engine.inputs import Inputs, inputs_of
from graphpatch_notebook.experiments.methods.arguments import (
    PositionCells,
    Positions,
    RowPositions,
    check_graph,
    check_problems,
    found_or_problems,
    position_cells,
    targets,
)
from graphpatch_notebook.experiments.methods.lens import arranged, component, layer_count
from graphpatch_notebook.experiments.methods.reference_runs import record
from graphpatch_notebook.inspection.resolution import Target, axes_of
from graphpatch_notebook.lazy_names import extra
from graphpatch_notebook.options import check_input_names
from graphpatch_notebook.patchable_graph import PatchableGraph, captured, runs_where_the_model_is
from graphpatch_notebook.patches.kinds import Patch, ReplacePatch, ZeroPatch
from graphpatch_notebook.patching import sequence_dim

if TYPE_CHECKING:
    from xarray import DataArray


Shape: TypeAlias = "tuple[int, ...]"

_MIXING = operations.LINEAR_MAPS | operations.PRODUCTS | operations.MIXING
_ATTENTIONS = {"scaled_dot_product_attention", "flex_attention", "multi_head_attention_forward"}


@dataclass(frozen=True)
class HeadLayout:
    """Where heads are in values, by path: their dimension, and how many entries of it belong to one head."""

    dims: Mapping[str, int]
    sizes: Mapping[str, int]

    def part(self, path: str, head: int) -> slice:
        """Returns the entries of a head in dimension `dims[path]`."""
        size = self.sizes[path]
        return slice(size * head, size * (head + 1))


def head_layout(
    pg: PatchableGraph,
    shapes: Mapping[str, Shape],
    count: Any,
    sequences: Mapping[str, int] = MappingProxyType({}),
) -> HeadLayout:
    """Returns the positions of `count` heads in values.

    The shapes of values are given by path, and their sequence dimensions if the user chose positions.

    Raises:
        ExperimentError: A value does not have this number of separate heads, or it is not known where they are.
    """
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ExperimentError(f"heads must be the number of heads, a positive integer, not {count!r}")
    dims, problems = found_or_problems(
        targets(pg, shapes), lambda path, target: _head_dim(pg, target, shapes[path], int(count), sequences.get(path))
    )
    check_problems(problems, f"heads={count} needs values with {count} separate heads:")
    return HeadLayout(dims, {path: shapes[path][dim] // int(count) for path, dim in dims.items()})


def _head_dim(pg: PatchableGraph, target: Target, shape: Shape, count: int, sequence: int | None) -> int:
    """Returns the dimension of the heads in a value; raises a `ValueError`."""
    if count == 1:
        return len(shape) - 1
    names = axes_of(pg.nodes.root, target)
    own = [dim for dim, whole in enumerate(target.kept_dims) if names[whole : whole + 1] == ("head",)]
    if own and shape[own[0]] == count:
        return own[0]
    name, component = _component_near(pg, target)
    heads = component.shape[component.axes.index("head")]
    if heads != count:
        raise ValueError(f"this attention has {heads} heads ({name})")
    channels = component.shape[-1] if component.axes[-1] == "channel" else 0
    if shape[-1] == heads * channels:
        return len(shape) - 1
    if sequence is None:
        with suppress(ValueError):
            sequence = target.kept_dims.index(sequence_dim(pg.nodes.root, target)[0])
    own = [dim for dim in range(1, len(shape) - 1) if shape[dim] == heads and dim != sequence]
    if len(own) != 1:
        raise ValueError("it is not known which dimension has them; give inputs of another length")
    return own[0]


def _component_near(pg: PatchableGraph, target: Target) -> tuple[str, Component]:
    """Returns the component with heads that a value is computed from, or the other way round, without mixing heads."""
    components = pg.components
    evidence = components.evidence
    flow, node = evidence.trails.flow, target.node
    if node.kind == "output" and target.frame.opaque_reason is not None and target.frame.call is not None:
        node = target.frame.call
    start = flow.resolve(node, target.dig)
    headed = {evidence.values[name]: name for name, each in components.items() if "head" in each.axes}

    def before(value: Value) -> list[Value]:
        is_mixing = isinstance(value.node, CallNode) or value.node.whole.op in _MIXING | _ATTENTIONS
        moving = [] if is_mixing else flow.moving(value.node)
        return [each for each in moving if math.prod(each.shape) == math.prod(value.shape)]

    near: list[Value] = [] if start is None else [start]
    name = next((headed[value] for value in walk(near, before) if value in headed), None)
    if name is None:
        name = next(
            (name for value, name in headed.items() if any(each in near for each in walk([value], before))), None
        )
    if name is None:
        z = (
            f"layers[*].attn.z: {components['layers[0].attn.z'].path!r}, ..."
            if "layers[0].attn.z" in components
            else ""
        )
        raise ValueError(f"not a value with separate heads, such as the input of an output projection, or {z or 'z'}")
    return name, components[name]


class ValueParts:
    """The parts of values that the cells of a sweep are about: a head of a value, a position, both, or all of it.

    Without a number of heads, all heads are one part; without positions, all positions are. `sequences` has the
    sequence dimension by path, if there are positions.

    Attributes:
        axes: The axes of the sweep: `path`, and `head` and `position` for parts of values.
        has_rows: Whether each row of the batch has positions of its own.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        values: Mapping[str, Tensor],
        heads: int | None,
        positions: Positions | RowPositions,
        sequences: Mapping[str, int],
    ) -> None:
        self._values = values
        self._heads: HeadLayout | None = None
        self._positions: PositionCells | None = None
        self.axes: dict[str, Any] = {"path": list(values)}
        if heads is not None:
            shapes = {path: tuple(value.shape) for path, value in values.items()}
            self._heads = head_layout(pg, shapes, heads, sequences)
            self.axes["head"] = range(heads)
        if positions is not None:
            self._positions = position_cells(pg, positions, values, sequences)
            self.axes["position"] = self._positions.labels
        self.has_rows = self._positions is not None and bool(self._positions.columns)

    def index(self, path: str, cell: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the index of the part of a value that a cell is about, from the labels of the cell."""
        index: list[Any] = [slice(None)] * self._values[path].ndim
        if self._positions is not None:
            self._positions.place(index, path, cell["position"])
        if self._heads is not None:
            index[self._heads.dims[path]] = self._heads.part(path, cell["head"])
        return tuple(index)


# -- scores of heads ---------------------------------------------------------------------------------------------------

_SCORES = ("induction", "previous token", "duplicate token")


@runs_where_the_model_is
def head_scores(
    pg: PatchableGraph,
    *inputs: Any,
    length: int = 32,
    rows: int = 4,
    seed: int = 0,
    stack: str = "",
    **input_kwargs: Any,
) -> DataArray:
    """Returns how much each attention head attends where induction, previous-token and duplicate-token heads do.

    A score is the attention that a head pays to certain positions, averaged over the positions that have such: to the
    one before (previous token), to earlier ones with the same token (duplicate token), and to those right after these
    (induction). A head that only does this has a score of 1. Padding counts as tokens: give rows of one length.

    Args:
        pg: The graph.
        *inputs: Inputs of the model, positional. By default, random tokens that are repeated once: then induction and
            duplicate-token heads have something to find.
        length: How many random tokens there are, before they are repeated.
        rows: How many sequences of random tokens there are.
        seed: The seed of the random tokens.
        stack: The stack of layers, if the model has several.
        **input_kwargs: Inputs of the model, by keyword.

    Returns:
        An array with the dimensions `score`, `layer` and `head`; NaN where a layer has no attention pattern.

    Raises:
        ExperimentError: No layer has an attention pattern, or no input is a tensor of tokens.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(6)[None])
        >>> scores = head_scores(pg)
        >>> scores.dims, scores.sel(score="induction").shape
        (('score', 'layer', 'head'), (2, 2))

    Source:
        Elhage et al., A mathematical framework for transformer circuits (2021); Olsson et al., In-context learning and
        induction heads (2022).
    """
    check_graph(pg)
    check_input_names(pg.nodes.root, input_kwargs, head_scores)
    xarray = extra("xarray", "an array of scores")
    layers, prefix = layer_count(pg, stack), f"{stack}." if stack else ""
    names = {layer: f"{prefix}layers[{layer}].attn.pattern" for layer in range(layers)}
    found = {layer: name for layer, name in names.items() if name in pg.components}
    if not found:
        component(pg, names[0])  # raises the reason
    given = Inputs(inputs, input_kwargs)
    if not inputs and not input_kwargs:
        given = Inputs((_repeated_tokens(pg.weights[stack], length, rows, seed),))
    embedded = _embedded(pg, prefix)
    tokens = _tokens(given) if embedded is None else None
    try:
        values = record(pg, given, [*found.values(), *([] if embedded is None else [embedded])]).values
    except Exception as error:
        if isinstance(error, PatchNotFiredError) and embedded in error.paths:
            raise ExperimentError("no input is a tensor of tokens, of shape (batch, position)") from error
        if not inputs and not input_kwargs:
            add_note(error, f"head_scores gave the model {2 * length} tokens: if it takes fewer, give length=")
        raise
    if embedded is not None:
        tokens = values[embedded]
    assert tokens is not None
    masks = [mask.to(tokens.device) for mask in _masks(tokens)]
    scores: dict[int, list[Tensor]] = {}
    for layer, name in found.items():
        pattern = arranged(values[name], pg.components[name].axes, ["batch", "head", "position", "key"])
        if pattern.shape[-2:] != (tokens.shape[1],) * 2:
            raise ExperimentError(
                f"{name!r} has shape {tuple(pattern.shape)}, and there are {tokens.shape[1]} tokens: the positions of "
                "the pattern are not those of the tokens"
            )
        scores[layer] = [_mean(pattern.double(), mask) for mask in masks]
    heads = max(len(of_layer[0]) for of_layer in scores.values())
    array = np.full((len(_SCORES), layers, heads), np.nan)
    for layer, of_layer in scores.items():
        for number, score in enumerate(of_layer):
            array[number, layer, : len(score)] = score.cpu().numpy()
    coordinates = {"score": list(_SCORES), "layer": list(range(layers)), "head": list(range(heads))}
    return xarray.DataArray(array, coordinates, list(coordinates), name="attention")  # type: ignore[no-any-return]


def _repeated_tokens(weights: Weights, length: int, rows: int, seed: int) -> Tensor:
    table: Tensor = weights.W_E
    generator = torch.Generator().manual_seed(seed)
    once = torch.randint(len(table), (rows, length), generator=generator)
    return torch.cat([once, once], 1).to(table.device)


def _embedded(pg: PatchableGraph, prefix: str) -> str | None:
    """Returns the path of the tokens, `(batch, position)`, whose embeddings a stack begins with; `None` if unknown."""
    components = pg.components
    flow = components.evidence.trails.flow
    tables = [
        (table.shape[0], index)
        for start, found in components.evidence.starts
        for value in found.tokens
        if start == prefix and (table := table_of(flow, value)) is not None
        for index in flow.moving(value.node)
        if value.shape[:2] == index.shape and components[f"{prefix}@embed"].axes[:2] == ("batch", "position")
    ]
    if tables:  # there are fewer kinds of tokens than tokens
        return flow.path(max(tables, key=lambda each: each[0])[1])
    if len(components.layers) > 1:
        raise ExperimentError(f"{prefix}layers[0] does not read embeddings of tokens, of shape (batch, position)")
    return None


def _tokens(inputs: Inputs) -> Tensor:
    found = [each for each in inputs.tensors() if each.ndim == 2 and not each.is_floating_point()]
    found = [each for each in found if each.dtype != torch.bool]
    if len(found) != 1:
        count = "no input is a tensor" if not found else f"{len(found)} inputs are tensors"
        raise ExperimentError(
            f"{count} of tokens, of shape (batch, position), and the model does not embed one of them"
        )
    return found[0]


def _masks(tokens: Tensor) -> list[Tensor]:
    """Returns the keys that each score is about, for each query."""
    rows, length = tokens.shape
    place = torch.arange(length, device=tokens.device)
    is_before = place[None, :] < place[:, None]
    previous = (place[None, :] == place[:, None] - 1).expand(rows, -1, -1)
    duplicate = (tokens[:, None, :] == tokens[:, :, None]) & is_before
    induction = torch.zeros_like(duplicate)
    induction[:, :, 1:] = duplicate[:, :, :-1]
    return [induction & is_before, previous, duplicate]


def _mean(pattern: Tensor, mask: Tensor) -> Tensor:
    """Returns the attention to the keys in a mask, averaged over the queries that have any."""
    attended = (pattern * mask[:, None]).sum(-1)
    counted = mask.any(-1)
    count = counted.sum()
    return (attended * counted[:, None]).sum((0, 2)) / count


@runs_where_the_model_is
def composition_scores(pg: PatchableGraph, kind: Literal["Q", "K", "V"], *, stack: str = "") -> DataArray:
    """Returns how much of what each head writes is read by each later head, as queries, keys or values.

    The score is the Frobenius norm of the product of the two heads' matrices, divided by the product of their norms:
    `W_OV` of the earlier head, and `W_QK` (or `W_OV`, for values) of the later one. Norms between layers are left out.

    Args:
        pg: The graph.
        kind: What the later head reads it as: `"Q"`, `"K"` or `"V"`.
        stack: The stack of layers, if the model has several.

    Returns:
        An array with the dimensions `layer` and `head` of the earlier head, and `to_layer` and `to_head` of the later
        one; NaN where the second is not in a later layer.

    Raises:
        ExperimentError: `kind` is another one.
        GraphError: The weights of a layer were not found.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> scores = composition_scores(PatchableGraph(model, torch.arange(6)[None]), "K")
        >>> scores.dims, scores.shape
        (('layer', 'head', 'to_layer', 'to_head'), (2, 2, 2, 2))

    Source:
        Elhage et al., A mathematical framework for transformer circuits (2021).
    """
    check_graph(pg)
    if kind not in ("Q", "K", "V"):
        raise ExperimentError(f"kind must be 'Q', 'K' or 'V', not {kind!r}")
    captured(pg).check_weights()
    xarray = extra("xarray", "an array of scores")
    layers, weights = layer_count(pg, stack), pg.weights[stack]
    with torch.no_grad():
        circuits = [
            [_Circuits(pg, stack, layer, head) for head in range(weights.W_O.heads(layer))] for layer in range(layers)
        ]
        heads = max(map(len, circuits))
        array = np.full((layers, heads, layers, heads), np.nan)
        for layer, writers in enumerate(circuits):
            for to_layer in range(layer + 1, layers):
                for head, writer in enumerate(writers):
                    for to_head, reader in enumerate(circuits[to_layer]):
                        array[layer, head, to_layer, to_head] = _composition(writer, reader, kind)
    names = {"layer": layers, "head": heads, "to_layer": layers, "to_head": heads}
    coordinates = {name: list(range(size)) for name, size in names.items()}
    return xarray.DataArray(array, coordinates, list(names), name=f"{kind}-composition")  # type: ignore[no-any-return]


class _Circuits:
    """The two matrices of a head, each as a product of narrow ones: `x W_V W_O`, and `x W_Q W_K^T y`."""

    def __init__(self, pg: PatchableGraph, stack: str, layer: int, head: int) -> None:
        weights, start = pg.weights[stack], f"{stack}." if stack else ""
        heads = weights.W_O.heads(layer)
        k, v = (pg.components[f"{start}layers[{layer}].attn.{part}"].head_of(head, heads) for part in "kv")
        self.q, self.o = weights.W_Q[layer, head].double(), weights.W_O[layer, head].double()
        self.k, self.v = weights.W_K[layer, k].double(), weights.W_V[layer, v].double()


def _composition(writer: _Circuits, reader: _Circuits, kind: str) -> float:
    first, second = {"Q": (reader.q, reader.k.T), "K": (reader.k, reader.q.T), "V": (reader.v, reader.o)}[kind]
    product = _norm(writer.v, writer.o @ first, second)
    narrow = torch.eye(len(writer.o), dtype=writer.o.dtype, device=writer.o.device)
    wide = torch.eye(len(second), dtype=second.dtype, device=second.device)
    return product / (_norm(writer.v, narrow, writer.o) * _norm(first, wide, second))


def _norm(left: Tensor, middle: Tensor, right: Tensor) -> float:
    """Returns the Frobenius norm of `left @ middle @ right`, without the large product."""
    return float((torch.linalg.qr(left).R @ middle @ torch.linalg.qr(right.T).R.T).norm())


def keep_heads(
    pg: PatchableGraph,
    heads: Iterable[tuple[int, int]],
    *,
    method: Literal["mean", "zero"] = "mean",
    reference: Any = None,
    mean_over: Literal["batch", "batch and positions"] = "batch and positions",
    stack: str = "",
) -> dict[str, Patch[Any]]:
    """Returns the patches that ablate all attention heads but some: the circuit of these heads, and all MLPs.

    Args:
        pg: The graph.
        heads: The heads to keep, as pairs of layer and head.
        method: What the output of other heads (`attn.z`) becomes: its mean over the reference, or zero.
        reference: The inputs that means are taken over, for `method="mean"`: a tuple of arguments, a dict of keyword
            arguments, or one value.
        mean_over: Whether there is a mean for each position, which fits inputs of that length only.
        stack: The stack of layers, if the model has several.

    Returns:
        A patch map: for `pg.patch`, or for `pg.edit`, which gives a graph that always runs as this circuit.

    Raises:
        ExperimentError: The head does not exist, or the reference is missing.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> ids = torch.arange(6)[None]
        >>> pg = PatchableGraph(model, ids)
        >>> circuit = pg.edit(keep_heads(pg, [(0, 1), (1, 0)], reference=ids))
        >>> circuit(ids).logits.shape
        torch.Size([1, 6, 20])

    Source:
        Wang et al., Interpretability in the wild (2022).
    """
    check_graph(pg)
    if method not in ("mean", "zero") or mean_over not in ("batch", "batch and positions"):
        raise ExperimentError(
            f"method must be 'mean' or 'zero', and mean_over 'batch' or 'batch and positions', not {method!r} and "
            f"{mean_over!r}"
        )
    if (method == "mean") is (reference is None):
        raise ExperimentError("method='mean' needs reference inputs: reference=..., and method='zero' takes none")
    layers, prefix = layer_count(pg, stack), f"{stack}." if stack else ""
    found = [component(pg, f"{prefix}layers[{layer}].attn.z") for layer in range(layers)]
    counts = [each.shape[_axis_of_heads(each.name, each.axes)] for each in found]
    kept = _checked_heads(heads, counts)
    values = {} if method == "zero" else record(pg, inputs_of(reference), [each.path for each in found]).values
    patches: dict[str, Patch[Any]] = {}
    for layer, each in enumerate(found):
        others = [head for head in range(counts[layer]) if (layer, head) not in kept]
        if not others:
            continue
        dim = _axis_of_heads(each.name, each.axes)
        index: Any = (*[slice(None)] * dim, others)
        if method == "zero":
            patches[each.path] = ZeroPatch(slice=index)
            continue
        pooled = [number for number, axis in enumerate(each.axes) if axis == "batch"]
        if mean_over != "batch":
            pooled += [number for number, axis in enumerate(each.axes) if axis in ("position", "query")]
        patches[each.path] = ReplacePatch(values[each.path].mean(pooled, keepdim=True)[index], slice=index)
    return patches


def _axis_of_heads(name: str, axes: Sequence[str | None]) -> int:
    if "head" not in axes:
        raise ExperimentError(f"{name!r} has no dimension of heads, but {', '.join(map(str, axes))}")
    return list(axes).index("head")


def _checked_heads(heads: Iterable[tuple[int, int]], counts: Sequence[int]) -> set[tuple[int, int]]:
    try:
        return {(range(len(counts))[layer], range(counts[layer])[head]) for layer, head in heads}
    except (IndexError, TypeError, ValueError):
        raise ExperimentError(
            f"heads are pairs of layer and head, such as (3, 5); there are {len(counts)} layers, of {counts[0]} heads"
        ) from None
