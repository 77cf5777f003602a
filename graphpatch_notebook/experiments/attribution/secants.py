"""The derivatives of the secant: means of the Jacobian between two runs, which account for all of a result's change.

A rule is given a `PairedCall`: one call of a torch function, with its inputs in both runs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import permutations
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter, functional

from graphpatch_notebook.capture import decomposition_of
from graphpatch_notebook.capture.frame_recorder import function_name, raw_name, writes_in_place
from graphpatch_notebook.capture.records import map_leaves
from graphpatch_notebook.torch_compat import base_of, is_overload, overload_path

if TYPE_CHECKING:
    from graphpatch_notebook.experiments.attribution.rules import DerivativeRules

# -- calls -------------------------------------------------------------------------------------------------------------


class PairedCall:
    """One call of a function in the corrupted run, and its counterpart in the clean run.

    Its *inputs* are all floating-point tensors among its arguments, in order.

    Attributes:
        function: The function, as torch dispatches it.
        rule: How it is differentiated.
        rules: The rules of the run.
        inputs: The inputs, as the model gives them; none in the clean run.
        signature: The name of the function and the shapes of the inputs, which the two runs have in common.
        corrupted: The inputs in the corrupted run.
        clean: The inputs in the clean run; those of the corrupted run for methods without one.
        differs: Which inputs differ between the runs.
        held: The inputs of this call, as they were when it ran.
        kind: The type of the result, if that is not a tensor.
        counterpart: The same call in the clean run.
    """

    counterpart: PairedCall

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rule: Rule,
        rules: DerivativeRules,
    ) -> None:
        self.function, self.rule, self.rules = function, rule, rules
        self.is_in_place = is_in_place(function, args, kwargs)
        self.inputs: list[Tensor] = []
        self._args, self._kwargs = map_leaves((args, dict(kwargs)), self._template)
        self.signature = (family_name(function), *(tuple(x.shape) for x in self.inputs))
        self.held: list[Tensor] = []
        self.corrupted: tuple[Tensor, ...] = ()
        self.clean: tuple[Tensor, ...] = ()
        self.differs: tuple[bool, ...] = ()
        self.kind: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        """Returns the result of the function for other inputs, which do not change."""
        return self.take(self.function, *inputs)

    def __str__(self) -> str:
        name, *shapes = self.signature
        return f"{name} of {', '.join(map(str, shapes))}"

    def take(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Returns the result of another function for the arguments of this call, with other inputs."""
        if self.is_in_place and function is self.function:
            inputs = (inputs[0].clone(), *inputs[1:])
        given = (self._args, self._kwargs)
        args, kwargs = map_leaves(given, lambda value: inputs[value.number] if type(value) is _Input else value)
        return function(*args, **kwargs)

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Returns an argument that is not a tensor, by its position or its name."""
        return self._args[index] if len(self._args) > index else self._kwargs.get(name, default)

    def _template(self, value: Any) -> Any:
        if _is_input(value):
            self.inputs.append(value)
            return _Input(len(self.inputs) - 1)
        return value


@dataclass(frozen=True, slots=True)
class _Input:
    """Marks where the arguments of a call have an input."""

    number: int


def _is_input(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def inputs_in(arguments: Iterable[Any]) -> list[Tensor]:
    """Returns all floating-point tensors among the arguments of a call, in order."""
    leaves: list[Any] = []
    for each in arguments:
        if isinstance(each, (tuple, list, dict, slice)):
            map_leaves(each, leaves.append)
        else:
            leaves.append(each)
    return list(filter(_is_input, leaves))


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
        is_exact: Whether the derivative explains the whole change. If not, the function is named as a fallback.
        refusal: Whether the rule does not fit a call.
    """

    surrogate: Surrogate
    is_multilinear: bool = False
    is_exact: bool = True
    refusal: Callable[[PairedCall], bool] | None = None


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
def _in_place_by(function: Callable[..., Any]) -> tuple[bool, int]:
    """Returns whether a function always writes into its first argument, and the position of its argument `inplace`.

    The position is a large number if the function does not have it.
    """
    try:
        place = list(inspect.signature(function).parameters).index("inplace")
    except (TypeError, ValueError):
        place = 1000
    return writes_in_place(raw_name(function), {}), place


