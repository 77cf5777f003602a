"""*Run*: what it runs on, what it reports, what it leaves behind; interrupts, progress, threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import ChosenPatchError, SessionError
from graphpatch_notebook.notebook.runs import Runs
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import Origin
from graphpatch_notebook.notebook.session.session import Session
from tests.notebook.replies import received
from tests.notebook.shells import Mlp
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


# --------------------------------------------------------------------------------------------------------------------
# Numbers


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
    assert first["view"]["statistics"]["shape"] == [3, 2]
    assert first["view"]["plot"]["buffer"] == 0
    own = buffers[second["view"]["plot"]["buffer"]]
    values = torch.frombuffer(bytearray(own), dtype=torch.float32).reshape(3, 8)
    assert torch.equal(values, torch.relu(expected))


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


# --------------------------------------------------------------------------------------------------------------------
# While it goes on
