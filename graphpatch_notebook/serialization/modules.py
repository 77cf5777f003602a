"""The modules of a file, and those of a loaded graph: parameters, buffers, children, and the names that graphs use.

A loaded module has what the module of the model held, not its code. `ModuleTable` writes the table of modules,
`ModuleReader` reads it.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, Parameter, Sequential

from graphpatch_notebook.capture.held_values import module_at, plain_values_read
from graphpatch_notebook.capture.inputs import signature_with
from graphpatch_notebook.capture.observers import observer
from graphpatch_notebook.capture.records import InputParameter
from graphpatch_notebook.errors import StoredFormError, UnstoredFrameError
from graphpatch_notebook.interrupts import holding
from graphpatch_notebook.serialization.codecs.reading import JsonValue
from graphpatch_notebook.serialization.codecs.tensors import TensorTable
from graphpatch_notebook.serialization.codecs.values import UnstorableError, encoded
from graphpatch_notebook.serialization.forms import Guard

CONTAINERS: dict[str, type[Module]] = {cls.__name__: cls for cls in (ModuleDict, ModuleList, Sequential)}
"""The classes of torch that only hold modules: these keep their class."""

ALIAS = "_graphpatch_"
"""The prefix of names that graphs use for objects whose own names Python cannot write."""


class StoredForward:
    """`forward` of a module without its code, as graphs run in its place. It has the signature of the original."""

    def __init__(self, class_name: str, parameters: Sequence[InputParameter], reason: str) -> None:
        self._class_name = class_name
        self._reason = reason
        self.__signature__ = signature_with(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises an error, since there is no code to run."""
        raise UnstoredFrameError(f"this {self._class_name} cannot run: {self._reason}")


_NOT_CALLED = (
    "the file has no graph for it, as the example inputs did not reach it; only the model that was saved can run it"
)


class LoadedModule(Module):
    """A module of the saved model, without its code: its parameters, buffers, children and tensor attributes.

    `tensor_paths` are the attribute paths behind names that graphs use, `stored_read` the plain values that the code of
    the module read, as JSON.
    """

    tensor_paths: dict[str, str]
    forward: Callable[..., Any] = StoredForward("module", (), _NOT_CALLED)

    def __init__(self) -> None:
        super().__init__()
        state = self.__dict__
        state["tensor_paths"] = {}
        state["stored_read"] = {}
        state["forward"] = StoredForward(type(self).__name__, (), _NOT_CALLED)

    def __getattr__(self, name: str) -> Any:
        path = self.__dict__.get("tensor_paths", {}).get(name)
        if path is not None:  # looked up each time: `to` may put other tensors into the registries
            return tensor_at(self, path)
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"this {type(self).__name__} was loaded from a file and has no {name!r}: of a model, only what its "
                "forward needs is stored; the rest is the model's: make a PatchableGraph of the model for it"
            ) from None


