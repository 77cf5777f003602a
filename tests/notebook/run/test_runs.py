"""*Run*: what it runs on, what it reports, what it leaves behind; interrupts, progress, threads."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ZeroPatch
from graphpatch_notebook.errors import ChosenPatchError, SessionError
from graphpatch_notebook.notebook.run.runs import Runs
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import Origin
from graphpatch_notebook.notebook.session.session import Session
from tests.notebook.replies import received
from tests.notebook.shells import Mlp
from tests.noted import Noted
from tests.zoo.values import same_state, snapshot

X = torch.arange(12.0).reshape(3, 4) / 10


@pytest.fixture
def pg() -> PatchableGraph:
    return PatchableGraph(Mlp().eval(), X.clone())


def session_of(pg: PatchableGraph, *patches: ChosenPatch, arguments: str | None = None) -> Session:
    session = Session(pg, Origin("pg", "model", arguments))
    session.extend(patches)
    return session


def zero(path: str = "up.linear", **fields: Any) -> ChosenPatch:
    return ChosenPatch(path, "zero", **fields)


def probe(path: str, name: str, **fields: Any) -> ChosenPatch:
    return ChosenPatch(path, "probe", name=name, **fields)


def ran(runs: Runs, inputs: str | None = None) -> dict[str, Any]:
    number = runs.start(inputs)
    runs.wait(number, 20)
    return received(runs.status(number))[0]


def done(runs: Runs, inputs: str | None = None) -> dict[str, Any]:
    status = ran(runs, inputs)
    assert status["state"] == "done", status
    return status["report"]


def by_hook(model: nn.Module, module: nn.Module, x: Tensor) -> Tensor:
    """What zeroing the output of `module` gives, by a plain hook."""
    with module.register_forward_hook(lambda *call: torch.zeros_like(call[2])), torch.no_grad():
        return model(x)


# --------------------------------------------------------------------------------------------------------------------
# Numbers


def test_a_run_compares_the_model_without_and_with_the_patches(pg: PatchableGraph) -> None:
    runs = Runs(session_of(pg, zero()), dict)
    report = done(runs)
    expected, plain = by_hook(pg._module, pg._module.up, X), pg._module(X).detach()
    assert runs.last is not None
    assert torch.equal(runs.last.output, expected)
    assert torch.equal(runs.last.unpatched_output, plain)
    (change,) = report["changes"]
    assert change["path"] == "output"
    assert change["norm_difference"] == pytest.approx(float((expected - plain).double().norm()), rel=1e-12)
    assert (report["call"], report["patches"], report["warnings"], report["tokens"]) == ("pg(...)", [1], [], None)
    assert report["seconds"] > 0


def test_without_patches_nothing_changes(pg: PatchableGraph) -> None:
    session = session_of(pg, zero(is_enabled=False))
    report = done(Runs(session, dict))
    assert report["patches"] == []
    assert report["changes"][0]["norm_difference"] == 0
    assert report["changes"][0]["largest"] == []


def test_a_value_that_cannot_be_evaluated_starts_nothing(pg: PatchableGraph) -> None:
    runs = Runs(session_of(pg, ChosenPatch("output", "add", value="nowhere")), dict)
    with pytest.raises(SessionError, match="#1 .*nowhere"):
        runs.start(None)
    with pytest.raises(SessionError, match="run 1 is not available"):
        received(runs.status(1))


# --------------------------------------------------------------------------------------------------------------------
# Probes


def test_probes_and_records_fill_their_variables(pg: PatchableGraph) -> None:
    variables: dict[str, Any] = {}
    session = session_of(
        pg, zero(slice="0"), probe("up.linear", "h", slice=":, :2"), ChosenPatch("hidden", "record", name="every")
    )
    runs = Runs(session, lambda: variables)
    number = runs.start(None)
    runs.wait(number)
    status, buffers = received(runs.status(number))
    expected = pg._module.up(X).detach()
    expected[0] = 0
    assert torch.equal(variables["h"], expected[:, :2])
    assert torch.equal(variables["every"][0], torch.relu(expected))
    assert runs.last is not None
    assert runs.last.activations.keys() == {"h", "every"}
    first, second = status["report"]["probes"]
    assert (first["number"], first["name"], first["path"], first["note"]) == (2, "h", "up.linear", None)
    assert first["statistics"]["shape"] == [3, 2]
    assert (first["plot"]["buffer"], second["plot"]["buffer"]) == (0, 1)
    values = torch.frombuffer(bytearray(buffers[1]), dtype=torch.float32).reshape(3, 8)
    assert torch.equal(values, torch.relu(expected))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, flag: bool = True) -> Tensor:
        return self.a(x) if flag else self.b(x)


def test_a_probe_that_never_fired_is_reported_and_has_no_old_result() -> None:
    pg = PatchableGraph(Branches(), X)
    variables: dict[str, Any] = {"x": X}
    runs = Runs(session_of(pg, probe("a.linear", "h")), lambda: variables)
    done(runs)
    assert "h" in variables
    report = done(runs, "x, flag=False")
    assert report["call"] == "pg(x, flag=False)"
    assert "h" not in variables
    assert report["probes"][0]["statistics"] is None
    assert report["probes"][0]["note"] == "it did not fire in this run"
    assert any("never fired" in warning and "'a.linear'" in warning for warning in report["warnings"])


# --------------------------------------------------------------------------------------------------------------------
# Inputs


def test_typed_inputs_come_first_then_given_ones_then_the_example(pg: PatchableGraph) -> None:
    variables: dict[str, Any] = {"other": X + 5}
    session = session_of(pg)
    runs = Runs(session, lambda: variables, inputs=X + 1)
    for typed, expected in (("other * 2", (X + 5) * 2), (None, X + 1), ("  ", X + 1)):
        done(runs, typed)
        assert runs.last is not None
        assert torch.equal(runs.last.output, pg._module(expected).detach())
    done(plain := Runs(session, lambda: variables))
    assert plain.last is not None
    assert torch.equal(plain.last.output, pg._module(X).detach())


@pytest.mark.parametrize("given", [(X + 1,), {"x": X + 1}, X + 1])
def test_given_inputs_are_a_tuple_a_dict_or_one_value(pg: PatchableGraph, given: Any) -> None:
    runs = Runs(session_of(pg), dict, inputs=given)
    assert runs.no_inputs is None
    done(runs)
    assert runs.last is not None
    assert torch.equal(runs.last.output, pg._module(X + 1).detach())


@pytest.mark.parametrize(
    ("typed", "match"),
    [
        ("nothing", "unknown variable 'nothing'"),
        ("1 +", "not the arguments of a call"),
        (") + f(", "not the arguments of a call"),
        ("x)(x", "not the arguments of a call"),
        ("y := 1", "cannot await, yield or assign|no arguments"),
        ("x / 0 if False else 1 / 0", "ZeroDivisionError"),
        ("x, x=", "not the arguments of a call"),
    ],
)
def test_inputs_that_cannot_be_evaluated_start_nothing(pg: PatchableGraph, typed: str, match: str) -> None:
    with pytest.raises(ChosenPatchError, match=match) as caught:
        Runs(session_of(pg), lambda: {"x": X}).start(typed)
    assert caught.value.field == "inputs"


def test_without_example_inputs_the_arguments_of_the_user_count(tmp_path: Any, pg: PatchableGraph) -> None:
    pg.save(tmp_path / "mlp.safetensors")
    loaded = PatchableGraph.load(tmp_path / "mlp.safetensors")
    runs = Runs(session_of(loaded, zero(), arguments=None), dict)
    assert "no example inputs" in str(runs.no_inputs)
    with pytest.raises(SessionError, match="there are no example inputs for this graph; type"):
        runs.start(None)
    runs = Runs(session_of(loaded, zero(), arguments="y, extraction_options=options"), lambda: {"y": X})
    assert runs.no_inputs is None
    assert done(runs)["call"] == "pg(y)"
    assert runs.last is not None
    assert torch.equal(runs.last.output, by_hook(pg._module, pg._module.up, X))


class Writes(nn.Module):
    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(x.clone())
        return x.add_(1) * len(kept)


def test_each_call_works_on_a_copy_of_the_inputs() -> None:
    x, kept = torch.zeros(2), [torch.ones(1)]
    pg = PatchableGraph(Writes(), torch.zeros(2), [])
    runs = Runs(session_of(pg, ChosenPatch("output", "add", value="1")), lambda: {"x": x, "kept": kept})
    done(runs, "x, kept")
    assert runs.last is not None
    assert (x.tolist(), len(kept)) == ([0, 0], 1)
    assert (runs.last.unpatched_output.tolist(), runs.last.output.tolist()) == ([2, 2], [3, 3])
    with pytest.raises(SessionError, match="argument 0"):  # by the capture
        runs.start(None)


# --------------------------------------------------------------------------------------------------------------------
# What is left behind


class Training(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.drop, self.linear = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.drop(self.norm(x)))


def test_a_run_in_train_mode_leaves_buffers_and_random_numbers_alone() -> None:
    model = Training().train()
    pg = PatchableGraph(model, X)
    runs = Runs(session_of(pg, zero("linear.bias")), dict)
    torch.manual_seed(3)
    before, state = snapshot(model), torch.get_rng_state()
    done(runs)
    assert same_state(model, before) is None
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert runs.last is not None
    # The same numbers were dropped in both calls.
    assert torch.allclose(runs.last.unpatched_output - runs.last.output, model.linear.bias.expand(3, 4), atol=1e-6)


def test_an_error_of_the_model_is_reported_with_its_line(pg: PatchableGraph) -> None:
    variables: dict[str, Any] = {"x": torch.ones(3, 5)}
    runs = Runs(session_of(pg, zero(), probe("hidden", "h")), lambda: variables)
    before = snapshot(pg._module)
    status = ran(runs, "x")
    assert (status["state"], status["report"]) == ("failed", None)
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in status["error"]
    assert "shells.py" in status["error"]
    assert "self.up(x)" in status["error"]
    assert same_state(pg._module, before) is None
    assert runs.last is None
    assert "h" not in variables
    done(runs)


def test_an_error_of_a_patch_is_reported(pg: PatchableGraph) -> None:
    runs = Runs(session_of(pg, ChosenPatch("hidden", "replace", value="torch.ones(7)")), lambda: {"torch": torch})
    status = ran(runs)
    assert status["state"] == "failed"
    assert "hidden" in status["error"]


# --------------------------------------------------------------------------------------------------------------------
# While it goes on


class Layer(nn.Module):
    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            time.sleep(self.seconds / 10)
        return x + 1


class Slow(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> PatchableGraph:
    graph = PatchableGraph(Slow(20).eval(), torch.zeros(2))
    monkeypatch.setattr(Layer, "seconds", 0.01)
    return graph


def polled(runs: Runs, number: int) -> list[dict[str, Any]]:
    found = []
    while not found or found[-1]["state"] == "running":
        found.append(received(runs.status(number))[0])
        time.sleep(0.002)
    return found


def test_progress_is_seen_from_outside(slow: PatchableGraph) -> None:
    runs = Runs(session_of(slow, zero("layers_3.output")), dict)
    statuses = polled(runs, runs.start(None))
    assert statuses[-1]["state"] == "done"
    assert [fraction for fraction, _ in itertools.groupby(status["fraction"] for status in statuses)] == [None, 0.5, 1]
    assert runs.last is not None
    assert runs.last.output.tolist() == [16, 16]


def test_only_one_run_is_active_at_a_time(slow: PatchableGraph) -> None:
    runs = Runs(session_of(slow), dict)
    number = runs.start(None)
    with pytest.raises(SessionError, match="a run is in progress; wait for it to finish, or interrupt it"):
        runs.start(None)
    runs.interrupt(number)
    again = runs.start(None)  # waits for the end of the one that was interrupted
    runs.wait(again)
    assert received(runs.status(number))[0]["state"] == "interrupted"
    assert received(runs.status(again))[0]["state"] == "done"


@pytest.mark.parametrize("delay", [0.0, 0.03, 0.1, 0.25, 0.3])
def test_an_interrupt_leaves_nothing_behind(slow: PatchableGraph, delay: float) -> None:
    variables: dict[str, Any] = {}
    session = session_of(slow, zero("layers_3.output"), probe("layers_5.add", "h"))
    runs = Runs(session, lambda: variables)
    before = snapshot(slow._module)
    number = runs.start(None)
    time.sleep(delay)
    runs.interrupt(number)
    runs.wait(number, 10)
    assert received(runs.status(number))[0]["state"] == "interrupted"
    assert received(runs.status(number))[0]["error"] is None
    assert same_state(slow._module, before) is None
    assert (variables, runs.last) == ({}, None)
    assert done(runs)["patches"] == [1, 2]
    assert variables["h"].tolist() == [2, 2]


def test_patches_of_the_main_thread_and_of_a_run_do_not_meet(slow: PatchableGraph) -> None:
    runs = Runs(session_of(slow, zero("layers_10.output")), dict)
    x = torch.zeros(2)
    number = runs.start(None)
    results = []
    while received(runs.status(number))[0]["state"] == "running":
        with slow.patch({"layers_18.output": ZeroPatch()}):
            results.append(slow(x)[0].item())
        results.append(slow(x)[0].item())
    assert len(results) >= 2
    assert results == [1, 20] * (len(results) // 2)
    assert runs.last is not None
    assert (runs.last.output[0].item(), runs.last.unpatched_output[0].item()) == (9, 20)


def test_the_graph_lives_no_longer_than_its_variable() -> None:
    graph = PatchableGraph(Mlp(), X)
    session = Session(graph, Origin("pg"))
    runs = Runs(session, dict)
    polled(runs, runs.start(None))
    del graph
    gc.collect()
    with pytest.raises(SessionError, match="is gone"):
        runs.start(None)


SCRATCH = torch.zeros(3, 4)


class Uncopied(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"out": x * 2, "lock": threading.Lock()}


def test_runs_of_two_graphs_of_one_model_take_turns() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            together.append(1)
            most(len(together))
            time.sleep(0.05)
            together.pop()
            return x + self.count

    together: list[int] = []
    most = Noted()
    model = Counts().eval()
    graphs = [PatchableGraph(model, X), PatchableGraph(model, X + 1)]
    model.count.zero_()
    most.values.clear()
    both = [Runs(session_of(pg, ChosenPatch("output", "add", value="1")), dict) for pg in graphs]
    numbers = [runs.start(None) for runs in both]
    for runs, number in zip(both, numbers, strict=True):
        runs.wait(number, 10)
        assert runs.last is not None
        assert torch.allclose(runs.last.output - runs.last.unpatched_output, torch.ones(3, 4), atol=1e-6)
    assert most.values == [1] * 4
    assert model.count.tolist() == [0]
