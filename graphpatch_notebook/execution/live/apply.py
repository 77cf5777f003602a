"""Applies patches to a value: follows the path into containers, copies, checks, and raises errors with the path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.capture.records import HELD_KINDS
from graphpatch_notebook.checks.dimensions import CallInputs, shape_problem, unpacked_shape
from graphpatch_notebook.components.operations import FUSED_ATTENTION
from graphpatch_notebook.errors import (
    AliasedPatchWarning,
    GraphPatchError,
    PatchShapeError,
    PatchValueError,
    add_note,
)
from graphpatch_notebook.execution.live.frames import FrameRun, RunningFrames
from graphpatch_notebook.execution.plan import Entry
from graphpatch_notebook.execution.positions import Indices
from graphpatch_notebook.execution.reports import FiredPatches
from graphpatch_notebook.execution.steps import GenerationSteps, HeldBackError
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patches.kinds import Patch, RunStopped, WritingPatch, problem_of_value, shown_value
from graphpatch_notebook.patches.slices import index_problem, selection_problem
from graphpatch_notebook.sharded import Placement, same_value
from graphpatch_notebook.torch_compat import without_torch_functions
from graphpatch_notebook.values import Key, ObjectSpec, ScalarSpec, TensorSpec, UnknownSpec, replaced, take
from graphpatch_notebook.warning_places import warn

IndicesIn: TypeAlias = Callable[[Any], Indices]
"""Finds the positions of an entry in a value."""


class MissingChildError(Exception):
    """The container in this run does not hold the value to patch (caught inside the package)."""


class Applier:
    """Applies the patches of a run to values, and notes which of them fired."""

    __slots__ = ("fired", "frames", "is_under_mode", "steps", "values")

    def __init__(self, frames: RunningFrames, steps: GenerationSteps | None) -> None:
        self.frames = frames
        self.steps = steps  # of a generation; `None` if no patch is for some of them only
        self.fired = FiredPatches()
        self.is_under_mode = False  # whether a function mode of the run is on
        self.values: dict[str, Any] = {}  # that patches of the run read, by name

    def at_boundary(self, entries: Sequence[Entry], value: Any) -> Any:
        """Applies entries to an input or output of a frame, where a mode of the run may be active."""
        __tracebackhide__ = True
        for entry in entries:
            if (watch := entry.watch) is not None and not self.is_under_mode and type(value) is Tensor:
                if value.shape == entry.observed_shape:  # `observe`, inlined: all values may be probed
                    self.fired.ids.add(id(entry))
                    watch(value)
                    continue
            elif entry.observed_shape is not None and self.observe(entry, value):
                continue
            value = self.apply(entry, value)
        return value

    def in_graph(self, entries_by_name: Mapping[str, list[Entry]], name: str, value: Any) -> Any:
        """Applies the entries on a node of a graph that is running."""
        __tracebackhide__ = True
        entries = entries_by_name[name]
        patched = self.at_boundary(entries, value)
        target = entries[0].target
        if target.node.is_in_place:
            write_back(value, patched, target)
        return patched

    def watch(self, entry: Entry, value: Any) -> None:
        """Applies an entry that only observes a tensor."""
        if isinstance(value, Tensor) and value.shape == entry.observed_shape:
            self.fired.ids.add(id(entry))
            entry.watch(value)  # type: ignore[misc]  # is given wherever this is called
        else:
            self.apply(entry, value)

    def observe(self, entry: Entry, value: Any) -> bool:
        """Shows a tensor to patches that only observe it. Returns whether it did."""
        shape = entry.observed_shape
        if shape is None or not isinstance(value, Tensor):
            return False
        if self.is_under_mode:
            with without_torch_functions():
                return self._show(entry, shape, value)
        return self._show(entry, shape, value)

    def _show(self, entry: Entry, shape: torch.Size, value: Tensor) -> bool:
        if value.shape != shape:
            return False
        self.fired.ids.add(id(entry))  # before: the last patch of `pg.record` ends the run
        for patch in entry.patches:
            patch.op(value)
        return True

    def apply(self, entry: Entry, value: Any) -> Any:
        """Applies one entry and notes that it fired, or why it could not."""
        __tracebackhide__ = True
        stack = self.frames.stack
        frame_run = stack[-1]
        # What is called here is not the model's: neither if a patch calls the model or a module of it, nor at a call
        # site that calls modules and ops (`for f in (self.linear, torch.tanh)`). `inside_one_node`, written out.
        stack.append(FrameRun(None))
        try:
            if isinstance(value, Tensor) and value.shape == entry.plain_shape and not entry.sources:
                patched = value
                for patch in entry.patches:
                    patched = _apply_patch(patch, entry.target, patched)
            elif entry.is_source:
                self.values[entry.target.text] = value_at(entry, value)
                patched = value
            else:
                applied = self._with_values(entry) if entry.sources else entry
                indices_in, inputs = self._indices_for(entry), _inputs_for(entry, frame_run)
                patched = _apply_at(applied, value, entry.target.dig, indices_in, inputs)
                if patched is not value and entry.target.node.is_view_filled_later:
                    _warn_of_lost_writes(entry)
        except MissingChildError as missing:
            self.fired.missing[id(entry)] = str(missing)
            return value
        except HeldBackError:
            return value
        except RunStopped:
            self.fired.ids.add(id(entry))
            if entry.patches[0].stops_run:
                self.fired.ended_at = entry.target.text
            raise
        finally:
            stack.pop()
        self.fired.ids.add(id(entry))
        self.fired.has_changed |= patched is not value
        return patched

    def _with_values(self, entry: Entry) -> Entry:
        """Returns an entry whose patch reads the values of this run."""
        missing = next((name for name in entry.sources if name not in self.values), None)
        if missing is not None:
            raise PatchValueError(
                f"{entry.target.text!r} reads {missing!r}, which was not computed before it in this forward (or, under "
                "activation checkpointing, in what backward runs again)"
            )
        (patch,) = entry.patches
        return replace(entry, patches=(patch.reading([self.values[name] for name in entry.sources]),))

    def may_apply(self, entry: Entry) -> bool:
        """Whether an entry may have an effect at the current step of a generation."""
        return entry.restriction is None or self.steps is None or self.steps.admits(entry)

    def unseen(self) -> AbstractContextManager[None]:
        """Hides torch calls from the function mode: the engine itself makes some to inspect tensors."""
        return without_torch_functions() if self.is_under_mode else _NOTHING_TO_HIDE

    def _indices_for(self, entry: Entry) -> IndicesIn | None:
        """Returns what finds the positions of an entry in a value; raises if the entry is not for this step."""
        steps = self.steps
        if entry.restriction is None:
            return None
        if steps is None:  # not a call of the `PatchableGraph`, but backward
            raise GraphPatchError(_RECOMPUTED_STEP.format(path=entry.target.path))
        if not steps.admits(entry):
            raise HeldBackError
        return None if entry.restriction.positions is None else partial(steps.indices, entry)


def _inputs_for(entry: Entry, frame_run: FrameRun) -> CallInputs | None:
    """Returns the arguments of the running frame, if the entry patches one of its ops."""
    target = entry.target
    is_here = frame_run.plan is not None and frame_run.plan.frame is target.frame
    return frame_run.inputs if is_here and target.node.kind == "op" and not target.dig else None


_NOTHING_TO_HIDE = nullcontext()
_RECOMPUTED_STEP = (
    "{path!r} is recomputed in backward (activation checkpointing), where the step of a generation that it belongs to "
    "is not known: switch checkpointing off, or drop steps= and positions="
)


def _child(value: Any, key: Key) -> Any:
    try:
        return take(value, key)
    except (LookupError, AttributeError, TypeError) as error:
        raise MissingChildError(f"the {type(value).__name__} in this run does not hold {key!r}") from error


def value_at(entry: Entry, value: Any) -> Any:
    """Returns the value that `entry` patches, taken from the value of its node."""
    for key in entry.target.dig:
        value = _child(value, key)
    if isinstance(value, Tensor) and entry.placement is None:
        value = _heads_apart(entry.target, value)
    elif isinstance(value, Tensor) and entry.placement is not None:
        value = entry.placement.whole(_heads_apart(entry.target, value, entry.placement.size_here(1)))
    value = _part(entry, value)
    # The model writes into this tensor later: what was read must stay as it was.
    return value.clone() if entry.target.node.is_mutated_later and isinstance(value, Tensor) else value


def _warn_of_lost_writes(entry: Entry) -> None:
    warn(
        f"{entry.target.path!r} is a view through which the model later writes into another tensor. The patch replaces "
        "the view, so these writes are lost; patch the tensor after it is filled",
        AliasedPatchWarning,
        stacklevel=2,
    )


def _apply_at(
    entry: Entry, value: Any, dig: tuple[Key, ...], indices_in: IndicesIn | None, inputs: CallInputs | None
) -> Any:
    """Returns `value` with the patches of `entry` applied to what `dig` leads to; the same object if nothing changed.

    Containers on the way are copied, never written into. `inputs` are the arguments of the frame's `forward`, for an
    entry on an op: they explain more of its shape. If the value has none of the positions of the patch, raises a
    `HeldBackError`, and a `MissingChildError` if there is no such value.
    """
    __tracebackhide__ = True
    if not dig:
        return _apply(entry, value, indices_in, inputs)
    child = _child(value, dig[0])
    patched = _apply_at(entry, child, dig[1:], indices_in, inputs)
    return value if patched is child else replaced(value, dig[0], patched)


def _apply(
    entry: Entry, value: Any, indices_in: IndicesIn | None, inputs: CallInputs | None, *, is_own: bool = False
) -> Any:
    __tracebackhide__ = True
    if entry.placement is not None and isinstance(value, Tensor):
        return _apply_to_whole(entry, entry.placement, value, indices_in)
    return _apply_plain(entry, value, indices_in, inputs, is_own=is_own)


def _apply_to_whole(entry: Entry, placement: Placement, value: Tensor, indices_in: IndicesIn | None) -> Any:
    """Returns this process's part of a value, after patches on the whole value."""
    __tracebackhide__ = True
    if (apart := _heads_apart(entry.target, value, placement.size_here(1))) is not value:
        return _packed(entry, value, apart, _apply_to_whole(entry, placement, apart, indices_in))
    with without_torch_functions():  # modes see one call, `same_value`
        whole = placement.whole(value)
        is_held, observes = entry.target.node.kind in HELD_KINDS, all(patch.observes_only for patch in entry.patches)
        needs_gradient = torch.is_grad_enabled() and whole is value and not (is_held and observes)
        given, gradient = placement.opened(whole) if needs_gradient else (whole, None)
    patched = _apply_plain(entry, same_value(value, given), indices_in, None)
    # A value that a patch keeps only has a gradient if the model continues with it.
    has_uses = torch.is_grad_enabled() and not is_held and given.requires_grad
    keeps = any(patch.only_keeps or not patch.observes_only for patch in entry.patches)
    if patched is given and not (has_uses and keeps):
        return value
    with without_torch_functions():
        placement.note_patched(patched, entry.patches)
        local = placement.local(patched if gradient is None else placement.closed(patched, gradient), value)
    return same_value(patched, local)


