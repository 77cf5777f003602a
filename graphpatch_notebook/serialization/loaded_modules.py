"""The modules of a loaded graph: what the model's modules held, without their code. The root refuses other calls.

A graph is a snapshot of the model in the example: the root checks the structure of its inputs, plain values, dtypes,
fixed sizes and modes before a call; steps in the graphs check what the model's code read of sizes and values.
"""

from __future__ import annotations

import dataclasses
import inspect
import keyword
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache, cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Module, ModuleDict, ModuleList, Sequential

from graphpatch_notebook.capture.held_values import module_at
from graphpatch_notebook.capture.inputs import bind, signature_with
from graphpatch_notebook.capture.observers import observer
from graphpatch_notebook.capture.records import Frame, InputParameter
from graphpatch_notebook.checks.call_signature import Aspect, CallSignature, Settings
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.graphs.generated_code import generate
from graphpatch_notebook.serialization.functions import REPAIR
from graphpatch_notebook.torch_compat import set_grad_enabled

CONTAINERS: dict[str, type[Module]] = {cls.__name__: cls for cls in (ModuleDict, ModuleList, Sequential)}
"""The classes of torch that only hold modules: these keep their class."""

ALIAS = "_graphpatch_"
"""The prefix of names that graphs use for what Python cannot reach by its own name."""


