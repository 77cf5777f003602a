"""The variables of a `%%graphpatch` cell: what its probes and records put there, and what is said at the end of it.

begin        what an earlier run left is put aside
each call    what is new goes into the variables
end          a value that was written into since is no result: its variable is removed, with an error
             a graph that was not called, a variable that no call filled: one line each
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphpatch_notebook.errors import PatchValueError, add_note
from graphpatch_notebook.execution import innermost
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, ChosenPatches, names_used
from graphpatch_notebook.notebook.session.session import ResolvedPatches
from graphpatch_notebook.notebook.session.workspace import ActiveGraph, Workspace
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.patches.kinds import Patch, RecordPatch
from graphpatch_notebook.torch_compat import version_of


class CellResults:
    """Fills the variables of one run of a cell.

    Args:
        workspace: The user's variables.
        active: The graph.
        chosen: The patches of the cell.
        resolved: The same, with their values.
    """

    def __init__(
        self, workspace: Workspace, active: ActiveGraph, chosen: ChosenPatches, resolved: ResolvedPatches
    ) -> None:
        self._results = workspace.results
        self._namespace = workspace.namespace
        self._active = active
        self._patches = chosen.enabled
        # The variables in slices mean what they meant when the cell began, as those of all other patches do.
        names = {name for one, _ in resolved.observing if one.index for name in one.index.names}
        in_slices = {name: self._namespace[name] for name in names}
        self._observed = [_Observed(one, patch, in_slices) for one, patch in resolved.observing]
        fixed = [one for one in self._patches if not one.is_function or str(one.value).isidentifier()]
        own = {one.name for one in self._observed}
        used = {name for name in names_used(fixed) if name in self._namespace and name not in own}
        self._used = {name: self._namespace[name] for name in sorted(used)}
        self._aside: dict[str, Any] = {}
        self._is_told = False
        self._lock = threading.Lock()

    def put_aside(self) -> None:
        """Removes what an earlier run left, except for what values and slices of the patches use."""
        used = names_used(self._patches)
        own = [o.name for o in self._observed if o.name not in used and self._results.is_own(o.name)]
        self._aside = {name: self._namespace[name] for name in own}
        self._results.remove(own)

    def put(self) -> None:
        """Fills the variables after a call of the graph.

        Raises:
            PatchValueError: There is no such part of a value as a slice says; all other variables are filled.
        """
        __tracebackhide__ = True
        with self._lock:
            self._is_told = True
            self._aside.clear()
            problems = [problem for one in self._observed if (problem := self._put(one))]
        if problems:
            raise PatchValueError("; ".join(problems))

    def _put(self, one: _Observed) -> str | None:
        """Fills one variable; returns what is wrong with its slice."""
        problem = one.take()
        if one.problem is not None:
            self._results.remove([one.name])
        elif one.has_value:
            self._results.put({one.name: one.value})
            one.is_filled = True
        return problem

    def settle(self, error: BaseException | None) -> None:
        """Called at the end of the cell, in its patch context, with the error that ends it.

        Raises:
            PatchValueError: A value was written into after it was kept; its variable is removed.
        """
        __tracebackhide__ = True
        is_called = self._is_called()
        if not is_called:
            self._results.put({name: old for name, old in self._aside.items() if name not in self._namespace})
        self._aside.clear()
        if error is not None:
            self._put_what_is_missing()
        for one in self._observed:
            if self._results.is_own(one.name) and one.is_filled:
                one.check(self._namespace[one.name])
            if one.problem is not None:
                self._results.remove([one.name])
        problems = "; ".join(one.problem for one in self._observed if one.problem is not None)
        if error is None:
            self._tell(is_called)
            if problems:
                raise PatchValueError(problems)
        elif problems and problems not in str(error):
            add_note(error, problems)

    def _is_called(self) -> bool:
        context = innermost(captured(self._active.graph))
        return self._is_told or (context is not None and context.calls.has_runs)

    def _put_what_is_missing(self) -> None:
        """After a call that did not return: what had fired before helps to see why."""
        for one in self._observed:
            is_old = self._results.is_own(one.name) and not one.is_filled
            if one.name not in self._namespace or is_old:
                self._put(one)

    def _tell(self, is_called: bool) -> None:
        name = self._active.name
        if self._patches and not is_called:
            why = "calls of the model itself, of other graphs and in other threads are not patched"
            if self._namespace.get(name) is not self._active.graph:
                why = f"the variable {name} does not hold that graph any more; {why}"
            print(f"{name} was not called under the patches in this cell ({why}): no patch was applied")
        changed = [used for used, value in self._used.items() if self._namespace.get(used, value) is not value]
        if changed and is_called:
            print(
                f"{', '.join(changed)} got another value in this cell: patches have the one that it had when the cell "
                f"began; for one value after the other, write `with {name}.patch(...)` in the loop (%graphpatch export)"
            )
        for one in self._observed:
            if one.is_filled or one.problem is not None or one.name not in self._namespace:
                continue
            what = "what an earlier run left" if self._results.is_own(one.name) else "not what that keeps"
            print(f"no call in this cell filled {one.name} for {one.title}: the variable is {what}")


@dataclass(frozen=True, slots=True)
class _Given:
    """A value that went into a variable, whole or in part, and how often it had been written into."""

    part: Any
    whole: Any
    version: int | None

    @classmethod
    def of(cls, part: Any, whole: Any) -> _Given:
        is_shared = part is whole or (isinstance(part, Tensor) and part._is_view())
        return cls(part, whole, version_of(whole) if is_shared else None)

    def is_changed(self) -> bool:
        # A parameter is the model's state: an optimizer's step is no news.
        is_parameter = self.version is not None and self.whole.is_leaf and self.whole.requires_grad
        return self.version is not None and not is_parameter and self.whole._version != self.version


class _Observed:
    """A probe or record of a cell, and what it has given so far.

    Attributes:
        is_filled: Whether the variable has received something in this cell.
        problem: Why what was kept is no result.
        value: What the variable receives, if `has_value`.
    """

    def __init__(self, chosen: ChosenPatch, patch: Patch[Any], names: dict[str, Any]) -> None:
        self._chosen = chosen
        self._patch = patch
        self._names = names
        self._given: list[_Given] = []
        self._count = 0
        self.name = str(chosen.name)
        self.is_filled = False
        self.problem: str | None = None
        self.value: Any = [] if isinstance(patch, RecordPatch) else None

    @property
    def title(self) -> str:
        """The patch, as it is listed."""
        return f"#{self._chosen.number} ({self._chosen})"

    @property
    def has_value(self) -> bool:
        """Whether there is something for the variable; a list may be empty."""
        return self.value is not None

    def take(self) -> str | None:
        """Takes what is new; returns what is wrong with the slice.

        What else is wrong is only told at the end of the cell: the user may be done with the value.
        """
        try:
            values = self._new()
        except PatchValueError as error:
            self._spoil(f"{self.title}: {error}")
            return None
        try:
            given = [_Given.of(self._chosen.part(value, self._names), value) for value in values]
        except PatchValueError as error:
            self._spoil(str(error))
            return str(error)
        if isinstance(self._patch, RecordPatch):
            if self.problem is None:
                self.value += [one.part for one in given]
                self._given += given
        elif given:
            self.problem, self.value, self._given = None, given[0].part, given
        return None

    def _new(self) -> list[Any]:
        if isinstance(self._patch, RecordPatch):
            before, self._count = self._count, len(self._patch._kept)
            return self._patch._since(before)
        value = self._patch.activation  # type: ignore[attr-defined]  # a probe
        return [] if value is None else [value]

    def _spoil(self, problem: str) -> None:
        self.problem, self.value, self._given = problem, None, []

    def check(self, held: Any) -> None:
        """Finds out whether what the variable still holds was written into."""
        parts = {id(part) for part in (held if isinstance(self._patch, RecordPatch) else [held])}
        changed = next((one for one in self._given if id(one.part) in parts and one.is_changed()), None)
        if changed is None:
            return
        repair = "write into a copy of what the call returned (clone)"
        if not isinstance(self._patch, RecordPatch):
            repair += f", or keep one: {self.name} = {self.name}.clone() directly after the call"
        self._spoil(
            f"{self.title}: the tensor of shape {tuple(changed.part.shape)} in {self.name} was written into after the "
            f"call, so it is not what came up at {self._chosen.path!r} any more, and the variable is removed; {repair}"
        )
