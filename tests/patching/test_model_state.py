"""What a run may change in a model is seen afterwards, and restored: attributes, containers, tensors, generators."""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphpatch_notebook import AddPatch, GraphPatchWarning, PatchableGraph
from graphpatch_notebook.patching.model_state import ModelSnapshot, copied, preserved
from tests.zoo.submodules import Submodules

Edit = Callable[[Any], object]


class Making(OrderedDict):  # type: ignore[type-arg]
    """Makes something of each item that is looked up."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(key)


class Held(
    Submodules, first=(2, 2), second=(2, 2), mean=lambda: torch.zeros(2), mask=lambda: torch.tensor([float("nan"), 1.0])
):
    """Holds one of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", None)
        self.scale, self.note = 1.0, "before"
        self.last = torch.zeros(2)
        self.notes: list[Any] = []
        self.listed, self.queue, self.set = [1, [2]], deque([1], maxlen=3), {1}
        self.options: dict[str, Any] = {"scale": 1.0, "inner": {"keys": [torch.zeros(2)]}}
        self.order, self.made = OrderedDict(a=1, b=2), Making(a=1)
        self.generator, self.python = torch.Generator(), random.Random(0)
        self.numpy, self.older = np.random.default_rng(0), np.random.RandomState(0)
        self.elsewhere = [nn.BatchNorm1d(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.options["scale"]


EDITS: dict[str, tuple[Edit, str]] = {
    "an attribute": (lambda m: setattr(m, "scale", 2.0), "scale"),
    "a new attribute": (lambda m: setattr(m, "flag", True), "flag"),
    "an attribute less": (lambda m: delattr(m, "note"), "note"),
    "a tensor attribute": (lambda m: setattr(m, "last", torch.zeros(2)), "last"),
    "a write into a tensor": (lambda m: m.last.add_(1), "last"),
    "an empty list that is filled": (lambda m: m.notes.append(1), "notes.0"),
    "a list in a list": (lambda m: m.listed[1].append(3), "listed.1.1"),
    "a queue": (lambda m: m.queue.append(2), "queue.1"),
    "a set": (lambda m: m.set.add(2), "set.2"),
    "a dict": (lambda m: m.options.update(scale=2.0), "options.scale"),
    "a deep tensor": (lambda m: m.options["inner"]["keys"][0].add_(1), "options.inner.keys.0"),
    "a dict of another class": (lambda m: OrderedDict.__setitem__(m.made, "a", 2), "made.a"),
    "a write into a buffer": (lambda m: m.mean.add_(1), "mean"),
    "a sign in a buffer": (lambda m: m.mean.neg_(), "mean"),
    "another buffer": (lambda m: setattr(m, "mean", torch.zeros(2)), "mean"),
    "a buffer less": (lambda m: delattr(m, "mask"), "mask"),
    "a buffer that was none": (lambda m: setattr(m, "cache", torch.ones(2)), "cache"),
    "another parameter": (lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones(2, 2))), "weight"),
    "another module": (lambda m: setattr(m, "second", nn.Identity()), "second"),
    "a hook": (lambda m: m.first.register_forward_hook(print), "_forward_hooks."),
    "a hook with keywords": (lambda m: m.register_forward_hook(print, with_kwargs=True), "_forward_hooks."),
    "the mode": (lambda m: m.second.eval(), "training"),
    "a module in a list": (lambda m: m.elsewhere[0](torch.ones(3, 2)), "running_mean"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_changes_are_seen_and_restored(edit: str) -> None:
    change, name = EDITS[edit]
    model = Held()
    with preserved(model) as snapshot:
        assert list(snapshot.changes()) == []
        change(model)
        found = next(snapshot.changes())
        assert found.name.startswith(name)
        assert found.module_class in str(found)
    assert list(snapshot.changes()) == []
    assert not model.first._forward_hooks
    assert not model._forward_hooks_with_kwargs


def test_random_generators_are_restored() -> None:
    model = Held()

    def drawn() -> list[float]:
        own = [torch.rand(1, generator=model.generator).item(), model.python.random()]
        own += [float(model.numpy.random()), float(model.older.random_sample())]
        return [torch.rand(1).item(), random.random(), float(np.random.rand()), *own]

    with preserved(model) as snapshot:
        first = drawn()
        assert snapshot.random.changed() == ["torch", "Python", "numpy", "a generator of its own"]
    assert snapshot.random.changed() == []
    assert drawn() == first


def test_weights_are_not_copied_until_a_write_into_them_is_reported() -> None:
    model = Held()
    with pytest.warns(GraphPatchWarning, match="Held left one .* Linear writes into its 'weight'"), preserved(model):
        nn.init.ones_(model.first.weight)
    with preserved(model):
        nn.init.zeros_(model.first.weight)
    assert model.first.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_each_write_that_cannot_be_restored_is_reported_once() -> None:
    model = Held()
    model.spread = torch.zeros(1).expand(2, 3)  # it has one number for all, so no copy can be written back
    for _ in range(2):
        snapshot = ModelSnapshot(model)
        model.spread[:, :1].unsqueeze(0)[0, 0].add_(1)
        with pytest.warns(GraphPatchWarning, match="Held writes into its 'spread'"):
            snapshot.restore()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            snapshot.restore()


def test_large_buffers_are_copied_if_the_capture_writes_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Caching(Submodules, table=lambda: torch.arange(64.0), keys=lambda: torch.zeros(64)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.keys[0] += x.sum()
            return x * self.keys.sum() + self.table[0]

    monkeypatch.setattr("graphpatch_notebook.patching.model_state.LARGE", 100)
    model = Caching()
    PatchableGraph(model, torch.ones(3))
    tensors = ModelSnapshot(model)._tensors.values()
    assert [tensor.name for tensor in tensors if tensor.content is not None] == ["_buffers.keys"]


def test_hooks_of_patches_stay() -> None:
    """Contexts of other threads come and go while a run is undone."""
    model, x = Held(), torch.ones(1, 2)
    pg = PatchableGraph(model, x)
    expected = model(x) + 1
    snapshot = ModelSnapshot(model)
    with pg.patch({"output": AddPatch(1.0)}):
        snapshot.restore()
        assert torch.equal(pg(x), expected)


def test_copies_of_inputs_keep_strides_aliases_and_leaves() -> None:
    whole = torch.arange(6.0).view(2, 3)
    given = {"t": whole.t(), "part": whole[0], "leaf": torch.ones(2, requires_grad=True), "module": nn.ReLU()}
    given["made"] = given["leaf"] * 2
    found = copied(given)
    assert found["t"].stride() == given["t"].stride()
    found["t"].zero_()
    assert found["part"].tolist() == [0.0, 0.0, 0.0]
    assert whole.sum() == 15
    assert found["module"] is given["module"]
    assert (found["leaf"].is_leaf, found["made"].is_leaf) == (True, False)
