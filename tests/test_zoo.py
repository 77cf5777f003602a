"""The zoo keeps what it promises to the law tests: every call runs, is reproducible, and leaves the state as stated."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.laws.captures import some_cases
from tests.zoo import CASES, OF_EACH_KIND, TRANSFORMERS, Call, Case, case_by_name, seed_all
from tests.zoo.values import bit_equal, close, copy_call, flatten, same_state, scalar_loss, snapshot


@some_cases(every=3)
def test_calls_are_reproducible(case: Case) -> None:
    model, other = case.build(), case.build()
    assert model.training == case.training
    again = case.calls(model)
    for name, call in case.calls(model).items():
        output = _run(case, model, call)
        assert bit_equal(output, _run(case, model, again[name])) is None, name
        _check_gradient(case, name, scalar_loss(output))
    first, second = _run(case, model, case.example()), _run(case, other, case.example())
    assert bit_equal(first, second) is None, "two builds differ"


def _run(case: Case, model: nn.Module, call: Call) -> Any:
    model = copy.deepcopy(model) if case.mutates_state else model
    seed_all(3)
    return call.run(model)


def _check_gradient(case: Case, name: str, loss: torch.Tensor | None) -> None:
    if case.has_grad(name):
        assert loss is not None, name
        loss.backward()
    elif loss is not None:
        with pytest.raises(RuntimeError):
            loss.backward()


@some_cases(every=3)
def test_runs_change_state_as_stated(case: Case) -> None:
    model = case.build()
    if not case.mutates_state:
        # transformers installs hooks and completes configs at the first run that needs them
        for call in case.calls(model).values():
            call.run(model)
    calls = case.calls(model)
    before = snapshot(model)
    assert same_state(model, before) is None
    for call in calls.values():
        call.run(model)
    assert (same_state(model, before) is not None) == case.mutates_state


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert case_by_name("gpt2-eager").name == "gpt2-eager"
    with pytest.raises(KeyError):
        case_by_name("no-such-model")
    assert {case.name for case in TRANSFORMERS} > OF_EACH_KIND


def test_import_is_light() -> None:
    code = "import sys; from tests import zoo; sys.exit('transformers' in sys.modules or 'einops' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False).returncode == 0


def test_building_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    case = case_by_name("llama-sdpa")
    case.variants(case.build())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": torch.tensor([0.0, float("nan")]), "b": (1, None)}, r"\['a'\]: 1 of 2 values .* first at \(0,\)"),
        ({"a": torch.tensor([-0.0, 1.0]), "b": (1, None)}, r"1 of 2 values"),
        (
            {"a": torch.tensor([-0.0, float("nan")]), "b": [1, None]},
            r"\['b'\]: type builtins.tuple is not builtins.list",
        ),
        (
            {"a": torch.tensor([-0.0, float("nan")]), "b": (True, None)},
            r"\['b'\]\[0\]: type builtins.int is not builtins.bool",
        ),
        ({"b": (1, None), "a": torch.tensor([-0.0, float("nan")])}, r"the value: parts"),
        ({"a": torch.tensor([[-0.0, float("nan")]]), "b": (1, None)}, r"shape"),
        ({"a": torch.tensor([-0.0, float("nan")]).double(), "b": (1, None)}, r"dtype"),
    ],
)
def test_bit_equal_names_the_first_difference(other: Any, message: str) -> None:
    value = {"a": torch.tensor([-0.0, float("nan")]), "b": (1, None)}
    assert bit_equal(value, copy.deepcopy(value)) is None
    difference = bit_equal(value, other)
    with pytest.raises(AssertionError, match=message):
        assert difference is None, difference


def test_close_allows_the_tolerance_only_for_floating_point() -> None:
    value = (torch.ones(3), torch.tensor([1]))
    assert close(value, (torch.ones(3) + 1e-6, torch.tensor([1])), 1e-5) is None
    assert close(value, (torch.ones(3) + 1e-4, torch.tensor([1])), 1e-5) is not None
    assert close(value, (torch.ones(3), torch.tensor([2])), 10.0) is not None


def test_flatten_opens_caches() -> None:
    case = case_by_name("llama-sdpa")
    paths = [path for path, _ in flatten(case.variants(case.build())["cache_step"].kwargs)]
    assert any(path.endswith("].layers[1].keys") for path in paths)


def test_copy_call_copies_tensors_and_keeps_aliases() -> None:
    x = torch.ones(3)
    copied = copy_call(Call.of(x, [x], other=x[:1]))
    assert copied.args[0] is copied.args[1][0]
    copied.args[0].add_(1)
    assert x.sum() == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.hidden, "forward", model.hidden.forward),
        lambda model: model.hidden.weight.data.add_(1),
        lambda model: setattr(model.hidden.weight, "data", model.hidden.weight.data.clone()),
        lambda model: model.hidden.weight.requires_grad_(False),
        lambda model: setattr(model.hidden, "weight", nn.Parameter(model.hidden.weight.detach())),
        lambda model: model.act.register_forward_hook(lambda *_: None),
        lambda model: model.eval() and model.hidden.train(),
        lambda model: setattr(model, "act", nn.GELU()),
        lambda model: model.register_buffer("extra", torch.ones(1)),
        lambda model: setattr(model.act, "__class__", type("Other", (nn.GELU,), {})),
    ],
)
def test_same_state_sees(change: Any) -> None:
    model = case_by_name("torch-mlp").build()
    before = snapshot(model)
    change(model)
    assert same_state(model, before) is not None


def test_same_state_sees_changed_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = case_by_name("torch-mlp").build()
    before = snapshot(model)
    monkeypatch.setattr(nn.Module, "__call__", lambda self: None)
    assert "class torch.nn.modules.module.Module" in str(same_state(model, before))
