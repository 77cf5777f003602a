"""The patches: operations on the value of a node. They know nothing of graphs and keep no state of where they stand.

A patch is applied to the value of a node whenever that node comes up, and what it returns is what the rest of the
model sees. One object may stand on several nodes, and in several contexts, at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from graphpatch_notebook.errors import PatchValueError
from graphpatch_notebook.patches.selections import NumberSelection, StepSelection, selection
from graphpatch_notebook.patches.slices import TensorIndex, as_index, index_problem, selection_problem, takes_nothing
from graphpatch_notebook.torch_compat import version_of

T = TypeVar("T")
Scalar: TypeAlias = "bool | int | float | complex"

_NO_SLICES = "a slice cannot be taken of the number {!r}; drop slice="


# A field that keeps what it was made with: contexts lay out, on entry, where a patch has an effect. (No docstring: in
# the reference it would stand as that of each field.)
class _SetOnce:
    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, patch: Any, owner: type | None = None) -> Any:
        return None if patch is None else patch.__dict__.get(self._name)

    def __set__(self, patch: Any, value: Any) -> None:
        if self._name in patch.__dict__:
            raise AttributeError(
                f"{self._name} of a {type(patch).__name__} cannot be changed; make a new patch: "
                f"dataclasses.replace(patch, {self._name}=...)"
            )
        patch.__dict__[self._name] = None if value is None else _frozen(value)


def _frozen(value: Any) -> Any:
    """Returns a selection that does not change any more when a list or a tensor of the user's does."""
    if isinstance(value, set):
        return frozenset(value)
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, list) else value


# A field for what users write for an index, which is kept as torch takes it.
class _Index:
    def __get__(self, patch: Any, owner: type | None = None) -> Any:
        return None if patch is None else patch.__dict__.get("slice")

    def __set__(self, patch: Any, value: Any) -> None:
        patch.__dict__["slice"] = as_index(value)


@dataclass(kw_only=True, eq=False)
class Patch(Generic[T]):
    """Base class of all patches: subclass it as a (keyword-only) dataclass and write `op`.

    In a generation (`pg.generate(...)`, or your own loop of `pg(...)` with a cache) a patch has its effect at every
    step, unless `steps` or `positions` say where. Both count from zero; each patch of a patch map may have its own.

    Attributes:
        requires_clone: Whether `op` writes into the value that it is given. Then it is given a clone.
        observes_only: Whether `op` only looks: what it returns is ignored, the model's own value goes on.
        any_shape: Apply the patch also where the node holds a value of another rank, or of other sizes (beyond those
            that follow the inputs), than when the model was captured. Without it that is a `PatchShapeError`.
        allow_empty: Whether `slice`, `steps` and `positions` may select nothing (`slice=(..., slice(64, 80))` of 64
            entries, a mask without a `True`, an empty list). Without it that is an error: a `PatchMapError` on entry,
            or a `PatchValueError` during the run where it depends on the sizes of the inputs.
        steps: The steps at which the patch has its effect: `"prefill"` (step 0, the run over the prompt), `"decoding"`
            (all after it), a number, or several (a range, a slice, a list); `None` for every step. A step is one call
            of the model within one call of a method, such as `pg.generate`. In direct calls of `pg`, one without a
            cache (or with an empty one) is step 0, any other comes after the call before it in the same context.
        positions: The positions in the sequence at which the patch has its effect, counted from the start of the
            sequence, left padding included, whatever part of it a step computes: a number or several, as for `steps`;
            `None` for all. `op` gets the whole value of the step, of its result these positions are kept; a patch that
            only looks gets (a copy of) these positions. For models that take `input_ids` or `inputs_embeds`; nodes
            of an encoder count the positions of the encoder's sequence.
        position_dim: Which dimension of the value runs along the sequence. Only needed where that cannot be told: the
            error on entry says so.

    Example:
        >>> @dataclass(kw_only=True)
        ... class ScalePatch(Patch[Tensor]):
        ...     factor: float
        ...     def op(self, original_output):
        ...         return original_output * self.factor
        >>> ScalePatch(factor=2.0).op(torch.ones(2))
        tensor([2., 2.])

        Double the value at the third token of the sequence only; keep it at each decoding step:

        >>> patches = [ScalePatch(factor=2.0, positions=2), RecordPatch(steps="decoding")]
    """

    requires_clone: ClassVar[bool] = False
    observes_only: ClassVar[bool] = False
    any_shape: bool = False
    allow_empty: bool = False
    steps: StepSelection | None = _SetOnce()  # type: ignore[assignment]
    positions: NumberSelection | None = _SetOnce()  # type: ignore[assignment]
    position_dim: int | None = _SetOnce()  # type: ignore[assignment]

    @abstractmethod
    def op(self, original_output: T) -> T:
        """Returns what stands in for `original_output` from here on (may be the same object)."""
        raise NotImplementedError(f"{type(self).__name__} must define op(self, original_output)")

    def problem(self, shape: torch.Size | None) -> str | None:
        """Returns what is wrong with using this patch on a node, in words, or `None` where nothing is.

        Args:
            shape: The recorded shape of the node's value; `None` for a value that is no tensor, or not known.
        """
        return _restriction_problem(self, shape)

    def selection_problem(self, sizes: Sequence[int | None] | None, shown: str) -> str | None:
        """Returns which part of the patch's slice is out of range or selects nothing, in words; `None` where none is.

        Args:
            sizes: The sizes of the value, `None` for those that may be any; `None` where none is known.
            shown: What the value is called in the message.
        """
        return None


