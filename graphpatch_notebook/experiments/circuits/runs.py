"""The choice of edges by their scores, exact runs of a model as a circuit, and how much of an effect circuits keep.

In a run as a circuit, each receiver reads the corrupted stream plus, for each of its edges that is kept, what the
sender writes in this run minus what it writes in the corrupted one; at one position, if the edge has one. The patches
of `circuit_patches` do this: each replaces what a receiver reads, and reads the senders of the same run.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from graphpatch_notebook.errors import ExperimentError, PatchValueError, extra, level_of_caller, warn
from graphpatch_notebook.experiments.circuits.circuit import Circuit, Edge
from graphpatch_notebook.experiments.circuits.nodes import Nodes, Reader, WrittenPositions, nodes_of
from graphpatch_notebook.experiments.circuits.stream import Writer, rows_of
from graphpatch_notebook.experiments.engine import map_batches
from graphpatch_notebook.experiments.engine.cells import measurement
from graphpatch_notebook.experiments.engine.inputs import (
    Inputs,
    check_graph,
    check_metric,
    check_same_input_shapes,
    inputs_of,
    record,
)
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import AddPatch, Patch
from graphpatch_notebook.patching.model_state import runs_where_the_model_is
from graphpatch_notebook.texts import is_text
from graphpatch_notebook.torch_compat import without_torch_functions

if TYPE_CHECKING:
    from xarray import DataArray, Dataset

Kept: TypeAlias = "Mapping[str, Mapping[str, frozenset[int] | None]]"
"""The senders that each receiver reads, and at which positions; `None`: at all."""

_SIZES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

# -- inputs ------------------------------------------------------------------------------------------------------------


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
    cleans, others = (
        given if isinstance(given, list) and not is_text(given) else [given] for given in (clean, corrupted)
    )
    metrics = list(metric) if isinstance(metric, (list, tuple)) else [metric] * len(cleans)
    if not len(metrics) == len(cleans) == len(others) > 0 or isinstance(clean, list) != isinstance(corrupted, list):
        raise ExperimentError(
            f"clean and corrupted must both be lists of inputs of the same length, or neither, with one metric or as "
            f"many; not {len(cleans)}, {len(others)} and {len(metrics)}"
        )
    found = []
    for each, one, other in zip(metrics, cleans, others, strict=True):
        check_metric(each)
        found.append(Batch(each, inputs_of(pg, one), inputs_of(pg, other)))
        check_same_input_shapes(pg, found[-1].clean, found[-1].corrupted)
    return found


# -- exact runs --------------------------------------------------------------------------------------------------------


def circuit_patches(pg: PatchableGraph, circuit: Circuit, corrupted: Any) -> dict[str, Patch[Any]]:
    """Returns the patches that make a model run as a circuit.

    Under them, a call of `pg` on the clean inputs computes what the circuit computes: each receiver reads what it reads
    on the corrupted inputs, plus the changes that its edges pass on. With all edges, that is what the model computes;
    without any, what it computes on the corrupted inputs, to the last bit.

    Args:
        pg: The graph.
        circuit: The circuit.
        corrupted: The corrupted inputs: a tuple of arguments, a dict of keyword arguments, or one value. The model runs
            on them once. Inputs under the patches must have the same shapes.

    Returns:
        A patch map, for `pg.patch` and `pg.edit`.

    Raises:
        ExperimentError: The circuit has edges that the model does not have.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from graphpatch_notebook.experiments import attribute_edges, circuit
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(6)[None])
        >>> clean, corrupted = torch.arange(6)[None], torch.arange(6, 12)[None]
        >>> scores = attribute_edges(pg, lambda out: out.logits[0, -1, 3], clean, corrupted)
        >>> with torch.no_grad(), pg.patch(circuit_patches(pg, circuit(pg, scores, edges=46), corrupted)):
        ...     torch.allclose(pg(clean).logits, model(clean).logits, atol=1e-4)
        True

    Source:
        Conmy et al., Towards automated circuit discovery (2023); Mueller et al., MIB (2025).
    """
    check_graph(pg)
    nodes = nodes_like(pg, circuit.feeds)
    return CircuitRuns(pg, nodes, inputs_of(pg, corrupted)).patches(kept_edges(nodes, circuit))


def nodes_like(pg: PatchableGraph, feeds: Mapping[str, Sequence[str]]) -> Nodes:
    """Returns the nodes of a model that match the nodes of a circuit: with attention heads as nodes, or without.

    Raises:
        ExperimentError: The model has other nodes.
    """
    wanted = {receiver: tuple(senders) for receiver, senders in feeds.items()}
    nodes = nodes_of(pg.nodes.root, heads=".heads[" in str(wanted))
    if other := set(wanted.items()) ^ set(nodes.feeds.items()):
        raise ExperimentError(f"the nodes are not those of this model: they differ in {min(other)[0]!r}")
    return nodes


def kept_edges(nodes: Nodes, circuit: Circuit) -> Kept:
    """Returns the senders that each receiver reads in a circuit.

    Raises:
        ExperimentError: The model has no such edge.
    """
    sources = {name: reader.source.writers.values() for reader in nodes.readers for name in reader.names}
    senders = {name: {each for writer in writers for each in writer.names} for name, writers in sources.items()}
    found: dict[str, dict[str, frozenset[int] | None]] = {}
    for edge in circuit.edges:
        if edge.sender not in senders.get(edge.receiver, ()):
            raise ExperimentError(
                f"the model has no edge from {edge.sender!r} to {edge.receiver!r}; the circuit is that of another model"
            )
        known = found.setdefault(edge.receiver, {})
        before = known.get(edge.sender) or frozenset()
        known[edge.sender] = None if edge.position is None else before | {edge.position}
    return found


@dataclass(frozen=True, eq=False)
class KeptEdges:
    """The edges to receivers that read one value.

    Attributes:
        reader: The receivers.
        names: The names of those that have edges.
        masks: For each writer, whether each of these reads each of its senders, `(receivers, senders)`; for edges with
            positions, for each row.
    """

    reader: Reader
    names: Sequence[str]
    masks: Mapping[Writer, Tensor]

    @classmethod
    def of(cls, reader: Reader, kept: Kept, positions: WrittenPositions | None) -> KeptEdges:
        """Returns those of the edges of a circuit that lead to a reader."""
        names = [name for name in reader.names if kept.get(name)]
        labels = [] if positions is None else positions.labels
        masks = {}
        for writer in reader.source.writers.values():
            every = itertools.product(enumerate(names), enumerate(writer.names))
            own = {(row, column): kept[name][sender] for (row, name), (column, sender) in every if sender in kept[name]}
            is_read = torch.zeros(len(names), len(writer.names), len(labels) + 1, dtype=torch.bool)
            for at, chosen in own.items():
                is_read[at][-1 if chosen is None else [labels.index(each) for each in chosen]] = True
            if own:
                masks[writer] = is_read[..., -1] if positions is None else is_read[..., positions.of[writer.stream]]
        return cls(reader, names, masks)

    def changes(
        self, written: Callable[[Writer], Tensor], values: Mapping[str, Tensor]
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yields the columns of the value at the paths of the reader that change, and the change of their rows.

        `written` returns what the senders of a writer write, minus what they write in the run that has these values.
        """

        def total(writers: list[Writer]) -> Tensor | None:
            used = [writer for writer in writers if writer in self.masks]
            if not used:
                return None
            changes = torch.cat([written(writer) for writer in used])
            masks = torch.cat([self.masks[writer] for writer in used], dim=1).to(changes)
            if masks.dim() == 3:  # by row
                return torch.einsum("esr,src->erc", masks, changes)
            return (masks @ changes.flatten(1)).reshape(len(masks), *changes.shape[1:])

        read, projection = self.reader.source.change(total, values), self.reader.projection
        if read is None:
            return
        if projection is None:
            yield slice(None), read[0]
            return
        weight = projection.weight()
        for rows, name in zip(read, self.names, strict=True):
            columns = projection.indices[self.reader.names.index(name)]
            yield columns, rows @ weight[:, columns]


