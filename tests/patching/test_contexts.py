"""Patch contexts: who is told of calls in them, and what is left of them when their block has ended."""

from __future__ import annotations

import contextvars
import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    Patch,
    PatchableGraph,
    ProbePatch,
    RecordPatch,
    ZeroPatch,
)
from graphpatch_notebook.errors import GraphPatchError, PatchNotFiredError
from tests.zoo import case_by_name
from tests.zoo.case import tokens
from tests.zoo.submodules import Submodules
from tests.zoo.transformers_models import with_cache

X = torch.linspace(-1, 1, 6).view(2, 3)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.between: Callable[[], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if self.between is not None:
            self.between()
        return self.last(hidden * 2)

    def both(self, x: Tensor) -> Tensor:
        return self(x) + self(x + 1)


@pytest.fixture
def pg() -> PatchableGraph:
    return PatchableGraph(Stack(), X)


# -- told after each call ----------------------------------------------------------------------------------------------


def test_after_call_runs_after_each_call_with_its_results(pg: PatchableGraph) -> None:
    probe, told = ProbePatch(), []
    context = pg.patch({"mul": probe})
    context.after_call = lambda: told.append((probe.activation, threading.current_thread()))
    pg(X)
    with context:
        assert told == []
        pg(X)
        assert len(told) == 1
        pg(X * 2)
        pg._module(X)
    pg(X)
    assert [thread for _, thread in told] == [threading.current_thread()] * 2
    assert torch.equal(told[0][0], torch.relu(pg._module.first(X)) * 2)
    assert torch.equal(told[1][0], torch.relu(pg._module.first(X * 2)) * 2)


# -- contexts that were left -------------------------------------------------------------------------------------------


def test_a_call_that_outlives_the_block_is_an_error(pg: PatchableGraph) -> None:
    """In a thread that was given the context: its first half ran patched, its second half did not."""
    is_running, block_has_ended = threading.Event(), threading.Event()

    def wait() -> None:
        is_running.set()
        assert block_has_ended.wait(60)

    pg._module.between = wait
    with ThreadPoolExecutor(1) as pool:
        with pg.patch({"first.output": ZeroPatch(), "last.output": ZeroPatch()}):
            call = pool.submit(contextvars.copy_context().run, pg, X)
            assert is_running.wait(60)
        block_has_ended.set()
        with pytest.raises(GraphPatchError):
            call.result()


def test_recomputation_after_the_block_takes_no_patches(pg: PatchableGraph) -> None:
    """What runs again in backward belongs to no block that has ended."""

    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False)

    pg = PatchableGraph(Checkpointed(), X)
    x = X.clone().requires_grad_()
    with pg.patch({"last.output": AddPatch(1.0)}):
        pg(x).sum().backward()
        copied = contextvars.copy_context()
    expected = torch.autograd.grad(pg._module(x).sum(), x)[0]
    with pg.patch({"first.output": ZeroPatch()}):  # swaps the forward of what runs again over there
        loss = copied.run(pg, x).sum()
        found = copied.run(torch.autograd.grad, loss, x)[0]
    assert torch.equal(found, expected)