def _restriction_problem(patch: Patch[Any], shape: torch.Size | None) -> str | None:
    try:
        for what in ("steps", "positions"):
            if getattr(patch, what) is not None:
                selection(getattr(patch, what), what, allow_empty=patch.allow_empty)
    except ValueError as error:
        return str(error)
    for name in ("any_shape", "allow_empty"):
        if not isinstance(flag := getattr(patch, name), bool):
            return f"{name} must be True or False, not {flag!r}"
    dim = patch.position_dim
    if dim is None:
        return None
    if type(dim) is not int:
        return f"position_dim must be an int, not {dim!r}"
    if patch.positions is None:
        return f"position_dim={dim} says nothing without positions=..."
    if shape is not None and not -len(shape) <= dim < len(shape):
        return f"position_dim={dim} is out of range for the value recorded here, of shape {tuple(shape)}"
    return None


class _SlicedPatch(Patch[Any]):
    """A patch with a field `slice`: what part of a tensor it is for."""

    slice: TensorIndex

    def selection_problem(self, sizes: Sequence[int | None] | None, shown: str) -> str | None:
        return None if self.slice is None else selection_problem(self.slice, sizes, shown, allow_empty=self.allow_empty)

    def _check_taken(self, index: TensorIndex, value: Tensor) -> None:
        if index is not None and not self.allow_empty and takes_nothing(index, value.shape):
            shape = tuple(value.shape)
            raise PatchValueError(str(self.selection_problem(shape, f"the value here, of shape {shape},")))


@dataclass(eq=False)
class _SlicePatch(_SlicedPatch):
    """A patch that writes into a slice of a tensor, or replaces a number."""

    requires_clone: ClassVar[bool] = True

    def op(self, original_output: Any) -> Any:
        index = self.slice
        if isinstance(original_output, Tensor):
            self._check_taken(index, original_output)
            self._write(original_output, ... if index is None else index)
            return original_output
        if isinstance(original_output, (bool, int, float, complex)):
            if index is not None:
                raise PatchValueError(_NO_SLICES.format(original_output))
            return self._number(original_output)
        if original_output is None:
            raise PatchValueError(
                f"{type(self).__name__} needs a tensor or a number, but the value here is None; give the model the "
                "input that it is, or use CustomPatch to put something there"
            )
        raise PatchValueError(
            f"{type(self).__name__} needs a tensor or a number, but the value here is of type "
            f"{type(original_output).__name__}; use CustomPatch for it"
        )

    def problem(self, shape: torch.Size | None) -> str | None:
        if (problem := index_problem(self.slice, shape)) is not None:
            return problem
        value = getattr(self, "value", 0)
        if not isinstance(value, (Tensor, bool, int, float, complex)):
            return f"value must be a tensor or a number, not {type(value).__name__}; use value=torch.as_tensor(...)"
        return super().problem(shape)

    def _write(self, target: Tensor, index: TensorIndex) -> None:
        raise NotImplementedError

    def _number(self, number: Scalar) -> Scalar:
        raise NotImplementedError


