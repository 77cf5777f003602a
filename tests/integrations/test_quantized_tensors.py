"""Weights that are tensors of a class with a `dequantize`, as those of torchao and quanto, against plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    GraphError,
    Patch,
    PatchableGraph,
    ProbePatch,
    ReplacePatch,
    ZeroPatch,
)
from tests.tiny_models import gpt2

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Int8Rows(Tensor):
    """Rows of int8 with a scale each. It has a linear map, and no other operation, like many such classes."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Int8Rows:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.int8, self.scale = data, scale

    @classmethod
    def of(cls, weight: Tensor) -> Int8Rows:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def dequantize(self) -> Tensor:
        return self.int8 * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].int8, args[0].scale)
        raise NotImplementedError(f"{cls.__name__} has no {func}")


def _linear(input: Tensor, weight: Int8Rows, bias: Tensor) -> Tensor:
    return input @ weight.int8.to(input.dtype).T * weight.scale.T + bias


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 4)
        with torch.no_grad():
            self.weight = nn.Parameter(Int8Rows.of(self.weight), requires_grad=False)
        self.bias.requires_grad_(False)


class Checked(Linear):
    """Quantizes a weight that is not quantized, as the modules of quanto do."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(
            input, self.weight if isinstance(self.weight, Int8Rows) else Int8Rows.of(self.weight), self.bias
        )


EDITS: dict[str, tuple[Callable[[], Patch[Any]], Callable[[Tensor], Tensor]]] = {
    "zero": (ZeroPatch, torch.zeros_like),
    "zero a row": (lambda: ZeroPatch(slice=2), lambda w: w.index_fill(0, torch.tensor(2), 0)),
    "add": (lambda: AddPatch(value=torch.arange(8) / 100), lambda w: w + torch.arange(8) / 100),
    "replace": (lambda: ReplacePatch(value=torch.ones(4, 8)), torch.ones_like),
    "a function": (lambda: CustomPatch(lambda w: w.flip(1)), lambda w: w.flip(1)),
}
each_kind = pytest.mark.parametrize("kind", [Linear, Checked])


def quantized(kind: type[Linear]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(), nn.ReLU()).eval()


@each_kind
def test_a_probe_keeps_what_the_weight_represents_and_changes_no_bit(kind: type[Linear]) -> None:
    model, probe = quantized(kind), ProbePatch()
    pg, expected = PatchableGraph(model, X), model(X)
    identity = CustomPatch(lambda value: value, requires_clone=False)
    with pg.patch({"sub_0.weight": [probe, identity], "sub_0.linear": identity}, strict=True):
        assert torch.equal(pg(X), expected)
    assert type(probe.activation) is Tensor
    assert torch.equal(probe.activation, model[0].weight.dequantize())


@pytest.mark.parametrize("edit", EDITS)
@each_kind
def test_a_patched_weight_is_a_plain_tensor_to_the_module(kind: type[Linear], edit: str) -> None:
    model, (patch, edited) = quantized(kind), EDITS[edit]
    expected = F.linear(X, edited(model[0].weight.dequantize()), model[0].bias).relu()
    pg = PatchableGraph(model, X)
    for others in ({}, {"sub_0.linear": ProbePatch()}):
        with pg.patch({"sub_0.weight": patch(), **others}, strict=True):
            assert torch.equal(pg(X), expected)
    assert torch.equal(pg(X), model(X))


@each_kind
def test_gradients_flow_to_a_patch(kind: type[Linear]) -> None:
    model, value = quantized(kind), torch.zeros(4, 8, requires_grad=True)
    pg = PatchableGraph(model, X)
    with pg.patch({"sub_0.weight": AddPatch(value=value)}):
        pg(X).pow(2).sum().backward()
    weight = model[0].weight.dequantize().requires_grad_()
    F.linear(X, weight, model[0].bias).relu().pow(2).sum().backward()
    torch.testing.assert_close(value.grad, weight.grad)


def test_matrices_of_weights_are_refused() -> None:
    """They are views of the weights, into which `project_out` writes; these have other numbers."""
    model, ids = gpt2(), torch.arange(6)[None]
    for layer in model.transformer.h:
        weight = layer.mlp.c_fc.weight.data
        layer.mlp.c_fc = nn.Linear(*weight.shape).requires_grad_(False)
        layer.mlp.c_fc.weight = nn.Parameter(Int8Rows.of(weight.T), requires_grad=False)
    pg = PatchableGraph(model, ids)
    with pytest.raises(GraphError, match=r"transformer\.h_0\.mlp\.c_fc\.weight"):
        _ = pg.weights.W_in[0]
    assert pg.weights.W_out[0].shape == model.transformer.h[0].mlp.c_proj.weight.shape


def test_graphs_that_run_take_a_patched_weight() -> None:
    model = quantized(Linear)
    weight = {"sub_0.weight": AddPatch(value=1.0)}
    expected = F.linear(X, model[0].weight.dequantize() + 1, model[0].bias).relu()
    with (pg := PatchableGraph(model, X)).patch(weight):
        assert torch.equal(pg.to_fx((X,))(X), expected)
    graph_module = pg._graph_module.get_submodule("0")
    (linear,) = graph_module.graph.find_nodes(op="call_function", target=F.linear)
    with graph_module.graph.inserting_after(linear):
        doubled = graph_module.graph.call_function(torch.mul, (linear, 2))
    linear.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    graph_module.recompile()
    with pg.patch(weight, strict=True):
        assert torch.equal(pg(X), expected * 2)
    assert torch.equal(pg(X), model(X) * 2)
