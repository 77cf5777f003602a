"""Derivative rules: an operation keeps its value, bit for bit, and gets another derivative.

A method is a table of rules by operation. Its `DerivativeRules` are a function mode around a run:

    rules = rules_of("secant")
    with rules.recording():
        metric(model(clean))
    with rules.applied():
        result = metric(model(corrupted))
    result.backward()

**Secant.** The derivative of each operation is a mean of its Jacobian between the two runs, with which it explains the
whole change of its result: `mean Jacobian @ (clean input - corrupted input) = clean result - corrupted result`. By the
chain rule, the scores of any cut through the model then sum to the change of the metric.

- Elementwise functions: the difference quotient of the two runs (`quotient`).
- Products, and all else that is linear in each of its arguments: the derivative at the midpoint (`midpoint`).
- Softmax and its relatives: the Jacobian at the logarithmic mean of the two results (`softmax`, `logsumexp`).
- Norms, attention and other composites: their steps in plain torch, each by its own rule (`by_steps`).
- Other functions: the mean of their Jacobian along the straight line between the runs (`path_average`). This is exact
  for polynomials only, so that `DerivativeRules.fallbacks` names them.

**RelP.** The rules of layer-wise relevance propagation, from the corrupted run alone: denominators of norms are
constants, activations are multiples of their input, and each factor of a product gets half.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter, functional
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture import decomposition_of
from graphpatch_notebook.capture.functions import function_name, raw_name, writes_in_place
from graphpatch_notebook.components import operations
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.torch_compat import is_overload, overload_path

Method: TypeAlias = Literal["gradient", "integrated", "relp", "secant"]
METHODS: tuple[Method, ...] = ("gradient", "integrated", "relp", "secant")


class Call:
    """One call of a function in the corrupted run, and its counterpart in the clean run.

    Its *inputs* are all floating-point tensors among its arguments, in order.

    Attributes:
        function: The function, as torch dispatches it.
        corrupted: The inputs in the corrupted run.
        clean: The inputs in the clean run; those of the corrupted run for methods without one.
        results: The results of the two runs (clean, corrupted), if they are single tensors that were kept.
        differs: Which inputs differ between the runs.
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

    def __call__(self, *inputs: Tensor) -> Any:
        """Returns the result of the function for other inputs. It never writes into them."""
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
"""Takes a `Call` and its inputs; returns a result with the derivative that the call gets. Its value does not matter."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a function is differentiated.

    Attributes:
        surrogate: Takes a `Call` and its inputs (the values of the corrupted run, which require gradients). Returns a
            tensor of the shape of the result, whose derivative the call gets. It runs in backward.
        is_multilinear: Whether the function is linear in each input: where only one differs between the runs, torch's
            own derivative is exact, and is used.
        keeps_result: Whether `Call.results` are needed.
        is_exact: Whether the derivative explains the whole change. If not, the function is named as a fallback.
    """

    surrogate: Surrogate
    is_multilinear: bool = False
    keeps_result: bool = False
    is_exact: bool = True


# -- secants -----------------------------------------------------------------------------------------------------------


def path_average(call: Call, *inputs: Tensor, points: int = 8) -> Any:
    """The mean of the Jacobian on the straight line between the runs: exact for polynomials of degree `2 * points`."""
    total: Any = None
    for at, weight in _gauss(points):
        result = call(*(_between(x, clean, at) for x, clean in zip(inputs, call.clean, strict=True)))
        result = [weight * part for part in result] if isinstance(result, (tuple, list)) else weight * result
        total = result if total is None else _sum(total, result)
    return total


def midpoint(call: Call, *inputs: Tensor) -> Any:
    """The derivative at the mean of the two runs: exact for products of two inputs, and for squares."""
    return call(*(_between(x, clean, 0.5) for x, clean in zip(inputs, call.clean, strict=True)))


def quotient(call: Call, *inputs: Tensor) -> Tensor:
    """The difference quotient of an elementwise function, and its derivative where the two runs coincide.

    For several inputs that differ, the change is shared as by Shapley: an input changes before the others, or after.
    """
    different = [number for number, differs in enumerate(call.differs) if differs]
    corrupted, clean = torch.broadcast_tensors(*call.corrupted), torch.broadcast_tensors(*call.clean)
    terms = []
    for number in different:
        slopes = [
            _slope(
                call, number, [clean[other] if other in changed else corrupted[other] for other in range(len(clean))]
            )
            * weight
            for changed, weight in _orders(different, number)
        ]
        terms.append(inputs[number] * torch.stack(slopes).sum(0) if len(slopes) > 1 else inputs[number] * slopes[0])
    return sum(terms[1:], terms[0])


