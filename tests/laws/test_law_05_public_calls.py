"""Law 5 for every public call that runs the model: it leaves what plain forwards leave, or nothing at all.

What a model holds is compared with what an equal model holds that only plain torch ran.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ZeroPatch
from graphpatch_notebook.errors import ExperimentError, GraphPatchError
from graphpatch_notebook.experiments import (
    ablate,
    attribute,
    causal_trace,
    intervene,
    map_batches,
    mean_values,
    record_to,
)
from graphpatch_notebook.notebook.runs import Runs
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.session import Session
from tests.zoo import Call, Case, case_by_name, seed_all
from tests.zoo.submodules import Submodules
from tests.zoo.values import bit_equal

pytestmark = pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")

CASES = [
    case_by_name(name)
    for name in (
        "awkward-window", "awkward-list", "awkward-cache-attribute", "awkward-config", "awkward-buffers-reassigned",
        "awkward-stashed-attribute",
    )
]  # fmt: skip


class Drawing(nn.Module):
    """Draws from torch's, Python's and numpy's generators and from those of its own, in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.generator, self.numpys = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(6, generator=self.generator) + float(self.numpys.random()) + float(np.random.rand())
        return self.drop(self.norm(self.linear(x))) + noise * random.random()


def drawing() -> nn.Module:
    torch.manual_seed(0)
    return Drawing().train()


CASES.append(Case(name="drawing", build=drawing, example=lambda: Call.of(torch.ones(3, 6)), mutates_state=True))


