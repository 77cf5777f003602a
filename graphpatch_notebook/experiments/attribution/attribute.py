"""Attribution: how much each value of a model matters for the difference between two runs, by gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.experiments.attribution.gradient_runs import AttributionRuns, Found, Kept
from graphpatch_notebook.experiments.attribution.ranking import names_in, ranked, same_values
from graphpatch_notebook.experiments.attribution.scored_nodes import PositionAxis, ScoredNode, selected_nodes
from graphpatch_notebook.experiments.engine.inputs import Inputs, inputs_of
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.methods.arguments import (
    check_graph,
    check_inputs,
    check_metric,
    check_same_shapes,
    check_unsharded,
)
from graphpatch_notebook.experiments.methods.causal_tracing import Noise
from graphpatch_notebook.experiments.methods.heads import head_places
from graphpatch_notebook.experiments.methods.positions import PositionDim, Positions, by_problem, check_problems
from graphpatch_notebook.experiments.results.arrays import metric_name
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.values import TensorSpec, readable_children
from graphpatch_notebook.warning_places import level_of_caller, warn

if TYPE_CHECKING:
    from pandas import Series
    from xarray import DataArray

METHODS = ("attribution", "integrated")


def attribute(
    pg: PatchableGraph,
    metric: Callable[[Any], Any],
    clean: Any,
    corrupted: Any,
    *,
    method: Literal["attribution", "integrated"] = "attribution",
    steps: int = 8,
    paths: Iterable[str | NodePath] | None = None,
    positions: Positions = None,
    position_dim: int | Mapping[str, int] | None = None,
    heads: int | None = None,
    max_bytes: int = 2**30,
) -> DataArray:
    """Returns a score for every node at once: an estimate of what putting its clean value into the corrupted run does.

    The score of a node is the sum, over all entries of its value, of (clean value - corrupted value) times the gradient
    of the metric by the value in the corrupted run. For a metric that is linear in the value this *is*
    `metric(corrupted run with the clean value) - metric(corrupted run)`; otherwise it is the first-order estimate of
    it. All scores together take one run on the clean inputs, and one with its backward on the corrupted ones.

    A tensor that several nodes hold (the residual stream is an input of many modules) has a score for each of these
    names: what becomes of it under that name only, as a patch there would change it. A value that the model detaches,
    counts or sorts is cut off from the metric by that, for gradients; for patches it is not.

    The model is left as it was: no parameter gets a gradient (none needs `requires_grad`), and buffers and the state of
    the random generators are put back after each run, so that both draw the same dropout. Patches that are active
    belong to both runs.

    Args:
        pg: The graph.
        metric: From the whole output of the model to a tensor with a single number that has a gradient.
        clean: The clean inputs: a tuple of arguments, a dict of keyword arguments, or one value.
        corrupted: The corrupted inputs, likewise.
        method: `"attribution"`, or `"integrated"`: the mean of the gradients at `steps` points on the way from the
            corrupted to the clean run, where the values at which the runs begin to differ (the embeddings, say) are
            interpolated: truer where the metric bends, and as much dearer.
        steps: At how many points.
        paths: The nodes to score; all that hold floating-point tensors by default.
        positions: Give scores by position in the sequence: `True` for all of them; or which: a number, several or a
            slice, negative ones counted from the end. Where `paths` are given, each of them must have positions;
            otherwise an `ExperimentWarning` says which values have none.
        position_dim: Which dimension of a value runs along the sequence, where several could, or where the model takes
            no tokens: one number for all, or a dict by path.
        heads: Give a score to each of so many heads; `paths` are then values in which heads are apart
            (`h_0.attn.c_proj.x`, the input of the output projection), as for `ablate`.
        max_bytes: How much memory the kept values and their gradients may take; where they take more, the nodes are
            done in several groups, each with runs of its own, which changes no score.

    Returns:
        An array of dims `("path",)`, and `"head"` and `"position"` where asked for. NaN stands for a node without a
        score: the attribute `skipped` says why, by path. Further attributes: `clean` and `corrupted`, what the metric
        gives for the runs; `method`; `steps`; `roots`, the nodes at which the runs begin to differ; `same_values`, for
        names of one value the one that stands for all; `remarks`. Parameters score 0: they are the same in both runs.

    Raises:
        UnknownPathError: There is no such path; nothing ran.
        ExperimentError: The metric gives no single number, or none with a gradient; positions are not known, or out of
            range; or the inputs differ in shape.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.ones(1, 2))
        >>> scores = attribute(pg, torch.sum, torch.ones(1, 2), torch.zeros(1, 2))
        >>> abs(scores.sel(path="output").item() - (scores.clean - scores.corrupted)) < 1e-6
        True

        The nodes that matter most, and the colours of the tree:

        >>> table = top_scores(scores, 3)  # or scores.to_series().sort_values()
        >>> pg.browse().set_scores(scores)

    Source:
        Nanda, Attribution patching (2023); Syed et al., Attribution patching outperforms automated circuit discovery
        (2023). Integrated: Sundararajan et al., Axiomatic attribution for deep networks (2017); Hanna et al., Have
        faith in faithfulness (2024).
    """
    check_graph(pg)
    check_unsharded(pg, "attribute")
    check_metric(metric)
    fractions = _fractions(method, steps)
    given = (inputs_of(clean), inputs_of(corrupted))
    if isinstance(corrupted, (Noise, type)):
        raise ExperimentError(f"corrupted is {corrupted!r}; give inputs as for clean (noise is for causal_trace)")
    for inputs in given:
        check_inputs(pg, inputs)
    tensors = [_tensors(pg.nodes.root, inputs) for inputs in given]
    check_same_shapes(tensors[0], tensors[1], ("clean", "corrupted"))
    selected = selected_nodes(pg.nodes, paths)
    wanted = [node for node in selected.nodes if node.is_wanted]
    axis = None if positions is None else PositionAxis(pg.nodes.root, wanted, given[1], positions, position_dim)
    if axis is not None and paths is not None:
        check_problems(axis.problems)
    kept = {path: Kept(dim) for path, dim in (axis.dims if axis is not None else {}).items()}
    if heads is not None:
        kept = _with_heads(pg, wanted, paths, heads, position_dim, kept)
    xarray = extra("xarray", "an array of scores")  # before anything runs
    found = AttributionRuns(pg, metric, *given, selected.nodes, kept, fractions, _bytes(max_bytes)).run()
    found.problems |= selected.skipped
    result = _data_array(xarray, selected.paths, found, axis, heads, metric)
    result.attrs |= {"method": method, **({"steps": steps} if method == "integrated" else {})}
    result.attrs["same_values"] = same_values(pg, wanted)
    _tell(result)
    if axis is not None:
        weights = {node.path for node in wanted if node.is_state}
        _tell_of_no_positions({path: why for path, why in axis.problems.items() if path not in weights})
    return result


def top_scores(result: DataArray, count: int = 10, *, distinct: bool = True) -> Series[float]:
    """Returns the scores that are largest in magnitude, largest first, as a pandas Series by path (and position).

    A value has several names: what a module returns is what the next one is given, and views of it follow. With one
    score they take one place, under the name of what a module returns, if that is among them. Where a name stands for
    only a part of the value's uses (what a norm is given of the residual stream), its score is another, and so is its
    place. The names of one value are those that `attribute` found in the graph, in the attribute `same_values`.

    Args:
        result: What `attribute` gave, or any other `DataArray` of numbers.
        count: How many.
        distinct: Whether names of one value take one place.

    Returns:
        The scores. The `attrs` of the Series have, by path, the other names that were left out: `other_names`.

    Raises:
        ExperimentError: The result is no `DataArray`.

    Example:
        >>> import xarray
        >>> scores = xarray.DataArray([0.5, -2.0, 1.0], {"path": ["up.output", "relu", "down.output"]}, ["path"])
        >>> top_scores(scores, 2).to_dict()
        {'relu': -2.0, 'down.output': 1.0}
    """
    if not hasattr(result, "to_series"):
        raise ExperimentError(f"a result is an xarray.DataArray, as attribute(...) gives, not {type(result).__name__}")
    series = result.to_series()
    labels = [label if isinstance(label, tuple) else (label,) for label in series.index]
    names: Mapping[str, str] = {}
    if "path" in result.dims:
        at = result.dims.index("path")
        labels = [(label[at], *label[:at], *label[at + 1 :]) for label in labels]
        names = names_in(result.attrs) if distinct else {}
    ranks = ranked(series.to_numpy(), labels, names)[:count]
    top: Series[float] = series.iloc[[rank.number for rank in ranks]]
    top.attrs["other_names"] = {
        labels[rank.number][0]: sorted({labels[other][0] for other in rank.others}) for rank in ranks if rank.others
    }
    return top


def _tensors(root: Frame, inputs: Inputs) -> dict[str, Tensor]:
    """Returns the tensors that `forward` is given, by the names of its parameters and by what leads into these."""
    found: dict[str, Tensor] = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, (list, tuple, dict)):
            for key, child in readable_children(value) or ():
                collect(f"{name}|{key}", child)

    for parameter in root.parameters:
        collect(parameter.name, given_input(root.parameters, parameter.name, inputs.args, inputs.kwargs))
    return found


def _fractions(method: str, steps: int) -> list[float]:
    if method not in METHODS:
        raise ExperimentError(f"method must be one of {', '.join(map(repr, METHODS))}, not {method!r}")
    if method == "attribution":
        return [0.0]
    if type(steps) is not int or steps < 1:
        raise ExperimentError(f"steps must be a whole number from 1 on, not {steps!r}")
    # The middles of equal parts: the error falls with the square of their number.
    return [(step + 0.5) / steps for step in range(steps)]


def _bytes(max_bytes: Any) -> int:
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, (int, float)) or not max_bytes > 0:
        raise ExperimentError(f"max_bytes must be a number of bytes, such as 2**30, not {max_bytes!r}")
    return int(min(max_bytes, 2**62))


def _with_heads(
    pg: PatchableGraph,
    nodes: Iterable[ScoredNode],
    paths: Any,
    count: int,
    position_dim: PositionDim,
    kept: Mapping[str, Kept],
) -> dict[str, Kept]:
    """Returns the dimensions of the positions in values, and of the heads."""
    if paths is None:
        raise ExperimentError("heads= needs values in which heads are apart: paths=['h_0.attn.c_proj.x', ...]")
    given = (node.spec.shape for node in pg.nodes.root.inputs() if isinstance(node.spec, TensorSpec))
    rows = next((shape[0] for shape in given if shape), None)
    shapes = {node.path: tuple(node.spec.shape) for node in nodes}
    places = head_places(pg, shapes, count, rows, position_dim)
    return {path: replace(kept.get(path, Kept()), heads=dim, count=count) for path, dim in places.dims.items()}


def _data_array(
    xarray: Any,
    paths: list[str],
    found: Found,
    axis: PositionAxis | None,
    heads: int | None,
    metric: Callable[[Any], Any],
) -> DataArray:
    coords: dict[str, Any] = {"path": paths}
    if heads is not None:
        coords["head"] = list(range(heads))
    if axis is not None:
        coords["position"] = axis.positions
    data = np.full([len(values) for values in coords.values()], math.nan)
    for number, path in enumerate(paths):
        if path not in found.scores:
            continue
        scores = found.scores[path]
        for head in range(heads or 1):  # the score of a value that does not differ has no dimension
            part = scores[head] if heads is not None and scores.ndim else scores
            where = (number, head) if heads is not None else (number,)
            data[where] = part if axis is None else axis.row(path, part)
    if axis is not None:
        found.problems = {**axis.problems, **found.problems}
    skipped = {path: found.problems[path] for path in (*paths, *found.problems) if path in found.problems}
    attrs = {
        "clean": found.clean,
        "corrupted": found.corrupted,
        "metric": metric_name(metric),
        "skipped": skipped,
        "roots": found.roots,
        "remarks": found.remarks,
    }
    result: DataArray = xarray.DataArray(data, coords, list(coords), name="score", attrs=attrs)
    return result


def _tell_of_no_positions(problems: Mapping[str, str]) -> None:
    if problems:
        warn(
            f"{len(problems)} values have no scores by position (NaN). The most common reasons, of those in the "
            "attribute 'skipped':\n  " + "\n  ".join(by_problem(problems)[:3]),
            ExperimentWarning,
            stacklevel=level_of_caller(),
        )


def _tell(result: DataArray) -> None:
    infinite = [path for path, why in result.attrs["skipped"].items() if "not finite" in why]
    if infinite:
        shown = ", ".join(map(repr, infinite[:3])) + (", ..." if len(infinite) > 3 else "")
        ends = {name: result.attrs[name] for name in ("clean", "corrupted")}
        why = "half-precision gradients overflow: try a smaller metric, or the model in bfloat16 or float32"
        if not all(map(math.isfinite, ends.values())):
            why = " and ".join(f"{end} in the {name} run" for name, end in ends.items())
            why = f"the metric itself is {why}, as it may be where half precision overflows"
        warn(
            f"{len(infinite)} scores are not finite and left out (NaN): {shown}; {why}",
            ExperimentWarning,
            stacklevel=level_of_caller(),
        )
