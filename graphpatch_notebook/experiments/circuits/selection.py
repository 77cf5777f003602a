"""The choice of edges by their scores, and how much of an effect the circuits of several sizes keep."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.circuits.circuit import Circuit, Edge, is_local
from graphpatch_notebook.experiments.circuits.edges import Batch, batches_of
from graphpatch_notebook.experiments.circuits.nodes import Nodes
from graphpatch_notebook.experiments.circuits.runs import CircuitRuns, Kept, kept_edges, nodes_like
from graphpatch_notebook.experiments.elsewhere import map_batches
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.methods.arguments import check_graph
from graphpatch_notebook.patchable_graph import PatchableGraph, runs_where_the_model_is
from graphpatch_notebook.warning_places import level_of_caller, warn

if TYPE_CHECKING:
    from xarray import DataArray, Dataset

SelectionMethod: TypeAlias = Literal["top", "greedy"]
_Cell: TypeAlias = "tuple[int, int, int]"
"""The numbers of a receiver, a sender and a position."""
_SIZES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@runs_where_the_model_is
def circuit(
    pg: PatchableGraph,
    scores: DataArray,
    edges: int = 100,
    *,
    selection: SelectionMethod = "top",
    absolute: bool = True,
    prune: bool = True,
) -> Circuit:
    """Returns the circuit of the edges with the largest scores.

    Args:
        pg: The graph.
        scores: The scores, from `attribute_edges`, for all senders and receivers.
        edges: How many edges to choose; all if there are fewer.
        selection: `"top"`: the edges with the largest scores. `"greedy"`: from the logits on, the edge with the
            largest score into what is in the circuit already, again and again; then no edge is chosen that leads
            nowhere.
        absolute: Whether scores count by magnitude; otherwise edges with a negative effect come last.
        prune: Whether edges are removed that change nothing, since they are not on a way from the embeddings to the
            logits. The circuit may have fewer edges then. No edge is removed if there are components whose edges cannot
            be followed (`scores.skipped`): they read what all others write.

    Returns:
        The circuit. `circuit_patches` runs the model as this circuit.

    Raises:
        ExperimentError: The scores are not those of the model, or lack some of its nodes.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from graphpatch_notebook.experiments import attribute_edges
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(6)[None])
        >>> clean, corrupted = torch.arange(6)[None], torch.arange(6, 12)[None]
        >>> scores = attribute_edges(pg, lambda out: out.logits[0, -1, 3], clean, corrupted)
        >>> len(circuit(pg, scores, edges=5, prune=False).edges)
        5

    Source:
        Hanna et al., Have faith in faithfulness (2024), for the greedy selection.
    """
    check_graph(pg)
    if type(edges) is not int or edges < 0:
        raise ExperimentError(f"edges must be a number of edges, not {edges!r}")
    _check_scores(scores)
    nodes = nodes_like(pg, scores.attrs["feeds"])
    chosen = itertools.islice(ranked(nodes, scores, selection, absolute=absolute), edges)
    attrs = scores.attrs
    found = Circuit(
        edges=tuple(sorted(chosen, key=lambda edge: -abs(edge.score))),
        feeds=nodes.feeds,
        candidates=int(attrs["edges"]),
        clean=float(attrs["clean"]),
        corrupted=float(attrs["corrupted"]),
        method=str(attrs["method"]),
        metric=str(attrs["metric"]),
        ahead=tuple(attrs.get("ahead", ())),
        missing=nodes.missing,
    )
    if not prune:
        return found
    pruned = found.without_dead_ends()
    if found.edges and not pruned.edges:
        warn(
            f"the circuit is empty: none of the {len(found.edges)} strongest edges is on a way from the embeddings to "
            'the logits that consists of these edges; take more edges, or selection="greedy"',
            "experiment",
            stacklevel=level_of_caller(),
        )
    return pruned


def _check_scores(scores: Any) -> None:
    """Checks that scores are those of edges, with their attributes."""
    attrs = getattr(scores, "attrs", {})
    if "feeds" not in attrs or "positions" in attrs:
        raise ExperimentError(
            "scores must be those of attribute_edges, with attrs['feeds'] (arithmetic keeps attributes under "
            "xarray.set_options(keep_attrs=True)), and with the same positions in all rows"
        )


def ranked(nodes: Nodes, scores: DataArray, selection: SelectionMethod, *, absolute: bool) -> Iterator[Edge]:
    """Returns the edges of a model in the order in which circuits of growing size take them.

    Raises:
        ExperimentError: The scores are not those of the model.
    """
    if selection not in ("top", "greedy"):
        raise ExperimentError(f"selection must be 'top' or 'greedy', not {selection!r}")
    own = [list(scores.coords[name].values) for name in ("receiver", "sender")]
    if own != [nodes.receivers, nodes.senders]:
        raise ExperimentError("the scores lack nodes of the model: compute them without senders= and receivers=")
    positions: list[int | None] = [None]
    if "position" in scores.dims:
        positions = [int(position) for position in scores.coords["position"].values]
    values = scores.transpose("receiver", "sender", ...).values.reshape(*map(len, own), -1)
    sizes = np.abs(values) if absolute else values
    receivers, senders = own
    return (
        Edge(senders[column], receivers[row], float(values[row, column, number]), positions[number])
        for row, column, number in (_greedy(nodes, sizes) if selection == "greedy" else _top(sizes))
    )


def _top(sizes: Any) -> Iterator[_Cell]:
    order = np.argsort(-np.where(np.isnan(sizes), -np.inf, sizes).reshape(-1), kind="stable")
    cells = np.unravel_index(order[: int((~np.isnan(sizes)).sum())], sizes.shape)
    yield from zip(*(index.tolist() for index in cells), strict=True)


def _greedy(nodes: Nodes, sizes: Any) -> Iterator[_Cell]:
    """Yields, from the ends on, the largest edge into what is reached already, again and again."""
    receivers, senders, everywhere = nodes.receivers, nodes.senders, range(sizes.shape[2])
    rows: dict[str, list[int]] = {}
    for row, receiver in enumerate(receivers):
        for sender in nodes.feeds[receiver]:
            rows.setdefault(sender, []).append(row)
    waiting: list[tuple[float, int, int, int]] = []
    is_open = np.zeros((len(receivers), len(everywhere)), bool)

    def add(row: int, number: int) -> None:
        if not is_open[row, number]:
            is_open[row, number] = True
            own = sizes[row, :, number]
            for column in np.flatnonzero(~np.isnan(own)).tolist():
                heapq.heappush(waiting, (-float(own[column]), row, column, number))

    for row, receiver in enumerate(receivers):
        if not nodes.feeds[receiver]:
            for number in everywhere:
                add(row, number)
    while waiting:
        _, row, column, number = heapq.heappop(waiting)
        yield row, column, number
        for own in rows.get(senders[column], ()):
            for at in (number,) if is_local(receivers[own]) else everywhere:
                add(own, at)


@runs_where_the_model_is
def faithfulness(
    pg: PatchableGraph,
    scores: DataArray | Mapping[str, DataArray],
    metric: Callable[[Any], Any] | Sequence[Callable[[Any], Any]],
    clean: Any,
    corrupted: Any,
    *,
    sizes: Iterable[int | float] | None = None,
    selection: SelectionMethod = "top",
    absolute: bool = True,
    random: int | None = 0,
    executor: Any = None,
    recipe: Any = None,
) -> Dataset:
    """Returns the share of an effect that circuits of several sizes keep, measured in runs of the model.

    The faithfulness of a circuit is `(metric of the circuit - corrupted) / (clean - corrupted)`: 1 if its edges alone
    pass on the whole effect. There is one run for each ranking, size and batch, and two more for each batch.

    Args:
        pg: The graph.
        scores: The scores that rank the edges, from `attribute_edges`; or several by name, such as
            `{"gradient": ..., "secant": ..., "exact": ...}`.
        metric: Maps the output of the model to a single number; or a list of such functions, one for each batch.
        clean: The clean inputs, as for `attribute_edges`; a list has one for each batch. They need not be the inputs of
            the scores.
        corrupted: The corrupted inputs, in the same form.
        sizes: Numbers of edges, or shares of all edges (floats up to 1.0). By default, the ten shares of MIB, from
            0.001 to 1.
        selection: How circuits are chosen, as for `circuit`.
        absolute: Whether scores count by magnitude, as for `circuit`.
        random: The seed of an additional random ranking with the name `"random"`; `None` for none.
        executor: Runs batches elsewhere, as for `pg.sweep`.
        recipe: As for `pg.sweep`.

    Returns:
        A dataset with the dimensions `ranking` and `size` (the number of edges): `faithfulness`, and `metric`, the mean
        over the batches. By ranking, `CPR`, the area under the curve of faithfulness over the share of edges, and
        `CMD`, the area between that curve and 1; both are those of MIB. `share` has the sizes as shares. Attributes:
        `clean`, `corrupted` and `candidates`, the number of edges.

    Raises:
        ExperimentError: The scores are not those of the model, or the metric is the same on both inputs.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from graphpatch_notebook.experiments import attribute_edges
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(6)[None])
        >>> clean, corrupted = torch.arange(6)[None], torch.arange(6, 12)[None]
        >>> metric = lambda out: out.logits[0, -1, 3]
        >>> scores = attribute_edges(pg, metric, clean, corrupted)
        >>> curve = faithfulness(pg, scores, metric, clean, corrupted, sizes=[5, 20, 46])
        >>> curve.faithfulness.dims, round(curve.faithfulness.sel(ranking="scores", size=46).item(), 3)
        (('ranking', 'size'), 1.0)

    Source:
        Mueller et al., MIB: a mechanistic interpretability benchmark (2025).
    """
    check_graph(pg)
    xarray = extra("xarray", "a dataset of curves")
    batches = batches_of(pg, metric, clean, corrupted)
    given: Any = scores  # for a type checker, an array may be a mapping, too
    named: dict[str, DataArray] = dict(given) if isinstance(given, Mapping) else {"scores": given}
    for each in named.values():
        _check_scores(each)
    first = next(iter(named.values()))
    labels = [{dim: each[dim].values.tolist() for dim in each.dims} for each in named.values()]
    if any(each != labels[0] for each in labels):
        raise ExperimentError(
            "the scores are not those of the same edges: some have positions, or others than the rest"
        )
    nodes = nodes_like(pg, first.attrs["feeds"])
    candidates = int(np.isfinite(first.values).sum())
    if random is not None and "random" not in named:
        drawn = np.random.default_rng(random).random(first.shape)
        named["random"] = first.copy(data=np.where(np.isnan(first.values), np.nan, drawn))
    counts = _counts(_SIZES if sizes is None else sizes, candidates)
    empty = Circuit((), nodes.feeds, candidates, math.nan, math.nan)
    rankings = {name: tuple(ranked(nodes, each, selection, absolute=absolute)) for name, each in named.items()}
    circuits = [
        kept_edges(nodes, replace(empty, edges=edges[:count])) for edges in rankings.values() for count in counts
    ]
    sums, ends = np.zeros(len(circuits)), np.zeros(2)
    run = functools.partial(_metrics, nodes.feeds, circuits)
    for ends_here, values_here in map_batches(pg, run, batches, executor=executor, recipe=recipe):
        ends += ends_here
        sums += values_here
    values = sums.reshape(len(rankings), len(counts)) / len(batches)
    high, low = ends / len(batches)
    if high == low:
        raise ExperimentError(f"the metric is {high:.6g} on both inputs, so there is no effect to keep")
    curves = (values - low) / (high - low)
    shares = np.array(counts) / candidates
    areas = {name: _areas(shares, curve) for name, curve in zip(rankings, curves, strict=True)}
    return xarray.Dataset(  # type: ignore[no-any-return]
        {
            "faithfulness": (("ranking", "size"), curves),
            "metric": (("ranking", "size"), values),
            "CPR": ("ranking", [area[0] for area in areas.values()]),
            "CMD": ("ranking", [area[1] for area in areas.values()]),
        },
        {"ranking": list(rankings), "size": counts, "share": ("size", shares)},
        {"clean": float(high), "corrupted": float(low), "candidates": candidates, "selection": selection},
    )


def _metrics(
    feeds: Mapping[str, Sequence[str]], circuits: Sequence[Kept], pg: PatchableGraph, batch: Batch
) -> tuple[list[float], list[float]]:
    """Returns the metric of the clean and the corrupted run on a batch, and that of each circuit."""
    with torch.no_grad():
        runs = CircuitRuns(pg, nodes_like(pg, feeds), batch.corrupted, batch.number)
        ends, values = [batch.number(batch.clean.run(pg)), runs.metric], []
        for kept in circuits:
            patches: dict[Any, Any] = {**runs.patches(kept)}
            with pg.patch(patches):
                values.append(batch.number(batch.clean.run(pg)))
    return ends, values


def _counts(sizes: Iterable[int | float], candidates: int) -> list[int]:
    counts = {max(1, round(size * candidates)) if isinstance(size, float) and 0 < size <= 1 else size for size in sizes}
    if not counts or not all(type(count) is int and 0 <= count <= candidates for count in counts):
        raise ExperimentError(f"sizes are numbers of edges up to {candidates}, or shares of them (floats up to 1.0)")
    return sorted(map(int, counts))


def _areas(shares: Any, curve: Any) -> tuple[float, float]:
    """Returns the area under a curve and the area between it and 1, over shares from 0, where no edge is kept."""
    places, heights = (shares, curve) if shares[0] == 0 else (np.append(0, shares), np.append(0, curve))
    widths = np.diff(places)
    under = float(((heights[1:] + heights[:-1]) / 2 * widths).sum())
    gaps = np.abs(1 - heights)
    return under, float(((gaps[1:] + gaps[:-1]) / 2 * widths).sum())
