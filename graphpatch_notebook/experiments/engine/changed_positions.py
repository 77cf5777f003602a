"""In a batch of cells, position-wise modules compute only the positions that patches have changed.

In a causal model, patches do not change the positions before them. A *position-wise* frame (an MLP, a projection)
computes the vector at each position from the input vector at that position only. Where its input is the same as in the
run without patches, its result is the recorded one. On GPT-2 124M this makes a sweep over 12 layers x 16 positions 1.8
times as fast.

    ValueReads        records when Python reads values of tensors, after which a model may take other branches
    PositionFlow      follows vectors through the run without patches, to find the position-wise frames and those with
                      results that are read at the last position only
    keeps_vectors     whether a call of torch is position-wise; unknown functions are assumed not to be
    SameSteps         whether another run makes the same calls, so that the flow of the first one is valid for it
    ChangedPositions  replaces the forward of a position-wise frame in a batch
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture import SIZED_BY_VALUES, is_call_sized_by_values
from graphpatch_notebook.capture.functions import METADATA_READS, SIZE_READS, VALUE_READS, raw_name, writes_in_place
from graphpatch_notebook.capture.held_values import all_modules, plain_tensors
from graphpatch_notebook.execution import FrameNode, FrameTree, leaves_of
from graphpatch_notebook.torch_compat import without_torch_functions
from graphpatch_notebook.values import IMMUTABLE

# -- reads of values ---------------------------------------------------------------------------------------------------

_SIZED_BY_SOME = frozenset({"__getitem__", "where", "repeat_interleave", "__iter__"})


class ValueReads(TorchFunctionMode):
    """Records when values of tensors are read into Python (`if x.max() > 0`, `x.item()`), or determine a shape.

    Args:
        tree: The frames; its clock is used.
        clean: Tensors from before the run. Reads of these, and of tensors computed only from these, do not count. All
            other reads count, including those of outputs of autograd functions, which are computed where modes do not
            receive calls.

    Attributes:
        last: The time of the last read that counts; 0 for never.
        last_of_all: The time of the last read of any value; 0 for never.
    """

    def __init__(self, tree: FrameTree, clean: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._tree = tree
        self.last = 0
        self.last_of_all = 0
        self._clean: dict[int, weakref.ref[Tensor]] = {}
        self._is_mixed = False
        for tensor in clean:
            self._add(tensor)

    def notice(self, value: Any) -> None:
        """Called when a patched value occurs: reads of it count."""
        with without_torch_functions():
            for leaf in leaves_of(value):
                self._clean.pop(id(leaf), None)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._watched(func, args, kwargs, plain_tensors((*args, *kwargs.values())))

    def _watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        """Makes the call and returns its result; `given` are the tensors in its arguments."""
        name = raw_name(func)
        is_read = _may_hand_out_values(func) and _hands_out_values(name, args)
        is_clean = not self._is_mixed and all(map(self._is_clean, given))
        if is_read:
            self.last_of_all = self._tree.tick()
            self.last = self.last if is_clean else self.last_of_all
        result = func(*args, **kwargs)
        if is_clean:
            for tensor in plain_tensors((result,)):
                self._add(tensor)
        elif writes_in_place(name, kwargs) and given and self._is_clean(given[0]):
            self._is_mixed = True  # other tensors may share its memory
        return result

    def _add(self, tensor: Tensor) -> None:
        self._clean[id(tensor)] = weakref.ref(tensor)

    def _is_clean(self, tensor: Tensor) -> bool:
        known = self._clean.get(id(tensor))
        return known is not None and known() is tensor


@functools.lru_cache(maxsize=4096)
def _may_hand_out_values(func: Any) -> bool:
    """Whether the function reads values for some arguments. Cached, since it runs for each call of torch."""
    name = raw_name(func)
    return name in VALUE_READS or name in SIZED_BY_VALUES or name in _SIZED_BY_SOME


def _hands_out_values(name: str, args: tuple[Any, ...]) -> bool:
    return name in VALUE_READS or name == "__iter__" or is_call_sized_by_values(name, args)


# -- calls of torch ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """A call: its arguments, the tensors among them that vary between runs (`moving`), and its result."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    moving: Sequence[Tensor]
    result: Any

    @property
    def is_of_first(self) -> bool:
        """Whether only its first argument varies."""
        return len(self.moving) == 1 and self.args[0] is self.moving[0]

    @property
    def keeps_lead(self) -> bool:
        """Whether the result and all tensors that vary have the same leading dimensions."""
        return isinstance(self.result, Tensor) and all(t.shape[:-1] == self.result.shape[:-1] for t in self.moving)

    def given(self, place: int, name: str, default: Any = None) -> Any:
        """Returns an argument."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def is_along_last(self, place: int, default: Any = None) -> bool:
        """Whether the argument `dim` is the last dimension."""
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
    """Whether a call is position-wise: each vector of the result depends only on the vectors at the same position.

    Args:
        name: The (raw) name of the function.
        args: The positional arguments.
        kwargs: The keyword arguments.
        moving: The tensors among them that vary between runs. All vectors must share the other tensors.
        result: The result of the call.

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
    """Whether a call selects exactly the vectors at the last position of a tensor.

    Args:
        name: The (raw) name of the function.
        args: The positional arguments; the first one is the tensor.
        lead: The sizes of all but its last dimension: `(batch, positions)`.

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
    """Whether all vectors share a tensor: only its last dimension may be larger than 1."""
    return all(size == 1 for size in tensor.shape[:-1])


# -- the steps of a run ------------------------------------------------------------------------------------------------

_MANY = 16


class TorchCalls:
    """The calls of a run: functions, with the arguments that are plain values."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, _Settings | None]] = []

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adds a call."""
        self.calls.append((func, _settings(args, kwargs)))


_Settings: TypeAlias = "tuple[list[Any], dict[str, Any]]"
"""The arguments of a call that are not tensors, positional and by keyword."""


def _settings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Settings | None:
    """Returns the arguments of a call that are not tensors; `None` if there are none."""
    settings = [_plain(value) for value in args]
    if kwargs or any(setting is not None for setting in settings):
        return settings, {name: _plain(value) for name, value in kwargs.items()}
    return None


def _has_settings(settings: _Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has these arguments. This runs for each call of torch, so it builds nothing."""
    expected, by_name = settings
    if len(args) != len(expected) or len(kwargs) != len(by_name):
        return False
    for value, setting in zip(args, expected, strict=True):
        if value is not setting and not (setting is None and isinstance(value, Tensor)) and _plain(value) != setting:
            return False
    return not kwargs or (
        kwargs.keys() == by_name.keys() and all(_plain(value) == by_name[name] for name, value in kwargs.items())
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):  # the most frequent case, and the cheapest check
        return None
    if isinstance(value, IMMUTABLE):
        return value
    if type(value) in (tuple, list) and len(value) <= _MANY:
        return [_plain(item) for item in value]
    return None


