"""What is wrong with docstrings: none, no example, or names in backticks that lead nowhere."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?=\(|$)")
_CLASS = re.compile(r"[A-Z][a-z]+(?:[A-Z]\w*)+$")
# Where classes of others are found that docstrings name.
_OTHERS = "torch torch.nn torch.fx torch.export xarray pandas numpy concurrent.futures matplotlib.axes".split()


@dataclass(frozen=True)
class _Item:
    """A module, a public name of it, or a public name of a class.

    Attributes:
        place: Its full name.
        value: What it is.
        owner: The class that it is in, or `None`.
    """

    place: str
    value: Any
    owner: type | None = None

    @property
    def name(self) -> str:
        return self.place.rpartition(".")[2]

    @property
    def docstring(self) -> str:
        if self.owner is None or callable(self.value) or isinstance(self.value, (property, classmethod)):
            return inspect.getdoc(self.value) or ""
        return ""  # a field: the docstring of its type says nothing of it


def findings(modules: Sequence[ModuleType]) -> list[str]:
    """Returns what is wrong, in words, in the order of the names."""
    public: dict[str, Any] = {module.__name__.rpartition(".")[2]: module for module in modules}
    for module in modules:
        public |= {name: getattr(module, name) for name in module.__all__}
    found = []
    for item in (item for module in modules for item in _items(module)):
        if not item.docstring and not _is_told_by_class(item):
            found.append(f"{item.place}: no docstring")
        elif _needs_example(item) and ">>>" not in item.docstring:
            found.append(f"{item.place}: no example")
        found += [f"{item.place}: `{name}` leads nowhere" for name in _lost(item.docstring, public)]
    return found


def _items(module: ModuleType) -> Iterator[_Item]:
    yield _Item(module.__name__, module)
    for name in module.__all__:
        value = getattr(module, name)
        yield _Item(f"{module.__name__}.{name}", value)
        if isinstance(value, type):
            own = {**inspect.get_annotations(value), **vars(value)}
            yield from (
                _Item(f"{module.__name__}.{name}.{inner}", own[inner], value)
                for inner in own
                if not inner.startswith("_")
            )


def _needs_example(item: _Item) -> bool:
    """Public names do, but errors; so does what one calls or reads of a `PatchableGraph`."""
    if item.owner is not None:
        return item.owner.__name__ == "PatchableGraph" and item.name != "forward"
    return not isinstance(item.value, ModuleType) and not issubclass(_kind(item.value), BaseException)


def _kind(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def _is_told_by_class(item: _Item) -> bool:
    """Whether the docstring of its class, or of a base of it, tells of this attribute."""
    docstrings = [base.__doc__ or "" for base in item.owner.__mro__] if item.owner else []
    return any(re.search(rf"^\s*{item.name}:", docstring, re.MULTILINE) for docstring in docstrings)


def _lost(docstring: str, public: dict[str, Any]) -> list[str]:
    """Returns the names of this package in backticks that nothing public has, and classes that nobody has."""
    text = "\n".join(line for line in docstring.splitlines() if not line.strip().startswith((">>>", "...")))
    names = {name for code in _CODE.findall(text) for name in _names(code)}
    return sorted(name for name in names if not _leads_somewhere(name, public))


def _names(code: str) -> list[str]:
    match = _DOTTED.match(code)
    if match is not None:
        return [match[0]]
    return [code] if _CLASS.match(code) else []


def _leads_somewhere(name: str, public: dict[str, Any]) -> bool:
    first, *rest = name.split(".")
    first = {"pg": "PatchableGraph"}.get(first, first)
    if first in public:
        if first == "PatchableGraph" and rest[:1] in (["model"], ["graph"], ["generate"]):
            return True  # `pg.graph.x`: of the user's model
        return _has(public[first], rest)
    if rest:
        return True  # of others: `value.shape`, `dataclasses.replace`
    if hasattr(builtins, first) or first == "ModelOutput":  # of transformers
        return True
    return any(hasattr(importlib.import_module(module), first) for module in _OTHERS)


def _has(owner: Any, names: list[str]) -> bool:
    for name in names:
        if not hasattr(owner, name):
            told = re.search(rf"^\s*{name}(?: \(.*\))?:", getattr(owner, "__doc__", "") or "", re.MULTILINE)
            return told is not None
        owner = getattr(owner, name)
    return True
