"""Finds, in the model that is given to `load`, the modules that a file is of, and checks that they are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.checks.equality import difference
from graphpatch_notebook.errors import SerializationError
from graphpatch_notebook.serialization.codecs.reading import Item


def check_weights(
    fields: Mapping[str, Item], originals: Mapping[int, Module], tensors: Sequence[Tensor], live: set[int]
) -> None:
    """Refuses a model whose weights, or modes, are others than those in the file.

    Raises:
        SerializationError: They are.
    """
    for number, item in enumerate(fields["modules"].items()):
        module = originals.get(number)
        if module is None:
            continue
        entries = item.entries()
        name = type(module).__name__
        if number not in live and entries["training"].flag() is not module.training:
            was = "train" if entries["training"].flag() else "eval"
            raise SerializationError(
                f"{_where(module, fields, originals)} ({name}) was in {was} mode when the graph was saved; call "
                f"model.{was}()"
            )
        for kind, registry in (("parameters", module._parameters), ("buffers", module._buffers)):
            for entry in entries[kind].items():
                tensor, stored = entry.items()[0].text(), entry.items()[1]
                if stored.is_null:
                    continue
                found = registry.get(tensor)
                expected = tensors[stored.whole(0, len(tensors) - 1)]
                if found is None or difference(found.detach(), expected.detach().to(found.device), tensor) is not None:
                    raise SerializationError(
                        f"{tensor!r} of {_where(module, fields, originals)} ({name}) is not what it was when the graph "
                        "was saved; load these weights into the model first: "
                        "model.load_state_dict(safetensors.torch.load_file(file), strict=False)"
                    )


def _where(module: Module, fields: Mapping[str, Item], originals: Mapping[int, Module]) -> str:
    """Returns the path of a module in the model, in words."""
    model = originals.get(fields["frames"].items()[0].entries()["module"].whole(0, len(fields["modules"].items()) - 1))
    names = model.named_modules() if model is not None else ()
    path = next((path for path, other in names if other is module), "")
    return repr(path) if path else "the model"


def originals_of(fields: Mapping[str, Item], model: Module) -> dict[int, Module]:
    """Returns the modules of `model` by the numbers that they have in the file.

    Raises:
        SerializationError: It is not the model that the file is of.
    """
    modules = fields["modules"].items()
    frames = fields["frames"].items()
    found: dict[int, Module] = {}

    def pair(item: Item, module: Module, path: str) -> None:
        number = item.whole(0, len(modules) - 1)
        known = found.setdefault(number, module)
        if known is not module:
            raise SerializationError(f"{path!r} of the model is another module than it was when the graph was saved")
        entry = modules[number].entries()
        if "class" not in entry or entry["class"].text() != type(module).__name__:
            there = f"of {entry['class'].text()}" if "class" in entry else "another one"
            raise SerializationError(
                f"{repr(path) if path else 'the model'} is of class {type(module).__name__}, and {there} in the file: "
                "give the model whose graph it is"
            )
        for child in entry["children"].items() if "children" in entry else []:
            name, index = child.items(2)
            inner = module._modules.get(name.text())
            if index.is_null:
                continue
            if inner is None:
                raise SerializationError(f"the model has no {f'{path}.{name.text()}'.lstrip('.')!r}, unlike the file")
            if index.whole(0, number - 1) not in found:
                pair(index, inner, f"{path}.{name.text()}".lstrip("."))

    if not frames or "module" not in frames[0].entries():
        raise fields["frames"].error("there is no frame")
    pair(frames[0].entries()["module"], model, "")
    return found
