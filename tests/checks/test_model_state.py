"""What a run may change in a model is seen afterwards, and put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphpatch_notebook.checks.model_state import BufferState


def a_module() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("mean", torch.zeros(2))
    module.register_buffer("mask", torch.tensor([float("nan"), 1.0]))
    module.register_buffer("cache", None)
    return module


def write(module: nn.Module) -> None:
    module.get_buffer("mean").add_(1)


def replace(module: nn.Module) -> None:
    module.mean = torch.zeros(2)


def remove(module: nn.Module) -> None:
    del module.mask


def flip_a_sign(module: nn.Module) -> None:
    module.get_buffer("mean").neg_()


@pytest.mark.parametrize("edit", [write, replace, remove, flip_a_sign])
def test_buffers_are_seen_to_change_and_put_back(edit: Callable[[nn.Module], None]) -> None:
    module = a_module()
    tensors, bits = dict(module._buffers), module.get_buffer("mean").view(torch.int32).clone()
    state = BufferState([module])
    assert state.change() is None
    edit(module)
    assert str(state.change()).startswith("Linear changes its buffer 'm")
    state.restore()
    assert state.change() is None
    assert all(module._buffers[name] is tensor for name, tensor in tensors.items())
    assert module.get_buffer("mean").view(torch.int32).equal(bits)


def test_a_buffer_that_was_not_there_is_taken_away_again() -> None:
    module = a_module()
    state = BufferState([module])
    module.cache = torch.ones(2)
    state.restore()
    assert module.cache is None


def test_weights_among_the_buffers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphpatch_notebook.checks.model_state.LARGE", 4)
    module = a_module()
    state = BufferState([module])
    write(module)
    assert state.change() is None
    state.restore()
    assert module.get_buffer("mean").tolist() == [1.0, 1.0]


def test_states_of_one_module_are_compared() -> None:
    module = a_module()
    before = BufferState([module])
    assert before.difference(BufferState([module])) is None
    write(module)
    assert before.difference(BufferState([module])) == "the buffers of Linear|mean: 2 of 2 values differ"
