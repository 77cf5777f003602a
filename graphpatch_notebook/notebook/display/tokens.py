"""Tokens as text: labels for the positions of the inputs, and the most probable next tokens or classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.capture.inputs import bind, parameters_of
from graphpatch_notebook.capture.modules import original_forward
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.inspection.resolution import Unresolvable, resolve
from graphpatch_notebook.notebook.messages import Prediction, Predictions
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patching import TokenDims, token_dims
from graphpatch_notebook.texts import token_text
from graphpatch_notebook.values import children

_MOST_SHOWN = 10
MOST_ROWS = 8
"""So many rows of a batch are shown."""
_LONGEST_PROMPT = 80
_DECODER = "decoder_input_ids"


@dataclass(frozen=True)
class TokenInputs:
    """The token ids of the inputs of a model.

    Attributes:
        batch: The ids of all rows; empty if the inputs have no token ids.
        masks: The attention masks of all rows; empty without one.
    """

    batch: list[list[int]]
    masks: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, graph: PatchableGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenInputs:
        """Returns the tokens of a call. For an encoder-decoder model, these are the tokens of the decoder."""
        parameters = parameters_of(original_forward(captured(graph).module))
        bound = bind(parameters, args, kwargs) or kwargs
        more = bound.get("kwargs")
        bound = {**(more if isinstance(more, dict) else {}), **bound}
        has_decoder = _DECODER in bound or any(each.name == _DECODER for each in parameters)
        prefix = "decoder_" if has_decoder else ""
        return cls(_rows(bound.get(f"{prefix}input_ids")), _rows(bound.get(f"{prefix}attention_mask")))

    def positions(self, row: int, length: int) -> Sequence[int]:
        """Returns the positions of logits of this length in a row that are not padding; at least one."""
        mask = (self.masks[row] if row < len(self.masks) else [])[-length:]  # the mask also covers cached positions
        tokens = [at for at, is_token in enumerate(mask) if is_token]
        return tokens if tokens and len(mask) == length else range(length)

    def prompt(self, row: int, length: int, tokenizer: Any) -> str:
        """Returns the text of a row, or its end."""
        ids = self.batch[row]
        kept = [ids[at] for at in self.positions(row, length)] if len(ids) == length else ids
        try:
            text = str(tokenizer.decode(kept))
        except Exception:  # a tokenizer can raise any error
            text = " ".join(token_text(tokenizer, number) for number in kept)
        return text if len(text) <= _LONGEST_PROMPT else f"…{text[-_LONGEST_PROMPT:]}"

    def labels(self, tokenizer: Any, root: Frame, path: str) -> TokenLabels | None:
        """Returns the texts of the tokens along the value at a path; `None` if it has none, or without a tokenizer."""
        if tokenizer is None or not self.batch:
            return None
        try:
            dims = token_dims(root, resolve(root, path))
        except Unresolvable:  # captured again, with other names
            return None
        return None if dims is None else TokenLabels(self.batch, tokenizer, dims)


@dataclass(frozen=True)
class TokenLabels:
    """The texts of tokens along a value, for the axes of plots."""

    batch: list[list[int]]  # the ids, of shape (batch, seq)
    tokenizer: Any
    dims: TokenDims  # of the value

    def of_axes(self, value: Tensor, index: Any) -> tuple[list[str] | None, list[str] | None]:
        """Returns labels for the rows and the columns of a plot of the value, if these are positions of tokens."""
        found: list[list[str] | None] = [None, None]
        ids = self._ids(value, index)
        if ids is None:
            return None, None
        for dim in self.dims.positions:
            if dim >= value.dim() or value.shape[dim] != len(ids):  # a model may work on some positions only
                continue
            positions = _coordinates(value, dim, index)
            for axis, along in ((0, positions[:, :1]), (1, positions[:1])):
                if along.unique().numel() > 1 and bool((positions == along).all()):
                    found[axis] = [token_text(self.tokenizer, ids[at]) for at in along.flatten().tolist()]
        return found[0], found[1]

    def _ids(self, value: Tensor, index: Any) -> list[int] | None:
        """Returns the tokens of the row of the batch that a plot shows; `None` for several rows, or unknown ones."""
        row = self.dims.row
        if row is None:
            return self.batch[0] if len(self.batch) == 1 else None
        if row >= value.dim() or value.shape[row] != len(self.batch):
            return None
        at_row = _coordinates(value, row, index)
        is_one = at_row.numel() > 0 and bool((at_row == at_row[0, 0]).all())
        return self.batch[int(at_row[0, 0])] if is_one else None


def _coordinates(value: Tensor, dim: int, index: Any) -> Tensor:
    """Returns the coordinates of the selected elements along one dimension of the value."""
    shape = [1] * value.dim()
    shape[dim] = -1
    return torch.arange(value.shape[dim]).view(shape).expand(value.shape)[index]


def _rows(value: Any) -> list[list[int]]:
    """Returns the rows of an integer tensor of shape (batch, seq); none for other values."""
    if not isinstance(value, Tensor) or value.dim() != 2 or value.numel() == 0 or value.device.type == "meta":
        return []
    return [] if value.is_floating_point() or value.is_complex() else [list(map(int, row)) for row in value.tolist()]


def logits_of(output: Any) -> Tensor | None:
    """Returns the logits in an output, of shape (batch, seq, vocabulary) or (batch, classes); `None` without any."""
    found = output
    if not isinstance(output, Tensor):
        parts = children(output) or []
        found = next((child for key, child in parts if key == "logits"), None)
        if found is None and type(output) is tuple and output:
            found = output[0]
    if not isinstance(found, Tensor) or found.dim() not in (2, 3) or not found.numel() or not found.is_floating_point():
        return None
    return found if found.device.type != "meta" else None


def predictions(before: Any, after: Any, graph: PatchableGraph, inputs: TokenInputs) -> list[Predictions]:
    """Returns the most probable next tokens, or classes, of the outputs without and with patches, for the first rows.

    Tokens are those at the last position that is not padding. Their texts are those of the tokenizer of the graph, the
    names of classes those in the config of the model; nothing is returned without these.
    """
    logits = [one for one in map(logits_of, (before, after)) if one is not None]
    if len(logits) < 2 or logits[0].shape != logits[1].shape:
        return []
    of_row = _classes_of_row if logits[0].dim() == 2 else _tokens_of_row
    found = (of_row(row, [one[row] for one in logits], graph, inputs) for row in range(len(logits[0]))[:MOST_ROWS])
    listed = [one for one in found if one is not None]
    if len(logits[0]) == 1 and listed:
        listed[0].prompt = None
    return listed


def _classes_of_row(row: int, logits: list[Tensor], graph: PatchableGraph, _: TokenInputs) -> Predictions | None:
    config = getattr(captured(graph).module, "config", None)
    names = getattr(config, "id2label", None) or {}
    if logits[0].shape[-1] < 2 or {*names} != {*range(logits[0].shape[-1])}:
        return None
    is_multiple = getattr(config, "problem_type", None) == "multi_label_classification"
    rows = _rows_of(logits, lambda number: str(names[number]), torch.sigmoid if is_multiple else _softmax)
    return Predictions(None, f"row {row} of the batch", rows) if rows else None


def _tokens_of_row(row: int, logits: list[Tensor], graph: PatchableGraph, inputs: TokenInputs) -> Predictions | None:
    tokenizer, length = captured(graph).tokenizer, len(logits[0])
    if tokenizer is None or row >= len(inputs.batch) or not _fits(logits[0], tokenizer):
        return None
    position = inputs.positions(row, length)[-1]
    rows = _rows_of([one[position] for one in logits], lambda number: token_text(tokenizer, number), _softmax)
    return Predictions(position, inputs.prompt(row, length, tokenizer), rows) if rows else None


def _fits(logits: Tensor, tokenizer: Any) -> bool:
    """Whether the number of logits is similar to the vocabulary size of the tokenizer: models pad the logits."""
    try:
        size: Any = len(tokenizer)
    except TypeError:
        size = getattr(tokenizer, "vocab_size", None)
    return not isinstance(size, int) or size == 0 or 0.5 * size <= logits.shape[-1] <= 2 * size + 1024


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _rows_of(
    logits: list[Tensor], text: Callable[[int], str], probabilities_of: Callable[[Tensor], Tensor]
) -> list[Prediction]:
    """Returns what is among the most probable in either run; nothing if a probability is not finite."""
    found = [probabilities_of(one.detach().cpu().to(torch.float32)) for one in logits]
    if not all(bool(one.isfinite().all()) for one in found):
        return []
    shown = {number for one in found for number in one.topk(min(_MOST_SHOWN, len(one))).indices.tolist()}
    places = {number: [(int((one > one[number]).sum()), float(one[number])) for one in found] for number in shown}
    order = sorted(shown, key=lambda number: (-max(part for _, part in places[number]), number))
    return [Prediction(text(number), *places[number]) for number in order]
