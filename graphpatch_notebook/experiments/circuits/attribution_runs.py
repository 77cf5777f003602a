"""The runs behind an attribution graph.

1. The model runs once with gradients, its attention patterns, denominators of norms and gates frozen (`features`). What
   MLPs write is taken as given: it is the sum of what features write (`features`), and an error.
2. A logit, or a feature, is then a linear function of a state of the stream. One derivative of that run gives what each
   token, feature and error adds to it: many functions of one layer go together, as rows of one backward pass.
3. Another run, in which all of these are zero, shows what constants add, and how exact the sums are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from graphpatch_notebook.components.names import parse_name
from graphpatch_notebook.errors import ExperimentError, extra
from graphpatch_notebook.experiments.attribution.rules import FrozenDenominators
from graphpatch_notebook.experiments.circuits.attribution_graph import Array, AttributionGraph, GraphNode
from graphpatch_notebook.experiments.circuits.features import FrozenRun, Linearized, linearized, rows_of
from graphpatch_notebook.experiments.engine.inputs import Inputs, check_graph, inputs_of, record
from graphpatch_notebook.experiments.methods.lens import component
from graphpatch_notebook.options import check_input_names
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import CustomPatch, Patch, ReplacePatch
from graphpatch_notebook.patching.model_state import runs_where_the_model_is
from graphpatch_notebook.texts import token_text

if TYPE_CHECKING:
    from xarray import DataArray


@runs_where_the_model_is
def attribution_graph(
    pg: PatchableGraph,
    *inputs: Any,
    target: int | str | Sequence[int | str] | None = None,
    replacements: Any = None,
    position: int = -1,
    stack: str = "",
    max_nodes: int = 5000,
    max_bytes: int = 2**29,
    **input_kwargs: Any,
) -> AttributionGraph:
    """Returns what features, tokens and errors add to each other, and to the logits, on one prompt.

    Features are the latents of transcoders in place of the MLPs, or else their neurons. With attention patterns, the
    denominators of norms and the gates of neurons frozen, each is a linear function of all that was written to the
    stream before, as far as it is active: an edge has the weight of what one node adds to another. What features do not
    explain of an MLP is an error, a node of its own; so is all that a mixer, or an MLP without features, writes.

    Args:
        pg: The graph. Transcoders may be spliced in, by `pg.splice({(read, write): transcoder})`.
        *inputs: Inputs of the model, positional: one prompt.
        target: The token whose logit is explained, or several: numbers or texts. By default, the most probable ones:
            those that have 95% of the probability, at most ten. What is explained is the logit less the mean of all.
        replacements: Transcoders to splice in, as `pg.splice` takes them.
        position: The position of the logits. Where the model returns those of some positions alone, derivatives say
            which ones these are; of a single one, -1 is the last position that it reads.
        stack: The stack of layers, if the model has several.
        max_nodes: How many features are nodes at most: those with the largest influence on the logits.
        max_bytes: The memory limit for derivatives and edges. Weights do not change.
        **input_kwargs: Inputs of the model, by keyword.

    Returns:
        The graph. `graph.completeness` is how exact the sums are: more than rounding, if something depends on the
        stream that is not frozen. `graph.skipped` names what has no features.

    Raises:
        ExperimentError: There are several prompts, no layers or logits that are known, too many features for
            `max_bytes`, or something is spliced in that is not a transcoder.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(6)[None])
        >>> graph = attribution_graph(pg, torch.arange(6)[None], target=3)
        >>> graph.completeness < 1e-3, len(graph.pruned().nodes) < len(graph.nodes)
        (True, True)

    Source:
        Ameisen et al., Circuit tracing: revealing computational graphs in language models (2025).
    """
    check_graph(pg, has_gradients=True)
    check_input_names(pg.nodes.root, input_kwargs, attribution_graph)
    given = inputs_of(pg, inputs, input_kwargs)
    if replacements is not None:
        pg = pg.splice(replacements)
    return _Graph(pg, given, linearized(pg, stack), position, max_nodes, max_bytes).of(target)


class _Explained(NamedTuple):
    """What is added to linear functions of values.

    Attributes:
        numbers: The numbers of features; those of logits come after these.
        added: What all features, errors and embeddings add, (functions, sources).
        change: The sum of that, as another run shows it.
        constants: What constants add.
    """

    numbers: Any
    added: Array
    change: Array
    constants: Array


class _Graph:
    """Computes an attribution graph."""

    def __init__(
        self, pg: PatchableGraph, inputs: Inputs, plan: Linearized, position: int, max_nodes: int, max_bytes: int
    ) -> None:
        self._pg, self._plan, self._most, self._bytes = pg, plan, max_nodes, max_bytes
        stack = parse_name(plan.start).stack
        self._end = component(pg, "@logits").name
        self._logits = pg.weights[stack].unembedding if pg.weights[stack].changes_logits else self._end
        self._layers = pg.components.layers[stack]
        prefix = f"{stack}." if stack else ""
        self._last = component(pg, f"{prefix}layers[{self._layers - 1}].resid_post").name
        self.run = FrozenRun(pg, inputs, plan, (self._logits, self._end, self._last))
        first = pg.components[plan.start]
        batch = first.axes.index("batch") if "batch" in first.axes else None
        if batch is None or self.run.values[plan.start].shape[batch] != 1:
            raise ExperimentError("an attribution graph is that of one prompt: give inputs with one row")
        self._tokens = tuple(inputs.attrs(pg).get("tokens", ()))
        self._length = len(rows_of(self.run.values[plan.start]))
        for each in plan.features:
            each.activate(self.run)
        self._output = rows_of(self.run.values[self._logits])
        self._row, self._position = self._place(position)
        counts = [len(each.values) for each in plan.features]
        self._owner = np.repeat(np.arange(len(counts)), counts)
        self._within = np.concatenate([np.arange(0), *map(np.arange, counts)])
        self._errors = {path: self._error(path) for path in plan.errors}
        leaves = dict.fromkeys(plan.leaves, torch.zeros(()))
        leaves |= {path: constant[0] for each in plan.features for path, constant in each.constants.items()}
        self._none = self.run.with_leaves(leaves)

    def _place(self, position: Any) -> tuple[int, int]:
        """Returns the row of the logits at a position, and this position: derivatives say which one a row reads.

        Raises:
            ExperimentError: There is no such position, or the model returns no logits of it.
        """
        length, count, end = self._length, len(self._output), self.run.values[self._last]
        if type(position) is not int or not -length <= position < length:
            raise ExperimentError(f"position must be one of {length}, not {position!r}")
        rows = torch.tensor([position % length] if count == length else list(range(count)))
        ones = self._output.new_ones(len(rows), self._output.shape[-1]).cumsum(-1)
        found = self.run.derivatives(self._logits, ones, rows, [end])
        reads = [] if found[0] is None else [row.any(-1).nonzero().flatten().tolist() for row in found[0]]
        if count == 1 and position == -1 and reads and reads[0]:
            return 0, max(reads[0])
        for row, read in zip(rows.tolist(), reads, strict=False):
            if read == [position % length]:
                return row, position % length
        raise ExperimentError(
            f"the model returns no logits of position {position} alone: its {count} rows of logits read the positions "
            f"{reads[0] if len(reads) == 1 else reads}"
        )

    def _error(self, path: str) -> Tensor:
        """Returns what no feature explains of a value, (positions, channels)."""
        rest = rows_of(self.run.leaves[path]).clone()
        writers = [each for each in self._plan.features if path in each.written]
        for each in writers:
            rest.index_add_(0, each.positions, -each.written[path].to(rest.dtype))
        return rest - writers[0].constants[path] if writers else rest

    def contributions(self, path: str, directions: Tensor, at: Tensor) -> Array:
        """Returns what all features, errors and embeddings add to functions of a value, (functions, sources)."""
        leaves = self.run.leaves
        every = zip(leaves, self.run.derivatives(path, directions, at, list(leaves.values())), strict=True)
        derivatives = {name: each for name, each in every if each is not None}
        found = [each.contributions(derivatives) for each in self._plan.features]
        given = self._errors | {self._plan.start: rows_of(self.run.leaves[self._plan.start])}
        for name, rows in given.items():
            none = rows.new_zeros(len(at), self._length)
            found.append((derivatives[name] * rows).sum(-1) if name in derivatives else none)
        return torch.cat(found, 1).float().cpu().numpy()

    def _explained(self, numbers: Any, path: str, coefficients: Tensor, at: Tensor, sums: Tensor) -> _Explained:
        """Returns what is added to functions of a value, and to their sums by constants."""
        value, none = (rows_of(values[path]) for values in (self.run.values, self._none))
        change = (coefficients * (value - none)[at]).sum(-1)
        found = (each.float().cpu().numpy() for each in (change, sums - change))
        return _Explained(numbers, self.contributions(path, coefficients, at), *found)

    def _of_features(self, features: Any) -> Iterator[_Explained]:
        """Yields what is added to features, for those that go together."""
        for number, each in enumerate(self._plan.features):
            own = features[self._owner[features] == number]
            value = self.run.values[each.read]
            most = max(1, self._bytes // (64 * value.numel() * value.element_size()))
            for some in np.split(own, range(most, len(own), most)) if len(own) else ():
                which = torch.from_numpy(self._within[some])
                readers = each.readers(self.run, which)
                yield self._explained(some, each.read, readers, each.positions[which], each.sums[which])

    def of(self, target: Any) -> AttributionGraph:
        """Returns the graph of some logits."""
        tokens, probabilities = self._targets(target)
        size = self._output.shape[-1]
        directions = functional.one_hot(tokens, size).to(self._output.dtype) - 1 / size
        count, sources = len(self._owner), len(self._owner) + self._length * (len(self._errors) + 1)
        if min(count, self._most) * sources * 4 > self._bytes:
            raise ExperimentError(f"{count:,} features and {sources:,} sources take more than max_bytes={self._bytes}")
        at, sums = torch.full((len(tokens),), self._row), directions @ self._output[self._row]
        found = [self._explained(np.arange(count, count + len(tokens)), self._logits, directions, at, sums)]
        for wanted in self._ranked(found, probabilities):
            found += self._of_features(wanted)
        every = _Explained(*map(np.concatenate, zip(*found, strict=True)))
        return self._assembled(_Explained(*(each[every.numbers.argsort()] for each in every)), tokens, probabilities)

    def _targets(self, target: Any) -> tuple[Tensor, Array]:
        """Returns the tokens of the logits, and their probabilities; by default, the most probable ones.

        Raises:
            ExperimentError: A token is not in the vocabulary.
        """
        every = rows_of(self.run.values[self._end])[self._row].float().softmax(-1)
        if target is None:
            found = every.sort(descending=True)
            count = int((found.values.cumsum(0) < _PROBABLE).sum()) + 1
            tokens = found.indices[: min(count, _MOST_LOGITS)]
        else:
            given = [target] if isinstance(target, (int, str)) else list(target)
            numbers = [self._pg.to_single_token(each) if isinstance(each, str) else each for each in given]
            if not numbers or not all(type(each) is int and 0 <= each < len(every) for each in numbers):
                raise ExperimentError(
                    f"target must be tokens from 0 to {len(every) - 1}, or texts of these, not {target!r}"
                )
            tokens = torch.tensor(numbers)
        return tokens, every[tokens].cpu().numpy()

    def _ranked(self, found: Sequence[_Explained], probabilities: Array) -> Iterator[Any]:
        """Yields the features whose sums are wanted, by their influence on the logits that is known so far."""
        count = len(self._owner)
        left = min(self._most, count)
        while left:
            if left == count:
                chosen = np.arange(count)
            else:
                known = np.concatenate([each.numbers for each in found])[len(probabilities) :]
                shares = np.abs(np.concatenate([each.added for each in found]))
                shares /= np.maximum(shares.sum(1, keepdims=True), 1e-10)
                influence = wave = probabilities @ shares[: len(probabilities), :count]
                while len(known) and wave[known].any():
                    wave = wave[known] @ shares[len(probabilities) :, :count]
                    influence = influence + wave
                influence[known] = -1
                least = min(left, max(_LEAST_BATCH, self._most // 8))
                chosen = np.sort(np.argsort(-influence, kind="stable")[:least])
            left -= len(chosen)
            yield chosen

    def _assembled(self, every: _Explained, tokens: Tensor, probabilities: Array) -> AttributionGraph:
        """Returns the graph of features and logits, in the order of their numbers."""
        count, chosen = len(self._owner), every.numbers[: -len(tokens)]
        nodes = [*map(self._feature, chosen), *self._given()]
        first = len(nodes)
        nodes += [
            GraphNode(f"@logits[{token}]", self._position, "logit", self._layers, float(each), self._text(token))
            for token, each in zip(tokens.tolist(), probabilities, strict=True)
        ]
        targets = [*range(len(chosen)), *range(first, len(nodes))]
        weights = np.zeros((len(nodes), len(nodes)), dtype=np.float32)
        weights[targets, :first] = np.hstack([every.added[:, chosen], every.added[:, count:]])
        constants, left_out = np.zeros((2, len(nodes)), dtype=np.float32)
        constants[targets] = every.constants
        left_out[targets] = np.delete(every.added[:, :count], chosen, 1).sum(1)
        scale = np.abs(every.added).sum(1) + np.abs(every.constants)
        lost = np.abs(every.added.sum(1, dtype=np.float64) - every.change) / np.maximum(scale, 1e-30)
        skipped = dict(self._plan.skipped)
        return AttributionGraph(tuple(nodes), weights, constants, left_out, float(lost.max()), self._tokens, skipped)

    def sources(self) -> list[GraphNode]:
        """Returns all that contributes: features, errors and embeddings, in the order of `contributions`."""
        return [*map(self._feature, range(len(self._owner))), *self._given()]

    def _given(self) -> list[GraphNode]:
        places = range(self._length)
        errors = (
            GraphNode(name, at, "error", layer, label=f"error {layer}")
            for layer, name in self._plan.errors.values()
            for at in places
        )
        texts = [self._tokens[at] if self._tokens else str(at) for at in places]
        return [*errors, *(GraphNode("@embed", at, "embed", -1, label=text) for at, text in enumerate(texts))]

    def _feature(self, number: int) -> GraphNode:
        each, at = self._plan.features[self._owner[number]], self._within[number]
        own = int(each.numbers[at])
        name = each.name + each.item.format(own)
        return GraphNode(
            name, int(each.positions[at]), "feature", each.layer, float(each.values[at]), f"{each.layer}.{own}",
            float(each.gains[at]),
        )  # fmt: skip

    def _text(self, token: int) -> str:
        return str(token) if self._pg.tokenizer is None else token_text(self._pg.tokenizer, token)


_PROBABLE, _MOST_LOGITS = 0.95, 10
_LEAST_BATCH = 64


# -- attention ---------------------------------------------------------------------------------------------------------


@runs_where_the_model_is
def attribute_score(
    pg: PatchableGraph,
    *inputs: Any,
    layer: int,
    head: int,
    query: int,
    key: int,
    replacements: Any = None,
    stack: str = "",
    **input_kwargs: Any,
) -> DataArray:
    """Returns what features, tokens and errors add to a score of attention: at the query, and at the key.

    A score is linear in what its query is made of, with the key held, and in what its key is made of, with the query
    held: what writes to the stream at the position of one or the other, or is moved there, adds to it.

    Args:
        pg: The graph, as for `attribution_graph`.
        *inputs: Inputs of the model, positional: one prompt.
        layer: The number of the layer.
        head: The number of the head.
        query: The position that attends.
        key: The position that it attends to.
        replacements: Transcoders, as for `attribution_graph`.
        stack: The stack of layers, if the model has several.
        **input_kwargs: Inputs of the model, by keyword.

    Returns:
        An array with the dimensions `side` (`"query"`, `"key"`) and `node`, with the coordinates `label`, `path` and
        `position`; nodes that come later have 0. `attrs["score"]` is the score, `attrs["constant"]` what biases add to
        it, by side: their sum with a row of the array is the score.

    Raises:
        ExperimentError: As for `attribution_graph`, or the scores of the layer are not known, or the key is masked.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(6)[None])
        >>> parts = attribute_score(pg, torch.arange(6)[None], layer=1, head=0, query=5, key=2)
        >>> total = parts.sum("node") + torch.tensor(parts.attrs["constant"]).numpy()
        >>> bool(abs(total - parts.attrs["score"]).max() < 1e-4)
        True
    """
    check_graph(pg, has_gradients=True)
    check_input_names(pg.nodes.root, input_kwargs, attribute_score)
    xarray = extra("xarray", "an array of contributions")
    given = inputs_of(pg, inputs, input_kwargs)
    pg = pg if replacements is None else pg.splice(replacements)
    start = f"{stack}.layers[{layer}].attn" if stack else f"layers[{layer}].attn"
    scores, found, constants = component(pg, f"{start}.scores"), [], []
    for held in ("k", "q"):
        plan = linearized(pg, stack)
        names = (f"{start}.{held}_rot", f"{start}.{held}")
        plan.constants.append(next(name for name in names if name in pg.components))
        plan.read.append(scores.name)
        graph = _Graph(pg, given, plan, -1, 0, 2**29)
        value = graph.run.values[scores.name]
        sizes, at = dict(zip(map(str, scores.axes), value.shape, strict=True)), {"batch": 0}
        for name, number in {"head": head, "query": query, "key": key}.items():
            size = sizes.get(name, 0)
            if type(number) is not int or not -size <= number < size:
                raise ExperimentError(f"{name} must be one of {size} in {scores.name!r}, not {number!r}")
            at[name] = number % size
        key = at["key"]
        row = int(np.ravel_multi_index([at[str(axis)] for axis in scores.axes[:-1]], value.shape[:-1]))
        score = float(rows_of(value)[row, key])
        if score <= torch.finfo(value.dtype).min / 2:
            raise ExperimentError(f"the key at {key} is masked for the query at {at['query']}: there is no score")
        direction = functional.one_hot(torch.tensor([key]), value.shape[-1]).to(value.dtype)
        found.append(graph.contributions(scores.name, direction, torch.tensor([row]))[0])
        constants.append(score - float(found[-1].sum(dtype=np.float64)))
    nodes = graph.sources()
    labels = _labels(nodes)
    attrs = {"score": score, "constant": constants, **given.attrs(pg)}
    return xarray.DataArray(np.stack(found), {"side": ["query", "key"], **labels}, ["side", "node"], attrs=attrs)  # type: ignore[no-any-return]


def _scaled(value: Tensor, *, at: int, factor: float, has_channels: bool) -> Tensor:
    """Returns a value of one prompt with a factor at a position."""
    factors = value.new_ones(value.shape[:-1] if has_channels else value.shape)
    factors.view(-1)[at] = factor
    return value * (factors[..., None] if has_channels else factors)


def _labels(nodes: Sequence[GraphNode]) -> dict[str, Any]:
    fields = {"label": "label", "path": "name", "position": "position"}
    return {name: ("node", [getattr(node, field) for node in nodes]) for name, field in fields.items()}


# -- interventions -----------------------------------------------------------------------------------------------------


@runs_where_the_model_is
def steer(
    pg: PatchableGraph,
    graph: AttributionGraph,
    *inputs: Any,
    factors: Mapping[int, float],
    frozen: bool = False,
    replacements: Any = None,
    **input_kwargs: Any,
) -> DataArray:
    """Returns how nodes change if some are multiplied by factors: as a graph predicts it, and in runs of the model.

    Args:
        pg: The graph of the model, as for `attribution_graph`.
        graph: The attribution graph; pruned, it predicts with the edges that it has left.
        *inputs: The prompt of the graph.
        factors: By the numbers of features, errors or embeddings (`graph.number`), what they are multiplied by.
        frozen: Whether attention patterns, denominators and errors stay as they were, as in the graph. Then prediction
            and run agree, as long as the same features are active; of neurons, for small changes only, since their
            nonlinearity is not a line. Otherwise the whole model responds.
        replacements: Transcoders, as for `attribution_graph`.
        **input_kwargs: Inputs of the model, by keyword.

    Returns:
        An array with the dimensions `run` (`"predicted"`, `"actual"`) and `node` (features and logits, with the
        coordinates `label`, `path` and `position`), in the units of the graph's weights; without the changed nodes.

    Raises:
        ExperimentError: There are factors of logits or of unknown nodes, or the prompt has another length.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(6)[None])
        >>> graph = attribution_graph(pg, torch.arange(6)[None], target=3)
        >>> changes = steer(pg, graph, torch.arange(6)[None], factors={0: 0.0})
        >>> changes.dims
        ('run', 'node')
    """
    check_graph(pg)
    xarray = extra("xarray", "an array of changes")
    given = inputs_of(pg, inputs, input_kwargs)
    pg = pg if replacements is None else pg.splice(replacements)
    stack = parse_name(next((node.name for node in graph.nodes if node.kind == "feature"), "layers[0]")).stack
    plan = linearized(pg, stack)
    patches: dict[Any, list[Patch[Any]]] = {}
    for number, factor in graph.checked(factors).items():
        node = graph.nodes[number]
        name, has_channels = (plan.start, True) if node.kind == "embed" else (node.name, node.kind == "error")
        scaled = partial(_scaled, at=node.position, factor=factor, has_channels=has_channels)
        patches.setdefault(name, []).append(CustomPatch(custom_op=scaled))
    logits = pg.weights[stack].unembedding if pg.weights[stack].changes_logits else component(pg, "@logits").name
    bases = {each.name: each for each in plan.features}
    read = {name: each.read if each.item != "[{}]" else name for name, each in bases.items()}
    held = [*plan.constants, *(name for _, name in plan.errors.values() if name.endswith(".error"))] if frozen else []
    denominators = FrozenDenominators()
    with denominators if frozen else nullcontext():
        clean = record(pg, given, [*read.values(), logits, plan.start, *held]).values
    lengths = len(rows_of(clean[plan.start])), len(rows_of(clean[logits]))
    if lengths[0] != graph.length or lengths[1] not in (1, graph.length):
        raise ExperimentError(
            f"the graph is of {graph.length} positions, and these inputs give {lengths[0]}, with logits of {lengths[1]}"
        )
    for name in held:
        patches.setdefault(name, []).insert(0, ReplacePatch(value=clean[name]))
    with denominators.again() if frozen else nullcontext(), pg.patch(patches):
        changed = record(pg, given, [*read.values(), logits]).values
    predicted, actual, shown = graph.predicted(factors), list[float](), list[int]()
    for number, node in enumerate(graph.nodes):
        if node.kind not in ("feature", "logit") or number in factors:
            continue
        path = logits if node.kind == "logit" else read[node.name[: node.name.rindex("[")]]
        change = rows_of(changed[path]) - rows_of(clean[path])
        row = change[node.position if len(change) > 1 else 0]
        own = int(node.name[node.name.rindex("[") :].strip("[], .").rpartition(" ")[2])
        actual.append(float(row[own] - (row.mean() if node.kind == "logit" else 0.0)))
        shown.append(number)
    labels = _labels([graph.nodes[number] for number in shown])
    values = np.stack([predicted[shown], np.array(actual, dtype=np.float32)])
    return xarray.DataArray(values, {"run": ["predicted", "actual"], **labels}, ["run", "node"])  # type: ignore[no-any-return]
