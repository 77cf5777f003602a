"""The ready metrics against their formulas in plain torch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutput

from graphpatch_notebook import ExperimentError
from graphpatch_notebook.experiments import KLDivergence, LogitDifference, LogProbability, Loss, Probability
from graphpatch_notebook.experiments.engine.cells import measurement

LOGITS = torch.zeros(2, 3, 4)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int], int]:
    batch, length, vocabulary = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(2, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randn(batch, length, vocabulary, generator=generator, dtype=torch.float64) * 3
    tokens = st.lists(st.integers(0, vocabulary - 1), min_size=batch, max_size=batch)
    return logits, draw(tokens), draw(tokens), draw(st.integers(-length, length - 1))


@given(cases())
def test_metrics_of_tokens_are_their_formulas(case: tuple[Tensor, list[int], list[int], int]) -> None:
    logits, correct, wrong, position = case
    difference, probability, logarithm = [], [], []
    for row, (right, other) in enumerate(zip(correct, wrong, strict=True)):
        at = logits[row, position]
        difference.append(at[right] - at[other])
        probability.append(at[right].exp() / at.exp().sum())
        logarithm.append(at[right] - at.exp().sum().log())
    for metric, expected in [
        (LogitDifference(correct, wrong, position), difference),
        (Probability(torch.tensor(correct), position), probability),
        (LogProbability(tuple(correct), position), logarithm),
    ]:
        value = metric(logits)
        assert value.shape == ()
        torch.testing.assert_close(value, torch.stack(expected).mean(), atol=1e-12, rtol=0)


@given(cases())
def test_divergence_is_its_formula(case: tuple[Tensor, list[int], list[int], int]) -> None:
    logits, _, _, position = case
    reference = logits.flip(-1) / 2
    p, q = reference.softmax(-1), logits.softmax(-1)
    each = (p * (p.log() - q.log())).sum(-1)
    torch.testing.assert_close(KLDivergence(reference, position)(logits), each[:, position].mean())
    torch.testing.assert_close(KLDivergence(reference, position=None)(logits), each.mean())
    assert KLDivergence(logits, position)(logits) == 0
    one = reference[:1]
    assert KLDivergence(one)(logits) == KLDivergence(one.expand_as(logits))(logits)


def test_loss_is_the_one_of_transformers() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=11)).eval()
    ids = torch.randint(11, (3, 6))
    labels = ids.clone()
    labels[0, :4] = labels[2, 5] = -100
    output = model(ids, labels=labels)
    assert Loss(labels)(output).item() == pytest.approx(output.loss.item(), abs=1e-6)


@pytest.mark.parametrize(
    "output",
    [
        torch.arange(6.0).reshape(1, 2, 3),
        (torch.arange(6.0).reshape(1, 2, 3), None),
        {"loss": None, "logits": torch.arange(6.0).reshape(1, 2, 3)},
        CausalLMOutput(logits=torch.arange(6.0).reshape(1, 2, 3)),
        SimpleNamespace(logits=torch.arange(6.0).reshape(1, 2, 3)),
    ],
    ids=["tensor", "tuple", "dict", "ModelOutput", "attribute"],
)
def test_logits_are_found(output: Any) -> None:
    assert LogitDifference(2, 0)(output).item() == 2
    assert Loss([[0, 1]])(output).item() == pytest.approx(F.cross_entropy(torch.arange(3.0), torch.tensor(1)).item())


def test_classes_have_no_positions() -> None:
    logits = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    assert [LogitDifference(1, wrong, position=None)(logits).item() for wrong in (0, [0, 1])] == [1, 1]


ALL = [
    LogitDifference([1, 0], 2),
    Probability(1),
    LogProbability(2, position=0),
    Loss([[0, 1, 2], [2, 1, 0]]),
    KLDivergence(torch.randn(2, 3, 4)),
]


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: type(metric).__name__)
def test_gradients_flow_copies_are_equal_and_half_precision_is_widened(metric: Any) -> None:
    logits = torch.randn(2, 3, 4, requires_grad=True)
    metric(logits).backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0
    assert pickle.loads(pickle.dumps(metric))(logits) == metric(logits)
    assert type(metric).__name__ in metric.name
    hash(metric)
    half = torch.randn(2, 3, 4).bfloat16()
    assert metric(half).dtype == torch.float32
    assert metric(half) == metric(half.float())


def test_metrics_are_compared_and_shown_by_what_was_given() -> None:
    assert LogitDifference(torch.tensor([1, 0]), 2) == LogitDifference([1, 0], torch.tensor(2))
    assert repr(LogitDifference([1, 0], 2)) == "LogitDifference(correct=(1, 0), wrong=2, position=-1)"
    assert LogitDifference(1, 2).name == "LogitDifference(correct=1, wrong=2)"
    assert LogitDifference(list(range(32)), 2, position=3).name == "LogitDifference(position=3)"
    assert (Loss([[0, 1]]).name, KLDivergence(LOGITS, position=None).name) == ("Loss", "KLDivergence(position=None)")
    assert len({Probability(1), Probability(1), Probability(1, position=0)}) == 2


def test_a_position_for_each_sequence_is_the_mean_of_the_metrics_of_the_sequences() -> None:
    logits, ends = torch.randn(3, 5, 7), [1, 4, -2]
    for kind in (Probability, LogProbability):
        each = [kind(token, end)(row[None]) for row, token, end in zip(logits, [0, 5, 6], ends, strict=True)]
        for positions in (ends, torch.tensor(ends)):
            torch.testing.assert_close(kind([0, 5, 6], positions)(logits), torch.stack(each).mean())
    reference = torch.randn(3, 5, 7)
    each = [KLDivergence(r[None], end)(row[None]) for r, row, end in zip(reference, logits, ends, strict=True)]
    torch.testing.assert_close(KLDivergence(reference, ends)(logits), torch.stack(each).mean())
    assert Probability(1, position=ends).name == "Probability"
    assert LogitDifference([1, 0, 2], 2, torch.tensor(ends)) == LogitDifference([1, 0, 2], 2, ends)


def test_the_position_is_read_before_anything_else() -> None:
    logits = torch.randn(2, 3, 4)
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if args and args[0] is logits and func is not Tensor.is_floating_point:
                seen.append((getattr(func, "__name__", ""), args[1:]))
            return func(*args, **(kwargs or {}))

    for metric in (LogitDifference(1, 2), Probability(1), LogProbability(1), KLDivergence(torch.randn(2, 3, 4))):
        with Watch():
            metric(logits)
    reads = [call for call in seen if call[0] not in ("__get__", "dim")]
    assert reads == [("__getitem__", ((slice(None), -1),))] * 4


INVALID: list[tuple[Callable[[], Any], Any]] = [
    (lambda: Probability(0), {"last_hidden_state": LOGITS}),
    (lambda: Probability(0), (None, LOGITS)),
    (lambda: Probability(0), LOGITS.long()),
    (lambda: Probability(0), 3),
    (lambda: Probability(0, position=3), LOGITS),
    (lambda: Probability(0, position=None), LOGITS),
    (lambda: Probability(0), LOGITS[0]),
    (lambda: Probability(0), LOGITS[None]),
    (lambda: Probability(4), LOGITS),
    (lambda: LogitDifference(0, [1, -1]), LOGITS),
    (lambda: Probability([0, 1, 2]), LOGITS),
    (lambda: Probability(0.5), LOGITS),
    (lambda: Probability(" Paris"), LOGITS),
    (lambda: LogitDifference(0, ["a"]), LOGITS),
    (lambda: Probability(0, position=[1, 2, 0]), LOGITS),
    (lambda: Probability(0, position=[1, 3]), LOGITS),
    (lambda: Probability(0, position=[]), LOGITS),
    (lambda: KLDivergence(LOGITS, position="last"), LOGITS),
    (lambda: Probability(None), LOGITS),
    (lambda: LogitDifference(0, [[1]]), LOGITS),
    (lambda: Loss(torch.zeros(2, 2, dtype=torch.long)), LOGITS),
    (lambda: Loss(torch.full((2, 3), 9)), LOGITS),
    (lambda: Loss("the text"), LOGITS),
    (lambda: Loss([[3, -100]]), LOGITS),
    (lambda: KLDivergence(LOGITS[:, :, 1:]), LOGITS),
    (lambda: KLDivergence(torch.zeros(3, 3, 4)), LOGITS),
    (lambda: KLDivergence(None), LOGITS),
    *(
        (lambda: measurement, given)
        for given in (None, [1.0, None], np.array([None]), {"a": 1.0, "b": None}, "1.5", {})
    ),
    *((lambda: measurement, given) for given in ({"a": torch.ones(2)}, {"a": [1.0]}, CausalLMOutput(logits=LOGITS))),
]


@pytest.mark.parametrize(("make", "output"), INVALID)
def test_invalid_metrics_and_what_is_not_a_number_are_errors(make: Any, output: Any) -> None:
    with pytest.raises(ExperimentError):
        make()(output)
