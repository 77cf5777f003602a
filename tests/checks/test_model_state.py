"""What a run may change in a model is seen afterwards, and put back: attributes, containers, tensors, generators."""

from __future__ import annotations

import copy
import itertools
import logging
import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphpatch_notebook import AddPatch, PatchableGraph, StateWarning
from graphpatch_notebook.checks.model_state import (
    Change,
    ChangeKind,
    Fingerprint,
    ModuleState,
    SharedRandomState,
    copied,
)

Edit = Callable[[Any], object]


@dataclass(slots=True)
class Slotted:
    count: int = 0


class Private:
    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 0

    def add(self) -> None:
        self.__count += 1


class Held(nn.Module):
    """Holds one of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("mask", torch.tensor([float("nan"), 1.0]))
        self.register_buffer("cache", None)
        self.scale, self.note = 1.0, "before"
        self.last = torch.zeros(2)
        self.notes: list[Any] = []
        self.listed, self.queue, self.set = [1, [2]], deque([1], maxlen=3), {1}
        self.options: dict[str, Any] = {"scale": 1.0, "inner": {"keys": [torch.zeros(2)]}}
        self.order = OrderedDict(a=1, b=2)
        self.config = SimpleNamespace(size=3, sub=SimpleNamespace(names=["a"]))
        self.counts = np.zeros(2)
        self.generator, self.python = torch.Generator(), random.Random(0)
        self.slotted, self.private = Slotted(), Private()
        self.elsewhere = {"modules": [[nn.BatchNorm1d(2)]]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.options["scale"]


EDITS: dict[str, tuple[Edit, ChangeKind, str]] = {
    "an attribute": (lambda m: setattr(m, "scale", 2.0), ChangeKind.ATTRIBUTE, "scale"),
    "a new attribute": (lambda m: setattr(m, "flag", True), ChangeKind.ATTRIBUTE, "flag"),
    "an attribute less": (lambda m: delattr(m, "note"), ChangeKind.ATTRIBUTE, "note"),
    "a tensor attribute": (lambda m: setattr(m, "last", torch.zeros(2)), ChangeKind.ATTRIBUTE, "last"),
    "a write into a tensor": (lambda m: m.last.add_(1), ChangeKind.TENSOR, "last"),
    "a write into an array": (lambda m: m.counts.__iadd__(1), ChangeKind.TENSOR, "counts"),
    "an empty list that is filled": (lambda m: m.notes.append(1), ChangeKind.ATTRIBUTE, "notes.0"),
    "a list in a list": (lambda m: m.listed[1].append(3), ChangeKind.ATTRIBUTE, "listed.1.1"),
    "a queue": (lambda m: m.queue.append(2), ChangeKind.ATTRIBUTE, "queue.1"),
    "a set": (lambda m: m.set.add(2), ChangeKind.ATTRIBUTE, "set.2"),
    "a dict": (lambda m: m.options.update(scale=2.0), ChangeKind.ATTRIBUTE, "options.scale"),
    "a deep tensor": (lambda m: m.options["inner"]["keys"][0].add_(1), ChangeKind.TENSOR, "options.inner.keys.0"),
    "a slot": (lambda m: setattr(m.slotted, "count", 1), ChangeKind.ATTRIBUTE, "slotted.count"),
    "a private slot": (lambda m: m.private.add(), ChangeKind.ATTRIBUTE, "private._Private__count"),
    "the config": (lambda m: setattr(m.config, "size", 4), ChangeKind.ATTRIBUTE, "config.size"),
    "the config's config": (lambda m: m.config.sub.names.clear(), ChangeKind.ATTRIBUTE, "config.sub.names.0"),
    "a write into a buffer": (lambda m: m.mean.add_(1), ChangeKind.BUFFER, "mean"),
    "a sign in a buffer": (lambda m: m.mean.neg_(), ChangeKind.BUFFER, "mean"),
    "another buffer": (lambda m: setattr(m, "mean", torch.zeros(2)), ChangeKind.BUFFER, "mean"),
    "a buffer less": (lambda m: delattr(m, "mask"), ChangeKind.BUFFER, "mask"),
    "a buffer that was none": (lambda m: setattr(m, "cache", torch.ones(2)), ChangeKind.BUFFER, "cache"),
    "another parameter": (
        lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones(2, 2))), ChangeKind.PARAMETER, "weight",
    ),
    "another module": (lambda m: setattr(m, "second", nn.Identity()), ChangeKind.SUBMODULE, "second"),
    "a hook": (lambda m: m.first.register_forward_hook(print), ChangeKind.HOOK, "_forward_hooks."),
    "the mode": (lambda m: m.second.eval(), ChangeKind.MODE, "training"),
    "a module in a list": (
        lambda m: m.elsewhere["modules"][0][0](torch.ones(3, 2)), ChangeKind.BUFFER, "running_mean",
    ),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_changes_are_seen_and_put_back(edit: str) -> None:
    change, kind, name = EDITS[edit]
    model = Held()
    state = ModuleState(model)
    bits = model.mean.view(torch.int32).clone()
    objects = {id(module): dict(module.__dict__) for module in model.modules()}
    assert state.change() is None
    change(model)
    found = state.change()
    assert isinstance(found, Change)
    assert (found.kind, found.name.startswith(name)) == (kind, True), found.name
    state.restore()
    assert state.change() is None
    assert state.unrepeatable_change() is None
    assert {id(module): dict(module.__dict__) for module in model.modules()} == objects
    assert model.mean.view(torch.int32).equal(bits)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_copies_of_inputs_share_memory_as_the_inputs_do(order: tuple[int, ...]) -> None:
    whole, other = torch.arange(6.0), torch.arange(6.0)
    tensors = [whole, whole[2:4], whole.view(2, 3)]
    *copies, alone = copied((*(tensors[number] for number in order), other))
    copies[0].fill_(9)
    assert torch.equal(whole, other)
    assert alone.data_ptr() != other.data_ptr()
    tensors[order[0]].fill_(9)
    assert all(map(torch.equal, copies, (tensors[number] for number in order)))


def test_a_change_names_module_and_values() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Held())
    state = ModuleState(model)
    model[1].scale = 3.0
    change = state.change()
    assert change is not None
    assert (change.path, change.module_class, change.before, change.after) == ("1", "Held", 1.0, 3.0)
    assert str(change) == "Held changes its 'scale' while it runs"


def test_the_order_of_a_dict_is_put_back() -> None:
    model = Held()
    state = ModuleState(model)
    model.order.move_to_end("a")
    state.restore()
    assert list(model.order) == ["a", "b"]


def test_random_generators_are_put_back() -> None:
    model = Held()
    state = ModuleState(model)

    def drawn() -> list[float]:
        own = [torch.rand(1, generator=model.generator).item(), model.python.random()]
        return [torch.rand(1).item(), random.random(), float(np.random.rand()), *own]

    first = drawn()
    of_whom = "torch and Python and numpy and a generator or iterator of its own"
    assert str(state.change()) == f"the model draws random numbers (of {of_whom})"
    state.restore()
    assert state.change() is None
    assert drawn() == first
    state.restore()
    model.python.random()
    assert str(state.change()) == "the model draws random numbers (of a generator or iterator of its own)"


@pytest.mark.parametrize(
    ("owner", "draw"),
    [
        ("torch", lambda: torch.rand(1)),
        ("Python", random.random),
        ("numpy", np.random.rand),
        ("numpy", np.random.randn),  # which keeps a second number for the next call
    ],
)
def test_draws_from_shared_generators_are_seen(owner: str, draw: Callable[[], object]) -> None:
    start = SharedRandomState()
    for _ in range(3):
        before = SharedRandomState()
        assert before.changed() == []
        draw()
        assert before.changed() == [owner]
        before.restore()
        assert before.changed() == []
        draw()
    start.restore()
    assert start.changed() == []


def test_what_is_next_in_an_iterator_is_never_known() -> None:
    model = nn.Linear(2, 2)
    model.noise = iter([1.0, 2.0])
    assert str(ModuleState(model).change()) == "the model draws random numbers (of a generator or iterator of its own)"


@pytest.mark.parametrize("make", [itertools.count, lambda: iter(range(9)), lambda: (n for n in range(9))])
def test_values_taken_from_an_iterator_cannot_be_put_back(make: Callable[[], Any]) -> None:
    model = nn.Linear(2, 2)
    model.numbers = make()
    ModuleState(model).restore()
    next(model.numbers)
    state = ModuleState(model)
    state.restore()
    next(model.numbers)
    with pytest.warns(StateWarning, match="no trace in Linear left one that cannot be put back: it takes values from"):
        state.restore()


class Counted(nn.Module):
    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + RUNS


RUNS = 0


@pytest.mark.parametrize(("name", "edit"), [
    ("RUNS", lambda: globals().update(RUNS=RUNS + 1)), ("Counted.runs", lambda: setattr(Counted, "runs", 5)),
])  # fmt: skip
def test_values_in_code_and_classes_of_inner_modules_are_part_of_the_state(name: str, edit: Callable[[], None]) -> None:
    state = ModuleState(nn.Sequential(nn.Linear(2, 2), Counted()))
    assert state.change() is None
    edit()
    assert str(state.change()) == f"it changes the global {name!r} while it runs"


def counting(name: str, code: str, **variables: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a model whose code is `code`, and its globals."""
    lines = ["class Counting(Module):", "    def forward(self, x):", f"        global {name}", f"        {code}"]
    variables |= {"Module": nn.Module, "__name__": "counting"}
    exec("\n".join([*lines, "        return x"]), variables)
    return variables["Counting"](), variables


