"""Compares two runs from the same state of a model on the same inputs.

They are equal if they return the same, write the same into their inputs, and leave the model, the random generators
and the gradient mode in the same state.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from graphpatch_notebook.checks.equality import IncomparableError, difference
from graphpatch_notebook.checks.model_state import ModelSnapshot, copied, preserved
from graphpatch_notebook.interrupts import afterwards


class ComparisonOutcome(enum.Enum):
    """How two runs compare."""

    EQUAL = enum.auto()
    DIFFERENT = enum.auto()
    RAISES = enum.auto()
    """Only the second one raises."""
    UNREPEATABLE = enum.auto()
    """The first one changes what a second run cannot repeat."""
    NOT_COMPARABLE = enum.auto()
    """There are values that cannot be copied, or not be compared."""


@dataclass(frozen=True, slots=True)
class RunComparison:
    """How two runs compare; `detail` is where they differ, the error, or why they cannot be compared."""

    outcome: ComparisonOutcome
    detail: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether both do the same, bit for bit."""
        return self.outcome is ComparisonOutcome.EQUAL

    @property
    def is_difference(self) -> bool:
        """Whether both ran, and do something else."""
        return self.outcome in (ComparisonOutcome.DIFFERENT, ComparisonOutcome.RAISES)

    def __str__(self) -> str:
        return f"its graph raises {self.detail}" if self.outcome is ComparisonOutcome.RAISES else self.detail


# A comparison puts buffers and random generators back, which two at a time must not do.
_lock = threading.RLock()


def compared(
    model: Module,
    expected: Callable[..., Any],
    found: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    within_rounding: bool = False,
) -> RunComparison:
    """Compares two runs on copies of the same inputs; the model and the inputs do not change.

    Args:
        model: Holds all state that the runs may change.
        expected: Runs what is right. Its errors are raised.
        found: Runs what may do the same.
        args: The positional inputs.
        kwargs: The inputs by keyword.
        within_rounding: Whether floats may differ by rounding.
    """
    try:
        own_args, own_kwargs = copied((args, kwargs))
    except Exception as error:  # of the user's own objects
        return _not_copied(error)
    had_gradients = torch.is_grad_enabled()
    with _lock, preserved(model), afterwards(lambda: torch.set_grad_enabled(had_gradients)):
        runs = partial(run_and_compare, model, expected, found, own_args, own_kwargs)
        return copy_context().run(runs, within_rounding=within_rounding)[1]


def run_and_compare(
    model: Module,
    expected: Callable[..., Any],
    found: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    within_rounding: bool = False,
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
        if (why := _unrepeatable(before)) is not None:
            return result, RunComparison(ComparisonOutcome.UNREPEATABLE, why)
        has_gradients = torch.is_grad_enabled()
        with preserved(model) as after, afterwards(lambda: torch.set_grad_enabled(has_gradients)):
            before.restore()
            torch.set_grad_enabled(had_gradients)
            try:
                value = context.run(found, *copies[0], **copies[1])
            except Exception as error:
                return result, RunComparison(ComparisonOutcome.RAISES, first_line(error))
            if torch.is_grad_enabled() != has_gradients:
                return result, RunComparison(ComparisonOutcome.DIFFERENT, "it ends in another gradient mode")
            return result, _comparison(after, (value, copies), (result, (args, kwargs)), within_rounding)


def _unrepeatable(before: ModelSnapshot) -> str | None:
    """Returns what a run has changed that graphs do not repeat: they write, and draw from torch, as the module does."""
    if drawn := [owner for owner in before.random.changed() if owner in ("Python", "numpy")]:
        return f"the model draws random numbers (of {' and '.join(drawn)})"
    changes = (change for change in before.changes() if not (change.is_write and change.is_restorable))
    return next(map(str, changes), None)


def _comparison(after: ModelSnapshot, found: Any, expected: Any, within_rounding: bool) -> RunComparison:
    try:
        text = difference(found[0], expected[0], "output", within_rounding=within_rounding) or difference(
            found[1], expected[1], "inputs", within_rounding=within_rounding
        )
    except IncomparableError as error:
        return RunComparison(ComparisonOutcome.NOT_COMPARABLE, str(error))
    except (RuntimeError, NotImplementedError) as error:  # the tensors of `torch.func`
        return RunComparison(ComparisonOutcome.NOT_COMPARABLE, f"its values cannot be compared ({first_line(error)})")
    if text is None and after.random.changed():
        text = "it ends in another random state"
    if text is None and (change := next(after.changes(), None)) is not None:
        text = f"it leaves another {change.name!r} in {change.module_class}"
    return RunComparison(ComparisonOutcome.EQUAL) if text is None else RunComparison(ComparisonOutcome.DIFFERENT, text)


def _not_copied(error: Exception) -> RunComparison:
    return RunComparison(ComparisonOutcome.NOT_COMPARABLE, f"its inputs cannot be copied ({first_line(error)})")


def first_line(error: Exception) -> str:
    """Returns the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
