"""Hooks that patch the inputs and the output of modules with hooks of their own: ours must come last.

One pair of hooks for each module, however many contexts want it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from graphpatch_notebook.capture.forward_swap import observer

_lock = threading.Lock()
_hooks: dict[int, tuple[list[RemovableHandle], int]] = {}


def takes_hooks(module: Module) -> bool:
    """Whether forward hooks can be registered on `module`: scripted modules take none."""
    return not isinstance(module, torch.jit.ScriptModule)


class ModuleHooks:
    """The hooks that one context holds."""

    def __init__(self) -> None:
        self._modules: dict[int, Module] = {}

    def hold(self, module: Module) -> None:
        """Makes sure that what `module` is given and gives is seen, after its own hooks, until `let_go`."""
        if id(module) in self._modules:
            return
        self._modules[id(module)] = module
        with _lock:
            handles, count = _hooks.get(id(module), ([], 0))
            if not handles:
                handles.append(module.register_forward_pre_hook(_on_inputs, with_kwargs=True))
                handles.append(module.register_forward_hook(_on_output))
            _hooks[id(module)] = (handles, count + 1)

    def let_go(self) -> None:
        """Takes back all that `hold` did."""
        for key in self._modules:
            with _lock:
                handles, count = _hooks.pop(key)
                if count > 1:
                    _hooks[key] = (handles, count - 1)
                    continue
                for handle in handles:
                    handle.remove()
        self._modules.clear()


def _on_inputs(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    on_inputs = getattr(observer.get(), "on_inputs", None)
    return None if on_inputs is None else on_inputs(module, args, kwargs)


def _on_output(module: Module, _args: Any, output: Any) -> Any:
    on_output = getattr(observer.get(), "on_output", None)
    return output if on_output is None else on_output(module, output)