@pytest.mark.parametrize(("code", "before", "after"), [
    ("N += 1", 0, 1), ("N = [*N, 1]", [0], [0, 1]), ("N.append(1)", [0], [0, 1]), ("del N", 0, None),
    ("N['a']['b'] = 1", {"a": {}}, {"a": {"b": 1}}),
])  # fmt: skip
def test_globals_that_the_code_writes_are_put_back(code: str, before: Any, after: Any) -> None:
    model, variables = counting("N", code, N=before)
    expected = copy.deepcopy(before)
    state = ModuleState(model)
    model(1)
    assert variables.get("N") == after
    assert str(state.change()).startswith("it changes the global 'N")
    state.restore()
    assert state.change() is None
    assert variables["N"] is before
    assert before == expected


def test_globals_that_only_others_assign_to_are_left_alone() -> None:
    model, variables = counting("N", "x = x + SCALE", SCALE=2)
    state = ModuleState(model)
    variables["SCALE"] = 3
    state.restore()
    assert variables["SCALE"] == 3


class Making(OrderedDict):  # type: ignore[type-arg]
    """Makes something of each item that is looked up."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(key)


def test_dicts_of_other_classes_are_not_asked_for_their_items() -> None:
    model = Held()
    model.made = Making(a=1)
    state = ModuleState(model)
    OrderedDict.__setitem__(model.made, "a", 2)
    assert str(state.change()) == "Held changes its 'made.a' while it runs"
    state.restore()
    assert list(model.made.values()) == [1]


def test_weights_are_not_copied_and_a_write_into_them_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphpatch_notebook.checks.model_state.LARGE", 4)
    model = Held()
    model.view_of_weight = model.second.weight.detach()[:1, :1]
    state = ModuleState(model)
    assert not any(isinstance(content, torch.Tensor) for content in state._copies)
    with torch.no_grad():
        model.first.weight.add_(1)
    with pytest.warns(
        StateWarning, match="in Held left one .* Linear writes into its parameter 'weight' while it runs$"
    ):
        state.restore()
    assert str(state.unrepeatable_change()) == "Linear writes into its parameter 'weight' while it runs"
    before, state = model.first.weight.tolist(), ModuleState(model)
    with torch.no_grad():
        model.first.weight.add_(1)
    state.restore()
    assert model.first.weight.tolist() == before


def test_each_write_that_cannot_be_put_back_is_reported() -> None:
    model = Held()
    model.spread = torch.zeros(1).expand(2, 3)  # it has one number for all, so no copy can be written back
    for _ in range(2):
        state = ModuleState(model)
        model.spread[:, :1].unsqueeze(0)[0, 0].add_(1)
        with pytest.warns(StateWarning, match="Held writes into its 'spread'"):
            state.restore()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state.restore()


class Caching(nn.Module):
    """Has a large table, which it only reads, and large caches, one of them in code that is not seen call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(64.0))
        self.register_buffer("keys", torch.zeros(64))
        self.values, self.hidden, self.length = [torch.zeros(64)], torch.jit.script(Hidden()), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keys[self.length] = x.sum()
        self.values[0].data[self.length] += 2
        self.length += 1
        return x * self.keys.sum() + self.values[0].sum() + self.table[0] + self.hidden(x)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(1)
        return x + self.total[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_of_large_tensors_those_are_copied_that_the_capture_writes_into(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("graphpatch_notebook.checks.model_state.LARGE", "graphpatch_notebook.capture.held_values.LARGE"):
        monkeypatch.setattr(place, 100)
    model, x = Caching(), torch.ones(3)
    pg = PatchableGraph(model, x)
    state = ModuleState(model)
    held = zip(state._walk.tensors, state._copies, strict=True)
    copied_ones = {name for (_, _, name), content in held if content is not None}
    assert copied_ones == {"_buffers.keys", "values.0", "_buffers.total"}
    reference = Caching()
    reference(x)
    pg.verify(x)
    pg.sweep({"cell": range(2)}, lambda cell: {"output": AddPatch(value=cell)}, x, metric=lambda out: out.sum())
    for _ in range(2):
        reference(x)
    assert torch.equal(model(x), reference(x))


def test_a_quick_look_at_one_module() -> None:
    model = Held().eval()
    state = ModuleState(model, is_look=True)
    model.mean.fill_(0)
    assert state.change_in(model.first) is None
    assert str(state.change_in(model)) == "Held writes into its buffer 'mean' while it runs"
    norm = nn.BatchNorm1d(2)
    state = ModuleState(norm, is_look=True)
    norm(torch.randn(3, 2))
    assert state.change_in(norm) is not None


def test_two_states_of_one_model_are_compared() -> None:
    model = Held()
    before = ModuleState(model)
    assert before.difference(ModuleState(model)) is None
    model.mean.add_(1)
    assert before.difference(ModuleState(model)) == "the buffers of Held|mean: 2 of 2 values differ"


def test_values_that_the_model_keeps_are_separated() -> None:
    model = Held()
    state = ModuleState(model)
    value, own, weight = {"kept": [model.mean[:1]]}, torch.ones(2), model.first.weight
    assert state.separated(own) is own
    assert state.separated(weight) is weight
    separated = state.separated(value)
    model.mean.add_(1)
    assert separated["kept"][0].tolist() == [0.0]


@pytest.mark.parametrize("edit", [*EDITS, "a forward of its own", "a weight"])
def test_fingerprints_differ_after(edit: str) -> None:
    model = Held()
    before = Fingerprint(model)
    assert before == Fingerprint(model)
    if edit == "a forward of its own":
        model.first.forward = torch.sin
    elif edit == "a weight":
        nn.init.ones_(model.first.weight)
    elif edit in ("a write into an array", "a module in a list"):  # torch does not count these
        return
    else:
        EDITS[edit][0](model)
    assert before != Fingerprint(model)


def test_fingerprints_differ_where_an_attribute_goes_to_another_module() -> None:
    model = Held()
    model.first.extra = 1
    before = Fingerprint(model)
    del model.first.extra
    model.second.extra = 1
    assert before != Fingerprint(model)


def test_a_fingerprint_keeps_no_tensor_alive() -> None:
    model = Held()
    before = Fingerprint(model)
    model.last = None
    model.last = torch.zeros(2)  # often with the id of the one before
    assert before != Fingerprint(model)


def test_what_the_program_shares_is_left_alone() -> None:
    model = Held()
    model.logger = logging.getLogger("graphpatch_notebook.test_model_state")
    state, handler = ModuleState(model), logging.NullHandler()
    model.logger.addHandler(handler)
    state.restore()
    assert model.logger.handlers == [handler]
    model.logger.removeHandler(handler)


def test_shards_are_left_to_the_one_who_keeps_account_of_them() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, whole = nn.Linear(2, 2), nn.Parameter(torch.ones(2, 2))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,))))
        state = ModuleState(model)
        model.weight = whole  # as FSDP does where it does not shard again after a run
        assert str(state.change()) == "Linear changes its 'weight' while it runs"
        state.restore()
        assert model.weight is whole
    finally:
        torch.distributed.destroy_process_group()
