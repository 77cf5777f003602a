"""Groups the modules that `torch.export.unflatten` makes by the module of the exported model that they come from."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import fx
from torch.export.unflatten import InterpreterModule, UnflattenedModule
from torch.nn import Module

from graphpatch_notebook.capture.records import InputParameter
from graphpatch_notebook.paths import unique_name
from graphpatch_notebook.torch_compat import parts_of

try:
    from torch.export.unflatten import InterpreterModuleDispatcher
except ImportError:  # before torch 2.6, whose programs are refused

    class InterpreterModuleDispatcher(Module):  # type: ignore[no-redef]
        """Never made by these versions."""


_POSITIONAL_ARGUMENT = "_positional_arg_"
_CALL_NAME = re.compile(r"(.+)@\d+")


class Group:
    """The variants of one module: one for each of its calls that differs from the others.

    Attributes:
        variants: The modules that `unflatten` made; those without a graph are never called.
        turns: The numbers of the graphs in the order of all calls, if only the order distinguishes them.
        module: The module made for all of them.
        names: What the placeholders of all graphs are called here, by their names there.
        is_by_name: Whether callers give the arguments by name: the graphs have different placeholders.
    """

    def __init__(self, variants: list[Module]) -> None:
        self.variants = variants
        self.turns: list[int] = []
        self.module: Module | None = None
        self.names: dict[str, str] = {}
        self.is_by_name = False
        self._common: set[str] = set()

    def add(self, variants: list[Module]) -> list[Module]:
        """Adds variants; returns those that are new."""
        new: list[Module] = []
        for variant in variants:
            if all(variant is not known for known in self.variants):
                self.variants.append(variant)
                new.append(variant)
        return new

    def graphs(self) -> list[Module]:
        """Returns the variants that have a graph: its number is its position here."""
        return [variant for variant in self.variants if graph_in(variant) is not None]

    def number(self, variant: Module) -> int:
        """Returns the number of the graph of a variant."""
        return next(number for number, known in enumerate(self.graphs()) if known is variant)

    @property
    def class_name(self) -> str:
        """The name of the class of the module that was exported."""
        kind = next((getattr(variant, "_ty", None) for variant in self.graphs()), None)
        name = str(getattr(kind, "__name__", kind)).rsplit(".", 1)[-1]
        return name if kind is not None and name.isidentifier() else "ExportedModule"

    def name_parameters(self) -> list[InputParameter]:
        """Chooses the names of the placeholders, and returns the parameters of `forward`."""
        by_variant = [placeholder_names(variant) for variant in self.graphs()]
        union = list(dict.fromkeys(name for names in by_variant for name in names))
        self._common = {name for name in union if all(name in names for names in by_variant)}
        self.is_by_name = any(names != by_variant[0] for names in by_variant)
        if self.is_by_name:  # a parameter without a default must not follow one with a default
            union.sort(key=lambda name: name not in self._common)
        known: dict[str, str] = {}
        for variant in self.graphs():
            known = {**_values_by_position(variant), **known}
        for name in union:
            readable = known.get(name, name.lstrip("_"))
            self.names[name] = unique_name(readable if readable.isidentifier() else name, set(self.names.values()))
        return self.parameters()

    def parameters(self) -> list[InputParameter]:
        """Returns the parameters of `forward`; `None` is the default of those that not every graph has."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        empty = inspect.Parameter.empty
        return [InputParameter(new, kind, empty if old in self._common else None) for old, new in self.names.items()]


def placeholder_names(variant: Module) -> list[str]:
    """Returns the names of the placeholders of a variant's graph."""
    graph = graph_in(variant)
    return [str(node.target) for node in graph.nodes if node.op == "placeholder"] if graph is not None else []


def _values_by_position(variant: Module) -> dict[str, str]:
    """Returns the names of the values of placeholders that have only generated names.

    A module whose signature is preserved splits its arguments first: `x` is the first value of the first argument.
    """
    graph = graph_in(variant)
    positional = [name for name in placeholder_names(variant) if name.startswith(_POSITIONAL_ARGUMENT)]
    users = [user for node in graph.nodes if node.op == "placeholder" for user in node.users] if graph else []
    flat = next((user for user in users if user.op == "call_function"), None)
    if flat is None or not positional or not isinstance(flat.args[-1], fx.Node):
        return {}
    structure = parts_of(at(variant, str(flat.args[-1].target)))[0]
    by_position = {user.args[1]: user.name for user in flat.users if len(user.args) == 2}
    found: dict[str, str] = {}
    start = 0
    for name, part in zip(positional, parts_of(structure), strict=False):
        if part.is_leaf() and start in by_position:
            found[name] = str(by_position[start]).lstrip("_")
        start += part.num_leaves
    return found


def graph_in(variant: Module) -> fx.Graph | None:
    """Returns the graph of a module that `unflatten` made, if it is called anywhere."""
    graph = getattr(variant, "graph", None)
    return graph if isinstance(graph, fx.Graph) and len(graph.nodes) else None


def variants_in(child: Module) -> list[Module]:
    """Returns the modules that a child of an unflattened module dispatches to, or the child itself."""
    return list(child.call_modules()) if isinstance(child, InterpreterModuleDispatcher) else [child]


def is_dispatcher(child: Module) -> bool:
    """Whether a child of an unflattened module dispatches to several modules in turn."""
    return isinstance(child, InterpreterModuleDispatcher)


def is_unflattened(child: Module) -> bool:
    """Whether `unflatten` made this module, rather than the program held it (a branch of a condition, say)."""
    kinds = (InterpreterModule, InterpreterModuleDispatcher, UnflattenedModule)
    return isinstance(child, kinds) or type(child) is Module


def children_by_name(module: Module) -> dict[str, list[Module]]:
    """Returns the children grouped by their module: `inner` and `inner@1` are two calls of `inner`."""
    found: dict[str, list[Module]] = {}
    for name, child in module._modules.items():
        if child is not None and is_unflattened(child):
            found.setdefault(base_name(name), []).append(child)
    return found


def base_name(name: str) -> str:
    """Returns a name without the number of the call.

    Example:
        >>> base_name("inner@1"), base_name("inner")
        ('inner', 'inner')
    """
    match = _CALL_NAME.fullmatch(name)
    return match.group(1) if match else name


def at(module: Module, path: str) -> Any:
    """Returns the value at an attribute path."""
    found: Any = module
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return found
