"""Patched models that `torch.compile` compiles once for all values of their patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, RecordPatch, ReplacePatch, ZeroPatch
from graphpatch_notebook.errors import GraphError, PatchMapError, PatchValueError, UnknownPathError
from tests.zoo.submodules import Submodules

X = torch.linspace(-1, 1, 6).view(2, 3)


class Mlp(Submodules, seed=0, up=(3, 4), down=(4, 3)):
    """What it computes is written down once more in `by_hand`."""

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        hidden = torch.relu(self.up(x)) * scale
        return self.down(hidden)


def by_hand(model: Mlp, x: Tensor, added: Any = 0, replaced: Any = None, bias: Any = None) -> Tensor:
    hidden = torch.relu(model.up(x)) * 2.0
    hidden = torch.cat([hidden[:, :1], hidden[:, 1:2] + added, hidden[:, 2:]], 1)
    out = nn.functional.linear(hidden, model.down.weight, model.down.bias if bias is None else bias)
    if replaced is not None:
        out = out.clone()
        out[0] = replaced
    return out


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def model() -> Mlp:
    return Mlp().eval()


@pytest.fixture(scope="module")
def pg(model: Mlp) -> PatchableGraph:
    return PatchableGraph(model, X)


def test_other_values_do_not_compile_again(model: Mlp, pg: PatchableGraph) -> None:
    add, replace = AddPatch(value=torch.ones(2, 1), slice=(slice(None), slice(1, 2))), ReplacePatch(value=0.5, slice=0)
    bias = ReplacePatch(value=torch.zeros(3))
    patches = {"hidden": add, "output": [replace], "down.bias": bias, "up.output": AddPatch(value=0)}
    backend = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = pg.compile(patches, X, backend=backend)
    with torch.no_grad():
        for number in (0.5, 2, True, -1.25, 0):  # as a user sets them
            add.value, bias.value, replace.value = torch.randn(2, 1), torch.randn(3), number
            assert torch.equal(compiled(X), by_hand(model, X, add.value, number, bias.value))
            assert torch.equal(compiled(X * 3), by_hand(model, X * 3, add.value, number, bias.value))
        assert backend.frame_count == 1
        replace.value, add.value, add.slice = 7.0, torch.zeros(2, 4), None  # what is not a value compiles again
        assert torch.equal(compiled(X), by_hand(model, X, 0, 7.0, bias.value))
        model.up.weight.mul_(2)  # weights are those of the model
        assert torch.equal(compiled(X), by_hand(model, X, 0, 7.0, bias.value))
    replace.value = "7"
    with pytest.raises(PatchMapError, match="'output'"):
        compiled(X)


@pytest.mark.parametrize(
    ("field", "given", "kind", "message"),
    [
        ("value", torch.ones(5), RuntimeError, ""),
        ("value", 1j, RuntimeError, ""),
        ("value", None, PatchMapError, "'hidden': AddPatch: value must be a tensor or a number"),
        ("slice", (0, 9), PatchMapError, r"'hidden': AddPatch: slice \[0, 9\] is out of range"),
        ("slice", torch.zeros(2, 4, dtype=torch.bool), PatchMapError, "selects nothing"),
    ],
)
def test_fields_that_are_not_valid_any_more(
    pg: PatchableGraph, field: str, given: Any, kind: type[Exception], message: str
) -> None:
    """They are refused as by `patch`: a mask without a True had no effect."""
    add = AddPatch(value=1.0)
    compiled = pg.compile({"hidden": add}, X, backend="eager")
    compiled(X)
    setattr(add, field, given)
    with pytest.raises(kind, match=message):
        compiled(X)
    with pytest.raises((kind, PatchValueError)), pg.patch({"hidden": add}):
        pg(X)


@pytest.mark.slow
def test_inductor_computes_the_same_within_rounding(model: Mlp, pg: PatchableGraph) -> None:
    add = AddPatch(value=0.0, slice=(slice(None), slice(1, 2)))
    compiled = pg.compile({"hidden": add}, X)
    # Without the ten C++ programs by which it finds out what this processor has: they take longer than all else here.
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        compiled(X)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for number in range(100):
        add.value = number / 7
        torch.testing.assert_close(compiled(X), by_hand(model, X, add.value))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_gradients_reach_values_and_weights(model: Mlp, pg: PatchableGraph) -> None:
    value = torch.ones(2, 1, requires_grad=True)
    compiled = pg.compile({"hidden": AddPatch(value=value, slice=(..., slice(1, 2)))}, X, backend="aot_eager")
    wanted = (value, model.up.weight)
    found = torch.autograd.grad(compiled(X).square().sum(), wanted)
    expected = torch.autograd.grad(by_hand(model, X, value).square().sum(), wanted)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


class OwnAdd(AddPatch):
    def op(self, original_output: Any) -> Any:
        return original_output + 1


@pytest.mark.parametrize(
    ("patches", "kind", "message"),
    [
        ({"hidden": CustomPatch(torch.neg)}, GraphError, "'hidden': a CustomPatch may run other Python code"),
        ({"up.output": [ZeroPatch(), RecordPatch()]}, GraphError, "'up.output': a RecordPatch may run"),
        ({"hidden": OwnAdd(value=1)}, GraphError, "a OwnAdd may run other Python code"),
        ({"hidden": ZeroPatch(steps=0)}, GraphError, "a graph does not count steps"),
        ({"hiden": ZeroPatch()}, UnknownPathError, "hidden"),
        ({"hidden": AddPatch(value="1")}, PatchMapError, "value must be a tensor or a number"),
        ({"hidden": 3}, PatchMapError, "give a patch or a list of patches"),
    ],
)
def test_refused_before_anything_runs(
    pg: PatchableGraph, patches: Mapping[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        pg.compile(patches, X)