class SameSteps(TorchFunctionMode):
    """Checks whether a run makes the same calls as an earlier one.

    Args:
        steps: The calls of the earlier run.
    """

    def __init__(self, steps: TorchCalls) -> None:
        super().__init__()
        self._expected = iter(steps.calls)
        self._has_strayed = False

    @property
    def is_same(self) -> bool:
        """Whether the calls were the same; read it after the run."""
        self._has_strayed = self._has_strayed or next(self._expected, None) is not None
        return not self._has_strayed

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._has_strayed:
            expected, settings = next(self._expected, _NONE_LEFT)
            self._has_strayed = (func is not expected and func != expected) or (
                settings is not None and not _has_settings(settings, args, kwargs)
            )
        return func(*args, **kwargs)


_NONE_LEFT = (None, None)


# -- position-wise frames ----------------------------------------------------------------------------------------------

Place = tuple[tuple[int, int], ...]
"""Identifies a frame in all runs, as `FrameNode.place`."""

_READS = SIZE_READS | METADATA_READS | {"dtype", "device", "layout", "is_cuda", "is_floating_point", "is_contiguous"}


@dataclass(frozen=True, slots=True)
class _Tag:
    """The frames that a tensor was computed from by position-wise calls, as sets of one bit for each frame.

    Attributes:
        given: The frames with inputs that it was computed from.
        returned: The frames with results that it was computed from.
        lead: The leading dimensions of the first of these inputs.
    """

    given: int
    returned: int
    lead: tuple[int, ...]


