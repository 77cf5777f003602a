"""How a value is distributed over the processes: joined before its patches, and split again after them.

Gradients go the other way. That of a part is a part of the gradient. A value that all processes hold may have the whole
gradient on each of them, or one term of it (what only the heads of a process read): backward finds that out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphpatch_notebook.capture.records import HELD_KINDS
from graphpatch_notebook.errors import PatchValueError
from graphpatch_notebook.patches.kinds import Patch, declares
from graphpatch_notebook.patching.sharding import is_distributed, same_value
from graphpatch_notebook.torch_compat import strided_shard, without_torch_functions

_SAME = 1e-5
_FEW = 4  # this many terms are not equal on all processes by chance


@dataclass(frozen=True)
class Placement:
    """How a value is distributed."""

    path: str  # the path of the value
    mesh: Any  # the processes, as a `DeviceMesh` of one dimension
    dim: int | None = None  # the dimension along which each process holds a part; `None` if each holds the whole value
    sizes: tuple[int, ...] = ()  # the sizes of the parts along it, by rank
    factor: int = 1  # how many weights are packed along `dim` (2 for gate and up): each is split separately
    own_dim: int | None = None  # the split dimension of a `DTensor`, which gathers itself; `None` for all others

    def __str__(self) -> str:
        dim = self.own_dim if self.dim is None else self.dim
        return "replicated" if dim is None else f"split along dimension {dim}"

    def size_here(self, dim: int) -> int | None:
        """Returns the number of entries of a dimension on this process; `None` if it has all of them."""
        return self.sizes[self.mesh.get_local_rank()] if dim == self.dim else None

    def whole(self, value: Tensor) -> Tensor:
        """Returns the whole value, given this process's part of it; the same object if the part is the whole.

        One that is not distributed as in the capture is a `PatchValueError`.
        """
        if is_distributed(value):
            return value.full_tensor()  # type: ignore[attr-defined, no-any-return]
        if self.dim is None:
            return value
        rank = self.mesh.get_local_rank()
        if value.dim() <= self.dim or value.shape[self.dim] != self.sizes[rank]:
            raise PatchValueError(
                f"{self.path!r}: process {rank} held {self.sizes[rank]} entries of dimension {self.dim} when the model "
                f"was captured, and holds a value of shape {tuple(value.shape)} now: how it is distributed over the "
                "processes is not known; make the PatchableGraph with such inputs"
            )
        shape = (*value.shape[: self.dim], sum(self.sizes), *value.shape[self.dim + 1 :])
        stride = torch.empty(shape, device="meta").stride()
        joined = _distributed_tensors().DTensor.from_local(
            value.contiguous(), self.mesh, [self._shard()], run_check=False, shape=torch.Size(shape), stride=stride
        )
        return joined.full_tensor()  # type: ignore[no-any-return]

    def local(self, whole: Any, value: Tensor) -> Any:
        """Returns this process's part of a patched value, in the form of `value`, its part of the unpatched one."""
        kinds = _distributed_tensors()
        if not isinstance(whole, Tensor) and (self.dim is not None or is_distributed(value)):
            raise PatchValueError(f"{self.path!r} is distributed over processes: a patch must return a tensor for it")
        if is_distributed(value):
            distributed: Any = value
            mesh, placements = distributed.device_mesh, distributed.placements
            again = kinds.DTensor.from_local(whole, mesh, [kinds.Replicate()] * len(placements), run_check=False)
            return again if any(each.is_partial() for each in placements) else again.redistribute(placements=placements)
        if self.dim is None:
            return whole
        if whole.dim() <= self.dim or whole.shape[self.dim] != sum(self.sizes):
            raise PatchValueError(
                f"{self.path!r} has {sum(self.sizes)} entries in dimension {self.dim}, distributed over processes; a "
                f"patch must keep them, not make a value of shape {tuple(whole.shape)}"
            )
        again = kinds.DTensor.from_local(whole.contiguous(), self.mesh, [kinds.Replicate()], run_check=False)
        return again.redistribute(placements=[self._shard()]).to_local().clone(memory_format=torch.contiguous_format)

    def applied(self, value: Tensor, apply: Callable[[Any], Any], entry: Any) -> Any:
        """Returns this process's part of a value after patches: `apply` does those of `entry` on the whole value."""
        with without_torch_functions():  # modes see one call, `same_value`
            whole = self.whole(value)
            is_held = entry.target.node.kind in HELD_KINDS
            needs_gradient = torch.is_grad_enabled() and whole is value and not (is_held and entry.observes_only)
            given, gradient = self.opened(whole) if needs_gradient else (whole, None)
        patched = apply(same_value(value, given))
        # A value that a patch keeps only has a gradient if the model continues with it.
        has_uses = torch.is_grad_enabled() and not is_held and given.requires_grad
        keeps = any(patch.only_keeps or not patch.observes_only for patch in entry.patches)
        if patched is given and not (has_uses and keeps):
            return value
        with without_torch_functions():
            first = self.of_first(patched, entry.patches)
            local = self.local(first if gradient is None else self.closed(first, gradient), value)
        return same_value(patched, local)

    def _shard(self) -> Any:
        assert self.dim is not None
        return _distributed_tensors().Shard(self.dim) if self.factor == 1 else strided_shard(self.dim, self.factor)

    def of_first(self, whole: Any, patches: Sequence[Patch[Any]]) -> Any:
        """Returns what functions in patches made of a value on the first process: of random numbers, say."""
        is_known = all(patch.observes_only or declares(patch, "is_pure") for patch in patches)
        if is_known or not isinstance(whole, Tensor) or is_distributed(whole):
            return whole
        of_first = whole.detach().clone(memory_format=torch.contiguous_format)
        group = self.mesh.get_group()
        dist.broadcast(of_first, dist.get_global_rank(group, 0), group)
        return whole + (of_first - whole).detach() if whole.requires_grad else of_first

    def opened(self, value: Tensor) -> tuple[Tensor, _Gradient]:
        """Returns a value that all processes have, whose patches see all of its gradient, and a state for `closed`.

        Downstream of the patches each process may have one term of the gradient: the patches are given the sum, and
        upstream goes the sum on the first process, and zero on the others.
        """
        gradient = _Gradient(self.path, self.mesh)
        return (_Open.apply(value, gradient) if value.requires_grad else value), gradient  # type: ignore[no-untyped-call]

    @staticmethod
    def closed(whole: Any, gradient: _Gradient) -> Any:
        """Returns the patched value for a value that was `opened`."""
        needs_gradient = isinstance(whole, Tensor) and whole.requires_grad
        return _Close.apply(whole, gradient) if needs_gradient else whole  # type: ignore[no-untyped-call]


