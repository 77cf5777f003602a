"""Frozen routing: the corrupted run makes the choices of the clean run, such as the experts of a token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.components import operations
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.attribution.secants import family_name
from graphpatch_notebook.torch_compat import without_torch_functions

Routing: TypeAlias = Literal["free", "frozen"]
_CHOICES = operations.CHOICES | {"argsort", "argmin", "min"}


class Choices:
    """The choices of a pair of runs: the indices that `topk`, `sort`, `argmax`, `max` and similar functions return.

    With frozen routing, the corrupted run takes the numbers of the clean run, and its own values at these numbers. With
    free routing, nothing is done.
    """

    def __init__(self, routing: Routing) -> None:
        if routing not in ("free", "frozen"):
            raise ExperimentError(f"routing must be 'free' or 'frozen', not {routing!r}")
        self._is_frozen = routing == "frozen"
        self._made: list[Tensor] = []

    def recorded(self) -> AbstractContextManager[Any]:
        """Returns a context manager for the model's run on the clean inputs, within the rules of the derivatives."""
        self._made = []
        return _Choosing(self._record) if self._is_frozen else nullcontext()

    def held(self) -> AbstractContextManager[Any]:
        """Returns a context manager for each other run of the model."""
        left = iter(self._made)
        return _Choosing(lambda made: self._clean(made, next(left, None))) if self._is_frozen else nullcontext()

    def _record(self, made: Tensor) -> Tensor:
        self._made.append(made)
        return made

    def _clean(self, made: Tensor, clean: Tensor | None) -> Tensor:
        if clean is None or clean.shape != made.shape:
            shown = "nothing" if clean is None else f"numbers of shape {tuple(clean.shape)}"
            raise ExperimentError(
                f"the routing cannot be frozen: the corrupted run chooses numbers of shape {tuple(made.shape)}, where "
                f"the clean run chooses {shown}"
            )
        return clean


class _Choosing(TorchFunctionMode):
    """Sets the indices that functions return, and gathers the values at these indices."""

    def __init__(self, decide: Callable[[Tensor], Tensor]) -> None:
        self._decide = decide

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, family_name(func)
        given = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)), None)
        if name not in _CHOICES or given is None or not given.is_floating_point() or "out" in kwargs:
            return func(*args, **kwargs)
        with without_torch_functions(), torch.no_grad():
            made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            return func(*args, **kwargs) if made.is_floating_point() else self._decide(made)
        numbers = self._decide(made[1])
        place = 2 if name == "topk" else 1
        dim = kwargs.get("dim", args[place] if len(args) > place else -1)
        if numbers.dim() == given.dim():
            values = given.gather(dim, numbers)
        else:  # without keepdim
            values = given.gather(dim, numbers.unsqueeze(dim)).squeeze(dim)
        return type(made)((values, numbers))
