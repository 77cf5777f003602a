"""The session: the chosen patches of a graph. The widget, the magics and the export are views of it.

edit -> `ChosenPatches` (immutable, versioned) -> `ResolvedPatches` (with the user's values) -> `pg.patch`
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import ChosenPatchError, GraphPatchWarning, PatchValueError, SessionError, cut
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, fixed_sizes_of, resolve
from graphpatch_notebook.notebook.display.tables import visible
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, ChosenPatches, names_used
from graphpatch_notebook.notebook.session.expressions import Origin, is_quick, sliced_shape
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patches.slices import index_problem, selection_problem
from graphpatch_notebook.patching import check_call, target_of_call
from graphpatch_notebook.paths import ParsedPath, is_component_name, numbered, parse_path
from graphpatch_notebook.values import ScalarSpec, TensorSpec

_MOST_UNDOS = 1000
_Patches: TypeAlias = tuple[ChosenPatch, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """The value that a patch would be applied to."""

    patch: ChosenPatch  # with its path in canonical form
    shape: torch.Size | None = None  # as recorded; `None` for a number, or if it is not known
    sliced: tuple[int, ...] | None = None  # the shape of its slice
    warning: str | None = None  # such as an index beyond the recorded size


@dataclass(frozen=True, slots=True)
class ResolvedPatches:
    """Chosen patches with their values."""

    patch_map: dict[str, list[Patch[Any]]]  # the argument of `pg.patch`
    observing: tuple[tuple[ChosenPatch, Patch[Any]], ...]  # those that keep something


class PatchVariables:
    """The variables that patches fill and use. Adding a patch takes as long among thousands as among few."""

    def __init__(self, patches: Iterable[ChosenPatch] = ()) -> None:
        self._filling: dict[str, list[ChosenPatch]] = {}
        self._using: dict[str, list[ChosenPatch]] = {}
        for patch in patches:
            self.add(patch)

    def add(self, patch: ChosenPatch) -> None:
        """Adds a patch."""
        if patch.name is not None:
            self._filling.setdefault(patch.name, []).append(patch)
        for name in names_used([patch]):
            self._using.setdefault(name, []).append(patch)

    def filling(self, name: str, besides: ChosenPatch) -> ChosenPatch | None:
        """Returns the first patch that fills a variable, besides one."""
        return next((patch for patch in self._filling.get(name, ()) if patch is not besides), None)

    def warning_of_uses(self, patch: ChosenPatch) -> str | None:
        """Returns a warning if the patch uses a variable that another one fills, or the other way round."""
        is_used = any(other is not patch for other in self._using.get(patch.name or "", ()))
        probes = (self.filling(name, patch) for name in sorted(names_used([patch])))
        probe = patch if is_used else next(filter(None, probes), None)
        if probe is None:
            return None
        return (
            f"{cut(repr(probe.name))} is what ({visible(str(probe))}) keeps: each run uses what the run before it kept"
        )


class Session:
    """The patches chosen for one `PatchableGraph`, with undo and redo. Safe to use from several threads.

    Each edit makes a new `ChosenPatches`, or raises and changes nothing. An edit with `based_on` is refused with a
    `ChosenPatchError` if the session has a newer version. The session does not keep the graph alive.

    Example:
        >>> import torch
        >>> pg = PatchableGraph(torch.nn.Linear(2, 3), torch.ones(1, 2))
        >>> session = Session(pg)
        >>> _ = session.add(ChosenPatch("linear", "add", slice=":, -1", value="shift"))
        >>> resolved = session.resolve({"shift": 10.0})
        >>> with pg.patch(resolved.patch_map):
        ...     changed = pg(torch.ones(1, 2))
        >>> bool(changed[0, -1] - pg(torch.ones(1, 2))[0, -1] > 9)
        True
        >>> session.undo(), session.chosen.patches
        (True, ())
    """

    def __init__(self, graph: PatchableGraph, origin: Origin | None = None) -> None:
        self._graph = weakref.ref(graph)
        self.origin = origin or Origin()
        self.variables: Callable[[], Mapping[str, Any]] = dict  # those of the user, once a workspace has the session
        self._lock = threading.RLock()
        self._chosen = ChosenPatches()
        self._last_number = 0
        self._undone: list[_Patches] = []
        self._done: list[_Patches] = []
        self._listeners: list[Callable[[], object]] = []
        self.note = ""  # where the patches are from, until the next edit

    @property
    def graph(self) -> PatchableGraph:
        """The graph that the patches are for."""
        graph = self._graph()
        if graph is None:
            raise SessionError("the PatchableGraph of this session is gone; make it again")
        return graph

    @property
    def chosen(self) -> ChosenPatches:
        """The chosen patches now."""
        return self._chosen

    # -- edits ---------------------------------------------------------------------------------------------------------

    def edit(self, make: Callable[[_Patches], Iterable[ChosenPatch]], based_on: int | None = None) -> _Patches:
        """Replaces the patches by those that `make` returns, as one step of undo; returns them.

        Patches that are new or changed are checked, and their paths become canonical. Those without a number get one.

        Raises:
            ChosenPatchError: One cannot be applied; the message names the nearest paths, or the shapes.
        """
        with self._lock:
            self._check_version(based_on)
            before = self._chosen.patches
            known, patches = set(before), list(make(before))
            # A number is never reused, because a cell that names it may run again.
            last = self._last_number
            for at, patch in enumerate(patches):
                if not patch.number:
                    last += 1
                    patches[at] = patch.with_fields(number=last)
                last = max(last, patch.number)
            variables = PatchVariables(patches)
            for at, patch in enumerate(patches):
                if patch not in known:
                    patches[at] = self.check(patch, variables).patch
            after = tuple(patches)
            if after != before:
                self._last_number = last
                self._done = [*self._done, before][-_MOST_UNDOS:]
                self._undone.clear()
                self._publish(after)
            return after

    def add(self, patch: ChosenPatch, based_on: int | None = None) -> ChosenPatch:
        """Adds a patch after the others; returns it with its number."""
        return self.extend([patch], based_on)[0]

    def extend(self, patches: Iterable[ChosenPatch], based_on: int | None = None) -> _Patches:
        """Adds several patches; returns them as they were added."""
        new = [patch.with_fields(number=0) for patch in patches]
        return self.edit(lambda before: (*before, *new), based_on)[-len(new) :] if new else ()

    def change(self, number: int, based_on: int | None = None, **changed: Any) -> ChosenPatch:
        """Changes fields of a patch (`is_enabled=False`, `slice=":, 0"`), which keeps its number and position."""

        def make(patches: _Patches) -> Iterable[ChosenPatch]:
            before = ChosenPatches(0, patches).find(number)
            after = before.with_fields(**changed)
            return [after if patch is before else patch for patch in patches]

        return ChosenPatches(0, self.edit(make, based_on)).find(number)

    def move(self, number: int, position: int, based_on: int | None = None) -> None:
        """Moves a patch to a position in the order, counted from 0."""

        def make(patches: _Patches) -> Iterable[ChosenPatch]:
            moved = ChosenPatches(0, patches).find(number)
            others = [patch for patch in patches if patch is not moved]
            return [*others[:position], moved, *others[position:]]

        self.edit(make, based_on)

    def remove(self, numbers: Iterable[int], based_on: int | None = None) -> _Patches:
        """Removes the patches with these numbers; returns them."""
        removed = self._chosen.only(numbers).patches
        gone = {patch.number for patch in removed}
        self.edit(lambda before: [patch for patch in before if patch.number not in gone], based_on)
        return removed

    def clear(self, based_on: int | None = None) -> _Patches:
        """Removes all patches; returns them."""
        return self.remove([patch.number for patch in self._chosen.patches], based_on)

    def undo(self, based_on: int | None = None) -> bool:
        """Undoes the last edit; returns whether there was one."""
        return self._step(self._done, self._undone, based_on)

    def redo(self, based_on: int | None = None) -> bool:
        """Repeats the edit that was undone last; returns whether there was one."""
        return self._step(self._undone, self._done, based_on)

    @property
    def _names(self) -> set[str | None]:
        return {patch.name for patch in self._chosen.patches}

    @property
    def can_undo(self) -> bool:
        """Whether there is an edit to undo."""
        return bool(self._done)

    @property
    def can_redo(self) -> bool:
        """Whether there is an edit to redo."""
        return bool(self._undone)

    def _step(self, source: list[_Patches], other: list[_Patches], based_on: int | None) -> bool:
        with self._lock:
            self._check_version(based_on)
            if not source:
                return False
            other.append(self._chosen.patches)
            self._publish(source.pop())
            return True

    def _check_version(self, based_on: int | None) -> None:
        if based_on is not None and based_on != self._chosen.version:
            raise ChosenPatchError(
                "version",
                f"the chosen patches have changed (version {self._chosen.version}, not {based_on}); "
                "look at them again and repeat the edit",
            )

    def _publish(self, patches: _Patches) -> None:
        self.note = ""
        self._chosen = ChosenPatches(self._chosen.version + 1, patches)
        for listener in tuple(self._listeners):
            try:
                listener()
            except Exception as error:
                what = f"a listener raised {type(error).__name__}: {error}; the edit was made, all others were called"
                warnings.warn(GraphPatchWarning(what, "listener"), stacklevel=2)
                continue

    def listen(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Calls `listener` after each change, in the thread of the edit and under its lock.

        Returns:
            A function that removes the listener.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # -- checks --------------------------------------------------------------------------------------------------------

    def check(self, patch: ChosenPatch, others: PatchVariables | Iterable[ChosenPatch] | None = None) -> Check:
        """Returns the value that a patch would be applied to. Does not change the session.

        It is a warning if a patch uses a variable that a probe fills: each run would use what the run before it kept.
        A variable of the user's that holds a module, function or class is not filled.

        Raises:
            ChosenPatchError: It cannot be applied; `field` is the field that is wrong.
        """
        others = self._chosen.patches if others is None else others
        there = others if isinstance(others, PatchVariables) else PatchVariables(others)
        root = captured(self.graph).root
        if patch.name is not None:
            shown, value = cut(repr(patch.name)), self.variables().get(patch.name)
            if other := there.filling(patch.name, patch):
                why = f"#{other.number} puts {other.path!r} in {shown}"
                raise ChosenPatchError("name", f"{why}: choose another variable")
            if patch.name in self.origin.names:
                raise ChosenPatchError("name", f"{shown} is used to make the graph: choose another variable")
            is_code = callable(value) or issubclass(type(value), ModuleType)
            if is_code and patch.name not in self._names:  # a patch that was chosen earlier can still be disabled
                why = f"{shown} is a {type(value).__name__}, which a run would overwrite"
                raise ChosenPatchError("name", f"{why}: choose another variable")
        used = there.warning_of_uses(patch)
        try:
            target = _target(root, patch)
        except Unresolvable as problem:
            raise ChosenPatchError("path", problem.message) from None
        shape = target.spec.shape if isinstance(target.spec, TensorSpec) else None
        sliced, warning = _sliced(patch, target, shape)
        return Check(
            patch.with_fields(path=target.text), shape, sliced, "; ".join(filter(None, [warning, used])) or None
        )

    def try_out(self, patch: ChosenPatch) -> None:
        """Applies a patch to zeros of the recorded shape, if its value is quick to compute (`is_quick`).

        Raises:
            ChosenPatchError: The slice, or the value, does not fit; `field` says which.
        """
        target, namespace = _target(captured(self.graph).root, patch), dict(self.variables())
        spec = target.spec
        if not isinstance(spec, TensorSpec) or patch.any_shape or not names_used([patch]) <= {*namespace}:
            return
        zeros = torch.zeros(spec.shape, dtype=spec.dtype, device="meta")
        if patch.index is not None:
            index, shown = patch.index.index(namespace), f"the value recorded here, of shape {tuple(spec.shape)},"
            problem = index_problem(index, spec.shape)
            if problem := problem or selection_problem(
                index, fixed_sizes_of(target), shown, allow_empty=patch.allow_empty
            ):
                raise ChosenPatchError("slice", problem)
            if selection_problem(index, spec.shape, shown):  # only at the sizes of the example
                return
        if patch.value is None or not is_quick(patch.value, namespace):
            return
        try:
            with torch.random.fork_rng(devices=[]):
                made: Any = patch.patch(namespace)
        except Exception as error:
            raise ChosenPatchError("value", f"{type(error).__name__}: {error}") from None
        if not isinstance(getattr(made, "value", None), Tensor):
            return
        with suppress(NotImplementedError):  # of a mask, the size of what it selects is not known
            given, part = tuple(made.value.shape), patch.part(zeros, namespace)
            made.value = made.value.to("meta")
            try:
                made.op(zeros)
            except RuntimeError:
                what = f"a value of shape {given} does not broadcast to {tuple(part.shape)}"
                raise ChosenPatchError("value", f"{what}, the shape of what is patched") from None
            except PatchValueError as error:
                raise ChosenPatchError("value", str(error)) from None

    def free_name(self, path: str, taken: Container[str] = ()) -> str:
        """Returns a name for the variable of a probe: the end of the path, with a number if that name is taken.

        Example:
            >>> import torch
            >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.ones(1, 2))
            >>> Session(pg).free_name("sub_0.linear")
            'sub_0_linear'
        """
        mine = self._names | self.origin.names
        base = name_of_path(path)
        names = itertools.chain([base], numbered(base))
        return next(name for name in names if name not in mine and name not in taken and not is_reserved(name))

    # -- use -----------------------------------------------------------------------------------------------------------

    def resolve(self, namespace: dict[str, Any], chosen: ChosenPatches | None = None) -> ResolvedPatches:
        """Returns the enabled patches with their values from `namespace`, each a new object.

        Raises:
            SessionError: Some values cannot be evaluated; one error for all of them. No patch was applied.
        """
        enabled = (self._chosen if chosen is None else chosen).enabled
        made: dict[int, Patch[Any]] = {}
        problems: dict[str, Exception] = {}
        paths = by_value(captured(self.graph).root, enabled)
        for one in (one for same in paths.values() for one in same):  # in the order of exported code
            try:
                made[one.number] = one.patch(namespace)
            except Exception as error:
                problems[f"#{one.number} ({visible(str(one))}): {type(error).__name__}: {error}"] = error
                continue
        if problems:
            raise SessionError("; ".join(problems)) from next(iter(problems.values()))
        patch_map = {path: [made[one.number] for one in same] for path, same in paths.items()}
        observing = ((one, made[one.number]) for one in enabled if one.definition.keeps is not None)
        return ResolvedPatches(patch_map, tuple(observing))


def is_reserved(name: str) -> bool:
    """Whether Python means something else by a name."""
    return keyword.iskeyword(name) or hasattr(builtins, name)


def name_of_path(path: str) -> str:
    """Returns an identifier made of the end of a path.

    The end begins at the last submodule with a number, so that layers have different names.

    Example:
        >>> name_of_path("transformer.h_3.mlp.output"), name_of_path('0."a.b"')
        ('h_3_mlp_output', 'node_0_a_b')
        >>> name_of_path("h_3.sub_0.output"), name_of_path("encoder.mlp.output")
        ('sub_0_output', 'mlp_output')
    """
    parsed = ParsedPath((path,)) if is_component_name(path) else parse_path(path)
    last = len(parsed.names) - 1
    begin = next((at for at in range(last - 1, -1, -1) if parsed.names[at][-1:].isdigit()), max(0, last - 1))
    words = re.sub(r"\W+", "_", "_".join((*parsed.names[begin:], *parsed.dig)), flags=re.ASCII).strip("_")
    return words if words and not words[0].isdigit() else f"node_{words}".strip("_")


def by_value(root: Frame, patches: Sequence[ChosenPatch]) -> dict[str, list[ChosenPatch]]:
    """Returns the patches by the value that they are on, as in a patch map: by the first of its names that is used.

    Raises:
        SessionError: Patches on a value and on a part of it take turns. A map cannot say so.
    """
    names: dict[tuple[Any, ...], str] = {}
    found: dict[str, list[ChosenPatch]] = {}
    last: dict[str, str] = {}
    for patch in patches:
        path, part = patch.path, tuple[Any, ...]()
        with suppress(Unresolvable):  # reported when the patches are used
            target = resolve(root, patch.path)
            path, part = target.path, (repr(target.index), target.layout)
        name = names.setdefault((path, *part), patch.path)
        if name in found and last[path] != name:
            raise SessionError(
                f"patches on {name!r} and on {last[path]!r}, a part of it or the whole, take turns: move them, so that "
                "those on one of the two follow each other"
            )
        last[path] = name
        found.setdefault(name, []).append(patch)
    return found


def _target(root: Frame, patch: ChosenPatch) -> Target:
    """Returns the value that a patch is on: for a module, the first value that it returns."""
    replaces_call = patch.definition.patch.replaces_call
    target = target_of_call(root, patch.path) if replaces_call else None
    if target is None:
        try:
            target = resolve(root, patch.path)
        except Unresolvable as problem:
            if problem.output is None or not patch.path:
                raise
            target = resolve(root, problem.output)
    if replaces_call and patch.value is None:
        try:
            check_call(target, patch.definition.patch())
        except ValueError as problem:
            raise Unresolvable(f"{target.text!r}: {problem}") from None
    return target


def _sliced(patch: ChosenPatch, target: Target, shape: torch.Size | None) -> tuple[tuple[int, ...] | None, str | None]:
    """Returns the shape of the slice, if it is known, and a warning."""
    if patch.index is None:
        return shape, None
    if shape is None:
        # An input that the example call did not have has an unknown value.
        if isinstance(target.spec, ScalarSpec) and target.spec.value is None:
            return None, None
        raise ChosenPatchError(
            "slice", f"{target.text!r} is a number ({target.spec}): it cannot have a slice; drop the brackets"
        )
    try:
        return sliced_shape(patch.index, shape, lambda: fixed_sizes_of(target), allow_empty=patch.allow_empty)
    except ValueError as error:
        if patch.any_shape:
            return None, None
        raise ChosenPatchError("slice", f"{target.text!r}: {error}") from None


_sessions: weakref.WeakKeyDictionary[PatchableGraph, Session] = weakref.WeakKeyDictionary()
_sessions_lock = threading.Lock()


def session_of(graph: PatchableGraph) -> Session:
    """Returns the session of a graph, always the same one."""
    with _sessions_lock:
        if graph not in _sessions:
            _sessions[graph] = Session(graph)
        return _sessions[graph]