def _slope(call: Call, number: int, inputs: list[Tensor]) -> Tensor:
    """Returns the slope of an elementwise function between the two runs, as one input changes."""

    def function(value: Tensor) -> Tensor:
        result: Tensor = call(*inputs[:number], value, *inputs[number + 1 :])
        return result

    corrupted, clean = call.corrupted[number].expand_as(inputs[number]), call.clean[number].expand_as(inputs[number])
    with torch.no_grad():
        clean_result, corrupted_result = call.results or (function(clean), function(corrupted))
    middle = _between(corrupted, clean, 0.5).detach().contiguous().requires_grad_()
    (derivative,) = torch.autograd.grad(function(middle).sum(), middle)
    run, rise = clean - corrupted, clean_result - corrupted_result
    # The quotient of close values is mostly rounding, and cannot be told apart from the derivative.
    noise = 8 * torch.finfo(rise.dtype).eps * torch.maximum(clean_result.abs(), corrupted_result.abs())
    is_close = (run == 0) | ((derivative * run - rise).abs() <= noise)
    return torch.where(is_close, derivative, rise / torch.where(is_close, 1, run))


def _orders(different: Sequence[int], number: int) -> Iterator[tuple[set[int], float]]:
    """Yields which other inputs have changed before this one, and the share of such orders."""
    others = [other for other in different if other != number]
    for mask in range(2 ** len(others)):
        changed = {other for bit, other in enumerate(others) if mask >> bit & 1}
        count = len(changed)
        yield changed, math.factorial(count) * math.factorial(len(others) - count) / math.factorial(len(different))


def softmax(call: Call, scores: Tensor) -> Tensor:
    """Softmax's own Jacobian, taken at the logarithmic mean of the two results.

    It explains the whole change, is indifferent to a shift of all scores, and stays within the bounds of the derivative
    whatever the scores are. The quotients of exp and of the division conserve too, but with large scores they are
    unrelated to the derivative.
    """
    dim = call.argument(1, "dim")
    weights = _mean_pattern(call.clean[0], call.corrupted[0], dim)
    scores = _finite(scores)
    return weights * (scores - _weighted(scores, weights, dim))


def log_softmax(call: Call, scores: Tensor) -> Tensor:
    """The scores, less their mean under the logarithmic mean of the two patterns."""
    dim = call.argument(1, "dim")
    weights = _mean_pattern(call.clean[0], call.corrupted[0], dim)
    return _finite(scores) - _weighted(_finite(scores), weights, dim)


def logsumexp(call: Call, scores: Tensor) -> Tensor:
    """The mean of the scores under the logarithmic mean of the two patterns."""
    dim = call.argument(1, "dim")
    weights = _mean_pattern(call.clean[0], call.corrupted[0], dim)
    result = _weighted(_finite(scores), weights, dim)
    return result if call.argument(2, "keepdim", False) else result.squeeze(dim)


def _mean_pattern(clean: Tensor, corrupted: Tensor, dim: Any) -> Tensor:
    """Returns `(p - q) / (log p - log q)` of the patterns of two tensors of scores."""
    logs = [scores - scores.logsumexp(dim, keepdim=True) for scores in (clean, corrupted)]
    apart = (logs[0] - logs[1]).abs()
    ratio = torch.where(apart == 0, 1, -torch.expm1(-apart) / torch.where(apart == 0, 1, apart))
    return (torch.maximum(*logs).exp() * ratio).nan_to_num(0.0)  # masked in both runs


def _weighted(scores: Tensor, weights: Tensor, dim: Any) -> Tensor:
    total = weights.sum(dim, keepdim=True)
    return (weights * scores).sum(dim, keepdim=True) / torch.where(total == 0, 1, total)


def _finite(scores: Tensor) -> Tensor:
    return torch.where(torch.isinf(scores), 0, scores)


# -- RelP --------------------------------------------------------------------------------------------------------------


