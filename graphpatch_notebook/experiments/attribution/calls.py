"""Calls of torch's functions: their inputs, their names in all forms, and what the model overwrites later."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from graphpatch_notebook.capture.functions import function_name, raw_name, writes_in_place
from graphpatch_notebook.checks.sharding import is_distributed
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.torch_compat import base_of, is_awaited, is_overload, overload_path

if TYPE_CHECKING:
    from graphpatch_notebook.experiments.attribution.rules import DerivativeRules


class PairedCall:
    """One call of a function in the corrupted run, and its counterpart in the clean run.

    Its *inputs* are all floating-point tensors among its arguments, in order.

    Attributes:
        function: The function, as torch dispatches it.
        inputs: The inputs, as the model gives them.
        corrupted: The inputs in the corrupted run.
        clean: The inputs in the clean run; those of the corrupted run for methods without one.
        results: The results of the two runs (clean, corrupted), if they were kept.
        differs: Which inputs differ between the runs.
        surrogate: What is used in place of the rule's.
        rules: The rules of the run.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], rules: DerivativeRules
    ) -> None:
        self.function = function
        self.rules = rules
        self._inputs: list[Tensor] = []
        self._args = tuple(self._template(value) for value in args)
        self._kwargs = {key: self._template(value) for key, value in kwargs.items()}
        self.inputs: tuple[Tensor, ...] = tuple(self._inputs)
        self.corrupted: tuple[Tensor, ...] = ()
        self.clean: tuple[Tensor, ...] = ()
        self.results: tuple[Tensor, Tensor] | None = None
        self.differs: tuple[bool, ...] = ()
        self.surrogate: Surrogate | None = None

    def __call__(self, *inputs: Tensor) -> Any:
        """Returns the result of the function for other inputs, which do not change."""
        return self.take(self.function, *inputs)

    def take(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Returns the result of another function for the arguments of this call, with other inputs."""
        if self.is_in_place and function is self.function:
            inputs = (inputs[0].clone(), *inputs[1:])
        args = tuple(_filled(value, inputs) for value in self._args)
        return function(*args, **{key: _filled(value, inputs) for key, value in self._kwargs.items()})

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Returns an argument that is not a tensor, by its position or its name."""
        return self._args[index] if len(self._args) > index else self._kwargs.get(name, default)

    @property
    def is_in_place(self) -> bool:
        """Whether the call writes into its first argument."""
        return is_in_place(self.function, self._args, self._kwargs)

    def _template(self, value: Any) -> Any:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            self._inputs.append(value)
            return _Input(len(self._inputs) - 1)
        if type(value) in (tuple, list):
            return type(value)(map(self._template, value))
        return value


@dataclass(frozen=True, slots=True)
class _Input:
    """Marks where the arguments of a call have an input."""

    number: int


def _filled(value: Any, inputs: Sequence[Tensor]) -> Any:
    if isinstance(value, _Input):
        return inputs[value.number]
    return type(value)(_filled(item, inputs) for item in value) if type(value) in (tuple, list) else value


Surrogate: TypeAlias = Callable[..., Any]
"""Takes a `PairedCall` and its inputs; returns a result with the derivative that the call gets, not its value."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a function is differentiated.

    Attributes:
        surrogate: Takes a `PairedCall` and its inputs (the values of the corrupted run, which require gradients).
            Returns a tensor of the shape of the result, whose derivative the call gets. It runs in backward.
        is_multilinear: Whether the function is linear in each input: where only one differs between the runs, torch's
            own derivative is exact, and is used.
        keeps_result: Whether `PairedCall.results` are of use.
        is_exact: Whether the derivative explains the whole change. If not, the function is named as a fallback.
        refusal: Whether the rule does not fit a call.
    """

    surrogate: Surrogate
    is_multilinear: bool = False
    keeps_result: bool = False
    is_exact: bool = True
    refusal: Callable[[PairedCall], bool] | None = None

    def fits(self, call: PairedCall) -> bool:
        """Whether it can be used for a call."""
        is_refused = not call.inputs or not all(map(has_memory, call.inputs))
        return not is_refused and (self.refusal is None or not self.refusal(call))


@cache
def family_name(function: Callable[..., Any]) -> str:
    """Returns the name that all forms of a function share: function, method, operator, in-place method."""
    if is_overload(function) and not str(overload_path(function)).startswith("aten."):
        return str(overload_path(function))
    raw, name = raw_name(function), function_name(function)
    if raw.startswith("__") and name[:1] in "ir" and name[1:] in _OPERATORS:  # __iadd__, __radd__
        return name[1:]
    return name.rstrip("_") or name


_OPERATORS = frozenset("add sub mul div truediv matmul pow floordiv mod".split())


@cache
def _place_of_inplace(function: Callable[..., Any]) -> int | None:
    """Returns the position of the argument `inplace`, if the function has it."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def is_in_place(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call writes into its first argument."""
    if writes_in_place(raw_name(function), dict(kwargs)):
        return True
    place = _place_of_inplace(function)
    return place is not None and len(args) > place and args[place] is True


class Held:
    """A tensor as it is now: `HeldTensors` copies it before the model writes into it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class HeldTensors:
    """The tensors that are held, by their storage, so that they can be copied before the model writes into them."""

    def __init__(self) -> None:
        self._by_storage: dict[int, list[Held]] = {}

    def hold(self, tensor: Tensor) -> Held:
        """Returns a tensor as it is now."""
        if is_distributed(tensor):
            raise ExperimentError(
                'the model computes with DTensors, which derivative rules cannot follow: use method="gradient", or a '
                "plan whose modules return local tensors (use_local_output=True)"
            )
        if is_awaited(tensor):
            tensor = tensor.detach().clone()  # which waits for it
        held = Held(tensor)
        self._by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(held)
        return held

    def before(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copies what the call is about to overwrite."""
        if self._by_storage and is_in_place(function, args, kwargs):
            target = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)), None)
            if target is not None and has_memory(target):
                for held in self._by_storage.pop(target.untyped_storage().data_ptr(), ()):
                    held.tensor = held.tensor.clone()


def is_weight(value: Tensor) -> bool:
    """Whether a tensor is a parameter or a part of one, which is the same in all runs."""
    return isinstance(value, Parameter) or isinstance(base_of(value), Parameter)


def has_storage(value: Tensor) -> bool:
    """Whether a tensor has memory: wrappers of `torch.func` do not."""
    try:
        value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def has_memory(value: Tensor) -> bool:
    """Whether a tensor is an ordinary one: not sparse, and not a wrapper of `torch.func`."""
    return value.layout is torch.strided and has_storage(value)
