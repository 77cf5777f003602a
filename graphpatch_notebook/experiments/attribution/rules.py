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
constants, activations are multiples of their input, and each factor of a product gets half.
"""

from __future__ import annotations

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
from graphpatch_notebook.checks.sharding import same_value
from graphpatch_notebook.components import operations
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.attribution import composites, relp
from graphpatch_notebook.experiments.attribution.calls import (
    Held,
    HeldTensors,
    PairedCall,
    Rule,
    Surrogate,
    family_name,
    has_memory,
    is_weight,
)
from graphpatch_notebook.experiments.attribution.secants import (
    by_steps,
    log_softmax,
    logsumexp,
    multilinear,
    path_average,
    quotient,
    softmax,
)
from graphpatch_notebook.torch_compat import base_of
from graphpatch_notebook.warning_places import level_of_caller, warn

Method: TypeAlias = Literal["gradient", "integrated", "relp", "secant"]
METHODS: tuple[Method, ...] = ("gradient", "integrated", "relp", "secant")

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
    **dict.fromkeys(("norm", "vector_norm", "linalg_vector_norm", "linalg_norm"), composites.norm),
    "std": composites.std,
    "cosine_similarity": composites.cosine_similarity,
    "glu": composites.glu,
    "prelu": composites.prelu,
    "softmin": composites.softmin,
    "amax": composites.amax,
    "amin": composites.amin,
    "max": composites.largest,
    "min": composites.smallest,
}
_SECANT: dict[Any, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), Rule(quotient, keeps_result=True)),
    **dict.fromkeys(_MULTILINEAR.split(), Rule(multilinear, is_multilinear=True)),
    **dict.fromkeys(("var", "var_mean", "mse_loss"), Rule(multilinear)),
    **dict.fromkeys(_APPROXIMATED.split(), Rule(path_average, is_exact=False)),
    **{name: Rule(by_steps(steps)) for name, steps in _COMPOSITES.items()},
    "linalg_norm": Rule(by_steps(composites.norm), refusal=composites.is_norm_of_matrix),
    **{name: Rule(composites.normed(_COMPOSITES[name])) for name in ("layer_norm", "rms_norm")},
    **dict.fromkeys(("softmax", "_safe_softmax", "_softmax"), Rule(softmax)),
    **dict.fromkeys(("log_softmax", "_log_softmax"), Rule(log_softmax)),
    **dict.fromkeys(("logsumexp", "special_logsumexp"), Rule(logsumexp)),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), Rule(composites.max_pool)),
    "cross_entropy": Rule(composites.cross_entropy),
    "scaled_dot_product_attention": Rule(by_steps(composites.attention), refusal=composites.refused_attention),
}
_NORMS = ("layer_norm", "rms_norm", "group_norm", "instance_norm", "normalize")
_RELP: dict[Any, Rule] = {
    **dict.fromkeys(relp.ACTIVATIONS, Rule(relp.identity)),
    **dict.fromkeys(relp.DENOMINATORS, Rule(relp.constant)),
    **dict.fromkeys(("mul", "multiply"), Rule(relp.half, is_multilinear=True)),
    "square": Rule(relp.half),
    "pow": Rule(relp.power, refusal=relp.refused_power),
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
    """The rules of a method for one pair of runs.

    Under `recording` and `applied`, all values are the same as without, to the last bit: only derivatives differ. Both
    runs must take the same steps. Enter them around the calls of a `PatchableGraph`, so that they see the steps of
    attention that patches open.

    Attributes:
        method: The name of the method; empty for the gradients of torch.
        fallbacks: Why a function does not explain the whole change of its result, by its name.
    """

    method: ClassVar[str] = ""

    def __init__(self) -> None:
        self.fallbacks: dict[str, str] = {}
        self.is_open = False
        self._seen: set[Any] = set()

    def recording(self) -> AbstractContextManager[Any]:
        """Returns a context manager for the run on the clean inputs, and its metric."""
        return nullcontext()

    def applied(self) -> AbstractContextManager[Any]:
        """Returns a context manager for the run with gradients on the corrupted inputs, and its metric."""
        return nullcontext()

    def before(self, args: Sequence[Any]) -> None:
        """Names what computed the arguments of a call of the run with gradients, if torch did not dispatch it."""
        for value in args:
            node = value.grad_fn if isinstance(value, Tensor) else None
            if node is not None and node not in self._seen and not type(node).__name__.startswith(_TRANSPARENT):
                kind = type(node).__name__.removesuffix("Backward")
                self.fallbacks.setdefault(kind, "it is not a function that torch dispatches, and keeps its derivative")

    def after(self, function: Callable[..., Any], args: Sequence[Any], result: Any, *, has_rule: bool) -> None:
        """Is given the result of each call of the run with gradients."""
        self._seen.update(value.grad_fn for value in (*_parts(result), *args) if isinstance(value, Tensor))

    def pass_on(self, value: Tensor, result: Tensor) -> None:
        """Is given a value of the run with gradients, and the same in another form."""


class SecantRules(DerivativeRules):
    """Rules that take each derivative from two runs.

    Attributes:
        tape: The calls of the clean run that have rules.
    """

    method: ClassVar[str] = "secant"

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[_Recorded] = []
        self._at = 0
        self._decisions: list[Tensor] = []
        self._decided = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.tape, self._decisions = [], []
        with _Recording(self):
            yield

    @contextmanager
    def applied(self) -> Iterator[None]:
        self._at = self._decided = 0
        try:
            with _Applied(self):
                yield
        finally:
            self._seen.clear()
        if self._at != len(self.tape):
            raise ExperimentError(self._parted(self.tape[self._at], None))
        self.tape, self._decisions = [], []

    def rule_for(self, function: Callable[..., Any]) -> Rule | None:
        """Returns the rule for a function; `None` for one whose own derivative is used."""
        found = _SECANT.get(function)
        return _SECANT.get(family_name(function)) if found is None else found

    def clean_counterpart(self, call: PairedCall) -> _Recorded:
        """Returns the record of the same call in the clean run, and notes which inputs differ."""
        recorded = self.tape[self._at] if self._at < len(self.tape) else None
        mine = _Recorded(family_name(call.function), [Held(x) for x in call.inputs])
        if recorded is None or (recorded.name, recorded.shapes) != (mine.name, mine.shapes):
            raise ExperimentError(self._parted(recorded, mine))
        self._at += 1
        call.differs = tuple(map(_is_different, recorded.inputs, call.inputs))
        return recorded

    def decide(self, function: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        """Records what a call of the clean run decides."""
        self._decisions += _decisions(function, args, result)

    def after(self, function: Callable[..., Any], args: Sequence[Any], result: Any, *, has_rule: bool) -> None:
        super().after(function, args, result, has_rule=has_rule)
        name = family_name(function)
        for decision in _decisions(function, args, result):
            clean = self._decisions[self._decided] if self._decided < len(self._decisions) else None
            self._decided += 1
            if clean is None or clean.shape != decision.shape or not torch.equal(clean, decision):
                self.fallbacks.setdefault(name, "it decides differently in the other run")
        inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
        results = [part for part in _parts(result) if part.is_floating_point() or part.is_complex()]
        if inputs and results and not torch.is_grad_enabled():
            self.fallbacks.setdefault(name, "the model computes it under torch.no_grad()")
        is_known = has_rule or name in LINEAR or name in _OPENED
        if inputs and not is_known and any(part.requires_grad for part in results):
            self.fallbacks.setdefault(name, "it has no rule here, and the derivative of torch")

    def _parted(self, clean: _Recorded | None, corrupted: _Recorded | None) -> str:
        return (
            f"the secant pairs the operations of the two runs, which diverge at operation {self._at + 1}: "
            f"{clean or 'nothing more'} in the clean run, {corrupted or 'nothing more'} in the corrupted run (mixtures "
            'of experts do that); use routing="frozen" or method="gradient", or inputs for which the model takes the '
            "same steps"
        )


_TRANSPARENT = ("View", "Alias", "Clone", "AccumulateGrad", "_Replaced", "CopyBackwards", "CopySlices", "AsStrided")


class RelPRules(DerivativeRules):
    """Rules that take each derivative from the corrupted run alone."""

    method: ClassVar[str] = "relp"

    def __init__(self) -> None:
        super().__init__()
        self._roots = relp.ElementwiseRoots()

    @contextmanager
    def applied(self) -> Iterator[None]:
        try:
            with _Applied(self):
                yield
        finally:
            self._seen.clear()
            self._roots = relp.ElementwiseRoots()

    def rule_for(self, function: Callable[..., Any]) -> Rule | None:
        return _RELP.get(family_name(function))

    def clean_counterpart(self, call: PairedCall) -> _Recorded:
        call.differs = tuple(map(self._roots.varies, call.inputs))
        roots = [self._roots.of(x) for x in call.inputs if self._roots.varies(x)]
        if len(roots) == 2 and roots[0].root is roots[1].root and call.inputs[0] is not call.inputs[1]:
            call.surrogate = relp.by_first if roots[0].is_multiple else relp.by_second if roots[1].is_multiple else None
        return _Recorded(family_name(call.function), [Held(x) for x in call.inputs])

    def after(self, function: Callable[..., Any], args: Sequence[Any], result: Any, *, has_rule: bool) -> None:
        super().after(function, args, result, has_rule=has_rule)
        self._roots.note(function, args, result)

    def pass_on(self, value: Tensor, result: Tensor) -> None:
        self._roots.pass_on(value, result)


@dataclass
class _Recorded:
    """A call of the clean run."""

    name: str
    inputs: list[Held]
    result: Held | None = None

    @property
    def shapes(self) -> list[torch.Size]:
        return [held.tensor.shape for held in self.inputs]

    def __str__(self) -> str:
        return f"{self.name} of {', '.join(str(tuple(shape)) for shape in self.shapes)}"


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


# -- modes -------------------------------------------------------------------------------------------------------------


class _Mode(TorchFunctionMode):
    """Sees all calls of a run."""

    def __init__(self, rules: Any) -> None:
        super().__init__()
        self._rules = rules
        self._writes = HeldTensors()
        self._weights: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is same_value:
            value, result = args
            if self._is_weight(value):
                self._weights[id(result)] = result
            self._rules.pass_on(value, result)
            return result
        kwargs = kwargs or {}
        self._rules.before(args)
        if family_name(func) in _OPENED:
            decomposition = decomposition_of(func)
            if decomposition is not None and decomposition.refusal(args, kwargs) is None:
                with self:
                    return decomposition.steps(is_fused=False)(*args, **kwargs)
        rule = self._rules.rule_for(func)
        call = None if rule is None else PairedCall(func, args, kwargs, self._rules)
        if rule is not None and call is not None and rule.fits(call):
            if not rule.is_multilinear or sum(not self._is_weight(x) for x in call.inputs) > 1:
                return self._with_rule(rule, call, args, kwargs)
        else:
            rule = None
        self._writes.before(func, args, kwargs)
        return self._plain(func, args, kwargs, has_rule=rule is not None)

    def _is_weight(self, value: Tensor) -> bool:
        known = (self._weights.get(id(each)) is each for each in (value, base_of(value)) if each is not None)
        return is_weight(value) or any(known)

    def _plain(self, func: Any, args: Any, kwargs: Any, *, has_rule: bool) -> Any:
        """Calls a function that keeps its own derivative: it does not have a rule, or its rule says so."""
        raise NotImplementedError

    def _with_rule(self, rule: Rule, call: PairedCall, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _Recording(_Mode):
    """Records the inputs of each call that has a rule."""

    def _plain(self, func: Any, args: Any, kwargs: Any, *, has_rule: bool) -> Any:
        result = func(*args, **kwargs)
        self._rules.decide(func, (*args, *kwargs.values()), result)
        return result

    def _with_rule(self, rule: Rule, call: PairedCall, args: Any, kwargs: Any) -> Any:
        func = call.function
        record = _Recorded(family_name(func), [self._writes.hold(x) for x in call.inputs])
        self._rules.tape.append(record)
        self._writes.before(func, args, kwargs)
        result = self._plain(func, args, kwargs, has_rule=True)
        if rule.keeps_result and isinstance(result, Tensor):
            record.result = self._writes.hold(result)
        return result


class _Applied(_Mode):
    """Replaces the derivatives of calls."""

    def __enter__(self) -> Any:
        self._rules.is_open = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._rules.is_open = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _plain(self, func: Any, args: Any, kwargs: Any, *, has_rule: bool) -> Any:
        result = func(*args, **kwargs)
        self._rules.after(func, (*args, *kwargs.values()), result, has_rule=has_rule)
        return result

    def _with_rule(self, rule: Rule, call: PairedCall, args: Any, kwargs: Any) -> Any:
        func = call.function
        recorded = self._rules.clean_counterpart(call)
        is_needed = torch.is_grad_enabled() and any(x.requires_grad for x in call.inputs) and any(call.differs)
        if not is_needed or (rule.is_multilinear and sum(call.differs) < 2):
            self._writes.before(func, args, kwargs)
            return self._plain(func, args, kwargs, has_rule=True)
        if _is_in_checkpoint():
            raise ExperimentError(
                "the model computes values again in backward (activation checkpointing), where derivative rules cannot "
                'follow: switch it off (model.gradient_checkpointing_disable()), or use method="gradient"'
            )
        if not rule.is_exact:
            self._rules.fallbacks.setdefault(family_name(func), "its rule is an approximation")
        replaced = _ReplacedCall(call, rule, recorded, [self._writes.hold(x) for x in call.inputs])
        self._writes.before(func, args, kwargs)
        apply: Any = _Replaced.apply
        result = apply(replaced, lambda: func(*args, **kwargs), *call.inputs)
        if rule.keeps_result and isinstance(result, Tensor):
            replaced.result = self._writes.hold(result)
        if replaced.kind is not None:
            result = replaced.kind(result)
        self._rules.after(func, (*args, *kwargs.values()), result, has_rule=True)
        return result


def _is_in_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT_FILE:
        frame = frame.f_back
    return frame is not None


_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


@dataclass
class _ReplacedCall:
    """A call whose derivative is replaced. `kind` is the type of its result, if that is not a tensor."""

    call: PairedCall
    rule: Rule
    recorded: _Recorded
    held: list[Held]
    result: Held | None = None
    kind: Any = None

    def products(self, needed: Sequence[bool], given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns the vector-Jacobian products of the rule."""
        call = self.call
        if call.rules.is_open:
            raise ExperimentError(
                f"the model computes derivatives itself, in which method={call.rules.method!r} would change "
                'values: use method="gradient"'
            )
        call.clean = tuple(widened(held.tensor) for held in self.recorded.inputs)
        call.corrupted = tuple(widened(held.tensor) for held in self.held)
        if self.recorded.result is not None and self.result is not None:
            results = (self.recorded.result.tensor, self.result.tensor)
            if sum(call.differs) == 1 and results[0].element_size() >= 4:  # of half precision, they are too coarse
                call.results = results
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(need) for x, need in zip(call.corrupted, needed, strict=True)]
            found = (call.surrogate or self.rule.surrogate)(call, *inputs)
            parts = found if isinstance(found, (tuple, list)) else [found]
            pairs = [
                (result, gradient.to(result.dtype))
                for result, gradient in zip(parts, given, strict=True)
                if gradient is not None and result is not None and result.requires_grad
            ]
        if not pairs:
            return [None] * len(needed)
        wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
        gradients = [gradient for _, gradient in pairs]
        found = iter(torch.autograd.grad([result for result, _ in pairs], wanted, gradients, allow_unused=True))
        answers = [next(found) if need else None for need in needed]
        return [
            None if answer is None else answer.to(held.tensor.dtype)
            for answer, held in zip(answers, self.held, strict=True)
        ]


def widened(tensor: Tensor) -> Tensor:
    """Returns a half-precision tensor in single precision, which sums over many products need."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


class _Replaced(torch.autograd.Function):
    """A call with its own value, and the derivative of a rule."""

    @staticmethod
    def forward(ctx: Any, replaced: _ReplacedCall, run: Callable[[], Any], *inputs: Tensor) -> Any:
        ctx.replaced = replaced
        ctx.set_materialize_grads(False)
        if replaced.call.is_in_place:
            ctx.mark_dirty(inputs[0])
            return run()
        # With gradients, as in the model itself: without, some kernels (such as the LSTM's) round differently.
        with torch.enable_grad():
            result = run()
        if isinstance(result, Tensor):
            return result.detach()
        replaced.kind = type(result)
        parts = tuple(part.detach() for part in result)
        ctx.mark_non_differentiable(*(part for part in parts if not part.is_floating_point()))
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        return (None, None, *ctx.replaced.products(ctx.needs_input_grad[2:], gradients))


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