class StoredForward:
    """`forward` of a loaded module: runs its graph, or says for what `reason` it has none that it could run alone.

    It has the signature of the original.
    """

    def __init__(self, module: Module, parameters: Sequence[InputParameter], reason: str) -> None:
        self._module = module
        self._reason = reason
        self._code: GraphCode | None = None
        self.__signature__ = signature_with(parameters)

    def set_graph(self, graph: fx.Graph | None) -> None:
        """Sets the graph that it runs."""
        self._code = None if graph is None else GraphCode(graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph."""
        if self._code is None:
            raise GraphError(f"this {type(self._module).__name__} cannot run: {self._reason}")
        had_gradients = torch.is_grad_enabled()
        try:
            return self._code.function(self._module, *args, **kwargs)[0]
        finally:  # the end of `with torch.no_grad():` is a step, which did not run if there was an error
            if torch.is_grad_enabled() is not had_gradients:
                set_grad_enabled(had_gradients)


class GraphCode:
    """The code of a graph, generated when it first runs. Copies share it, as it is a function of the module."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The code."""
        return generate(self._graph).function

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphCode:
        return self


class LoadedModule(Module):
    """A module of the saved model, without its code: its parameters, buffers and children."""

    def __init__(self) -> None:
        super().__init__()
        reason = "the example inputs did not reach it, so the file has no graph for it; only the model can run it"
        self.__dict__["forward"] = StoredForward(self, (), reason)


class RefusedCallError(GraphError):
    """A call that was refused before anything ran (caught inside the package if a model can run it)."""


class LoadedRoot(LoadedModule):
    """The root of a loaded graph. If a model is given, it runs the calls that the graph does not hold for.

    Attributes:
        runs_its_graphs: Whether it runs by itself as its graphs do: no module has several graphs, for several calls.
    """

    runs_its_graphs: bool = False
    _stored_check: CallCheck
    _stored_model: Module | None
    _has_edits: bool

    def set_calls(self, check: CallCheck, model: Module | None, *, has_edits: bool, runs_its_graphs: bool) -> None:
        """Makes `check` check all calls. With edits, the model cannot run in place of the graphs."""
        self.__dict__.update(
            _stored_check=check, _stored_model=model, _has_edits=has_edits, runs_its_graphs=runs_its_graphs
        )
        self.register_forward_pre_hook(check, with_kwargs=True)

    def answer_all(self) -> None:
        """Makes calls that the graph does not hold for errors, with a model, too."""
        self.__dict__["_stored_model"] = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph, or the model in its place."""
        if self in _checked.get() or "_stored_check" not in self.__dict__:  # it may call itself
            return super().__call__(*args, **kwargs)
        try:
            self._stored_check.check(args, kwargs)
            token = _checked.set((*_checked.get(), self))
            try:
                return super().__call__(*args, **kwargs)
            finally:
                _checked.reset(token)
        except GraphError as error:
            run, is_late = observer.get(), not isinstance(error, RefusedCallError)
            is_changed = (
                self._has_edits or getattr(run, "has_edited_graphs", False) or getattr(run, "is_patched", False)
            )
            # What ran in train mode before a late refusal may have written into buffers, and drawn random numbers.
            if self._stored_model is None or is_changed or (self.training and is_late):
                raise
        return self._stored_model(*args, **kwargs)


_checked: ContextVar[tuple[Module, ...]] = ContextVar("graphpatch_checked_roots", default=())


class CallCheck:
    """The forward pre-hook that refuses the calls which the graph of `frame` does not hold for.

    Attributes:
        sizes: The sizes of each tensor among the inputs, `None` where they may be others.
        default_dtype: The default dtype of torch when the graph was saved.
    """

    def __init__(
        self, frame: Frame, sizes: Sequence[Sequence[int | None]], default_dtype: torch.dtype, modules: Sequence[Module]
    ) -> None:
        self.sizes = sizes
        self.default_dtype = default_dtype
        self._modes = [(module, module.training) for module in modules]
        self._signature = signature_with(frame.parameters)
        self._defaults = {p.name: None if p.default is inspect.Parameter.empty else p.default for p in frame.parameters}
        found, free = CallSignature.of_frame(frame), count()
        forms = [
            dataclasses.replace(form, sizes=tuple(f"size_{next(free)}" if size is None else size for size in known))
            for form, known in zip(found.tensors, sizes, strict=True)
        ]
        settings: Settings = ((Aspect.DEFAULT_DTYPE, default_dtype), (Aspect.AUTOCAST, None))
        if frame.conditions.grad_mode is not None:
            settings += ((Aspect.GRAD_MODE, frame.conditions.grad_mode),)
        self._inputs = dataclasses.replace(found, tensors=tuple(forms), settings=settings)

    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises an error for a call through a graph module that the graph does not hold for."""
        if module not in _checked.get():
            self.check(args, kwargs)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises an error for a call that the graph does not hold for."""
        problem = self._problem(args, kwargs)
        if problem is not None:
            raise RefusedCallError(f"the loaded graph does not hold for this call: {problem}; {REPAIR}")

    def _problem(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        for module, training in self._modes:
            if module.training is not training:
                was = "train" if training else "eval"
                return f"{type(module).__name__} was in {was} mode when the graph was captured; call pg.{was}()"
        bound = bind(self._signature, args, kwargs)
        if bound is None:
            return f"the call does not fit forward{self._signature}"
        values = [bound.get(name, self._defaults[name]) for name, _ in self._inputs.inputs]
        return next(map(str, self._inputs.differences(values)), None)


def check_of(module: Module) -> CallCheck | None:
    """Returns the check of the calls of a loaded graph, by its root; `None` for other modules."""
    return module.__dict__.get("_stored_check") if isinstance(module, LoadedRoot) else None


def tensor_at(module: Module, path: str) -> Tensor | None:
    """Returns the tensor at an attribute path, even if names on it are not identifiers; or `None`."""
    parents, _, name = path.rpartition(".")
    holder = module_at(module, parents)
    if holder is None:
        return None
    held = (holder._parameters.get(name), holder._buffers.get(name), holder.__dict__.get(name))
    return next((found for found in held if isinstance(found, Tensor)), None)


@cache
def loaded_class(name: str, is_root: bool) -> type[LoadedModule]:
    """Returns the class of loaded modules with the name of the original class."""
    return type(name, (LoadedRoot if is_root else LoadedModule,), {"__module__": __name__})


_OWN_NAMES = frozenset({*dir(Module), *vars(LoadedModule()), *LoadedRoot.__annotations__})


def is_writable(path: str) -> bool:
    """Whether graphs can write `path` in Python: its names are not keywords, nor attributes that all modules have."""
    parts = path.split(".")
    return all(part.isidentifier() or part.isdecimal() for part in parts) and not any(
        keyword.iskeyword(part) or part in _OWN_NAMES or part.startswith(("__", ALIAS)) for part in parts
    )
