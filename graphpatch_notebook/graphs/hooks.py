"""The forward hooks of a module that the graph of its caller calls.

What hooks did to tensors when the model was captured is part of that graph. What else they do (a library that collects
hidden states, a user's counter) is not, nor is what hooks do that were registered since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch.nn import Module

from graphpatch_notebook.capture.tensor_sources import plain_tensors
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.torch_compat import forward_hooks, forward_pre_hooks


def call_with_hooks(module: Module, recorded: Collection[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `forward` of `module` between its hooks, and returns what the caller gets.

    Args:
        module: The module.
        recorded: The ids of the hooks that ran when the caller was captured: they run for what else they do, and what
            they return, which the caller's graph computes itself, is dropped.
        args: The positional arguments of `forward`.
        kwargs: The keyword arguments.

    Raises:
        GraphError: A recorded hook writes into a tensor, as the graph does, too.
    """
    for key, hook, takes_kwargs in forward_pre_hooks(module):
        if key in recorded:
            _run_recorded(module, hook, (args, kwargs) if takes_kwargs else (args,))
        elif takes_kwargs:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        elif (result := hook(module, args)) is not None:
            args = result if isinstance(result, tuple) else (result,)
    output = module.forward(*args, **kwargs)
    for key, hook, takes_kwargs in forward_hooks(module):
        given = (args, kwargs, output) if takes_kwargs else (args, output)
        if key in recorded:
            _run_recorded(module, hook, given)
        elif (result := hook(module, *given)) is not None:
            output = result
    return output


def _run_recorded(module: Module, hook: Callable[..., Any], given: tuple[Any, ...]) -> None:
    tensors = [tensor for tensor in plain_tensors(given) if not tensor.is_inference()]
    versions = [tensor._version for tensor in tensors]
    hook(module, *given)
    if [tensor._version for tensor in tensors] != versions:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise GraphError(
            f"the forward hook {name} of a {type(module).__name__} writes into a tensor in place, as the edited graph "
            "of its caller does, too: make the hook return a new tensor, or remove it before the model is captured"
        )
