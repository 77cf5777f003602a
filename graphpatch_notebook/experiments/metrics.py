"""Metrics of language models and classifiers, which map the output of a model to one number.

Each metric takes the whole output of the model and returns a scalar tensor with a gradient. Metrics can be pickled.
Logits in half precision are converted to float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.texts import encoded, is_text

Tokens: TypeAlias = "int | Sequence[int] | Tensor"
"""One token for all sequences of the batch, or one for each, `(batch,)`."""

Position: TypeAlias = "int | Sequence[int] | Tensor | None"
"""One position for all sequences of the batch, or one for each, `(batch,)`; `None` for logits without positions.

Positions of rows as patches take them, `(batch, 1)`, are understood, too.
"""

_SHOWN = {"correct", "wrong", "token", "position"}
IGNORED = -100  # label that is ignored, as in transformers


@dataclass(frozen=True)
class Metric:
    """Base class of metrics: names them by their arguments, and keeps tokens and positions as integers."""

    def __post_init__(self) -> None:
        for name in _SHOWN & {each.name for each in fields(self)}:
            object.__setattr__(self, name, _integers(getattr(self, name), name))

    @property
    def name(self) -> str:
        """The name of results: without lists of tokens, and without the default position."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name in _SHOWN}
        if any(isinstance(value, tuple) for value in given.values()):
            given = {k: value for k, value in given.items() if k == "position" and not isinstance(value, tuple)}
        shown = [f"{name}={value}" for name, value in given.items() if (name, value) != ("position", -1)]
        return f"{type(self).__name__}({', '.join(shown)})" if shown else type(self).__name__


@dataclass(frozen=True)
class LogitDifference(Metric):
    """The logit of one token minus that of another, as a mean over the batch.

    Args:
        correct: The token whose logit is added.
        wrong: The token whose logit is subtracted.
        position: The position in the sequence, or one for each sequence of the batch; negative numbers count from its
            end (as for patches, `[[3], [5]]`, or as a list of numbers, `[3, 5]`). `None` for logits of shape
            `(batch, classes)`.

    Raises:
        ExperimentError: (when called) The output has no logits, or the position or a token is out of range.

    Example:
        >>> LogitDifference(2, 0)(torch.tensor([[[1.0, 2.0, 5.0]]]))
        tensor(4.)
    """

    correct: Tokens
    wrong: Tokens
    position: Position = -1

    def __call__(self, output: Any) -> Tensor:
        """Returns the difference, in logits."""
        logits = _logits_at(output, self.position)
        return (_of_tokens(logits, self.correct) - _of_tokens(logits, self.wrong)).mean()


@dataclass(frozen=True)
class Probability(Metric):
    """The probability of a token, as a mean over the batch.

    Args:
        token: The token.
        position: As for `LogitDifference`.

    Example:
        >>> Probability(1)(torch.tensor([[[0.0, 0.0]]]))
        tensor(0.5000)
    """

    token: Tokens
    position: Position = -1

    def __call__(self, output: Any) -> Tensor:
        """Returns the probability, between 0 and 1."""
        return _of_tokens(_logits_at(output, self.position).softmax(-1), self.token).mean()


@dataclass(frozen=True)
class LogProbability(Metric):
    """The natural logarithm of the probability of a token, as a mean over the batch.

    Args:
        token: The token.
        position: As for `LogitDifference`.

    Example:
        >>> LogProbability([1])(torch.tensor([[[0.0, 0.0]]]))
        tensor(-0.6931)
    """

    token: Tokens
    position: Position = -1

    def __call__(self, output: Any) -> Tensor:
        """Returns the logarithm, in nats, at most 0."""
        return _of_tokens(_logits_at(output, self.position).log_softmax(-1), self.token).mean()


