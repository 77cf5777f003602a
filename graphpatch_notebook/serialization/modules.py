"""The modules of a loaded graph: what the model's classes were is not needed, only what they held."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, Sequential

from graphpatch_notebook.capture.forward_swap import observer
from graphpatch_notebook.capture.records import InputParameter
from graphpatch_notebook.errors import StoredFormError, UnstoredFrameError
from graphpatch_notebook.interrupts import holding
from graphpatch_notebook.serialization.forms import Guard

CONTAINERS: dict[str, type[Module]] = {cls.__name__: cls for cls in (ModuleDict, ModuleList, Sequential)}
"""The classes of torch that only hold modules: these are what they were."""

ALIAS = "_graphpatch_"
"""How the names begin by which graphs reach what has no name that Python can write."""


class StoredForward:
    """`forward` of a module whose code is not there: graphs run in its place. Has the signature that it had.

    Args:
        class_name: The class of the module.
        parameters: The parameters of its `forward`.
        reason: Why it cannot run, and what to do.
    """

    def __init__(self, class_name: str, parameters: Sequence[InputParameter], reason: str) -> None:
        self._class_name = class_name
        self._reason = reason
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(p.name, p.kind, default=p.default) for p in parameters]
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: there is nothing to run."""
        raise UnstoredFrameError(f"this {self._class_name} cannot run: {self._reason}")


_NOT_CALLED = (
    "the file has no graph for it, as the example inputs did not reach it; only the model that was saved can run it"
)


class LoadedModule(Module):
    """Stands for a module of the model that was saved: its parameters, buffers, children and tensor attributes.

    Attributes:
        tensor_paths: For names that graphs use, the attribute paths that these stand for.
    """

    tensor_paths: dict[str, str]
    forward: Callable[..., Any] = StoredForward("module", (), _NOT_CALLED)

    def __init__(self) -> None:
        super().__init__()
        state = self.__dict__
        state["tensor_paths"] = {}
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
    """The root of a loaded graph: what it cannot tell of, the model runs where it is given.

    Its own attributes have names that no model gives to its submodules.
    """

    _stored_guard: Guard
    _stored_model: Module | None
    _stored_edits: bool

    def set_guard(self, guard: Guard, model: Module | None, *, has_edits: bool) -> None:
        """Makes `guard` watch all calls.

        Args:
            guard: Says for which calls the graph holds.
            model: The model, if it is given.
            has_edits: Whether some graphs are no records of the model, which then cannot run in their place.
        """
        state = self.__dict__
        state["_stored_guard"] = guard
        state["_stored_model"] = model
        state["_stored_edits"] = has_edits
        self.register_forward_pre_hook(Refusal(guard, _advice(model, has_edits)), with_kwargs=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph, or the model in its place."""
        if self in _checked.get() or "_stored_guard" not in self.__dict__:  # it may call itself
            return super().__call__(*args, **kwargs)
        model, has_edits = self._stored_model, self._stored_edits or is_edited_run()
        problem = self._stored_guard.problem(args, kwargs, _advice(model, has_edits))
        if problem is not None:
            if model is None or has_edits or is_patched_run():
                raise StoredFormError(f"the loaded graph does not hold for this call: {problem}")
            return model(*args, **kwargs)
        with holding(_checked, (*_checked.get(), self)):
            return super().__call__(*args, **kwargs)


_checked: ContextVar[tuple[Module, ...]] = ContextVar("graphpatch_checked_roots", default=())


def _advice(model: Module | None, has_edits: bool) -> str:
    """Returns what can be done about calls that the graph does not hold for, beside making another graph."""
    if has_edits:
        return "; the model cannot run such calls instead, as graphs were edited or are custom, unlike its own code"
    if model is None:
        return (
            ", or give the model that runs all calls that the graph does not cover: "
            "PatchableGraph.load(file, model=model)"
        )
    return "; without patches, the model that load was given runs such calls of the PatchableGraph"


class Refusal:
    """The forward pre-hook that refuses calls which a guard finds a problem with: those that graph modules make."""

    def __init__(self, guard: Guard, advice: str) -> None:
        self._guard = guard
        self._advice = advice

    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises: if there is a problem."""
        problem = None if module in _checked.get() else self._guard.problem(args, kwargs, self._advice)
        if problem is not None:
            raise StoredFormError(f"the loaded graph does not hold for this call: {problem}")


def is_patched_run() -> bool:
    """Whether patches are active in the run that is under way."""
    run = observer.get()
    return getattr(getattr(run, "plan", None), "count", 0) > 0


def is_edited_run() -> bool:
    """Whether a graph that was edited takes part in the run that is under way."""
    plan = getattr(observer.get(), "plan", None)
    return plan is not None and any(part.frame.is_edited for part in plan.walk())


def module_at(module: Module, path: str) -> Module | None:
    """Returns the module at an attribute path; `None` where there is none."""
    found: Module | None = module
    for name in path.split(".") if path else ():
        found = found._modules.get(name) if found is not None else None
    return found


def tensor_at(module: Module, path: str) -> Any:
    """Returns the parameter or buffer at an attribute path, whatever its names are; `None` where there is none."""
    *names, last = path.split(".")
    holder: Module | None = module
    for name in names:
        holder = holder._modules.get(name) if holder is not None else None
    if holder is None:
        return None
    found = holder._parameters.get(last)
    return found if found is not None else holder._buffers.get(last)


@cache
def loaded_class(name: str, is_root: bool) -> type[LoadedModule]:
    """Returns the class of loaded modules that goes by the name of the original class."""
    base = LoadedRoot if is_root else LoadedModule
    return type(name, (base,), {"__doc__": base.__doc__, "__module__": __name__})


def new_module(name: str, is_container: bool, is_root: bool) -> Module:
    """Returns an empty module that stands for one of the class `name`."""
    return CONTAINERS[name]() if is_container and not is_root else loaded_class(name, is_root)()


_OWN_NAMES = frozenset({*dir(Module), *vars(LoadedModule()), "tensor_paths", *LoadedRoot.__annotations__})


def is_writable(path: str) -> bool:
    """Whether graphs can reach `path` as Python writes it: names that are no keywords, and not those of any module."""
    parts = path.split(".")
    return all((part.isidentifier() or part.isdecimal()) and not keyword.iskeyword(part) for part in parts) and not any(
        part in _OWN_NAMES or part.startswith("__") for part in parts
    )


def own_tensor_attribute(module: Module, name: str) -> Tensor | None:
    """Returns the tensor that `module` has as a plain attribute, if it has."""
    found = module.__dict__.get(name)
    return found if isinstance(found, Tensor) else None
