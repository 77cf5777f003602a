"""The derivatives of RelP: relevance propagation by operation, from one run.

Denominators of norms are constants. An activation is a multiple of its input. A product gives half to each factor. An
activation that is written out (`0.5 * x * (1 + tanh(...))`) counts as one function of its *root*, the value that all of
its steps are computed from elementwise: `ElementwiseRoots` finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.capture.functions import raw_name
from graphpatch_notebook.components import operations
from graphpatch_notebook.experiments.attribution.calls import PairedCall, family_name, is_weight
from graphpatch_notebook.torch_compat import base_of

ACTIVATIONS = operations.NONLINEARITIES - {"glu", "softmax", "pow", "square", "exp"}
DENOMINATORS = frozenset("rsqrt sqrt var std norm vector_norm linalg_vector_norm linalg_norm".split())


def identity(call: PairedCall, x: Tensor, *_: Tensor) -> Tensor:
    """A multiple of the input: `(f(x) - f(0)) / x`, and the derivative where x is 0."""
    corrupted, rest = call.corrupted[0], call.corrupted[1:]
    zero = torch.zeros_like(corrupted, requires_grad=True)
    at_zero = call(zero, *rest)
    (derivative,) = torch.autograd.grad(at_zero.sum(), zero)
    is_zero = corrupted.abs() < 1e-6
    slope = (call(*call.corrupted) - at_zero).detach() / torch.where(is_zero, 1, corrupted)
    return x * torch.where(is_zero, derivative, slope)


def half(call: PairedCall, *inputs: Tensor) -> Any:
    """Half of the derivative, as a product shares it among its factors."""
    return call(*inputs) / 2


def constant(call: PairedCall, *inputs: Tensor) -> Any:
    """A constant. Its derivative is 0, and not missing: the steps before it have scores, too."""
    return call(*(x.detach() for x in inputs)) + 0 * sum(x.sum() for x in inputs)


def power(call: PairedCall, *inputs: Tensor) -> Any:
    """The rule of `pow`: a root is a denominator, and a whole power a product of equal factors that share it."""
    exponent = _exponent(call.function, call.argument(1, "exponent"))
    return constant(call, *inputs) if _is_root(exponent) else call(*inputs) / exponent


def refused_power(call: PairedCall) -> bool:
    """Whether a power is neither a root nor a product of equal factors."""
    exponent = _exponent(call.function, call.argument(1, "exponent"))
    return not (_is_root(exponent) or (exponent > 1 and exponent == int(exponent)))


def _exponent(function: Callable[..., Any], given: Any) -> float:
    """Returns the exponent of a call of `pow`; 1 if it is no number, or the base is."""
    is_number = isinstance(given, (int, float)) and math.isfinite(given)
    return float(given) if is_number and raw_name(function) != "__rpow__" else 1.0


def _is_root(exponent: float) -> bool:
    return abs(exponent) == 0.5


def by_first(call: PairedCall, first: Tensor, second: Tensor) -> Any:
    """A multiple of the first factor: the second, a function of it, is constant."""
    return call(first, second.detach() + 0 * second)


def by_second(call: PairedCall, first: Tensor, second: Tensor) -> Any:
    """A multiple of the second factor: the first, a function of it, is constant."""
    return call(first.detach() + 0 * first, second)


@dataclass(frozen=True, slots=True)
class Root:
    """What a value is an elementwise function of.

    Attributes:
        value: The value.
        root: The tensor that it is a function of.
        is_multiple: Whether it is a constant multiple of that.
    """

    value: Tensor
    root: Tensor
    is_multiple: bool


class ElementwiseRoots:
    """The roots of the values of a run."""

    def __init__(self) -> None:
        self._by_id: dict[int, Root] = {}
        self._constants: dict[int, Tensor] = {}

    def varies(self, value: Tensor) -> bool:
        """Whether a value has a derivative, and is not computed from weights and constants alone."""
        known = (self._constants.get(id(each)) is each for each in (value, base_of(value)) if each is not None)
        return value.requires_grad and not is_weight(value) and not any(known)

    def of(self, value: Tensor) -> Root:
        """Returns the root of a value: the value itself, unless it was computed elementwise from a single one."""
        known = self._by_id.get(id(value))
        return known if known is not None and known.value is value else Root(value, value, True)

    def pass_on(self, value: Tensor, result: Tensor) -> None:
        """Notes that a result is the same value in another form."""
        known = self.of(value)
        self._by_id[id(result)] = Root(result, result if known.root is value else known.root, known.is_multiple)
        if not self.varies(value):
            self._constants[id(result)] = result

    def note(self, function: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        """Notes the root of a result, or that it is a constant."""
        if not isinstance(result, Tensor) or not result.requires_grad:
            return
        name = family_name(function)
        given = [part for arg in args for part in (arg if isinstance(arg, (tuple, list)) else [arg])]
        given = [part for part in given if isinstance(part, Tensor)]
        varying = [self.of(part) for part in given if self.varies(part)]
        others = [part for part in given if not self.varies(part)]
        self._constants.pop(id(result), None)  # a result of an operation in place is known already
        is_root = name == "pow" and len(args) > 1 and _is_root(_exponent(function, args[1]))
        if name in DENOMINATORS or is_root or (not varying and any(part.requires_grad for part in given)):
            self._constants[id(result)] = result
        if not varying or any(root.root is not varying[0].root for root in varying):
            return
        if any(other.numel() != 1 for other in others) or result.shape != varying[0].value.shape:
            return
        if name in ACTIVATIONS or name in ("pow", "square", "exp"):
            is_multiple = False
        elif name in operations.SCALINGS:
            is_multiple = len(varying) == 1 and varying[0].is_multiple and varying[0].value is args[0]
        elif name in operations.ADDITIONS or name in ("sub", "rsub", "neg"):
            is_multiple = len(varying) == 2 and all(root.is_multiple for root in varying)
        else:
            return
        self._by_id[id(result)] = Root(result, varying[0].root, is_multiple)