@dataclass(frozen=True, eq=False, init=False)
class AnswerLogProbability(Metric):
    """The log-probability of an answer of several tokens, given what comes before it, as a mean over the batch.

    The inputs end with the answer: of each of its tokens, the model says how probable it is at the position before.
    Experiments check that. Rows are padded on the left.

    Args:
        answer: A text, or several, one for each row; or token ids, of shape (tokens) or (batch, tokens), in which -100
            in front of shorter answers is ignored.
        tokenizer: What makes tokens of texts: `pg.tokenizer`. The text is what the tokenizer takes for it after the
            prompt: mostly with the space between them, `" John Smith"`.

    Attributes:
        tokens: The token ids, of dtype int64.
        position: The last position that is read: -1, the end of the inputs.

    Raises:
        ExperimentError: There are no tokens; (when called) the logits have not so many positions or rows.

    Example:
        >>> AnswerLogProbability([0, 1])(torch.zeros(1, 3, 4))  # twice the logarithm of 1/4
        tensor(-2.7726)

    Source:
        Meng et al., Locating and Editing Factual Associations in GPT (2022), for answers of several tokens.
    """

    tokens: Tensor
    position: ClassVar[int] = -1

    def __init__(self, answer: Any, tokenizer: Any = None) -> None:
        if is_text(answer):
            texts = [answer] if isinstance(answer, str) else list(answer)
            if tokenizer is None:
                raise ExperimentError("give the tokenizer of an answer in words: AnswerLogProbability(text, tokenizer)")
            rows = [encoded(tokenizer, text, is_whole=False) for text in texts]
            answer = [[IGNORED] * (max(map(len, rows)) - len(row)) + row for row in rows]
        tokens = torch.as_tensor(answer)
        if tokens.ndim not in (1, 2) or tokens.dtype != torch.int64 or not (tokens != IGNORED).any(-1).all():
            raise ExperimentError(
                f"an answer is a text, or token ids of shape (tokens) or (batch, tokens), not {answer!r}"
            )
        object.__setattr__(self, "tokens", tokens.reshape(-1, tokens.shape[-1]))

    def __call__(self, output: Any) -> Tensor:
        """Returns the sum of the logarithms, in nats, at most 0."""
        logits, (rows, count) = _logits(output), self.tokens.shape
        if logits.ndim != 3 or logits.shape[1] <= count or rows not in (1, len(logits)):
            raise ExperimentError(
                f"logits of shape {tuple(logits.shape)} do not have a position before {count} tokens of {rows} answers"
            )
        tokens = self.tokens.to(logits.device).expand(len(logits), -1)
        _check_tokens(self.tokens[self.tokens != IGNORED].tolist(), logits.shape[-1])
        found = _widened(logits[:, -count - 1 : -1]).log_softmax(-1).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
        return found.masked_fill(tokens == IGNORED, 0).sum(-1).mean()

    def check_inputs(self, ids: Tensor) -> None:
        """Raises an `ExperimentError` if token ids, of shape (batch, positions), do not end with the answer."""
        ends, tokens = ids[:, -self.tokens.shape[1] :], self.tokens.to(ids.device)
        if ends.shape[1:] != tokens.shape[1:] or not ((ends == tokens) | (tokens == IGNORED)).all():
            raise ExperimentError(f"the inputs end with {ends.tolist()}, and not with the answer, {tokens.tolist()}")


class Continuations:
    """What a model generated: the new texts, one for each row, or without a tokenizer the new token ids."""

    def __init__(self, texts: Sequence[Any]) -> None:
        self.texts = list(texts)


