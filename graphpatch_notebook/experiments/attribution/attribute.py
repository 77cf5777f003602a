"""Attribution: how much each value of a model contributes to the difference between two runs, by gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.errors import ExperimentError, extra, level_of_caller, warn
from graphpatch_notebook.experiments.attribution.gradient_runs import (
    AttributionRuns,
    Choices,
    Routing,
    WatchedRuns,
)
from graphpatch_notebook.experiments.attribution.rules import Method, Points, check_method, path_fractions, warn_of_loss
from graphpatch_notebook.experiments.attribution.scored_nodes import (
    PositionAxis,
    Selected,
    all_nodes,
    named_nodes,
)
from graphpatch_notebook.experiments.engine.inputs import (
    OverExamples,
    PositionDim,
    Positions,
    RowPositions,
    by_problem,
    check_graph,
    check_is_used,
    check_metric,
    check_metric_position,
    check_same_input_shapes,
    inputs_of,
)
from graphpatch_notebook.experiments.results import keep_components, metric_name, with_component_dims
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import kept_for
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patching.model_state import runs_where_the_model_is

if TYPE_CHECKING:
    from pandas import Series
    from xarray import DataArray


@runs_where_the_model_is
def attribute(
    pg: PatchableGraph,
    metric: Callable[[Any], Any],
    clean: Any,
    corrupted: Any,
    *,
    method: Method = "gradient",
    steps: int = 8,
    points: Points = "midpoint",
    one_sided: bool = False,
    routing: Routing = "free",
    paths: Iterable[str | NodePath] | None = None,
    positions: Positions | RowPositions = None,
    position_dim: PositionDim = None,
    max_bytes: int = 2**30,
    batch_size: int | None = None,
    keep_examples: bool = False,
    progress: bool = True,
    executor: Any = None,
    recipe: Any = None,
) -> DataArray:
    """Returns a score for each node: an estimate of the effect of restoring its clean value in the corrupted run.

    The score of a node is the sum, over all entries of its value, of (clean value - corrupted value) times the
    derivative of the metric by the value. `method` says which derivative:

    - `"gradient"` (attribution patching): that of the corrupted run. For a metric that is linear in the value, the
      score *is* `metric(corrupted run with the clean value) - metric(corrupted run)`; otherwise it is the first-order
      estimate of it.
    - `"secant"`: each operation has a derivative that explains its whole change between the two runs. The scores of
      each cut through the model (all positions of the residual stream after a layer) sum to the change of the metric.
      This is the most accurate method for most values, at about 1.3 times the cost.
    - `"integrated"`: the mean of the gradients at `steps` points between the corrupted and the clean run, for which the
      values at which the runs begin to differ (such as the embeddings) are interpolated. It takes `steps` times as
      long.

    The guide "Which scores can be trusted" compares them. All scores together take one run on the clean inputs, and one
    forward and backward on the corrupted inputs.

    A tensor with several names (the residual stream is an input of many modules) has a score for each of them. Each
    score counts the uses under that name only, as a patch there would change them. Gradients do not flow through values
    that the model detaches, counts or sorts, although patches have an effect there.

    The model is left as it was: no parameter gets a gradient (`requires_grad` is not needed), and buffers and random
    generators are restored after each run, so that both runs draw the same dropout. Active patches apply to both runs.

    Args:
        pg: The graph.
        metric: Maps the output of the model to a tensor with a single number that has a gradient.
        clean: The clean inputs: a tuple of arguments, a dict of keyword arguments, or one value.
        corrupted: The corrupted inputs, in the same form.
        method: The derivative, as above.
        steps: The number of points for `"integrated"`.
        points: Where they are: one in each of `steps` equal parts of the way from the corrupted run to the clean run,
            at its `"midpoint"`, which is the most accurate, or at its `"left"` (k / steps for k = 0, ..., steps - 1) or
            `"right"` end (k = 1, ..., steps), as the code of EAP-IG has them: `"right"` for nodes, `"left"` for edges.
        one_sided: For `"secant"` with `paths`: compares the corrupted run, for each value, with the same run in which
            this value alone is the clean one, and not with the clean run. The scores of all heads and positions of a
            value then sum to the exact effect of patching all of it. It takes two runs for each value.
        routing: Whether the model chooses freely in the corrupted run, or `"frozen"`: what it chooses by values in the
            clean run (the experts of a token, by `topk`, `sort`, `argmax` or `max`), it chooses in the corrupted run,
            too. Scores then explain the difference between the clean run and that run, without changes of experts.
        paths: The nodes to score. By default, all nodes with floating-point tensors. Names of heads
            (`layers[*].attn.heads[*].z`) have a score for each head.
        positions: Returns scores by position in the sequence: `True` for all positions; or a number, several numbers,
            or a slice. Negative numbers count from the end. With two dimensions, `(batch, columns)`, each row of the
            batch has positions of its own, and the result has the numbers of the columns as positions. If `paths` are
            given, each of them must have positions; otherwise a `GraphPatchWarning` names the values without
            positions.
        position_dim: The sequence dimension of the values at `paths`, as for `causal_trace`. Without `paths`, a dict by
            path.
        max_bytes: The memory limit for recorded values and their gradients. If it is exceeded, nodes are scored in
            several groups with runs of their own. The scores do not change. What `"secant"` keeps of the clean run
            counts too, but each group keeps all of that: values may take half of the limit in any case. What a backward
            pass keeps does not count.
        batch_size: For datasets in place of `clean` and `corrupted`, as for `causal_trace`; then there may be a list of
            metrics, too.
        keep_examples: As for `causal_trace`.
        progress: Whether a progress bar is shown for datasets.
        executor: Runs batches of datasets elsewhere, as for `map_batches`.
        recipe: As for `map_batches`.

    Returns:
        An array with the dimension `path` (`layer` and `head` for components, such as `layers[*].attn.heads[*].z`), and
        `position` if requested. Nodes without a score are NaN: the
        attribute `skipped` is a dict from path to reason. Other attributes: `clean` and `corrupted`, the metric of the
        two runs; `method`; `routing`; `steps` and `points`; `fallbacks`, why an operation keeps its own derivative, by
        name; for `"secant"`, `conservation`, how far the scores of each cut are from the change of the metric, relative
        to it; `roots`, the nodes at which the runs begin to differ; `same_values`, a dict from the names of one value
        to the name that represents them; `remarks`. Parameters score 0, since they are equal in both runs.

    Raises:
        UnknownPathError: A path does not exist. Raised before the model runs.
        ExperimentError: The metric does not return a single number with a gradient, or not the same one in all
            processes of a sharded model; positions are unknown or out of range; the inputs differ in shape; or, for
            `"secant"`, the model takes other steps in the two runs.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.ones(1, 2))
        >>> scores = attribute(pg, torch.sum, torch.ones(1, 2), torch.zeros(1, 2))
        >>> abs(scores.sel(path="output").item() - (scores.clean - scores.corrupted)) < 1e-6
        True

        The nodes with the largest scores, and the scores as colors in the tree:

        >>> table = top_scores(scores, 3)  # or scores.to_series().sort_values()
        >>> pg.browse().set_scores(scores)

    Source:
        Nanda, Attribution patching (2023); Syed et al., Attribution patching outperforms automated circuit discovery
        (2023). Integrated: Sundararajan et al., Axiomatic attribution for deep networks (2017); Hanna et al., Have
        faith in faithfulness (2024). Secant: Shrikumar et al., Learning important features through propagating
        activation differences (2017).
    """
    check_graph(pg, has_gradients=True)
    if examples := OverExamples({"clean": clean, "corrupted": corrupted}, batch_size, keep_examples):
        return examples.run(  # type: ignore[no-any-return]
            pg, attribute, each={"metric": metric}, method=method, steps=steps, points=points, one_sided=one_sided,
            routing=routing, paths=paths, positions=positions, position_dim=position_dim, max_bytes=max_bytes,
            progress=progress, executor=executor, recipe=recipe,
        )  # fmt: skip
    check_metric(metric)
    check_method(method)
    fractions = path_fractions(steps, points) if method == "integrated" else [0.0]
    choices = Choices(routing)
    if one_sided and (method != "secant" or paths is None):
        raise ExperimentError('one_sided=True takes two runs for each value: give method="secant" and paths=')
    given = (inputs_of(pg, clean), inputs_of(pg, corrupted))
    check_same_input_shapes(pg, *given)
    for each in given:
        check_metric_position(pg, each, metric)
    selected = kept_for(pg.nodes, all_nodes) if paths is None else named_nodes(pg, paths)
    check_is_used(position_dim, is_used=positions is not None)
    axis = None if positions is None else PositionAxis(pg, selected, given[1], positions, position_dim)
    kept = {} if axis is None else dict(axis.kept)
    kept |= {path: heads.at(kept.get(path)) for path, heads in selected.heads.items()}
    xarray = extra("xarray", "an array of scores")  # fails before the model runs
    nodes = [node for node in selected.nodes if node.is_wanted] if one_sided else selected.nodes
    watched = selected.idle.pop() if selected.idle else WatchedRuns(pg, nodes)
    runs = AttributionRuns(pg, watched, metric, *given, nodes, kept, fractions, max_bytes, method, choices)
    runs.run(is_one_sided=one_sided)
    selected.idle.append(watched)
    runs.problems |= selected.skipped
    result = _data_array(xarray, selected, runs, axis)
    result.attrs |= {"method": method, "routing": routing}
    result.attrs |= {"steps": steps, "points": points} if method == "integrated" else {}
    result.attrs |= {"same_values": dict(selected.same_values), **given[0].attrs(pg)}
    if method == "secant":
        result.attrs["conservation"] = losses = _conservation(pg, runs)
        path = max(losses, key=losses.__getitem__, default="") if runs.changes else "total"
        names = " and ".join(repr(name) for name, (place, _) in selected.places.items() if place == path)
        what = f"{names} differ from its effect" if runs.changes else "all roots differ from the change of the metric"
        is_half = any(parameter.element_size() < 4 for parameter in captured(pg).module.parameters())
        warn_of_loss(what, losses.get(path, 0.0), runs.fallbacks, is_half=is_half)
    weights = {node.path for node in nodes if node.is_state}
    unknown = runs.infinite | (set() if axis is None else axis.problems.keys() - weights)
    if lost := {path: why for path, why in runs.problems.items() if path in unknown}:
        message = (
            f"{len(lost)} values have no scores (NaN), most of them for these reasons (see the attribute 'skipped')"
        )
        warn("\n  ".join([f"{message}:", *by_problem(lost)[:3]]), "experiment", level_of_caller())
    return result


def _data_array(xarray: Any, selected: Selected, runs: AttributionRuns, axis: PositionAxis | None) -> DataArray:
    scores, places = runs.scores, selected.places
    coords: list[tuple[str, tuple[Any, ...]]] = [("path", tuple(places))]
    if axis is not None:
        labels, scores = axis.chosen(scores)
        coords.append(("position", tuple(labels)))
        runs.problems = axis.problems | runs.problems
    data = np.full([len(values) for _, values in coords], math.nan)
    for row, (path, head) in enumerate(places.values()):
        if path in scores:
            each = scores[path]  # a single zero, if it is equal in both runs
            if path in selected.heads and each.ndim == len(coords):
                each = np.asarray(each.sum(0) if head is None else each[head])
            data[row] = each
    ordered = (*(path for path, _ in places.values()), *runs.problems)
    attrs = {
        "clean": runs.clean_metric,
        "corrupted": runs.corrupted_metric,
        "metric": metric_name(runs.metric),
        "skipped": {path: runs.problems[path] for path in ordered if path in runs.problems},
        "roots": runs.roots,
        "remarks": runs.remarks,
        "fallbacks": runs.fallbacks,
    }
    data, coords, components = with_component_dims(data, coords)
    named = {name: list(values) for name, values in coords}
    result: DataArray = xarray.DataArray(data, named, list(named), name="score", attrs=attrs)
    keep_components(result, components)
    return result


def _conservation(pg: PatchableGraph, runs: AttributionRuns) -> dict[str, float]:
    """Returns the relative difference between the scores of each cut through the model and the change of the metric.

    Of one-sided scores: between those of each value and its effect.
    """
    total = runs.clean_metric - runs.corrupted_metric
    cuts = {path: ([path], change) for path, change in runs.changes.items()}
    if not cuts:
        cuts = {"total": (runs.roots, total)}
        if len(pg.components.layers) == 1:  # with several stacks, the residual stream of one is only a part of a cut
            stream = {name: part for name, part in pg.components.items() if ".resid_" in name and not part.index}
            cuts |= {name: ([part.path], total) for name, part in stream.items()}
    return {
        name: abs(sum(float(runs.scores[path].sum()) for path in paths) - change)
        / (max(abs(change), 1e-2 * abs(total)) or 1.0)  # smaller effects are mostly rounding
        for name, (paths, change) in cuts.items()
        if runs.scores.keys() >= {*paths}
    }


# -- ranks -------------------------------------------------------------------------------------------------------------

_CLOSE = 1e-5  # float32 sums in different orders


def top_scores(result: DataArray, count: int = 10, *, distinct: bool = True) -> Series[float]:
    """Returns the scores with the largest magnitude, as a pandas Series by path (and position).

    A value often has several names: the output of a module, the input of the next one, and views of it. Names with the
    same score share one row, under the name of a module output if there is one. A name with other uses than the value
    itself (the input of a norm, for the residual stream) has another score, and a row of its own. `attribute` finds the
    names of one value in the graph, and keeps them in the attribute `same_values`.

    Args:
        result: The result of `attribute`, or any other `DataArray` of numbers.
        count: The number of scores.
        distinct: Whether names of one value share a row.

    Returns:
        The scores. The `attrs` of the Series contain `other_names`, a dict from path to the names that were left out.

    Raises:
        ExperimentError: The result is not a `DataArray`.

    Example:
        >>> import xarray
        >>> scores = xarray.DataArray([0.5, -2.0, 1.0], {"path": ["up.output", "relu", "down.output"]}, ["path"])
        >>> top_scores(scores, 2).to_dict()
        {'relu': -2.0, 'down.output': 1.0}
    """
    if not hasattr(result, "to_series"):
        raise ExperimentError(f"expected an xarray.DataArray, as attribute(...) returns, not {type(result).__name__}")
    series = result.to_series()
    labels = [label if isinstance(label, tuple) else (label,) for label in series.index]
    names: Mapping[str, str] = {}
    if "path" in result.dims:
        at = result.dims.index("path")
        labels = [(label[at], *label[:at], *label[at + 1 :]) for label in labels]
        names = result.attrs.get("same_values", {}) if distinct else {}
    ranks = ranked(series.to_numpy(), labels, names)[:count]
    top: Series[float] = series.iloc[[first for first, *_ in ranks]]
    top.attrs["other_names"] = {
        labels[first][0]: sorted({labels[other][0] for other in others}) for first, *others in ranks if others
    }
    return top


def ranked(
    scores: np.ndarray[Any, Any], labels: Sequence[tuple[Any, ...]], names: Mapping[str, str]
) -> list[list[int]]:
    """Returns the indices of the finite scores, largest in magnitude first; all names of one value share a rank.

    Names of one value with different scores (a residual stream, and the input of a norm) have ranks of their own.

    The label of a score is a path, then others such as a position. `names` has the name that represents all names of a
    value, for each of these; it comes first in its rank.

    Example:
        >>> labels = [("a.output",), ("b.input",), ("b.output",)]
        >>> ranked(np.array([1.0, 1.0, -2.0]), labels, dict.fromkeys(["a.output", "b.input"], "a.output"))
        [[2], [0, 1]]
    """
    # Scores that are equal up to rounding keep their order, whatever the last digits on a machine are.
    order = sorted(
        np.flatnonzero(np.isfinite(scores)).tolist(), key=lambda number: -float(f"{abs(scores[number]):.6g}")
    )
    ranks: list[list[int]] = []
    known: dict[tuple[Any, ...], list[list[int]]] = {}
    for number in order:
        path, *more = labels[number]
        same = known.setdefault((names.get(path, path), *more), [])
        rank = next((rank for rank in same if math.isclose(scores[rank[0]], scores[number], rel_tol=_CLOSE)), None)
        if rank is None:
            rank = []
            ranks.append(rank)
            same.append(rank)
        rank.insert(0 if path == names.get(path) else len(rank), number)
    return ranks
