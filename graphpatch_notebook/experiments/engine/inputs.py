"""The inputs of the model in an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from graphpatch_notebook.patching.model_state import copied


@dataclass(frozen=True)
class Inputs:
    """The arguments of a call of the model.

    Attributes:
        args: The positional arguments.
        kwargs: The keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def fresh(self) -> Inputs:
        """Returns copies for one run: a model may write into its inputs, or let a cache grow."""
        args, kwargs = copied((self.args, self.kwargs))
        return Inputs(args, kwargs)

    def run(self, model: Callable[..., Any]) -> Any:
        """Calls the model with copies of the arguments, and returns its output."""
        fresh = self.fresh()
        return model(*fresh.args, **fresh.kwargs)

    def tensors(self) -> Iterator[Tensor]:
        """Yields the arguments that are tensors."""
        return (value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor))

    @property
    def rows(self) -> int | None:
        """The batch size: the size of the first dimension of the first tensor."""
        return next((len(tensor) for tensor in self.tensors() if tensor.ndim), None)


class SameInputs(Inputs):
    """Inputs for one run, which the model receives without a copy."""

    @classmethod
    def of(cls, inputs: Inputs) -> SameInputs:
        """Returns the same inputs, which must be copies already."""
        return cls(inputs.args, inputs.kwargs)

    def fresh(self) -> Inputs:
        return self


def inputs_of(given: Any) -> Inputs:
    """Converts a tuple of arguments, a dict of keyword arguments, or a single value to `Inputs`.

    Example:
        >>> inputs_of((1, 2)).args, inputs_of({"a": 1}).kwargs, inputs_of(3).args
        ((1, 2), {'a': 1}, (3,))
    """
    if isinstance(given, Inputs):
        return given
    if isinstance(given, tuple):
        return Inputs(given)
    if isinstance(given, Mapping):  # the `BatchEncoding` of a tokenizer among them
        return Inputs(kwargs={str(name): value for name, value in given.items()})
    return Inputs((given,))