def _apply_plain(
    entry: Entry, value: Any, indices_in: IndicesIn | None, inputs: CallInputs | None, *, is_own: bool = False
) -> Any:
    __tracebackhide__ = True
    target = entry.target
    if isinstance(value, Tensor) and isinstance(target.whole, TensorSpec) and value.shape != target.whole.shape:
        apart = _heads_apart(target, value)
        if apart is not value:
            return _packed(entry, value, apart, _apply_plain(entry, apart, indices_in, inputs, is_own=is_own))
        _check_shape(entry, value, inputs)
    return _patched(entry, value, None if indices_in is None else indices_in(value), is_own=is_own)


def _heads_apart(target: Target, value: Tensor, here: int | None = None) -> Tensor:
    """Returns a value of an attention call with the heads in the dimension where they were captured.

    In a decoding step with a mask, transformers (since 5.1) packs the heads that share keys.
    """
    node = target.node
    if not (node.is_inner or node.op in FUSED_ATTENTION):
        return value
    shape = unpacked_shape(target.frame, node, target.whole, value.shape, here)
    return value if shape is None else value.reshape(shape)


def _packed(entry: Entry, value: Tensor, apart: Tensor, patched: Any) -> Any:
    """Returns a patched value with the heads in the same place as in `value`."""
    if patched is apart:
        return value
    if not isinstance(patched, Tensor) or patched.shape != apart.shape:
        raise PatchShapeError(
            f"{entry.target.text!r}: the model packs heads that share keys at this step, and takes a value "
            f"{shown_value(apart)}; the patch made one {shown_value(patched)}"
        )
    return patched.reshape(value.shape)


