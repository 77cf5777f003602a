"""Scores of edges: how much of the effect passes from one component to another directly, by gradients.

1. A run on the clean inputs records what components write, and what norms read.
2. A run on the corrupted inputs records the same, and takes the gradient of the metric where components read.
3. From each receiver, gradients go back along the linear paths of the stream (`stream`), through norms, which are run
   again, to what the senders write. All receivers that read the same value go together.

No component is run again, so the costs do not depend on the number of edges.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.checks.model_state import preserved
from graphpatch_notebook.errors import ExperimentError, UnknownPathError
from graphpatch_notebook.experiments.attribution.choices import Choices, Routing
from graphpatch_notebook.experiments.attribution.gradient_runs import gradients_of, metric_number, no_gradient
from graphpatch_notebook.experiments.attribution.rules import (
    METHODS,
    DerivativeRules,
    check_method,
    midpoints,
    rules_of,
    warn_of_loss,
    widened,
)
from graphpatch_notebook.experiments.circuits.nodes import Nodes, Reader, nodes_of, norms_in, writers_in
from graphpatch_notebook.experiments.circuits.positions import WrittenPositions, read_ahead
from graphpatch_notebook.experiments.circuits.runs import CircuitRuns
from graphpatch_notebook.experiments.circuits.stream import NormOfSum, Sum, Summand, Writer, index_of, rows_of
from graphpatch_notebook.experiments.elsewhere import map_batches
from graphpatch_notebook.experiments.engine.inputs import Inputs, inputs_of
from graphpatch_notebook.experiments.engine.measurements import measurement
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.methods.arguments import (
    check_graph,
    check_metric,
    check_same_input_shapes,
)
from graphpatch_notebook.experiments.methods.positions import Positions, RowPositions, are_of_rows
from graphpatch_notebook.experiments.methods.reference_runs import record
from graphpatch_notebook.experiments.methods.sweeps import run_sweep
from graphpatch_notebook.experiments.results.arrays import metric_name
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.patchable_graph import PatchableGraph, captured, runs_where_the_model_is
from graphpatch_notebook.patches.kinds import CustomPatch, Patch, ProbePatch, ReplacePatch
from graphpatch_notebook.paths import nearest
from graphpatch_notebook.torch_compat import without_torch_functions
from graphpatch_notebook.warning_places import level_of_caller, warn

if TYPE_CHECKING:
    from xarray import DataArray

RestoredEnd: TypeAlias = Literal["senders", "receivers"]


@runs_where_the_model_is
def attribute_edges(
    pg: PatchableGraph,
    metric: Callable[[Any], Any] | Sequence[Callable[[Any], Any]],
    clean: Any,
    corrupted: Any,
    *,
    method: Literal["gradient", "integrated", "relp", "secant", "exact"] = "gradient",
    steps: int = 5,
    one_sided: bool | RestoredEnd = False,
    routing: Routing = "free",
    senders: str | Iterable[str] | None = None,
    receivers: str | Iterable[str] | None = None,
    heads: bool = True,
    positions: Positions | RowPositions = None,
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
    `layers[4].attn`. With several stacks, names begin with that of the stack: `decoder.layers[4].mlp`.

    All scores together cost a few forwards, however many edges there are. The model is left as it was. Active patches
    apply to both runs; they come before what edges change, so that a patch on what a receiver reads does not take its
    edges away.

    Args:
        pg: The graph.
        metric: Maps the output of the model to a tensor with a single number that has a gradient.
        clean: The clean inputs: a tuple of arguments, a dict of keyword arguments, or one value; or a list of such
            inputs, one for each batch. The scores are then those of the mean of the metric, and `metric` may be a list
            with one for each batch.
        corrupted: The corrupted inputs, in the same form.
        method: The derivatives, as for `attribute`. With `"secant"`, the scores into `@logits` sum exactly to the
            change of the metric; if those out of `@embed` do not, a warning names what may be the cause, such as a
            mixture of experts that routes the two runs differently. `"integrated"` takes the mean of the gradients at
            `steps` points between the runs. `"exact"` runs the model once for each edge, and returns the true effects:
            for small models.
        steps: The number of points for `"integrated"`.
        one_sided: For `"secant"`: compares the corrupted run with runs that are closer to it than the clean run is.
            `"senders"`: with the run in which this sender alone is restored; the scores of all edges from a sender then
            sum to the exact effect of patching it. `"receivers"`: with the run in which this receiver alone reads clean
            values; the scores of all edges to it sum to the exact effect of that. `True`: the mean of both, the most
            accurate scores. It takes two runs for each sender, each receiver, or both, of those that are asked for.
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
        `fallbacks`, as for `attribute`; `ahead`, with `positions`, the attention that is not causal; `method`,
        `one_sided`, `routing`, `metric`, `steps`.

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
    check_graph(pg)
    check_method(method, (*METHODS, "exact"))
    if method == "exact" and routing != "free":
        raise ExperimentError('method="exact" runs the model itself, with its own choices of experts: drop routing=')
    ends = _ends(one_sided, method)
    points, limit = midpoints(steps), max_bytes
    Choices(routing)  # checks it
    fractions = points if method == "integrated" else [0.0]
    batches = batches_of(pg, metric, clean, corrupted)
    nodes = nodes_of(pg.nodes.root, heads=heads)
    _warn_of_skipped(nodes)
    columns, rows = chosen(nodes.senders, senders, "sender"), chosen(nodes.receivers, receivers, "receiver")
    xarray = extra("xarray", "an array of scores")
    scoring = _Scoring(method, fractions, ends, limit, routing, heads, positions, batch, rows, columns)
    total = _mean(list(map_batches(pg, scoring, batches, executor=executor, recipe=recipe)))
    coords: dict[str, list[Any]] = {"receiver": nodes.receivers, "sender": nodes.senders}
    if total.positions is not None:
        coords["position"] = total.positions
    array = xarray.DataArray(total.values.reshape(*map(len, coords.values())), coords, list(coords), name="score")
    change = total.clean - total.corrupted
    array.attrs = {
        "clean": total.clean,
        "corrupted": total.corrupted,
        "method": method,
        "one_sided": one_sided,
        "routing": routing,
        "metric": metric_name(batches[0].metric),
        "edges": int(total.edges.sum()),
        "conservation": float(total.values[-1, total.edges[-1]].sum()) / change if change else float("nan"),
        "fallbacks": dict(total.fallbacks),
        "feeds": {receiver: list(fed) for receiver, fed in nodes.feeds.items()},
        "skipped": dict(nodes.skipped),
        **({"steps": steps} if method == "integrated" else {}),
        **({"positions": "of each row"} if are_of_rows(positions) else {}),
        **({"ahead": read_ahead(pg, batches[0].clean)} if positions is not None else {}),
    }
    if method == "secant" and (positions is None or positions is True):
        _warn_of_loss(nodes, total)
    return array.sel(receiver=rows, sender=columns)  # type: ignore[no-any-return]


def _ends(one_sided: bool | RestoredEnd, method: str) -> Sequence[RestoredEnd]:
    """Returns the ends of edges whose single restorations the scores are averaged over."""
    known: tuple[RestoredEnd, ...] = get_args(RestoredEnd)
    ends = (known if one_sided else ()) if isinstance(one_sided, bool) else (one_sided,)
    if not set(ends) <= set(known) or (ends and method != "secant"):
        raise ExperimentError(f'one_sided={one_sided!r} must be a bool, "senders" or "receivers", with method="secant"')
    return ends


def _warn_of_skipped(nodes: Nodes) -> None:
    """Warns if whole components are missing: then the scores cover only a part of the model."""
    if missing := nodes.missing:
        name, why = next(iter(missing.items()))
        warn(
            f"edges of {len(missing)} components cannot be followed, and have no scores: {name}: {why}"
            f"{', ...' if len(missing) > 1 else ''} (see the attribute 'skipped')",
            "experiment",
            stacklevel=level_of_caller(),
        )


def _warn_of_loss(nodes: Nodes, scored: EdgeScores) -> None:
    """Warns if scores of the secant do not have the expected sum, and names possible causes."""
    if nodes.missing or not scored.fallbacks or not scored.losses:  # without fallbacks, the runs differ elsewhere, too
        return
    what = max(scored.losses, key=scored.losses.__getitem__)
    warn_of_loss(what, scored.losses[what], scored.fallbacks, is_half=scored.is_half)


@dataclass(frozen=True, slots=True)
class Batch:
    """One pair of inputs, and the metric of its outputs."""

    metric: Callable[[Any], Any]
    clean: Inputs
    corrupted: Inputs

    def number(self, output: Any) -> float:
        """Returns the metric of an output."""
        found = measurement(self.metric(output)).values
        if found.size != 1:
            raise ExperimentError(f"the metric must return a single number, such as its .mean(), not {found.size}")
        return float(found.reshape(()))


def batches_of(pg: PatchableGraph, metric: Any, clean: Any, corrupted: Any) -> list[Batch]:
    """Returns the pairs of inputs: one, or one for each item of lists.

    Raises:
        ExperimentError: They do not fit each other.
    """
    cleans, others = (given if isinstance(given, list) else [given] for given in (clean, corrupted))
    metrics = list(metric) if isinstance(metric, (list, tuple)) else [metric] * len(cleans)
    if not len(metrics) == len(cleans) == len(others) > 0 or isinstance(clean, list) != isinstance(corrupted, list):
        raise ExperimentError(
            f"clean and corrupted must both be lists of inputs of the same length, or neither, with one metric or as "
            f"many; not {len(cleans)}, {len(others)} and {len(metrics)}"
        )
    found = []
    for each, one, other in zip(metrics, cleans, others, strict=True):
        check_metric(each)
        found.append(Batch(each, inputs_of(one), inputs_of(other)))
        check_same_input_shapes(pg, found[-1].clean, found[-1].corrupted)
    return found


def chosen(names: Sequence[str], wanted: str | Iterable[str] | None, what: str) -> list[str]:
    """Returns the names that match patterns, in order; `*` is any number.

    Raises:
        UnknownPathError: The name does not exist.
        ExperimentError: `wanted` is empty.
    """
    if wanted is None:
        return list(names)
    patterns, found = [wanted] if isinstance(wanted, str) else list(wanted), set()
    if not patterns:
        raise ExperimentError(f"{what}s is empty: give at least one name, or leave it out for all")
    for pattern in patterns:
        regex = re.compile(re.escape(pattern).replace(r"\*", r"[^\[\]]*"))
        matching = {name for name in names if regex.fullmatch(name)}
        if not matching:
            close = ", ".join(map(repr, nearest(pattern, list(names))))
            raise UnknownPathError(f"unknown {what} {pattern!r}; nearest: {close}")
        found |= matching
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

    def __init__(self, nodes: Nodes, positions: WrittenPositions | None = None) -> None:
        self.positions = None if positions is None else positions.labels
        count = 1 if positions is None else len(positions.labels)
        self.values = np.full((len(nodes.receivers), len(nodes.senders), count), np.nan)
        self.clean = self.corrupted = 0.0
        self.is_half = False
        self.losses: dict[str, float] = {}
        self.fallbacks: dict[str, str] = {}
        self.rows = {name: row for row, name in enumerate(nodes.receivers)}
        self.columns = {name: column for column, name in enumerate(nodes.senders)}
        for reader in nodes.readers:
            for writer in writers_in(reader.source):
                there = [0] if positions is None else sorted({*positions.of(writer).tolist()} - {-1})
                senders = [self.columns[name] for name in writer.names]
                self.values[np.ix_([self.rows[name] for name in reader.names], senders, there)] = 0.0
        self.edges = ~np.isnan(self.values)

    def note_sum(self, what: str, scores: Any, change: float, rules: DerivativeRules) -> None:
        """Notes by how much scores do not sum to a change, relative to it; `what` names the edges and the change."""
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
    other = next((each for each in batches if each.positions != mean.positions), None)
    if other is not None:
        raise ExperimentError(f"the batches have different positions: {mean.positions} and {other.positions}")
    mean.values, mean.clean, mean.corrupted = (
        sum(getattr(each, name) / len(batches) for each in batches) for name in ("values", "clean", "corrupted")
    )
    for each in batches:
        mean.losses |= {what: max(loss, mean.losses.get(what, 0.0)) for what, loss in each.losses.items()}
        mean.fallbacks |= each.fallbacks
    return mean


@dataclass(frozen=True)
class _Scoring:
    """Scores the edges on one pair of inputs. It can be pickled."""

    method: Any
    fractions: Sequence[float]
    ends: Sequence[RestoredEnd]
    max_bytes: int
    routing: Routing
    heads: bool
    positions: Any
    batch: int | str | None
    rows: Sequence[str]
    columns: Sequence[str]

    def __call__(self, pg: PatchableGraph, pair: Batch) -> EdgeScores:
        return _Runs(pg, self, pair).scores()


_Group = TypeVar("_Group", Writer, Reader)

Values: TypeAlias = "Mapping[str, Tensor]"
"""What was recorded in a run, by path."""


class _Runs:
    """The runs on one pair of inputs, and the scores."""

    def __init__(self, pg: PatchableGraph, scoring: _Scoring, pair: Batch) -> None:
        self._pg = pg
        self.scoring = scoring
        self._pair = pair
        self._nodes = nodes_of(pg.nodes.root, heads=scoring.heads)
        self._choices = Choices(scoring.routing)
        self.positions: WrittenPositions | None = None

    def scores(self) -> EdgeScores:
        """Returns the scores; the model and the random state are restored."""
        if self.scoring.method == "exact":
            return self._exact_effects()
        with torch.inference_mode(False), preserved(captured(self._pg).module) as self._snapshot:
            return self._one_sided_scores() if self.scoring.ends else self._scores()

    def _empty(self, values: Values) -> EdgeScores:
        """Returns scores of zero, at the positions of a run."""
        given = self.scoring.positions
        if given is not None:
            self.positions = WrittenPositions(self._pg.nodes.root, self._nodes, values, given)
        return EdgeScores(self._nodes, self.positions)

    def _exact_effects(self) -> EdgeScores:
        """Returns the true effects of the edges, in one run for each."""
        pg, nodes, pair = self._pg, self._nodes, self._pair
        runs = CircuitRuns(pg, nodes, pair.corrupted, pair.number)
        found = self._empty(runs.values)
        positions = self.positions
        found.values[found.edges] = np.nan
        clean = record(pg, pair.clean, nodes.recorded, pair.number)
        found.clean, found.corrupted = float(clean.measurement.values), runs.metric
        Deltas(nodes, clean.values, runs.values, 0).check(nodes)
        with torch.no_grad():
            changes = {id(writer): writer.change(clean.values, runs.values) for writer in nodes.writers}
            for reader, receiver, _ in _members(nodes.readers, self.scoring.rows):
                read = writers_in(reader.source)
                writers = [writer for writer in nodes.writers if writer in read]
                senders = [name for _, name, _ in _members(writers, self.scoring.columns)]
                if not senders:
                    continue
                at = [found.columns[sender] for sender in senders]
                there = found.edges[found.rows[receiver], at]
                cells: dict[str, list[Any]] = {"sender": senders}
                if positions is not None:
                    cells["position"] = positions.labels
                swept = run_sweep(
                    pg,
                    cells,
                    functools.partial(runs.edge, reader, receiver, changes, positions=positions),
                    pair.corrupted,
                    metric=pair.metric,
                    batch=self.scoring.batch,
                    progress=False,
                )
                effects = swept.values.reshape(there.shape) - float(swept.attrs["baseline"])
                found.values[found.rows[receiver], at] = np.where(there, effects, np.nan)
        return found

    def _one_sided_scores(self) -> EdgeScores:
        """Returns the mean of the scores in which only one end of the edges is restored."""
        ends = self.scoring.ends
        with torch.no_grad():
            clean, high = self._run(self._pair.clean, {}, self._nodes.reads)
            corrupted, low = self._run(self._pair.corrupted, {}, self._nodes.reads)
        found = self._empty(clean)
        found.clean, found.corrupted = float(high), float(low)
        deltas = self._deltas(clean, corrupted, found)

        def restored(group: Writer | Reader, number: int) -> dict[str, Patch[Any]]:
            heads = None if group.projection is None else group.projection.heads[number]
            paths = (group.path,) if isinstance(group, Writer) else group.paths
            return {path: _restoring(clean[path], corrupted[path], heads) for path in paths}

        def add(
            what: str, place: Any, patches: dict[str, Patch[Any]], readers: Sequence[Reader], end: Values | None = None
        ) -> None:
            """Adds the scores by derivatives between the corrupted run and that with patches; norms end at `end`."""
            rules = rules_of(self.scoring.method)
            with rules.recording(), torch.no_grad():
                patched, effect = self._run(self._pair.corrupted, patches)
            end = patched if end is None else end
            base, _, gradients = self._gradient_run(rules, end, 0)
            alone = EdgeScores(self._nodes, self.positions)
            _Backwards(self, end, base, deltas, alone).score(readers, gradients)
            found.values[place] += alone.values[place] / len(ends)
            found.note_sum(
                f"{what} differ from its effect", alone.values[place], float(effect) - found.corrupted, rules
            )

        if "senders" in ends:
            for writer, name, number in _members(self._nodes.writers, self.scoring.columns):
                column = (slice(None), found.columns[name])
                add(f"out of {name!r}", column, restored(writer, number), self._nodes.readers)
        if "receivers" in ends:
            for reader, name, number in _members(self._nodes.readers, self.scoring.rows):
                add(f"into {name!r}", found.rows[name], restored(reader, number), [reader], clean)
        return found

    def _scores(self) -> EdgeScores:
        rules = rules_of(self.scoring.method)
        with rules.recording(), torch.no_grad():
            clean, metric = self._run(self._pair.clean, {})
        found = self._empty(clean)
        found.clean = float(metric)
        deltas: Deltas | None = None
        for fraction in self.scoring.fractions:
            corrupted, metric, gradients = self._gradient_run(rules, clean, fraction)
            if deltas is None:
                base = corrupted
                if fraction:
                    with torch.no_grad():
                        base, metric = self._run(self._pair.corrupted, {})
                found.corrupted = float(metric.detach())
                deltas = self._deltas(clean, base, found)
            _Backwards(self, clean, corrupted, deltas, found).score(self._nodes.readers, gradients)
        # The edges into the logits have this sum in any case, whatever is between the components.
        begins = [f"{stream}@embed" for stream in self._nodes.streams]
        columns = [found.columns[name] for name in begins if name in found.columns]
        change = found.clean - found.corrupted
        what = f"out of {' and '.join(begins)} differ from the change of the metric"
        found.note_sum(what, found.values[:, columns], change, rules)
        return found

    def _deltas(self, clean: Values, corrupted: Values, found: EdgeScores) -> Deltas:
        deltas = Deltas(self._nodes, clean, corrupted, self.scoring.max_bytes // 2)
        deltas.check(self._nodes)
        found.is_half = deltas.coarsest > 1e-6
        return deltas

    def _gradient_run(
        self, rules: DerivativeRules, clean: Values, fraction: float
    ) -> tuple[Values, Tensor, Mapping[str, Tensor | None]]:
        """Returns the values, the metric and the gradients of a run at a point between the two runs."""

        def begin(value: Tensor, path: str) -> Tensor:
            with without_torch_functions():  # derivative rules would take it for a step of the model
                start = torch.lerp(value.detach(), clean[path], fraction) if fraction else value.detach()
                return start.clone().requires_grad_().clone()  # the model may write into it

        patches: dict[str, Patch[Any]] = {
            path: CustomPatch(custom_op=functools.partial(begin, path=path), requires_clone=False)
            for path in self._nodes.streams.values()
        }
        with rules.applied(), torch.enable_grad():
            values, metric = self._run(self._pair.corrupted, patches, self._nodes.reads)
        wanted = {path: values[path] for path in self._nodes.reads if values[path].requires_grad}
        if not metric.requires_grad or not wanted:
            raise no_gradient()
        gradients = dict(zip(wanted, gradients_of(metric, list(wanted.values())), strict=True))
        return {path: value.detach() for path, value in values.items()}, metric, gradients

    def _run(
        self, inputs: Inputs, patches: Mapping[str, Patch[Any]], also: Sequence[str] = ()
    ) -> tuple[Values, Tensor]:
        self._snapshot.restore()
        probes = {path: ProbePatch() for path in (*self._nodes.recorded, *also)}
        merged: dict[str | NodePath, list[Patch[Any]]] = {}
        for listed in (patches, probes):
            for path, patch in listed.items():
                merged.setdefault(path, []).append(patch)
        choices = self._choices.recorded() if inputs is self._pair.clean else self._choices.held()
        with self._pg.patch(merged, strict=True), choices:
            output = inputs.run(self._pg)
        return {path: probe.activation for path, probe in probes.items()}, metric_number(self._pair.metric(output))


def _members(groups: Sequence[_Group], names: Collection[str]) -> Iterator[tuple[_Group, str, int]]:
    """Yields the senders or receivers with some names, each with its number in its group."""
    for group in groups:
        yield from ((group, name, number) for number, name in enumerate(group.names) if name in names)


def _restoring(clean: Tensor, corrupted: Tensor, columns: Tensor | None) -> Patch[Any]:
    """Returns the patch that restores a clean value, or some of its columns."""
    if columns is None:
        return ReplacePatch(value=clean)
    value, at = corrupted.clone(), index_of(columns.to(corrupted.device))
    value[..., at] = clean[..., at]
    return ReplacePatch(value=value)


class Deltas:
    """What senders write in the clean run, minus what they write in the corrupted one.

    If the differences take more than `max_bytes`, they are computed again when they are needed.

    Attributes:
        coarsest: The largest rounding error of the values, relative to them. Of a stream in single precision,
            components may write in half.
    """

    def __init__(self, nodes: Nodes, clean: Values, corrupted: Values, max_bytes: int) -> None:
        self._clean = clean
        self._corrupted = corrupted
        values = (value for value in clean.values() if value.is_floating_point())
        self.coarsest = max(torch.finfo(value.dtype).eps for value in values)
        self._columns: dict[int, slice] = {}
        end = 0
        for writer in nodes.writers:
            start, end = end, end + len(writer.names)
            self._columns[id(writer)] = slice(start, end)
        first = self._written(nodes.writers[0])
        shape = (end, *first.shape[1:])
        fits = math.prod(shape) * first.element_size() <= max_bytes
        self._kept = self._all(nodes, first.new_empty(shape)) if fits else None

    def _all(self, nodes: Nodes, kept: Tensor) -> Tensor | None:
        """Returns all differences in one tensor; `None` if they differ in shape, as in an encoder and a decoder."""
        for writer in nodes.writers:
            written = self._written(writer)
            if written.shape[1:] != kept.shape[1:] or (written.dtype, written.device) != (kept.dtype, kept.device):
                return None
            kept[self._columns[id(writer)]] = written
        return kept

    def of(self, writer: Writer) -> Tensor:
        """Returns the differences of a writer, of shape `(senders, rows, channels)`."""
        return self._written(writer) if self._kept is None else self._kept[self._columns[id(writer)]]

    def _written(self, writer: Writer) -> Tensor:
        return writer.change(self._clean, self._corrupted)

    def together(self, writers: Sequence[Writer]) -> Iterator[tuple[slice, Tensor]]:
        """Yields the differences of writers: of those next to each other at once, each with their columns of scores."""
        found: list[slice] = []
        by_start = {self._columns[id(writer)].start: writer for writer in writers}
        for start in sorted(by_start):
            columns = self._columns[id(by_start[start])]
            if found and self._kept is not None and found[-1].stop == start:
                found[-1] = slice(found[-1].start, columns.stop)
            else:
                found.append(columns)
        for columns in found:
            yield columns, self.of(by_start[columns.start]) if self._kept is None else self._kept[columns]

    def check(self, nodes: Nodes) -> None:
        """Checks that the sums of the senders are what norms and receivers read.

        Raises:
            ExperimentError: They are not: the model computes something between components that the graph does not
                show as linear.
        """
        totals: dict[int, Tensor] = {}

        def total(term: Summand) -> Tensor:
            source = term.source
            if id(source) not in totals:
                if isinstance(source, NormOfSum):
                    one, other = (source.function(run[source.path]) for run in (self._clean, self._corrupted))
                    totals[id(source)] = rows_of(one - other)
                else:
                    totals[id(source)] = self.of(source).sum(0)
            return term.on(totals[id(source)])

        sums = {reader.paths[0]: reader.source for reader in nodes.readers if reader.projection is None}
        sums |= {norm.path: norm.source for reader in nodes.readers for norm in norms_in(reader.source)}
        with torch.no_grad():
            for path, source in sums.items():
                clean, corrupted = self._clean[path], self._corrupted[path]
                known = rows_of(clean - corrupted)
                gap = float((known - sum(map(total, source), torch.zeros_like(known))).abs().max())
                scale = max(float(value.abs().max()) for value in (clean, corrupted))
                if not gap <= max(1e-3, 32 * self.coarsest) * scale:
                    raise ExperimentError(
                        f"what components add to the residual stream does not explain {path!r}: it differs by "
                        f"{gap:.2g}. Is the model in training mode? Call pg.eval()"
                    )


@dataclass(frozen=True)
class _Backwards:
    """Takes gradients back from receivers to senders, and adds the scores."""

    runs: _Runs
    clean: Values
    corrupted: Values
    deltas: Deltas
    found: EdgeScores

    def score(self, readers: Sequence[Reader], gradients: Mapping[str, Tensor | None]) -> None:
        """Adds the scores of receivers; those next to each other that read the same value go together."""
        for _, together in groupby(readers, key=lambda reader: id(reader.source)):
            alike = list(together)
            for names, stacked in self._stacks(alike, gradients):
                self._walk(names, alike[0].source, stacked)

    def _stacks(
        self, readers: Sequence[Reader], gradients: Mapping[str, Tensor | None]
    ) -> Iterator[tuple[list[str], Tensor]]:
        """Yields gradients at inputs of receivers, of shape `(receivers, rows, channels)`, as many as memory allows."""
        names: list[str] = []
        parts: list[Tensor] = []
        for name, part in self._parts(readers, gradients):
            if parts and (len(parts) + 1) * part.numel() * part.element_size() * 6 > self.runs.scoring.max_bytes // 2:
                yield names, torch.stack(parts)
                names, parts = [], []
            names.append(name)
            parts.append(part)
        if parts:
            yield names, torch.stack(parts)

    def _parts(self, readers: Sequence[Reader], gradients: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        for reader in readers:
            given = [rows_of(gradient) for path in reader.paths if (gradient := gradients.get(path)) is not None]
            if not given:
                continue
            gradient = torch.stack(given).sum(0) if len(given) > 1 else given[0]
            if reader.projection is None:
                yield reader.names[0], gradient
                continue
            weight = reader.projection.weight()
            for name, numbers in zip(reader.names, reader.projection.heads.to(weight.device), strict=True):
                columns = index_of(numbers)
                yield name, gradient[:, columns] @ weight[:, columns].T

    def _walk(self, names: Sequence[str], source: Sum, stacked: Tensor) -> None:
        waiting: dict[int, tuple[NormOfSum, Tensor]] = {}
        self._meet(names, source, stacked, waiting)
        while waiting:
            norm, gradient = waiting.pop(max(waiting))
            self._meet(names, norm.source, self._through(norm, gradient), waiting)

    def _meet(
        self, names: Sequence[str], source: Sum, gradient: Tensor, waiting: dict[int, tuple[NormOfSum, Tensor]]
    ) -> None:
        direct = []
        for term in source:
            if isinstance(term.source, Writer) and not term.steps:
                direct.append(term.source)
                continue
            own = term.back(gradient)
            if isinstance(term.source, Writer):
                self._add(names, [term.source], own)
            else:
                before = waiting.get(term.source.number)
                waiting[term.source.number] = (term.source, own if before is None else before[1] + own)
        if direct:
            self._add(names, direct, gradient)

    def _add(self, names: Sequence[str], writers: Sequence[Writer], gradient: Tensor) -> None:
        """Adds the scores of edges, computed from the gradients of the written values."""
        rows, positions = [self.found.rows[name] for name in names], self.runs.positions
        if positions is None:
            for columns, delta in self.deltas.together(writers):
                self._add_products(rows, columns, 0, gradient, delta)
            return
        for writer in writers:
            numbers = positions.of(writer).to(gradient.device)
            for columns, delta in self.deltas.together([writer]):
                for number in range(len(positions.labels)):
                    at = numbers == number
                    self._add_products(rows, columns, number, gradient[:, at], delta[:, at])

    def _add_products(self, rows: list[int], columns: slice, number: int, gradient: Tensor, delta: Tensor) -> None:
        scores = widened(gradient).flatten(1) @ widened(delta).flatten(1).T
        self.found.values[rows, columns, number] += scores.detach().cpu().double().numpy() / len(
            self.runs.scoring.fractions
        )

    def _through(self, norm: NormOfSum, gradient: Tensor) -> Tensor:
        """Returns gradients at the input of a norm, from those at its result."""
        method = self.runs.scoring.method
        rules = rules_of(method)
        if method == "secant":
            with rules.recording(), torch.no_grad():
                norm.function(self.clean[norm.path])
        read = self.corrupted[norm.path].detach().requires_grad_()
        with rules.applied(), torch.enable_grad():
            result = norm.function(read)
        stacked = gradient.reshape(-1, *result.shape).to(result.dtype)
        if len(stacked) == 1:
            (found,) = torch.autograd.grad(result, read, stacked[0])
        else:
            (found,) = torch.autograd.grad(result, read, stacked, is_grads_batched=True)
        return found.reshape(gradient.shape)