@dataclass(eq=False)
class ZeroPatch(_SlicePatch):
    """Sets the value, or a slice of it, to zero.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Args:
        slice: What to set, as in `value[slice] = 0`; `None` for everything.

    Example:
        >>> ZeroPatch(slice=(slice(None), -1)).op(torch.ones(2, 2))
        tensor([[1., 0.],
                [1., 0.]])
    """

    slice: TensorIndex = _Index()

    def _write(self, target: Tensor, index: TensorIndex) -> None:
        if index is ...:
            target.zero_()  # which a `DTensor` can do
        else:
            target[index] = 0

    def _number(self, number: Scalar) -> Scalar:
        return type(number)(0)


@dataclass(eq=False)
class AddPatch(_SlicePatch):
    """Adds to the value, or to a slice of it. Gradients flow to `value`.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Args:
        value: A number, or a tensor that broadcasts to the slice; dtype and device follow torch's rules for `+=`.
        slice: What to add to, as in `value[slice] += ...`; `None` for everything.

    Example:
        >>> AddPatch(value=torch.tensor([1.0, 2.0])).op(torch.zeros(2, 2))
        tensor([[1., 2.],
                [1., 2.]])
    """

    value: Tensor | Scalar
    slice: TensorIndex = _Index()

    def _write(self, target: Tensor, index: TensorIndex) -> None:
        target[index] += self.value

    def _number(self, number: Scalar) -> Scalar:
        return type(number)(number + _as_number(self.value))


@dataclass(eq=False)
class ReplacePatch(_SlicePatch):
    """Replaces the value, or a slice of it. Gradients flow to `value`.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Args:
        value: A number, or a tensor that broadcasts to the slice; dtype and device follow torch's rules for writing
            into a tensor (the dtype stays that of the node; a tensor on another device is an error).
        slice: What to replace, as in `value[slice] = ...`; `None` for everything.

    Example:
        >>> ReplacePatch(value=5, slice=0).op(torch.zeros(2, 2))
        tensor([[5., 5.],
                [0., 0.]])
    """

    value: Tensor | Scalar
    slice: TensorIndex = _Index()

    def _write(self, target: Tensor, index: TensorIndex) -> None:
        target[index] = self.value  # type: ignore[assignment]  # torch takes complex numbers too

    def _number(self, number: Scalar) -> Scalar:
        return type(number)(_as_number(self.value))


@dataclass(eq=False)
class ProbePatch(Patch[Any]):
    """Keeps the value of the node, which stays as it is.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Example:
        >>> probe = ProbePatch()
        >>> probe.op(torch.ones(1))
        tensor([1.])
        >>> probe.activation
        tensor([1.])
    """

    observes_only: ClassVar[bool] = True
    _kept: Any = field(default=None, init=False, repr=False)
    _version: int | None = field(default=None, init=False, repr=False)

    def op(self, original_output: Any) -> Any:
        self._kept = original_output
        self._version = version_of(original_output)
        return original_output

    @property
    def activation(self) -> Any:
        """The value from the last time the node came up; `None` before.

        It is the model's own tensor, not a copy, so that gradients reach it (call its `retain_grad()` before
        `backward()`), unless the model writes into it later: then it is a copy made in time, which has none. Where a
        module's input requires gradients, it is an alias that only this module is given: the gradient is that of what
        the module does with it, whatever else becomes of the tensor.

        Raises:
            PatchValueError: The model wrote into the tensor through another one that shares its memory.
        """
        _check_unchanged(self._kept, self._version)
        return self._kept


