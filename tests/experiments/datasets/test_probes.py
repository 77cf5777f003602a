"""Linear probes of a store, against formulas and scikit-learn by hand, and as directions to steer along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler
from transformers import AutoTokenizer, GPT2LMHeadModel

from graphpatch_notebook import AddPatch, ExperimentError, PatchableGraph
from graphpatch_notebook.experiments import ActivationStore, probes, record_to

FOLDER = Path(__file__).parents[3] / "examples" / "indirect_objects_model"
PATH = "layers[2].resid_post"


def texts(count: int) -> tuple[list[str], list[bool], list[int]]:
    """Returns sentences, whether John is the answer and not Mary, and which template each has."""
    templates = ["then {0} and {1} went home and then {2} gave it to", "so {0} met {1} at the park when {2} said it to"]
    found, answers, groups = [], [], []
    for number in range(count):
        names = ("Mary", "John") if number % 3 else ("John", "Mary")
        again = names[number % 2]
        found.append(templates[number % 5 % 2].format(*names, again))
        answers.append(again == "Mary")
        groups.append(number % 10)
    return found, answers, groups


@pytest.fixture(scope="module")
def graph() -> PatchableGraph:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    return PatchableGraph(GPT2LMHeadModel.from_pretrained(FOLDER).eval(), texts(1)[0], tokenizer=tokenizer)


@pytest.fixture(scope="module")
def store(graph: PatchableGraph, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    folder = tmp_path_factory.mktemp("store")
    torch.manual_seed(0)
    noise = {PATH: AddPatch(value=0.3 * torch.randn(20, 1, 64))}
    with graph.patch(noise):
        return record_to(graph, folder, [PATH, "@embed"], texts(60)[0], batch_size=20)


def at_the_end(store: ActivationStore) -> Any:
    return store[PATH].where(position=12).double().numpy()


@pytest.mark.parametrize("kind", ["logistic", "ridge", "difference_of_means"])
def test_probes_are_fitted_to_what_is_not_held_out(store: ActivationStore, kind: Any) -> None:
    labels, groups, rows = np.array(texts(60)[1]), np.array(texts(60)[2]), at_the_end(store)
    numbers = np.random.default_rng(0).normal(size=60) + 4 * labels
    given = numbers if kind == "ridge" else labels
    found = probes(store, given, kind, positions=[-1], groups=groups, penalty=2.0, seed=1)
    probe = found[PATH, -1]
    said = rows @ probe.weights.double().numpy() + probe.bias
    fitting: list[np.ndarray[Any, Any]] = []
    for left_out in range(1 << 10):  # the groups that are held out are known by their number only
        held = [group for group in range(10) if left_out >> group & 1]
        if len(held) == 3:
            fitting.append(~np.isin(groups, held))
    distances = []
    for chosen in fitting:
        x, y = rows[chosen], given[chosen]
        if kind == "difference_of_means":
            ends = [x[y == value].mean(0) for value in (False, True)]
            expected = rows @ (ends[1] - ends[0]) - (ends[1] - ends[0]) @ (ends[0] + ends[1]) / 2
        else:
            scaler = StandardScaler().fit(x)
            model = Ridge(2.0) if kind == "ridge" else LogisticRegression(C=0.5, max_iter=1000)
            model.fit(scaler.transform(x), y)
            each = scaler.transform(rows)
            expected = model.predict(each) if kind == "ridge" else model.decision_function(each)
        distances.append(np.abs(expected - said).max())
    best = int(np.argmin(distances))
    assert distances[best] < 1e-4
    held_out = ~fitting[best]
    name = "r2" if kind == "ridge" else "accuracy"
    score = 1 - ((said - given)[held_out] ** 2).sum() / ((given - given[held_out].mean())[held_out] ** 2).sum()
    if kind != "ridge":
        score = ((said > 0) == given)[held_out].mean()
    scores = found.scores.sel(path=PATH, position=-1)
    assert scores[name].item() == pytest.approx(score, abs=1e-4)
    assert scores.low <= scores[name] <= scores.high
    assert scores.random_labels < scores[name]


def test_the_direction_of_numbers_raises_the_number_by_one(store: ActivationStore) -> None:
    probe = probes(store, np.arange(60.0), "ridge", positions=[12])[PATH, 12]
    assert (probe.weights * probe.direction).sum().item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"labels": [0, 1]},
        {"labels": [0] * 60},
        {"labels": [0, 1, 2] * 20},
        {"labels": [0.0, np.nan] * 30, "kind": "ridge"},
        {"labels": [0, 1] * 30, "kind": "svm"},
        {"labels": [0, 1] * 30, "groups": [1]},
        {"labels": [0, 1] * 30, "positions": [13]},
        {"labels": [0] * 59 + [1]},
    ],
)
def test_what_does_not_fit_is_an_error(store: ActivationStore, arguments: dict[str, Any]) -> None:
    with pytest.raises(ExperimentError):
        probes(store, **arguments)