class CircuitRuns:
    """Makes the patches of circuits, relative to one run on the corrupted inputs.

    Attributes:
        values: The values of that run, by path.
        metric: Its metric; 0 if none is given.
    """

    def __init__(
        self, pg: PatchableGraph, nodes: Nodes, corrupted: Inputs, metric: Callable[[Any], float] | None = None
    ) -> None:
        run = record(pg, corrupted, list(dict.fromkeys([*nodes.recorded, *nodes.reads])), metric)
        run.warn_if_random()
        self.values, self.metric = run.values, float(run.measurement.values)
        self._root, self._nodes = pg.nodes.root, nodes
        self._written: Any = WeakIdKeyDictionary()

    def patches(self, kept: Kept) -> dict[str, Patch[Any]]:
        """Returns the patches of a circuit.

        Raises:
            ExperimentError: It has positions, and those of the model are not known, or it has fewer.
        """
        chosen = {at for senders in kept.values() for each in senders.values() if each is not None for at in each}
        positions = WrittenPositions(self._root, self._nodes, self.values, sorted(chosen)) if chosen else None
        by_path: dict[str, list[KeptEdges]] = {}
        for reader in self._nodes.readers:
            edges = KeptEdges.of(reader, kept, positions)
            for path in reader.paths:
                by_path.setdefault(path, []).append(edges)
        return {path: ReadPatch(self, path, edges) for path, edges in by_path.items()}

    def edge(
        self,
        reader: Reader,
        receiver: str,
        changes: Mapping[Writer, Tensor],
        positions: WrittenPositions | None,
        sender: str,
        position: int | None = None,
    ) -> dict[str, Patch[Any]]:
        """Returns the patches on the corrupted run with which one receiver reads the clean value of one sender.

        `changes` has what the senders write in the clean run, minus the same in the corrupted one, by their writer;
        `position` is where the receiver reads it, `None` for all of `positions`.
        """
        kept = {receiver: {sender: None if position is None else frozenset((position,))}}
        edges = KeptEdges.of(reader, kept, None if position is None else positions)
        ((columns, rows),) = edges.changes(changes.__getitem__, self.values)
        change = torch.zeros_like(self.values[reader.paths[0]], memory_format=torch.contiguous_format)
        rows_of(change, reader.projection)[:, columns] = rows
        return {path: AddPatch(value=change) for path in reader.paths}

    def written(self, writer: Writer, now: Mapping[str, Tensor]) -> Tensor:
        """Returns what senders write in a run, minus the same in the corrupted run: computed once for each run."""
        known = self._written.setdefault(now[writer.path], {})
        if writer not in known:
            known[writer] = writer.change(now, self.values)
        return known[writer]  # type: ignore[no-any-return]


