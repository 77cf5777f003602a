"""The inputs of the model in an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patching.model_state import copied
from graphpatch_notebook.texts import is_text, token_text


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

    def attrs(self, pg: PatchableGraph) -> dict[str, list[str]]:
        """Returns what results say of the inputs: `tokens`, the texts of the only row, if there is a tokenizer."""
        first = next(self.tensors(), None)
        is_tokens = first is not None and first.ndim == 2 and len(first) == 1 and first.dtype == torch.int64
        if pg.tokenizer is None or first is None or not is_tokens or "decoder_input_ids" in pg.nodes:
            return {}
        return {"tokens": [token_text(pg.tokenizer, number) for number in first[0].tolist()]}

    @property
    def rows(self) -> int | None:
        """The batch size: the size of the first dimension of the first tensor."""
        return next((len(tensor) for tensor in self.tensors() if tensor.ndim), None)


def as_one(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the arguments of a call as one value, which may be a dataset: its only argument, or `Inputs`."""
    return args[0] if len(args) == 1 and not kwargs else Inputs(args, dict(kwargs))


def inputs_of(pg: PatchableGraph, given: Any, kwargs: Mapping[str, Any] | None = None) -> Inputs:
    """Converts a tuple of arguments, a dict of keyword arguments, or a single value to `Inputs`; texts to tokens.

    Args:
        pg: The graph.
        given: The value.
        kwargs: Keyword arguments, if it is a tuple of arguments.
    """
    if isinstance(given, Inputs):
        return given
    if isinstance(given, Mapping):  # the `BatchEncoding` of a tokenizer among them
        return Inputs(kwargs={str(name): value for name, value in given.items()})
    is_args = isinstance(given, tuple) and not is_text(given)  # a `DataLoader` makes tuples of texts
    args = given if is_args else (given,)
    return Inputs(*captured(pg).tokenized(args, dict(kwargs or {})))
