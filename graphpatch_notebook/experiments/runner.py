"""Runs the cells of a sweep on one `PatchableGraph`, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphpatch_notebook.experiments.cells import Cell, CellResult, PatchMap
from graphpatch_notebook.experiments.inputs import Inputs
from graphpatch_notebook.experiments.measurements import Measurement, measurement
from graphpatch_notebook.patchable_graph import PatchableGraph


class CellRunner:
    """What runs cells: made once for a sweep in each process that takes part.

    Args:
        pg: The graph.
        inputs: What the model runs on.
        metric: From the output of the model to numbers.
        paths: All paths that cells patch.
        batch: `"auto"`, the number of cells in one forward, or `None` for one after the other.
        backward: Whether gradients of the metric are accumulated.

    Attributes:
        baseline: What the metric gives without patches.
        remarks: What is to be known of how the cells are run, in words.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        inputs: Inputs,
        metric: Callable[[Any], Any],
        paths: Sequence[str],
        *,
        batch: int | str | None = "auto",
        backward: bool = False,
    ) -> None:
        self._pg = pg
        self._inputs = inputs
        self._metric = metric
        self._backward = backward
        self.remarks: list[str] = []
        self.baseline: Measurement = self._measure({})

    def chunks(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """Returns the cells in the portions in which they are best given to `run`, in the best order."""
        return [[cell] for cell in cells]

    def run(self, cells: Sequence[tuple[int, PatchMap]]) -> list[CellResult]:
        """Returns a result for each cell (given by number and patch map); none keeps the others from theirs."""
        results = []
        for number, patches in cells:
            try:
                results.append(CellResult(number, self._measure(patches)))
            except Exception as error:  # noqa: PERF203  # one failing cell does not lose the others
                results.append(CellResult(number, None, f"{type(error).__name__}: {error}"))
        return results

    def _measure(self, patches: PatchMap) -> Measurement:
        inputs = self._inputs.fresh()
        with torch.set_grad_enabled(self._backward), self._pg.patch(patches):
            value = self._metric(self._pg(*inputs.args, **inputs.kwargs))
            if self._backward and patches:
                value.backward()
        return measurement(value)
