"""Tokens as text: labels for the positions of the inputs, and the most probable next tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.capture.inputs import bind, signature_of
from graphpatch_notebook.capture.observers import original_forward
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.values import readable_children

_MOST_TOKENS = 10
_ROUNDED = 0.03
_DECODER = "decoder_input_ids"
_DECODERS = ("decoder_", "labels", "kwargs")


@dataclass(frozen=True)
class TokenInputs:
    """The token ids of the inputs of a model.

    Attributes:
        ids: The ids of the first row; `None` if the inputs have no token ids.
        mask: The attention mask of the first row; `None` without one.
        rows: The number of rows.
        batch: The ids of all rows; `None` if other inputs have the same length, so that positions are ambiguous.
    """

    ids: list[int] | None
    mask: list[int] | None
    rows: int
    batch: list[list[int]] | None = None

    @classmethod
    def of(cls, graph: PatchableGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenInputs:
        """Returns the tokens of a call. For an encoder-decoder model, these are the tokens of the decoder."""
        signature = signature_of(original_forward(captured(graph).module))
        bound = bind(signature, args, kwargs) or kwargs
        more = bound.get("kwargs")
        bound = {**(more if isinstance(more, dict) else {}), **bound}
        has_decoder = _DECODER in bound or _DECODER in signature.parameters
        prefix = "decoder_" if has_decoder else ""
        ids, mask = bound.get(f"{prefix}input_ids"), bound.get(f"{prefix}attention_mask")
        found = _row(ids)
        if found is None or ids is None:
            return cls(None, None, 0)
        # Encoder values have other tokens. With equal lengths, the shape of a value cannot distinguish the two.
        is_clear = not has_decoder or len(found) not in _lengths_beside_decoder(bound)
        return cls(found, _row(mask), len(ids), ids.tolist() if is_clear else None)

    def last_position(self, length: int) -> int:
        """Returns the last position of logits of this length that is not padding."""
        if self.mask is None or self.ids is None:
            return length - 1
        mask = self.mask[-length:]  # the mask also covers cached positions
        is_whole = len(mask) == length
        return max((i for i, is_token in enumerate(mask) if is_token), default=length - 1) if is_whole else length - 1

    def labels(self, tokenizer: Any) -> TokenLabels | None:
        """Returns the texts of the tokens, or `None` without tokens or a tokenizer."""
        return None if tokenizer is None or self.batch is None else TokenLabels(self.batch, tokenizer)


def _lengths_beside_decoder(bound: dict[str, Any]) -> set[int]:
    """Returns the lengths of the inputs that do not belong to the decoder."""
    others = [value for name, value in bound.items() if not name.startswith(_DECODERS)]
    tensors = [one for value in others for one in (value, *(child for _, child in readable_children(value) or ()))]
    return {one.shape[1] for one in tensors if isinstance(one, Tensor) and one.dim() > 1}


@dataclass(frozen=True)
class TokenLabels:
    """The texts of tokens, for the axes of plots."""

    batch: list[list[int]]  # the ids, of shape (batch, seq)
    tokenizer: Any

    def of_axes(self, value: Tensor, index: Any) -> tuple[list[str] | None, list[str] | None]:
        """Returns labels for the rows and the columns of a plot, if these are positions of tokens.

        If another dimension has the same size, there are no labels, since they could be wrong.
        """
        at_row = _coordinates(value, 0, index) if (dims := self._dimensions(value)) else torch.empty(0)
        if at_row.numel() == 0 or not bool((at_row == at_row[0, 0]).all()):  # each row of the batch has its own tokens
            return None, None
        ids = self.batch[int(at_row[0, 0])]
        found: list[list[str] | None] = [None, None]
        for dim in dims:
            positions = _coordinates(value, dim, index)
            for axis, along in ((0, positions[:, :1]), (1, positions[:1])):
                if along.unique().numel() > 1 and bool((positions == along).all()):
                    found[axis] = [token_text(self.tokenizer, ids[at]) for at in along.flatten().tolist()]
        return found[0], found[1]

    def _dimensions(self, value: Tensor) -> list[int]:
        """Returns the token dimensions of a value of shape (batch, seq, ...) or (batch, head, seq, seq)."""
        shape, length = list(value.shape), len(self.batch[0])
        if shape[:1] != [len(self.batch)]:
            return []
        if len(shape) in (2, 3):
            return [1] if shape[1] == length and shape.count(length) == 1 else []
        if len(shape) != 4 or shape[2] != length:
            return []
        if shape[3] == length:
            # Queries have the same shape if the head size equals the length. Rows of an attention pattern sum to one.
            return [2, 3] if shape.count(length) == 2 and _is_pattern(value[0, 0]) else []
        return [2] if shape.count(length) == 1 else []


def _is_pattern(plane: Tensor) -> bool:
    rows = plane.to(torch.float64)
    return bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() < _ROUNDED).all())


def _coordinates(value: Tensor, dim: int, index: Any) -> Tensor:
    """Returns the coordinates of the selected elements along one dimension of the value."""
    shape = [1] * value.dim()
    shape[dim] = -1
    return torch.arange(value.shape[dim]).view(shape).expand(value.shape)[index]


def _row(value: Any) -> list[int] | None:
    """Returns the first row of an integer tensor of shape (batch, seq), or `None` for other values."""
    if not isinstance(value, Tensor) or value.dim() != 2 or value.numel() == 0 or value.device.type == "meta":
        return None
    return None if value.is_floating_point() or value.is_complex() else [int(i) for i in value[0].tolist()]


def token_text(tokenizer: Any, number: int) -> str:
    """Returns the text of a token; its number without a tokenizer, or `#` and the number if it does not know the token.

    Args:
        tokenizer: An object with `decode` or `convert_ids_to_tokens`, which take a list of ids; `None` for none.
        number: The id of the token.
    """
    if tokenizer is None:
        return str(number)
    for method, pick in (("decode", None), ("convert_ids_to_tokens", 0)):
        try:
            text = getattr(tokenizer, method)([number])
            text = text if pick is None else text[pick]
        except Exception:  # a tokenizer can raise any error for an id outside its vocabulary
            continue
        if isinstance(text, str):
            return text
    return f"#{number}"


def logits_of(output: Any) -> Tensor | None:
    """Returns the logits of shape (batch, seq, vocabulary) in the output of a language model, or `None`."""
    found = output
    if not isinstance(output, Tensor):
        children = readable_children(output) or []
        found = next((child for key, child in children if key == "logits"), None)
        if found is None and type(output) is tuple and output:
            found = output[0]
    if not isinstance(found, Tensor) or found.dim() != 3 or found.numel() == 0 or not found.is_floating_point():
        return None
    return found if found.device.type != "meta" else None


def next_tokens(before: Any, after: Any, tokenizer: Any, inputs: TokenInputs) -> dict[str, Any] | None:
    """Returns the most probable next tokens without and with patches, for the front end.

    Uses the first row, at the last position that is not padding.
    """
    logits = logits_of(before), logits_of(after)
    if tokenizer is None or logits[0] is None or logits[1] is None or inputs.ids is None:
        return None
    if logits[0].shape != logits[1].shape or not _fits(logits[0], tokenizer):
        return None
    position = inputs.last_position(logits[0].shape[1])
    found = [_top(one[0, position], tokenizer) for one in logits if one is not None]
    if None in found:
        return None
    return {"position": position, "before": found[0], "after": found[1]}


def _fits(logits: Tensor, tokenizer: Any) -> bool:
    """Whether the number of logits is similar to the vocabulary size of the tokenizer: models pad the logits."""
    try:
        size: Any = len(tokenizer)
    except TypeError:
        size = getattr(tokenizer, "vocab_size", None)
    return not isinstance(size, int) or size == 0 or 0.5 * size <= logits.shape[-1] <= 2 * size + 1024


def _top(logits: Tensor, tokenizer: Any) -> list[list[Any]] | None:
    probabilities = torch.softmax(logits.detach().cpu().to(torch.float32), dim=-1)
    if not bool(probabilities.isfinite().all()):
        return None
    top = probabilities.topk(min(_MOST_TOKENS, len(probabilities)))
    return [
        [token_text(tokenizer, number), probability]
        for number, probability in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
