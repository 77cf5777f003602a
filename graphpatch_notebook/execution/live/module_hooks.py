"""Hooks that patch the inputs and the output of modules with hooks of their own: ours must come last.

Each module has one pair of hooks, which all contexts share.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.observers import observer
from graphpatch_notebook.execution.live.stand_in import original_of

_lock = threading.Lock()
_hooks: dict[int, _Hooks] = {}


class _Hooks:
    """The pair of hooks on one module."""

    def __init__(self, module: Module) -> None:
        self.holders: set[ModuleHooks] = set()
        self._module = module
        self._on_inputs: RemovableHandle | None = None
        self._on_output: RemovableHandle | None = None

    def install(self) -> None:
        if self._on_inputs is None:
            self._on_inputs = self._module.register_forward_pre_hook(_on_inputs, with_kwargs=True)
        if self._on_output is None:
            self._on_output = self._module.register_forward_hook(_on_output)

    def remove(self) -> None:
        for handle in (self._on_inputs, self._on_output):
            if handle is not None:
                handle.remove()


class ModuleHooks:
    """The hooks that one context holds. As with `Swaps`, `let_go` can be called again after an interrupt."""

    def __init__(self) -> None:
        self._modules: dict[int, Module] = {}

    def hold(self, module: Module) -> None:
        """Sees the inputs and the output of `module`, after its own hooks, until `let_go`."""
        if id(module) in self._modules:
            return
        self._modules[id(module)] = module
        with _lock:
            known = _hooks.get(id(module))
            if known is None:
                known = _hooks[id(module)] = _Hooks(module)
            known.holders.add(self)
            known.install()

    def let_go(self) -> None:
        """Takes back all that `hold` did."""
        with _lock:
            for key in self._modules:
                known = _hooks.get(key)
                if known is None:
                    continue
                known.holders.discard(self)
                if not known.holders:
                    known.remove()
                    _hooks.pop(key, None)
            self._modules.clear()


def _on_inputs(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    on_inputs = getattr(observer.get(), "on_inputs", None)
    return None if on_inputs is None else on_inputs(original_of(module), args, kwargs)


def _on_output(module: Module, _args: Any, output: Any) -> Any:
    __tracebackhide__ = True
    on_output = getattr(observer.get(), "on_output", None)
    return output if on_output is None else on_output(original_of(module), output)


_MODULE_FILE = Module.__call__.__code__.co_filename
_MODULE_CALLERS = {"_call_impl", "inner", "_slow_forward"}


def is_called_by_module_call() -> bool:
    """Whether the swapped `forward` was called by `Module.__call__`, which runs the module's hooks afterwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _MODULE_FILE:
            return code.co_name in _MODULE_CALLERS
        facts = call_sites.facts_of(code)
        if not (call_sites.is_own(code) or facts.is_offloading or facts.is_collecting):
            return False
        frame = frame.f_back
    return False


def forwards_may_be_wrapped() -> bool:
    """Whether models may wrap the forwards of their modules during a run, inside of hooks.

    Transformers before 5.2 does, to collect hidden states: these must be the values before the patches.
    """
    return hasattr(sys.modules.get("transformers.utils.generic"), "OutputRecorder")
