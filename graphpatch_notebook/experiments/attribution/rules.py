"""Derivative rules: an operation keeps its value, bit for bit, and gets another derivative.

A method is a table of rules by operation. Its `DerivativeRules` are a function mode around a run:

    rules = DerivativeRules("secant")
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

**Frozen denominators** (`FrozenDenominators`). The scales of norms are constants, as in direct logit attribution and in
attribution graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture import decomposition_of
from graphpatch_notebook.capture.frame_recorder import raw_name
from graphpatch_notebook.components import operations
from graphpatch_notebook.errors import ExperimentError, level_of_caller, warn
from graphpatch_notebook.experiments.attribution import secants
from graphpatch_notebook.experiments.attribution.secants import (
    PairedCall,
    Rule,
    Surrogate,
    by_steps,
    family_name,
    has_memory,
    inputs_in,
    is_in_place,
    is_weight,
    log_softmax,
    logsumexp,
    multilinear,
    path_average,
    quotient,
    softmax,
)
from graphpatch_notebook.patching.model_state import is_distributed, same_value
from graphpatch_notebook.torch_compat import base_of, is_awaited

Method: TypeAlias = Literal["gradient", "integrated", "secant"]
METHODS: tuple[Method, ...] = ("gradient", "integrated", "secant")
Points: TypeAlias = Literal["midpoint", "left", "right"]
_OFFSETS = {"midpoint": 0.5, "left": 0.0, "right": 1.0}

# -- frozen denominators -----------------------------------------------------------------------------------------------

_DENOMINATORS = frozenset("rsqrt sqrt var std norm vector_norm linalg_vector_norm linalg_norm".split())
_NORMS: dict[str, Callable[..., Any]] = {
    "layer_norm": secants.layer_norm,
    "rms_norm": secants.rms_norm,
    "group_norm": secants.group_norm,
    "normalize": lambda x, p=2.0, dim=1, eps=1e-12, **_: x / torch.linalg.vector_norm(x, p, dim, True).clamp_min(eps),
}
"""Norms as steps of plain torch."""


class FrozenDenominators(TorchFunctionMode):
    """Holds the denominators of norms: what the first run computes are constants, there and in later runs.

    Derivatives do not go through them, and a later run has them whatever comes before its norms. Norms are computed
    step by step, as kernels do it: those of half precision in float32, so that values are equal within rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Tensor] = []
        self._left: Iterator[Tensor] | None = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context manager for a later run, in which values before the norms may be others."""
        self._left = iter(self._made)
        with self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, family_name(func)
        if name in _NORMS:
            wide = {key: _wide(each) for key, each in kwargs.items()}
            with self:
                return _NORMS[name](*map(_wide, args), **wide).to((*args, *kwargs.values())[0].dtype)
        exponent = (*args[1:2], kwargs.get("exponent"))[0] if name == "pow" else None
        is_root = isinstance(exponent, (int, float)) and abs(exponent) == 0.5 and raw_name(func) != "__rpow__"
        if not (name in _DENOMINATORS or is_root):
            return func(*args, **kwargs)
        if self._left is None:
            self._made.append(func(*args, **kwargs).detach())
            return self._made[-1].clone()
        made = next(self._left, None)
        if made is None:
            raise ExperimentError("the norms cannot be frozen: the model computes others in its second run")
        return made.clone()


def _wide(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


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
    instance_norm cosine_similarity prelu max_pool1d max_pool2d max_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d linalg_solve_triangular linalg_solve linalg_inv
"""
_COMPOSITES: dict[str, Callable[..., Any]] = {
    "layer_norm": secants.layer_norm,
    "rms_norm": secants.rms_norm,
    "group_norm": secants.group_norm,
    "std": secants.std,
    "glu": secants.glu,
    "amax": secants.amax,
    "amin": secants.amin,
    "max": secants.largest,
    "min": secants.smallest,
}
_SECANT: dict[Any, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), Rule(quotient)),
    **dict.fromkeys(_MULTILINEAR.split(), Rule(multilinear, is_multilinear=True)),
    **dict.fromkeys(("var", "var_mean", "mse_loss"), Rule(multilinear)),
    **dict.fromkeys(_APPROXIMATED.split(), Rule(path_average, is_exact=False)),
    **{name: Rule(by_steps(steps)) for name, steps in _COMPOSITES.items()},
    **dict.fromkeys(
        ("norm", "vector_norm", "linalg_vector_norm", "linalg_norm"),
        Rule(by_steps(secants.norm), refusal=secants.refused_norm),
    ),
    "normalize": Rule(by_steps(secants.normalize), refusal=lambda call: call.argument(1, "p", 2) != 2),
    # In training, its own derivative.
    "batch_norm": Rule(multilinear, is_multilinear=True, refusal=lambda call: bool(call.argument(5, "training"))),
    # Its targets are the numbers of classes alone.
    "cross_entropy": Rule(
        by_steps(secants.cross_entropy),
        refusal=lambda call: len(call.inputs) > 1 or bool(call.argument(7, "label_smoothing")),
    ),
    **dict.fromkeys(("softmax", "_safe_softmax", "_softmax"), Rule(softmax)),
    **dict.fromkeys(("log_softmax", "_log_softmax"), Rule(log_softmax)),
    **dict.fromkeys(("logsumexp", "special_logsumexp"), Rule(logsumexp)),
    # With dropout, its steps would draw other random numbers.
    "scaled_dot_product_attention": Rule(
        by_steps(secants.attention), refusal=lambda call: bool(call.argument(4, "dropout_p"))
    ),
}
_OPENED = frozenset({"multi_head_attention_forward"})
"""Functions whose steps give their very bits: they are run step by step."""

