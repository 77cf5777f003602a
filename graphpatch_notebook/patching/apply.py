"""Applies patches to one value: follows the path into containers, copies, checks, and raises errors with the path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.capture.records import HELD_KINDS
from graphpatch_notebook.components.dimensions import CallInputs, shape_problem, unpacked_shape
from graphpatch_notebook.components.operations import FUSED_ATTENTION
from graphpatch_notebook.errors import GraphPatchError, PatchValueError, add_note
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patches.kinds import Patch, WritingPatch, problem_of_value, shown_value
from graphpatch_notebook.patching.plan import Entry, part_of
from graphpatch_notebook.patching.positions import Indices
from graphpatch_notebook.patching.sharding import same_value
from graphpatch_notebook.torch_compat import without_torch_functions
from graphpatch_notebook.values import Key, ObjectSpec, ScalarSpec, TensorSpec, UnknownSpec, replaced, take

IndicesIn: TypeAlias = Callable[[Any], Indices]
"""Finds the positions of an entry in a value."""


class MissingChildError(Exception):
    """The container in this run does not hold the value to patch (caught inside the package)."""


def _child(value: Any, key: Key) -> Any:
    try:
        return take(value, key)
    except (LookupError, AttributeError, TypeError) as error:
        raise MissingChildError(f"the {type(value).__name__} in this run does not hold {key!r}") from error


def value_at(entry: Entry, value: Any) -> Any:
    """Returns the value that `entry` patches, taken from the value of its node."""
    for key in entry.target.dig:
        value = _child(value, key)
    if isinstance(value, Tensor):
        value = _heads_apart(entry, value)
        value = value if entry.placement is None else entry.placement.whole(value)
    value = part_of(entry.target, value, entry.patches)
    # The model writes into this tensor later: what was read must stay as it was.
    return value.clone() if entry.target.node.is_mutated_later and isinstance(value, Tensor) else value


def apply_at(
    entry: Entry, value: Any, dig: tuple[Key, ...], indices_in: IndicesIn | None, inputs: CallInputs | None
) -> Any:
    """Returns `value` with the patches of `entry` applied to what `dig` leads to; the same object if nothing changed.

    Containers on the way are copied, never written into. `inputs` are the arguments of the frame's `forward`, for an
    entry on an op: they explain more of its shape. If the value has none of the positions of the patch, raises a
    `HeldBackError`, and a `MissingChildError` if there is no such value.
    """
    if not dig:
        return _apply(entry, value, indices_in, inputs)
    child = _child(value, dig[0])
    patched = apply_at(entry, child, dig[1:], indices_in, inputs)
    return value if patched is child else replaced(value, dig[0], patched)


def apply_to_rows(entry: Entry, value: Tensor, *, is_own: bool = False) -> Any:
    """Applies an entry to some rows of its value, in step 0 of a generation; errors are those of `apply_at`.

    If nothing else refers to the rows (`is_own`), patches write into them, not into a copy.
    """
    if entry.restriction is None or entry.restriction.positions is None:
        return _apply(entry, value, None, None, is_own=is_own)
    indices = entry.restriction.indices(0, value.shape[entry.restriction.dim])
    return _patched(entry, value, indices) if indices else value


def _apply(
    entry: Entry, value: Any, indices_in: IndicesIn | None, inputs: CallInputs | None, *, is_own: bool = False
) -> Any:
    apart = _heads_apart(entry, value) if isinstance(value, Tensor) else value

    def apply(given: Any) -> Any:
        if isinstance(given, Tensor) and isinstance(entry.target.whole, TensorSpec):
            _check_shape(entry, given, inputs)
        return _patched(entry, given, None if indices_in is None else indices_in(given), is_own=is_own)

    sharded = entry.placement if isinstance(value, Tensor) else None
    patched = apply(apart) if sharded is None else _apply_to_whole(entry, sharded, apart, apply)
    if apart is value or patched is apart:
        return value if patched is apart else patched
    if not isinstance(patched, Tensor) or patched.shape != apart.shape:
        raise PatchValueError(
            f"{entry.target.text!r}: the model packs heads that share keys at this step, and takes a value "
            f"{shown_value(apart)}; the patch made one {shown_value(patched)}"
        )
    return patched.reshape(value.shape)


def _heads_apart(entry: Entry, value: Tensor) -> Tensor:
    """Returns a value of an attention call with the heads in the dimension where they were captured.

    In a decoding step with a mask, transformers (since 5.1) packs the heads that share keys.
    """
    target, node = entry.target, entry.target.node
    is_attention = node.is_inner or node.op in FUSED_ATTENTION
    if not is_attention or not isinstance(target.whole, TensorSpec) or value.shape == target.whole.shape:
        return value
    heads = None if entry.placement is None else entry.placement.size_here(1)
    shape = unpacked_shape(target.frame, node, target.whole, value.shape, heads)
    return value if shape is None else value.reshape(shape)


def _apply_to_whole(entry: Entry, placement: Any, value: Tensor, apply: Callable[[Any], Any]) -> Any:
    """Returns this process's part of a value, after patches on the whole value."""
    with without_torch_functions():  # modes see one call, `same_value`
        whole = placement.whole(value)
        is_held = entry.target.node.kind in HELD_KINDS
        needs_gradient = torch.is_grad_enabled() and whole is value and not (is_held and entry.observes_only)
        given, gradient = placement.opened(whole) if needs_gradient else (whole, None)
    patched = apply(same_value(value, given))
    # A value that a patch keeps only has a gradient if the model continues with it.
    has_uses = torch.is_grad_enabled() and not is_held and given.requires_grad
    keeps = any(patch.only_keeps or not patch.observes_only for patch in entry.patches)
    if patched is given and not (has_uses and keeps):
        return value
    with without_torch_functions():
        first = placement.of_first(patched, entry.patches)
        local = placement.local(first if gradient is None else placement.closed(first, gradient), value)
    return same_value(patched, local)


