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
- Products, and all else that is linear in each of its arguments: the derivative at the midpoint (`multilinear`).
- Softmax and its relatives: the Jacobian at the logarithmic mean of the two results (`softmax`, `logsumexp`).
- Norms, attention and other composites: their steps in plain torch, each by its own rule (`by_steps`).
- Other functions: the mean of their Jacobian along the straight line between the runs (`path_average`). This is exact
  for polynomials only, so that `DerivativeRules.fallbacks` names them.

**RelP.** The rules of layer-wise relevance propagation, from the corrupted run alone: denominators of norms are
constants, activations are multiples of their input, and each factor of a product gets half. An activation that is
written out (`0.5 * x * (1 + tanh(...))`) counts as one function of its *root*, the value that all of its steps are
computed from elementwise: `ElementwiseRoots` finds it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture import decomposition_of
from graphpatch_notebook.capture.frame_recorder import raw_name
from graphpatch_notebook.components import operations
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.attribution import composites
from graphpatch_notebook.experiments.attribution.secants import (
    Held,
    PairedCall,
    Rule,
    Surrogate,
    by_steps,
    family_name,
    has_memory,
    is_in_place,
    is_weight,
    log_softmax,
    logsumexp,
    multilinear,
    path_average,
    quotient,
    softmax,
)
from graphpatch_notebook.patching.sharding import is_distributed, same_value
from graphpatch_notebook.torch_compat import base_of, is_awaited
from graphpatch_notebook.warning_places import level_of_caller, warn

Method: TypeAlias = Literal["gradient", "integrated", "relp", "secant"]
METHODS: tuple[Method, ...] = ("gradient", "integrated", "relp", "secant")

# -- RelP --------------------------------------------------------------------------------------------------------------

_ACTIVATIONS = operations.NONLINEARITIES - {"glu", "softmax", "pow", "square", "exp"}
_DENOMINATORS = frozenset("rsqrt sqrt var std norm vector_norm linalg_vector_norm linalg_norm".split())


def _identity(call: PairedCall, x: Tensor, *_: Tensor) -> Tensor:
    """A multiple of the input: `(f(x) - f(0)) / x`, and the derivative where x is 0."""
    corrupted, rest = call.corrupted[0], call.corrupted[1:]
    zero = torch.zeros_like(corrupted, requires_grad=True)
    at_zero = call(zero, *rest)
    (derivative,) = torch.autograd.grad(at_zero.sum(), zero)
    is_zero = corrupted.abs() < 1e-6
    slope = (call(*call.corrupted) - at_zero).detach() / torch.where(is_zero, 1, corrupted)
    return x * torch.where(is_zero, derivative, slope)


def _half(call: PairedCall, *inputs: Tensor) -> Any:
    """Half of the derivative, as a product shares it among its factors."""
    return call(*inputs) / 2


def _constant(call: PairedCall, *inputs: Tensor) -> Any:
    """A constant. Its derivative is 0, and not missing: the steps before it have scores, too."""
    return call(*(x.detach() for x in inputs)) + 0 * sum(x.sum() for x in inputs)


def _power(call: PairedCall, *inputs: Tensor) -> Any:
    """The rule of `pow`: a root is a denominator, and a whole power a product of equal factors that share it."""
    exponent = _exponent(call.function, call.argument(1, "exponent"))
    return _constant(call, *inputs) if _is_root(exponent) else call(*inputs) / exponent


def _refused_power(call: PairedCall) -> bool:
    """Whether a power is neither a root nor a product of equal factors."""
    exponent = _exponent(call.function, call.argument(1, "exponent"))
    return not (_is_root(exponent) or (exponent > 1 and exponent == int(exponent)))


def _exponent(function: Callable[..., Any], given: Any) -> float:
    """Returns the exponent of a call of `pow`; 1 if it is no number, or the base is."""
    is_number = isinstance(given, (int, float)) and math.isfinite(given)
    return float(given) if is_number and raw_name(function) != "__rpow__" else 1.0


