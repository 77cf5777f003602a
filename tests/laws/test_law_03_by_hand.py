"""Law 3 for ops, by hand: what a reader of the source takes a name to mean is what a patch on it changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import CustomPatch, PatchableGraph
from tests.laws.captures import Capture, run
from tests.zoo import case_by_name
from tests.zoo.case import floats, seeded
from tests.zoo.values import bit_equal

Edit = Callable[[Any], Any]


def _flip(value: Tensor) -> Tensor:
    return value.flip(-1) * 2 + 1


class EditedNewGELU(nn.Module):
    """The activation of GPT-2, line by line, with one of its values edited."""

    def __init__(self, name: str, flip: Edit = _flip) -> None:
        super().__init__()
        self.name, self.flip = name, flip

    def edit(self, name: str, value: Tensor) -> Tensor:
        return self.flip(value) if name == self.name else value

    def forward(self, input: Tensor) -> Tensor:
        mul = self.edit("mul", 0.5 * input)
        power = self.edit("pow", torch.pow(input, 3.0))
        mul_1 = self.edit("mul_1", 0.044715 * power)
        add = self.edit("add", input + mul_1)
        mul_2 = self.edit("mul_2", math.sqrt(2.0 / math.pi) * add)
        tanh = self.edit("tanh", torch.tanh(mul_2))
        add_1 = self.edit("add_1", 1.0 + tanh)
        return self.edit("mul_3", mul * add_1)


@pytest.mark.parametrize("name", ["mul", "pow", "mul_1", "add", "mul_2", "tanh", "add_1", "mul_3"])
def test_the_activation_of_gpt2(name: str) -> None:
    capture = Capture.of(case_by_name("gpt2-eager"))
    capture.reference.transformer.h[0].mlp.act = EditedNewGELU(name)
    expected = run(capture.reference, capture.case.example())
    with capture.pg.patch({f"transformer.h_0.mlp.act.{name}": CustomPatch(custom_op=_flip)}):
        found = run(capture.pg, capture.case.example())
    assert bit_equal(expected, found) is None


def _flip_half(value: Tensor) -> Tensor:
    result = value.clone()
    result[:, 1:, :96] = _flip(value[:, 1:, :96])
    return result


@pytest.mark.parametrize("name", ["mul", "tanh", "mul_3"])
def test_a_slice_in_the_activation_of_gpt2(name: str) -> None:
    capture = Capture.of(case_by_name("gpt2-eager"))
    capture.reference.transformer.h[0].mlp.act = EditedNewGELU(name, _flip_half)
    patch = CustomPatch(custom_op=_flip, slice=(slice(None), slice(1, None), slice(None, 96)))
    found = []
    for model, patches in ((capture.reference, {}), (capture.pg, {f"transformer.h_0.mlp.act.{name}": patch})):
        model.zero_grad()
        with capture.pg.patch(patches):
            output = run(model, capture.case.example())
            output.logits.sum().backward()
        found.append((output, {path: parameter.grad.clone() for path, parameter in model.named_parameters()}))
    assert bit_equal(*found) is None


@pytest.mark.parametrize(("layer", "part"), [(0, "query_states"), (1, "key_states"), (1, "value_states")])
def test_unpacked_values_of_gpt2(layer: int, part: str) -> None:
    """`query_states, key_states, value_states = self.c_attn(...).split(...)` is an edit of a third of its output."""
    capture = Capture.of(case_by_name("gpt2-eager"))
    start = 48 * ["query_states", "key_states", "value_states"].index(part)

    def edit(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        result = output.clone()
        result[..., start : start + 48] = _flip(output[..., start : start + 48])
        return result

    capture.reference.transformer.h[layer].attn.c_attn.register_forward_hook(edit)
    expected = run(capture.reference, capture.case.example())
    with capture.pg.patch({f"transformer.h_{layer}.attn.{part}": CustomPatch(custom_op=_flip)}):
        found = run(capture.pg, capture.case.example())
    assert bit_equal(expected, found) is None


@pytest.mark.parametrize(("path", "call"), [("neg", 0), ("neg_1", 1)])
def test_rotation_of_llama(path: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rotate_half` is called for the queries, then for the keys: two chains of call sites through one line."""
    from transformers.models.llama import modeling_llama

    capture = Capture.of(case_by_name("llama-eager"))
    with capture.pg.patch({f"model.layers_0.self_attn.{path}": CustomPatch(custom_op=_flip)}):
        found = run(capture.pg, capture.case.example())
    calls = iter(range(100))

    def rotate_half(x: Tensor) -> Tensor:
        x1 = x[..., : x.shape[-1] // 2]
        negated = -x[..., x.shape[-1] // 2 :]
        return torch.cat((_flip(negated) if next(calls) == call else negated, x1), dim=-1)

    monkeypatch.setattr(modeling_llama, "rotate_half", rotate_half)
    assert bit_equal(run(capture.reference, capture.case.example()), found) is None


class Awkward(nn.Module):
    """Each value that a test patches goes through `edit` under the name that it is to have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.edits: dict[str, Edit] = {}

    def edit(self, name: str, value: Any) -> Any:
        return self.edits.get(name, lambda same: same)(value)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.edit("h", self.linear(x))
        for index in range(3):
            h = self.edit(f"h_{index + 1}", torch.tanh(h)) + 1
        low, high = h.split(3, dim=-1)
        low = self.edit("low", low)
        high = self.edit("high", high)
        low = low * high.shape[0]
        total = torch.cat([high, low], dim=-1)
        total += x
        if "iadd" in self.edits:
            total.copy_(self.edits["iadd"](total))
        alias = total.view(-1)
        if self.edit("bool_1", bool(alias.sum() > 0)):
            total = total * self.edit("item", alias.max().item())
        return total, alias


class Plain(Awkward):
    """The same without `edit`, as a user writes it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        for _ in range(3):
            h = torch.tanh(h) + 1
        low, high = h.split(3, dim=-1)
        low = low * high.shape[0]
        total = torch.cat([high, low], dim=-1)
        total += x
        alias = total.view(-1)
        if bool(alias.sum() > 0):
            total = total * alias.max().item()
        return total, alias


@pytest.mark.parametrize(
    ("path", "edit_name", "edit"),
    [
        pytest.param("tanh", "h_1", _flip, id="first-round"),
        pytest.param("tanh_1", "h_2", _flip, id="second-round"),
        pytest.param("tanh_2", "h_3", _flip, id="third-round"),
        pytest.param("low", "low", _flip, id="unpacked-first"),
        pytest.param("high", "high", _flip, id="unpacked-second"),
        pytest.param("total_1", "iadd", _flip, id="in-place-with-alias"),
        pytest.param("bool", "bool_1", lambda value: not value, id="branch"),
        pytest.param("item", "item", lambda value: value - 5.0, id="number"),
    ],
)
def test_unusual_lines_of_code(path: str, edit_name: str, edit: Edit) -> None:
    reference = seeded(Awkward)
    pg = PatchableGraph(seeded(Plain), floats(4, 6))
    reference.edits[edit_name] = edit
    with pg.patch({path: CustomPatch(custom_op=edit)}):
        found = pg(floats(4, 6))
    assert bit_equal(reference(floats(4, 6)), found) is None
    assert bit_equal(pg(floats(4, 6)), found) is not None


def test_the_size_that_a_line_reads() -> None:
    """`low * high.shape[0]`: the number of rows is a value that can be patched."""
    pg = PatchableGraph(seeded(Plain), floats(4, 6))
    with pg.patch({"size_shape|sub_0": CustomPatch(custom_op=lambda rows: rows + 3)}):
        found = pg(floats(4, 6))
    reference = seeded(Awkward)
    reference.edits["low"] = lambda low: low / 4 * 7  # the same but for the last bits
    assert torch.allclose(reference(floats(4, 6))[1], found[1], atol=1e-6)