class PositionFlow(ValueReads):
    """Follows vectors through a run, and records the reads of values and the calls of the run.

    Args:
        tree: The frames; its clock is used.
        weights: Tensors that are the same in each run.
        inputs: The tensors in the inputs of the model.

    Attributes:
        steps: The calls of the run.
    """

    def __init__(self, tree: FrameTree, weights: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        super().__init__(tree)
        self.steps = TorchCalls()
        self._fixed = {id(tensor): weakref.ref(tensor) for tensor in weights}
        self._seen = {id(tensor): weakref.ref(tensor) for tensor in inputs}
        self._is_lost = False
        self._tags: dict[int, tuple[weakref.ref[Tensor], _Tag]] = {}
        self._bits: dict[FrameNode, int] = {}
        self._running = 0
        self._mixing = 0
        self._read = 0

    # -- frames --------------------------------------------------------------------------------------------------------

    def begins(self, node: FrameNode, value: Tensor) -> bool:
        """Called when a frame begins that has one tensor as its input."""
        bit = self._bits[node] = 1 << len(self._bits)
        lead = tuple(value.shape[:-1])
        tag = self._tag(value)
        if tag is not None and tag.lead != lead:
            self._read |= tag.returned
            tag = None
        given, returned = (0, 0) if tag is None else (tag.given, tag.returned)
        self._set(value, _Tag(given | bit, returned, lead))
        self._running |= bit
        return True

    def returns(self, node: FrameNode, given: Tensor, output: Any) -> bool:
        """Called when the frame returns; returns whether it is position-wise."""
        bit = self._bits[node]
        self._running &= ~bit
        tag = self._tag(output) if isinstance(output, Tensor) else None
        if (
            self._is_lost
            or tag is None
            or not tag.given & bit
            or self._mixing & bit
            or output.shape[:-1] != given.shape[:-1]
        ):
            self._mixing |= bit
            return False
        self._set(output, _Tag(tag.given, tag.returned | bit, tag.lead))
        return True

    def fails(self, node: FrameNode) -> None:
        """Called when the frame raises."""
        bit = self._bits.get(node, 0)  # missing if an interrupt arrived as the frame began
        self._running &= ~bit
        self._mixing |= bit

    def read_at_last_only(self, output: Any) -> set[FrameNode]:
        """Returns the frames with results that are read at the last position only, if the model returned `output`."""
        for leaf in leaves_of(output):
            if isinstance(leaf, Tensor):
                self._is_lost = self._is_lost or not (self._is_fixed(leaf) or _holds(self._seen, leaf))
                tag = self._tag(leaf)
                self._read |= 0 if tag is None else tag.returned
        return set() if self._is_lost else {n for n, bit in self._bits.items() if not (self._read | self._mixing) & bit}

    # -- calls ---------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.steps.note(func, args, kwargs)
        given = plain_tensors((*args, *kwargs.values()))
        result = self._watched(func, args, kwargs, given)
        # An unknown tensor was made where no mode receives calls, from unknown values.
        self._is_lost = self._is_lost or not all(self._is_fixed(t) or _holds(self._seen, t) for t in given)
        made = plain_tensors((result,))
        for tensor in made:
            self._seen[id(tensor)] = weakref.ref(tensor)
        moving = [tensor for tensor in given if not self._is_fixed(tensor)]
        if not moving:
            for tensor in made:
                self._fixed[id(tensor)] = weakref.ref(tensor)
        else:
            name = raw_name(func)
            if name not in _READS:
                self._follow(name, args, kwargs, moving, result)
        return result

    def _follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], moving: list[Tensor], result: Any
    ) -> None:
        written = args[0] if writes_in_place(name, kwargs) and args else None
        # A tensor that was the same in each run now varies, and others may share its memory.
        self._is_lost = self._is_lost or "out" in kwargs or (isinstance(written, Tensor) and self._is_fixed(written))
        tags = [self._tag(tensor) for tensor in moving]
        known = [tag for tag in tags if tag is not None]
        if not known:
            for tensor in plain_tensors((result,)):
                self._tags.pop(id(tensor), None)
            return
        all_given, all_returned, shared = 0, 0, -1
        for tag in known:
            all_given, all_returned, shared = all_given | tag.given, all_returned | tag.returned, shared & tag.given
        is_joined = len(known) == len(tags) and all(tag.lead == known[0].lead for tag in known)
        if written is not None and (
            not isinstance(written, Tensor)
            or (own := self._tag(written)) is None
            or (all_given & ~own.given) | (all_returned & ~own.returned)
        ):
            is_joined = False
        if is_joined and keeps_vectors(name, args, kwargs, moving, result):
            # A running frame must compute the result from its inputs alone: other tensors may differ by position.
            self._mixing |= all_given & ~shared & self._running
            for tensor in plain_tensors((result,)):
                self._set(tensor, _Tag(all_given, all_returned, known[0].lead))
            return
        self._mixing |= all_given & self._running
        if not (is_joined and picks_last(name, args, known[0].lead)):
            self._read |= all_returned
        for tensor in plain_tensors((result,)):
            self._tags.pop(id(tensor), None)

    def _is_fixed(self, tensor: Tensor) -> bool:
        return _holds(self._fixed, tensor)

    def _tag(self, tensor: Tensor) -> _Tag | None:
        known = self._tags.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _set(self, tensor: Tensor, tag: _Tag) -> None:
        self._tags[id(tensor)] = (weakref.ref(tensor), tag)


