"""Which models run elsewhere or are sharded over several processes, and how one is copied as one process would have it.

Under tensor parallelism each process holds some heads, some neurons, or one term of a sum, so that a slice, a position,
a head or a number means something else there than in the whole value. FSDP is different: its weights are whole while a
module runs.

What joins and splits values is in the room `distributed`, which is loaded where a model needs it: the rest of the
package asks `sharding_of` and `processes_of`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import handle_torch_function

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.torch_compat import function_mode_depth, is_fully_sharded

_P = ParamSpec("_P")
_T = TypeVar("_T")
_DISTRIBUTED = "DTensor"
_MESH = "DeviceMesh"
_MACHINERY = ("torch.distributed.tensor", "transformers.integrations.tensor_parallel", "transformers.distributed")


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


def sharding_of(root: Frame) -> Any:
    """Returns the sharding of the model of a capture; `None` if each process runs all of it."""
    return root.capture.findings.get(sharding_of)


def processes_of(root: Frame) -> Any:
    """Returns the processes that run the model of a capture together, under tensor parallelism or FSDP.

    `None` if this one runs it alone.
    """
    findings = root.capture.findings
    if processes_of not in findings:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        from graphpatch_notebook.distributed.processes import processes_over

        findings[processes_of] = processes_over(root.module)
    return findings[processes_of]


def calling(root: Frame, name: str) -> AbstractContextManager[None]:
    """A context manager for a call of the model, or of a method: it names processes that do not make it.

    Methods that all modules have, such as `eval`, do not run the model.
    """
    processes = processes_of(root) if name == "forward" or not hasattr(Module, name) else None
    return nullcontext() if processes is None else processes.calling(name)


def holding_tensors(module: Module, replacements: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Puts tensors into a module itself, for the length of a block: for a forward that would not see a stand-in."""
    from graphpatch_notebook.distributed.sharding import holding_tensors

    return holding_tensors(module, replacements)


def same_value(value: Any, result: Any) -> Any:
    """Returns `result`, which is the same value in another form: all of it, or what this process holds of it.

    Modes that follow values, as derivative rules do, see this call, and none of those that join parts.
    """
    is_same_kind = isinstance(value, Tensor) and isinstance(result, Tensor)
    if value is result or not is_same_kind or not function_mode_depth():
        return result
    return handle_torch_function(same_value, (), value, result)


def runs_where_the_model_is(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes a function of a `PatchableGraph` run in the processes that have the model of a `RemoteGraph`."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        run_there: Any = getattr(type(args[0]), "run_there", None) if args else None
        if run_there is None:
            return function(*args, **kwargs)
        result: _T = run_there(args[0], run, *args[1:], **kwargs)
        return result

    return run
