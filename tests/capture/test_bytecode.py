"""Variables read off bytecode, and call sites that stay the same while the interpreter specialises its code."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ProbePatch
from graphpatch_notebook.capture.bytecode import Assigned, assigned_variable, instruction_offset

seen: list[tuple[Assigned, int]] = []


def mark(*values: object) -> tuple[object, ...]:
    """Notes what its caller's bytecode says about this very call."""
    frame = sys._getframe(1)
    seen.append((assigned_variable(frame.f_code, frame.f_lasti), instruction_offset(frame.f_code, frame.f_lasti)))
    return (1, 2)


class Holder:
    attribute: object


def single() -> None:
    value = mark()  # noqa: F841


def unpacked() -> None:
    left, right = mark()


def ignored_first() -> None:
    _, right = mark()


def chained() -> None:
    first = second = mark()  # noqa: F841


def walrus() -> None:
    if value := mark():
        str(value)


def attribute() -> None:
    holder = Holder()
    holder.attribute = mark()


def subscripted() -> None:
    value = mark()[0]  # noqa: F841


def nested() -> None:
    value = len(mark())  # noqa: F841


def returned() -> object:
    return mark()


def closure() -> Callable[[], object]:
    captured = mark()
    return lambda: captured


def dropped() -> None:
    mark()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (single, "value"),
        (unpacked, ("left", "right")),
        (ignored_first, (None, "right")),
        (chained, "first"),
        (walrus, "value"),
        (attribute, "attribute"),
        (subscripted, None),
        (nested, None),
        (returned, None),
        (closure, "captured"),
        (dropped, None),
    ],
)
def test_the_variable_that_a_result_is_assigned_to(function: Callable[[], object], expected: Assigned) -> None:
    seen.clear()
    function()
    assert seen[0][0] == expected


def test_a_call_site_is_the_same_after_the_code_has_warmed_up() -> None:
    def calls(x: Tensor) -> None:
        mark(x)
        mark(*[x])

    seen.clear()
    for _ in range(200):
        calls(torch.ones(1))
    assert len(set(seen)) == 2


class BuiltinCalls(nn.Module):
    """Calls that Python 3.11 and later specialise, each at its own kind of instruction."""

    def forward(self, x: Tensor) -> Tensor:
        a = torch.pow(x, 2)
        b = a.sum(dim=0, keepdim=True)
        c = sum([b, b, b])
        d = c.relu() + x[0]
        return max(d, d, key=lambda t: 0).neg()


def test_patches_still_fire_after_the_code_has_warmed_up() -> None:
    model, x = BuiltinCalls(), torch.ones(3, 2)
    pg = PatchableGraph(model, x)
    for _ in range(200):
        model(x)
    probes = {path: ProbePatch() for path, node in pg.nodes.items() if not node.is_plumbing}
    with pg.patch(probes, strict=True):
        pg(x)
    assert {path for path, probe in probes.items() if probe.activation is None} == set()
