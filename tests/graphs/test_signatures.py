"""In what two calls differ, as far as code can ask without looking at the numbers in tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.capture.inputs import inputs_of_call
from graphpatch_notebook.graphs.signatures import Aspect, CallSignature
from graphpatch_notebook.patchable_graph import captured

X = torch.linspace(-1, 1, 12).reshape(3, 4)
Y = X + 1


class Cache:
    pass


class Ignores(nn.Module):
    def forward(self, a: Any, b: Any = None, c: Any = None) -> Tensor:
        return torch.ones(())


def signature_of(*values: Any) -> CallSignature:
    """Returns the signature of the call with these values, from its record."""
    return CallSignature.of_frame(captured(PatchableGraph(Ignores(), *values)).root)


def padded(values: list[Any]) -> list[Any]:
    return values + [None] * (3 - len(values))


@pytest.mark.parametrize(
    ("was", "now", "aspects"),
    [
        ([X, 1.0], [Y, 1.0], []),
        ([X, float("nan")], [X, float("nan")], []),
        ([X, 0.0], [X, -0.0], ["VALUE"]),
        ([X, 1], [X, True], ["VALUE"]),
        ([X, None], [X, Y], ["VALUE"]),
        ([X], [X[None]], ["VALUE"]),
        ([(X, Y)], [[X, Y]], ["VALUE"]),
        ([(X, Y)], [(X,)], ["VALUE"]),
        ([{"a": X}], [{"a": Y, "b": Y}], ["VALUE"]),
        ([X.shape], [(3, 4)], []),
        ([Cache()], [Cache()], []),
        ([X], [X.double()], ["DTYPE"]),
        ([X], [nn.Parameter(X, requires_grad=False)], []),
        ([X], [X.clone().requires_grad_()], []),
        ([X], [X[:2]], ["SIZE"]),
        ([X[:, :3]], [X[:, :3].clone()], []),
        ([X, X], [X, Y], ["SPLIT"]),
        ([X, X, 1], [X, Y, 2], ["VALUE", "SPLIT"]),
    ],
)
def test_differences_between_calls(was: list[Any], now: list[Any], aspects: list[str]) -> None:
    signature = signature_of(*was)
    differences = signature.differences(padded(now))
    assert [difference.aspect.name for difference in differences] == aspects
    assert not aspects or "example" in str(differences[0])
    found = replace(signature, any_size=True).differences(padded(now))
    assert [difference.aspect.name for difference in found] == [aspect for aspect in aspects if aspect != "SIZE"]


def test_settings_of_torch() -> None:
    signature = replace(signature_of(X), settings=((Aspect.GRAD_MODE, True), (Aspect.AUTOCAST, None)))
    with torch.no_grad():
        (found,) = signature.differences(padded([X]))
    assert str(found) == "the grad mode is False, and was True in the example"
    with torch.autocast("cpu"):
        (found,) = signature.differences(padded([X]))
    assert found.aspect is Aspect.AUTOCAST


def test_symbolic_sizes() -> None:
    sizes = (("rows", 4), ("rows",))
    signature = replace(signature_of(X, X[:, 0].clone()), sizes=sizes)
    assert signature.differences(padded([torch.ones(5, 4), torch.ones(5)])) == []
    found = signature.differences(padded([torch.ones(5, 4), torch.ones(2)]))
    assert [(d.name, d.position, d.was, d.now) for d in found] == [("b", 0, 5, 2)]


def test_tensors_that_are_one_stay_one_in_any_parameter() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, y: Tensor, *more: Tensor, scale: float = 2.0, **named: Tensor) -> Tensor:
            return (x + y + sum(more)) * scale + named["z"]

    args, kwargs = (X, X, Y), {"z": torch.ones(4, 3).T}
    frame = captured(PatchableGraph(Adds(), *args, **kwargs)).root
    recorded = CallSignature.of_frame(frame)
    assert recorded.same == (0, 0, 2, 3)
    assert recorded.differences(list(inputs_of_call(frame, args, kwargs).values())) == []
    found = recorded.differences(list(inputs_of_call(frame, (X, Y, Y), {"z": Y}).values()))
    assert [difference.aspect.name for difference in found] == ["SPLIT"]
