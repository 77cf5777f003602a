"""Calls of torch that treat each vector, along the last dimension of a tensor, by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Call:
    """A call: what it was given, which of these tensors are not the same in each run, and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    moving: Sequence[Tensor]
    result: Any

    @property
    def is_of_first(self) -> bool:
        """Whether its first argument is all that moves."""
        return len(self.moving) == 1 and self.args[0] is self.moving[0]

    @property
    def keeps_lead(self) -> bool:
        """Whether all that moves, and the result, have the same leading dimensions."""
        return isinstance(self.result, Tensor) and all(t.shape[:-1] == self.result.shape[:-1] for t in self.moving)

    def given(self, place: int, name: str, default: Any = None) -> Any:
        """Returns an argument."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def is_along_last(self, place: int, default: Any = None) -> bool:
        """Whether the dimension that it was given is the last."""
        dim = self.given(place, "dim", default)
        if isinstance(dim, (tuple, list)):
            dim = dim[0] if len(dim) == 1 else None
        return type(dim) is int and dim in (-1, self.moving[0].dim() - 1)


def _elementwise(call: _Call) -> bool:
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
    return call.keeps_lead and all(any(t is m for m in call.moving) or _is_shared(t) for t in tensors)


def _reshaping(call: _Call) -> bool:
    first, result = call.args[0], call.result
    return first is call.moving[0] and result.numel() == first.numel() and result.shape[-1] == first.shape[-1]


def _reducing(call: _Call) -> bool:
    is_kept = call.keeps_lead and call.result.dim() == call.moving[0].dim() and call.result.shape[-1] == 1
    return is_kept and call.is_of_first and call.is_along_last(1)


def _normalizing(call: _Call) -> bool:
    shape = call.given(1, "normalized_shape")
    return call.is_of_first and isinstance(shape, (tuple, list)) and len(shape) == 1


def _multiplying(call: _Call) -> bool:
    other = call.given(1, "other")
    return call.keeps_lead and call.is_of_first and isinstance(other, Tensor) and other.dim() == 2


def _adding_product(call: _Call) -> bool:
    if len(call.args) != 3 or len(call.moving) != 1:
        return False
    bias, vectors, weight = call.args
    return call.keeps_lead and vectors is call.moving[0] and _is_shared(bias) and weight.dim() == 2


def _getting(call: _Call) -> bool:
    index = call.args[1]
    is_part = type(index) is tuple and len(index) == 2 and index[0] is Ellipsis and type(index[1]) is slice
    return is_part and call.keeps_lead


_ELEMENTWISE = """
    add sub mul div true_divide truediv pow neg abs exp expm1 log log1p sqrt rsqrt square reciprocal tanh sigmoid
    logsigmoid relu relu6 gelu silu mish selu elu celu leaky_relu hardswish hardsigmoid hardtanh softplus softsign erf
    sin cos clamp clip clamp_min clamp_max minimum maximum to type type_as float half double bfloat16 detach clone
    contiguous copysign threshold radd rsub rmul rtruediv rdiv rpow
"""
_RULES: dict[str, Callable[[_Call], bool]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys("view reshape flatten unflatten unsqueeze squeeze view_as reshape_as".split(), _reshaping),
    **dict.fromkeys("mean sum amax amin var std".split(), _reducing),
    **dict.fromkeys(
        "softmax log_softmax".split(), lambda call: call.keeps_lead and call.is_of_first and call.is_along_last(1)
    ),
    "glu": lambda call: call.keeps_lead and call.is_of_first and call.is_along_last(1, -1),
    "layer_norm": _normalizing,
    "rms_norm": _normalizing,
    "linear": lambda call: call.keeps_lead and call.is_of_first,
    "matmul": _multiplying,
    "mm": _multiplying,
    "addmm": _adding_product,
    "dropout": lambda call: call.is_of_first and call.given(2, "training", True) is False,
    "chunk": lambda call: call.is_of_first and call.is_along_last(2, 0),
    "split": lambda call: call.is_of_first and call.is_along_last(2, 0),
    "tensor_split": lambda call: call.is_of_first and call.is_along_last(2, 0),
    "cat": lambda call: call.keeps_lead and len(call.moving) == len(call.args[0]) and call.is_along_last(1, 0),
    "getitem": _getting,
}
_IN_PARTS = frozenset({"chunk", "split", "tensor_split"})


def keeps_vectors(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], moving: Sequence[Tensor], result: Any
) -> bool:
    """Whether a call makes of each vector, or of those at the same place in several tensors, one at that place.

    Args:
        name: The (raw) name of the function.
        args: What it was given.
        kwargs: What it was given by keyword.
        moving: Those of its tensors that are not the same in each run: the others must be shared by all vectors.
        result: What it returned.

    Example:
        >>> import torch
        >>> x, weight = torch.ones(1, 3, 4), torch.ones(5, 4)
        >>> keeps_vectors("linear", (x, weight), {}, [x], torch.nn.functional.linear(x, weight))
        True
        >>> keeps_vectors("mean", (x, 1), {"keepdim": True}, [x], x.mean(1, keepdim=True))
        False
    """
    name = name.strip("_")
    rule = _RULES.get(name)
    if rule is None or not args or "out" in kwargs or any(tensor.dim() < 2 for tensor in moving):
        return False
    if name not in _IN_PARTS and not isinstance(result, Tensor):
        return False
    return rule(_Call(args, kwargs, moving, result))


def picks_last(name: str, args: tuple[Any, ...], lead: tuple[int, ...]) -> bool:
    """Whether a call takes the vectors at the last position, and no others, of a tensor.

    Args:
        name: The (raw) name of the function.
        args: What it was given: the tensor first.
        lead: Its dimensions but for the last: sequences, and positions.

    Example:
        >>> import torch
        >>> x = torch.ones(2, 7, 4)
        >>> picks_last("__getitem__", (x, (slice(None), slice(-1, None), slice(None))), (2, 7))
        True
    """
    if name != "__getitem__" or len(lead) != 2 or args[0].shape[:-1] != lead:
        return False
    index = args[1]
    if type(index) is not tuple or len(index) < 2 or index[0] != slice(None):
        return False
    last = index[1]
    is_last = (type(last) is int and last in (-1, lead[1] - 1)) or (
        type(last) is slice and last.indices(lead[1]) == (lead[1] - 1, lead[1], 1)
    )
    return is_last and all(type(part) is slice for part in index[2:])


def _is_shared(tensor: Tensor) -> bool:
    """Whether all vectors meet the same numbers of a tensor: it has none but along the last dimension."""
    return all(size == 1 for size in tensor.shape[:-1])
