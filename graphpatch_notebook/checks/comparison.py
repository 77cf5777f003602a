"""Compares two runs from the same state of a model on the same inputs.

They are equal if they return the same, write the same into their inputs, and leave the model, the random generators
and the gradient mode in the same state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import Module

from graphpatch_notebook.checks.equality import IncomparableError, difference
from graphpatch_notebook.checks.model_state import ModelSnapshot, copied, preserved


@dataclass(frozen=True, slots=True)
class RunComparison:
    """How two runs compare: equal bit for bit; both ran, or only the second one raised; or nothing would be proved.

    `reason` is where they differ, the error, or why they cannot be compared.
    """

    status: Literal["equal", "differing", "not comparable"]
    reason: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether both do the same, bit for bit."""
        return self.status == "equal"


# A comparison puts buffers and random generators back, which two at a time must not do.
_lock = threading.RLock()


def compared(
    model: Module,
    expected: Callable[..., Any],
    found: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RunComparison:
    """Compares two runs on copies of the same inputs; the model and the inputs do not change.

    Args:
        model: Holds all state that the runs may change.
        expected: Runs what is right. Its errors are raised.
        found: Runs what may do the same.
        args: The positional inputs.
        kwargs: The inputs by keyword.
    """
    try:
        own = copied((args, kwargs))
    except Exception as error:  # of the user's own objects
        return _not_copied(error)
    with _lock, preserved(model), torch.set_grad_enabled(torch.is_grad_enabled()):
        return copy_context().run(run_and_compare, model, expected, found, *own)[1]


def run_and_compare(
    model: Module,
    expected: Callable[..., Any],
    found: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, RunComparison]:
    """Returns the result of `expected` on the inputs themselves, and its comparison with `found`, as `compared` does.

    The effects of `expected` stay. `found` runs on copies, and its effects are undone.
    """
    with _lock:
        try:
            before, copies = ModelSnapshot(model), copied((args, kwargs))
        except Exception as error:
            return expected(*args, **kwargs), _not_copied(error)
        had_gradients = torch.is_grad_enabled()
        context = copy_context()  # `expected` and `found` must not see the context variables that the other one sets
        result = expected(*args, **kwargs)
        # Graphs write, and draw from torch, as the module does, and repeat nothing else.
        changes = [str(one) for one in before.changes() if not (one.is_write and one.is_restorable)]
        if drawn := [owner for owner in before.random.changed() if owner in ("Python", "numpy")]:
            changes = [f"the model draws random numbers (of {' and '.join(drawn)})"]
        if changes:
            return result, RunComparison("not comparable", changes[0])
        has_gradients = torch.is_grad_enabled()
        with preserved(model) as after, torch.set_grad_enabled(has_gradients):
            before.restore()
            torch.set_grad_enabled(had_gradients)
            try:
                value = context.run(found, *copies[0], **copies[1])
            except Exception as error:
                return result, RunComparison("differing", f"its graph raises {_first_line(error)}")
            try:
                text = _difference(after, (value, copies), (result, (args, kwargs)), has_gradients)
            except (IncomparableError, RuntimeError, NotImplementedError) as error:  # the tensors of `torch.func`
                return result, RunComparison("not comparable", str(error))
            return result, RunComparison("equal" if text is None else "differing", text or "")


def _difference(after: ModelSnapshot, found: Any, expected: Any, has_gradients: bool) -> str | None:
    if torch.is_grad_enabled() != has_gradients:
        return "it ends in another gradient mode"
    for one, other, where in zip(found, expected, ("output", "inputs"), strict=True):
        if (text := difference(one, other, where)) is not None:
            return text
    if after.random.changed():
        return "it ends in another random state"
    changes = (f"it leaves another {change.name!r} in {change.module_class}" for change in after.changes())
    return next(changes, None)


def _not_copied(error: Exception) -> RunComparison:
    return RunComparison("not comparable", f"its inputs cannot be copied ({_first_line(error)})")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