def identity(call: Call, x: Tensor, *_: Tensor) -> Tensor:
    """A multiple of the input: `(f(x) - f(0)) / x`, and the derivative where x is 0."""
    corrupted, rest = call.corrupted[0], call.corrupted[1:]
    zero = torch.zeros_like(corrupted, requires_grad=True)
    at_zero = call(zero, *rest)
    (derivative,) = torch.autograd.grad(at_zero.sum(), zero)
    is_zero = corrupted.abs() < 1e-6
    slope = (call(*call.corrupted) - at_zero).detach() / torch.where(is_zero, 1, corrupted)
    return x * torch.where(is_zero, derivative, slope)


def constant(call: Call, *_: Tensor) -> Tensor:
    """A constant."""
    result: Tensor = call(*call.corrupted)
    return result.detach()


def half(call: Call, *inputs: Tensor) -> Any:
    """Half of the derivative, as a product shares it among its factors."""
    return call(*inputs) / 2


# -- functions by their steps ------------------------------------------------------------------------------------------


def by_steps(steps: Callable[..., Any]) -> Surrogate:
    """Returns the rule that takes a function apart: `steps` has its signature, and each step its own rule."""

    def surrogate(call: Call, *inputs: Tensor) -> Any:
        rules = call.rules.another()
        with torch.no_grad(), rules.recording():
            call.take(steps, *call.clean)
        with rules.applied():
            return call.take(steps, *inputs)

    return surrogate


def _between(x: Tensor, clean: Tensor, at: float) -> Tensor:
    return x + at * torch.where(clean == x, 0, clean - x).detach()


@cache
def _gauss(points: int) -> list[tuple[float, float]]:
    """Returns the points and weights of Gauss and Legendre between 0 and 1."""
    import numpy as np

    at, weights = np.polynomial.legendre.leggauss(points)
    return [(float(x + 1) / 2, float(w) / 2) for x, w in zip(at, weights, strict=True)]


def _sum(one: Any, other: Any) -> Any:
    return [a + b for a, b in zip(one, other, strict=True)] if isinstance(one, list) else one + other


# -- composite functions, in plain torch -------------------------------------------------------------------------------


