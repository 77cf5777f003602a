"""Scores of edges: how much of the effect passes from one component to another directly, by gradients.

1. A run on the clean inputs records what components write, and what norms read.
2. A run on the corrupted inputs records the same, and takes the gradient of the metric where components read.
3. From each receiver, gradients go back along the sums of the stream (`stream`), through norms, which are run again, to
   what the senders write. All receivers that read the same value go together.

No component is run again, so the costs do not depend on the number of edges.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.components.flow import Value
from graphpatch_notebook.errors import ExperimentError, UnknownPathError, extra, level_of_caller, warn
from graphpatch_notebook.experiments.attribution.gradient_runs import (
    Choices,
    Routing,
    gradients_of,
    metric_number,
    no_gradient,
)
from graphpatch_notebook.experiments.attribution.rules import (
    METHODS,
    DerivativeRules,
    Points,
    check_method,
    path_fractions,
    warn_of_loss,
    widened,
)
from graphpatch_notebook.experiments.circuits.nodes import Nodes, Reader, WrittenPositions, nodes_of
from graphpatch_notebook.experiments.circuits.runs import Batch, CircuitRuns, batches_of
from graphpatch_notebook.experiments.circuits.stream import StreamStep, Sum, Writer, rows_of
from graphpatch_notebook.experiments.engine import map_batches
from graphpatch_notebook.experiments.engine.inputs import Inputs, Positions, check_ends, check_graph, record
from graphpatch_notebook.experiments.methods.sweeps import run_sweep
from graphpatch_notebook.experiments.results import metric_name
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import CustomPatch, Patch, ProbePatch, ReplacePatch
from graphpatch_notebook.patching.model_state import preserved, runs_where_the_model_is
from graphpatch_notebook.paths import nearest
from graphpatch_notebook.torch_compat import without_torch_functions

if TYPE_CHECKING:
    from xarray import DataArray

Values: TypeAlias = "Mapping[str, Tensor]"
"""What was recorded in a run, by path."""


@runs_where_the_model_is
def attribute_edges(
    pg: PatchableGraph,
    metric: Callable[[Any], Any] | Sequence[Callable[[Any], Any]],
    clean: Any,
    corrupted: Any,
    *,
    method: Literal["gradient", "integrated", "secant", "exact"] = "gradient",
    steps: int = 5,
    points: Points = "midpoint",
    one_sided: bool = False,
    routing: Routing = "free",
    senders: str | Iterable[str] | None = None,
    receivers: str | Iterable[str] | None = None,
    heads: bool = True,
    positions: Positions = None,
    max_bytes: int = 2**30,
    batch: int | str | None = "auto",
    executor: Any = None,
    recipe: Any = None,
) -> DataArray:
    """Returns a score for each edge between components: an estimate of what passes along this edge alone.

    An edge leads from what a component adds to the residual stream (the sender) to what another component reads from it
    (the receiver), through additions, constants and norms, but not through other components. Its score estimates
    `metric(corrupted run, in which the receiver alone reads the sender's clean value) - metric(corrupted run)`.

    Edges are found in the captured graph: in any model that adds to a stream, with norms before, behind or around its
    components. Senders are `@embed` (all that the stream begins with), `layers[2].attn.heads[3].z` (what the head
    writes: z @ W_O), `layers[2].mlp_out`, `layers[2].mixer_out`; `layers[2].attn_out` if its heads cannot be separated.
    Receivers are `layers[4].attn.heads[1].q`, `.k` and `.v` (of the heads of keys and values), `layers[4].mlp`,
    `layers[4].mixer`, and `@logits`, the final norm. What cannot be separated is one receiver: `layers[4].attn.q`, or
    `layers[4].attn`. With several stacks, names begin with that of the stack: `decoder.layers[4].mlp`. Where an SAE or
    transcoder is spliced in that decodes by a linear map, its latents are senders, and what it adds to these:
    `layers[2].mlp_out.sae.latents[7]`, `layers[2].mlp_out.sae.error` (and `.skipped`, of `W_skip`).

    All scores together cost a few forwards, however many edges there are. The model is left as it was. Active patches
    apply to both runs; they come before what edges change, so that a patch on what a receiver reads does not take its
    edges away.

    Args:
        pg: The graph.
        metric: Maps the output of the model to a tensor with a single number that has a gradient.
        clean: The clean inputs: a tuple of arguments, a dict of keyword arguments, or one value (such as a list of
            texts); or a list of such inputs, one for each batch. The scores are then those of the mean of the metric,
            and `metric` may be a list with one for each batch.
        corrupted: The corrupted inputs, in the same form.
        method: The derivatives, as for `attribute`. With `"secant"`, the scores into `@logits` sum exactly to the
            change of the metric; if those out of `@embed` do not, a warning names what may be the cause, such as a
            mixture of experts that routes the two runs differently. `"integrated"` takes the mean of the gradients at
            `steps` points between the runs. `"exact"` runs the model once for each edge, and returns the true effects:
            for small models.
        steps: The number of points for `"integrated"`.
        points: Where they are, as for `attribute`: `"left"` are those of EAP-IG's code for edges.
        one_sided: For `"secant"`: compares the corrupted run with runs that are closer to it than the clean run is, for
            the most accurate scores: the run in which this sender alone is restored, and the run in which this receiver
            alone reads clean values. The score is the mean of both. It takes two runs for each sender and receiver.
        routing: `"frozen"` holds choices of experts, as for `attribute`; not for `"exact"`.
        senders: Names of senders, or patterns such as `layers[*].mlp_out`; all by default.
        receivers: Names of receivers, or patterns.
        heads: Whether heads of attention are nodes of their own.
        positions: Returns scores by position in the sequence: `True` for all positions; or a number, several numbers,
            or a slice, as for `attribute`. The score of an edge at a position is that of what the sender writes there.
            Scores of all positions sum to those without `positions`, except for `"exact"`, which has the effect of each
            position alone.
        max_bytes: The memory limit for computations other than the runs. Scores do not change.
        batch: For `"exact"`: how many edges run in one forward, as for `pg.sweep`.
        executor: Runs batches elsewhere, as for `pg.sweep`.
        recipe: As for `pg.sweep`.

    Returns:
        An array with the dimensions `receiver` and `sender`, and `position` if requested, and NaN where the model has
        no edge. Attributes: `clean` and `corrupted`, the metric of the two runs; `feeds`, for each receiver the senders
        that are computed from it; `skipped`, why components or heads are not nodes (with a warning if whole components
        are missing); `edges`, the number of edges, each position counted; `conservation`, the sum of the scores into
        the last receiver, divided by `clean - corrupted` (NaN if `"exact"` was not asked for all of them);
        `fallbacks`, as for `attribute`; `method`, `one_sided`, `routing`, `metric`, `steps`, `points`.

    Raises:
        ExperimentError: The model has no edges that can be followed, the metric has no gradient, the inputs differ in
            shape, or positions are unknown or out of range.
        UnknownPathError: The sender or receiver does not exist.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(6)[None])
        >>> clean, corrupted = torch.arange(6)[None], torch.arange(6, 12)[None]
        >>> scores = attribute_edges(pg, lambda out: out.logits[0, -1, 3], clean, corrupted)
        >>> scores.shape, scores.attrs["edges"]
        ((15, 7), 46)
        >>> scores.sel(receiver="@logits", sender="layers[1].mlp_out").isnull().item()
        False

    Source:
        Syed et al., Attribution patching outperforms automated circuit discovery (2023). Integrated: Hanna et al., Have
        faith in faithfulness (2024). Edges: Conmy et al., Towards automated circuit discovery (2023).
    """
    check_graph(pg, has_gradients=method != "exact")
    _check_options(method, routing, one_sided)
    fractions = path_fractions(steps, points)
    batches = batches_of(pg, metric, clean, corrupted)
    for pair in batches:
        check_ends(pg, pair.clean, positions)
    nodes = nodes_of(pg.nodes.root, heads=heads)
    _warn_of_missing(nodes)
    columns, rows = _chosen(nodes.senders, senders, "sender"), _chosen(nodes.receivers, receivers, "receiver")
    extra("xarray", "an array of scores")  # fails before the model runs
    scoring = functools.partial(
        _scores,
        method=method,
        points=fractions if method == "integrated" else [0.0],
        is_one_sided=one_sided,
        max_bytes=max_bytes,
        routing=routing,
        heads=heads,
        given_positions=positions,
        batch=batch,
        rows=rows,
        columns=columns,
    )
    total = _mean(list(map_batches(pg, scoring, batches, executor=executor, recipe=recipe)))
    array = _array_of(total, nodes)
    array.attrs |= {"method": method, "one_sided": one_sided, "routing": routing}
    array.attrs |= {
        "metric": metric_name(batches[0].metric),
        **({"steps": steps, "points": points} if method == "integrated" else {}),
    }
    is_whole = method == "secant" and not nodes.missing and (positions is None or positions is True)
    if is_whole and total.losses and total.fallbacks:  # without fallbacks, the runs differ elsewhere, too
        what = max(total.losses, key=total.losses.__getitem__)
        warn_of_loss(what, total.losses[what], total.fallbacks, is_half=total.is_half)
    is_all = rows == nodes.receivers and columns == nodes.senders
    return array if is_all else array.sel(receiver=rows, sender=columns)


def _check_options(method: Any, routing: Routing, one_sided: bool) -> None:
    """Raises an `ExperimentError` for options that do not fit."""
    check_method(method, (*METHODS, "exact"))
    Choices(routing)  # checks it
    if method == "exact" and routing != "free":
        raise ExperimentError('method="exact" runs the model itself, with its own choices of experts: drop routing=')
    if one_sided not in (False, True) or (one_sided and method != "secant"):
        raise ExperimentError(f'one_sided={one_sided!r} must be a bool, with method="secant"')


def _warn_of_missing(nodes: Nodes) -> None:
    if missing := nodes.missing:
        name, why = next(iter(missing.items()))
        warn(
            f"edges of {len(missing)} components cannot be followed, and have no scores: {name}: {why}"
            f"{', ...' if len(missing) > 1 else ''} (see the attribute 'skipped')",
            "experiment",
            stacklevel=level_of_caller(),
        )


def _array_of(total: EdgeScores, nodes: Nodes) -> DataArray:
    """Returns the scores of all edges as an array."""
    from xarray import DataArray

    coords: dict[str, list[Any]] = {"receiver": nodes.receivers, "sender": nodes.senders}
    if total.positions is not None:
        coords["position"] = total.positions
    change = total.clean - total.corrupted
    attrs = {
        "clean": total.clean,
        "corrupted": total.corrupted,
        "edges": int(total.edges.sum()),
        "conservation": float(total.values[-1, total.edges[-1]].sum()) / change if change else float("nan"),
        "fallbacks": dict(total.fallbacks),
        "feeds": {receiver: list(fed) for receiver, fed in nodes.feeds.items()},
        "skipped": dict(nodes.skipped),
    }
    return DataArray(total.values.reshape(*map(len, coords.values())), coords, list(coords), name="score", attrs=attrs)


def _chosen(names: Sequence[str], wanted: str | Iterable[str] | None, what: str) -> list[str]:
    """Returns the names that match patterns, in order; `*` is any number.

    Raises:
        UnknownPathError: The name does not exist.
        ExperimentError: `wanted` is empty.
    """
    if wanted is None:
        return list(names)
    found: set[str] = set()
    for pattern in [wanted] if isinstance(wanted, str) else wanted:
        regex = re.compile(re.escape(pattern).replace(r"\*", r"[^\[\]]*"))
        if not (matching := set(filter(regex.fullmatch, names))):
            raise UnknownPathError(f"unknown {what} {pattern!r}; nearest: {nearest(pattern, list(names))}")
        found |= matching
    if not found:
        raise ExperimentError(f"{what}s is empty: give at least one name, or leave it out for all")
    return [name for name in names if name in found]


class EdgeScores:
    """The scores of all edges on one pair of inputs, and the metric of its two runs.

    Attributes:
        values: The scores, (receiver, sender, position); NaN where there is no edge.
        edges: Where the model has an edge.
        positions: The positions; `None`: one score for all.
        losses: The difference between sums of scores and their expected values, by the name of the sum.
        fallbacks: Why the derivative of a function does not explain its whole change, by its name.
        is_half: Whether the model computes in half precision, also in parts.
        rows, columns: The numbers of receivers and senders.
    """

    def __init__(
        self,
        nodes: Nodes,
        positions: WrittenPositions | None,
        clean: float,
        corrupted: float,
        *,
        is_half: bool,
    ) -> None:
        self.positions = None if positions is None else positions.labels
        count = 1 if positions is None else len(positions.labels)
        self.values = np.full((len(nodes.receivers), len(nodes.senders), count), np.nan)
        self.clean, self.corrupted, self.is_half = clean, corrupted, is_half
        self.losses: dict[str, float] = {}
        self.fallbacks: dict[str, str] = {}
        self.rows = {name: row for row, name in enumerate(nodes.receivers)}
        self.columns = {name: column for column, name in enumerate(nodes.senders)}
        for reader in nodes.readers:
            for writer in reader.source.writers.values():
                there = [0] if positions is None else sorted({*positions.of[writer.stream].tolist()} - {-1})
                senders = [self.columns[name] for name in writer.names]
                self.values[np.ix_([self.rows[name] for name in reader.names], senders, there)] = 0.0
        self.edges = ~np.isnan(self.values)

    def compare_sum(self, what: str, scores: Any, change: float, rules: DerivativeRules) -> None:
        """Keeps by how much scores do not sum to a change, relative to it; `what` names the edges and the change."""
        self.fallbacks |= rules.fallbacks
        size = max(abs(change), 1e-2 * abs(self.clean - self.corrupted))  # smaller effects are mostly rounding
        if size:
            self.losses[f"the edges {what}"] = abs(float(np.nansum(scores)) - change) / size


def _mean(batches: Sequence[EdgeScores]) -> EdgeScores:
    """Returns the mean over batches.

    Raises:
        ExperimentError: They have different positions.
    """
    mean = batches[0]
    if any(each.positions != mean.positions for each in batches):
        raise ExperimentError(f"the batches have different positions: {[each.positions for each in batches]}")
    mean.values, mean.clean, mean.corrupted = (
        sum(getattr(each, name) / len(batches) for each in batches) for name in ("values", "clean", "corrupted")
    )
    for each in batches:
        mean.losses |= {what: max(loss, mean.losses.get(what, 0.0)) for what, loss in each.losses.items()}
        mean.fallbacks |= each.fallbacks
    return mean


_Group = TypeVar("_Group", Writer, Reader)


def _members(groups: Sequence[_Group], names: Collection[str]) -> Iterator[tuple[_Group, str, int]]:
    """Yields the senders or receivers with some names, each with its number in its group."""
    for group in groups:
        yield from ((group, name, number) for number, name in enumerate(group.names) if name in names)


def _scores(pg: PatchableGraph, pair: Batch, *, heads: bool, **options: Any) -> EdgeScores:
    """Returns the scores on one pair of inputs; the model and the random state are restored."""
    runs = _Runs(pg, pair, nodes_of(pg.nodes.root, heads=heads), **options)
    if runs.method == "exact":
        return runs.exact_effects()
    with torch.inference_mode(False), preserved(captured(pg).module) as runs.snapshot:
        return runs.one_sided_scores() if runs.is_one_sided else runs.scores()


@dataclass
class _Runs:
    """The runs on one pair of inputs, and the scores."""

    pg: PatchableGraph
    pair: Batch
    nodes: Nodes
    method: Any
    points: Sequence[float]
    is_one_sided: bool
    max_bytes: int
    routing: Routing
    given_positions: Any
    batch: int | str | None
    rows: Sequence[str]
    columns: Sequence[str]
    positions: WrittenPositions | None = None
    snapshot: Any = None

    def __post_init__(self) -> None:
        self._choices = Choices(self.routing)

    def exact_effects(self) -> EdgeScores:
        """Returns the true effects of the edges, in one run for each."""
        pg, nodes, pair = self.pg, self.nodes, self.pair
        runs = CircuitRuns(pg, nodes, pair.corrupted, pair.number)
        clean = record(pg, pair.clean, nodes.recorded, pair.number)
        found = self._empty(clean.values, runs.values, float(clean.measurement.values), runs.metric)
        found.values[found.edges] = np.nan
        with torch.no_grad():
            changes = {writer: writer.change(clean.values, runs.values) for writer in nodes.writers}
            for reader, receiver, _ in _members(nodes.readers, self.rows):
                writers = [writer for writer in nodes.writers if writer.value in reader.source.writers]
                cells: dict[str, list[Any]] = {"sender": [name for _, name, _ in _members(writers, self.columns)]}
                if not cells["sender"]:
                    continue
                at = [found.columns[sender] for sender in cells["sender"]]
                there = found.edges[found.rows[receiver], at]
                if self.positions is not None:
                    cells["position"] = self.positions.labels
                swept = run_sweep(
                    pg,
                    cells,
                    functools.partial(runs.edge, reader, receiver, changes, self.positions),
                    pair.corrupted,
                    metric=pair.metric,
                    batch=self.batch,
                    progress=False,
                )
                effects = swept.values.reshape(there.shape) - float(swept.attrs["baseline"])
                found.values[found.rows[receiver], at] = np.where(there, effects, np.nan)
        return found

    def one_sided_scores(self) -> EdgeScores:
        """Returns the mean of the scores in which only one end of the edges is restored."""
        with torch.no_grad():
            clean, high = self._run(self.pair.clean, {}, self.nodes.reads)
            corrupted, low = self._run(self.pair.corrupted, {}, self.nodes.reads)
        found = self._empty(clean, corrupted, float(high), float(low))

        def add(group: Writer | Reader, number: int, place: Any, what: str) -> None:
            """Adds the scores by derivatives between the corrupted run and that with one end restored."""
            patches: dict[str, Patch[Any]] = {}
            for path in (group.path,) if isinstance(group, Writer) else group.paths:
                columns = slice(None) if group.projection is None else group.projection.heads[number]
                rows = rows_of(corrupted[path], group.projection).clone()
                rows[:, columns] = rows_of(clean[path], group.projection)[:, columns]
                patches[path] = ReplacePatch(value=rows.view(clean[path].shape))
            rules = DerivativeRules(self.method)
            with rules.recording(), torch.no_grad():
                patched, effect = self._run(self.pair.corrupted, patches)
            end, readers = (patched, self.nodes.readers) if isinstance(group, Writer) else (clean, [group])
            base, _, gradients = self._gradient_run(rules, end, 0)
            alone = copy.copy(found)
            alone.values = np.where(found.edges, 0.0, np.nan)
            self._add_scores(alone, readers, gradients, end, base)
            own = alone.values[place]
            found.values[place] += own / 2
            found.compare_sum(f"{what} differ from its effect", own, float(effect) - found.corrupted, rules)

        for writer, name, number in _members(self.nodes.writers, self.columns):
            add(writer, number, (slice(None), found.columns[name]), f"out of {name!r}")
        for reader, name, number in _members(self.nodes.readers, self.rows):
            add(reader, number, found.rows[name], f"into {name!r}")
        return found

    def scores(self) -> EdgeScores:
        """Returns the scores by derivatives between the two runs."""
        rules = DerivativeRules(self.method)
        with rules.recording(), torch.no_grad():
            clean, high = self._run(self.pair.clean, {})
        found: EdgeScores | None = None
        for point in self.points:
            base, metric, gradients = self._gradient_run(rules, clean, point)
            if found is None:
                corrupted, low = base, metric
                if point:
                    with torch.no_grad():
                        corrupted, low = self._run(self.pair.corrupted, {})
                found = self._empty(clean, corrupted, float(high), float(low.detach()))
            self._add_scores(found, self.nodes.readers, gradients, clean, base)
        assert found is not None
        # The edges into the logits have this sum in any case, whatever is between the components.
        begins = [f"{stream}@embed" for stream in self.nodes.streams]
        columns = [found.columns[name] for name in begins if name in found.columns]
        what = f"out of {' and '.join(begins)} differ from the change of the metric"
        found.compare_sum(what, found.values[:, columns], found.clean - found.corrupted, rules)
        return found

    def _empty(self, clean: Values, corrupted: Values, high: float, low: float) -> EdgeScores:
        """Returns scores of zero, and checks that senders explain the difference of the two runs."""
        if self.given_positions is not None:
            self.positions = WrittenPositions(self.pg.nodes.root, self.nodes, clean, self.given_positions)
        self.changes = Changes(self.nodes, clean, corrupted, self.max_bytes // 2)
        self.changes.check(self.nodes)
        return EdgeScores(self.nodes, self.positions, high, low, is_half=self.changes.coarsest > 1e-6)

    def _gradient_run(
        self, rules: DerivativeRules, clean: Values, point: float
    ) -> tuple[Values, Tensor, Mapping[str, Tensor | None]]:
        """Returns the values, the metric and the gradients of a run at a point between the two runs."""

        def begin(value: Tensor, path: str) -> Tensor:
            with without_torch_functions():  # derivative rules would take it for a step of the model
                start = torch.lerp(value.detach(), clean[path], point) if point else value.detach()
                return start.clone().requires_grad_().clone()  # the model may write into it

        patches: dict[str, Patch[Any]] = {
            path: CustomPatch(custom_op=functools.partial(begin, path=path), requires_clone=False)
            for path in self.nodes.streams.values()
        }
        with rules.applied(), torch.enable_grad():
            values, metric = self._run(self.pair.corrupted, patches, self.nodes.reads)
        wanted = {path: values[path] for path in self.nodes.reads if values[path].requires_grad}
        if not metric.requires_grad or not wanted:
            raise no_gradient()
        gradients = dict(zip(wanted, gradients_of(metric, list(wanted.values())), strict=True))
        return {path: value.detach() for path, value in values.items()}, metric, gradients

    def _run(
        self, inputs: Inputs, patches: Mapping[str, Patch[Any]], also: Sequence[str] = ()
    ) -> tuple[Values, Tensor]:
        self.snapshot.restore()
        probes = {path: ProbePatch() for path in (*self.nodes.recorded, *also)}
        merged: dict[str | NodePath, list[Patch[Any]]] = {}
        for path, patch in (*patches.items(), *probes.items()):
            merged.setdefault(path, []).append(patch)
        choices = self._choices.in_run(is_clean=inputs is self.pair.clean)
        with self.pg.patch(merged, strict=True), choices:
            output = inputs.run(self.pg)
        return {path: probe.activation for path, probe in probes.items()}, metric_number(self.pair.metric(output))

    # -- from receivers back to senders --------------------------------------------------------------------------------

    def _add_scores(
        self,
        found: EdgeScores,
        readers: Sequence[Reader],
        gradients: Mapping[str, Tensor | None],
        clean: Values,
        base: Values,
    ) -> None:
        """Adds the scores of receivers; those next to each other that read the same value go together."""
        count = max(1, self.max_bytes // (12 * max(value.nbytes for value in base.values())))
        for source, alike in itertools.groupby(readers, key=lambda reader: reader.source):
            parts = itertools.chain.from_iterable(_at_inputs(reader, gradients) for reader in alike)
            while chunk := list(itertools.islice(parts, count)):
                rows = [found.rows[name] for name, _ in chunk]
                back: dict[Value, Tensor] = {}
                self._meet(found, rows, source, source.terms, torch.stack([part for _, part in chunk]), back)
                for step in reversed(source.steps):
                    gradient = self._through(step, back.pop(step.value), clean, base)
                    self._meet(found, rows, source, step.terms, gradient, back)

    def _meet(
        self,
        found: EdgeScores,
        rows: list[int],
        source: Sum,
        terms: Sequence[Value],
        gradient: Tensor,
        back: dict[Value, Tensor],
    ) -> None:
        """Takes the gradient of a sum to its terms: adds the scores of what is written, the rest goes `back`."""
        for value in terms:
            if value not in source.writers:
                back[value] = back[value] + gradient if value in back else gradient
        direct = source.direct(terms)
        for writers in [direct] if self.positions is None else [[writer] for writer in direct]:
            for columns, delta in self.changes.of(writers):
                one, other = widened(gradient), widened(delta).to(gradient.device)
                if self.positions is None:
                    scores = (one.flatten(1) @ other.flatten(1).T)[..., None]
                else:
                    numbers = self.positions.of[writers[0].stream].to(one.device)  # -1: the last, which is left out
                    by_row = torch.einsum("erc,src->esr", one, other)
                    scores = by_row.new_zeros(*by_row.shape[:2], len(self.positions.labels) + 1)
                    scores = scores.index_add(2, numbers % scores.shape[2], by_row)[..., :-1]
                found.values[np.ix_(rows, columns)] += scores.detach().cpu().double().numpy() / len(self.points)

    def _through(self, step: StreamStep, gradient: Tensor, clean: Values, base: Values) -> Tensor:
        """Returns gradients at the input of a step, from those at its result."""
        rules = DerivativeRules(self.method if step.norm else "gradient")
        read = gradient.new_zeros(gradient.shape[1:])  # all other steps are linear
        if step.norm:
            read = base[step.norm]
            with rules.recording(), torch.no_grad():
                step.function(clean[step.norm])
        read = read.detach().requires_grad_()
        with rules.applied(), torch.enable_grad():
            result = step.function(read)
        stacked = gradient.reshape(-1, *result.shape).to(result.dtype)
        is_batched = len(stacked) > 1
        (found,) = torch.autograd.grad(result, read, stacked if is_batched else stacked[0], is_grads_batched=is_batched)
        return found.reshape(gradient.shape)


def _at_inputs(reader: Reader, gradients: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    """Yields the gradient at the input of each receiver, `(rows, channels)`."""
    known = (gradients.get(path) for path in reader.paths)
    given = [rows_of(gradient, reader.projection) for gradient in known if gradient is not None]
    if not given:
        return
    gradient = torch.stack(given).sum(0) if len(given) > 1 else given[0]
    if reader.projection is None:
        yield reader.names[0], gradient
        return
    weight = reader.projection.weight()
    for name, columns in zip(reader.names, reader.projection.indices, strict=True):
        yield name, gradient[:, columns] @ weight[:, columns].T


class Changes:
    """What senders write in the clean run, minus what they write in the corrupted one.

    If the changes take more than `max_bytes`, they are computed again when they are needed.

    Attributes:
        coarsest: The largest rounding error of the values, relative to them. Of a stream in single precision,
            components may write in half.
    """

    def __init__(self, nodes: Nodes, clean: Values, corrupted: Values, max_bytes: int) -> None:
        self._clean, self._corrupted = clean, corrupted
        self.coarsest = max(torch.finfo(value.dtype).eps for value in clean.values() if value.is_floating_point())
        numbers = itertools.count()
        self._columns = {writer: list(itertools.islice(numbers, len(writer.names))) for writer in nodes.writers}
        self._kept: Tensor | None = None
        first = nodes.writers[0].change(clean, corrupted)
        if next(numbers) * first[0].nbytes <= max_bytes:
            changes = [writer.change(clean, corrupted) for writer in nodes.writers]
            # They differ in an encoder and a decoder.
            if len({(change.shape[1:], change.dtype, change.device) for change in changes}) == 1:
                self._kept = torch.cat(changes)

    def of(self, writers: Sequence[Writer]) -> Iterator[tuple[list[int], Tensor]]:
        """Yields the changes of writers, `(senders, rows, channels)`, with the numbers of the senders."""
        if self._kept is None:
            yield from ((self._columns[writer], writer.change(self._clean, self._corrupted)) for writer in writers)
        elif columns := sorted(column for writer in writers for column in self._columns[writer]):
            first, last = columns[0], columns[-1]
            yield columns, self._kept[slice(first, last + 1) if last - first < len(columns) else columns]

    def check(self, nodes: Nodes) -> None:
        """Checks that the sums of the senders are what norms and receivers read.

        Raises:
            ExperimentError: They are not: the model computes something between components that the graph does not
                show as linear.
        """

        def total(writers: list[Writer]) -> Tensor | None:
            parts = [delta.sum(0) for _, delta in self.of(writers)]
            return sum(parts[1:], parts[0]) if parts else None

        with torch.no_grad():
            for path, source in nodes.sums.items():
                clean, corrupted = self._clean[path], self._corrupted[path]
                known = rows_of(clean - corrupted)
                change = source.change(total, self._corrupted)
                gap = float((known if change is None else known - change).abs().max())
                scale = max(float(value.abs().max()) for value in (clean, corrupted))
                if not gap <= max(1e-3, 32 * self.coarsest) * scale:
                    raise ExperimentError(
                        f"what components add to the residual stream does not explain {path!r}: it differs by "
                        f"{gap:.2g}. Is the model in training mode? Call pg.eval()"
                    )
