"""What sweeps leave behind: nothing, however they end; and what else is active while they run counts, or is refused."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, ProbePatch, ZeroPatch
from graphpatch_notebook.capture.observers import is_swapped, observer
from graphpatch_notebook.errors import ExperimentError, GraphPatchWarning
from graphpatch_notebook.patchable_graph import captured as captured_model
from graphpatch_notebook.patching import innermost
from graphpatch_notebook.patching.run import watch
from graphpatch_notebook.torch_compat import function_mode_depth
from tests.experiments.engine.loops import TOLERANCE, disagreement, looped, swept
from tests.integrations.offloaded import INPUT_IDS, SPREAD, gpt2
from tests.integrations.quantized import KINDS, quantized
from tests.zoo import Call
from tests.zoo.case import floats, seeded
from tests.zoo.values import same_state, snapshot

X = floats(2, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.c = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 2
        return self.c(h + self.b(h))


def captured() -> PatchableGraph:
    return PatchableGraph(seeded(Model), X)


def cells() -> list[dict[str, Any]]:
    units = [(..., unit) for unit in range(4)]
    return [
        *({"b.output": ZeroPatch(slice=unit)} for unit in units),
        *({"h": AddPatch(value=1.0, slice=unit)} for unit in units),
        *({"b.sub_0.weight": ZeroPatch(slice=unit)} for unit in units),
        {},
    ]


def total(output: Tensor) -> Tensor:
    return output.square().sum()


def assert_nothing_is_left(pg: PatchableGraph, before: Any, expected: Tensor) -> None:
    assert same_state(pg._module, before) is None
    assert not any(is_swapped(module) for module in pg._module.modules())
    assert innermost(captured_model(pg)) is None
    assert observer.get() is None
    assert watch.get() is None
    assert function_mode_depth() == 0
    assert torch.is_grad_enabled()
    assert torch.equal(pg(X), expected)


def reference() -> tuple[Any, Tensor]:
    pg = captured()
    return looped(pg, cells(), lambda: Call.of(X), total), pg(X)


@pytest.mark.filterwarnings("ignore:.experiment:graphpatch_notebook.GraphPatchWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ArithmeticError])
@pytest.mark.parametrize("place", ["metric", "patch", "model"])
@pytest.mark.parametrize("batch", [None, "auto"])
def test_errors_in_the_middle_leave_nothing(error: type[BaseException], place: str, batch: Any) -> None:
    loop, unpatched = reference()
    for at in range(12):
        pg = captured()
        before = snapshot(pg._module)
        calls: list[int] = []

        def raising(value: Any, at: int = at, calls: list[int] = calls) -> Any:
            calls.append(1)
            if len(calls) == at + 1:
                raise error("injected")
            return value

        maps = cells()
        metric = total
        hook = contextlib.nullcontext()
        if place == "metric":
            metric = lambda output: total(raising(output))  # noqa: E731
        elif place == "patch":
            maps += [{"b.output": CustomPatch(custom_op=raising)} for _ in range(6)]
        else:
            hook = pg._module.b[0].register_forward_pre_hook(lambda module, args, raising=raising: raising(None))
        with hook, contextlib.suppress(error, ExperimentError):
            swept(pg, maps, Call.of(X), metric, batch=batch)
        assert_nothing_is_left(pg, before, unpatched)
        found = swept(pg, cells(), Call.of(X), total, batch=batch)
        assert disagreement(loop, found, 0.0 if batch is None else TOLERANCE) is None


@pytest.mark.parametrize("batch", [None, "auto"])
@pytest.mark.parametrize("path", ["a.output", "h", "c.output", "a.weight", "x", "output", "b.output"])
def test_patches_of_outer_contexts_count(path: str, batch: Any) -> None:
    pg = captured()
    with pg.patch({path: AddPatch(value=0.5)}):
        loop = looped(pg, cells(), lambda: Call.of(X), total)
        found = swept(pg, cells(), Call.of(X), total, batch=batch)
    assert disagreement(loop, found, 0.0 if batch is None else TOLERANCE) is None, found.remarks
    assert (
        disagreement(looped(pg, cells(), lambda: Call.of(X), total), swept(pg, cells(), Call.of(X), total), 2e-6)
        is None
    )


def test_probes_of_outer_contexts_keep_the_last_cell_with_a_remark() -> None:
    pg = captured()
    probe = ProbePatch()
    with pg.patch({"b.output": probe}):
        found = swept(pg, cells(), Call.of(X), total)
    assert probe.activation.shape == (2, 4)
    assert found.remarks


def test_threads_may_sweep_one_graph() -> None:
    pg = captured()
    loop = looped(pg, cells(), lambda: Call.of(X), total)
    others = [{"a.output": AddPatch(value=0.1 * number)} for number in range(9)]
    other_loop = looped(pg, others, lambda: Call.of(X), total)
    start = threading.Barrier(4)

    def work(number: int) -> list[str | None]:
        start.wait()
        wrong = []
        for turn in range(4):
            if (number + turn) % 2:
                wrong.append(disagreement(loop, swept(pg, cells(), Call.of(X), total), TOLERANCE))
            else:
                wrong.append(disagreement(other_loop, swept(pg, others, Call.of(X), total), TOLERANCE))
        return wrong

    before = snapshot(pg._module)
    with ThreadPoolExecutor(4) as pool:
        assert [problem for found in pool.map(work, range(4)) for problem in found if problem] == []
    assert same_state(pg._module, before) is None


def test_the_model_runs_unpatched_in_another_thread_during_a_sweep() -> None:
    pg = captured()
    expected = pg(X).detach()
    wrong: list[Tensor] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with torch.no_grad():
                if not torch.equal(pg(X), expected) or not torch.equal(pg._module(X), expected):
                    wrong.append(expected)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(5):
        swept(pg, cells(), Call.of(X), total)
    stop.set()
    thread.join()
    assert wrong == []


def test_nothing_of_a_sweep_stays_in_memory() -> None:
    pg = captured()
    seen: list[weakref.ref[Tensor]] = []

    def metric(output: Tensor) -> Tensor:
        seen.append(weakref.ref(output))
        return output.sum()

    swept(pg, cells(), Call.of(X), metric)
    gc.collect()
    count = _live_tensors()
    for _ in range(3):
        swept(pg, cells(), Call.of(X), metric)
    gc.collect()
    assert _live_tensors() <= count
    assert not any(reference() is not None for reference in seen)


def _live_tensors() -> int:
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


def test_generators_and_modes_are_left_as_they_were() -> None:
    pg = captured()
    state = torch.get_rng_state()
    with torch.no_grad():
        swept(pg, cells(), Call.of(X), total)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        inside = swept(pg, cells(), Call.of(X), total)
        assert torch.is_inference_mode_enabled()
    assert disagreement(looped(pg, cells(), lambda: Call.of(X), total), inside, TOLERANCE) is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("batch", [None, "auto", 3])
def test_one_failing_cell_leaves_the_others_their_numbers(batch: Any) -> None:
    pg = captured()
    maps = cells()
    maps.insert(3, {"b.output": AddPatch(value=torch.ones(7))})
    maps.insert(6, {"b.output": CustomPatch(custom_op=lambda value: 1 / 0)})
    loop = looped(pg, maps, lambda: Call.of(X), total)
    assert loop.errors[3] is not None
    assert loop.errors[6] == "ZeroDivisionError"
    with pytest.warns(GraphPatchWarning, match="cells failed"):
        found = swept(pg, maps, Call.of(X), total, batch=batch)
    assert disagreement(loop, found, 0.0 if batch is None else TOLERANCE) is None


class Branching(nn.Module):
    """Comes to a part only where the values are large."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor, deep: bool = True) -> Tensor:
        h = self.a(x)
        return self.b(h) if deep else h


