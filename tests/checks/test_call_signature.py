"""In what two calls differ, as far as code can ask without looking at the numbers in tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.capture.inputs import inputs_of_call
from graphpatch_notebook.checks.call_signature import Aspect, CallSignature, TensorForm
from graphpatch_notebook.patchable_graph import captured

X = torch.linspace(-1, 1, 12).reshape(3, 4)
Y = X + 1


class Cache:
    pass


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
        ([X], [X.to("meta")], ["DEVICE"]),
        ([X, X], [X, Y], ["SPLIT"]),
        ([X, X, 1], [X, Y, 2], ["VALUE", "SPLIT"]),
    ],
)
def test_calls_that_differ_have_different_signatures(was: list[Any], now: list[Any], aspects: list[str]) -> None:
    names = [f"input_{i}" for i in range(len(was))]
    signature, other = (CallSignature.of(dict(zip(names, values, strict=True))) for values in (was, now))
    differences = signature.differences(now)
    assert [difference.aspect.name for difference in differences] == aspects
    assert not aspects or "example" in str(differences[0])
    if not aspects and not isinstance(was[0], torch.Size):
        assert signature == other
        assert hash(signature) == hash(other)
    lax = replace(signature, ignored=frozenset(Aspect) - {Aspect.VALUE})
    assert [difference.aspect for difference in lax.differences(now)] == [Aspect.VALUE] * aspects.count("VALUE")


def test_settings_of_torch() -> None:
    signature = CallSignature.of({"x": X})
    with torch.no_grad():
        (found,) = signature.differences([X])
    assert str(found) == "the grad mode is False, and was True in the example"
    with torch.autocast("cpu"):
        (found,) = signature.differences([X])
    assert found.aspect is Aspect.AUTOCAST


def test_symbolic_sizes() -> None:
    signature = CallSignature.of({"x": X, "y": X[:, 0].clone()})
    forms = [TensorForm((*sizes,), X.device) for sizes in (("rows", 4), ("rows",))]
    signature = replace(signature, tensors=tuple(forms), ranges={"rows": (1, 5)})
    assert signature.differences([torch.ones(5, 4), torch.ones(5)]) == []
    found = signature.differences([torch.ones(5, 4), torch.ones(2)])
    assert [(d.name, d.position, d.was, d.now) for d in found] == [("y", 0, 5, 2)]
    found = signature.differences([torch.ones(6, 4), torch.ones(6)])
    assert [(d.name, d.was, d.now) for d in found] == [("x", range(1, 5), 6), ("y", range(1, 5), 6)]


def test_the_record_of_a_frame_has_the_signature_of_its_call() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, y: Tensor, *more: Tensor, scale: float = 2.0, **named: Tensor) -> Tensor:
            return (x + y + sum(more)) * scale + named["z"]

    args, kwargs = (X, X, Y), {"z": torch.ones(4, 3).T}
    frame = captured(PatchableGraph(Adds(), *args, **kwargs)).root
    values = inputs_of_call(frame, args, kwargs)
    recorded, given = CallSignature.of_frame(frame), CallSignature.of(values)
    assert recorded.same == given.same == (0, 0, 2, 3)
    assert recorded.differences(list(values.values())) == []
    assert [form.sizes for form in recorded.tensors] == [form.sizes for form in given.tensors]
    found = recorded.differences(list(inputs_of_call(frame, (X, Y, Y), {"z": Y}).values()))
    assert [difference.aspect.name for difference in found] == ["SPLIT"]
