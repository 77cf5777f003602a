"""The modules of a model in a file: what each holds, and the names by which graphs reach it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.serialization.codecs.tensors import TensorTable
from graphpatch_notebook.serialization.codecs.values import UnstorableError
from graphpatch_notebook.serialization.modules import ALIAS, CONTAINERS, LoadedModule, is_writable, module_at


class ModuleTable:
    """The modules that are to be written, each under a number: children before those that hold them.

    Args:
        root: The model.
        called: The modules that the model calls, wherever it holds them.
        tensors: Where their tensors are written.

    Attributes:
        modules: The modules, by number.
    """

    def __init__(self, root: Module, called: Iterator[Module], tensors: TensorTable) -> None:
        self._tensors = tensors
        self.modules: list[Module] = []
        self._numbers: dict[int, int] = {}
        self._names = {id(module): name for name, module in root.named_modules()}
        self._extras: dict[int, dict[str, dict[str, Any]]] = {}
        for module in (*called, root):
            self._add(module)

    def _add(self, module: Module) -> None:
        if id(module) in self._numbers:
            return
        for child in module._modules.values():
            if child is not None:
                self._add(child)
        self._numbers[id(module)] = len(self.modules)
        self.modules.append(module)

    def number(self, module: Module) -> int:
        """Returns the number of `module`."""
        return self._numbers[id(module)]

    # -- what graphs reach ---------------------------------------------------------------------------------------------

    def reach_module(self, module: Module, path: str, callee: Module) -> str:
        """Returns the attribute path by which a graph of `module` calls `callee`, which the model has at `path`."""
        if is_writable(path) and module_at(module, path) is callee:
            return path
        held = self._extras_of(module, "called")
        known = next((alias for alias, number in held.items() if number == self.number(callee)), None)
        return known or _noted(held, "module", self.number(callee))

    def reach_tensor(self, module: Module, path: str) -> str:
        """Returns the attribute path by which a graph of `module` reads the tensor that the model has at `path`.

        Raises:
            UnstorableError: There is no tensor, or one that cannot be written.
        """
        path = module.tensor_paths.get(path, path) if isinstance(module, LoadedModule) else path
        parents, _, name = path.rpartition(".")
        holder = module_at(module, parents)
        if holder is None:
            raise UnstorableError(f"it reads {path!r}, which lies in no submodule")
        parameter = holder._parameters.get(name)
        registered = holder._buffers.get(name) if parameter is None else parameter
        if registered is not None:
            self._tensor(holder, name, registered)
            if is_writable(path):
                return path
            paths = self._extras_of(module, "paths")
            return next((a for a, known in paths.items() if known == path), None) or _noted(paths, "path", path)
        value = holder.__dict__.get(name)
        if not isinstance(value, Tensor):
            raise UnstorableError(f"it reads {path!r}, which is no tensor that a module holds")
        if not is_writable(path):
            return self.hold(module, value)
        self._extras_of(holder, "attributes")[name] = self._tensor(holder, name, value)
        return path

    def hold(self, module: Module, tensor: Tensor) -> str:
        """Returns the name by which a graph of `module` reads a tensor that no module holds.

        Raises:
            UnstorableError: It cannot be written.
        """
        held = self._extras_of(module, "attributes")
        number = self._tensor(module, f"constant_{len(held)}", tensor)
        known = next((name for name, other in held.items() if other == number and name.startswith(ALIAS)), None)
        return known or _noted(held, "tensor", number)

    def _extras_of(self, module: Module, kind: str) -> dict[str, Any]:
        return self._extras.setdefault(id(module), {}).setdefault(kind, {})

    def _tensor(self, holder: Module, name: str, tensor: Tensor) -> int:
        prefix = self._names.get(id(holder), f"module_{self._numbers[id(holder)]}")
        return self._tensors.add(tensor, f"{prefix}.{name}" if prefix else name)

    # -- what is written -----------------------------------------------------------------------------------------------

    def encoded(self) -> list[dict[str, Any]]:
        """Returns the JSON of the table."""
        return [self._encoded(module) for module in self.modules]

    def _encoded(self, module: Module) -> dict[str, Any]:
        lost: list[str] = []
        extras = self._extras.get(id(module), {})
        unsaved: set[str] = module._non_persistent_buffers_set
        buffers = [
            [name, self._number_of(module, name, buffer, lost), name not in unsaved]
            for name, buffer in module._buffers.items()
        ]
        return {
            "class": _class_name(module),
            "is_container": CONTAINERS.get(type(module).__name__) is type(module) and not set(extras) - {"called"},
            "training": module.training,
            "parameters": [[n, self._number_of(module, n, p, lost)] for n, p in module._parameters.items()],
            "buffers": buffers,
            "children": [[n, None if m is None else self._numbers[id(m)]] for n, m in module._modules.items()],
            "lost": lost,
            **{kind: list(map(list, extras.get(kind, {}).items())) for kind in ("attributes", "called", "paths")},
        }

    def _number_of(self, module: Module, name: str, tensor: Tensor | None, lost: list[str]) -> int | None:
        """Returns the number of a tensor; one that cannot be written is noted in `lost`."""
        if tensor is None:
            return None
        try:
            return self._tensor(module, name, tensor)
        except UnstorableError:
            lost.append(name)
            return None


def _noted(held: dict[str, Any], kind: str, what: Any) -> str:
    name = f"{ALIAS}{kind}_{len(held)}"
    held[name] = what
    return name


def _class_name(module: Module) -> str:
    """Returns what the class of `module` is called in the file: what `torch.export` makes may be called `<lambda>`."""
    name = type(module).__name__
    return name if name.isidentifier() and not name.startswith("__") else Module.__name__