def _holds(known: dict[int, weakref.ref[Tensor]], tensor: Tensor) -> bool:
    found = known.get(id(tensor))
    return found is not None and found() is tensor


@dataclass(frozen=True)
class RecordedFlow:
    """The result of a `PositionFlow`, for other runs that take the same steps.

    Attributes:
        steps: The calls of the run.
        position_wise: The places of position-wise frames.
        last_only: The places of position-wise frames with results that are read at the last position only.
    """

    steps: TorchCalls
    position_wise: frozenset[Place]
    last_only: frozenset[Place]

    def begins(self, node: FrameNode, value: Tensor) -> bool:
        """Returns whether the frame is position-wise."""
        return node.place in self.position_wise

    def returns(self, node: FrameNode, given: Tensor, output: Any) -> bool:
        """Called for position-wise frames only."""
        return True

    def fails(self, node: FrameNode) -> None:
        """Does nothing: the flow is known."""


# -- replacements of their forwards ------------------------------------------------------------------------------------

_WHOLE = 0.8
"""If a larger fraction of positions has changed, all are computed: selecting them would cost more."""

LEAST_OPERATIONS = {"cpu": 1e7, "other": 4e9}
"""A module that needs fewer operations for a forward computes all positions: to find those that changed costs more."""


class ChangedPositions:
    """Replaces the `forward` of one position-wise frame.

    Args:
        node: The frame, with its input and result in the run without patches.
        least: If there are not more positions than this, all are computed.
    """

    def __init__(self, node: FrameNode, least: float) -> None:
        assert node.pair is not None
        self._given, self._returned = node.pair
        self._last_only = False
        self._may_share = not node.is_written_later
        self._least = least

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        (value,) = (*args, *kwargs.values())
        given, returned = self._given, self._returned
        if not self._is_like_given(value):
            return forward(*args, **kwargs)
        size = given.shape[0]
        count = value.shape[0] // size
        places = self._changed(value.reshape(count, size, *value.shape[1:]))
        changed = places.shape[0]
        if changed > _WHOLE * (value.numel() // value.shape[-1]):
            return forward(*args, **kwargs)
        shared = returned.expand(count, *returned.shape)
        if not changed and self._may_share and size == 1:
            return shared.squeeze(1)
        result = shared.clone(memory_format=torch.contiguous_format).flatten(0, 1)
        if changed:
            computed = self._computed(forward, value.flatten(0, -2), places, *kwargs)
            if computed.dtype != result.dtype:
                return forward(*args, **kwargs)
            result.flatten(0, -2).index_copy_(0, places, computed)
        return result

    def _changed(self, values: Tensor) -> Tensor:
        """Returns the flat indices of the vectors to compute; `values` is `(cells, batch, positions, size)`."""
        if not self._last_only:
            return differing(values, self._given).flatten().nonzero().squeeze(1)
        length = values.shape[2]
        changed = differing(values[:, :, -1], self._given[:, -1]).flatten()
        return changed.nonzero().squeeze(1) * length + (length - 1)

    def _is_like_given(self, value: Any) -> bool:
        if type(value) is not Tensor:
            return False
        given = self._given
        shape, own = value.shape, given.shape
        return (
            shape[1:] == own[1:]
            and value.dtype == given.dtype
            and value.device == given.device
            and shape[0] > own[0]
            and shape[0] % own[0] == 0
            and value.numel() // shape[-1] > self._least
        )

    def _computed(self, forward: Callable[..., Any], vectors: Tensor, places: Tensor, *keyword: str) -> Tensor:
        """Calls the module with some vectors, in sequences of the usual length, and returns its result for each."""
        lead = self._given.shape[1:-1]
        changed = places.shape[0]
        missing = -changed % math.prod(lead)
        padded = torch.cat([places, places[-1:].expand(missing)]) if missing else places
        shaped = vectors.index_select(0, padded).view(-1, *lead, vectors.shape[-1])
        output: Tensor = forward(**{keyword[0]: shaped}) if keyword else forward(shaped)
        return output.flatten(0, -2)[:changed]

    @property
    def has_positions(self) -> bool:
        """Whether the input of the frame is `(batch, positions, size)`."""
        return self._given.dim() == 3

    def at_last_only(self) -> ChangedPositions:
        """Returns the replacement for a frame with a result that is read at the last position only."""
        other = copy.copy(self)
        other._last_only = True
        return other


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(value: Tensor, reference: Tensor) -> Tensor:
    """Returns a mask of positions with vectors that differ in any bit (-0.0 differs from 0.0)."""
    word = _WORDS.get(value.element_size())
    if word is None:
        return (value != reference).any(-1)
    if value.is_contiguous() and reference.is_contiguous() and value.shape[-1] * value.element_size() % 64 == 0:
        # Compare eight bytes at a time, then reduce eight booleans at a time.
        return (value.view(torch.int64) != reference.view(torch.int64)).view(torch.int64).any(-1)
    return (value.view(word) != reference.view(word)).any(-1)


def substitutes(tree: FrameTree, count: int) -> dict[FrameNode, ChangedPositions]:
    """Returns the replacements for position-wise frames.

    Args:
        tree: The frames of a run without patches.
        count: The number of cells in a forward. Frames with few operations for all cells are not replaced.
    """
    found = {}
    for node in tree.root.walk():
        if node.pair is None or node.module is None:
            continue
        least = LEAST_OPERATIONS["cpu" if node.pair[0].device.type == "cpu" else "other"] / _operations(node.module)
        if count * len(node.pair[0].flatten(0, -2)) >= least:
            found[node] = ChangedPositions(node, least)
    return found


def _operations(module: Module) -> int:
    """Returns the approximate number of operations of a module for one position."""
    weights = {id(w): w for inner in all_modules(module) for w in inner._parameters.values() if w is not None}
    return 2 * sum(weight.numel() for weight in weights.values())


def read_at_last_only(
    among: Mapping[FrameNode, ChangedPositions], places: Container[Place]
) -> dict[FrameNode, ChangedPositions]:
    """Returns the replacements for frames with results that are read at the last position only.

    This is valid because pure patches are position-wise.

    Args:
        among: The replacements for position-wise frames.
        places: The places of frames with results that are read at the last position only.
    """
    return {
        node: substitute.at_last_only()
        for node, substitute in among.items()
        if node.place in places and substitute.has_positions
    }
