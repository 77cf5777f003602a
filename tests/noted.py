"""What tests see of the runs of a model, without being a part of its state, which extra runs put back."""

from __future__ import annotations

from typing import Any


class Noted:
    """A list that a model adds to by a call. A list that its code names, or a number, would be its state."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def __call__(self, value: Any = None) -> None:
        self.values.append(value)