_CHOICES = (operations.CHOICES - {"max"}) | {"argsort", "argmin"}
_COMPARISONS = frozenset("gt lt ge le".split())


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


class DerivativeRules(TorchFunctionMode):
    """The rules of a method for one pair of runs.

    Under `recording` and `applied`, all values are the same as without, to the last bit: only derivatives differ. Both
    runs must take the same steps. Enter them around the calls of a `PatchableGraph`, so that they see the steps of
    attention that patches open.

    The calls of the clean run are kept on a tape, for the secant.

    Attributes:
        fallbacks: Why a function does not explain the whole change of its result, by its name.
    """

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method, self._table = method, _SECANT if method == "secant" else {}
        self.fallbacks: dict[str, str] = {}
        self.is_open = self._is_recording = self._has_distributed = False
        self._tape: list[PairedCall] = []
        self._at = 0
        self._seen: set[Any] = set()
        self._held: dict[int, list[tuple[list[Tensor], int]]] = {}
        self._weights: dict[int, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context manager for the run on the clean inputs, and its metric."""
        if self.method != "secant":
            yield
            return
        self._tape, self._is_recording = [], True
        with self:
            yield
        self._is_recording, self._held = False, {}
        self._refuse_distributed()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context manager for the run with gradients on the corrupted inputs, and its metric."""
        if not self._table:
            yield
            return
        self._at, self.is_open = 0, True
        try:
            with self:
                yield
        finally:
            self.is_open, self._held = False, {}
            self._seen.clear()
        self._refuse_distributed()
        if self._at != len(self._tape):
            raise ExperimentError(self._parted(self._tape[self._at], None))
        self._tape = []

    def _refuse_distributed(self) -> None:
        if self._has_distributed:
            raise ExperimentError(
                'the model computes with DTensors, which derivative rules cannot follow: use method="gradient", or a '
                "plan whose modules return local tensors (use_local_output=True)"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is same_value:
            return self._same_value(*args)
        kwargs = kwargs or {}
        every = (*args, *kwargs.values())
        if not self._is_recording:
            self._name_unseen(args)
        decomposition = decomposition_of(func) if family_name(func) in _OPENED else None
        if decomposition is not None and decomposition.refusal(args, kwargs) is None:
            with self:
                return decomposition.steps(is_fused=False)(*args, **kwargs)
        call, has_rule = self._call(func, args, kwargs)
        replaced = call if call is not None and self._is_replaced(call) else None
        if replaced is not None:
            self._hold(replaced)
        if self._held and is_in_place(func, args, kwargs):
            self._copy_before_write(every)
        if self._is_recording or replaced is None:
            result = func(*args, **kwargs)
        else:
            apply: Any = _Replaced.apply
            result = apply(replaced, lambda: func(*args, **kwargs), *replaced.inputs)
            result = result if replaced.kind is None else replaced.kind(result)
        self._after(func, every, result, has_rule=has_rule)
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> tuple[PairedCall | None, bool]:
        """Returns a call that may get the derivative of its rule, `None` for others, and whether there is a rule."""
        rule = self._table.get(func) or self._table.get(family_name(func))
        inputs = [] if rule is None else inputs_in((*args, *kwargs.values()))
        if rule is None or not inputs or not all(map(has_memory, inputs)):
            return None, False
        if rule.refusal is not None and rule.refusal(PairedCall(func, args, kwargs, rule, self)):
            return None, False
        # Products with weights: most calls of most models.
        is_linear = rule.is_multilinear and sum(not self._is_weight(x) for x in inputs) < 2
        return None if is_linear else PairedCall(func, args, kwargs, rule, self), True

    def _is_replaced(self, call: PairedCall) -> bool:
        """Whether a call gets the derivative of its rule: it is kept in the clean run, and replaced in the other."""
        if any(map(is_distributed, call.inputs)):
            # An error here would leave masks of vocabulary-parallel embeddings behind, in torch: after the run.
            self._has_distributed = True
            return False
        if self._is_recording:
            self._tape.append(call)
            return True
        self._pair(call)
        is_needed = torch.is_grad_enabled() and any(x.requires_grad for x in call.inputs) and any(call.differs)
        if not is_needed or (call.rule.is_multilinear and sum(call.differs) < 2):
            return False
        if not call.rule.is_exact:
            self.fallbacks.setdefault(family_name(call.function), "its rule is an approximation")
        return True

    def _pair(self, call: PairedCall) -> None:
        """Finds the same call in the clean run, and which inputs differ."""
        clean = self._tape[self._at] if self._at < len(self._tape) else None
        if clean is None or clean.signature != call.signature:
            raise ExperimentError(self._parted(clean, call))
        self._at += 1
        call.counterpart, call.differs = clean, tuple(map(_is_different, clean.held, call.inputs))

    def _after(self, function: Callable[..., Any], args: Sequence[Any], result: Any, *, has_rule: bool) -> None:
        """Is given the result of each call."""
        if self._is_recording:
            return
        given = [arg for arg in args if isinstance(arg, Tensor)]
        self._seen.update([value.grad_fn for value in (*_parts(result), *given)])
        name = family_name(function)
        has_gradient = any(arg.requires_grad for arg in given)
        if name in _CHOICES or (has_gradient and name in _COMPARISONS):
            self.fallbacks.setdefault(name, "no derivative follows what it chooses by values")
        if not has_gradient:
            return
        results = [part for part in _parts(result) if part.is_floating_point() or part.is_complex()]
        if results and not torch.is_grad_enabled():
            self.fallbacks.setdefault(name, "the model computes it under torch.no_grad()")
        is_known = has_rule or name in LINEAR or name in _OPENED
        if not is_known and any(part.requires_grad for part in results):
            self.fallbacks.setdefault(name, "it has no rule here, and the derivative of torch")

    def _same_value(self, value: Tensor, result: Tensor) -> Tensor:
        """Is given a value, and the same in another form: all of it, or what this process holds of it."""
        if self._is_weight(value):
            self._weights[id(result)] = result
        return result

    def _is_weight(self, value: Tensor) -> bool:
        if is_weight(value) or not self._weights:
            return is_weight(value)
        return any(self._weights.get(id(each)) is each for each in (value, base_of(value)) if each is not None)

    def _hold(self, call: PairedCall) -> None:
        """Keeps the inputs of a call as they are now: they are copied before the model writes into them."""
        # A clone waits for it.
        call.held = [x.detach().clone() if is_awaited(x) else x.detach() for x in call.inputs]
        for number, x in enumerate(call.held):
            self._held.setdefault(x.untyped_storage().data_ptr(), []).append((call.held, number))
        if self._is_recording:
            call.inputs.clear()

    def _copy_before_write(self, args: Sequence[Any]) -> None:
        target = next((arg for arg in args if isinstance(arg, Tensor)), None)
        if target is not None and has_memory(target):
            for held, number in self._held.pop(target.untyped_storage().data_ptr(), ()):
                held[number] = held[number].clone()

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


def _parts(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [part for part in result if isinstance(part, Tensor)] if isinstance(result, (tuple, list)) else []


def _is_different(clean: Tensor, corrupted: Tensor) -> bool:
    if clean.data_ptr() == corrupted.data_ptr() and clean.stride() == corrupted.stride():
        return False
    return corrupted.requires_grad or not torch.equal(clean, corrupted)


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
    call.clean, call.corrupted = (tuple(map(widened, run.held)) for run in runs)
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_(need) for x, need in zip(call.corrupted, needed, strict=True)]
        found = call.rule.surrogate(call, *inputs)
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
    return [None if each is None else each.to(x.dtype) for each, x in zip(products, call.held, strict=True)]


def widened(tensor: Tensor) -> Tensor:
    """Returns a half-precision tensor in single precision, which sums over many products need."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def check_method(method: Any, known: Sequence[str] = METHODS) -> None:
    """Checks the name of a method."""
    if method not in known:
        raise ExperimentError(f"method must be one of {', '.join(map(repr, known))}, not {method!r}")


def path_fractions(steps: int, points: Points) -> list[float]:
    """Returns points on the way from the corrupted run (0) to the clean run (1): one in each of `steps` equal parts.

    The error of integrated gradients falls with the square of their number at midpoints, and with their number at ends.
    """
    if type(steps) is not int or steps < 1:
        raise ExperimentError(f"steps must be a positive integer, not {steps!r}")
    if points not in _OFFSETS:
        raise ExperimentError(f"points must be one of {', '.join(map(repr, _OFFSETS))}, not {points!r}")
    return [(step + _OFFSETS[points]) / steps for step in range(steps)]
