"""Datasets: any iterable of batches. Which example, position and token each row of a value belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.capture.inputs import bind, signature_of
from graphpatch_notebook.checks.digests import digest
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.execution import (
    DECODER_TOKENS,
    CapturedModel,
    results_of,
    row_and_position_dims,
    token_inputs,
)
from graphpatch_notebook.experiments.engine.inputs import Inputs, inputs_of
from graphpatch_notebook.experiments.methods.arguments import check_graph
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.selections import PositionSelection, Selection, selection

Dataset: TypeAlias = "Tensor | Mapping[str, Any] | Iterable[Any]"
"""Inputs of all examples (a tensor, or a dict of tensors), or an iterable of batches of inputs."""


def batches_of(dataset: Dataset, batch_size: int | None) -> Iterator[Inputs]:
    """Yields the batches of a dataset: those of an iterable, or parts of the inputs of all examples.

    Example:
        >>> [tuple(batch.args[0].shape) for batch in batches_of(torch.zeros(5, 3), 2)]
        [(2, 3), (2, 3), (1, 3)]
    """
    if not isinstance(dataset, (Tensor, Mapping)):
        if batch_size is not None:
            raise ExperimentError(f"each item of this {type(dataset).__name__} is a batch: leave batch_size= out")
        yield from map(inputs_of, dataset)
        return
    whole = inputs_of(dataset)
    if batch_size is None or (count := whole.rows) is None:
        raise ExperimentError("batch_size= cuts tensors with examples along their first dimension: give both")
    for first in range(0, count, batch_size):
        part = slice(first, first + batch_size)
        args = tuple(_cut(value, part, count) for value in whole.args)
        yield Inputs(args, {name: _cut(value, part, count) for name, value in whole.kwargs.items()})


def _cut(value: Any, part: slice, count: int) -> Any:
    return value[part] if isinstance(value, Tensor) and value.ndim and len(value) == count else value


def numbered(batches: Iterable[Inputs], first: int = 0) -> Iterator[tuple[int, Inputs]]:
    """Yields each batch with the number of its first example; the first batch begins at `first`."""
    for batch in batches:
        yield first, batch
        first += batch.rows or 0


def digest_of(batch: Inputs) -> str:
    """Returns a digest of the arguments of a batch."""
    return digest(batch.args, dict(sorted(batch.kwargs.items())))


@dataclass(frozen=True)
class ExampleRows:
    """The rows of a batch: which example and position each belongs to.

    Attributes:
        examples: The number of the example in the dataset, of shape (rows).
        positions: The position in its sequence, of shape (rows).
        tokens: The token, of shape (rows); -1 if they are not known, as of a model that does not take tokens.
        kept: Which entries of (examples, positions) of the batch they are, of that shape; padding is left out.
    """

    examples: Tensor
    positions: Tensor
    tokens: Tensor
    kept: Tensor


class RowReader:
    """Splits values of a model into rows, one for each position of each example. It can be pickled.

    Attributes:
        by_path: By path, the dimensions of the recorded value that hold the batch and the positions; the latter is
            `None` if the value has one row for each example. Both may be one dimension.

    Raises:
        UnknownPathError: A path does not exist, or a pattern matches nothing.
        ExperimentError: It is not known which dimension holds the batch.
    """

    def __init__(self, pg: PatchableGraph, patterns: Any, positions: PositionSelection | None) -> None:
        check_graph(pg)
        model = captured(pg)
        # What workers need: without annotations, which may be classes of the model's own.
        signature = signature_of(model.module.forward)
        self._signature = signature.replace(
            parameters=[each.replace(annotation=each.empty) for each in signature.parameters.values()],
            return_annotation=signature.empty,
        )
        self._positions = None if positions is None else _chosen(positions)
        listed = [patterns] if isinstance(patterns, str) or not isinstance(patterns, Iterable) else patterns
        targets: dict[str, Target] = {}
        for pattern in map(str, listed):
            if results := results_of(model, pattern):  # they have the dimensions of `z`
                targets |= {name: model.targets_of(result.z)[0] for name, result in results.items()}
            else:
                targets |= {target.text: target for target in model.targets_of(pattern)}
        if not targets:
            raise ExperimentError(
                "there is nothing to record: give a path, or a pattern such as 'layers[*].resid_post'"
            )
        found = {path: _dims(model, target) for path, target in targets.items()}
        self.by_path = {path: (row_dim, position_dim) for path, (row_dim, position_dim, _) in found.items()}
        sequences = {is_encoder: path for path, (_, dim, is_encoder) in found.items() if dim is not None}
        if len(sequences) > 1:
            raise ExperimentError(
                f"{sequences[True]!r} has the positions of the encoder, and {sequences[False]!r} those of the decoder: "
                "ask for them one after the other"
            )
        self._token_names = token_inputs(model.root, is_encoder=True in sequences)

    def tokens(self, batch: Inputs) -> tuple[str, Tensor | None]:
        """Returns the name and value of the input with the tokens, or their embeddings; `None` if there is none."""
        given = self._given(batch)
        return next(((name, given[name]) for name in self._token_names if given.get(name) is not None), ("", None))

    def _given(self, batch: Inputs) -> dict[str, Any]:
        return bind(self._signature, batch.args, batch.kwargs) or {}

    def rows(self, batch: Inputs, first: int) -> ExampleRows:
        """Returns the rows of a batch whose first example has the number `first`."""
        name, tokens = self.tokens(batch)
        if tokens is None:
            count = batch.rows or 0
            none = torch.full((count,), -1)
            return ExampleRows(torch.arange(first, first + count), none, none, torch.ones(count, 1, dtype=torch.bool))
        count, length = tokens.shape[:2]
        mask = self._given(batch).get("decoder_attention_mask" if name in DECODER_TOKENS else "attention_mask")
        kept = torch.ones(count, length, dtype=torch.bool)
        if isinstance(mask, Tensor) and mask.shape == kept.shape:
            kept &= mask.cpu().bool()
        if self._positions is not None:
            wanted = torch.zeros(length, dtype=torch.bool)
            wanted[self._positions.within(0, length)] = True
            kept &= wanted
        example, position = kept.nonzero(as_tuple=True)
        # The model shifts labels to get its tokens.
        ids = tokens.cpu()[kept] if tokens.ndim == 2 and name != "labels" else torch.full((len(example),), -1)
        return ExampleRows(example + first, position, ids, kept)

    def of_value(self, path: str, value: Tensor, rows: ExampleRows) -> Tensor:
        """Returns the rows of a value, of shape (rows, ...): copies on the CPU."""
        row_dim, position_dim = self.by_path[path]
        value = value.detach().movedim(row_dim, 0)
        if position_dim is None:
            return value.to("cpu", copy=True)
        if row_dim != position_dim:
            value = value.movedim(position_dim + (position_dim < row_dim), 1)
        elif len(value) == rows.kept.numel():
            value = value.unflatten(0, rows.kept.shape)
        if value.shape[:2] != rows.kept.shape:
            raise ExperimentError(
                f"{path!r} has {tuple(value.shape[:2])} examples and positions on a batch of {tuple(rows.kept.shape)}"
            )
        return value[rows.kept.to(value.device)].cpu()

    def has_positions(self, path: str) -> bool:
        """Whether a value has a row for each position, not only for each example."""
        return self.by_path[path][1] is not None


def _chosen(positions: PositionSelection) -> Selection:
    try:
        found = selection(positions, "positions", allow_negative=True)
    except ValueError as error:
        raise ExperimentError(str(error)) from None
    if found.rows is not None:
        raise ExperimentError("positions are the same for all examples here: give one list of them")
    chosen: Any = found.chosen
    numbers = (chosen.start, chosen.stop) if isinstance(chosen, slice) else chosen
    if any(number is not None and number < 0 for number in numbers):
        raise ExperimentError(
            f"positions={positions!r} counts from the end, where shorter examples have padding: count from the start"
        )
    return found


def _dims(model: CapturedModel, target: Target) -> tuple[int, int | None, bool]:
    try:
        row_dim, position_dim, is_encoder = row_and_position_dims(model.root, target)
    except ValueError as error:
        raise ExperimentError(f"{target.text!r}: {error}") from None
    kept = target.kept_dims
    if row_dim not in kept:
        raise ExperimentError(f"{target.text!r} takes a part of dimension {row_dim}, which has the examples")
    return kept.index(row_dim), None if position_dim is None else kept.index(position_dim), is_encoder


def read_batch(
    reader: RowReader, dtype: torch.dtype | None, pg: PatchableGraph, numbered: tuple[int, Inputs]
) -> tuple[ExampleRows, dict[str, Tensor]]:
    """Returns the rows of a batch, given with the number of its first example, and by path those of each value."""
    first, batch = numbered
    rows, fresh = reader.rows(batch, first), batch.fresh()
    with torch.no_grad():
        recording = pg.record(list(reader.by_path), *fresh.args, dtype=dtype, **fresh.kwargs)
    if missing := [path for path in reader.by_path if path not in recording]:
        raise ExperimentError(f"the model did not compute {missing[0]!r} on a batch of the dataset")
    return rows, {path: reader.of_value(path, recording[path], rows) for path in reader.by_path}
