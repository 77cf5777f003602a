"""Tokens in words: the texts of the inputs, and the most probable next ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.capture.forward_swap import original_forward
from graphpatch_notebook.capture.inputs import bind, signature_of
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.values import readable_children

_MOST = 10


@dataclass(frozen=True)
class TokenInputs:
    """The tokens that a model was run on.

    Attributes:
        ids: Of the first row; `None` where there are none.
        mask: Which of them are no padding; `None` where that is not said.
        rows: How many rows there are.
    """

    ids: list[int] | None
    mask: list[int] | None
    rows: int

    @classmethod
    def of(cls, graph: PatchableGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenInputs:
        """Returns those of a call; of an encoder-decoder model, those of the decoder."""
        bound = bind(signature_of(original_forward(graph._module)), args, kwargs) or kwargs
        more = bound.get("kwargs")
        bound = {**(more if isinstance(more, dict) else {}), **bound}
        prefix = "decoder_" if _row(bound.get("decoder_input_ids")) is not None else ""
        ids, mask = bound.get(f"{prefix}input_ids"), bound.get(f"{prefix}attention_mask")
        found = _row(ids)
        return cls(found, _row(mask) if found is not None else None, len(ids) if found and ids is not None else 0)

    def last_position(self, length: int) -> int:
        """Returns the last position that is no padding, in logits of this length."""
        if self.mask is None or self.ids is None:
            return length - 1
        mask = self.mask[-length:]  # it covers what is in the cache, too
        is_whole = len(mask) == length
        return max((i for i, is_token in enumerate(mask) if is_token), default=length - 1) if is_whole else length - 1

    def labels(self, tokenizer: Any) -> list[str] | None:
        """Returns the texts of the tokens, if there are any and a tokenizer to say them."""
        return None if tokenizer is None or self.ids is None else [token_text(tokenizer, one) for one in self.ids]


def _row(value: Any) -> list[int] | None:
    """Returns the first row of whole numbers of shape (batch, seq)."""
    if not isinstance(value, Tensor) or value.dim() != 2 or value.numel() == 0 or value.device.type == "meta":
        return None
    return None if value.is_floating_point() or value.is_complex() else [int(i) for i in value[0].tolist()]


def token_text(tokenizer: Any, number: int) -> str:
    """Returns the text of a token; its number where the tokenizer does not know it.

    Args:
        tokenizer: An object with `decode`, which takes a list of numbers, or `convert_ids_to_tokens`.
        number: The number of the token.
    """
    for method, pick in (("decode", None), ("convert_ids_to_tokens", 0)):
        try:
            text = getattr(tokenizer, method)([number])
            text = text if pick is None else text[pick]
        except Exception:  # whatever a tokenizer of the user's thinks of a number beyond its vocabulary
            continue
        if isinstance(text, str):
            return text
    return f"#{number}"


def axis_labels(
    size: tuple[int, int] | None, labels: Sequence[str] | None
) -> tuple[list[str] | None, list[str] | None]:
    """Returns labels for the rows and columns of a picture, where their number is that of the tokens."""
    if size is None or not labels:
        return None, None
    rows, columns = (list(labels) if number == len(labels) else None for number in size)
    return rows, columns


def logits_of(output: Any) -> Tensor | None:
    """Returns the logits of shape (batch, seq, vocabulary) in the output of a language model, if it is one's."""
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

    Those of the first row, at the last position that is no padding.

    Args:
        before: The output without patches.
        after: The output with them.
        tokenizer: Says what they are in words.
        inputs: What the model was run on.
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
    """Whether there are about as many logits as the tokenizer has tokens, if it says how many: models pad them."""
    try:
        size: Any = len(tokenizer)
    except TypeError:
        size = getattr(tokenizer, "vocab_size", None)
    return not isinstance(size, int) or size == 0 or 0.5 * size <= logits.shape[-1] <= 2 * size + 1024


def _top(logits: Tensor, tokenizer: Any) -> list[list[Any]] | None:
    probabilities = torch.softmax(logits.detach().cpu().to(torch.float32), dim=-1)
    if not bool(probabilities.isfinite().all()):
        return None
    top = probabilities.topk(min(_MOST, len(probabilities)))
    return [
        [token_text(tokenizer, number), probability]
        for number, probability in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
