"""Determines whether a model is sharded over several processes, and copies such a model as one process would have it.

Under tensor parallelism each process holds some heads, some neurons, or one term of a sum, so that a slice, a position,
a head or a number means something else there than in the whole value. FSDP is different: its weights are whole while a
module runs.

What joins and splits values is in the room `distributed`, which is loaded where a model needs it; the rest of the
package knows `ShardedModel`, `ShardedValue` and `ProcessGroup`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import handle_torch_function

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.torch_compat import function_mode_depth, is_fully_sharded

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


# -- what the rest of the package knows of `distributed` ---------------------------------------------------------------


class ProcessGroup(Protocol):
    """The processes that run one model together. All of them call its methods, in one order."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first of them."""

    def gathered(self, value: Any) -> list[Any]:
        """Returns the objects of all processes in their order. The objects are pickled."""

    def are_same(self, value: Any) -> bool:
        """Returns whether the objects of all processes are equal."""

    def on_first(self, make: Callable[[], Any]) -> Any:
        """Runs `make` on the first process only, and returns its result, or raises its error, on all processes."""


class ShardedValue(Protocol):
    """How a value is distributed over the processes."""

    @property
    def dim(self) -> int | None:
        """The dimension along which each process holds a part; `None` if each holds the whole value."""

    def size_here(self, dim: int) -> int | None:
        """Returns the number of entries of a dimension on this process; `None` if it has all of them."""

    def whole(self, value: Tensor) -> Tensor:
        """Returns the whole value, given this process's part of it; the same object if the part is the whole."""

    def local(self, whole: Any, value: Tensor) -> Any:
        """Returns this process's part of a patched value, in the form of `value`, its part of the unpatched one."""

    def of_first(self, whole: Any, patches: Sequence[Patch[Any]]) -> Any:
        """Returns what functions in patches made of a value on the first process."""

    def opened(self, value: Tensor) -> tuple[Tensor, Any]:
        """Returns a value that all processes have, whose patches see all of its gradient, and a state for `closed`."""

    def closed(self, whole: Any, gradient: Any) -> Any:
        """Returns the patched value for a value that was `opened`."""


class ShardedModel(Protocol):
    """How the values of a model are distributed over the processes that run it."""

    @property
    def processes(self) -> ProcessGroup:
        """The processes."""

    def refusals(self, nodes: Any) -> dict[str, str]:
        """Returns the paths of the values that cannot be patched, with the reasons."""

    def problem(self, target: Any) -> str | None:
        """Returns why a value cannot be patched; `None` if it can."""

    def run_target(self, target: Any) -> Any:
        """Returns where a value is patched in runs."""

    def is_leaf(self, target: Any) -> bool:
        """Whether a value belongs to a sharded `Linear` or `Embedding`, whose op has parts only."""

    def placement(self, target: Any) -> ShardedValue | None:
        """Returns how a value is distributed; `None` before it was measured."""

    def check_call(self, function: Callable[..., Any], inputs: Sequence[Any], entries: Sequence[Any]) -> None:
        """Checks that all processes call the model, or a method of it, with the same tokens and patches."""

    def measure(self, run: Callable[[Mapping[str, Patch[Any]]], object], nodes: Any) -> None:
        """Finds out how the values are distributed, by `run` of the model on the example inputs on all processes."""


def sharding_of(root: Frame) -> ShardedModel | None:
    """Returns the sharding of the model of a capture; `None` if each process runs all of it."""
    return root.capture.findings.get(sharding_of)


def processes_of(root: Frame) -> ProcessGroup | None:
    """Returns the processes that run the model of a capture together, under tensor parallelism or FSDP.

    The first call is made by all of them. `None` if this one runs it alone.
    """
    findings = root.capture.findings
    if processes_of not in findings:
        from graphpatch_notebook.distributed.processes import processes_over

        findings[processes_of] = processes_over(root.module)
    found: ProcessGroup | None = findings[processes_of]
    return found


def same_value(value: Any, result: Any) -> Any:
    """Returns `result`, which is the same value in another form: all of it, or what this process holds of it.

    Modes that follow values, as derivative rules do, see this call, and none of those that join parts.
    """
    is_same_kind = isinstance(value, Tensor) and isinstance(result, Tensor)
    if value is result or not is_same_kind or not function_mode_depth():
        return result
    return handle_torch_function(same_value, (), value, result)
