"""Whether cells have in rows the numbers that they have alone: what a model shows once, for inputs and paths of a kind.

The patches themselves are known to do the same in rows (`purity`): what is tested is the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from graphpatch_notebook.execution import frames_seen
from graphpatch_notebook.execution.replay import FrameReplay, all_modules, leaves_of, own_tensors, tensors_in
from graphpatch_notebook.experiments.engine.batch_rows import (
    RowsError,
    RowsPatch,
    is_close,
    repeated,
    repeated_inputs,
    taken,
)
from graphpatch_notebook.experiments.engine.batching import RowWork
from graphpatch_notebook.experiments.engine.cells import PatchMap
from graphpatch_notebook.experiments.engine.clean_run import Survey
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import measurement
from graphpatch_notebook.experiments.engine.shared_setup import CommonWork
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.values import readable_children

_WILD = 6
"""One far below, and five far above: more than half, so that a median moves, too."""


def _key(test: str, survey: Survey, rows: RowWork) -> Hashable:
    """Returns what the outcome of a test depends on, besides the model."""
    return (test, survey.kind, frozenset(rows.of_paths), rows.is_assumed)


def assure_rows_never_meet(pg: PatchableGraph, inputs: Inputs, survey: Survey, rows: RowWork) -> None:
    """Runs one intervention without patches beside some that have wild values wherever cells of the sweep have patches.

    Raises:
        RowsError: The one without patches is not what the model returns without patches.
    """
    if rows.never_meet:
        return
    known, test = survey.known, _key("rows never meet", survey, rows)
    if test in known:
        rows.never_meet = True
        return
    patches: PatchMap = {path: RowsPatch([[]], place, wild=_WILD) for path, place in rows.of_paths.items()}
    frames = survey.tree.replayable(survey.came_up(list(rows.of_paths)), rows.layouts)
    values = {frame: repeated(frame.value, rows.layouts[frame], 1 + _WILD) for frame in frames}
    many = repeated_inputs(inputs.fresh(), rows.inputs, 1 + _WILD)
    try:
        with (
            torch.no_grad(),
            frames_seen(FrameReplay(survey.tree, values), all_modules(captured(pg).module)),
            pg.patch(patches).quiet(),
        ):
            output = pg(*many.args, **many.kwargs)
    except (RowsError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise RowsError(f"on several rows it raises {type(error).__name__}: {error}") from None
    check_rows(output, survey, rows, 1 + _WILD)
    check_control(taken(output, rows.output, 0), survey)
    known[test] = True
    rows.never_meet = True


def check_rows(output: Any, survey: Survey, rows: RowWork, count: int) -> None:
    """Raises a `RowsError` unless the output has the rows of `count` interventions."""
    leaves = list(leaves_of(output))
    if len(leaves) != len(rows.output):
        raise RowsError("the model returned a value of another structure")
    for leaf, place, single in zip(leaves, rows.output, leaves_of(survey.output), strict=True):
        if place is None:
            if leaf is not single and leaf != single:
                raise RowsError(f"the output has {leaf!r} where it has {single!r} for one cell")
        elif place.dim is not None and leaf.shape[place.dim] != place.size * count:
            raise RowsError(f"the output has a tensor of shape {tuple(leaf.shape)} for {count} interventions")


def check_control(output: Any, survey: Survey) -> None:
    """Raises a `RowsError` unless the rows without patches are what the model returns without patches."""
    expected, found = _floats(survey.output), _floats(output)
    if not all(is_close(a, b) for a, b in zip(found, expected, strict=True)):
        raise RowsError("in one forward, patches of one cell reach the rows of another")


def assure_same_alone(
    pg: PatchableGraph,
    common: CommonWork,
    metric: Callable[[Any], Any],
    maps: Sequence[PatchMap],
    outputs: Sequence[Any],
) -> bool:
    """Compares the cell that changes the output most with what a plain loop gives; an earlier sweep may have done that.

    Where a part of the outputs is left out, as the metric does not seem to look at it, its numbers are compared, too.

    Args:
        pg: The graph.
        common: What all cells of the sweep have in common.
        metric: From the output of the model to numbers.
        maps: The patch maps of cells that shared a forward.
        outputs: What the model returned for each.

    Returns:
        Whether that was to be told: not where no patch had an effect.

    Raises:
        RowsError: They differ.
    """
    survey, rows = common.survey, common.rows
    assert survey is not None
    assert rows is not None
    passed: WeakSet[Any] = survey.known.setdefault(_key("same alone", survey, rows), WeakSet())
    with suppress(TypeError):  # the metric has no hash, or nobody can tell when it is gone
        if metric in passed:
            return True
    effects = [_distance(output, survey.output) for output in outputs]
    most = effects.index(max(effects))
    with pg.patch(maps[most]).quiet():
        alone = common.full_inputs.run(pg)
        is_same = _is_same(alone, outputs[most], is_last=common.keeps_last_logits)
        if is_same and common.inputs is not common.full_inputs:
            is_same = measurement(metric(alone)).is_close(measurement(metric(own_tensors(outputs[most]))))
    if not is_same:
        raise RowsError("in one forward with others, a cell has other numbers than alone")
    with suppress(TypeError):
        if effects[most] > 0:
            passed.add(metric)
    return effects[most] > 0


def _distance(output: Any, reference: Any) -> float:
    pairs = zip(_floats(output), _floats(reference), strict=True)
    return sum((a - b).abs().nan_to_num(0, 0, 0).sum().item() for a, b in pairs)


def _is_same(whole: Any, part: Any, *, is_last: bool) -> bool:
    """Whether an output is another one, or what is left of it where nobody looks at the rest."""
    if isinstance(part, Tensor):
        if not isinstance(whole, Tensor):
            return False
        return is_close(part, whole[:, -1:] if is_last and whole.shape != part.shape else whole)
    inside = readable_children(part)
    if inside is None:
        return bool(part == whole)
    among = dict(readable_children(whole) or ())
    return all(key in among and _is_same(among[key], child, is_last=is_last) for key, child in inside)


def _floats(output: Any) -> Sequence[Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