class LoadedRoot(LoadedModule):
    """The root of a loaded graph. If a model is given, it runs the calls that the graph is not valid for.

    The names of its attributes do not collide with those of submodules.
    """

    _stored_guard: Guard
    _stored_model: Module | None
    _stored_edits: bool

    def set_guard(self, guard: Guard, model: Module | None, *, has_edits: bool) -> None:
        """Makes `guard` check all calls. With edits, the model cannot run in place of the graphs."""
        state = self.__dict__
        state["_stored_guard"] = guard
        state["_stored_model"] = model
        state["_stored_edits"] = has_edits
        self.register_forward_pre_hook(Refusal(guard, _advice(model, has_edits)), with_kwargs=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph, or the model in its place."""
        if self in _checked.get() or "_stored_guard" not in self.__dict__:  # it may call itself
            return super().__call__(*args, **kwargs)
        model, run = self._stored_model, observer.get()
        has_edits = self._stored_edits or getattr(run, "has_edited_graphs", False)
        problem = self._stored_guard.problem(args, kwargs, _advice(model, has_edits))
        if problem is not None:
            if model is None or has_edits or getattr(run, "is_patched", False):
                raise StoredFormError(f"the loaded graph does not hold for this call: {problem}")
            return model(*args, **kwargs)
        with holding(_checked, (*_checked.get(), self)):
            return super().__call__(*args, **kwargs)


_checked: ContextVar[tuple[Module, ...]] = ContextVar("graphpatch_checked_roots", default=())


def _advice(model: Module | None, has_edits: bool) -> str:
    """Returns the advice for calls that the graph is not valid for, other than making another graph."""
    if has_edits:
        return "; the model cannot run such calls instead, as graphs were edited or are custom, unlike its own code"
    if model is None:
        return (
            ", or give the model that runs all calls that the graph does not cover: "
            "PatchableGraph.load(file, model=model)"
        )
    return "; without patches, the model that load was given runs such calls of the PatchableGraph"


class Refusal:
    """The forward pre-hook that refuses calls if a guard finds a problem: those that go through graph modules."""

    def __init__(self, guard: Guard, advice: str) -> None:
        self._guard = guard
        self._advice = advice

    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises an error if there is a problem."""
        problem = None if module in _checked.get() else self._guard.problem(args, kwargs, self._advice)
        if problem is not None:
            raise StoredFormError(f"the loaded graph does not hold for this call: {problem}")


def tensor_at(module: Module, path: str) -> Any:
    """Returns the parameter or buffer at an attribute path, even if names on it are not identifiers; or `None`."""
    parents, _, last = path.rpartition(".")
    holder = module_at(module, parents)
    if holder is None:
        return None
    found = holder._parameters.get(last)
    return found if found is not None else holder._buffers.get(last)


@cache
def _loaded_class(name: str, is_root: bool) -> type[LoadedModule]:
    """Returns the class of loaded modules with the name of the original class."""
    base = LoadedRoot if is_root else LoadedModule
    return type(name, (base,), {"__doc__": base.__doc__, "__module__": __name__})


_OWN_NAMES = frozenset({*dir(Module), *vars(LoadedModule()), "tensor_paths", *LoadedRoot.__annotations__})


def is_writable(path: str) -> bool:
    """Whether graphs can write `path` in Python: its names are not keywords, nor attributes that all modules have."""
    parts = path.split(".")
    return all((part.isidentifier() or part.isdecimal()) and not keyword.iskeyword(part) for part in parts) and not any(
        part in _OWN_NAMES or part.startswith("__") for part in parts
    )


def own_tensor_attribute(module: Module, name: str) -> Tensor | None:
    """Returns the tensor that `module` has as a plain attribute, if it has."""
    found = module.__dict__.get(name)
    return found if isinstance(found, Tensor) else None


# -- the table of modules, written -------------------------------------------------------------------------------------


class ModuleTable:
    """The modules to write, each with a number: children before their parents.

    These are the modules in the registries of the model, and those that it calls, which may be elsewhere.
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
        """Returns the attribute path by which a graph of `module` reads the tensor that the model has at `path`."""
        path = module.tensor_paths.get(path, path) if isinstance(module, LoadedModule) else path
        parents, _, name = path.rpartition(".")
        holder = module_at(module, parents)
        if holder is None:
            raise UnstorableError(f"it reads {path!r}, which is not in a submodule")
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
            raise UnstorableError(f"it reads {path!r}, which is not a tensor that a module holds")
        if not is_writable(path):
            return self.hold(module, value)
        self._extras_of(holder, "attributes")[name] = self._tensor(holder, name, value)
        return path

    def hold(self, module: Module, tensor: Tensor) -> str:
        """Returns the name by which a graph of `module` reads a tensor that no module holds."""
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
            "read": _encoded_reads(module),
            **{kind: list(map(list, extras.get(kind, {}).items())) for kind in ("attributes", "called", "paths")},
        }

    def _number_of(self, module: Module, name: str, tensor: Tensor | None, lost: list[str]) -> int | None:
        """Returns the number of a tensor; a tensor that cannot be written is noted in `lost`."""
        if tensor is None:
            return None
        try:
            return self._tensor(module, name, tensor)
        except UnstorableError:
            lost.append(name)
            return None


def _encoded_reads(module: Module) -> dict[str, Any]:
    if isinstance(module, LoadedModule):  # its code is not here
        return module.__dict__["stored_read"]  # type: ignore[no-any-return]
    found = {}
    for name, value in plain_values_read(module).items():
        with suppress(UnstorableError):
            found[name] = encoded(value)
    return found


def _noted(held: dict[str, Any], kind: str, what: Any) -> str:
    name = f"{ALIAS}{kind}_{len(held)}"
    held[name] = what
    return name


def _class_name(module: Module) -> str:
    """Returns the name of the class of `module` for the file: `torch.export` makes classes called `<lambda>`."""
    name = type(module).__name__
    return name if name.isidentifier() and not name.startswith("__") else Module.__name__


_DEEPEST = 200
_FIELDS = (
    "class", "is_container", "training", "parameters", "buffers", "children", "lost", "attributes", "called", "paths",
)  # fmt: skip


# -- the table of modules, read ----------------------------------------------------------------------------------------


class ModuleReader:
    """Reads the table of modules.

    Parameters and buffers are shared with `originals`, the modules of the model by number. Those that are `live` have
    no graph in the file and run themselves.
    """

    def __init__(
        self, item: JsonValue, tensors: Sequence[Tensor], originals: Mapping[int, Module], live: set[int], root: int
    ) -> None:
        self._tensors = tensors
        self._originals = originals
        self._live = live
        self._root = root
        self.modules: list[Module] = []
        self._heights: list[int] = []
        entries = [entry.fields(*_FIELDS, optional=("read",)) for entry in item.items()]
        for number, fields in enumerate(entries):
            self._add(number, fields)
        # Calls between modules may have cycles.
        for module, fields in zip(self.modules, entries, strict=True):
            for name, other in _pairs(fields["called"]):
                if not isinstance(module, LoadedModule) or name.text()[: len(ALIAS)] != ALIAS:
                    raise name.error(f"{name.text()[:60]!r} is not a name for a module that is called")
                module.__dict__[name.text()] = self.modules[other.whole(0, len(self.modules) - 1)]

    def _add(self, number: int, fields: dict[str, JsonValue]) -> None:
        children = self._children(number, fields["children"])
        original = self._originals.get(number)
        if number in self._live and original is not None:
            self.modules.append(original)
            return
        name = fields["class"].text()
        is_container = fields["is_container"].flag()
        if not name.isidentifier() or name.startswith("__") or (is_container and name not in CONTAINERS):
            raise fields["class"].error(f"{name[:60]!r} is not the name of a class")
        is_root = number == self._root
        module = CONTAINERS[name]() if is_container and not is_root else _loaded_class(name, is_root)()
        module.training = fields["training"].flag()
        module._modules.update(children)
        self._fill(module, fields, original)
        if isinstance(module, LoadedModule):
            self._add_attributes(module, fields)
            if "read" in fields:
                module.__dict__["stored_read"] = fields["read"].value
        elif fields["attributes"].items() or fields["paths"].items():
            raise fields["attributes"].error(f"a {name} has no graph that could need them")
        self.modules.append(module)

    def _children(self, number: int, item: JsonValue) -> dict[str, Module | None]:
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

    def _fill(self, module: Module, fields: dict[str, JsonValue], original: Module | None) -> None:
        """Sets the parameters and buffers of the module. It shares those of the model."""
        parameters: dict[str, Parameter | None] = {}
        buffers: dict[str, Tensor | None] = {}
        taken: dict[str, Any] = dict(module._modules)
        for name, tensor in _pairs(fields["parameters"]):
            found = None if tensor.is_null else self._tensor(tensor)
            if found is not None and not isinstance(found, Parameter):
                raise tensor.error("a parameter must be a parameter in the table of tensors, too")
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

    def _add_attributes(self, module: LoadedModule, fields: dict[str, JsonValue]) -> None:
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

    def _tensor(self, item: JsonValue) -> Tensor:
        return self._tensors[item.whole(0, len(self._tensors) - 1)]


def _pairs(item: JsonValue) -> list[tuple[JsonValue, JsonValue]]:
    return [(pair.items(2)[0], pair.items(2)[1]) for pair in item.items()]


def _new_name(item: JsonValue, taken: Mapping[str, Any]) -> str:
    name = item.text()
    is_odd = not name or "." in name or "\\" in name or not name.isprintable() or name.startswith("__")
    if is_odd or name in taken:
        raise item.error(f"a part of a module cannot be called {name[:60]!r}{' twice' if name in taken else ''}")
    return name
