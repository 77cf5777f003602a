"""Whether cells have the numbers in rows that they have alone: a test that a sweep passes for one of its cells."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from graphpatch_notebook.execution.frame_results import own_tensors
from graphpatch_notebook.execution.plan import Entry
from graphpatch_notebook.experiments.cells import PatchMap
from graphpatch_notebook.experiments.common_work import CommonWork
from graphpatch_notebook.experiments.measurements import Measurement, measurement
from graphpatch_notebook.experiments.row_test import key_of_test
from graphpatch_notebook.experiments.rows import RowsError
from graphpatch_notebook.experiments.trimming import watched_metric
from graphpatch_notebook.patchable_graph import PatchableGraph


class DifferenceError(RowsError):
    """A cell has other numbers in rows than alone (caught inside the package)."""


def assure_same_alone(
    pg: PatchableGraph,
    common: CommonWork,
    metric: Callable[[Any], Any],
    cells: Sequence[tuple[Measurement, PatchMap]],
    entries: Iterable[Entry],
) -> bool:
    """Compares the cell that patches change most with what a plain loop gives; an earlier sweep may have done that.

    Args:
        pg: The graph.
        common: What all cells of the sweep have in common.
        metric: From the output of the model to numbers.
        cells: What the metric gave for cells in rows, with the patches of each.
        entries: All patches of these.

    Returns:
        Whether that was to be told: not where no patch had an effect.

    Raises:
        DifferenceError: They differ.
    """
    if not cells:
        return False
    assert common.survey is not None
    output = own_tensors(common.survey.output)
    again = measurement(watched_metric(metric, output) if common.keeps_last_logits else metric(output))
    if again.distance(common.baseline) > 0:
        raise DifferenceError("the metric looks at something else than the output, which other cells have changed")
    passed, test = _passed(common.survey.known, metric), _test(common, entries)
    if test in passed:
        return True
    values, patches = max(cells, key=lambda cell: cell[0].distance(common.baseline))
    inputs = common.full_inputs.fresh()
    with pg.patch(patches).quiet():
        alone = measurement(metric(pg(*inputs.args, **inputs.kwargs)))
    if not alone.is_close(values):
        raise DifferenceError("in one forward with others, a cell has other numbers than alone")
    has_effect = values.distance(common.baseline) > 0
    if has_effect:
        passed.add(test)
    return has_effect


def _passed(known: dict[Hashable, Any], metric: Callable[[Any], Any]) -> set[Hashable]:
    """Returns the tests that were passed with this very metric, to be added to."""
    by_metric: WeakKeyDictionary[Any, set[Hashable]]
    by_metric = known.setdefault("same alone", WeakKeyDictionary())
    try:
        return by_metric.setdefault(metric, set())
    except TypeError:  # it has no hash, or nobody can tell when it is gone
        return set()


def _test(common: CommonWork, entries: Iterable[Entry]) -> Hashable:
    assert common.rows is not None
    assert common.survey is not None
    return key_of_test(
        common.survey, common.rows, frozenset(type(patch) for entry in entries for patch in entry.patches)
    )