def _is_root(exponent: float) -> bool:
    return abs(exponent) == 0.5


def _by_first(call: PairedCall, first: Tensor, second: Tensor) -> Any:
    """A multiple of the first factor: the second, a function of it, is constant."""
    return call(first, second.detach() + 0 * second)


def _by_second(call: PairedCall, first: Tensor, second: Tensor) -> Any:
    """A multiple of the second factor: the first, a function of it, is constant."""
    return call(first.detach() + 0 * first, second)


@dataclass(frozen=True, slots=True)
class Root:
    """What a value is an elementwise function of.

    Attributes:
        value: The value.
        root: The tensor that it is a function of; `None` for a value that is computed from weights and constants alone.
        is_multiple: Whether it is a constant multiple of that.
    """

    value: Tensor
    root: Tensor | None
    is_multiple: bool


class ElementwiseRoots:
    """The roots of the values of a run."""

    def __init__(self) -> None:
        self._by_id: dict[int, Root] = {}

    def of(self, value: Tensor) -> Root:
        """Returns the root of a value: the value itself, unless it was computed elementwise from a single one."""
        known, of_base = self._known(value), self._known(base_of(value))
        if known is not None:
            return known
        is_constant = not value.requires_grad or is_weight(value) or (of_base is not None and of_base.root is None)
        return Root(value, None if is_constant else value, True)

    def _known(self, value: Tensor | None) -> Root | None:
        known = self._by_id.get(id(value))
        return known if known is not None and known.value is value else None

    def pass_on(self, value: Tensor, result: Tensor) -> None:
        """Notes that a result is the same value in another form."""
        known = self.of(value)
        self._by_id[id(result)] = Root(result, result if known.root is value else known.root, known.is_multiple)

    def note(self, function: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        """Notes the root of a result."""
        if not isinstance(result, Tensor) or not result.requires_grad:
            return
        name = family_name(function)
        given = [part for arg in args for part in (arg if isinstance(arg, (tuple, list)) else [arg])]
        roots = [self.of(part) for part in given if isinstance(part, Tensor)]
        if is_in_place(function, args, {}):  # not for one that returns what it is given, unchanged
            self._by_id.pop(id(result), None)
        varying = [root for root in roots if root.root is not None]
        is_constant = not varying and any(root.value.requires_grad for root in roots)
        is_power = name == "pow" and len(args) > 1 and _is_root(_exponent(function, args[1]))
        if is_constant or is_power or name in _DENOMINATORS:
            self._by_id[id(result)] = Root(result, None, False)
            return
        if not varying or any(root.root is not varying[0].root for root in varying):
            return
        is_scaled = any(root.root is None and root.value.numel() != 1 for root in roots)
        if is_scaled or result.shape != varying[0].value.shape:
            return
        if name in _ACTIVATIONS or name in ("pow", "square", "exp"):
            is_multiple = False
        elif name in operations.SCALINGS:
            is_multiple = len(varying) == 1 and varying[0].is_multiple and varying[0].value is args[0]
        elif name in operations.ADDITIONS or name in ("sub", "rsub", "neg"):
            is_multiple = len(varying) == 2 and all(root.is_multiple for root in varying)
        else:
            return
        self._by_id[id(result)] = Root(result, varying[0].root, is_multiple)


# -- tables, by the names that all forms of a function share -----------------------------------------------------------

_ELEMENTWISE = """
    abs absolute acos arctan asin atan clamp clamp_min clamp_max clip cos cosh erf erfc exp exp2 expm1 lgamma log log10
    log1p log2 logit logsigmoid log_sigmoid maximum minimum fmax fmin pow reciprocal rsqrt sigmoid sin sinh softplus
    sqrt square tan tanh hardtanh hardsigmoid hardswish hardshrink softshrink tanhshrink threshold softsign celu elu
    gelu leaky_relu mish relu relu6 selu silu xlogy atan2 hypot div true_divide divide truediv
"""
_MULTILINEAR = """
    mul multiply matmul mm bmm mv dot vdot inner outer ger einsum tensordot linear bilinear conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d convolution baddbmm addmm addbmm addmv addr kron chain_matmul
    addcmul lerp grouped_mm _grouped_mm mse_loss var var_mean
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
    nll_loss mT mH H bernoulli alias pin_memory cpu cuda numpy new_tensor set_ resize_ requires_grad_ grad item
    sgn_ permute_copy retain_grad backward register_hook storage untyped_storage storage_type feature_alpha_dropout
    nan_to_num requires_grad fft_rfft fft_irfft fft_fft fft_ifft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 embedding_bag
"""

LINEAR = (
    frozenset(_LINEAR.split()) | operations.VIEWS | operations.ADDITIONS | (operations.SAME_VALUES - {"clamp", "clip"})
)
"""Linear in all their inputs together: their own derivative is exact."""

_APPROXIMATED = """
    prod cumprod logcumsumexp cdist pairwise_distance addcdiv kl_div binary_cross_entropy smooth_l1_loss huber_loss
    binary_cross_entropy_with_logits local_response_norm logaddexp logaddexp2 rrelu lstm gru rnn_tanh rnn_relu
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell poisson_nll_loss gaussian_nll_loss l1_loss
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d linalg_solve_triangular linalg_solve linalg_inv
"""
_COMPOSITES: dict[str, Callable[..., Any]] = {
    "layer_norm": composites.layer_norm,
    "rms_norm": composites.rms_norm,
    "group_norm": composites.group_norm,
    "batch_norm": composites.batch_norm,
    "instance_norm": composites.instance_norm,
    "normalize": composites.normalize,
    "std": composites.std,
    "cosine_similarity": composites.cosine_similarity,
    "glu": composites.glu,
    "prelu": composites.prelu,
    "amax": composites.amax,
    "amin": composites.amin,
    "max": composites.largest,
    "min": composites.smallest,
}
_SECANT: dict[Any, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), Rule(quotient)),
    **dict.fromkeys(_MULTILINEAR.split(), Rule(multilinear, is_multilinear=True)),
    **dict.fromkeys(("var", "var_mean", "mse_loss"), Rule(multilinear)),
    **dict.fromkeys(_APPROXIMATED.split(), Rule(path_average, is_exact=False)),
    **{name: Rule(by_steps(steps)) for name, steps in _COMPOSITES.items()},
    **dict.fromkeys(
        ("norm", "vector_norm", "linalg_vector_norm", "linalg_norm"),
        Rule(by_steps(composites.norm), refusal=composites.refused_norm),
    ),
    "cross_entropy": Rule(by_steps(composites.cross_entropy), refusal=composites.refused_cross_entropy),
    **dict.fromkeys(("softmax", "_safe_softmax", "_softmax"), Rule(softmax)),
    **dict.fromkeys(("log_softmax", "_log_softmax"), Rule(log_softmax)),
    **dict.fromkeys(("logsumexp", "special_logsumexp"), Rule(logsumexp)),
    **dict.fromkeys(
        ("max_pool1d", "max_pool2d", "max_pool3d"),
        Rule(by_steps(composites.max_pool), refusal=composites.refused_max_pool),
    ),
    "scaled_dot_product_attention": Rule(by_steps(composites.attention), refusal=composites.refused_attention),
}
_NORMS = ("layer_norm", "rms_norm", "group_norm", "instance_norm", "normalize")
_RELP: dict[Any, Rule] = {
    **dict.fromkeys(_ACTIVATIONS, Rule(_identity)),
    **dict.fromkeys(_DENOMINATORS, Rule(_constant)),
    **dict.fromkeys(("mul", "multiply"), Rule(_half, is_multilinear=True)),
    "square": Rule(_half),
    "pow": Rule(_power, refusal=_refused_power),
    "glu": Rule(by_steps(composites.glu)),
    **{name: Rule(by_steps(_COMPOSITES[name])) for name in _NORMS},
}
_OPENED = frozenset({"multi_head_attention_forward"})
"""Functions whose steps give their very bits: they are run step by step."""