class _Gradient:
    """Whether each process has one term of a gradient: known once backward has reached the result of the patches."""

    def __init__(self, path: str, mesh: Any) -> None:
        self.path = path
        self.mesh = mesh
        self.is_sum = False

    def total(self, terms: Tensor) -> Tensor:
        """Returns the sum of the terms of all processes; raises an error if some entries are whole on each of them."""
        group = self.mesh.get_group()
        least, most, total = (terms.contiguous().clone() for _ in range(3))
        for reduced, kind in ((least, dist.ReduceOp.MIN), (most, dist.ReduceOp.MAX), (total, dist.ReduceOp.SUM)):
            dist.all_reduce(reduced, op=kind, group=group)
        is_same, is_there = least == most, (least != 0) | (most != 0)
        for dim in range(terms.dim()):
            others = [other for other in range(terms.dim()) if other != dim]
            slices_same = is_same.movedim(dim, 0).flatten(1).all(1) if others else is_same
            slices_there = is_there.movedim(dim, 0).flatten(1).sum(1) if others else is_there.long()
            if bool((slices_same & (slices_there >= _FEW)).any()):
                raise PatchValueError(
                    f"the gradient of {self.path!r} cannot be determined: some entries are complete on every process, "
                    "others are terms of a sum; patch it without gradients, or patch what is computed from it"
                )
        return total


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        is_elsewhere = ctx.gradient.is_sum and ctx.gradient.mesh.get_local_rank() > 0
        return torch.zeros_like(grad) if is_elsewhere else grad, None


class _Close(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return value.clone()  # the model may write into it, which autograd refuses for views

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gradient = ctx.gradient
        mine = sketch(grad).to(grad.device)
        sketches = [torch.empty_like(mine) for _ in range(gradient.mesh.size())]
        dist.all_gather(sketches, mine, group=gradient.mesh.get_group())
        gradient.is_sum = not all(is_same_sketch(sketches[0], each) for each in sketches)  # the same on all processes
        return gradient.total(grad) if gradient.is_sum else grad, None


def sketch(value: Tensor) -> Tensor:
    """Returns a few numbers that differ if values differ: random sums of the entries, and their norm."""
    real = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
    rows = real.reshape(-1, real.shape[-1] if real.dim() and real.numel() else 1).to(torch.float64, copy=True)
    rows.nan_to_num_(0.5, 2.0, -2.0).clamp_(-1e30, 1e30)
    by_row, by_column = (_weights(size, str(value.device)) for size in rows.shape)
    return torch.cat([((rows @ by_column) * by_row).sum(0), rows.norm()[None]])


@functools.lru_cache(64)
def _weights(size: int, device: str) -> Tensor:
    """Returns random weights, of shape (size, 2): the same on all processes."""
    generator = torch.Generator().manual_seed(size % 1009)
    return torch.randn(size, 2, generator=generator, dtype=torch.float64).to(device)


def is_same_sketch(one: Tensor, other: Tensor) -> bool:
    """Whether two sketches are of the same value, up to rounding."""
    return bool(((one - other).abs() <= _SAME * max(one[-1].item(), other[-1].item())).all())


def _distributed_tensors() -> Any:
    """Returns the module with `DTensor` and its placements: not every torch has `torch.distributed`."""
    import torch.distributed.tensor

    return torch.distributed.tensor
