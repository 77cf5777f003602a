"""Exported code looks names up when the session does: whatever those hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.notebook.export import export
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import Origin
from graphpatch_notebook.notebook.session.session import Session
from tests.notebook.replies import kept_by

# An object whose attributes and items differ each time.
HELPERS = """
class Counting:
    def __init__(self):
        self.count = 0

    def __getitem__(self, item):
        return self.v

    def __neg__(self):
        return self.v

    def __add__(self, other):
        return self.v

    @property
    def v(self):
        self.count += 1
        return float(self.count)

    @property
    def f(self):
        scale = self.v
        return lambda value: value * scale

    def g(self, value):
        return value * 3
"""


def patch(path: str, kind: str, **fields: object) -> ChosenPatch:
    return ChosenPatch(path, kind, **fields)  # type: ignore[arg-type]


def variables(**more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU()).eval()
    x = torch.arange(4.0).reshape(2, 2) + 1
    found: dict[str, Any] = {"torch": torch, "model": model, "x": x, "pg": PatchableGraph(model, x)}
    found |= {"v": 1.0, "i": 0, "f": torch.cumsum, "cumsum": lambda value: value.cumsum(0)}
    exec(HELPERS, found)
    found |= {"o": found["Counting"](), **more}
    return found


def in_session(patches: list[ChosenPatch], arguments: str, namespace: dict[str, Any]) -> dict[str, Any]:
    session = Session(namespace["pg"])
    session.extend(patches)
    resolved = session.resolve(namespace)
    before = dict(namespace)  # slices mean what they mean when a cell begins
    with namespace["pg"].patch(resolved.patch_map):
        output = eval(f"pg({arguments})", namespace)
    return {"output": output, **kept_by(resolved, before)}


def source_of(patches: list[ChosenPatch], arguments: str = "x") -> str:
    pg = variables()["pg"]
    session = Session(pg, Origin("pg", "model", arguments))
    session.extend(patches)
    return export(session)


def check(patches: list[ChosenPatch], arguments: str = "x", fresh: Callable[[], dict[str, Any]] = variables) -> None:
    expected = in_session(patches, arguments, fresh())
    namespace = fresh()
    source = source_of(patches, arguments)
    exec(source, namespace)
    for name, value in expected.items():
        assert torch.equal(namespace[name], value), f"{name}\n{namespace[name]}\n{value}\n\n{source}"


INDICES = {
    "int": 0,
    "slice": slice(1, None),
    "list": [1, 0],
    "tensor": torch.tensor([1, 1]),
    "scalar": torch.tensor(1),
    "mask": torch.tensor([True, False]),
    "tuple": (0, 1),
    "tuple of lists": ([0, 1], [2, 0]),
    "nones": (None, 0),
    "none": None,
    "dots": ...,
    "true": True,
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize(
    "chosen",
    [
        [patch("sub_0.output", "custom", slice="i", value="lambda t: t.cumsum(0)")],
        [patch("sub_0.output", "custom", slice="i", value="cumsum"), patch("output", "probe", slice="i", name="h")],
        [patch("sub_0.output", "add", slice="i", value="v"), patch("sub_0.output", "probe", slice="i", name="h")],
        [patch("output", "replace", slice="i", value="9"), patch("sub_0.output", "zero", slice="i")],
        [patch("sub_0.output", "probe", name="i"), patch("output", "probe", slice="i", name="h")],
    ],
    ids=["lambda", "function", "add", "replace", "overwritten by a probe"],
)
def test_a_variable_in_brackets_means_what_it_means_to_python(index: Any, chosen: list[ChosenPatch]) -> None:
    check(chosen, fresh=lambda: variables(i=index))
    value = torch.arange(6.0).reshape(2, 3)
    expected = value.clone()
    expected[index] = expected[index].cumsum(0) if expected[index].dim() else expected[index]
    typed = ChosenPatch("x", "custom", slice="i", value="lambda t: t.cumsum(0) if t.dim() else t")
    assert torch.equal(typed.patch({"i": index}).op(value.clone()), expected)


@pytest.mark.parametrize("texts", [("o.v",) * 3, ("o[0]", "o[0] * 10", "o[0] * 100"), ("o + 1", "-o", "o.v")])
def test_what_does_something_unseen_is_evaluated_in_the_order_of_the_session(texts: tuple[str, str, str]) -> None:
    first, second, third = texts
    check([
        patch("output", "add", value=first),
        patch("sub_0.output", "add", value=second),
        patch("output", "add", value=third),
    ])  # fmt: skip
    check([
        patch("output", "custom", value="o.f"),
        patch("sub_0.output", "add", value=second),
        patch("output", "add", value=third),
    ])  # fmt: skip


def test_names_stay_where_they_are_used() -> None:
    chosen = [
        patch("sub_0.output", "add", slice=":, i", value="v"),
        patch("output", "custom", value="lambda t: torch.abs(t.flip(0))"),
        patch("output", "probe", slice="i", name="h"),
    ]
    source = source_of(chosen)
    check(chosen)
    assert "_slice" not in source
    assert "_value" not in source
    assert "activation[i]" in source