_DECISIONS = (operations.CHOICES - {"max"}) | {"where", "masked_fill", "argsort", "argmin"}
"""Functions with integers or conditions that no derivative follows."""


def register_rule(function: Callable[..., Any], surrogate: Surrogate, *, is_exact: bool = True) -> None:
    """Gives a function a rule of its own for `method="secant"`.

    Args:
        function: The function as torch dispatches it: one of torch, or a custom operator (`torch.ops.mine.gelu`).
        surrogate: Takes a `PairedCall` and its inputs, which are all floating-point tensors among the arguments, with
            the values of the corrupted run. Returns a tensor of the shape of the result, whose derivative is used. See
            `secants`: `quotient` for elementwise functions, `multilinear`, `path_average` for any function that can be
            differentiated, and `by_steps(f)`, where `f` computes the same from functions with rules.
        is_exact: Whether the derivative explains the whole change. If not, results name the function.

    Example:
        >>> from graphpatch_notebook.experiments.attribution.secants import quotient
        >>> register_rule(torch.special.i0, quotient)
    """
    _SECANT[function] = Rule(surrogate, is_exact=is_exact)


def warn_of_loss(what: str, loss: float, fallbacks: Mapping[str, str], *, is_half: bool) -> None:
    """Warns if scores of the secant do not have the expected sum, and names possible causes.

    `what` says which scores, and what they should sum to; `loss` is the difference, relative to that. Models in half
    precision lose more to rounding.
    """
    if not loss > (5e-2 if is_half else 1e-3):
        return
    causes = [f"{name} ({why})" for name, why in fallbacks.items()]
    shown = "; ".join(causes[:5]) or "operations that torch does not dispatch, or in-place changes of shared memory"
    warn(
        f"the scores of {what} by {loss:.1%} of it: not every operation has a rule that explains its change. It may "
        f"be: {shown}. routing='frozen' holds choices of experts; "
        "graphpatch_notebook.experiments.attribution.rules.register_rule adds rules",
        "experiment",
        stacklevel=level_of_caller(),
    )


