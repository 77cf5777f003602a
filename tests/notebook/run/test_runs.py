"""*Run*: what it runs on, what it reports, what it leaves behind; interrupts, progress, threads."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
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
from graphpatch_notebook.notebook.session.workspace import Results
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


def test_values_are_looked_up_when_the_run_starts(pg: PatchableGraph) -> None:
    variables: dict[str, Any] = {"shift": 2.0, "row": 1}
    runs = Runs(session_of(pg, ChosenPatch("output", "add", slice="row", value="shift")), lambda: variables)
    number = runs.start(None)
    variables |= {"shift": 100.0, "row": 0}
    runs.wait(number)
    assert runs.last is not None
    difference = runs.last.output - runs.last.unpatched_output
    assert difference[1].tolist() == pytest.approx([2.0, 2.0])
    assert difference[[0, 2]].abs().max() == 0


def test_a_value_that_cannot_be_evaluated_starts_nothing(pg: PatchableGraph) -> None:
    runs = Runs(session_of(pg, ChosenPatch("output", "add", value="nowhere")), dict)
    with pytest.raises(SessionError, match="#1 .*nowhere"):
        runs.start(None)
    with pytest.raises(SessionError, match="run 1 is not available"):
        received(runs.status(1))


def test_nothing_requires_gradients(pg: PatchableGraph) -> None:
    runs = Runs(session_of(pg, zero(), probe("hidden", "h")), dict)
    done(runs)
    assert runs.last is not None
    assert not runs.last.output.requires_grad
    assert not runs.last.activations["h"].requires_grad


class Energy(nn.Module):
    """Needs gradients in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        return torch.autograd.grad(self.linear(x).square().sum(), x)[0]


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


def test_a_variable_of_the_users_stays_where_nothing_was_kept() -> None:
    pg = PatchableGraph(Branches(), X)
    variables: dict[str, Any] = {"x": X, "h": "mine"}
    done(Runs(session_of(pg, probe("a.linear", "h")), lambda: variables), "x, False")
    assert variables["h"] == "mine"


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


def test_comprehensions_and_stars_in_inputs_find_the_users_variables(pg: PatchableGraph) -> None:
    runs = Runs(session_of(pg), lambda: {"rows": [X[0], X[1]], "torch": torch, "k": 2})
    done(runs, "*[torch.stack([row * k for row in rows])]  # two rows")
    assert runs.last is not None
    assert torch.equal(runs.last.output, pg._module(X[:2] * 2).detach())


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
    with pytest.raises(SessionError, match="argument 0 was written into"):  # by the capture
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


def test_status_does_not_wait_for_the_model(slow: PatchableGraph) -> None:
    runs = Runs(session_of(slow), dict)
    number = runs.start(None)
    begun = time.perf_counter()
    assert received(runs.status(number))[0]["state"] == "running"
    assert time.perf_counter() - begun < 0.1
    runs.interrupt(number)
    runs.wait(number)


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


def test_the_model_goes_with_its_graph_whoever_still_has_the_runs() -> None:
    """The front end may go away before it has seen the end of a run."""
    graph = PatchableGraph(Mlp().eval(), X.clone())
    session = Session(graph, Origin("pg"))
    given = X + 1
    runs = Runs(session, dict, inputs=given)
    session.add(probe("up.linear", "hidden"))
    model, inputs = weakref.ref(graph._module), weakref.ref(given)
    number = runs.start(None)
    received(runs.status(number))
    runs.wait(number)
    shown = runs.start_activation("up.linear", None, False, None)
    received(runs.status(shown))
    runs.wait(shown)
    del graph, given
    gc.collect()
    assert (model(), inputs(), runs.last) == (None, None, None)
    assert runs._started[shown].job.result._numbers is None  # type: ignore[union-attr]
    assert received(runs.status(shown))[0]["view"]["plot"]["type"] == "heatmap"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T.T


def test_who_writes_into_what_a_probe_of_a_weight_kept_does_not_write_into_the_model() -> None:
    graph, variables = PatchableGraph(Scaled().eval(), X.clone()), {}
    kept = [probe("weight", "whole"), probe("weight", "part", slice="0"), probe(turned_path(graph), "turned")]
    done(Runs(session_of(graph, *kept), lambda: {"x": X, **variables}, results=Results(lambda: variables)))
    for name in ("whole", "part", "turned"):
        assert type(variables[name]) is Tensor
        assert not variables[name].requires_grad
        variables[name].fill_(7)
    assert torch.equal(graph._module.weight, torch.ones(4, 3))


def turned_path(graph: PatchableGraph) -> str:
    return next(path for path, node in graph.nodes.items() if node.shape == (3, 4))


