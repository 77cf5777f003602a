"""The patch kinds: operations on the value of a node.

A patch is applied to the value of a node each time the model computes it, and the rest of the model sees what the
patch returns. A patch does not depend on its node: one object may be used for several nodes and contexts at once.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from graphpatch_notebook.errors import PatchValueError
from graphpatch_notebook.patches.slices import (
    PositionSelection,
    StepSelection,
    TensorIndex,
    as_index,
    index_problem,
    part_dimensions,
    selection,
    selection_problem,
)
from graphpatch_notebook.torch_compat import version_of
from graphpatch_notebook.values import NUMBERS

T = TypeVar("T")
Scalar: TypeAlias = "bool | int | float | complex"

_VALUES = (Tensor, *NUMBERS)
_NO_SLICES = "a slice can only be taken of a tensor, and the value here is {!r}; drop slice="


def _frozen(value: Any) -> Any:
    """Returns an immutable copy of a selection."""
    if isinstance(value, set):
        return frozenset(value)
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


_SET_ONCE = ("steps", "positions", "position_dim")


@dataclass(kw_only=True, eq=False)
class Patch(Generic[T]):
    """Base class of all patches. Subclass it as a (keyword-only) dataclass and define `op`.

    During generation (`pg.generate(...)`, or your own loop of `pg(...)` with a cache) a patch has an effect at every
    step, unless `steps` or `positions` restrict it. Both count from zero. Each patch of a patch map may have its own.

    Attributes:
        requires_clone: Whether `op` writes into its argument. If so, it receives a clone.
        observes_only: Whether `op` only reads the value. Its result is ignored, and the model's own value is used.
        is_pure: Whether the result of `op` depends on nothing but the value and the fields of the patch. Cells of
            sweeps with such patches only share forwards. Subclasses do not inherit it, since they may redefine `op`.
        only_keeps: Whether `op` does nothing but keep the value. Such patches take a short way to the value, and of an
            input of a module they keep an alias of its own, so that gradients are those of this use. Not inherited.
        is_for_one_run: Whether the patch is for a single forward, which has all positions: each of them must be there.
        stops_run: Whether `op` ends the forward. It runs after all other patches on the node.
        replaces_call: Whether the patch replaces a call of a module: `op` receives what the call passes through (see
            `SkipPatch`), and returns the output of the call.
        any_shape: Apply the patch also if the value has another rank than at capture, or other sizes (except those
            that depend on the inputs). By default that is a `PatchValueError`.
        allow_empty: Whether `slice`, `steps` and `positions` may select nothing (`slice=(..., slice(64, 80))` of 64
            entries, a mask without a `True`, an empty list). By default that is an error: a `PatchMapError` on entry,
            or a `PatchValueError` during the run if it depends on the sizes of the inputs.
        steps: The steps at which the patch has an effect: `"prefill"` (step 0, the run over the prompt), `"decoding"`
            (all later steps), a number, or several (a range, a slice, a list); `None` for every step. Numbers in a
            list that no call reaches are reported (`GraphPatchWarning`); a range or a slice may go beyond the last
            step. A step is one call of the model within one call of a method such as `pg.generate`. If you call `pg`
            directly, a call without a cache (or with an empty one) is step 0, and any other call is the next step of
            the same context.
        positions: The positions in the sequence at which the patch has an effect: a number or several, as for `steps`;
            `None` for all. Those in a list that the sequence does not have are reported, as for `steps`. They are
            counted from the start of the sequence, including left padding, independent of the part that a step
            computes; negative ones from the end of the sequence so far: -1 is the last token of a prompt, and then
            each token that a step is given. Padding there is a `PatchValueError`. `op` receives the whole value of the
            step, and only these positions of its result are used; a patch that only reads receives a copy of these
            positions. This needs a model that takes `input_ids` or `inputs_embeds`. For nodes of an encoder, positions
            are those of the encoder's sequence.
            With two dimensions (`[[3], [5], [2]]`, or a tensor `ends[:, None]`), they are those of each row of the
            batch. A patch that only reads has them in the order given, and needs as many positions in each row.
        position_dim: The dimension of the value that runs along the sequence. Only needed if an error on entry asks
            for it.

    Example:
        >>> @dataclass(kw_only=True)
        ... class ScalePatch(Patch[Tensor]):
        ...     factor: float
        ...     def op(self, original_output):
        ...         return original_output * self.factor
        >>> ScalePatch(factor=2.0).op(torch.ones(2))
        tensor([2., 2.])

        Double the value at the third token of the sequence only, and keep it at each decoding step:

        >>> patches = [ScalePatch(factor=2.0, positions=2), RecordPatch(steps="decoding")]
    """

    requires_clone: ClassVar[bool] = False
    observes_only: ClassVar[bool] = False
    is_pure: ClassVar[bool] = False
    only_keeps: ClassVar[bool] = False
    is_for_one_run: ClassVar[bool] = False
    stops_run: ClassVar[bool] = False
    replaces_call: ClassVar[bool] = False

    @property
    def sources(self) -> Sequence[str]:
        """The paths of other nodes of the same run whose values the patch reads; see `reading`."""
        return ()

    def reading(self, values: Sequence[Any]) -> Patch[T]:
        """Returns a copy of the patch whose `op` uses these values of its `sources`, here that of the only one."""
        result = copy.copy(self)
        (result.__dict__["_read"],) = values
        return result

    any_shape: bool = False
    allow_empty: bool = False
    steps: StepSelection | None = None
    positions: PositionSelection | None = None
    position_dim: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SET_ONCE:  # a context plans on entry where a patch has an effect
            if name in self.__dict__:
                raise AttributeError(
                    f"{name} of a {type(self).__name__} cannot be changed; make a new patch: "
                    f"dataclasses.replace(patch, {name}=...)"
                )
            value = None if value is None else _frozen(value)
        super().__setattr__(name, value if name != "slice" or value is None else as_index(value))

    @abstractmethod
    def op(self, original_output: T) -> T:
        """Returns the value that replaces `original_output` (may be the same object)."""
        raise NotImplementedError(f"{type(self).__name__} must define op(self, original_output)")

    def values_kept(self) -> list[Any]:
        """Returns the values that the patch keeps, in order."""
        return []

    def forget(self) -> None:
        """Lets go of the values that the patch keeps."""

    def problem(self, shape: torch.Size | None) -> str | None:
        """Returns why this patch cannot be used for a node, or `None` if it can.

        Args:
            shape: The recorded shape of the node's value; `None` if the value is not a tensor, or not known.
        """
        if has_plain_fields(self):
            return None
        try:
            for what in ("steps", "positions"):
                if getattr(self, what) is not None:
                    selection(getattr(self, what), what, allow_empty=self.allow_empty)
        except ValueError as error:
            return str(error)
        for name in ("any_shape", "allow_empty"):
            if not isinstance(flag := getattr(self, name), bool):
                return f"{name} must be True or False, not {flag!r}"
        if self.positions is None and self.position_dim is not None:
            return f"position_dim={self.position_dim!r} has no effect without positions=..."
        return None

    def selection_problem(self, sizes: Sequence[int | None] | None, shown: str) -> str | None:
        """Returns which part of the patch's slice is out of range or selects nothing, or `None` if no part is.

        Args:
            sizes: The sizes of the value, with `None` for sizes that may differ; `None` if no size is known.
            shown: The name of the value in the message.
        """
        return None


def has_plain_fields(patch: Patch[Any]) -> bool:
    """Whether the fields that all patches share are valid for any node: a fast check, for probes on all values.

    Example:
        >>> has_plain_fields(ZeroPatch()), has_plain_fields(ZeroPatch(positions=0))
        (True, False)
    """
    get = patch.__dict__.get
    return (
        get("steps") is get("positions") is get("position_dim") is None
        and {type(patch.any_shape), type(patch.allow_empty)} == _BOOL
    )


_BOOL = {bool}


def declares(patch: Patch[Any], name: str) -> bool:
    """Whether the class of a patch itself defines `is_pure` or `only_keeps`: subclasses may redefine `op`.

    Example:
        >>> declares(ZeroPatch(), "is_pure"), declares(type("Other", (ZeroPatch,), {})(), "is_pure")
        (True, False)
    """
    return bool(type(patch).__dict__.get(name))


class RunStopped(BaseException):  # not an error: the model must not handle it
    """A patch ended the forward, and the call returns `value` (caught by the call of the `PatchableGraph`)."""

    def __init__(self, value: Any, patch: Patch[Any]) -> None:
        super().__init__("a patch ended this forward")
        self.value = value
        self.patch = patch


class _SlicedPatch(Patch[Any]):
    """A patch with a field `slice`: the part of the tensor that it changes."""

    slice: TensorIndex

    def selection_problem(self, sizes: Sequence[int | None] | None, shown: str) -> str | None:
        index = self.slice
        return None if index is None else selection_problem(index, sizes, shown, allow_empty=self.allow_empty)

    def _check_taken(self, index: TensorIndex, value: Tensor) -> None:
        shown = f"the value here, of shape {tuple(value.shape)},"
        if not self.allow_empty and (problem := selection_problem(index, value.shape, shown, only_slices=True)):
            raise PatchValueError(problem)


@dataclass(eq=False)
class WritingPatch(_SlicedPatch):
    """A patch that writes into a slice of a tensor, or replaces a number."""

    requires_clone: ClassVar[bool] = True

    def op(self, original_output: Any) -> Any:
        index = self.slice
        if isinstance(original_output, Tensor):
            if index is not None:
                self._check_taken(index, original_output)
            self._check_value(original_output)
            self._write(original_output, ... if index is None else index)
            return original_output
        if isinstance(original_output, NUMBERS):
            if index is not None:
                raise PatchValueError(_NO_SLICES.format(original_output))
            return self._number(original_output)
        what = "None" if original_output is None else f"of type {type(original_output).__name__}"
        raise PatchValueError(
            f"{type(self).__name__} needs a tensor or a number, but the value here is {what}; use CustomPatch for it"
        )

    def problem(self, shape: torch.Size | None) -> str | None:
        index = self.slice
        if index is not None and (problem := index_problem(index, shape)) is not None:
            return problem
        value = getattr(self, "value", 0)
        if not isinstance(value, _VALUES):
            return f"value must be a tensor or a number, not {type(value).__name__}; use value=torch.as_tensor(...)"
        return super().problem(shape)

    def _check_value(self, target: Tensor) -> None:
        """Rejects a value that lacks dimensions, or on the meta device, which `+=` does not add (torch 2.13)."""
        value = getattr(self, "value", None)
        if not isinstance(value, Tensor) or target.is_nested:
            return
        if (problem := value_problem(value, target.shape, self.slice)) is not None:
            raise PatchValueError(problem)
        if value.device.type == "meta" != target.device.type:
            raise PatchValueError(
                f"the value of {type(self).__name__}, of shape {tuple(value.shape)}, is on the meta device and has no "
                "numbers; if it is a weight of an offloaded model, record it with a ProbePatch, or take it from "
                "pg.weights"
            )

    def _write(self, target: Tensor, index: TensorIndex) -> None:
        raise NotImplementedError

    def _number(self, number: Scalar) -> Scalar:
        raise NotImplementedError


@dataclass(eq=False)
class ZeroPatch(WritingPatch):
    """Sets the value, or a slice of it, to zero.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Args:
        slice: The part to set, as in `value[slice] = 0`; `None` for all of it.

    Example:
        >>> ZeroPatch(slice=(slice(None), -1)).op(torch.ones(2, 2))
        tensor([[1., 0.],
                [1., 0.]])
    """

    is_pure: ClassVar[bool] = True
    slice: TensorIndex = None

    def _write(self, target: Tensor, index: TensorIndex) -> None:
        if index is ...:
            target.zero_()  # which a `DTensor` can do
        else:
            target[index] = 0

    def _number(self, number: Scalar) -> Scalar:
        return type(number)(0)


@dataclass(eq=False)
class AddPatch(WritingPatch):
    """Adds to the value, or to a slice of it. Gradients flow to `value`.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Args:
        value: A number, a vector along the last dimension, or a tensor with the dimensions of the slice, which
            broadcasts to it; dtype and device follow torch's rules for `+=`.
        slice: The part to add to, as in `value[slice] += ...`; `None` for all of it.

    Example:
        >>> AddPatch(value=torch.tensor([1.0, 2.0])).op(torch.zeros(2, 2))
        tensor([[1., 2.],
                [1., 2.]])
    """

    is_pure: ClassVar[bool] = True
    value: Tensor | Scalar
    slice: TensorIndex = None

    def _write(self, target: Tensor, index: TensorIndex) -> None:
        if index is ...:
            target += self.value  # which a nested tensor can do
        else:
            target[index] += self.value

    def _number(self, number: Scalar) -> Scalar:
        return type(number)(number + _as_number(self.value))


@dataclass(eq=False)
class ReplacePatch(WritingPatch):
    """Replaces the value, or a slice of it. Gradients flow to `value`.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Args:
        value: A number, a vector along the last dimension, or a tensor with the dimensions of the slice, which
            broadcasts to it; dtype and device follow torch's rules for writing into a tensor (the dtype stays that of
            the node; a tensor on another device is an error).
        slice: The part to replace, as in `value[slice] = ...`; `None` for all of it.

    Example:
        >>> ReplacePatch(value=5, slice=0).op(torch.zeros(2, 2))
        tensor([[5., 5.],
                [0., 0.]])
    """

    is_pure: ClassVar[bool] = True
    value: Tensor | Scalar
    slice: TensorIndex = None

    def _write(self, target: Tensor, index: TensorIndex) -> None:
        target[index] = self.value  # type: ignore[assignment]  # torch takes complex numbers too

    def _number(self, number: Scalar) -> Scalar:
        return type(number)(_as_number(self.value))


@dataclass(eq=False, init=False)
class KeepingPatch(Patch[Any]):
    """A patch that keeps the last value, or all of them."""

    _keeps_all: ClassVar[bool] = False

    def __init__(
        self,
        *,
        any_shape: bool = False,
        allow_empty: bool = False,
        steps: StepSelection | None = None,
        positions: PositionSelection | None = None,
        position_dim: int | None = None,
    ) -> None:
        if any_shape is allow_empty is False and steps is positions is position_dim is None:
            self.__dict__.update(_DEFAULTS)  # not by `__setattr__`: there may be one for each value of a model
        else:
            super().__init__(
                any_shape=any_shape, allow_empty=allow_empty, steps=steps, positions=positions,
                position_dim=position_dim,
            )  # fmt: skip
        if self._keeps_all:
            self.__dict__.update(_kept=[], _versions={})


_DEFAULTS = {"any_shape": False, "allow_empty": False, "steps": None, "positions": None, "position_dim": None}


@dataclass(eq=False, init=False)
class ProbePatch(KeepingPatch):
    """Keeps the value of the node without changing it.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Example:
        >>> probe = ProbePatch()
        >>> probe.op(torch.ones(1))
        tensor([1.])
        >>> probe.activation
        tensor([1.])
    """

    observes_only: ClassVar[bool] = True
    only_keeps: ClassVar[bool] = True
    _kept: Any = field(default=None, init=False, repr=False)
    _version: int | None = field(default=None, init=False, repr=False)

    def op(self, original_output: Any) -> Any:
        state = self.__dict__  # not by `__setattr__`: all values of a model may be probed
        state["_kept"], state["_version"] = original_output, version_of(original_output)
        return original_output

    @property
    def activation(self) -> Any:
        """The latest value of the node; `None` before the first one.

        It is the model's own tensor, not a copy, so gradients reach it (call its `retain_grad()` before `backward()`);
        they also reach a part of a value that the model uses (a component such as `layers[0].attn.heads[3].z`, or some
        positions).
        If the model writes into the tensor later, it is a copy from before that, without gradients. If it is the input
        of a module and requires gradients, it is an alias that only this module receives: its gradient is that of this
        use, not of other uses of the tensor.

        Raises:
            PatchValueError: The model wrote into the tensor through another tensor that shares its memory.
        """
        check_unchanged(self._kept, self._version)
        return self._kept

    def values_kept(self) -> list[Any]:
        return [] if self._kept is None else [self.activation]

    def forget(self) -> None:
        self._kept = self._version = None


@dataclass(eq=False, init=False)
class RecordPatch(KeepingPatch):
    """Keeps all values of the node in order, without changing them.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Example:
        >>> record = RecordPatch()
        >>> _ = record.op(1), record.op(2)
        >>> record.activations
        [1, 2]
    """

    observes_only: ClassVar[bool] = True
    only_keeps: ClassVar[bool] = True
    _keeps_all: ClassVar[bool] = True
    _kept: list[Any] = field(default_factory=list, init=False, repr=False)
    _versions: dict[int, int | None] = field(default_factory=dict, init=False, repr=False)

    def op(self, original_output: Any) -> Any:
        self._kept.append(original_output)
        self._versions[id(original_output)] = version_of(original_output)
        return original_output

    @property
    def activations(self) -> list[Any]:
        """The values so far, each as in `ProbePatch.activation`. Clear the list to start again.

        Raises:
            PatchValueError: The model wrote into one of the tensors through another tensor that shares its memory.
        """
        self._since(0)
        return self._kept

    def values_kept(self) -> list[Any]:
        return self.activations

    def forget(self) -> None:
        self._kept.clear()
        self._versions.clear()

    def _since(self, count: int) -> list[Any]:
        """Returns the values after the first `count`, and checks only these."""
        values = self._kept[count:]
        for value in values:
            check_unchanged(value, self._versions.get(id(value)))
        return values


@dataclass(eq=False)
class StopPatch(Patch[Any]):
    """Ends the forward at the node, after all other patches on it: the call returns the value of the node.

    Nothing behind the node runs, so patches there do not fire, which is reported. The end goes through the model as an
    interrupt does: `finally` blocks and context managers of the model run, and what it wrote into its state before
    stays. The call of a method (`pg.generate(...)`) ends, too, and returns the value. `pg.run_until` is a shorter way.

    The fields `any_shape`, `allow_empty` and `steps` are those of `Patch`. With `steps`, a generation ends at the first
    of these steps.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softmax(-1)), torch.ones(2))
        >>> with pg.patch({"sub_0.output": StopPatch()}):
        ...     pg(torch.tensor([-1.0, 3.0]))
        tensor([0., 3.])
    """

    observes_only: ClassVar[bool] = True
    stops_run: ClassVar[bool] = True

    def op(self, original_output: Any) -> Any:
        raise RunStopped(original_output, self)

    def problem(self, shape: torch.Size | None) -> str | None:
        if self.positions is not None:
            return "a run ends at a node, not at a position; drop positions=, or use steps="
        return super().problem(shape)


@dataclass(eq=False)
class SkipPatch(Patch[Any]):
    """Skips a call of a module: the module does not run, and its output is its input, or a value.

    The path is that of the module (`"transformer.h_3.mlp"`) or of its output. If the module returns a tuple, a dict or
    a `ModelOutput` with one tensor, and nothing else but `None`, the tensor is put there. Patches on the input and the
    output of the module still have their effect, and so do the model's own hooks; patches inside do not fire, which is
    reported. A module that fills a cache cannot be skipped in a generation with that cache.

    The fields `any_shape`, `allow_empty` and `steps` are those of `Patch`.

    Args:
        value: A tensor, which is the output; or a number, which fills a tensor like the input; `None` for the input
            itself, which must be of the shape of the output at all sizes. The output is a copy.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softmax(-1)), torch.ones(2))
        >>> with pg.patch({"sub_1": SkipPatch()}):
        ...     pg(torch.tensor([-1.0, 3.0]))
        tensor([0., 3.])
    """

    replaces_call: ClassVar[bool] = True
    value: Tensor | Scalar | None = None

    def op(self, original_output: Any) -> Any:
        if isinstance(self.value, Tensor):
            return self.value.clone()  # the model may write into it
        return original_output.clone() if self.value is None else torch.full_like(original_output, self.value)

    def problem(self, shape: torch.Size | None) -> str | None:
        if self.positions is not None:
            return "a call is skipped as a whole, not at some positions; use ReplacePatch(..., positions=...)"
        if not isinstance(getattr(self, "value", None), (*_VALUES, type(None))):
            return f"value must be a tensor or a number, not {type(self.value).__name__}"
        return super().problem(shape)


_OWN: Any = object()  # the node of the patch itself is its source


@dataclass(eq=False)
class FromPatch(_SlicedPatch):
    """Replaces the value, or a slice of it, by the value of another node of the same run. Gradients flow to that node.

    It does what `ReplacePatch(value=transform(source[rows]), slice=slice)` would do with the value that the source has
    in this run, after all patches on it. The source must come before the node in the forward. To copy from one prompt
    to another, run both as rows of one batch: `FromPatch(path, rows=[0, 0])` on `path` itself, or on another node,
    gives row 1 the value of row 0.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Args:
        source: The path of the other node; a node may read its own value, with `transform` or `rows`.
        transform: Takes the value of the source and returns what is put into the node; `None` for the value itself.
        rows: For each row of the node, which row of the source (in its first dimension) it reads; a number for all of
            them; `None` for the same row.
        slice: The part to replace, as in `value[slice] = ...`; `None` for all of it.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()), torch.ones(2, 1))
        >>> with pg.patch({"output": FromPatch("sub_0.output", lambda value: 10 * value, rows=[1, 1])}):
        ...     pg(torch.tensor([[1.0], [2.0]]))
        tensor([[20.],
                [20.]])
    """

    requires_clone: ClassVar[bool] = True
    source: Any
    transform: Callable[[Any], Any] | None = None
    _: KW_ONLY
    rows: int | Sequence[int] | Tensor | None = None
    slice: TensorIndex = None
    _read: Any = field(default=_OWN, init=False, repr=False)

    @property
    def sources(self) -> Sequence[str]:
        """The path of the source."""
        return (str(self.source),)

    def op(self, original_output: Any) -> Any:
        read = self._read
        if read is _OWN:
            if self.rows is None and self.transform is None and not self.allow_empty:
                raise PatchValueError("it replaces the value by itself: give another source, or rows= or transform=")
            read = original_output
        if self.rows is not None:
            read = self._rows_of(read)
        elif isinstance(read, Tensor):  # the model uses the source, and `transform` may write into it
            read = read.clone()
        new = read if self.transform is None else self.transform(read)
        if not isinstance(new, (Tensor, *NUMBERS)):
            raise PatchValueError(
                f"transform must return a tensor or a number, but returned one of type {type(new).__name__}"
            )
        return ReplacePatch(value=new, slice=self.slice, allow_empty=self.allow_empty).op(original_output)

    def _rows_of(self, read: Any) -> Tensor:
        if not isinstance(read, Tensor) or not read.dim():
            raise PatchValueError(f"rows are those of a tensor, but the source {str(self.source)!r} has none")
        rows = torch.as_tensor([self.rows] if isinstance(self.rows, int) else self.rows, device=read.device)
        if not ((rows >= -len(read)) & (rows < len(read))).all():
            raise PatchValueError(f"rows={self.rows!r}, but the source {str(self.source)!r} has {len(read)} rows")
        return read[rows]

    def problem(self, shape: torch.Size | None) -> str | None:
        transform: Any = self.transform
        if transform is not None and not callable(transform):
            return f"transform must be callable, not {transform!r}"
        if self.rows is not None:
            try:
                rows = torch.as_tensor([self.rows] if isinstance(self.rows, int) else self.rows)
            except (TypeError, ValueError, RuntimeError):
                return f"rows must be whole numbers, not {self.rows!r}"
            if rows.dim() != 1 or rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
                return f"rows must be one whole number for each row, not {self.rows!r}"
        problem = index_problem(self.slice, shape) or super().problem(shape)
        if problem is None and shape is not None and transform is None:
            return value_problem(self._read, shape, self.slice)  # of a context that is entered, without its numbers
        return problem


def check_unchanged(value: Any, version: int | None) -> None:
    """Raises an error if a kept tensor was written into since it had this version."""
    # A parameter is the model's state, which an optimizer may change.
    if version is None or version_of(value) == version or (value.is_leaf and value.requires_grad):
        return
    raise PatchValueError(
        f"the kept tensor of shape {tuple(value.shape)} was overwritten later, through another tensor that shares its "
        "memory; keep a copy: CustomPatch(custom_op=lambda t: kept.append(t.clone()) or t)"
    )


@dataclass(eq=False)
class CustomPatch(_SlicedPatch):
    """Applies a function of your own to the value, or to a slice of it.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Args:
        custom_op: Takes the value and returns its replacement; with a slice, takes `value[slice]` and returns its
            replacement.
        requires_clone: Whether `custom_op` may write into its argument. `True` is safe. `False` saves a copy for
            functions that only read; it cannot be combined with a slice.
        slice: The part to change, as in `value[slice] = custom_op(value[slice])`; `None` for all of it. `custom_op`
            receives a copy and returns such a value as a `ReplacePatch` takes. The dtype of the value
            does not change.
        by_row: Whether `custom_op` is a pure function that works on each row of the batch alone: cells of a sweep then
            share forwards, and it is given the rows of its cell. Else such cells run alone.

    Example:
        >>> CustomPatch(custom_op=lambda t: t.flip(0)).op(torch.arange(3))
        tensor([2, 1, 0])
        >>> CustomPatch(custom_op=lambda t: t.flip(0), slice=slice(1, None)).op(torch.arange(3))
        tensor([0, 2, 1])
    """

    custom_op: Callable[[Any], Any]
    _: KW_ONLY
    requires_clone: bool = True  # type: ignore[misc]  # an instance field: the user chooses
    slice: TensorIndex = None
    by_row: bool = False

    def op(self, original_output: Any) -> Any:
        if self.slice is None:
            return self.custom_op(original_output)
        if not isinstance(original_output, Tensor):
            raise PatchValueError(_NO_SLICES.format(original_output))
        return self._written(original_output)

    def _written(self, value: Tensor) -> Tensor:
        self._check_taken(self.slice, value)
        try:
            part = value[self.slice]
        except (IndexError, RuntimeError) as error:
            raise PatchValueError(f"slice {self.slice!r} of a value of shape {tuple(value.shape)}: {error}") from error
        # A copy, because the write below would overwrite what the function saved for its gradient.
        result = self.custom_op(part.clone())
        if result is None:
            raise PatchValueError(f"custom_op returned None for slice={self.slice!r}: is a return statement missing?")
        try:
            if (problem := value_problem(result, value.shape, self.slice)) is not None:
                raise ValueError(problem)
            value[self.slice] = result
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            shown = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else repr(result)
            raise PatchValueError(
                f"custom_op returned {shown} for slice={self.slice!r}, which has shape {tuple(part.shape)}; it must "
                f"return a tensor that broadcasts to that, or a number: {error}"
            ) from error
        return value

    def problem(self, shape: torch.Size | None) -> str | None:
        custom_op: Any = self.custom_op
        if not callable(custom_op):
            return f"custom_op must be callable, not {custom_op!r}"
        if self.slice is not None and not self.requires_clone:
            return "the result of custom_op is written into the value: slice= needs requires_clone=True"
        by_row: Any = self.by_row
        if not isinstance(by_row, bool):
            return f"by_row must be True or False, not {by_row!r}"
        return index_problem(self.slice, shape) or super().problem(shape)


def value_problem(value: Any, shape: torch.Size, index: TensorIndex, *, has_channels: bool = True) -> str | None:
    """Returns why a tensor may be written along other dimensions of a value than is meant, or `None`.

    Torch fills up missing dimensions from the left: rows of a batch would be positions where there are as many. A
    scalar, or one vector along the last dimension, is the same everywhere.

    Args:
        value: What is written.
        shape: The shape of the tensor that it is written into.
        index: The part of that tensor; `None` for all of it.
        has_channels: Whether the last dimension of `shape` may be that of a vector.

    Example:
        >>> value_problem(torch.ones(4), torch.Size((3, 3, 4)), None)
        >>> print(value_problem(torch.ones(3, 4), torch.Size((3, 3, 4)), None).partition(":")[0])
        value, of shape (3, 4), has 2 dimensions, but what it replaces in a value of shape (3, 3, 4) has 3
    """
    if not isinstance(value, Tensor) or (index is None and value.dim() == len(shape)):
        return None
    count, keeps_last = part_dimensions(index, len(shape))
    vector = value.shape[-1] if value.dim() and keeps_last and has_channels else 1
    if value.dim() == count or value.numel() == vector:
        return None
    return (
        f"value, of shape {tuple(value.shape)}, has {value.dim()} dimensions, but what it replaces in a value of shape "
        f"{tuple(shape)} has {count}: give it as many, those that it lacks with size 1 (value[None] or value[:, None])"
    )


def _as_number(value: Tensor | Scalar) -> Any:
    return value.item() if isinstance(value, Tensor) else value


# -- messages


def selects_nothing(patch: Patch[Any], value: Any) -> bool:
    """Whether the slice of a patch selects no entry of a value, and may (`allow_empty`)."""
    index = getattr(patch, "slice", None) if patch.allow_empty and isinstance(value, Tensor) else None
    return index is not None and not value[index].numel()


def shown_value(value: Any) -> str:
    """Returns a description of a value in messages: of a tensor, its shape, dtype and device."""
    if isinstance(value, Tensor):
        shape = "nested" if value.is_nested else f"of shape {tuple(value.shape)}"  # torch knows no shape of these
        return f"{shape} ({str(value.dtype).removeprefix('torch.')}, {value.device})"
    return f"{value!r}"
