"""Forward hooks that patch the output of modules with hooks of their own: ours must come last.

One hook for each module, however many contexts want it.
"""

from __future__ import annotations

import threading
from typing import Any

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from graphpatch_notebook.capture.forward_swap import observer

_lock = threading.Lock()
_hooks: dict[int, tuple[RemovableHandle, int]] = {}


class OutputHooks:
    """The hooks that one context holds."""

    def __init__(self) -> None:
        self._modules: dict[int, Module] = {}

    def hold(self, module: Module) -> None:
        """Makes sure that the output of `module` is seen, after its own hooks, until `let_go`."""
        if id(module) in self._modules:
            return
        self._modules[id(module)] = module
        with _lock:
            known = _hooks.get(id(module))
            handle = module.register_forward_hook(_on_output) if known is None else known[0]
            _hooks[id(module)] = (handle, 1 if known is None else known[1] + 1)

    def let_go(self) -> None:
        """Takes back all that `hold` did."""
        for key in self._modules:
            with _lock:
                handle, count = _hooks.pop(key)
                if count > 1:
                    _hooks[key] = (handle, count - 1)
                else:
                    handle.remove()
        self._modules.clear()


def _on_output(module: Module, args: Any, output: Any) -> Any:
    on_output = getattr(observer.get(), "on_output", None)
    return output if on_output is None else on_output(module, output)