def is_in_place(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call writes into its first argument."""
    always, place = _in_place_by(function)
    return always or kwargs.get("inplace") is True or (len(args) > place and args[place] is True)


def is_weight(value: Tensor) -> bool:
    """Whether a tensor is a parameter or a part of one, which is the same in all runs."""
    return isinstance(value, Parameter) or isinstance(base_of(value), Parameter)


def has_memory(value: Tensor) -> bool:
    """Whether a tensor is an ordinary one: not sparse, and not a wrapper of `torch.func`."""
    try:
        value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return value.layout is torch.strided


# -- derivatives -------------------------------------------------------------------------------------------------------


def path_average(call: PairedCall, *inputs: Tensor, points: int = 8) -> Any:
    """The mean of the Jacobian on the straight line between the runs: exact for polynomials of degree `2 * points`."""
    total: Any = None
    for at, weight in _gauss(points):
        between = (
            _between(x, clean, at) if differs else x
            for x, clean, differs in zip(inputs, call.clean, call.differs, strict=True)
        )
        result = call(*between)
        if points > 1:
            result = [weight * part for part in result] if isinstance(result, (tuple, list)) else weight * result
        total = result if total is None else _sum(total, result)
    return total


def multilinear(call: PairedCall, *inputs: Tensor) -> Any:
    """The derivative at the mean of the two runs, which is exact for products of two inputs, and for squares.

    For products of more inputs that differ, the mean of the derivatives at several points, which is exact as well.
    """
    return path_average(call, *inputs, points=max(1, (sum(call.differs) + 1) // 2))


def quotient(call: PairedCall, *inputs: Tensor) -> Tensor:
    """The difference quotient of an elementwise function, and its derivative where the two runs coincide.

    For several inputs that differ, the change is shared as by Shapley: the mean over the orders in which they change.
    """
    different = [number for number, differs in enumerate(call.differs) if differs]
    corrupted, clean = torch.broadcast_tensors(*call.corrupted), torch.broadcast_tensors(*call.clean)
    orders = list(permutations(different))
    total: Any = 0
    for order in orders:
        values = list(corrupted)
        for number in order:
            total = total + inputs[number] * (_slope(call, number, values) / len(orders))
            values[number] = clean[number]
    return cast("Tensor", total)


def _slope(call: PairedCall, number: int, inputs: list[Tensor]) -> Tensor:
    """Returns the slope of an elementwise function between the two runs, as one input changes."""

    def function(value: Tensor) -> Any:
        return call(*inputs[:number], value, *inputs[number + 1 :])

    corrupted, clean = call.corrupted[number].expand_as(inputs[number]), call.clean[number].expand_as(inputs[number])
    middle = _between(corrupted, clean, 0.5).contiguous().requires_grad_()
    result = function(middle)
    (derivative,) = torch.autograd.grad(result, middle, torch.ones_like(result))
    with torch.no_grad():
        clean_result, corrupted_result = function(clean), function(corrupted)
        run, rise = _gap(clean, corrupted), _gap(clean_result, corrupted_result)
        # The quotient of close values is mostly rounding error; the derivative is used instead.
        size = torch.maximum(clean_result.abs(), corrupted_result.abs()) + corrupted.abs()
        error = (derivative * run - rise).abs()
        is_close = (error <= 4 * torch.finfo(rise.dtype).eps * size).logical_or_(run.bool().logical_not_())
        return torch.where(is_close, derivative, rise / run)


def softmax(call: PairedCall, scores: Tensor) -> Tensor:
    """The Jacobian of softmax at the logarithmic mean of the two results.

    It explains the whole change, is indifferent to a shift of all scores, and stays within the bounds of the derivative
    whatever the scores are. The quotients of exp and of the division conserve too, but with large scores they are
    unrelated to the derivative.
    """
    weights, dim = _mean_pattern(call)
    scores = _finite(scores)
    return weights * (scores - _weighted(scores, weights, dim))


def log_softmax(call: PairedCall, scores: Tensor) -> Tensor:
    """The scores, less their mean under the logarithmic mean of the two patterns."""
    return _finite(scores) - _weighted(_finite(scores), *_mean_pattern(call))


def logsumexp(call: PairedCall, scores: Tensor) -> Tensor:
    """The mean of the scores under the logarithmic mean of the two patterns."""
    weights, dim = _mean_pattern(call)
    result = _weighted(_finite(scores), weights, dim)
    return result if call.argument(2, "keepdim", False) else result.squeeze(dim)


def _mean_pattern(call: PairedCall) -> tuple[Tensor, Any]:
    """Returns `(p - q) / (log p - log q)` of the patterns of the two runs, and their dimension."""
    dim = call.argument(1, "dim")
    logs = [scores - scores.logsumexp(dim, keepdim=True) for scores in (call.clean[0], call.corrupted[0])]
    apart = (logs[0] - logs[1]).abs()
    ratio = torch.where(apart == 0, 1, -torch.expm1(-apart) / torch.where(apart == 0, 1, apart))
    return (torch.maximum(*logs).exp() * ratio).nan_to_num(0.0), dim  # masked in both runs


def _weighted(scores: Tensor, weights: Tensor, dim: Any) -> Tensor:
    total = weights.sum(dim, keepdim=True)
    return (weights * scores).sum(dim, keepdim=True) / torch.where(total == 0, 1, total)


def _finite(scores: Tensor) -> Tensor:
    return torch.where(torch.isinf(scores), 0, scores)


def by_steps(steps: Callable[..., Any]) -> Surrogate:
    """Returns the rule that decomposes a function: `steps` has its signature, and each step has its own rule."""

    def surrogate(call: PairedCall, *inputs: Tensor) -> Any:
        rules = type(call.rules)(call.rules.method)
        with torch.no_grad(), rules.recording():
            call.take(steps, *call.clean)
        inputs = tuple(x if differs else x.detach() for x, differs in zip(inputs, call.differs, strict=True))
        with rules.applied():
            return call.take(steps, *inputs)

    return surrogate


def _between(x: Tensor, clean: Tensor, at: float) -> Tensor:
    return torch.add(x, _gap(clean, x.detach()), alpha=at)


def _gap(clean: Tensor, corrupted: Tensor) -> Tensor:
    """Returns the difference, which is 0 where both are the same infinity."""
    gap = clean - corrupted
    if gap.is_complex():
        return torch.where(clean == corrupted, 0, gap)
    return gap.nan_to_num_(0.0, math.inf, -math.inf)  # much faster than `where`


@cache
def _gauss(points: int) -> list[tuple[float, float]]:
    """Returns the points and weights of Gauss-Legendre quadrature between 0 and 1."""
    at, weights = np.polynomial.legendre.leggauss(points)
    return [(float(x + 1) / 2, float(w) / 2) for x, w in zip(at, weights, strict=True)]


def _sum(one: Any, other: Any) -> Any:
    return [a + b for a, b in zip(one, other, strict=True)] if isinstance(one, list) else one + other


# -- composite functions in plain torch, with the signatures of torch: each step has a rule of its own -----------------


def attention(*args: Any, **kwargs: Any) -> Any:
    """`scaled_dot_product_attention`."""
    decomposition = decomposition_of(functional.scaled_dot_product_attention)
    assert decomposition is not None
    return decomposition.steps(is_fused=True)(*args, **kwargs)


# -- norms -------------------------------------------------------------------------------------------------------------


def _standardized(x: Tensor, dims: tuple[int, ...], eps: float, *, center: bool = True) -> Tensor:
    x = x - x.mean(dims, keepdim=True) if center else x
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    return _scaled(_standardized(x, tuple(range(-len(tuple(normalized_shape)), 0)), eps), weight, bias)


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _scaled(_standardized(x, tuple(range(-len(tuple(normalized_shape)), 0)), eps, center=False), weight, None)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    standardized = _standardized(x.reshape(x.shape[0], groups, -1), (-1,), eps).reshape(x.shape)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return _scaled(standardized, *(None if each is None else each.reshape(shape) for each in (weight, bias)))


def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **_: Any) -> Tensor:
    return x / norm(x, p, dim, keepdim=True).clamp_min(eps)


def norm(x: Tensor, _p: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    """`torch.norm`, `torch.linalg.vector_norm`, and `torch.linalg.norm` of vectors: the root of the sum of squares."""
    return x.square().sum(tuple(range(x.dim())) if dim is None else dim, keepdim=keepdim).sqrt()


def refused_norm(call: PairedCall) -> bool:
    """Whether a norm is another one: of a matrix, or not the root of a sum of squares."""
    order, dim = call.argument(1, "ord", call.argument(1, "p")), call.argument(2, "dim")
    count = call.inputs[0].dim() if dim is None else 1 if isinstance(dim, int) else len(dim)
    is_matrix = call.signature[0] == "linalg_norm" and count > 1
    return order not in (None, "fro") and (order != 2 or is_matrix)


def std(*args: Any, **kwargs: Any) -> Tensor:
    return torch.var(*args, **kwargs).sqrt()


def _scaled(normed: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


# -- the largest of several --------------------------------------------------------------------------------------------


def _max_or_min(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, choose: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """`torch.max` and `torch.min` in their three forms."""
    if isinstance(dim, Tensor):
        return choose(x, dim)
    found = _folded(x, () if dim is None else dim, keepdim, choose=choose)
    return found if dim is None else (found, None)


def _folded(x: Tensor, dim: Any = (), keepdim: bool = False, *, choose: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Returns the result of a choice among the entries along dimensions, made pair by pair."""
    dims = [dim] if isinstance(dim, int) else list(dim) or list(range(x.dim()))
    for each in dims:
        while (size := x.shape[each]) > 1:
            middle = size // 2
            chosen = choose(x.narrow(each, 0, middle), x.narrow(each, middle, middle))
            x = chosen if size % 2 == 0 else torch.cat([chosen, x.narrow(each, size - 1, 1)], each)
    return x if keepdim else x.squeeze(tuple(dims))


largest, smallest = partial(_max_or_min, choose=torch.maximum), partial(_max_or_min, choose=torch.minimum)
amax, amin = partial(_folded, choose=torch.maximum), partial(_folded, choose=torch.minimum)


# -- others ------------------------------------------------------------------------------------------------------------


def glu(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * gate.sigmoid()


def cross_entropy(x: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("label_smoothing", None)
    return functional.nll_loss(torch.log_softmax(x, 1 if x.dim() > 1 else 0), target, *args[:5], **kwargs)
