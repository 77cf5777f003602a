"""Scores of attention heads, and the model with only some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from graphpatch_notebook.components import Component, FactoredMatrix
from graphpatch_notebook.components.components import table_of
from graphpatch_notebook.components.flow import Value, walk
from graphpatch_notebook.components.names import ComponentName, parse_name
from graphpatch_notebook.errors import ExperimentError, PatchNotFiredError, extra
from graphpatch_notebook.experiments.engine.inputs import (
    Inputs,
    OverExamples,
    as_one,
    check_ablation,
    check_graph,
    input_tensors,
    inputs_of,
    position_dims,
    record,
)
from graphpatch_notebook.experiments.methods.lens import component, layer_count
from graphpatch_notebook.options import check_input_names
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch, ReplacePatch, ZeroPatch
from graphpatch_notebook.patching.model_state import runs_where_the_model_is
from graphpatch_notebook.values import TensorSpec

if TYPE_CHECKING:
    from xarray import DataArray


_SCORES = ("induction", "previous token", "duplicate token")
_PATTERNS = (("batch", "head", "query", "key"), ("batch", "query", "key"))
_LENGTHS = (32, 16, 8, 4)


@runs_where_the_model_is
def head_scores(
    pg: PatchableGraph,
    *inputs: Any,
    length: int | None = None,
    rows: int = 4,
    seed: int = 0,
    stack: str = "",
    batch_size: int | None = None,
    keep_examples: bool = False,
    progress: bool = True,
    executor: Any = None,
    recipe: Any = None,
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
        length: How many random tokens there are, before they are repeated; by default 32, or fewer if the model raises
            an error for so many.
        rows: How many sequences of random tokens there are.
        seed: The seed of the random tokens.
        stack: The stack of layers, if the model has several.
        batch_size: For a dataset in place of the inputs, as for `causal_trace`.
        keep_examples: As for `causal_trace`.
        progress: Whether a progress bar is shown for a dataset.
        executor: Runs batches of a dataset elsewhere, as for `map_batches`.
        recipe: As for `map_batches`.
        **input_kwargs: Inputs of the model, by keyword.

    Returns:
        An array with the dimensions `score`, `layer` and `head`; NaN where a layer has no attention pattern.

    Raises:
        ExperimentError: No layer has an attention pattern, no input is a tensor of tokens, or the model does not take
            so many random tokens.

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
    if examples := OverExamples({"inputs": as_one(inputs, input_kwargs)}, batch_size, keep_examples):
        return examples.run(  # type: ignore[no-any-return]
            pg, head_scores, each={}, stack=stack, progress=progress, executor=executor, recipe=recipe
        )
    xarray = extra("xarray", "an array of scores")
    layers, prefix = layer_count(pg, stack), f"{stack}." if stack else ""
    names = {layer: f"{prefix}layers[{layer}].attn.pattern" for layer in range(layers)}
    found = {layer: name for layer, name in names.items() if name in pg.components}
    if not found:
        component(pg, names[0])  # raises the reason
    embedded = _embedded(pg, prefix)
    tried = [inputs_of(pg, inputs, input_kwargs)]
    if not inputs and not input_kwargs:
        lengths = _LENGTHS if length is None else [length]
        tried = [_repeated_tokens(pg, embedded, each, rows, seed) for each in lengths]
    path, position = embedded.place if embedded is not None else _tokens(pg, tried[0])
    values = _recorded(pg, tried, [*found.values(), path], is_random=not inputs and not input_kwargs)
    tokens = values[path].movedim(position, 1)
    none, masks = torch.zeros(0, len(_SCORES), dtype=torch.float64), _masks(tokens)
    scores = [
        _scores_of(pg, found[layer], values[found[layer]], masks) if layer in found else none for layer in range(layers)
    ]
    array = pad_sequence(scores, batch_first=True, padding_value=np.nan).movedim(-1, 0).numpy()
    coordinates = {"score": list(_SCORES), "layer": list(range(layers)), "head": list(range(array.shape[-1]))}
    return xarray.DataArray(array, coordinates, list(coordinates), name="attention")  # type: ignore[no-any-return]


def _recorded(
    pg: PatchableGraph, tried: Sequence[Inputs], paths: list[str], *, is_random: bool
) -> Mapping[str, Tensor]:
    """Returns the values at paths, the last of which has the tokens, on the first inputs on which the model runs."""
    for given in tried:
        try:
            return record(pg, given, paths).values
        except Exception as error:
            if isinstance(error, PatchNotFiredError) and paths[-1] in error.paths:
                raise ExperimentError("no input is a tensor of tokens, of shape (batch, position)") from error
            if not is_random:
                raise
            failed = error
    raise ExperimentError(
        f"the model fails on few random tokens ({failed}): give length=, half of what it takes"
    ) from failed


def _scores_of(pg: PatchableGraph, name: str, pattern: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """Returns the scores of the heads of a layer, of shape (heads, scores)."""
    axes, count = pg.components[name].axes, masks[0].shape[-1]
    by_head = pattern if "head" in axes else pattern[:, None]
    if axes not in _PATTERNS or by_head.shape[-2:] != (count, count):
        raise ExperimentError(
            f"{name!r} has shape {tuple(by_head.shape)} ({', '.join(map(str, axes))}), and there are {count} tokens: "
            "the positions of the pattern are not those of the tokens"
        )
    return torch.stack([_mean(by_head.double(), mask) for mask in masks], 1).cpu()


@dataclass(frozen=True)
class _Embedded:
    """The tokens whose embeddings a stack begins with: their value, its dimension of positions, and their number."""

    index: Value
    place: tuple[str, int]
    vocabulary: int


def _embedded(pg: PatchableGraph, prefix: str) -> _Embedded | None:
    """Returns the tokens of a stack; `None` if they are unknown."""
    components = pg.components
    flow, axes = (
        components.evidence.trails.flow,
        components[f"{prefix}@embed"].path_axes if f"{prefix}@embed" in components else (),
    )
    of_tokens = [axis for axis in axes if axis != "channel"]
    found = [
        _Embedded(index, (flow.path(index), of_tokens.index("position")), table.shape[0])
        for stack in components.evidence.stacks
        for value in stack.tokens
        if stack.prefix == prefix and (table := table_of(flow, value)) is not None
        for index in flow.moving(value.node)
        if sorted(map(str, of_tokens)) == ["batch", "position"] and axes[-1] == "channel"
        if value.shape[:-1] == index.shape
    ]
    if not found and len(components.layers) > 1:
        raise ExperimentError(f"{prefix}layers[0] does not read embeddings of tokens, of shape (batch, position)")
    return max(found, key=lambda each: each.vocabulary, default=None)  # there are fewer kinds of tokens than tokens


def _repeated_tokens(pg: PatchableGraph, embedded: _Embedded | None, length: int, rows: int, seed: int) -> Inputs:
    flow = pg.components.evidence.trails.flow
    before = walk([embedded.index] if embedded else [], lambda value: flow.moving(value.node) if value.op else ())
    given = next((value for value in before if value.node.kind == "input"), None)
    if embedded is None or given is None:
        raise ExperimentError("it is not known which input has tokens, and how many there are: give inputs")
    once = torch.randint(embedded.vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    tokens = torch.cat([once, once], 1).movedim(1, position_dims(pg, [flow.path(given)], None)[flow.path(given)])
    assert isinstance(given.spec, TensorSpec)
    return Inputs(kwargs={str(given.node.target): tokens.to(given.spec.device)})


def _tokens(pg: PatchableGraph, inputs: Inputs) -> tuple[str, int]:
    """Returns the path of the only tokens among the inputs, and their dimension of positions."""
    integers = {path: each for path, each in input_tensors(pg, inputs).items() if not each.is_floating_point()}
    found = [path for path, each in integers.items() if each.ndim == 2 and each.dtype != torch.bool]
    if len(found) != 1:
        count = "no input is a tensor" if not found else f"{len(found)} inputs are tensors"
        raise ExperimentError(
            f"{count} of tokens, of shape (batch, position), and the model does not embed one of them"
        )
    return found[0], position_dims(pg, found, None)[found[0]]


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
def composition_scores(
    pg: PatchableGraph,
    kind: Literal["Q", "K", "V"] | None = None,
    *,
    senders: str | Iterable[str] | None = None,
    receivers: str | Iterable[str] | None = None,
    stack: str = "",
) -> DataArray:
    """Returns how much of what each component writes is read by each later one, by their weights.

    The score is the Frobenius norm of the product of two matrices, divided by the product of their norms: what the
    sender writes, and what the receiver reads. Of heads these are `W_OV` of the sender, and `W_QK` (or `W_OV`, for
    values) of the receiver. Norms between layers are left out.

    Args:
        pg: The graph.
        kind: For the scores of all pairs of heads: what the later head reads as `"Q"`, `"K"` or `"V"`.
        senders: In place of `kind`: names, or patterns, of heads (`layers[0].attn.heads[3].z`), of MLPs
            (`layers[0].mlp_out`, `W_out`), of neurons (`layers[0].mlp.post[..., 17]`, their rows of `W_out`), or of the
            embeddings (`@embed`, `@pos_embed`).
        receivers: Likewise: `layers[1].attn.heads[2].q`, `.k` and `.v` (by the number of the head of queries),
            `layers[1].mlp.pre` and `layers[1].mlp.pre[..., 17]` (`W_in`, or `W_gate` of a gated MLP), `@logits`.
        stack: The stack of layers, if the model has several.

    Returns:
        For `kind`, an array with the dimensions `layer` and `head` of the earlier head, and `to_layer` and `to_head` of
        the later one; else with the dimensions `sender` and `receiver`. NaN where the second does not come after the
        first.

    Raises:
        ExperimentError: `kind` is another one, both of `kind` and names are given, or names are of other components.
        GraphError: The weights of a layer were not found.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(6)[None])
        >>> scores = composition_scores(pg, "K")
        >>> scores.dims, scores.shape
        (('layer', 'head', 'to_layer', 'to_head'), (2, 2, 2, 2))
        >>> queries = "layers[*].attn.heads[*].q"
        >>> scores = composition_scores(pg, senders=["@embed", "layers[*].mlp_out"], receivers=queries)
        >>> scores.dims, scores.shape
        (('sender', 'receiver'), (3, 4))

    Source:
        Elhage et al., A mathematical framework for transformer circuits (2021).
    """
    check_graph(pg)
    if kind not in ("Q", "K", "V", None):
        raise ExperimentError(f"kind must be 'Q', 'K' or 'V', not {kind!r}")
    if (kind is None) != (senders is not None and receivers is not None):
        raise ExperimentError("give kind= for all pairs of heads, or senders= and receivers=")
    captured(pg).check_weights()
    xarray = extra("xarray", "an array of scores")
    matrices = _Matrices(pg, stack)
    with torch.no_grad():
        writers = matrices.named(senders or "layers[*].attn.heads[*].z", matrices.written)
        readers = matrices.named(receivers or f"layers[*].attn.heads[*].{str(kind).lower()}", matrices.read)
        alike: dict[Any, list[int]] = {}
        for number, reader in enumerate(readers):
            alike.setdefault((reader.place, reader.matrix.shape), []).append(number)
        together = {key: torch.stack([readers[number].matrix for number in of]) for key, of in alike.items()}
        scores = np.full((len(writers), len(readers)), np.nan)
        for row, writer in enumerate(writers):
            for key, stacked in together.items():
                if writer.place < key[0]:
                    norms = (writer.matrix @ stacked).norm(dim=(1, 2)) / writer.matrix.norm() / stacked.norm(dim=(1, 2))
                    scores[row, alike[key]] = norms.cpu().numpy()
    if kind is None:
        labels = {"sender": [each.name for each in writers], "receiver": [each.name for each in readers]}
        return xarray.DataArray(scores, labels, list(labels), name="composition")  # type: ignore[no-any-return]
    by_head = [np.array([[each.place[0], each.head] for each in ends]).T for ends in (writers, readers)]
    heads = 1 + max(each.head for each in writers)
    array = np.full((matrices.layers, heads) * 2, np.nan)
    (layer, head), (to_layer, to_head) = by_head
    array[layer[:, None], head[:, None], to_layer, to_head] = scores
    names = {"layer": matrices.layers, "head": heads, "to_layer": matrices.layers, "to_head": heads}
    coordinates = {name: list(range(size)) for name, size in names.items()}
    return xarray.DataArray(array, coordinates, list(names), name=f"{kind}-composition")  # type: ignore[no-any-return]


class _End(NamedTuple):
    """What a component writes, `(size, channels)`, or reads, `(channels, size)`, up to an orthogonal factor.

    Its `place` in the stream is its layer, and 1 for what comes after attention there.
    """

    name: str
    place: tuple[int, int]
    head: int
    matrix: Tensor


class _Matrices:
    """The matrices of components of a stack."""

    def __init__(self, pg: PatchableGraph, stack: str) -> None:
        self.layers = layer_count(pg, stack)
        self._weights, self._components = pg.weights[stack], pg.components
        self._start = f"{stack}." if stack else ""

    def named(self, given: str | Iterable[str], matrix: Callable[[ComponentName, Any], Tensor]) -> list[_End]:
        """Returns the ends of names or patterns; `matrix` maps a name of one component, and its layer and head."""
        found = []
        for text in [given] if isinstance(given, str) else given:
            try:
                name = parse_name(text.removeprefix(self._start))
            except ValueError as error:
                raise ExperimentError(str(error)) from None
            if any(part not in (..., slice(None)) for part in name.index[:-1]):
                raise ExperimentError(f"{text!r}: give neurons as mlp.post[..., 17]")
            has_heads = "heads" in name.words
            for layer in [None] if name.layers is None else _each(name.layers, self.layers):
                heads = _each(name.members, self._weights.W_O.heads(layer or 0)) if has_heads else [None]
                for head in heads:
                    one = replace(name, layers=layer, members=head)
                    value = matrix(one, (layer, head)).double()
                    found.append(_End(f"{self._start}{one}", self._place(one), head or 0, value))
        return found

    def _place(self, name: ComponentName) -> tuple[int, int]:
        if not isinstance(name.layers, int):
            return (self.layers if name.words == ("@logits",) else -1), 0
        # An MLP beside attention reads what comes before both.
        is_beside = name.words[-1] == "pre" and f"{self._start}layers[{name.layers}].resid_mid" not in self._components
        return name.layers, int(name.words[0].startswith("mlp") and not is_beside)

    def written(self, name: ComponentName, at: Any) -> Tensor:
        """Returns the matrix of a sender."""
        weights, part = self._weights, ".".join(name.words)
        if part == "attn.heads.z":
            head: FactoredMatrix = weights.W_OV[at]
            return _short(head.left) @ head.right.double()
        if part in ("mlp_out", "mlp.post"):
            return _short(weights.W_out[at[0]][_neurons(name)])
        if part in ("@embed", "@pos_embed"):
            return _short(weights.W_E if part == "@embed" else weights.W_pos)
        raise ExperimentError(
            f"{name} is not a sender, such as layers[0].attn.heads[3].z, mlp_out, mlp.post and @embed"
        )

    def read(self, name: ComponentName, at: Any) -> Tensor:
        """Returns the matrix of a receiver."""
        weights, part = self._weights, ".".join(name.words)
        if part in ("attn.heads.q", "attn.heads.k", "attn.heads.v"):
            both: FactoredMatrix = weights.W_OV[at] if part[-1] == "v" else weights.W_QK[at]
            first, second = (both.right.mT, both.left) if part[-1] == "k" else (both.left, both.right.mT)
            return first.double() @ _short(second).mT
        if part == "mlp.pre":
            inside = weights.W_in if at[0] in weights.W_gate.missing else weights.W_gate
            return _short(inside[at[0]].mT[_neurons(name)]).mT
        if part == "@logits":
            return _short(weights.W_U.mT).mT
        raise ExperimentError(f"{name} is not a receiver, such as layers[1].attn.heads[3].q, mlp.pre and @logits")


def _neurons(name: ComponentName) -> Any:
    """Returns the index of the rows of the neurons in a name."""
    last = name.index[-1] if name.index else slice(None)
    return [last] if isinstance(last, int) else slice(None) if last is ... else last


def _each(numbers: Any, count: int) -> list[int]:
    """Returns the numbers of layers or heads in a name, counted from the start."""
    every = range(count)
    try:
        return [*every[numbers]] if isinstance(numbers, slice) else [every[n] for n in np.atleast_1d(numbers)]
    except IndexError:
        raise ExperimentError(f"{numbers} is out of range: there are {count}") from None


def _short(matrix: Tensor) -> Tensor:
    """Returns a matrix with as few rows as it has columns, without an orthogonal factor that leaves norms alone."""
    wide: Tensor = matrix.double()
    return wide if len(wide) <= wide.shape[1] else torch.linalg.qr(wide).R


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
    check_ablation(method, reference, mean_over, ("mean", "zero"))
    layers, prefix = layer_count(pg, stack), f"{stack}." if stack else ""
    found = [component(pg, f"{prefix}layers[{layer}].attn.z") for layer in range(layers)]
    counts = [_head_count(each) for each in found]
    kept = _checked_heads(heads, counts)
    values = {} if method == "zero" else record(pg, inputs_of(pg, reference), [each.name for each in found]).values
    patches: dict[str, Patch[Any]] = {}
    for layer, each in enumerate(found):
        others = [head for head in range(counts[layer]) if (layer, head) not in kept]
        if not others:
            continue
        index: Any = (..., others, slice(None))
        pooled = {"batch"} if mean_over == "batch" else {"batch", "position"}
        dims = [number for number, axis in enumerate(each.axes) if axis in pooled]
        mean = values[each.name].mean(dims, keepdim=True)[index] if values else None
        patches[each.name] = ZeroPatch(slice=index) if mean is None else ReplacePatch(mean, slice=index)
    return patches


def _head_count(each: Component) -> int:
    if each.axes[-2:] != ("head", "channel"):
        raise ExperimentError(f"{each.name!r} has no dimension of heads, but {', '.join(map(str, each.axes))}")
    return each.shape[-2]


def _checked_heads(heads: Iterable[tuple[int, int]], counts: Sequence[int]) -> set[tuple[int, int]]:
    try:
        return {(range(len(counts))[layer], range(counts[layer])[head]) for layer, head in heads}
    except (IndexError, TypeError, ValueError):
        raise ExperimentError(
            f"heads are pairs of layer and head, such as (3, 5); there are {len(counts)} layers, of {counts[0]} heads"
        ) from None