def apply_to_rows(entry: Entry, value: Tensor, *, is_own: bool = False) -> Any:
    """Applies an entry to some rows of its value, in step 0 of a generation; errors are those of `_apply_at`.

    If nothing else refers to the rows (`is_own`), patches write into them, not into a copy.
    """
    __tracebackhide__ = True
    if entry.restriction is None or entry.restriction.positions is None:
        return _apply(entry, value, None, None, is_own=is_own)
    indices = entry.restriction.indices(0, value.shape[entry.restriction.dim])
    return _patched(entry, value, indices) if indices else value


def _patched(entry: Entry, value: Any, indices: Indices | None, *, is_own: bool = False) -> Any:
    """Returns the value with the patches applied to the component's part of it, and only at some positions."""
    __tracebackhide__ = True
    target = entry.target
    part = _part(entry, value)
    patched = part
    if indices is None:
        for patch in entry.patches:
            patched = _apply_patch(patch, target, patched, is_own=is_own)
    else:
        assert entry.restriction is not None
        (patch,) = entry.patches
        dim, row_dim = entry.restriction.dim, entry.restriction.row_dim
        if target.index:
            dim = target.kept_dims.index(dim)
            row_dim = None if row_dim is None else target.kept_dims.index(row_dim)
        patched = _apply_patch_at(_Places(indices, dim, row_dim), patch, target, part)
    if part is value:
        return patched
    if patched is part and not any(_is_read_with_gradient(patch, target, value) for patch in entry.patches):
        return value  # it was written into, or not changed
    # A clone keeps the strides: the last bits of what the model computes next may depend on them.
    whole = value.clone()
    whole[target.index] = _checked(patched, entry.patches[-1], target, part, f"on a part of {target.path!r}")
    return whole


