"""A patched model compiled by `torch.compile`, with the values of its patches as inputs of the compiled graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Module

from graphpatch_notebook.errors import GraphError, PatchValueError
from graphpatch_notebook.execution.plan import Entry
from graphpatch_notebook.patches.kinds import Patch, declares
from graphpatch_notebook.values import TensorSpec


class CompiledModel:
    """What `PatchableGraph.compile` returns: call it like the model.

    Each call reads the values of the patches that it was compiled with. Another value of the same shape and dtype does
    not compile again; a number counts as a tensor without dimensions.

    Attributes:
        graph: The graphs that were compiled, with the patches in them.

    Example:
        >>> from graphpatch_notebook import PatchableGraph, ReplacePatch
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2))
        >>> patch = ReplacePatch(value=2.0, slice=0)
        >>> compiled = pg.compile({"output": patch}, torch.ones(2), backend="eager")
        >>> patch.value = 3.0
        >>> compiled(torch.ones(2))
        tensor([3., 1.])
    """

    def __init__(
        self, graph: fx.GraphModule, patches: CompiledPatches, model: Module, backend: Any, mode: str | None
    ) -> None:
        self.graph = graph
        self._patches = patches
        # The graph refers to these, so writes into weights have their effect, and other parameters or modules do not.
        self._parts = [(name, module, _parts_of(module)) for name, module in model.named_modules()]
        self._compiled: Callable[..., Any] = torch.compile(graph, fullgraph=True, backend=backend, mode=mode)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled model with the current values of the patches.

        Raises:
            GraphError: The mode of the model (train or eval), a parameter or a module is another one than when it was
                compiled; or the inputs differ from those.
            PatchValueError: The value of a patch does not fit, or is neither a tensor nor a number.
        """
        __tracebackhide__ = True
        for name, module, parts in self._parts:
            if not _are_same(parts, _parts_of(module)):
                raise GraphError(
                    f"{name or 'the model'!r} has another mode (train or eval), or other parameters or modules, than "
                    "when it was compiled: call pg.compile again"
                )
        self._patches.read()
        try:
            return self._compiled(*args, **kwargs)
        except RuntimeError:
            # The compiler hides why the graph refused inputs or values behind an error of its own: without it, the
            # graph raises that error itself.
            self.graph(*args, **kwargs)
            raise


def _parts_of(module: Module) -> list[Any]:
    return [module.training, *module._parameters.values(), *module._modules.values()]


def _are_same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))


class CompiledPatches:
    """The patches in a compiled graph: copies of the user's, whose values are always tensors.

    Compilers write numbers into the code, so they would compile again for each other number.

    Args:
        patch_map: The user's patch map.
        entries: Its entries.

    Attributes:
        patch_map: The same with the copies.
    """

    def __init__(self, patch_map: Mapping[Any, Any], entries: Sequence[Entry]) -> None:
        self._copies: dict[int, _CopiedPatch] = {}
        for entry in entries:
            for patch in entry.patches:
                self._copies.setdefault(id(patch), _CopiedPatch(patch)).specs.append(entry.target.spec)
        self.patch_map = {
            path: self._copied(given) if isinstance(given, Patch) else [*map(self._copied, given)]
            for path, given in patch_map.items()
        }
        self.read()

    def read(self) -> None:
        """Reads the fields of the user's patches."""
        for copied in self._copies.values():
            copied.read()

    def _copied(self, given: Patch[Any]) -> Patch[Any]:
        known = self._copies.get(id(given))
        return given if known is None else known.copy


class _CopiedPatch:
    """A patch of the user, and the copy of it in the graph.

    Attributes:
        copy: The copy.
        specs: The values that it is for.
    """

    def __init__(self, given: Patch[Any]) -> None:
        self.copy: Patch[Any] = object.__new__(type(given))
        self.specs: list[Any] = []
        self._given = given
        self._read: list[Any] = []

    def read(self) -> None:
        """Reads the fields of the user's patch."""
        fields = vars(self._given)
        if _are_same(self._read, [*fields.values()]):
            return
        self._read = [*fields.values()]
        value = fields.get("value")
        if value is not None and not isinstance(value, Tensor):
            fields = {**fields, "value": self._as_tensor(value)}
        vars(self.copy).update(fields)

    def _as_tensor(self, value: Any) -> Tensor:
        if not isinstance(value, (bool, int, float, complex)):
            kind = type(self._given).__name__
            raise PatchValueError(f"{kind}: value must be a tensor or a number, not {type(value).__name__}")
        device = self.specs[0].device
        dtype = None
        if not isinstance(value, complex) and all(spec.dtype.is_floating_point for spec in self.specs):
            # A tensor without dimensions does not change the dtype of others, so it can be as exact as the number.
            dtype = torch.float32 if device.type == "mps" else torch.float64
        return torch.tensor(value, dtype=dtype, device=device)


def check_compilable(entries: Sequence[Entry]) -> None:
    """Checks that patches can be parts of a compiled graph.

    Raises:
        GraphError: Some cannot; the message names them all.
    """
    problems = [f"{entry.target.text!r}: {problem}" for entry in entries if (problem := _problem_of(entry)) is not None]
    if problems:
        raise GraphError("; ".join(problems))


def _problem_of(entry: Entry) -> str | None:
    if not isinstance(entry.target.spec, TensorSpec):
        return f"the value is {entry.target.spec}, which compiled code holds as a constant; patch a tensor instead"
    for patch in entry.patches:
        if not declares(patch, "is_pure"):
            return (
                f"a {type(patch).__name__} may run other Python code in each call, or keep what it sees, and compiled "
                "code does not run Python; use ZeroPatch, AddPatch or ReplacePatch, or a class of your own that sets "
                "is_pure = True (torch.compile(pg.to_fx(...)) compiles what it can of other patches)"
            )
    return None
