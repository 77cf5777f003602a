"""The user's variables: the graphs in them, the graph that commands use, and the results of probes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, TypeVar

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.errors import ChosenPatchError, SessionError, cut
from graphpatch_notebook.notebook.search import index_of
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import written_arguments
from graphpatch_notebook.notebook.session.session import PatchVariables, Session, session_of
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.paths import nearest

T = TypeVar("T")


def is_a(value: Any, classes: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    """Whether an object is an instance of these classes; unlike `isinstance`, it runs no code of the object."""
    return issubclass(type(value), classes)  # `isinstance` reads `value.__class__`


@dataclass(frozen=True, slots=True)
class ActiveGraph:
    """The graph that commands use, and the variable that holds it."""

    name: str
    graph: PatchableGraph
    session: Session

    @property
    def title(self) -> str:
        """A description in one line."""
        return f"{self.name}: {type(captured(self.graph).module).__name__}, {len(self.graph.nodes):,} nodes"


class Workspace:
    """The variables that commands work on. It does not keep graphs or activations alive."""

    def __init__(self, namespace: Callable[[], dict[str, Any]], put_in_new_cell: Callable[[str], object]) -> None:
        self._namespace = namespace
        self.put_in_new_cell = put_in_new_cell
        self.results = Results(namespace)
        self.news: list[str] = []  # about patches of graphs that were made again, until it is printed or shown
        self._used = ""
        self._sessions: dict[str, Session] = {}

    @property
    def namespace(self) -> dict[str, Any]:
        """The user's variables (not a copy)."""
        return self._namespace()

    def graphs(self) -> dict[str, PatchableGraph]:
        """Returns the graphs in variables, by name, without those that IPython keeps (`_`, `_3`)."""
        return {name: value for name, value in self._variables() if is_a(value, PatchableGraph)}

    def _variables(self) -> list[tuple[str, Any]]:
        """Returns the variables without those of IPython."""
        return [one for one in list(self.namespace.items()) if type(one[0]) is str and not one[0].startswith("_")]

    def use(self, name: str) -> ActiveGraph:
        """Makes the graph in a variable the active one."""
        active = self.named(name)
        self._used = name
        index_of(active.graph)  # so that the first search does not wait for it
        return active

    def named(self, name: str) -> ActiveGraph:
        """Returns the graph in a variable."""
        value = self.namespace.get(name)
        if is_a(value, PatchableGraph):
            return self._active(name, value)
        what = f"unknown variable {name!r}"
        if name in self.namespace:
            what = f"{name!r} is not a PatchableGraph but an object of {type(value).__name__}"
        graphs = list(self.graphs())
        raise SessionError(f"{what}; " + (f"graphs: {', '.join(nearest(name, graphs))}" if graphs else self.first_step))

    def current(self) -> ActiveGraph:
        """Returns the active graph: the one picked by name, or else the only one.

        Raises:
            SessionError: There is none, or there are several, and none was picked.
        """
        graphs = self.graphs()
        if self._used in graphs:
            return self._active(self._used, graphs[self._used])
        different = {id(graph): graph for graph in graphs.values()}
        if len(different) > 1:
            raise SessionError(
                f"there are several graphs: {', '.join(graphs)}; pick one: %graphpatch use NAME, or %%graphpatch NAME"
            )
        if not graphs:
            raise SessionError(f"no PatchableGraph yet; {self.first_step}")
        graph = next(iter(different.values()))
        known = session_of(graph).origin.graph
        return self._active(known if known in graphs else next(iter(graphs)), graph)

    @property
    def first_step(self) -> str:
        """The command that makes a graph."""
        return f"make one: %graphpatch wrap pg = {next(iter(self.models()), 'MODEL')}(EXAMPLE INPUTS)"

    def models(self) -> list[str]:
        """Returns the names of the variables that hold modules other than graphs."""
        modules = [(name, value) for name, value in self._variables() if is_a(value, Module)]
        return [name for name, value in modules if not is_a(value, PatchableGraph)]

    def notice_new_graphs(self) -> None:
        """Looks for other graphs in the variables of known ones, and prints which patches were carried over."""
        for name in [*self._sessions]:
            if is_a(value := self.namespace.get(name), PatchableGraph):
                self._active(name, value)
        print(*self.news, sep="\n", end="\n" * bool(self.news))
        self.news.clear()

    def _active(self, name: str, graph: PatchableGraph) -> ActiveGraph:
        """Returns the graph in a variable. Patches stay with the name: a new graph has those of the one before."""
        session = session_of(graph)
        session.variables = self._namespace
        before = self._sessions.get(name, session)
        self._sessions[name] = session
        if session.origin.graph != name:
            session.origin = replace(session.origin, graph=name)
        if session.origin.model is None:
            model = next((n for n in self.models() if self.namespace[n] is captured(graph).module), None)
            session.origin = replace(session.origin, model=model)
        examples = captured(graph).examples
        if session.origin.arguments is None and examples is not None:
            written = written_arguments(examples.args, examples.kwargs, self.namespace)
            session.origin = replace(session.origin, arguments=written)
        if before is not session and session.chosen.version == 0 and before.chosen.patches:
            self.news.append(transfer(before.chosen.patches, session))
        return ActiveGraph(name, graph, session)