def _part(entry: Entry, value: Any) -> Any:
    """Returns the component's part of a value: a view, or the value itself if the component is all of it."""
    index = entry.target.index
    if not index or not isinstance(value, Tensor):
        return value
    is_empty_meant = any(patch.allow_empty for patch in entry.patches)
    problem = index_problem(index, value.shape) or selection_problem(
        index, value.shape, f"the value here, of shape {tuple(value.shape)},", allow_empty=is_empty_meant
    )
    if problem is not None:
        raise PatchValueError(f"{entry.target.text!r}: {problem}")
    return value[index]


@dataclass(frozen=True, slots=True)
class _Places:
    """Indices along a dimension of a value: for all rows of the batch, or, with a dimension of rows, those of each."""

    indices: Indices
    dim: int
    row_dim: int | None

    def taken(self, value: Tensor) -> Tensor:
        """Returns a copy of the value at these indices."""
        return value.gather(self.dim, self._index(value))

    def with_taken(self, value: Tensor, taken: Tensor) -> Tensor:
        """Returns a copy of the value with `taken` at these indices, so that gradients reach `taken`."""
        return value.clone().scatter_(self.dim, self._index(value), taken)

    def _index(self, value: Tensor) -> Tensor:
        """Returns these indices as `gather` and `scatter` take them."""
        index = torch.tensor(self.indices, device=value.device)
        shape, wanted = [1] * value.dim(), list(value.shape)
        wanted[self.dim] = index.shape[-1]
        if self.row_dim is None:
            shape[self.dim] = len(index)
            return index.reshape(shape).expand(wanted)
        shape[self.row_dim], shape[self.dim] = index.shape
        by_row = index if self.row_dim < self.dim else index.T
        return by_row.reshape(shape).expand(wanted)

    def replaced(self, value: Tensor, new: Tensor) -> Tensor:
        """Returns the value with the entries of `new` at these indices."""
        # A clone keeps the strides: the last bits of what the model computes next may depend on them.
        result = value.clone()
        if self.row_dim is None:
            # Each once: gradients of an index that is there twice would be added.
            index = torch.tensor(sorted(set(self.indices)), device=value.device)
            return result.index_copy_(self.dim, index, new.index_select(self.dim, index))
        pairs = [(row, place) for row, places in enumerate(self._rows) for place in set(places)]
        where: list[Any] = [slice(None)] * value.dim()
        where[self.row_dim], where[self.dim] = torch.tensor(pairs, device=value.device).T
        result[tuple(where)] = new[tuple(where)]
        return result

    def problem(self, value: Tensor, reads: bool) -> str | None:
        """Returns why the rows do not fit a value; `None` if they do."""
        if self.row_dim is None:
            return None
        rows, size = len(self._rows), value.shape[self.row_dim]
        if rows != size:
            return (
                f"positions has {rows} rows, but the value here, of shape {tuple(value.shape)}, has {size} in "
                f"dimension {self.row_dim}; give positions for each row of the batch"
            )
        counts = [len(places) for places in self._rows]
        if reads and len(set(counts)) > 1:
            return f"at this step, the rows have different numbers of the positions to read: {counts}"
        return None

    def is_all(self, value: Tensor) -> bool:
        """Whether these are all of the value, in order."""
        return self.row_dim is None and self.indices == list(range(value.shape[self.dim]))

    @property
    def has_repeats(self) -> bool:
        """Whether an index is there twice (in a row)."""
        rows = [self.indices] if self.row_dim is None else self._rows
        return any(len(set(places)) < len(places) for places in rows)

    @property
    def _rows(self) -> list[list[int]]:
        return self.indices  # type: ignore[return-value]


