"""What is imported when the tests have been collected: two million objects that stay."""

from __future__ import annotations

import gc
from types import FunctionType

FUNCTIONS: list[FunctionType] = []
"""The functions among them, which `gc.get_objects` no longer finds."""


def freeze() -> None:
    """Takes all that is there out of the sight of the garbage collector, whose full collections take a second less.

    And it collects less often: at its own pace, it took a twelfth of the time of the law tests.
    """
    gc.unfreeze()
    FUNCTIONS[:] = [found for found in gc.get_objects() if type(found) is FunctionType]
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
