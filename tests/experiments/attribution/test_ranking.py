"""The largest scores: a value with several names takes one place, and only such a value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ProbePatch
from graphpatch_notebook.experiments import (
    LogitDifference,
    attribute,
    top_scores,
)
from tests.experiments.hooked import GPT2_OUTPUT, gpt2, llama

CLEAN = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
CORRUPTED = torch.tensor([[3, 1, 8, 1, 5, 9, 2]])
METRIC = LogitDifference(4, 8)


@pytest.fixture(scope="module", params=[gpt2, llama])
def host(request: pytest.FixtureRequest) -> tuple[PatchableGraph, Any]:
    model = request.param()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # of norms, which would keep the numbers as they are otherwise
            nn.init.normal_(parameter, 1.0, 0.3)
    pg = PatchableGraph(model, CLEAN)
    return pg, attribute(pg, METRIC, CLEAN, CORRUPTED)


def test_names_that_share_a_place_hold_the_same_numbers(host: Any) -> None:
    pg, scores = host
    names: dict[str, str] = scores.attrs["same_values"]
    assert len(names) > len(scores) / 3
    probes = {path: ProbePatch() for path in scores.coords["path"].values.tolist()}
    with torch.no_grad(), pg.patch(probes):
        pg(CLEAN)
    for path, standing in names.items():
        value, other = probes[path].activation, probes[standing].activation
        assert torch.equal(value.flatten().sort().values, other.flatten().sort().values), (path, standing)
    # And what was left apart, of the values that scored, are not the same numbers in the same order.
    top = top_scores(scores, 30)
    flat = [probes[path].activation.flatten() for path in top.index]
    for number, value in enumerate(flat):
        for other_number in range(number):
            is_same = value.shape == flat[other_number].shape and torch.equal(value, flat[other_number])
            scores_differ = top.iloc[number] != pytest.approx(top.iloc[other_number], rel=1e-5)
            assert not is_same or scores_differ, (top.index[number], top.index[other_number])


def test_a_value_takes_one_place_under_the_name_of_what_a_module_returns(host: Any) -> None:
    _, scores = host
    every = top_scores(scores, len(scores), distinct=False)
    top = top_scores(scores, len(scores))
    sizes = every.abs().to_numpy()
    assert (sizes[1:] <= sizes[:-1] * (1 + 1e-5)).all()  # what differs by rounding alone keeps its order
    assert len(every) == int(scores.notnull().sum())
    assert len(top) < 0.62 * len(every)
    assert (scores.sel(path=top.index.values).values == top.values).all()
    others = top.attrs["other_names"]
    assert len(top) + sum(map(len, others.values())) == len(every)
    norm = "transformer.ln_f" if "transformer.ln_f.output" in every.index else "model.norm"
    assert f"{norm}.output" in top.index
    assert "lm_head.input" in others[f"{norm}.output"]
    assert "lm_head.input" not in top.index


def test_what_a_norm_is_given_of_the_stream_stays_apart_from_the_stream() -> None:
    pg = PatchableGraph(gpt2(), CLEAN)
    scores = attribute(pg, METRIC, CLEAN, CORRUPTED)
    stream, given = f"transformer.h_0.{GPT2_OUTPUT}", "transformer.h_1.ln_1.input"
    assert scores.attrs["same_values"][given] == scores.attrs["same_values"][stream]
    top = top_scores(scores, 1000)
    assert stream in top.index
    assert given in top.index
    assert top[stream] != pytest.approx(top[given])


class Twins(nn.Module):
    """Two branches that compute the same numbers, each for itself; and a value whose halves are used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.right.load_state_dict(self.left.state_dict())
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.left(x), self.right(x)
        c = torch.relu(self.drop(a) + b)
        first, second = c.chunk(2, -1)
        return first[:, [1, 0]] + second


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.flip(1),
        lambda x: x.roll(1, 1),
        lambda x: x.masked_fill(torch.tensor([True, False, True]), 0.0),
        torch.nan_to_num,
    ],
)
def test_other_numbers_are_another_value(change: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            z = change(y)
            return z * 3

    scores = attribute(PatchableGraph(Model(), torch.randn(2, 3)), torch.sum, torch.randn(2, 3), torch.randn(2, 3))
    assert not {"y", "z"} & set(scores.attrs["same_values"])


def test_equal_numbers_alone_share_no_place() -> None:
    torch.manual_seed(0)
    model = Twins().eval()
    clean, corrupted = torch.randn(2, 3, 4)
    scores = attribute(PatchableGraph(model, clean), torch.sum, clean, corrupted)
    top = top_scores(scores, 100)
    assert top["left.output"] == top["right.output"]
    assert top.attrs["other_names"]["left.output"] == ["drop.dropout", "drop.input", "drop.output", "left.linear"]
    assert {"c", "second"} <= set(top.index)  # halves are values of their own


def test_results_without_names_are_ranked_as_they_are() -> None:
    pg = PatchableGraph(gpt2(), CLEAN)
    paths = ["transformer.ln_f.output", "lm_head.input", f"transformer.h_0.{GPT2_OUTPUT}"]
    swept = pg.sweep({"path": paths, "unit": range(2)}, lambda path, unit: {}, CLEAN, metric=METRIC, progress=False)
    assert len(top_scores(swept, 10)) == 6
    some = attribute(pg, METRIC, CLEAN, CORRUPTED, paths=paths)
    assert top_scores(some).index.tolist() == ["transformer.ln_f.output", f"transformer.h_0.{GPT2_OUTPUT}"]
    assert len(top_scores(some.drop_attrs())) == 3