class Keeps(nn.Module):
    """Returns what it keeps, and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.seen = torch.zeros(2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scaled = x * 3
        self.total.add_(scaled)
        self.seen.copy_(scaled)
        return {"total": self.total, "part": self.total[:1], "seen": self.seen}


def test_results_stay_what_they_were_when_buffers_are_put_back() -> None:
    model = Keeps()
    pg = PatchableGraph(model, torch.ones(2))
    model.total.zero_()
    variables: dict[str, Any] = {}
    session = session_of(pg, zero("scaled"), probe("output|total", "total"))
    runs = Runs(session, lambda: variables)
    report = done(runs)
    assert model.total.tolist() == [0, 0]
    assert runs.last is not None
    assert {key: value.tolist() for key, value in runs.last.unpatched_output.items()} == {
        "total": [3, 3],
        "part": [3],
        "seen": [3, 3],
    }
    assert {key: value.tolist() for key, value in runs.last.output.items()} == {
        "total": [0, 0],
        "part": [0],
        "seen": [0, 0],
    }
    assert [change["norm_difference"] > 0 for change in report["changes"]] == [True] * 3
    session.change(1, is_enabled=False)
    done(runs)
    model.total.fill_(7)
    assert variables["total"].tolist() == [3, 3]


def test_results_are_known_to_whoever_shares_them(pg: PatchableGraph) -> None:
    variables: dict[str, Any] = {}
    results = Results(lambda: variables)
    done(Runs(session_of(pg, probe("hidden", "h")), lambda: variables, results=results))
    assert results.is_own("h")
    variables["h"] = 1
    assert not results.is_own("h")


def test_modes_of_the_model_are_not_touched_and_count(pg: PatchableGraph) -> None:
    model = Training().eval()
    graph = PatchableGraph(model, X)
    runs = Runs(session_of(graph), dict)
    torch.manual_seed(1)
    done(runs)
    assert runs.last is not None
    first = runs.last.output
    assert torch.equal(first, model(X).detach())
    model.train()
    done(runs)
    assert not torch.equal(runs.last.output, first)
    assert model.training


def test_old_runs_are_forgotten(pg: PatchableGraph) -> None:
    runs = Runs(session_of(pg), dict)
    first = runs.start(None)
    runs.wait(first)
    for _ in range(10):
        done(runs)
    with pytest.raises(SessionError, match=f"run {first} is not available any more"):
        received(runs.status(first))


def test_warnings_of_the_engine_are_only_in_the_report(recwarn: pytest.WarningsRecorder) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor, n: int = 1) -> Tensor:
            for _ in range(n):
                x = self.a(x)
            return x

    pg = PatchableGraph(Twice(), X)
    runs = Runs(session_of(pg, zero("a.linear")), lambda: {"x": X})
    report = done(runs, "x, 3")
    assert len(report["warnings"]) == 1
    assert "3 times" in report["warnings"][0] or "more often" in report["warnings"][0]
    assert not recwarn.list


SCRATCH = torch.zeros(3, 4)


class Held:
    def __init__(self) -> None:
        self.value = torch.zeros(3, 4)


class Scratch(nn.Module):
    """Returns the same tensor each time, which is no attribute of its own."""

    def __init__(self, is_global: bool) -> None:
        super().__init__()
        self.linear, self.held, self.is_global = nn.Linear(4, 4), Held(), is_global

    def forward(self, x: Tensor) -> Tensor:
        return (SCRATCH if self.is_global else self.held.value).copy_(self.linear(x))


@pytest.mark.parametrize("is_global", [True, False])
def test_the_call_with_the_patches_does_not_write_over_what_the_one_without_returned(is_global: bool) -> None:
    torch.manual_seed(0)
    model = Scratch(is_global).requires_grad_(False)
    pg = PatchableGraph(model, X)
    runs = Runs(session_of(pg, zero("linear.output")), dict)
    (change,) = done(runs)["changes"]
    expected = model.linear(X)
    assert runs.last is not None
    assert torch.equal(runs.last.unpatched_output, expected)
    assert runs.last.output.abs().max() == 0
    assert change["norm_difference"] == pytest.approx(float(expected.norm()))


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


def test_a_run_that_waits_for_one_of_another_graph_can_be_interrupted(slow: PatchableGraph, pg: PatchableGraph) -> None:
    first, second = Runs(session_of(slow), dict), Runs(session_of(pg), dict)
    going = first.start(None)
    waiting = second.start(None)
    second.interrupt(waiting)
    second.wait(waiting, 5)
    assert received(second.status(waiting))[0]["state"] == "interrupted"
    assert received(first.status(going))[0]["state"] == "running"
    first.interrupt(going)
    first.wait(going)
    done(second)