_of_shells: weakref.WeakKeyDictionary[Any, Workspace] = weakref.WeakKeyDictionary()


def workspace_of(shell: Any) -> Workspace:
    """Returns the workspace of an IPython shell, always the same one."""
    if shell not in _of_shells:
        proxy = weakref.proxy(shell)  # so that a workspace does not keep its shell alive
        _of_shells[shell] = Workspace(lambda: proxy.user_ns, proxy.set_next_input)
    return _of_shells[shell]


def forget_workspace(shell: Any) -> None:
    """Makes the next `workspace_of` of this shell return a new one."""
    _of_shells.pop(shell, None)


class Results:
    """The variables that probes and records have filled. It does not keep the values alive."""

    def __init__(self, namespace: Callable[[], dict[str, Any]]) -> None:
        self._namespace = namespace
        self._filled: dict[str, weakref.ref[Tensor]] = {}

    def put(self, values: dict[str, Any]) -> None:
        """Puts values into the variables of these names."""
        self._namespace().update(values)
        tensors = {name: _tensor_of(value) for name, value in values.items()}
        self._filled |= {name: weakref.ref(tensor) for name, tensor in tensors.items() if tensor is not None}

    def names_of_others(self) -> set[str]:
        """Returns the names of all other variables."""
        return {name for name in list(self._namespace()) if not self.is_own(name)}

    def overwritten(self, patches: Iterable[ChosenPatch]) -> str:
        """Returns a note about the user's variables that the next run overwrites; an empty text without any."""
        there = self._namespace()
        names = [one.name for one in patches if one.name in there and not self.is_own(one.name)]
        shown = cut(", ".join(names), 400)
        return f"the next run overwrites the variable{'s' * (len(names) > 1)} {shown}" if names else ""

    def is_own(self, name: str) -> bool:
        """Whether a variable still holds the value that was put there. Of numbers, that is not known."""
        tensor = _tensor_of(self._namespace().get(name))
        return tensor is not None and name in self._filled and self._filled[name]() is tensor

    def remove(self, names: Iterable[str]) -> None:
        """Removes those of the variables that still hold the value that was put there."""
        for name in names:
            if self.is_own(name):
                del self._namespace()[name]
            self._filled.pop(name, None)


def _tensor_of(value: Any) -> Tensor | None:
    """Returns a tensor that identifies the value of a probe or record; `None` without one."""
    first = value[0] if type(value) is list and value else value
    return first if isinstance(first, Tensor) else None


# --------------------------------------------------------------------------------------------------------------------
# Patches of the previous graph in a variable


def counted(count: int) -> str:
    """Returns `1 patch`, `2 patches`, ..."""
    return "1 patch" if count == 1 else f"{count} patches"


def transfer(patches: tuple[ChosenPatch, ...], session: Session) -> str:
    """Chooses the patches of the graph that the variable held before; returns which were carried over and dropped."""
    kept: list[ChosenPatch] = []
    variables = PatchVariables()
    dropped: list[str] = []
    for patch in patches:
        try:
            kept.append(session.check(patch, variables).patch)
            variables.add(kept[-1])
        except ChosenPatchError as problem:
            dropped.append(f"dropped #{patch.number} {patch}: {problem}")
            continue
    carried = f"{counted(len(kept))} carried over from the previous graph in {session.origin.graph}"
    session.edit(lambda _: kept)
    session.note = "\n".join([carried] * bool(kept) + dropped)
    return session.note
