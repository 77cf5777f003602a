"""Makes the patch maps of a sweep, and finds the cells that may share work: those with pure patch maps.

A pure patch map has the same effect each time it is applied: each patch is of a kind that declares `is_pure`
(`ZeroPatch`, `AddPatch`, `ReplacePatch`), and holds only plain data and tensors. Such cells share forwards and use
recorded results, unless making their patch maps changes values that the metric refers to, or draws random numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.checks.equality import difference
from graphpatch_notebook.checks.model_state import Change, ModuleState, SharedRandomState
from graphpatch_notebook.errors import ExperimentError, PatchMapError, UnknownPathError
from graphpatch_notebook.execution import Entry
from graphpatch_notebook.experiments.engine.cells import Cell, Cells, patches_in
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import Measurement
from graphpatch_notebook.experiments.engine.side_effects import Drawing, ReferredValues, change_by
from graphpatch_notebook.experiments.engine.sweep_setup import SweepRequest, why_plain
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch, declares

# -- pure patch maps ---------------------------------------------------------------------------------------------------

_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_PLAIN = frozenset({bool, int, float, complex, str, type(None), type(Ellipsis), range})
_SEVERAL = frozenset({list, tuple, set, frozenset})
_FEW_BYTES = 4096


class ImpureError(Exception):
    """A patch map is not pure, for the given reason (caught inside the package)."""


class PurePatches(dict[Any, Any]):
    """A pure patch map, as a private copy."""


class PrivateCopies:
    """Copies patch maps, so that later changes of their patches, tensors and lists have no effect.

    A large tensor that several cells share is copied once, unless its contents change.

    Args:
        keeps_gradients: Whether to keep tensors that require gradients, rather than copies, so that they receive them.
    """

    def __init__(self, *, keeps_gradients: bool = False) -> None:
        self._keeps_gradients = keeps_gradients
        self._large: dict[Hashable, Tensor] = {}
        self._given: list[tuple[Tensor, Tensor]] = []

    def of(self, patch_map: Any) -> PurePatches:
        """Returns a copy of a patch map.

        Raises:
            ImpureError: It is not pure.

        Example:
            >>> from graphpatch_notebook import AddPatch
            >>> value = torch.ones(2)
            >>> copy = PrivateCopies().of({"output": AddPatch(value=value)})
            >>> _ = value.zero_()
            >>> copy["output"].value
            tensor([1., 1.])
        """
        if type(patch_map) is not dict:
            raise ImpureError(f"a patch map is a {type(patch_map).__name__}, not a dict")
        copied = PurePatches()
        for path, given in patch_map.items():
            is_one = type(given) not in (list, tuple)
            copied[str(path)] = self._patch(given) if is_one else [self._patch(patch) for patch in given]
        return copied

    def _patch(self, patch: Any) -> Patch[Any]:
        kind = type(patch)
        if not declares(patch, "is_pure"):
            raise ImpureError(f"a {kind.__name__} may behave differently each time")
        if not kind.__dataclass_fields__.keys() >= patch.__dict__.keys():
            raise ImpureError(f"a {kind.__name__} has an attribute of its own")
        copied: Patch[Any] = object.__new__(kind)
        held = copied.__dict__
        for name, value in patch.__dict__.items():
            held[name] = value if type(value) in _PLAIN else self._value(value)
        return copied

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in _TENSORS and value.layout is torch.strided:
            return self._tensor(value)
        if kind in _SEVERAL:
            return kind(map(self._value, value))
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return value if _PLAIN.issuperset(map(type, parts)) else slice(*map(self._value, parts))
        if isinstance(value, np.generic):
            return value
        if kind is np.ndarray and value.dtype != object:
            return value.copy()
        raise ImpureError(f"a patch holds an object of type {kind.__name__}")

    def _tensor(self, tensor: Tensor) -> Tensor:
        given = tensor.detach() if tensor.requires_grad else tensor
        clone = given.clone()
        if clone.is_inference():  # of such a tensor, torch does not count the writes
            with torch.inference_mode(False):
                clone = given.clone()
        if self._keeps_gradients and tensor.requires_grad:
            self._given.append((tensor, clone))
            return tensor
        if clone.nbytes <= _FEW_BYTES:
            return clone
        # The address is only a key: a copy is shared if the contents are equal now.
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        known = self._large.setdefault(key, clone)
        if known is not clone and difference(known, clone, "") is not None:
            known = self._large[key] = clone
        return known

    def check_given(self) -> None:
        """Checks that tensors that were kept for their gradients have not changed.

        Raises:
            ExperimentError: A tensor has changed.
        """
        for tensor, clone in self._given:
            if difference(tensor.detach(), clone, "") is not None:
                raise ExperimentError(
                    f"make_patches writes into a value of shape {tuple(tensor.shape)} that has gradients and belongs "
                    "to a cell that has not run yet; give each cell a tensor of its own: value.clone()"
                )


def is_pure(patch_map: Any) -> bool:
    """Whether a patch map is pure: it has the same effect each time it is applied.

    Example:
        >>> from graphpatch_notebook import ZeroPatch
        >>> is_pure({"output": ZeroPatch(slice=0)}), is_pure({"output": object()})
        (True, False)
    """
    if isinstance(patch_map, PurePatches):
        return True
    try:
        PrivateCopies().of(patch_map)
    except ImpureError:
        return False
    return True


# -- the cells that may share work -------------------------------------------------------------------------------------

_MOST_SHOWN = 10
_ALL_FIRST = (
    "with checkpoint= or executor= all patch maps are made before any cell runs: leave these out, or write the loop: "
    "with pg.patch(make_patches(...)): ..."
)


@dataclass(frozen=True)
class MadeCells:
    """The cells of a sweep whose patch maps are made, and which of them may share work.

    Attributes:
        made: The cells whose patch maps are made, in order.
        later: The numbers of the cells whose patch maps are made just before they run.
        why: Why some cells do not share work, as a message; `None` if all may.
        entries: The entries of the cells in `made`, by number.
        look: A look at the model, in which nothing has changed since; `None` if something has, or prevents sharing.
        baseline: The metric without patches, if it is known.
        draws: Whether making them has drawn from the shared random generators.
    """

    made: Sequence[Cell]
    later: range
    why: str | None
    entries: Mapping[int, list[Entry]]
    look: ModuleState | None
    baseline: Measurement | None = None
    draws: bool = False

    @functools.cached_property
    def shared(self) -> list[Cell]:
        """Pure cells, with private copies of their patch maps. They may run in any order, and together."""
        return [cell for cell in self.made if isinstance(cell.patches, PurePatches)]

    @functools.cached_property
    def alone(self) -> list[Cell]:
        """The other cells in `made`. Each runs as in a plain loop, after the pure ones."""
        return [cell for cell in self.made if not isinstance(cell.patches, PurePatches)]

    @property
    def paths(self) -> list[str]:
        """All paths that pure cells patch."""
        return list(dict.fromkeys(str(path) for cell in self.shared for path in cell.patches))

    @property
    def remarks(self) -> list[str]:
        """Messages about the cells that do not share work."""
        count = len(self.alone) + len(self.later)
        total = len(self.shared) + count
        return [f"{count:,} of {total:,} cells ran one by one, each in full: {self.why}"] if count else []


class _Watched:
    """Values that making patch maps must not change: a change may be undone before the end.

    Args:
        values: The values.
        making: What makes the patch maps refers to; if it does not refer to the values, no look is needed.

    Attributes:
        before: What they refer to.
        may_change: Whether a change is possible.
        is_same: Whether no change was seen.
    """

    def __init__(self, values: tuple[Any, ...], making: ReferredValues) -> None:
        self._values = values
        self.before = ReferredValues(*values)
        self.may_change, self.is_same = making.may_meet(self.before), True
        if self.may_change:
            self._small = ReferredValues(*values, most_bytes=_FEW_BYTES)

    def look(self, *, is_full: bool) -> None:
        """Looks for changes, those in large tensors too or not."""
        if self.may_change and self.is_same:
            before, most_bytes = (self.before, math.inf) if is_full else (self._small, _FEW_BYTES)
            self.is_same = before == ReferredValues(*self._values, most_bytes=most_bytes)


class _Dependence:
    """What making patch maps depends on, and changes.

    Args:
        pg: The graph.
        cells: The cells.
        inputs: The inputs of the model.
        metric: The metric.
        backward: Whether gradients of the metric are accumulated.

    Attributes:
        why_plain: Why all cells must run as in a plain loop, as a message; `None` if they need not.
        look: A look at the model before.
        baseline: The metric without patches, if it is known.
    """

    def __init__(
        self, pg: PatchableGraph, cells: Cells, inputs: Inputs, metric: Callable[[Any], Any], *, backward: bool
    ) -> None:
        self._pg, self._inputs, self._metric, self._backward = pg, inputs, metric, backward
        self._making = ReferredValues(cells.make_patches, most_bytes=0)
        self._read = _Watched((metric,), self._making)
        self._given = _Watched((inputs.args, inputs.kwargs), self._making)
        self._random = SharedRandomState()
        self.why_plain, self.look = why_plain(pg), ModuleState(captured(pg).module)
        self.baseline: Measurement | None = None
        self._was_changed = False

    def look_at_values(self, *, is_full: bool) -> None:
        """Looks for changes of what the metric refers to, and of the inputs."""
        self._read.look(is_full=is_full)
        self._given.look(is_full=is_full)

    def why_in_order(self, *, is_all: bool) -> str | None:
        """Returns why each cell must be made just before it runs, as a message, after the first one is made."""
        if not self._read.is_same:
            return f"the metric refers to {self._read.before.unreadable or 'what make_patches changes'}"
        may_depend = self._read.may_change or self._making.may_read(self.look)
        # A model in training mode may draw random numbers, and patch maps of later cells, too.
        if not (may_depend or self.draws or any(one.training for one in self.look.root.modules())):
            return None
        change = self._change_by_run()
        is_random = isinstance(change, Drawing)
        if (may_depend and change is not None) or (is_random and self.draws):
            return f"make_patches may depend on what runs change: {change}"
        return f"{change} in training mode; to have none, call pg.eval() first" if is_random and not is_all else None

    def check(self, *, draws: bool) -> bool:
        """Returns whether the model is unchanged, after several cells are made before any of them runs.

        Args:
            draws: Whether random numbers were drawn.

        Raises:
            ExperimentError: Something else that these cells depend on has changed.
        """
        if draws and self.baseline is None:  # else it is known that they do not matter
            change = self._change_by_run()
            if isinstance(change, Drawing):
                raise ExperimentError(
                    f"make_patches draws random numbers for some cells before earlier ones run, and {change}: let it "
                    "draw from a generator of its own, or write the loop: with pg.patch(make_patches(...)): ..."
                )
        # Patches of other threads do not count as changes.
        is_changed = self._is_model_changed or why_plain(self._pg) != self.why_plain
        what = [
            *(["the model"] if is_changed else []),
            *(["what the model runs on"] if not self._given.is_same else []),
            *(["what the metric refers to"] if not self._read.is_same else []),
        ]
        if what:
            raise ExperimentError(
                f"make_patches changes {' and '.join(what)}, and is called for some cells before earlier ones run: "
                "leave that to the patches, or write the loop: with pg.patch(make_patches(...)): ..."
            )
        return not is_changed

    def check_patches(self, impure: Sequence[tuple[Cell, ReferredValues]]) -> None:
        """Checks that patches refer to what they referred to when they were made, and that no other map reads them.

        Raises:
            ExperimentError: They do not, or one may do so.
        """
        for cell, refers in impure:
            if any(self._making.may_read_probe(patch) for patch in patches_in(cell.patches)):
                what = f"reads what a probe of an earlier cell ({cell}) keeps: make one in each cell"
            elif not refers.has_same_marks(ReferredValues(cell.patches)):
                what = f"changes what the patches of an earlier cell ({cell}) refer to"
            else:
                continue
            raise ExperimentError(f"make_patches {what}; but {_ALL_FIRST}")

    @property
    def draws(self) -> bool:
        """Whether random numbers were drawn from the shared generators."""
        return any(map(self._making.may_draw, self._random.changed()))

    @property
    def _is_model_changed(self) -> bool:
        return self._was_changed or next(self.look.changes(), None) is not None

    def _change_by_run(self) -> Change | Drawing | str | None:
        self._was_changed = self._is_model_changed
        self.baseline, change = _run_without_patches(
            self._pg, self._inputs, self._metric, self._read.before, backward=self._backward
        )
        # The run may have written into tensors, also if these are put back now, or hold the same.
        self.look = ModuleState(captured(self._pg).module)
        return change


def made_cells(
    pg: PatchableGraph, cells: Cells, inputs: Inputs, metric: Callable[[Any], Any], *, is_all: bool, backward: bool
) -> MadeCells:
    """Makes patch maps, all or (if not `is_all`) up to the first impure one, and returns the cells.

    Raises:
        UnknownPathError, PatchMapError: Patch maps are invalid; one error lists all problems.
        ExperimentError: `make_patches` changes the model, its inputs, or values that the metric refers to; or patch
            maps must all be made in advance, and depend on what runs change.
    """
    count = len(cells.unmade)
    copies = PrivateCopies(keeps_gradients=backward)
    dependence = _Dependence(pg, cells, inputs, metric, backward=backward)
    reason, why = dependence.why_plain, None
    made: list[Cell] = []
    impure: list[tuple[Cell, ReferredValues]] = []
    while len(made) < count and (is_all or why is None):
        number = len(made)
        patches = cells.made(number)
        dependence.look_at_values(is_full=number in (0, count - 1))
        if number == 0 and count > 1 and (is_all or reason is None):
            why_ordered = dependence.why_in_order(is_all=is_all)
            if why_ordered is not None and is_all:
                raise ExperimentError(f"{why_ordered}; but {_ALL_FIRST}")
            reason = reason or why_ordered
        try:
            if reason is not None:
                raise ImpureError(reason)
            patches = copies.of(patches)
        except ImpureError as impurity:
            why = why or str(impurity)
        made.append(Cell(number, cells.unmade[number].labels, patches))
        if is_all and not isinstance(patches, PurePatches):
            impure.append((made[-1], ReferredValues(patches)))
    copies.check_given()
    dependence.check_patches(impure)
    draws, later = dependence.draws, range(len(made), count)
    look = dependence.look if len(made) > 1 and dependence.check(draws=draws) else None
    return MadeCells(made, later, why, _entries(pg, made), look, dependence.baseline, draws)


def why_in_order(pg: PatchableGraph, inputs: Inputs, metric: Callable[[Any], Any]) -> str | None:
    """Returns why all cells must run in order, as a message: runs without patches change what others depend on."""
    _, change = _run_without_patches(pg, inputs, metric, ReferredValues(metric), backward=False)
    return None if change is None else str(change)


def _run_without_patches(
    pg: PatchableGraph, inputs: Inputs, metric: Callable[[Any], Any], referred: ReferredValues, *, backward: bool
) -> tuple[Measurement, Change | Drawing | str | None]:
    """Runs the model and the metric; returns the metric, and what both change. Restores the state of the model."""
    request = SweepRequest(inputs, metric, (), None, backward)
    state = ModuleState(captured(pg).module)
    with torch.inference_mode(False), torch.set_grad_enabled(backward), afterwards(state.restore):
        baseline = request.baseline(pg)
        change = change_by(lambda: request.baseline(pg), captured(pg).module, state)
    return baseline, change or referred.change_by_call(metric)


def _entries(pg: PatchableGraph, cells: Sequence[Cell]) -> dict[int, list[Entry]]:
    """Returns the entries of each cell, by its number; raises one error that lists all problems of patch maps."""
    found: dict[int, list[Entry]] = {}
    failing: dict[str, list[Cell]] = {}
    kind = PatchMapError
    for cell in cells:
        try:
            found[cell.number] = captured(pg).entries_of(cell.patches)
        except PatchMapError as error:  # noqa: PERF203  # one error tells of all cells
            failing.setdefault(str(error), []).append(cell)
            kind = UnknownPathError if isinstance(error, UnknownPathError) else kind
    if failing:
        first = [f"{_first_of(those)}: {text}" for text, those in [*failing.items()][:_MOST_SHOWN]]
        count = sum(map(len, [*failing.values()][_MOST_SHOWN:]))
        raise kind("\n".join([*first, *([f"... and {count:,} more cells"] if count else [])]))
    return found


def _first_of(cells: Sequence[Cell]) -> str:
    return f"{cells[0]} and {len(cells) - 1:,} more cells" if len(cells) > 1 else str(cells[0])
