"""Makes the modules of a loaded graph from their table: plain ones, or the model's own where it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from graphpatch_notebook.serialization.codecs.reading import Item
from graphpatch_notebook.serialization.modules import (
    ALIAS,
    CONTAINERS,
    LoadedModule,
    is_writable,
    new_module,
    tensor_at,
)

_DEEPEST = 200
_FIELDS = (
    "class", "is_container", "training", "parameters", "buffers", "children", "lost", "attributes", "called", "paths",
)  # fmt: skip


class ModuleReader:
    """Reads the table of modules.

    Args:
        item: The table.
        tensors: The tensors of the file.
        originals: Modules of the model by number, whose parameters and buffers are shared.
        live: The numbers of those that stand for themselves.
        root: The number of the root.

    Attributes:
        modules: The modules, by number.
    """

    def __init__(
        self, item: Item, tensors: Sequence[Tensor], originals: Mapping[int, Module], live: set[int], root: int
    ) -> None:
        self._tensors = tensors
        self._originals = originals
        self._live = live
        self._root = root
        self.modules: list[Module] = []
        self._heights: list[int] = []
        entries = [entry.fields(*_FIELDS) for entry in item.items()]
        for number, fields in enumerate(entries):
            self._add(number, fields)
        # Which module calls which may go round in circles.
        for module, fields in zip(self.modules, entries, strict=True):
            for name, other in _pairs(fields["called"]):
                if not isinstance(module, LoadedModule) or name.text()[: len(ALIAS)] != ALIAS:
                    raise name.error(f"{name.text()[:60]!r} is no name for a module that is called")
                module.__dict__[name.text()] = self.modules[other.whole(0, len(self.modules) - 1)]

    def _add(self, number: int, fields: dict[str, Item]) -> None:
        children = self._children(number, fields["children"])
        original = self._originals.get(number)
        if number in self._live and original is not None:
            self.modules.append(original)
            return
        name = fields["class"].text()
        is_container = fields["is_container"].flag()
        if not name.isidentifier() or name.startswith("__") or (is_container and name not in CONTAINERS):
            raise fields["class"].error(f"{name[:60]!r} is no name of a class")
        module = new_module(name, is_container, is_root=number == self._root)
        module.training = fields["training"].flag()
        module._modules.update(children)
        self._fill(module, fields, original)
        if isinstance(module, LoadedModule):
            self._add_attributes(module, fields)
        elif fields["attributes"].items() or fields["paths"].items():
            raise fields["attributes"].error(f"a {name} has no graph that could need them")
        self.modules.append(module)

    def _children(self, number: int, item: Item) -> dict[str, Module | None]:
        found: dict[str, Module | None] = {}
        height = 0
        for name, child in _pairs(item):
            key = _new_name(name, found)
            if child.is_null:
                found[key] = None
                continue
            index = child.whole(0, number - 1)
            height = max(height, self._heights[index])
            found[key] = self.modules[index]
        if height >= _DEEPEST:
            raise item.error("modules are nested too deeply")
        self._heights.append(height + 1)
        return found

    def _fill(self, module: Module, fields: dict[str, Item], original: Module | None) -> None:
        """Gives the module its parameters and buffers; those of the model are shared with it."""
        parameters: dict[str, Parameter | None] = {}
        buffers: dict[str, Tensor | None] = {}
        taken: dict[str, Any] = dict(module._modules)
        for name, tensor in _pairs(fields["parameters"]):
            found = None if tensor.is_null else self._tensor(tensor)
            if found is not None and not isinstance(found, Parameter):
                raise tensor.error("a parameter is to be one in the table of tensors, too")
            parameters[_new_name(name, taken)] = found
            taken[name.text()] = found
        for entry in fields["buffers"].items():
            name, tensor, is_saved = entry.items(3)
            buffers[_new_name(name, taken)] = None if tensor.is_null else self._tensor(tensor)
            taken[name.text()] = None
            if not is_saved.flag():
                module._non_persistent_buffers_set.add(name.text())
        for lost in fields["lost"].items():
            lost.one_of([*parameters, *buffers])
        if original is None:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        else:
            for registry in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                module.__dict__[registry] = original.__dict__[registry]

    def _add_attributes(self, module: LoadedModule, fields: dict[str, Item]) -> None:
        for name, tensor in _pairs(fields["attributes"]):
            text = name.text()
            if "." in text or not is_writable(text) or text in module._modules or text in module.__dict__:
                raise name.error(f"an attribute cannot be called {text[:60]!r}")
            module.__dict__[text] = self._tensor(tensor)
        for name, path in _pairs(fields["paths"]):
            text = name.text()
            if not text.startswith(ALIAS) or not text.isidentifier() or tensor_at(module, path.text()) is None:
                raise name.error(f"{path.text()[:60]!r} leads to no tensor")
            module.tensor_paths[text] = path.text()

    def _tensor(self, item: Item) -> Tensor:
        return self._tensors[item.whole(0, len(self._tensors) - 1)]


def _pairs(item: Item) -> list[tuple[Item, Item]]:
    return [(pair.items(2)[0], pair.items(2)[1]) for pair in item.items()]


def _new_name(item: Item, taken: Mapping[str, Any]) -> str:
    name = item.text()
    is_odd = not name or "." in name or "\\" in name or not name.isprintable() or name.startswith("__")
    if is_odd or name in taken:
        raise item.error(f"a part of a module cannot be called {name[:60]!r}{' twice' if name in taken else ''}")
    return name
