"""Errors that the user's own code raises, at its n-th step; and all that a process keeps which they could spoil."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphpatch_notebook.capture import modules
from graphpatch_notebook.patching import context
from graphpatch_notebook.torch_compat import eager_code, function_mode_depth
from tests.noted import Steps


class OwnError(Exception):
    """An error that takes an argument which cannot be guessed, as some libraries' do."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__(first, second)


ERRORS: list[Any] = [
    lambda: ValueError("injected"),
    lambda: RuntimeError("injected"),
    lambda: KeyError("injected"),
    lambda: AttributeError("injected"),
    lambda: TypeError("injected"),
    lambda: IndexError("injected"),
    lambda: NotImplementedError("injected"),
    lambda: StopIteration("injected"),
    lambda: AssertionError("injected"),
    lambda: MemoryError("injected"),
    lambda: torch.cuda.OutOfMemoryError("injected"),
    lambda: OwnError(1, 2),
    lambda: KeyboardInterrupt("injected"),
    lambda: SystemExit("injected"),
]


STEPS = Steps()


class EachOperation(TorchFunctionMode):
    """A mode of the user's: each call of torch in it is a step."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        STEPS.step()
        return func(*args, **(kwargs or {}))


class Steppy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        STEPS.step()
        return t * 3.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        STEPS.step()
        return grads[0] * 2.0


def after(module: nn.Module, args: Any, output: Any) -> Any:
    return STEPS.step(output) + 1


def before(module: nn.Module, args: Any) -> Any:
    return (STEPS.step(args[0]) * 0.5,)


class Inner(nn.Module):
    """Raises before, between and after its operations, in its hooks, and in a gradient."""

    def __init__(self, has_hooks: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if has_hooks:
            self.linear.register_forward_hook(after)
            self.linear.register_forward_pre_hook(before)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor, flag: bool = True) -> dict[str, Any]:
        STEPS.step()
        hidden = Steppy.apply(self.linear(x)) * self.scale
        STEPS.step()
        shifted = hidden + self.shift
        return {"hidden": shifted, "pair": (x, None)} if flag else {"hidden": x}


class Model(nn.Module):
    """Calls its part twice, handles nothing, and writes in place."""

    def __init__(self, has_hooks: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Inner(has_hooks)
        self.last = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5)).eval()

    def forward(self, x: Tensor) -> Tensor:
        first = self.inner(x)
        second = self.inner(x + 1)["hidden"].add_(1.0)
        STEPS.step()
        return self.last(first["hidden"] + second)


def process_state() -> dict[str, Any]:
    """Returns all that is kept for the whole process, or for this thread, and could be spoiled."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "function modes": function_mode_depth(),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "trace": sys.gettrace(),
        "profile": sys.getprofile(),
        "warnings": list(warnings.filters),
        "show warning": warnings.showwarning,
        "hook": sys.excepthook,
        "contextvars": {v.name: x for v, x in copy_context().items() if v.name.startswith("graphpatch") and x},
        "swaps": [dict(modules._forwards), dict(modules._calls)],
        "contexts": list(context._blocks),
        "eager code": eager_code._blocks,
        "apply": torch.autograd.Function.__dict__["apply"],
        "module": dict(vars(nn.Module)),
        "tensor": dict(vars(Tensor)),
        "torch": {name: value for name, value in vars(torch).items() if callable(value)},
        "functional": dict(vars(nn.functional)),
        "checkpoint": torch.utils.checkpoint.checkpoint,
    }


@contextmanager
def nothing_changes_in_the_process() -> Iterator[None]:
    before = process_state()
    yield
    for name, value in process_state().items():
        assert value == before[name], name