@dataclass(eq=False)
class ReadPatch(Patch[Any]):
    """Replaces the inputs of receivers by those of the corrupted run, plus the changes of the senders that they keep.

    Attributes:
        runs: The corrupted run.
        path: The path that is patched.
        edges: The edges to the receivers there.
    """

    runs: CircuitRuns = field(repr=False)
    path: str = field(repr=False)
    edges: Sequence[KeptEdges] = field(repr=False)
    _read: Mapping[str, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def sources(self) -> Sequence[str]:
        """The paths of what the senders write."""
        return list(dict.fromkeys(writer.path for each in self.edges for writer in each.masks))

    def reading(self, values: Sequence[Any]) -> ReadPatch:
        """Returns a copy with an `op` that uses these values of the senders."""
        result = copy.copy(self)
        result._read = dict(zip(self.sources, values, strict=True))
        return result

    def op(self, original_output: Any) -> Any:
        base = self.runs.values[self.path]
        if not isinstance(original_output, Tensor) or original_output.shape != base.shape:
            shown = tuple(original_output.shape) if isinstance(original_output, Tensor) else original_output
            raise PatchValueError(
                f"the value here is {shown}, and {tuple(base.shape)} on the corrupted inputs of the circuit: give "
                "inputs of the same shapes"
            )
        with without_torch_functions():
            value = base.clone()
            read = rows_of(value, self.edges[0].reader.projection)  # a copy, if these are not the last in memory
            for edges in self.edges:
                changes = edges.changes(lambda writer: self.runs.written(writer, self._read), self.runs.values)
                for columns, rows in changes:
                    read[:, columns] = read[:, columns] + rows  # `+=` of all columns fails with gradients
            value.copy_(read.view(value.shape))
        return value


# -- the choice of edges -----------------------------------------------------------------------------------------------


@runs_where_the_model_is
def circuit(
    pg: PatchableGraph,
    scores: DataArray,
    edges: int = 100,
    *,
    absolute: bool = True,
    prune: bool = True,
) -> Circuit:
    """Returns the circuit of the edges with the largest scores.

    Args:
        pg: The graph.
        scores: The scores, from `attribute_edges`, for all senders and receivers.
        edges: How many edges to choose; all if there are fewer.
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
    """
    check_graph(pg)
    if type(edges) is not int or edges < 0:
        raise ExperimentError(f"edges must be a number of edges, not {edges!r}")
    attrs, nodes = getattr(scores, "attrs", {}), _nodes_of(pg, scores)
    chosen = itertools.islice(_ranked(nodes, scores, absolute=absolute), edges)
    found = Circuit(
        edges=tuple(sorted(chosen, key=lambda edge: -abs(edge.score))),
        feeds=nodes.feeds,
        candidates=int(attrs["edges"]),
        clean=float(attrs["clean"]),
        corrupted=float(attrs["corrupted"]),
        method=str(attrs["method"]),
        metric=str(attrs["metric"]),
        missing=nodes.missing,
    )
    pruned = found.without_dead_ends() if prune else found
    if found.edges and not pruned.edges:
        warn(
            f"the circuit is empty: none of the {len(found.edges)} strongest edges is on a way from the embeddings to "
            "the logits that consists of these edges; take more edges",
            "experiment",
            stacklevel=level_of_caller(),
        )
    return pruned


def _nodes_of(pg: PatchableGraph, scores: Any) -> Nodes:
    """Returns the nodes of the model that scores of edges are of; checks that they are such scores."""
    attrs = getattr(scores, "attrs", {})
    if "feeds" not in attrs:
        raise ExperimentError(
            "scores must be those of attribute_edges, with attrs['feeds'] (arithmetic keeps attributes under "
            "xarray.set_options(keep_attrs=True))"
        )
    return nodes_like(pg, attrs["feeds"])


def _ranked(nodes: Nodes, scores: DataArray, *, absolute: bool) -> Iterator[Edge]:
    """Returns the edges of a model in the order in which circuits of growing size take them.

    Raises:
        ExperimentError: The scores are not those of the model.
    """
    receivers, senders = (scores.coords[name].values.tolist() for name in ("receiver", "sender"))
    if (receivers, senders) != (nodes.receivers, nodes.senders):
        raise ExperimentError("the scores lack nodes of the model: compute them without senders= and receivers=")
    positions = scores.coords["position"].values.tolist() if "position" in scores.dims else [None]
    values = scores.transpose("receiver", "sender", ...).values.reshape(len(receivers), len(senders), -1)
    sizes = np.nan_to_num(np.abs(values) if absolute else values, nan=-np.inf)
    order = np.argsort(-sizes.reshape(-1), kind="stable")[: np.isfinite(sizes).sum()]
    cells = (index.tolist() for index in np.unravel_index(order, sizes.shape))
    return (
        Edge(senders[column], receivers[row], float(values[row, column, number]), positions[number])
        for row, column, number in zip(*cells, strict=True)
    )


@runs_where_the_model_is
def faithfulness(
    pg: PatchableGraph,
    scores: DataArray | Mapping[str, DataArray],
    metric: Callable[[Any], Any] | Sequence[Callable[[Any], Any]],
    clean: Any,
    corrupted: Any,
    *,
    sizes: Iterable[int | float] | None = None,
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
    first = next(iter(named.values()))
    for each in named.values():
        nodes = _nodes_of(pg, each)
    labels = [{dim: each[dim].values.tolist() for dim in each.dims} for each in named.values()]
    if any(each != labels[0] for each in labels):
        raise ExperimentError(
            "the scores are not those of the same edges: some have positions, or others than the rest"
        )
    candidates = int(np.isfinite(first.values).sum())
    if random is not None and "random" not in named:
        drawn = np.random.default_rng(random).random(first.shape)
        named["random"] = first.copy(data=np.where(np.isnan(first.values), np.nan, drawn))
    counts = _counts(_SIZES if sizes is None else sizes, candidates)
    empty = Circuit((), nodes.feeds, candidates, math.nan, math.nan)
    rankings = [tuple(_ranked(nodes, each, absolute=absolute)) for each in named.values()]
    circuits = [kept_edges(nodes, replace(empty, edges=edges[:count])) for edges in rankings for count in counts]
    run = functools.partial(_metrics, nodes.feeds, circuits)
    found = np.mean([*map_batches(pg, run, batches, executor=executor, recipe=recipe)], axis=0)
    high, low = found[:2]
    if high == low:
        raise ExperimentError(f"the metric is {high:.6g} on both inputs, so there is no effect to keep")
    values = found[2:].reshape(len(rankings), len(counts))
    curves, shares = (values - low) / (high - low), np.array(counts) / candidates
    areas = [[_area(shares, curve, 0), _area(shares, np.abs(1 - curve), 1)] for curve in curves]
    return xarray.Dataset(  # type: ignore[no-any-return]
        {
            "faithfulness": (("ranking", "size"), curves),
            "metric": (("ranking", "size"), values),
            "CPR": ("ranking", [area for area, _ in areas]),
            "CMD": ("ranking", [area for _, area in areas]),
        },
        {"ranking": list(named), "size": counts, "share": ("size", shares)},
        {"clean": float(high), "corrupted": float(low), "candidates": candidates},
    )


def _metrics(
    feeds: Mapping[str, Sequence[str]], circuits: Sequence[Kept], pg: PatchableGraph, batch: Batch
) -> list[float]:
    """Returns the metric of the clean and the corrupted run on a batch, and then that of each circuit."""
    with torch.no_grad():
        runs = CircuitRuns(pg, nodes_like(pg, feeds), batch.corrupted, batch.number)
        found = [batch.number(batch.clean.run(pg)), runs.metric]
        for kept in circuits:
            patches: dict[Any, Any] = {**runs.patches(kept)}
            with pg.patch(patches):
                found.append(batch.number(batch.clean.run(pg)))
    return found


def _counts(sizes: Iterable[int | float], candidates: int) -> list[int]:
    counts = {max(1, round(size * candidates)) if isinstance(size, float) and 0 < size <= 1 else size for size in sizes}
    if not counts or not all(type(count) is int and 0 <= count <= candidates for count in counts):
        raise ExperimentError(f"sizes are numbers of edges up to {candidates}, or shares of them (floats up to 1.0)")
    return sorted(map(int, counts))


def _area(shares: Any, curve: Any, start: float) -> float:
    """Returns the area under a curve over shares from 0, where no edge is kept and its height is `start`."""
    heights = np.append(start, curve)
    return float(((heights[1:] + heights[:-1]) / 2 * np.diff(np.append(0, shares))).sum())