def _patched(entry: Entry, value: Any, indices: Indices | None, *, is_own: bool = False) -> Any:
    """Returns the value with the patches applied to the component's part of it, and only at some positions."""
    target = entry.target
    part = patched = part_of(target, value, entry.patches)
    if indices is None:
        for patch in entry.patches:
            patched = apply_patch(patch, target, patched, is_own=is_own)
    else:
        patched = _apply_patch_at(entry, indices, part)
    if part is value:
        return patched
    if patched is part and not any(_is_read_with_gradient(patch, target, value) for patch in entry.patches):
        return value  # it was written into, or not changed
    # A clone keeps the strides: the last bits of what the model computes next may depend on them.
    whole = value.clone()
    whole[target.index] = _checked(patched, entry.patches[-1], target, part, f"on a part of {target.path!r}")
    return whole


# -- at some positions -------------------------------------------------------------------------------------------------


def _apply_patch_at(entry: Entry, indices: Indices, value: Tensor) -> Tensor:
    """Applies the patch of an entry to the part of a value that it means, and keeps its effect at some indices only."""
    target, (patch,), restriction = entry.target, entry.patches, entry.restriction
    assert restriction is not None
    dim, row_dim = (
        each if each is None or not target.index else target.kept_dims.index(each)
        for each in (restriction.dim, restriction.row_dim)
    )
    assert dim is not None
    rows: list[list[int]] = [indices] if row_dim is None else indices  # type: ignore[list-item, assignment]
    if row_dim is not None and len(rows) != value.shape[row_dim]:
        raise PatchValueError(
            f"{target.text!r}: positions has {len(rows)} rows, but the value here, of shape {tuple(value.shape)}, has "
            f"{value.shape[row_dim]} in dimension {row_dim}; give positions for each row of the batch"
        )
    is_all = row_dim is None and rows[0] == list(range(value.shape[dim]))
    if is_all and patch.observes_only:
        apply_patch(patch, target, value)
        return value
    shape = [1] * value.dim()
    if row_dim is not None:
        shape[row_dim] = len(rows)
    if not patch.observes_only:
        where = f"with positions={patch.positions!r}"
        patched = _checked(apply_patch(patch, target, value), patch, target, value, where)
        shape[dim] = value.shape[dim]
        chosen = torch.zeros(len(rows), shape[dim], dtype=torch.bool)
        for number, row in enumerate(rows):
            chosen[number, row] = True
        mask = _along(chosen.to(value.device), shape, dim, row_dim)
        return patched if is_all or patched is value else torch.where(mask, patched, value)
    if len(set(map(len, rows))) > 1:
        raise PatchValueError(
            f"{target.text!r}: at this step, the rows have different numbers of the positions to read: {indices}"
        )
    has_gradient = _is_read_with_gradient(patch, target, value)
    if has_gradient and any(len(set(row)) < len(row) for row in rows):
        raise PatchValueError(
            f"{target.text!r}: positions={patch.positions!r} has a position twice, and both copies would get its "
            "gradient; give each position once, or run in torch.no_grad()"
        )
    shape[dim] = len(rows[0])
    sizes = [*value.shape[:dim], len(rows[0]), *value.shape[dim + 1 :]]
    index = _along(torch.tensor(rows, device=value.device), shape, dim, row_dim).expand(sizes)
    taken = value.gather(dim, index)
    patch.op(taken)
    return value.clone().scatter_(dim, index, taken) if has_gradient else value