# -- rules of a run ----------------------------------------------------------------------------------------------------


class DerivativeRules:
    """The rules of a method for one pair of runs: by default, the derivatives of torch.

    Under `recording` and `applied`, all values are the same as without, to the last bit: only derivatives differ. Both
    runs must take the same steps. Enter them around the calls of a `PatchableGraph`, so that they see the steps of
    attention that patches open.

    Attributes:
        fallbacks: Why a function does not explain the whole change of its result, by its name.
    """

    def __init__(self) -> None:
        self.fallbacks: dict[str, str] = {}

    def recording(self) -> AbstractContextManager[Any]:
        """Returns a context manager for the run on the clean inputs, and its metric."""
        return nullcontext()

    def applied(self) -> AbstractContextManager[Any]:
        """Returns a context manager for the run with gradients on the corrupted inputs, and its metric."""
        return nullcontext()


class SecantRules(DerivativeRules, TorchFunctionMode):
    """Rules that take each derivative from two runs: the calls of the clean run are kept on a tape."""

    method: ClassVar[str] = "secant"
    table: ClassVar[Mapping[Any, Rule]] = _SECANT

    def __init__(self) -> None:
        TorchFunctionMode.__init__(self)
        DerivativeRules.__init__(self)
        self.is_open = False
        self._is_recording = False
        self._tape: list[PairedCall] = []
        self._decisions: list[Tensor] = []
        self._at = self._decided = 0
        self._seen: set[Any] = set()
        self._held: dict[int, list[Held]] = {}
        self._weights: dict[int, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._tape, self._decisions, self._is_recording = [], [], True
        with self:
            yield
        self._is_recording, self._held = False, {}

    @contextmanager
    def applied(self) -> Iterator[None]:
        self._at = self._decided = 0
        self.is_open = True
        try:
            with self:
                yield
        finally:
            self.is_open, self._held = False, {}
            self._seen.clear()
        if self._at != len(self._tape):
            raise ExperimentError(self._parted(self._tape[self._at], None))
        self._tape, self._decisions = [], []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is same_value:
            return self.same_value(*args)
        kwargs = kwargs or {}
        every = (*args, *kwargs.values())
        if not self._is_recording:
            self._name_unseen(args)
        decomposition = decomposition_of(func) if family_name(func) in _OPENED else None
        if decomposition is not None and decomposition.refusal(args, kwargs) is None:
            with self:
                return decomposition.steps(is_fused=False)(*args, **kwargs)
        call = self._call(func, args, kwargs)
        replaced = call if call is not None and self._is_replaced(call) else None
        if replaced is not None:
            replaced.held = [self._hold(x) for x in replaced.inputs]
            if self._is_recording:
                replaced.inputs.clear()
        if self._held and is_in_place(func, args, kwargs):
            self._copy_before_write(every)
        if self._is_recording or replaced is None:
            result = func(*args, **kwargs)
        else:
            apply: Any = _Replaced.apply
            result = apply(replaced, lambda: func(*args, **kwargs), *replaced.inputs)
            result = result if replaced.kind is None else replaced.kind(result)
        self.after(func, every, result, has_rule=call is not None)
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> PairedCall | None:
        """Returns a call that has a rule; `None` for one that keeps its own derivative."""
        rule = self.table.get(func) or self.table.get(family_name(func))
        call = None if rule is None else PairedCall(func, args, kwargs, rule, self)
        fits = call is not None and call.inputs and all(map(has_memory, call.inputs)) and not call.rule.refusal(call)
        return call if fits else None

    def _is_replaced(self, call: PairedCall) -> bool:
        """Whether a call gets the derivative of its rule: it is kept in the clean run, and replaced in the other."""
        if call.rule.is_multilinear and sum(not self._is_weight(x) for x in call.inputs) < 2:
            return False
        if self._is_recording:
            self._tape.append(call)
            return True
        self.pair(call)
        is_needed = torch.is_grad_enabled() and any(x.requires_grad for x in call.inputs) and any(call.differs)
        if not is_needed or (call.rule.is_multilinear and sum(call.differs) < 2):
            return False
        if _is_in_checkpoint():
            raise ExperimentError(
                "the model computes values again in backward (activation checkpointing), where derivative rules cannot "
                'follow: switch it off (model.gradient_checkpointing_disable()), or use method="gradient"'
            )
        if not call.rule.is_exact:
            self.fallbacks.setdefault(family_name(call.function), "its rule is an approximation")
        return True

    # -- what differs between methods ----------------------------------------------------------------------------------

    def pair(self, call: PairedCall) -> None:
        """Finds the same call in the clean run, and which inputs differ."""
        clean = self._tape[self._at] if self._at < len(self._tape) else None
        if clean is None or clean.signature != call.signature:
            raise ExperimentError(self._parted(clean, call))
        self._at += 1
        call.counterpart = clean
        call.differs = tuple(map(_is_different, clean.held, call.inputs))

    def after(self, function: Callable[..., Any], args: Sequence[Any], result: Any, *, has_rule: bool) -> None:
        """Is given the result of each call."""
        if self._is_recording:
            self._decisions += _decisions(function, args, result)
            return
        self._seen.update(value.grad_fn for value in (*_parts(result), *args) if isinstance(value, Tensor))
        name = family_name(function)
        for decision in _decisions(function, args, result):
            clean = self._decisions[self._decided] if self._decided < len(self._decisions) else None
            self._decided += 1
            if clean is None or clean.shape != decision.shape or not torch.equal(clean, decision):
                self.fallbacks.setdefault(name, "it decides differently in the other run")
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return
        results = [part for part in _parts(result) if part.is_floating_point() or part.is_complex()]
        if results and not torch.is_grad_enabled():
            self.fallbacks.setdefault(name, "the model computes it under torch.no_grad()")
        is_known = has_rule or name in LINEAR or name in _OPENED
        if not is_known and any(part.requires_grad for part in results):
            self.fallbacks.setdefault(name, "it has no rule here, and the derivative of torch")

    def same_value(self, value: Tensor, result: Tensor) -> Tensor:
        """Is given a value, and the same in another form: all of it, or what this process holds of it."""
        if self._is_weight(value):
            self._weights[id(result)] = result
        return result

    def _is_weight(self, value: Tensor) -> bool:
        known = (self._weights.get(id(each)) is each for each in (value, base_of(value)) if each is not None)
        return is_weight(value) or any(known)

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _hold(self, tensor: Tensor) -> Held:
        """Returns a tensor as it is now."""
        if is_distributed(tensor):
            raise ExperimentError(
                'the model computes with DTensors, which derivative rules cannot follow: use method="gradient", or a '
                "plan whose modules return local tensors (use_local_output=True)"
            )
        held = Held(tensor.detach().clone() if is_awaited(tensor) else tensor)  # a clone waits for it
        self._held.setdefault(held.tensor.untyped_storage().data_ptr(), []).append(held)
        return held

    def _copy_before_write(self, args: Sequence[Any]) -> None:
        target = next((arg for arg in args if isinstance(arg, Tensor)), None)
        if target is not None and has_memory(target):
            for held in self._held.pop(target.untyped_storage().data_ptr(), ()):
                held.tensor = held.tensor.clone()

    def _name_unseen(self, args: Sequence[Any]) -> None:
        """Names what computed the arguments of a call, if torch did not dispatch it."""
        for value in args:
            node = value.grad_fn if isinstance(value, Tensor) else None
            if node is not None and node not in self._seen and not type(node).__name__.startswith(_TRANSPARENT):
                kind = type(node).__name__.removesuffix("Backward")
                self.fallbacks.setdefault(kind, "it is not a function that torch dispatches, and keeps its derivative")

    def _parted(self, clean: PairedCall | None, corrupted: PairedCall | None) -> str:
        return (
            f"the secant pairs the operations of the two runs, which diverge at operation {self._at + 1}: "
            f"{clean or 'nothing more'} in the clean run, {corrupted or 'nothing more'} in the corrupted run (mixtures "
            'of experts do that); use routing="frozen" or method="gradient", or inputs for which the model takes the '
            "same steps"
        )


_TRANSPARENT = ("View", "Alias", "Clone", "AccumulateGrad", "_Replaced", "CopyBackwards", "CopySlices", "AsStrided")


class RelPRules(SecantRules):
    """Rules that take each derivative from the corrupted run alone."""

    method: ClassVar[str] = "relp"
    table: ClassVar[Mapping[Any, Rule]] = _RELP

    @contextmanager
    def recording(self) -> Iterator[None]:
        yield

    @contextmanager
    def applied(self) -> Iterator[None]:
        self._roots = ElementwiseRoots()
        with super().applied():
            yield
        del self._roots

    def pair(self, call: PairedCall) -> None:
        call.counterpart = call
        every = [self._roots.of(x) for x in call.inputs]
        call.differs = tuple(root.root is not None for root in every)
        roots = [root for root in every if root.root is not None]
        if len(roots) == 2 and roots[0].root is roots[1].root and call.inputs[0] is not call.inputs[1]:
            kept = _by_first if roots[0].is_multiple else _by_second if roots[1].is_multiple else None
            call.surrogate = kept or call.surrogate

    def after(self, function: Callable[..., Any], args: Sequence[Any], result: Any, *, has_rule: bool) -> None:
        self._seen.update(value.grad_fn for value in (*_parts(result), *args) if isinstance(value, Tensor))
        self._roots.note(function, args, result)

    def same_value(self, value: Tensor, result: Tensor) -> Tensor:
        self._roots.pass_on(value, result)
        return super().same_value(value, result)


def _decisions(function: Callable[..., Any], args: Sequence[Any], result: Any) -> list[Tensor]:
    if family_name(function) not in _DECISIONS:
        return []
    tensors = [*(arg for arg in args if isinstance(arg, Tensor)), *_parts(result)]
    return [part for part in tensors if not (part.is_floating_point() or part.is_complex()) and has_memory(part)]


def _parts(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [part for part in result if isinstance(part, Tensor)] if isinstance(result, (tuple, list)) else []


def _is_different(clean: Held, corrupted: Tensor) -> bool:
    if clean.tensor.data_ptr() == corrupted.data_ptr() and clean.tensor.stride() == corrupted.stride():
        return False
    return corrupted.requires_grad or not torch.equal(clean.tensor, corrupted)


def _is_in_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT_FILE:
        frame = frame.f_back
    return frame is not None


_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


class _Replaced(torch.autograd.Function):
    """A call with its own value, and the derivative of a rule."""

    @staticmethod
    def forward(ctx: Any, call: PairedCall, run: Callable[[], Any], *inputs: Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        if call.is_in_place:
            ctx.mark_dirty(inputs[0])
            return run()
        # With gradients, as in the model itself: without, some kernels (such as the LSTM's) round differently.
        with torch.enable_grad():
            result = run()
        if isinstance(result, Tensor):
            return result.detach()
        call.kind = type(result)
        parts = tuple(part.detach() for part in result)
        ctx.mark_non_differentiable(*(part for part in parts if not part.is_floating_point()))
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        return (None, None, *_products(ctx.call, ctx.needs_input_grad[2:], gradients))


def _products(call: PairedCall, needed: Sequence[bool], given: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns the vector-Jacobian products of the rule of a call."""
    if call.rules.is_open:
        raise ExperimentError(
            f"the model computes derivatives itself, in which method={call.rules.method!r} would change values: use "
            'method="gradient"'
        )
    runs = (call.counterpart, call)
    call.clean, call.corrupted = (tuple(widened(held.tensor) for held in run.held) for run in runs)
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_(need) for x, need in zip(call.corrupted, needed, strict=True)]
        found = call.surrogate(call, *inputs)
        parts = found if isinstance(found, (tuple, list)) else [found]
        pairs = [
            (result, gradient.to(result.dtype))
            for result, gradient in zip(parts, given, strict=True)
            if gradient is not None and result is not None and result.requires_grad
        ]
    if not pairs:
        return [None] * len(needed)
    results, gradients = zip(*pairs, strict=True)
    wanted = [x for x in inputs if x.requires_grad]
    answers = iter(torch.autograd.grad(results, wanted, gradients, allow_unused=True))
    products = [next(answers) if need else None for need in needed]
    return [None if each is None else each.to(x.tensor.dtype) for each, x in zip(products, call.held, strict=True)]


def widened(tensor: Tensor) -> Tensor:
    """Returns a half-precision tensor in single precision, which sums over many products need."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


_BY_METHOD: dict[str, type[DerivativeRules]] = {kind.method: kind for kind in (SecantRules, RelPRules)}


def rules_of(method: Method) -> DerivativeRules:
    """Returns the derivative rules of a method, for one pair of runs.

    Raises:
        ExperimentError: The method does not exist.
    """
    check_method(method)
    return _BY_METHOD.get(method, DerivativeRules)()


def check_method(method: Any, known: Sequence[str] = METHODS) -> None:
    """Checks the name of a method."""
    if method not in known:
        renamed = '; "attribution" is called "gradient" now' if method == "attribution" else ""
        raise ExperimentError(f"method must be one of {', '.join(map(repr, known))}, not {method!r}{renamed}")


def midpoints(steps: int) -> list[float]:
    """Returns the midpoints of equal parts of the way between two runs, from 0 to 1.

    The error of integrated gradients falls with the square of their number.
    """
    if type(steps) is not int or steps < 1:
        raise ExperimentError(f"steps must be a positive integer, not {steps!r}")
    return [(step + 0.5) / steps for step in range(steps)]
