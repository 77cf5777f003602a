"""What tests see of the runs of a model, without being a part of its state, which extra runs put back."""

from __future__ import annotations

from typing import Any


class Noted:
    """A list that a model adds to by a call. A list that its code names, or a number, would be its state."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def __call__(self, value: Any = None) -> None:
        self.values.append(value)


class Steps:
    """Counts the steps of the user's code, and raises at one of them.

    Attributes:
        count: How many there were.
        raised: What was raised, if it was.
    """

    def __init__(self) -> None:
        self.count = 0
        self.at = -1
        self.error: BaseException | None = None
        self.raised: BaseException | None = None

    def reset(self, at: int = -1, error: BaseException | None = None) -> None:
        self.count, self.at, self.error, self.raised = 0, at, error, None

    def step(self, value: Any = None) -> Any:
        """Called wherever code of the user's runs; returns what it is given."""
        self.count += 1
        if self.count - 1 == self.at:
            self.raised = self.error
            assert self.error is not None
            raise self.error
        return value
