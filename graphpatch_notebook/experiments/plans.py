"""Which cells of a sweep share work, and which run as in a plain loop: decided once, before any of them runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.checks.model_state import SharedRandomState
from graphpatch_notebook.errors import ExperimentError, PatchMapError, UnknownPathError
from graphpatch_notebook.execution.patch_map import entries_of
from graphpatch_notebook.experiments.cells import Cell, Cells
from graphpatch_notebook.experiments.common_work import why_plain
from graphpatch_notebook.experiments.earlier_sweeps import shown_earlier
from graphpatch_notebook.experiments.function_values import ReferredValues
from graphpatch_notebook.experiments.inputs import Inputs
from graphpatch_notebook.experiments.kept_state import KeptState, drawn_between
from graphpatch_notebook.experiments.purity import ImpureError, PrivateCopies
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.resolution import Target

_MOST_SHOWN = 10


@dataclass(frozen=True)
class Plan:
    """How the cells of a sweep are run.

    Attributes:
        shared: Pure cells, with private copies of their patch maps: in which order they run, and how, does not matter.
        alone: Others that are made already. Each runs as in a plain loop, after the pure ones.
        later: The numbers of those that are made just before they run, one after the other, likewise.
        why: Why cells do not share work, in words; `None` where all may.
    """

    shared: Sequence[Cell]
    alone: Sequence[Cell]
    later: range
    why: str | None

    @property
    def made(self) -> list[Cell]:
        """The cells that are made already, in order."""
        return sorted([*self.shared, *self.alone], key=lambda cell: cell.number)

    @property
    def paths(self) -> list[str]:
        """All paths that pure cells patch."""
        return list(dict.fromkeys(str(path) for cell in self.shared for path in cell.patches))

    def remark(self, count: int) -> list[str]:
        """Returns what is to be known of the cells that do not share work; `count` is how many there are in all."""
        number = len(self.alone) + len(self.later)
        return [f"{number:,} of {count:,} cells ran one by one, each as a whole: {self.why}"] if number else []


def planned(
    pg: PatchableGraph, cells: Cells, inputs: Inputs, metric: Callable[[Any], Any], *, is_all: bool, backward: bool
) -> Plan:
    """Makes pure cells, up to the first that is not (if not `is_all`), and returns how all are run.

    Raises:
        UnknownPathError, PatchMapError: Patch maps that are made are refused: one error with all that is wrong.
        ExperimentError: `make_patches` changes what runs look at besides patches, but not from the first cell on.
    """
    count = len(cells.unmade)
    copies = PrivateCopies(keeps_gradients=backward)
    surroundings = _Surroundings(pg, inputs, metric)
    reason, why = why_plain(pg), None
    shared: list[Cell] = []
    alone: list[Cell] = []
    while len(shared) + len(alone) < count and (is_all or not alone):
        cell = cells.made(len(shared) + len(alone))
        if cell.number == 0 and not is_all:
            reason = reason or surroundings.change()
        try:
            if reason is not None:
                raise ImpureError(reason)
            shared.append(replace(cell, patches=copies.of(cell.patches)))
        except ImpureError as impurity:
            alone.append(cell)
            why = why or str(impurity)
    plan = Plan(shared, alone, range(len(shared) + len(alone), count), why)
    if shared and surroundings.has_changed():
        raise ExperimentError(
            "make_patches changes the model, its inputs, or what the metric refers to, for a cell that is made before "
            "earlier ones run: leave that to a CustomPatch, or write the loop: with pg.patch(make_patches(...))"
        )
    copies.check_given()
    _check(pg, plan.made)
    return plan


class _Surroundings:
    """What runs of the model and calls of the metric look at besides patches, at one moment."""

    def __init__(self, pg: PatchableGraph, inputs: Inputs, metric: Callable[[Any], Any]) -> None:
        self._pg, self._inputs, self._metric = pg, inputs, metric
        self._model = shown_earlier(pg)
        self._referred = self._referred_now()
        self._random = SharedRandomState()

    def _referred_now(self) -> ReferredValues:
        return ReferredValues(self._metric, self._inputs.args, self._inputs.kwargs)

    def has_changed(self) -> bool:
        """Whether something else is there now than at that moment."""
        return shown_earlier(self._pg) is not self._model or self._referred != self._referred_now()

    def change(self) -> str | None:
        """Returns what of it `make_patches` has changed since, in words, random numbers that the model draws too."""
        if self.has_changed():
            return "make_patches changes the model, its inputs, or what the metric refers to"
        if self._random.differing(SharedRandomState()) and self._draws():
            return "make_patches and the model draw random numbers in turn"
        return None

    def _draws(self) -> bool:
        before = SharedRandomState()
        with afterwards(KeptState(self._pg._module).restore), torch.no_grad():
            self._inputs.run(self._pg)
            after = SharedRandomState()
            return bool(drawn_between(before, after, self._pg._module, lambda: self._inputs.run(self._pg)))


def _check(pg: PatchableGraph, cells: Sequence[Cell]) -> None:
    """Raises one error with all that is wrong with the patch maps of some cells."""
    targets = pg._current().targets
    errors = [(cell, error) for cell in cells if (error := _refusal(pg._root_frame, cell, targets)) is not None]
    if errors:
        kind = UnknownPathError if any(isinstance(error, UnknownPathError) for _, error in errors) else PatchMapError
        first = [f"{cell}: {error}" for cell, error in errors[:_MOST_SHOWN]]
        more = [f"... and {len(errors) - _MOST_SHOWN} more cells"] if len(errors) > _MOST_SHOWN else []
        raise kind("\n".join([*first, *more]))


def _refusal(root: Frame, cell: Cell, targets: dict[str, Target]) -> PatchMapError | None:
    try:
        entries_of(root, cell.patches, targets)
    except PatchMapError as error:
        return error
    return None
