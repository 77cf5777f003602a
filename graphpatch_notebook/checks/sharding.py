"""Determines whether a model is sharded over several processes, and copies such a model as one process would have it.

Under tensor parallelism each process holds some heads, some neurons, or one term of a sum, so that a slice, a position,
a head or a number means something else there than in the whole value. FSDP is different: its weights are whole while a
module runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.torch_compat import is_fully_sharded

_DISTRIBUTED = "DTensor"
_MESH = "DeviceMesh"
_MACHINERY = ("torch.distributed.tensor", "transformers.integrations.tensor_parallel", "transformers.distributed")


def is_sharded(model: Module) -> bool:
    """Whether a model computes with parts of values: some of its tensors are `DTensor`s that do not belong to FSDP.

    Also with `tp_size`, which transformers sets: its tensors may be plain parts.
    """
    if "torch.distributed.tensor" not in sys.modules and "torch.distributed._tensor" not in sys.modules:
        return False
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return False
    size = getattr(model, "tp_size", None)
    return (type(size) is int and size > 1) or next(iter(distributed_tensors(model)), None) is not None


def distributed_tensors(model: Module) -> Iterable[Any]:
    """Yields the `DTensor`s among the parameters and buffers of a model, without those of FSDP."""
    gathered: set[int] = set()
    for module in model.modules():
        if is_fully_sharded(module):
            gathered.update(map(id, module.modules()))
        if id(module) not in gathered:
            held = (*module._parameters.values(), *module._buffers.values())
            yield from (tensor for tensor in held if is_distributed(tensor))


def communicates(root: Frame) -> bool:
    """Whether copies of the model of a capture exchange weights, values or buffers with other processes."""
    modules = [frame.module for frame in root.walk()]
    return any(isinstance(each, DistributedDataParallel) or is_fully_sharded(each) for each in modules)


def is_distributed(value: object) -> bool:
    """Whether a value is a `DTensor`: each process holds a part of it."""
    return type(value).__name__ == _DISTRIBUTED


def is_parallel_machinery(function: Callable[..., Any] | None) -> bool:
    """Whether a hook, or a forward of an instance, is what splits and joins the values of a sharded model."""
    code = getattr(function, "__code__", None)
    named = str(getattr(function, "__module__", "")).startswith(_MACHINERY)
    return named or (code is not None and call_sites.facts_of(code).is_parallel)


def runs_shards(module: Module) -> bool:
    """Whether a module runs on its part of a weight, with code around it that splits or joins values."""
    around = (module.__dict__.get("forward"), *module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(map(is_parallel_machinery, around))


def holds_some_experts(module: Module) -> bool:
    """Whether a process has only some of the experts of a module: the experts of other processes compute other rows."""
    return bool(module.__dict__.get("_is_expert_parallel", False))


def note_whole_tensors(memo: dict[int, Any], module: Module, device: torch.device) -> None:
    """Makes `deepcopy` with this `memo` put empty tensors of the whole shape in place of the `DTensor`s of a module."""
    for held in (module._parameters, module._buffers):
        for tensor in held.values():
            if is_distributed(tensor) and tensor is not None and id(tensor) not in memo:
                whole: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                is_parameter = held is module._parameters
                memo[id(tensor)] = Parameter(whole, requires_grad=tensor.requires_grad) if is_parameter else whole
    for value in vars(module).values():
        if type(value).__name__ == _MESH:
            memo[id(value)] = value  # it holds groups of processes


def drop_machinery(copied: Module) -> None:
    """Removes the hooks that split and join values from a copied module, which holds whole tensors."""
    if is_parallel_machinery(copied.__dict__.get("forward")):
        del copied.__dict__["forward"]
    if holds_some_experts(copied):  # transformers then counts the experts of this process
        copied.__dict__["_is_expert_parallel"] = False
        copied.__dict__["num_experts"] = next(copied.parameters(recurse=False)).shape[0]