def _attention(*args: Any, **kwargs: Any) -> Any:
    decomposition = decomposition_of(functional.scaled_dot_product_attention)
    assert decomposition is not None
    return decomposition.steps(is_fused=True)(*args, **kwargs)


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    dims = tuple(range(-len(tuple(normalized_shape)), 0))
    centered = x - x.mean(dims, keepdim=True)
    return _scaled(centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps), weight, bias)


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = tuple(range(-len(tuple(normalized_shape)), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _scaled(x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps), weight, None)


def _scaled(normed: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


# -- tables ------------------------------------------------------------------------------------------------------------

_ELEMENTWISE = """
    abs absolute acos arctan asin atan clamp clamp_min clamp_max clip cos cosh erf erfc exp exp2 expm1 lgamma log log10
    log1p log2 logit logsigmoid log_sigmoid maximum minimum fmax fmin pow reciprocal rsqrt sigmoid sin sinh softplus
    sqrt square tan tanh hardtanh hardsigmoid hardswish hardshrink softshrink tanhshrink threshold softsign celu elu
    gelu leaky_relu mish relu relu6 selu silu prelu xlogy atan2 hypot div true_divide divide truediv
"""
_MULTILINEAR = """
    mul multiply matmul mm bmm mv dot vdot inner outer ger einsum tensordot linear bilinear conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d convolution baddbmm addmm addbmm addmv addr kron chain_matmul
    addcmul cosine_embedding
"""
_LINEAR = """
    add sub subtract rsub neg negative positive sum mean cumsum diff trace diagonal diag diag_embed tril triu flip
    fft rfft irfft ifft fft2 ifft2 rfft2 irfft2 fftn ifftn real imag view_as_real view_as_complex conj conj_physical
    resolve_conj resolve_neg complex embedding avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d interpolate upsample fold im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle
    zero zeros_like ones_like full_like empty_like rand_like randn_like zero_ fill fill_ copy copy_ index_add index_put
    index_copy index_fill scatter scatter_add scatter_reduce masked_fill masked_scatter masked_select take
    take_along_dim index rot90 tile
    broadcast_to broadcast_tensors meshgrid atleast_1d atleast_2d atleast_3d ravel expand_as unfold
    dstack column_stack block_diag select_scatter slice_scatter diagonal_scatter setitem getitem detach detach_ data
    nll_loss mT mH H bernoulli alias pin_memory cpu cuda numpy new_tensor set_ resize_ lerp requires_grad_ grad item
    sgn_ permute_copy retain_grad backward register_hook storage untyped_storage storage_type feature_alpha_dropout
    nan_to_num batch_norm
"""

_QUOTIENT = Rule(quotient, keeps_result=True)
_MIDPOINT = Rule(midpoint, is_multilinear=True)
_PATH_AVERAGE = Rule(path_average, is_exact=False)
LINEAR = (
    frozenset(_LINEAR.split())
    | operations.VIEWS
    | operations.ADDITIONS
    | (operations.SAME_VALUES - {"where", "clamp", "clip"})
)

_SECANT: dict[Any, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _QUOTIENT),
    **dict.fromkeys(_MULTILINEAR.split(), _MIDPOINT),
    **dict.fromkeys(("softmax", "_safe_softmax", "_softmax"), Rule(softmax)),
    **dict.fromkeys(("log_softmax", "_log_softmax"), Rule(log_softmax)),
    "logsumexp": Rule(logsumexp),
    "var": Rule(midpoint),
    "layer_norm": Rule(by_steps(_layer_norm)),
    "rms_norm": Rule(by_steps(_rms_norm)),
    "scaled_dot_product_attention": Rule(by_steps(_attention)),
}
_RELP: dict[Any, Rule] = {
    **dict.fromkeys(operations.NONLINEARITIES - {"glu", "softmax", "pow", "square", "exp"}, Rule(identity)),
    **dict.fromkeys(("rsqrt", "sqrt", "var", "std", "norm", "vector_norm"), Rule(constant)),
    **dict.fromkeys(("mul", "multiply"), Rule(half, is_multilinear=True)),
    "layer_norm": Rule(by_steps(_layer_norm)),
    "rms_norm": Rule(by_steps(_rms_norm)),
}


@cache
def _family_name(function: Callable[..., Any]) -> str:
    """Returns the name that all forms of a function share: function, method, operator, and in place."""
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


# -- runs --------------------------------------------------------------------------------------------------------------


class DerivativeRules:
    """The rules of a method for one pair of runs.

    Under `recording` and `applied`, all values are the same as without, to the last bit: only derivatives differ. Both
    runs must take the same steps. Enter them outside of patch contexts' calls, so that opened attention is seen.

    Attributes:
        fallbacks: Names of functions whose rule does not explain the whole change, and the reason.
    """

    def __init__(self) -> None:
        self.fallbacks: dict[str, str] = {}

    def recording(self) -> AbstractContextManager[Any]:
        """Returns a context manager for the run on the clean inputs, and its metric."""
        return nullcontext()

    def applied(self) -> AbstractContextManager[Any]:
        """Returns a context manager for the run with gradients on the corrupted inputs, and its metric."""
        return nullcontext()

    def another(self) -> DerivativeRules:
        """Returns the same rules for another pair of runs."""
        return type(self)()

    def rule_for(self, function: Callable[..., Any]) -> Rule | None:
        """Returns the rule for a function; `None` for one whose own derivative is used."""
        return None

    def is_known(self, function: Callable[..., Any]) -> bool:
        """Whether a function has a rule, or does not need one."""
        return _family_name(function) in LINEAR or self.rule_for(function) is not None

    def recorded(self, call: Call) -> _Recorded:
        """Returns the record of the same call in the clean run, and notes which inputs differ."""
        raise NotImplementedError


class SecantRules(DerivativeRules):
    """Rules that take each derivative from two runs."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[_Recorded] = []
        self._at = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.tape = []
        with _Recording(self):
            yield

    @contextmanager
    def applied(self) -> Iterator[None]:
        self._at = 0
        with _Applied(self):
            yield
        if self._at != len(self.tape):
            raise ExperimentError(_parted(self._at, self.tape[self._at], None))
        self.tape = []

    def rule_for(self, function: Callable[..., Any]) -> Rule | None:
        found = _SECANT.get(function)
        return _SECANT.get(_family_name(function)) if found is None else found

    def recorded(self, call: Call) -> _Recorded:
        mine = _Recorded(_family_name(call.function), [Held(x) for x in call.inputs], None)
        recorded = self.tape[self._at] if self._at < len(self.tape) else None
        if recorded is None or (recorded.name, recorded.shapes) != (mine.name, mine.shapes):
            raise ExperimentError(_parted(self._at, recorded, mine))
        self._at += 1
        call.differs = tuple(map(_is_different, recorded.inputs, call.inputs))
        return recorded


class RelPRules(DerivativeRules):
    """Rules that take each derivative from the corrupted run alone."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        with _Applied(self):
            yield

    def rule_for(self, function: Callable[..., Any]) -> Rule | None:
        return _RELP.get(_family_name(function))

    def is_known(self, function: Callable[..., Any]) -> bool:
        return True

    def recorded(self, call: Call) -> _Recorded:
        call.differs = tuple(x.requires_grad for x in call.inputs)
        return _Recorded(_family_name(call.function), [Held(x) for x in call.inputs], None)


def _parted(at: int, clean: _Recorded | None, corrupted: _Recorded | None) -> str:
    runs = (
        f"{record or 'nothing more'} in the {run} run" for run, record in (("clean", clean), ("corrupted", corrupted))
    )
    return (
        "the secant pairs the operations of the two runs, which part at operation "
        f'{at + 1}: {", ".join(runs)}; use method="gradient", or inputs for which the model takes the same steps'
    )


class Held:
    """A tensor as it is now: it is copied before the model writes into it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


@dataclass
class _Recorded:
    name: str
    inputs: list[Held]
    result: Held | None

    @property
    def shapes(self) -> list[torch.Size]:
        return [held.tensor.shape for held in self.inputs]

    def __str__(self) -> str:
        return f"{self.name} of {', '.join(str(tuple(shape)) for shape in self.shapes)}"


class _Writes:
    """The tensors that are held, by their storage, so that they can be copied before the model writes into them."""

    def __init__(self) -> None:
        self._by_storage: dict[int, list[Held]] = {}

    def hold(self, tensor: Tensor) -> Held:
        held = Held(tensor)
        self._by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(held)
        return held

    def before(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copies what the call is about to overwrite."""
        target = next((arg for arg in args if isinstance(arg, Tensor)), None)
        if target is None or not self._by_storage or not is_in_place(function, args, kwargs):
            return
        for held in self._by_storage.pop(target.untyped_storage().data_ptr(), ()):
            held.tensor = held.tensor.clone()


class _Recording(TorchFunctionMode):
    """Records the inputs of each call that has a rule."""

    def __init__(self, rules: SecantRules) -> None:
        super().__init__()
        self._rules = rules
        self._writes = _Writes()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = self._rules.rule_for(func)
        call = None if rule is None else Call(func, args, kwargs, self._rules)
        if rule is None or call is None or not _is_of_interest(call, rule):
            self._writes.before(func, args, kwargs)
            return func(*args, **kwargs)
        record = _Recorded(_family_name(func), [self._writes.hold(x) for x in call.inputs], None)
        self._rules.tape.append(record)
        self._writes.before(func, args, kwargs)
        result = func(*args, **kwargs)
        if rule.keeps_result and isinstance(result, Tensor):
            record.result = self._writes.hold(result)
        return result


class _Applied(TorchFunctionMode):
    """Replaces the derivatives of calls."""

    def __init__(self, rules: DerivativeRules) -> None:
        super().__init__()
        self._rules = rules
        self._writes = _Writes()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        job = self._job(func, args, kwargs)
        self._writes.before(func, args, kwargs)
        if job is None:
            result = func(*args, **kwargs)
            self._note(func, result, args)
            return result
        apply: Any = _Replaced.apply
        result = apply(job, lambda: func(*args, **kwargs), *job.call.inputs)
        if job.rule.keeps_result and isinstance(result, Tensor):
            job.result = self._writes.hold(result)
        return result if job.kind is None else job.kind(result)

    def _job(self, func: Any, args: Any, kwargs: Any) -> _Job | None:
        """Returns what replaces the derivative of a call; `None` where that of torch is right."""
        rules = self._rules
        rule = rules.rule_for(func)
        call = None if rule is None else Call(func, args, kwargs, rules)
        if rule is None or call is None or not _is_of_interest(call, rule):
            return None
        recorded = rules.recorded(call)
        is_needed = torch.is_grad_enabled() and any(x.requires_grad for x in call.inputs)
        if not is_needed or (rule.is_multilinear and sum(call.differs) < 2):
            return None
        if not rule.is_exact:
            self._rules.fallbacks.setdefault(_family_name(func), "its rule is an approximation")
        return _Job(call, rule, recorded, [self._writes.hold(x) for x in call.inputs])

    def _note(self, func: Any, result: Any, args: Sequence[Any]) -> None:
        """Names what has torch's own derivative, although it is not linear."""
        for value in args:
            node: Any = value.grad_fn if isinstance(value, Tensor) else None
            if isinstance(node, BackwardCFunction) and type(node).__name__ != "_ReplacedBackward":
                name = type(node).__name__.removesuffix("Backward")
                self._rules.fallbacks.setdefault(name, "a custom autograd function, which has its own derivative")
        if isinstance(result, Tensor) and result.requires_grad and not self._rules.is_known(func):
            self._rules.fallbacks.setdefault(_family_name(func), "it has no rule, and the derivative of torch")


def _is_of_interest(call: Call, rule: Rule) -> bool:
    if not call.inputs:
        return False
    return not rule.is_multilinear or sum(not isinstance(x, Parameter) for x in call.inputs) > 1


def _is_different(clean: Held, corrupted: Tensor) -> bool:
    if clean.tensor.data_ptr() == corrupted.data_ptr() and clean.tensor.stride() == corrupted.stride():
        return False
    return corrupted.requires_grad or not torch.equal(clean.tensor, corrupted)


@dataclass
class _Job:
    """A call whose derivative is replaced."""

    call: Call
    rule: Rule
    recorded: _Recorded
    held: list[Held]
    result: Held | None = None
    kind: Any = None
    results: list[Tensor] = field(default_factory=list)

    def gradients(self, needed: Sequence[bool], given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns the vector-Jacobian product of the rule."""
        call = self.call
        call.clean = tuple(_wide(held.tensor) for held in self.recorded.inputs)
        call.corrupted = tuple(_wide(held.tensor) for held in self.held)
        is_wide = self.result is not None and self.result.tensor.element_size() >= 4
        if is_wide and self.recorded.result is not None and self.result is not None and sum(call.differs) == 1:
            call.results = (self.recorded.result.tensor, self.result.tensor)
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(need) for x, need in zip(call.corrupted, needed, strict=True)]
            found = self.rule.surrogate(call, *inputs)
            pairs = [
                (result, gradient.to(result.dtype))
                for result, gradient in zip(found if isinstance(found, (tuple, list)) else [found], given, strict=True)
                if gradient is not None and result.requires_grad
            ]
        wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
        results, gradients = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if not results:
            return [None] * len(needed)
        products = iter(torch.autograd.grad(results, wanted, gradients, allow_unused=True))
        answers = [next(products) if need else None for need in needed]
        return [
            answer if answer is None else answer.to(held.tensor.dtype)
            for answer, held in zip(answers, self.held, strict=True)
        ]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


class _Replaced(torch.autograd.Function):
    """A call with its own value, and the derivative of a rule."""

    @staticmethod
    def forward(ctx: Any, job: _Job, run: Callable[[], Any], *inputs: Tensor) -> Any:
        result = run()
        ctx.job = job
        ctx.set_materialize_grads(False)
        if job.call.is_in_place:
            ctx.mark_dirty(inputs[0])
        if isinstance(result, Tensor):
            return result
        job.kind = type(result)
        ctx.mark_non_differentiable(*(part for part in result if not part.is_floating_point()))
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        return (None, None, *ctx.job.gradients(ctx.needs_input_grad[2:], gradients))


def rules_of(method: Method) -> DerivativeRules:
    """Returns the derivative rules of a method, for one pair of runs.

    Raises:
        ExperimentError: There is no such method.
    """
    check_method(method)
    return {"secant": SecantRules, "relp": RelPRules}.get(method, DerivativeRules)()


def check_method(method: Any) -> None:
    """Checks the name of a method.

    Raises:
        ExperimentError: There is no such method.
    """
    if method not in METHODS:
        renamed = '; "attribution" is called "gradient" now' if method == "attribution" else ""
        raise ExperimentError(f"method must be one of {', '.join(map(repr, METHODS))}, not {method!r}{renamed}")
