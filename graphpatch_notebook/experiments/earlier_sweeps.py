"""What earlier sweeps of a graph have shown, which need not be shown again while its model is as it was."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.execution.frame_effects import PLAIN, leaves_of
from graphpatch_notebook.experiments.inputs import Inputs
from graphpatch_notebook.patchable_graph import PatchableGraph

_known: WeakKeyDictionary[PatchableGraph, dict[Hashable, Any]] = WeakKeyDictionary()


def shown_earlier(pg: PatchableGraph) -> dict[Hashable, Any]:
    """Returns what is known of a graph, by what was asked; there is nothing of the kind in the graph itself."""
    return _known.setdefault(pg, {})


class Settings:
    """What the modules of a model hold besides tensors: plain values by what they are, all else by its identity.

    What lists, dicts and plain objects hold (the config of a model) is looked at, too, but not what is inside of that.

    Args:
        model: The model.
    """

    def __init__(self, model: Module) -> None:
        plain: list[Any] = []
        others: list[Any] = []  # kept: the id of one is not another one's meanwhile
        for module in model.modules():
            plain.append(type(module))
            for name, value in module.__dict__.items():
                kind = type(value)
                if kind in _VALUES:
                    plain.append(value)
                elif name not in _REGISTRIES:
                    others.append(value)
        for value in {id(value): value for value in others}.values():
            inside = _inside(type(value))
            if inside is not None:
                for item in inside(value):
                    (plain if type(item) in _VALUES else others).append(item)
        # Nothing is kept alive that may be large.
        self._others = [None if isinstance(value, Tensor) else value for value in others]
        self._plain = plain
        self._ids = tuple(map(id, self._others))
        self._hash = hash(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self._ids == other._ids and self._plain == other._plain

    def __hash__(self) -> int:
        return self._hash


_VALUES = frozenset({bool, int, float, str, type(None)})
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
"""Tensors are not told apart: their values are not, either."""

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


def kind_of_run(settings: Settings, inputs: Inputs) -> Hashable:
    """Returns what two runs of a model have in common that do the same, as long as Python looks at no values."""
    leaves = leaves_of((inputs.args, inputs.kwargs))
    forms = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return forms, tuple(inputs.kwargs), settings