class Generated:
    """A number of the texts that the model generates. With it, experiments generate in place of a single forward.

    For `pg.sweep`, `ablate` and others that run the model once for each cell, which then generates once, without
    sharing work. Patches act in each step, or in some with `steps=` or `positions=`. Not for experiments that need
    gradients, or replace parts of values at positions of the prompt (`causal_trace`).

    Args:
        function: Maps the list of the new texts, one for each row, to a number or a dict of numbers. Without a
            tokenizer, they are lists of token ids.
        **options: Those of `generate`: `max_new_tokens`, `do_sample=False`, ...

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from graphpatch_notebook import PatchableGraph, ZeroPatch
        >>> from graphpatch_notebook.experiments import Generated
        >>> config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20, bos_token_id=None, eos_token_id=None)
        >>> model, ids = GPT2LMHeadModel(config).eval(), torch.arange(6)[None]
        >>> metric = Generated(lambda rows: rows[0].count(3), max_new_tokens=4, do_sample=False)
        >>> result = PatchableGraph(model, ids).sweep(
        ...     {"layer": range(2)}, lambda n: {f"layers[{n}].mlp_out": ZeroPatch()}, ids, metric=metric, progress=False
        ... )
        >>> result.dims
        ('layer',)
    """

    def __init__(self, function: Callable[[list[Any]], Any], **options: Any) -> None:
        self.function, self.options = function, options

    @property
    def name(self) -> str:
        """The name of results: that of the function."""
        return getattr(self.function, "__name__", "generated")

    def __call__(self, output: Any) -> Any:
        """Returns the number."""
        if not isinstance(output, Continuations):
            raise ExperimentError("this experiment does not generate, so that metric=Generated(...) has no texts")
        return self.function(output.texts)


@dataclass(frozen=True, eq=False)
class Loss(Metric):
    """The cross entropy of the next tokens, as language models of transformers compute it: the mean over tokens.

    The logits at one position are compared with the label of the next.

    Args:
        labels: The correct tokens, `(batch, seq)`, usually the `input_ids`. Labels of -100 are ignored.

    Raises:
        ExperimentError: There are no labels to compare with; (when called) the logits have another shape.

    Example:
        >>> Loss(torch.tensor([[0, 1]]))(torch.zeros(1, 2, 4))  # the logarithm of 4
        tensor(1.3863)
    """

    labels: Tensor

    def __post_init__(self) -> None:
        try:
            labels = torch.as_tensor(self.labels).detach()
        except (TypeError, ValueError, RuntimeError):
            raise ExperimentError(
                f"labels must be token ids, usually the input_ids, not {self.labels!r}; use tokenizer.encode(...)"
            ) from None
        if labels.ndim != 2 or not (labels[:, 1:] != IGNORED).any():
            raise ExperimentError(
                f"labels must be tokens of shape (batch, seq), with at least one after the first position that is not "
                f"{IGNORED}; these have shape {tuple(labels.shape)}"
            )
        object.__setattr__(self, "labels", labels)

    def __call__(self, output: Any) -> Tensor:
        """Returns the loss, in nats for each token."""
        logits = _widened(_logits(output))
        if logits.shape[:-1] != self.labels.shape:
            raise ExperimentError(
                f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(self.labels.shape)} do not match; "
                "give labels of shape (batch, seq)"
            )
        labels = self.labels[:, 1:].to(logits.device, torch.long)
        _check_tokens(map(int, labels[labels != IGNORED].aminmax()), logits.shape[-1])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


@dataclass(frozen=True, eq=False, init=False)
class KLDivergence(Metric):
    """The Kullback-Leibler divergence from a reference, KL(reference || prediction), as a mean over the batch.

    Args:
        reference: The output of the model for the reference, or its logits. Only log-probabilities are kept.
        position: As for `LogitDifference`; `None` for the mean over all positions, if there are positions.

    Attributes:
        log_probabilities: The log-probabilities of the reference.

    Raises:
        ExperimentError: (also when called) The output has no logits, or another number of sequences.

    Example:
        >>> reference = torch.tensor([[[0.0, 1.0]]])
        >>> KLDivergence(reference)(reference)
        tensor(0.)
    """

    position: Position
    log_probabilities: Tensor = field(repr=False)

    def __init__(self, reference: Any, position: Position = -1) -> None:
        object.__setattr__(self, "position", _integers(position, "position"))
        object.__setattr__(self, "log_probabilities", self._log_probabilities(reference).detach())

    def __call__(self, output: Any) -> Tensor:
        """Returns the divergence, in nats, at least 0 within rounding."""
        prediction = self._log_probabilities(output)
        reference = self.log_probabilities.to(prediction.device, prediction.dtype)
        if prediction.shape[1:] != reference.shape[1:] or len(reference) not in (1, len(prediction)):
            raise ExperimentError(
                f"the logits of the reference have shape {tuple(reference.shape)}, those of the output "
                f"{tuple(prediction.shape)}; compute the reference on inputs of the same shape, or on one sequence"
            )
        return F.kl_div(prediction, reference.expand_as(prediction), log_target=True, reduction="none").sum(-1).mean()

    def _log_probabilities(self, output: Any) -> Tensor:
        return log_probabilities(output) if self.position is None else _logits_at(output, self.position).log_softmax(-1)


