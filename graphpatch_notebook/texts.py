"""Texts as inputs of a model: what a tokenizer makes of them, and the texts of tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence

Text: TypeAlias = "str | list[Mapping[str, Any]] | list[str] | list[list[Mapping[str, Any]]]"
"""A text, a chat (a list of messages with `role` and `content`), or several of one of these."""

NO_TOKENIZER = "the input is a text: give the tokenizer, PatchableGraph(model, text, tokenizer=tokenizer)"


def is_text(given: Any) -> bool:
    """Whether a value is a text, a chat, or a list of these.

    Example:
        >>> is_text("a"), is_text(["a", "b"]), is_text([{"role": "user", "content": "a"}]), is_text([1])
        (True, True, True, False)
    """
    several = isinstance(given, (list, tuple)) and bool(given)
    return is_one_text(given) or (several and all(map(is_one_text, given)))


def is_one_text(given: Any) -> bool:
    """Whether a value is one text, or one chat."""
    if isinstance(given, (list, tuple)):
        return bool(given) and all(isinstance(message, Mapping) and "role" in message for message in given)
    return isinstance(given, str)


def check_tokenizer(tokenizer: Any) -> None:
    """Raises a `TypeError` if an object cannot turn tokens into text."""
    methods = (getattr(tokenizer, name, None) for name in ("decode", "convert_ids_to_tokens"))
    if tokenizer is not None and (isinstance(tokenizer, bytes) or not any(map(callable, methods))):
        raise TypeError(
            f"tokenizer must be an object with decode or convert_ids_to_tokens, not {tokenizer!r:.80}; "
            "load it first: AutoTokenizer.from_pretrained(...)"
        )


def encoded(tokenizer: Any, text: Any, *, is_whole: bool = True) -> list[int]:
    """Returns the token ids of one text or chat.

    Args:
        tokenizer: An object with `encode`; for chats, with `apply_chat_template`.
        text: The text, or the messages.
        is_whole: Whether the tokenizer adds its special tokens, as at the start of an input.
    """
    if not isinstance(text, str):
        is_open = text[-1]["role"] != "assistant"
        text = tokenizer.apply_chat_template(list(text), tokenize=False, add_generation_prompt=is_open)
        is_whole = False  # the template has them
    options = {} if is_whole else {"add_special_tokens": False}
    try:
        found = tokenizer.encode(text, **options)
    except TypeError:  # one that has no special tokens
        found = tokenizer.encode(text)
    return list(getattr(found, "ids", found))


def decoded(tokenizer: Any, ids: list[int]) -> str:
    """Returns the text of token ids, without special tokens."""
    try:
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    except TypeError:  # one that has no special tokens
        return str(tokenizer.decode(ids))


def padded(tokenizer: Any, texts: Any, side: str | None = None) -> tuple[Tensor, Tensor]:
    """Returns the token ids of texts and their mask, both of dtype int64 and of shape (batch, positions).

    The mask is 0 at padding, which is on the tokenizer's `padding_side` unless `side` says another.

    Raises:
        ValueError: A text has no tokens.
    """
    rows = [encoded(tokenizer, one) for one in ([texts] if is_one_text(texts) else texts)]
    if not all(rows):
        raise ValueError(f"text {rows.index([])} has no tokens: an empty text, and a tokenizer without special tokens")
    tokens = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    padding = next((token for token in tokens if isinstance(token, int)), 0)
    end: Any = side or getattr(tokenizer, "padding_side", "right")
    ids = pad_sequence([torch.tensor(row) for row in rows], True, padding, end)
    return ids, pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in rows], True, 0, end)


def with_tokens(
    module: Module,
    names: Collection[str],
    tokenizer: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_generation: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the inputs of a call of `forward` or `generate`, with tokens in place of texts as the first argument.

    A mask, and the positions of rows that begin with padding, are added if the parameters of `forward`, `names`, have
    them. To generate, rows are padded on the left, and the model counts positions itself.

    Raises:
        ValueError: The texts have different lengths, and the model takes no mask.
    """
    if tokenizer is None or not args or not is_text(args[0]):
        return args, kwargs
    ids, mask = padded(tokenizer, args[0], "left" if is_generation else None)
    more = {"attention_mask": mask}
    if not is_generation and not mask[:, 0].all():
        more["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    given = {*kwargs, *[*names][: len(args)]}
    more = {name: value for name, value in more.items() if name in names and name not in given}
    if not mask.all() and "attention_mask" not in {*more, *given}:
        raise ValueError(
            f"the texts have {', '.join(map(str, mask.sum(-1).tolist()))} tokens, and {type(module).__name__} takes no "
            "attention_mask: give texts with the same number of tokens"
        )
    first = next(module.parameters(), ids)
    device = ids.device if first.is_meta else first.device
    return (ids.to(device), *args[1:]), {**kwargs, **{name: value.to(device) for name, value in more.items()}}


def is_joiner(text: str, at: int) -> bool:
    """Whether a character joins letters or emoji that are not ASCII (Persian, Hindi, families): it has a shape there.

    Example:
        >>> is_joiner("👩\u200d🔬", 1), is_joiner("a\u200db", 1)
        (True, False)
    """
    beside = text[max(at - 1, 0) : at] + text[at + 1 : at + 2]
    return text[at] in "\u200c\u200d" and any(c.isprintable() and not c.isascii() for c in beside)


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