class Recomputed(Submodules, linear=(3, 3)):
    def forward(self, x: Tensor, times: int = 1) -> Any:
        for _ in range(times):
            x = checkpoint(self.linear, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("times", [1, 2])
def test_a_recomputation_that_may_be_of_another_call_is_an_error(times: int) -> None:
    pg, x = PatchableGraph(Recomputed(), X, times), X.clone().requires_grad_()
    warnings.filterwarnings("ignore", ".checkpoint")  # backward did not run in the end
    with pg.patch({"linear.output" if times == 1 else "linear_1.output": ZeroPatch(slice=0)}):
        if times == 1:
            found = torch.autograd.grad(pg(x, times).sum(), x)[0]
            assert not found[0].any()
            assert torch.equal(found[1], pg._module.linear.weight.sum(0))
            pg._module(x)  # without patches, and backward may be of this
        loss = pg(x, times).sum()
        with pytest.raises(GraphPatchError):
            loss.backward()


# -- functions in patches that call the model --------------------------------------------------------------------------


class Twice(nn.Module):
    """Calls `inner` twice; `edits` are functions for the values of these names, in order of the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.act = nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh()
        self.edits: dict[str, Callable[[Tensor], Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        edit = self.edits.get
        x = edit("x", torch.clone)(x)
        first = edit("first.output", torch.clone)(self.first(x))
        hidden = edit("hidden", torch.clone)(first * 2)
        inner = edit("inner_0.output", torch.clone)(self.inner(hidden))
        inner = edit("inner_1.output", torch.clone)(self.inner(self.act(inner)))
        return edit("output", torch.clone)(inner)


OTHERS = [{}, {"inner_0.output": 2.0, "hidden": 0.5, "inner_1.output": 1.0}]


@pytest.mark.parametrize("called", ["inner", "whole"])
@pytest.mark.parametrize("others", OTHERS, ids=str)
@pytest.mark.parametrize("path", ["x", "first.output", "hidden", "inner_0.output", "output"])
def test_what_a_patch_calls_is_not_patched_or_counted(path: str, others: dict[str, float], called: str) -> None:
    model, plain = Twice(), Twice()
    plain.load_state_dict(model.state_dict())
    edited = copy.deepcopy(plain)
    pg = PatchableGraph(model, X)

    def adds(of: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda value: value + (of if called == "whole" else of.get_submodule("inner"))(value)

    edited.edits = {name: (lambda value, by=by: value + by) for name, by in others.items()}
    edited.edits[path] = _in_order(edited.edits.get(path), adds(plain))
    patches: dict[str, list[Patch[Any]]] = {name: [AddPatch(by)] for name, by in others.items()}
    patches.setdefault(path, []).append(CustomPatch(adds(model)))
    probes = {name: ProbePatch() for name in ("inner_0.output", "inner_1.output")}
    with pg.patch(patches, strict=True), pg.patch(probes, strict=True):
        found = pg(X)
    assert torch.equal(found, edited(X))
    kept: dict[str, Tensor] = {}
    for name in probes:
        edited.edits[name] = _in_order(edited.edits.get(name), lambda value, name=name: kept.setdefault(name, value))
    edited(X)
    assert all(torch.equal(probe.activation, kept[name]) for name, probe in probes.items())


def _in_order(*functions: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor]:
    def run(value: Tensor) -> Tensor:
        for function in functions:
            value = value if function is None else function(value)
        return value

    return run


@torch.no_grad()
def test_blocks_one_after_the_other_in_a_block_count_on() -> None:
    """A loop that generates may enter a block for each step."""
    pg = PatchableGraph(case_by_name("llama-sdpa").build(), tokens(1, 4))
    record, output, counts = RecordPatch(steps=[2]), None, []
    with pg.patch({}):
        for _ in range(4):
            past = None if output is None else output.past_key_values
            with pg.patch({"model.layers_0.output": record}).quiet():
                output = pg(tokens(1, 4 if past is None else 1), use_cache=True, **with_cache(pg._module, past))
            counts.append(len(record.activations))
    assert counts == [0, 0, 1, 1]


# -- contexts with the same paths, one after the other and in each other -----------------------------------------------

PATHS = ["x", "first.weight", "first.output", "relu", "mul", "output"]


class Branches(Stack):
    """Comes to `relu` for some inputs only."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last((torch.relu(hidden) if x.sum() > -100 else hidden) * 2)


def expected(model: Stack, x: Tensor) -> list[Tensor]:
    hidden = model.first(x)
    return [x, model.first.weight, hidden, hidden.relu(), hidden.relu() * 2, model.last(hidden.relu() * 2)]


@pytest.mark.parametrize("kind", [ProbePatch, RecordPatch])
def test_contexts_with_the_same_paths_have_values_of_their_own(kind: type[Patch[Any]]) -> None:
    model = Branches()
    pg = PatchableGraph(model, X)
    inputs = [X, X + 1, torch.cat([X, X])]  # the last one has another size
    kept = []
    for x in inputs:
        kept.append({path: kind() for path in PATHS})
        with torch.no_grad(), pg.patch(kept[-1]):
            pg(x)
    with torch.no_grad():
        for x, patches in zip(inputs, kept, strict=True):
            values = [patch.values_kept() for patch in patches.values()]
            assert [len(each) for each in values] == [1] * len(PATHS)
            assert all(map(torch.equal, [value for (value,) in values], expected(model, x)))


def test_blocks_with_the_same_paths_in_each_other_keep_the_value_in_each() -> None:
    pg = PatchableGraph(Branches(), X)
    outer, inner, later = ({path: RecordPatch() for path in PATHS} for _ in range(3))
    with pg.patch(outer):
        with pg.patch(inner):
            pg(X)
        pg(X + 1)
        with pg.patch({"first.output": ZeroPatch()}), pg.patch(later):
            pg(X)
    assert [len(patch.activations) for patch in (*outer.values(), *inner.values(), *later.values())] == [
        *[3] * len(PATHS), *[1] * len(PATHS), *[1] * len(PATHS),
    ]  # fmt: skip
    assert torch.equal(later["relu"].activations[0], torch.zeros(2, 3))
    assert torch.equal(outer["first.output"].activations[0], inner["first.output"].activations[0])


def test_a_patch_of_a_later_context_that_never_fires_is_reported_by_its_path() -> None:
    pg = PatchableGraph(Branches(), X)
    for x, unfired in ((X, []), (X - 1000, ["relu"]), (X, []), (X - 1000, ["relu"])):
        with pg.patch({path: ProbePatch() for path in PATHS}, strict=True):
            if not unfired:
                pg(x)
                continue
            with pytest.raises(PatchNotFiredError) as caught:
                pg(x)
            assert list(caught.value.paths) == unfired


def test_a_context_does_not_keep_the_values_of_those_before_it() -> None:
    pg = PatchableGraph(Branches(), X)
    first = {path: ProbePatch() for path in PATHS}
    with torch.no_grad(), pg.patch(first):
        pg(X)
    value = weakref.ref(first["relu"].activation)
    del first
    with torch.no_grad(), pg.patch({path: ProbePatch() for path in PATHS}):
        pg(X)
    gc.collect()
    assert value() is None