@pytest.mark.parametrize("batch", [None, "auto", 3])
def test_patches_that_never_fire_are_reported(batch: Any) -> None:
    pg = PatchableGraph(seeded(Branching), X)
    maps = [{"b.output": AddPatch(value=float(number))} for number in range(6)]
    with pytest.warns(GraphPatchWarning, match=r"b\.output"):
        found = swept(pg, maps, Call.of(X, deep=False), total, batch=batch)
    assert len(set(found.values.tolist())) == 1


@pytest.mark.parametrize("batch", [None, "auto"])
def test_offloaded_weights(batch: Any, tmp_path: Path) -> None:
    model = SPREAD["disk"](gpt2(), tmp_path)
    pg = PatchableGraph(model, input_ids=INPUT_IDS)
    maps = [
        {f"transformer.h_{layer}.{part}": ZeroPatch(slice=(slice(None), position))}
        for layer in range(2)
        for part in ("mlp.output", "output", "attn.c_proj.output")
        for position in (0, 3, -1)
    ]
    maps += [{"transformer.h_1.mlp.c_fc.weight": ZeroPatch(slice=number)} for number in range(3)]
    before = {name: parameter.device for name, parameter in model.named_parameters()}

    def metric(output: Any) -> Tensor:
        return output.logits[:, -1]

    loop = looped(pg, maps, lambda: Call.of(INPUT_IDS), metric)
    found = swept(pg, maps, Call.of(INPUT_IDS), metric, batch=batch)
    assert disagreement(loop, found, 0.0 if batch is None else TOLERANCE) is None, found.remarks
    assert {name: parameter.device for name, parameter in model.named_parameters()} == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [None, "auto", 3])
