"""What a tool is asked to do: one method for each row of the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from tests.benchmarks.peer_tools.subject import Subject


class CannotError(Exception):
    """The tool has no way to do this; the text says why."""


class Tool(ABC):
    """A model in the hands of a tool. What the constructor does is what the row `construct` times.

    A method that a tool has no way to do says so by `CannotError`. All run without gradients.
    """

    packages: ClassVar[tuple[str, ...]]
    notes: ClassVar[Mapping[str, str]] = {}  # by row: what a reader has to know of how the tool does it

    def __init__(self, model: Any, subject: Subject) -> None:
        self.model = model
        self.subject = subject

    @abstractmethod
    def forward(self) -> Tensor:
        """The logits, with nothing changed."""

    @abstractmethod
    def record(self) -> Tensor:
        """The output of the MLP in the middle block."""

    @abstractmethod
    def zero(self) -> Tensor:
        """The logits, with that output set to zero."""

    def zero_queries(self) -> Tensor:
        """The logits, with the queries of the middle block set to zero."""
        self.cannot("no name for the queries")

    def zero_tanh(self) -> Tensor:
        """The logits, with the tanh inside the activation function of the middle block set to zero."""
        self.cannot("the operation is inside of a module")

    def record_modules(self) -> Mapping[str, Any]:
        """The outputs of all modules, by attribute path."""
        self.cannot("has places of its own instead of the modules of the model")

    def record_everything(self) -> int:
        """Records all that the tool has a name for; how many values that are."""
        self.cannot("is the row above")

    @abstractmethod
    def prepare_sweep(self) -> None:
        """What a sweep needs and is not timed: the values for other tokens."""

    @abstractmethod
    def sweep(self) -> Tensor:
        """For each layer and position, the metric with the MLP's output there replaced by that for other tokens."""

    @staticmethod
    def cannot(reason: str) -> NoReturn:
        raise CannotError(reason)
