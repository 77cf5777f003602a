"""What earlier sweeps of a graph have shown, which need not be shown again while its model is as it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.checks.call_signature import UnseenError, input_key, settings_key
from graphpatch_notebook.checks.model_state import version_of
from graphpatch_notebook.execution.frame_effects import PLAIN, all_modules
from graphpatch_notebook.experiments.inputs import Inputs
from graphpatch_notebook.patchable_graph import PatchableGraph

_known: WeakKeyDictionary[PatchableGraph, tuple[Settings, dict[Hashable, Any]]] = WeakKeyDictionary()


def shown_earlier(pg: PatchableGraph) -> dict[Hashable, Any]:
    """Returns what is known of a graph, by what was asked; all is forgotten when its model is changed."""
    settings = Settings(pg._module)
    known = _known.get(pg)
    if known is None or known[0] != settings:
        known = _known[pg] = (settings, {})
    return known[1]


class Settings:
    """What the modules of a model hold: plain values by what they are, all else by its identity.

    What lists, dicts and plain objects hold (the config of a model) is looked at, too, but not what is inside of that.
    Of tensors it is noted how often they were written into.

    Args:
        model: The model.
    """

    def __init__(self, model: Module) -> None:
        modules = all_modules(model)
        states = [module.__dict__ for module in modules]
        plain: list[Any] = [*map(type, modules), *map(len, states)]
        others: list[Any] = []
        for value in chain.from_iterable(state.values() for state in states):
            (plain if type(value) in _VALUES else others).append(value)
        # Most of what modules hold are registries of hooks, without any: there is nothing inside of these.
        distinct = {id(value): value for value in others if type(value) not in _SIZED or value}
        inner: list[Any] = []
        for value in distinct.values():
            inside = _inside(type(value))
            if inside is not None:
                for item in inside(value):
                    (plain if type(item) in _VALUES else inner).append(item)
        distinct.update(zip(map(id, inner), inner, strict=True))
        self._plain = plain
        self._ids = [*map(id, others), *map(id, inner)]
        self._versions = [version_of(value) for value in distinct.values() if isinstance(value, Tensor)]
        # Functions and the like stay, as else another one might get the id; nothing that may be large does.
        self._functions = [value for value in distinct.values() if callable(value) and not isinstance(value, Module)]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Settings)
            and self._ids == other._ids
            and self._versions == other._versions
            and self._plain == other._plain
        )

    __hash__ = None  # type: ignore[assignment]  # it is compared with the last one only


_VALUES = frozenset({bool, int, float, str, type(None)})
_SIZED = frozenset({dict, OrderedDict, list, tuple, set})
_ways_inside: dict[type, Callable[[Any], Iterable[Any]] | None] = {}


def _inside(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    """Returns what yields the values that an object of a class holds; `None` where it has none that are looked at."""
    if kind not in _ways_inside:
        way: Callable[[Any], Iterable[Any]] | None = None
        if issubclass(kind, dict):
            way = _values
        elif issubclass(kind, (list, tuple, set)):
            way = iter
        elif not issubclass(kind, (Module, *PLAIN)) and not any("__call__" in base.__dict__ for base in kind.__mro__):
            way = _attributes
        _ways_inside[kind] = way
    return _ways_inside[kind]


def _values(value: dict[Any, Any]) -> Iterable[Any]:
    return value.values()


def _attributes(value: Any) -> Iterable[Any]:
    return getattr(value, "__dict__", {}).values()


def kind_of_run(inputs: Inputs) -> Hashable:
    """Returns what two runs of a model have in common that do the same, as long as Python looks at no values."""
    try:
        return input_key(inputs.args, inputs.kwargs), settings_key()
    except UnseenError:
        return object()  # equal to no other