def _along(table: Tensor, shape: Sequence[int], dim: int, row_dim: int | None) -> Tensor:
    """Returns a table of rows and positions in a shape that has its sizes in these two dimensions, else ones."""
    return (table if row_dim is None or row_dim < dim else table.T).reshape(shape)


def _is_read_with_gradient(patch: Patch[Any], target: Target, value: Any) -> bool:
    """Whether a patch keeps a part of a value that gets a gradient: the model must use the part, for it to have one."""
    if not patch.only_keeps or not torch.is_grad_enabled() or not isinstance(value, Tensor) or not value.requires_grad:
        return False
    node = target.node
    return not (node.is_mutated_later or node.is_in_place or node.is_view_filled_later)


# -- one patch ---------------------------------------------------------------------------------------------------------


def apply_patch(patch: Patch[Any], target: Target, value: Any, *, is_own: bool = False) -> Any:
    """Returns the result of one patch; errors name the path, and what the patch was given."""
    if patch.observes_only:
        # The model writes into this tensor later: what was observed must stay as it was.
        patch.op(value.clone() if target.node.is_mutated_later and isinstance(value, Tensor) else value)
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


def _checked(patched: Any, patch: Patch[Any], target: Target, value: Tensor, where: str) -> Tensor:
    if isinstance(patched, Tensor) and patched.shape == value.shape and patched.dtype == value.dtype:
        return patched
    raise PatchValueError(
        f"{target.text!r}: {type(patch).__name__} {where} was given a value {shown_value(value)} and returned one "
        f"{shown_value(patched)}; a patch on a part of a value must keep its shape and dtype"
    )


def _check_kind(patch: Patch[Any], target: Target, value: Any) -> None:
    """Raises a `PatchValueError` if a number was captured where a tensor is now, or the other way round."""
    spec, is_tensor = target.spec, isinstance(value, Tensor)
    if not isinstance(patch, WritingPatch) or patch.any_shape or isinstance(spec, UnknownSpec):
        return
    kinds = TensorSpec if is_tensor else (ScalarSpec, ObjectSpec)
    is_same = isinstance(spec, kinds) or is_tensor == isinstance(spec, TensorSpec)
    if not is_same and not (target.node.kind == "input" and is_tensor):  # which the example did not have
        raise PatchValueError(
            f"{target.text!r} ({target.node.op}) was {spec} when it was captured, but is of type "
            f"{type(value).__name__} now; patch another node, or make the PatchableGraph with such inputs"
        )


def _check_shape(entry: Entry, value: Tensor, inputs: CallInputs | None) -> None:
    """Raises a `PatchValueError` if a value is of another shape than its name stands for at these inputs."""
    target = entry.target
    if value.shape == target.whole.shape or all(patch.any_shape for patch in entry.patches):  # type: ignore[union-attr]
        return
    problem = shape_problem(target.frame, target.whole, value.shape, inputs)
    if problem is not None:
        raise PatchValueError(
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