def _apply_patch_at(places: _Places, patch: Patch[Any], target: Target, value: Tensor) -> Tensor:
    """Applies a patch, and keeps its effect at some places only."""
    __tracebackhide__ = True
    where = f"with positions={patch.positions!r}"
    if (problem := places.problem(value, patch.observes_only)) is not None:
        raise PatchValueError(f"{target.text!r}: {problem}")
    if places.is_all(value):
        return _checked(_apply_patch(patch, target, value), patch, target, value, where)
    if patch.observes_only:
        taken = places.taken(value)
        has_gradient = _is_read_with_gradient(patch, target, value)
        if has_gradient and places.has_repeats:
            raise PatchValueError(
                f"{target.text!r}: positions={patch.positions!r} has a position twice, and both copies would get its "
                "gradient; give each position once, or run in torch.no_grad()"
            )
        patch.op(taken)
        return places.with_taken(value, taken) if has_gradient else value
    patched = _checked(_apply_patch(patch, target, value), patch, target, value, where)
    return value if patched is value else places.replaced(value, patched)


def _is_read_with_gradient(patch: Patch[Any], target: Target, value: Any) -> bool:
    """Whether a patch keeps a part of a value that gets a gradient: the model must use the part, for it to have one."""
    if not patch.only_keeps or not torch.is_grad_enabled() or not isinstance(value, Tensor) or not value.requires_grad:
        return False
    node = target.node
    return not (node.is_mutated_later or node.is_in_place or node.is_view_filled_later)