def test_quantized_weights(kind: str, batch: Any) -> None:
    x = floats(3, 64)
    model = quantized(kind)
    model(x)
    pg = PatchableGraph(model, x)
    maps = [{path: patch} for path, patch in _quantized_cells(pg)]
    loop = looped(pg, maps, lambda: Call.of(x), lambda output: output)
    found = swept(pg, maps, Call.of(x), lambda output: output, batch=batch)
    tolerance = 0.0 if batch is None else 2e-2 if "bfloat16" in kind else TOLERANCE
    assert disagreement(loop, found, tolerance) is None, found.remarks


def _quantized_cells(pg: PatchableGraph) -> list[tuple[str, Any]]:
    cells: list[tuple[str, Any]] = []
    for number in range(4):
        cells += [("x", AddPatch(value=float(number), slice=number % 3)), ("x", ZeroPatch(slice=(..., number)))]
        cells += [("linear.x", AddPatch(value=10.0 * number, slice=(0, number)))]
    return [(path, patch) for path, patch in cells if path in pg.nodes]


class RefillsItsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scratch", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.scratch.fill_(0)
        return self.linear(x) + self.scratch


def test_a_model_in_train_mode_may_write_the_same_into_a_buffer() -> None:
    pg = PatchableGraph(seeded(RefillsItsBuffer).train(), X)
    found = pg.sweep({"value": range(3)}, lambda value: {"linear.output": AddPatch(value=value)}, X, metric=total)
    assert found.attrs["remarks"] == []
    with torch.no_grad():
        assert found.values.tolist() == [float(total(pg(X) + value)) for value in range(3)]


class MakesMasks(nn.Module):
    """Keeps masks that it makes for as many rows as it is given: one of them for the most, one for the first."""

    def __init__(self, keeps_first: bool) -> None:
        super().__init__()
        self.linear, self.keeps_first = nn.Linear(4, 4), keeps_first
        self.largest = self.first = torch.ones(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.largest) < len(x):
            self.largest = torch.ones(len(x), 1)
        if self.keeps_first and not len(self.first):
            self.first = torch.ones(len(x), 1)
        masked = self.linear(x) * self.largest[: len(x)]
        return masked * self.first if self.keeps_first else masked


@pytest.mark.parametrize("keeps_first", [False, True])
def test_a_mask_that_a_model_makes_for_more_rows_is_taken_back(keeps_first: bool) -> None:
    pg = PatchableGraph(seeded(lambda: MakesMasks(keeps_first)), X)
    found = pg.sweep({"value": range(4)}, lambda value: {"linear.output": AddPatch(value=value)}, X, metric=total)
    assert len(captured_model(pg).module.largest) == len(X)
    with torch.no_grad():
        assert found.values.tolist() == [float(total(pg(X) + value)) for value in range(4)]
