"""Whether rows ever meet: a test that a model passes once, for inputs and patches of a kind."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.execution.frame_effects import leaves_of
from graphpatch_notebook.execution.frame_results import FramesSeen, Replay, tensors_in
from graphpatch_notebook.experiments.cells import PatchMap
from graphpatch_notebook.experiments.inputs import Inputs
from graphpatch_notebook.experiments.row_work import RowWork
from graphpatch_notebook.experiments.rows import RowsError, RowsPatch, is_close, repeated, repeated_inputs, taken
from graphpatch_notebook.experiments.survey import Survey
from graphpatch_notebook.patchable_graph import PatchableGraph

_WILD = 6
"""One far below, and five far above: more than half, so that a median moves, too."""


def key_of_test(survey: Survey, rows: RowWork, *others: Hashable) -> Hashable:
    """Returns what tells a test of a graph: one that was passed is passed for patches in the same places, too.

    Args:
        survey: What a run without patches told.
        rows: How interventions share a forward.
        others: What else it is done with.
    """
    return ("test of rows", survey.kind, frozenset(rows.of_paths), rows.is_assumed, others)


def assure_rows_never_meet(pg: PatchableGraph, inputs: Inputs, survey: Survey, rows: RowWork) -> None:
    """Runs one intervention without patches beside some that have wild values wherever cells of the sweep have patches.

    Raises:
        RowsError: The one without patches is not what the model returns without patches.
    """
    if rows.never_meet:
        return
    known, test = survey.known, key_of_test(survey, rows)
    if test in known:
        rows.never_meet = True
        return
    patches: PatchMap = {path: RowsPatch([[]], place, wild=_WILD) for path, place in rows.of_paths.items()}
    frames = survey.tree.replayable(survey.came_up(list(rows.of_paths)), rows.layouts)
    values = {frame: repeated(frame.value, rows.layouts[frame], 1 + _WILD) for frame in frames}
    many = repeated_inputs(inputs.fresh(), rows.inputs, 1 + _WILD)
    with torch.no_grad(), FramesSeen(pg._module, Replay(survey.tree, values)), pg.patch(patches).quiet():
        output = pg(*many.args, **many.kwargs)
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


def _floats(output: Any) -> Sequence[Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
