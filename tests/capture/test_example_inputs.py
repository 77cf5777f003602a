"""The example inputs that a graph keeps: references, shared by its copies, and what is noticed of changes."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import ExtractionOptions, PatchableGraph
from graphpatch_notebook.capture.inputs import ExampleInputs, bind, parameters_of
from graphpatch_notebook.patchable_graph import captured


class Cache:
    """As those of transformers: an object that holds lists of tensors."""

    def __init__(self) -> None:
        self.layers = [{"keys": torch.zeros(1, 2)}]


@dataclass
class Batch:
    ids: Tensor = field(default_factory=lambda: torch.arange(3))
    scale: float = 1.0


def everything() -> dict[str, Any]:
    return {"t": torch.ones(2), "cache": Cache(), "batch": Batch(), "list": [1, "a", None], "nan": float("nan")}


def test_nothing_has_changed_at_first() -> None:
    kept = everything()
    inputs = ExampleInputs((kept["t"], [kept]), kept)
    assert inputs.change() is None
    assert inputs.change() is None
    assert inputs.args[0] is kept["t"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda k: k["t"].add_(1), "t"),
        (lambda k: k["t"].resize_(3), "t"),
        (lambda k: k["cache"].layers.append({}), "cache"),
        (lambda k: k["cache"].layers[0]["keys"].add_(1), "cache"),
        (lambda k: setattr(k["batch"], "scale", 2.0), "batch"),
        (lambda k: setattr(k["batch"], "ids", None), "batch"),
        (lambda k: k["list"].__setitem__(0, True), "list"),
    ],
)
def test_changes_are_noticed(change: Callable[[dict[str, Any]], object], name: str) -> None:
    kept = everything()
    inputs = ExampleInputs((), dict(kept))
    change(kept)
    assert inputs.change() == name


def test_containers_that_contain_themselves_are_visited_once() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    inputs = ExampleInputs((loop,), {})
    assert inputs.change() is None
    loop[0] = 2
    assert inputs.change() == "argument 0"


class Grows(nn.Module):
    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(x)
        return x * 2


def test_a_graph_keeps_its_inputs_without_the_options_and_shares_them_with_copies() -> None:
    x = torch.ones(2)
    pg = PatchableGraph(nn.ReLU(), ExtractionOptions(), x)
    assert captured(pg).examples.args == (x,)
    for other in (copy.copy(pg), copy.deepcopy(pg)):
        assert captured(other).examples is captured(pg).examples
    x.add_(1)
    assert captured(pg).examples.change() == "argument 0"


def test_what_the_capture_itself_changes_is_a_change() -> None:
    pg = PatchableGraph(Grows(), torch.ones(2), kept=[])
    assert captured(pg).examples.change() == "kept"


def _functions() -> list[Callable[..., Any]]:
    return [
        lambda: None,
        lambda a, b=1: None,
        lambda a, /, b, *, c, d=2: None,
        lambda a, /, **more: None,
        lambda a, *rest, b=1, **more: None,
        lambda *rest: None,
        lambda a=0, *, b: None,
    ]


@pytest.mark.parametrize("function", _functions())
def test_arguments_are_bound_as_python_binds_them(function: Callable[..., Any]) -> None:
    signature, names = inspect.signature(function), ("a", "b", "c", "e")
    calls = [
        (tuple(range(count)), dict.fromkeys(chosen, 5))
        for count in range(4)
        for number in range(len(names) + 1)
        for chosen in itertools.combinations(names, number)
    ]
    for args, kwargs in calls:
        expected: dict[str, Any] | None
        try:
            bound = signature.bind(*args, **kwargs)
            given = dict(bound.arguments)
            bound.apply_defaults()
            variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            empty = {p.name: bound.arguments[p.name] for p in signature.parameters.values() if p.kind in variadic}
            expected = {**empty, **given}
        except TypeError:
            expected = None
        assert bind(parameters_of(function), args, kwargs) == expected, (args, kwargs)