# -- logits ------------------------------------------------------------------------------------------------------------


def _logits(output: Any) -> Tensor:
    """Returns the logits in the output of a model."""
    found = output
    if isinstance(output, Mapping):  # such as a `ModelOutput`
        found = output.get("logits")
    elif not isinstance(output, Tensor):
        found = getattr(output, "logits", output[0] if isinstance(output, (tuple, list)) and output else None)
    if isinstance(found, Tensor) and found.ndim >= 1 and found.is_floating_point():
        return found
    content = list(output) if isinstance(output, Mapping) else found if isinstance(found, Tensor) else type(output)
    raise ExperimentError(
        f"the output has no logits: it has {content}; a metric can be any function of the output: metric=lambda "
        "output: ..."
    )


def log_probabilities(output: Any) -> Tensor:
    """Returns the log-probabilities of all tokens in the output of a model, in the shape of its logits."""
    return _widened(_logits(output)).log_softmax(-1)


def _logits_at(output: Any, position: Any) -> Tensor:
    """Returns the logits at a position, `(batch, classes)`."""
    logits = _logits(output)
    # First, before any other access: a sweep records which positions are read, and skips the others.
    try:
        if isinstance(position, tuple):
            _check_count(len(position), logits, "positions")
            rows = torch.arange(len(position), device=logits.device)
            at = logits[rows, torch.tensor(position, device=logits.device)]
        else:
            at = logits if position is None else logits[:, position]
    except IndexError:
        at = logits[None, None]
    if at.ndim != 2:
        raise ExperimentError(
            f"logits of shape {tuple(logits.shape)} have no position {position}: they must have the shape (batch, seq, "
            "vocabulary), with a position in this range (position=-1 is that of the last token), or (batch, classes), "
            "with position=None"
        )
    return _widened(at)


def _check_count(count: int, logits: Tensor, what: str) -> None:
    if count != len(logits):
        raise ExperimentError(f"{count} {what} were given, but the output has {len(logits)} sequences: give as many")


def _widened(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


# -- tokens ------------------------------------------------------------------------------------------------------------


def _integers(given: Any, name: str) -> int | tuple[int, ...] | None:
    """Returns an integer, or one for each sequence, which can be compared and printed, unlike tensors."""
    if given is None and name == "position":
        return None
    try:
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):  # such as a text
        found = torch.empty(0)
    if found.is_floating_point() or found.dtype == torch.bool or not found.numel() or found.shape[1:] not in ((), (1,)):
        raise ExperimentError(
            f"{name} must be an integer (of a token, as pg.to_single_token(text) returns it), or one for each sequence "
            f"of the batch, not {given!r}"
        )
    return int(found) if found.ndim == 0 else tuple(found.flatten().tolist())


def _of_tokens(values: Tensor, tokens: Any) -> Tensor:
    """Returns the value of the token of each sequence, `(batch,)`."""
    _check_tokens([tokens] if isinstance(tokens, int) else tokens, values.shape[-1])
    if isinstance(tokens, int):
        return values[:, tokens]
    _check_count(len(tokens), values, "tokens")
    return values.gather(-1, torch.tensor(tokens, device=values.device)[:, None])[:, 0]


def _check_tokens(tokens: Iterable[int], count: int) -> None:
    bad = [token for token in tokens if not 0 <= token < count]
    if bad:
        raise ExperimentError(f"token {bad[0]} is out of range: the logits are of {count} tokens, counted from 0")