class Writing(Submodules, linear=(6, 6), embedding=partial(nn.Embedding, 9, 6, max_norm=0.5)):
    """Writes into its weights, as codebooks that follow a moving average do, and `torch.nn.Embedding` by itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return self.linear(x) + self.embedding(x.long())[:, 0]


def writing() -> nn.Module:
    torch.manual_seed(0)
    return Writing().eval()


CASES.append(Case(name="writing", build=writing, example=lambda: Call.of(torch.ones(3, 6)), mutates_state=True))


GENERATORS = torch.Generator, np.random.Generator


def _state_of_generator(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else repr(value.bit_generator.state)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Returns all attributes of all modules, gradients of weights, and the state of the random generators."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[f"{path}.{name}"] = _state_of_generator(value) if isinstance(value, GENERATORS) else value
    found["gradients"] = [weight.grad for weight in model.parameters()]
    found["shared"] = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert bit_equal(expected, found) is None


def seed() -> None:
    seed_all(3)
    np.random.seed(3)


class Subject:
    """A captured model, next to an equal one that has seen one plain forward.

    Attributes:
        pg: The graph.
        call: Makes the inputs.
        mutates_state: Whether a run changes the model, or draws numbers.
        reference: The equal model.
    """

    def __init__(self, case: Case) -> None:
        self.call, self.mutates_state = case.example, case.mutates_state
        model, self.reference = case.build(), case.build()
        seed()
        self.pg = self.call().run(functools.partial(PatchableGraph, model))
        self.found = state_of(model)
        seed()
        self.call().run(self.reference)
        self.expected = state_of(self.reference)

    def forwards(self, count: int) -> None:
        for _ in range(count):
            with torch.no_grad():
                self.call().run(self.reference)

    def check(self, action: Callable[[Subject], int]) -> None:
        """Checks that an action leaves what as many plain forwards leave as it says."""
        seed()
        count = action(self)
        found = state_of(self.pg._module)
        seed()
        self.forwards(count)
        assert_same(found, state_of(self.reference))


def number(output: Tensor) -> Tensor:
    return output.double().sum()


def save(subject: Subject, path: Path) -> int:
    file = path / "graph.safetensors"
    subject.pg.save(file)
    PatchableGraph.load(file, model=subject.pg._module)
    return 0


def verify(subject: Subject, _: Path) -> int:
    subject.call().run(subject.pg.verify)
    return 0


def to_fx(subject: Subject, _: Path) -> int:
    call = subject.call()
    with contextlib.suppress(GraphPatchError):  # a refusal is no reason to leave anything behind
        subject.pg.to_fx(call.args, call.kwargs, allow_doubts=True)
    return 0


def sweep(subject: Subject, _: Path) -> int:
    subject.pg.sweep({"cell": range(3)}, lambda _: {"output": ZeroPatch()}, *subject.call().args, metric=number)
    return 3


def ablated(subject: Subject, _: Path) -> int:
    ablate(subject.pg, ["output"], *subject.call().args, metric=number, progress=False)
    return 2  # a run that is recorded, and one cell


def traced(subject: Subject, _: Path) -> int:
    clean, corrupted = subject.call().args, subject.call().args
    causal_trace(subject.pg, clean, corrupted, ["output"], [0, 1], number, position_dim=0, progress=False)
    return 4  # two runs that are recorded, and two cells


def attributed(subject: Subject, _: Path) -> int:
    attribute(subject.pg, number, subject.call().args, subject.call().args)
    return 0


def recorded(subject: Subject, _: Path) -> int:
    with torch.no_grad():
        subject.pg.record(["output"], *subject.call().args)
    return 1


def edited(subject: Subject, _: Path) -> int:
    with torch.no_grad():
        subject.call().run(subject.pg.edit({"output": ZeroPatch()}))
    return 1


def averaged(subject: Subject, _: Path) -> int:
    mean_values(subject.pg, ["output"], [subject.call().args] * 2)
    return 2


def interpret(subject: Subject, _: Path) -> int:
    with torch.no_grad():
        subject.call().run(subject.pg.interpreter().run)
    return 0


def stored(subject: Subject, path: Path) -> int:
    record_to(subject.pg, path / "store", ["output"], [subject.call().args] * 2)
    return 2


def intervened(subject: Subject, _: Path) -> int:
    with torch.no_grad():
        intervene(subject.pg, {"output": nn.Tanh()}, subject.call().args)
    return 1


def swept_in_a_thread(subject: Subject, _: Path) -> int:
    sweep_elsewhere = functools.partial(
        subject.pg.sweep, {"cell": range(3)}, lambda _: {"output": ZeroPatch()}, *subject.call().args, metric=number,
        progress=False,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as executor:
        if subject.mutates_state:  # a refusal leaves nothing behind, either
            with pytest.raises(ExperimentError):
                sweep_elsewhere(executor=executor)
            return 0
        sweep_elsewhere(executor=executor)
    return 3


def mapped_in_a_thread(subject: Subject, _: Path) -> int:
    def one(pg: PatchableGraph, args: Any) -> Tensor:
        with torch.no_grad():
            return pg(*args)

    with ThreadPoolExecutor(1) as executor:
        list(map_batches(subject.pg, one, [subject.call().args] * 2, executor=executor))
    return 2


def run(subject: Subject, _: Path) -> int:
    session = Session(subject.pg)
    session.add(ChosenPatch("output", "zero"))
    runs = Runs(session, dict)
    started = runs.start(None)
    runs.wait(started)
    assert runs.status(started)[0].state == "done"
    return 0


def shown(subject: Subject, _: Path) -> int:
    runs = Runs(Session(subject.pg), dict)
    started = runs.start_activation("output", None, False, None)
    runs.wait(started)
    assert runs.status(started)[0].state == "done"
    return 0


ACTIONS = [save, verify, interpret, to_fx, sweep, ablated, traced, attributed, run, shown]
ACTIONS += [recorded, edited, averaged, stored, intervened, swept_in_a_thread, mapped_in_a_thread]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_capture_leaves_what_a_forward_leaves(case: Case) -> None:
    subject = Subject(case)
    assert_same(subject.found, subject.expected)


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
@each_case
def test_public_calls_leave_what_they_say(case: Case, action: Callable[[Subject, Path], int], tmp_path: Path) -> None:
    subject = Subject(case)
    subject.check(lambda subject: action(subject, tmp_path))


class Countdown:
    """Raises an error in one of its calls. It is called by a model, and not a part of its state."""

    left = -1
    error: type[BaseException] = KeyboardInterrupt

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error("injected")


countdown = Countdown()


class Stops(nn.Module):
    """Raises in the middle of one of its runs, when it has changed itself already."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.runs, self.kept = 0, {"outputs": [torch.zeros(1)]}
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.kept["outputs"].append(torch.rand(1))
        self.total += 1
        countdown()
        return self.linear(x)


def stopping() -> nn.Module:
    torch.manual_seed(0)
    return Stops().eval()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ArithmeticError])
@pytest.mark.parametrize("action", [save, verify, to_fx, attributed, run, shown], ids=lambda action: action.__name__)
def test_errors_and_interrupts_leave_nothing(
    action: Callable[[Subject, Path], int], error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(name="stops", build=stopping, example=lambda: Call.of(torch.ones(3, 6)), mutates_state=True)
    subject = Subject(case)
    monkeypatch.setattr(countdown, "error", error)
    for left in (1, 2):

        def stopped(subject: Subject, left: int = left) -> int:
            countdown.left = left
            with contextlib.suppress(KeyboardInterrupt, ArithmeticError, GraphPatchError, AssertionError):
                action(subject, tmp_path)
            countdown.left = -1
            return 0

        subject.check(stopped)