def _checked(patched: Any, patch: Patch[Any], target: Target, value: Tensor, where: str) -> Tensor:
    if isinstance(patched, Tensor) and patched.shape == value.shape and patched.dtype == value.dtype:
        return patched
    raise PatchValueError(
        f"{target.text!r}: {type(patch).__name__} {where} was given a value {shown_value(value)} and returned one "
        f"{shown_value(patched)}; a patch on a part of a value must keep its shape and dtype"
    )


def _apply_patch(patch: Patch[Any], target: Target, value: Any, *, is_own: bool = False) -> Any:
    __tracebackhide__ = True
    if patch.observes_only:
        # The model writes into this tensor later: what was observed must stay as it was.
        shown = value.clone() if target.node.is_mutated_later and isinstance(value, Tensor) else value
        patch.op(shown)
        return value
    if not isinstance(value, Tensor) or not isinstance(target.whole, TensorSpec):
        _check_kind(patch, target, value)
    given = value.clone() if patch.requires_clone and not is_own and isinstance(value, Tensor) else value
    try:
        patched = patch.op(given)
        if patched is None and isinstance(value, Tensor) and target.node.kind != "input" and not patch.any_shape:
            raise PatchValueError(
                f"{type(patch).__name__} returned None for a value {shown_value(value)}: is a return statement "
                "missing? To put None in place of the value, give any_shape=True"
            )
        return patched
    except GraphPatchError as error:
        raise type(error)(f"{target.text!r}: {error}") from (None if isinstance(patch, WritingPatch) else error)
    except (StopIteration, StopAsyncIteration):  # which the interpreter treats specially
        raise
    except Exception as error:
        if isinstance(patch, WritingPatch) and isinstance(error, (RuntimeError, IndexError, TypeError, ValueError)):
            # The message has all of the error's text, and its traceback is inside this package.
            who = f"{target.text!r} ({target.node.op})"
            raise PatchValueError(problem_of_value(patch, who, value, error)) from None
        shown = f"{type(patch).__name__} on {target.text!r} ({target.node.op})"
        add_note(error, f"raised by {shown}: the value here is {shown_value(value)}")
        raise


def _check_kind(patch: Patch[Any], target: Target, value: Any) -> None:
    if not isinstance(patch, WritingPatch) or patch.any_shape or isinstance(target.spec, UnknownSpec):
        return
    was_absent = isinstance(target.spec, (ScalarSpec, ObjectSpec)) and not isinstance(value, Tensor)
    if was_absent or isinstance(value, Tensor) == isinstance(target.spec, TensorSpec):
        return
    if target.node.kind == "input" and isinstance(value, Tensor):
        return  # an input that the example did not have, or had as a number
    raise PatchShapeError(
        f"{target.text!r} ({target.node.op}) was {target.spec} when it was captured, but is of type "
        f"{type(value).__name__} now; patch another node, or make the PatchableGraph with such inputs"
    )


def _check_shape(entry: Entry, value: Tensor, inputs: CallInputs | None) -> None:
    if all(patch.any_shape for patch in entry.patches):
        return
    target = entry.target
    problem = shape_problem(target.frame, target.whole, value.shape, inputs)
    if problem is not None:
        raise PatchShapeError(
            f"{target.text!r} ({target.node.op}) was of shape {tuple(target.whole.shape)} when it was captured, and is "  # type: ignore[union-attr]
            f"of shape {tuple(value.shape)} now: {problem}, so the name may mean another value here; if this is "
            "intended, give the patch any_shape=True"
        )


def write_back(wrote: Tensor, patched: Any, target: Target) -> None:
    """Writes the patched value of an in-place op back into the tensor that the op wrote into."""
    if patched is wrote:
        return
    if not isinstance(patched, Tensor) or patched.shape != wrote.shape:
        shown = tuple(patched.shape) if isinstance(patched, Tensor) else type(patched).__name__
        raise PatchValueError(
            f"{target.text!r} ({target.node.op}) writes in place into a tensor of shape {tuple(wrote.shape)}; "
            f"a patch on it must keep that shape, not give {shown}"
        )
    wrote.copy_(patched)