@dataclass(eq=False)
class RecordPatch(Patch[Any]):
    """Keeps the value of the node each time that it comes up, in order; the value stays as it is.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Example:
        >>> record = RecordPatch()
        >>> _ = record.op(1), record.op(2)
        >>> record.activations
        [1, 2]
    """

    observes_only: ClassVar[bool] = True
    _kept: list[Any] = field(default_factory=list, init=False, repr=False)
    _versions: dict[int, int | None] = field(default_factory=dict, init=False, repr=False)

    def op(self, original_output: Any) -> Any:
        self._kept.append(original_output)
        self._versions[id(original_output)] = version_of(original_output)
        return original_output

    @property
    def activations(self) -> list[Any]:
        """The values so far, as `ProbePatch.activation` has them; clear the list to begin anew.

        Raises:
            PatchValueError: The model wrote into one of the tensors through another one that shares its memory.
        """
        self._since(0)
        return self._kept

    def _since(self, count: int) -> list[Any]:
        """Returns the values after the first `count`; looks only at these."""
        values = self._kept[count:]
        for value in values:
            _check_unchanged(value, self._versions.get(id(value)))
        return values


def _check_unchanged(value: Any, version: int | None) -> None:
    # A parameter is the model's state: an optimizer's step is no news.
    if version is None or value._version == version or (value.is_leaf and value.requires_grad):
        return
    raise PatchValueError(
        f"the tensor of shape {tuple(value.shape)} that was kept has been written into since, through another one that "
        "shares its memory; keep a copy: CustomPatch(custom_op=lambda t: kept.append(t.clone()) or t)"
    )


@dataclass(eq=False)
class CustomPatch(_SlicedPatch):
    """Applies a function of your own to the value, or to a slice of it.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Args:
        custom_op: From the value to what stands in for it; with a slice, from `value[slice]` to what is written there.
        requires_clone: Whether `custom_op` may write into the value that it is given. `True` is safe; `False` saves
            a copy for functions that only read, and cannot be had together with a slice.
        slice: What `custom_op` is for, as in `value[slice] = custom_op(value[slice])`; `None` for everything. It is
            given a copy; what it returns is a tensor that broadcasts to the slice, or a number, and the dtype stays
            that of the node.

    Example:
        >>> CustomPatch(custom_op=lambda t: t.flip(0)).op(torch.arange(3))
        tensor([2, 1, 0])
        >>> CustomPatch(custom_op=lambda t: t.flip(0), slice=slice(1, None)).op(torch.arange(3))
        tensor([0, 2, 1])
    """

    custom_op: Callable[[Any], Any]
    _: KW_ONLY
    requires_clone: bool = True  # type: ignore[misc]  # here the user chooses
    slice: TensorIndex = _Index()

    def op(self, original_output: Any) -> Any:
        if self.slice is None:
            return self.custom_op(original_output)
        if not isinstance(original_output, Tensor):
            if isinstance(original_output, (bool, int, float, complex)):
                raise PatchValueError(_NO_SLICES.format(original_output))
            raise PatchValueError(
                f"a slice can only be taken of a tensor, but the value here is of type "
                f"{type(original_output).__name__}; drop slice="
            )
        return self._written(original_output)

    def _written(self, value: Tensor) -> Tensor:
        self._check_taken(self.slice, value)
        try:
            part = value[self.slice]
        except (IndexError, RuntimeError) as error:
            raise PatchValueError(f"slice {self.slice!r} of a value of shape {tuple(value.shape)}: {error}") from error
        # A copy: what the function keeps for its gradient would be overwritten with its own result.
        result = self.custom_op(part.clone())
        if result is None:
            raise PatchValueError(f"custom_op returned None for slice={self.slice!r}: does it lack a return?")
        try:
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
            return "what custom_op returns is written into the value: slice= needs requires_clone=True"
        return index_problem(self.slice, shape) or super().problem(shape)


def _as_number(value: Tensor | Scalar) -> Any:
    return value.item() if isinstance(value, Tensor) else value
