"""Law 5 at random points of everything that the engine does: an interrupt leaves nothing behind."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExtractionOptions,
    PatchableGraph,
    ProbePatch,
    ZeroPatch,
    patchable_graph,
)
from graphpatch_notebook.capture.observers import apply_observer, is_swapped, observer
from graphpatch_notebook.execution import context as execution_context
from graphpatch_notebook.execution import innermost
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.torch_compat import function_mode_depth
from tests.fuzz import user_errors
from tests.fuzz.faults import Fault, faults, faults_at_each_line
from tests.fuzz.graph_runs import add_unused_call
from tests.fuzz.test_programs import FIRST_SEED
from tests.fuzz.user_errors import Model, nothing_changes_in_the_process
from tests.laws.captures import (
    each_case,
    identity,
    leaves_its_state_alone,
    run,
    runs_the_same_code_again,
    without_recomputing,
)
from tests.laws.test_law_05_interrupts import interrupted
from tests.zoo import Case, case_by_name
from tests.zoo.values import bit_equal, same_state, snapshot

X = torch.linspace(-1, 1, 12).view(3, 4)
FILES = (__file__, user_errors.__file__)
APPLY = torch.autograd.Function.__dict__["apply"]
quietly = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python swallows some


PATCHES = {
    "inner_0.output|hidden": [ZeroPatch(slice=(..., 0)), ProbePatch()],
    "inner_1.hidden": AddPatch(value=1.0),
    "inner_1.scale": ZeroPatch(slice=1),
    "last.sub_0.linear": CustomPatch(custom_op=lambda t: t.tanh()),
    "add": AddPatch(value=0.5, slice=0),
}


class Setting:
    """A model, what it gives, and what must still be so after a fault."""

    def __init__(
        self, model: nn.Module, capture: Callable[[nn.Module], PatchableGraph], run: Callable[[Any], Any], patches: Any
    ) -> None:
        self.model, self.capture, self.run, self.patches = model, capture, run, patches
        self.unpatched = run(model)
        self.pg = capture(model)
        self.before = snapshot(model)
        self.patched = self.run_patched()

    def run_patched(self) -> Any:
        with self.pg.patch(self.patches):
            return self.run(self.pg)

    def check(self, where: str) -> None:
        """Nothing is left, and the next runs are right."""
        assert same_state(self.model, self.before) is None, where
        assert observer.get() is None, where
        assert apply_observer.get() is None, where
        assert function_mode_depth() == 0, where
        assert torch.autograd.Function.__dict__["apply"] is APPLY, where
        assert not any(is_swapped(module) for module in self.model.modules()), where
        assert innermost(captured(self.pg)) is None, where
        assert bit_equal(self.run(self.model), self.unpatched) is None, where
        assert bit_equal(self.run_patched(), self.patched) is None, where


def setting(model: nn.Module, *options: Any) -> Setting:
    return Setting(model, lambda module: PatchableGraph(module, *options, X), lambda module: module(X), PATCHES)


def capture_(now: Setting) -> None:
    now.capture(now.model)


def live_run(now: Setting) -> None:
    now.run_patched()


def backward(now: Setting) -> None:
    with now.pg.patch(now.patches):
        torch.autograd.grad(now.pg(X).sum(), now.model.inner.scale)  # type: ignore[union-attr, arg-type]


def verify(now: Setting) -> None:
    now.pg.verify(X)


def to_fx(now: Setting) -> None:
    with now.pg.patch({"inner_1.hidden": AddPatch(value=1.0)}):
        now.pg.to_fx((X,))


def save_and_load(now: Setting) -> None:
    with tempfile.TemporaryDirectory() as folder:
        now.pg.save(f"{folder}/graph.safetensors")
        PatchableGraph.load(f"{folder}/graph.safetensors", model=now.model, allow=["tests.fuzz.user_errors"])


def interpret(now: Setting) -> None:
    now.pg.interpreter().run(X)


ACTIONS = [capture_, live_run, backward, verify, to_fx, save_and_load, interpret]


def strain(
    now: Setting,
    action: Callable[[Setting], object],
    count: int,
    seed: int = 0,
    files: tuple[str, ...] = (),
    error: type[BaseException] = KeyboardInterrupt,
) -> int:
    """Interrupts an action at `count` random points, and looks after each; returns how many came.

    Each time on a new graph, whose code is not made yet.
    """

    return look_after_each(now, faults(anew(now, action), count, seed, files, error))


def anew(now: Setting, action: Callable[[Setting], object]) -> Callable[[], Callable[[], object]]:
    def make_action() -> Callable[[], object]:
        now.pg = now.capture(now.model)
        return functools.partial(action, now)

    return make_action


def look_after_each(now: Setting, all_faults: Iterator[tuple[Fault, Callable[[], None]]]) -> int:
    came = 0
    for fault, act in all_faults:
        with nothing_changes_in_the_process():
            act()
        came += fault.came
        now.check(f"{fault.where}, line {fault.at}")
    return came


@quietly
@pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")
@pytest.mark.parametrize("action", ACTIONS)
def test_interrupts_of_what_a_graph_does(action: Callable[[Setting], None]) -> None:
    assert strain(setting(Model()), action, 8, files=FILES) > 3


@quietly
@pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")
@pytest.mark.parametrize("action", ACTIONS)
def test_lack_of_memory(action: Callable[[Setting], None]) -> None:
    """Errors that may come anywhere, and that code which handles errors of the model handles, too."""
    assert strain(setting(Model()), action, 4, files=FILES, error=MemoryError) > 1


@quietly
def test_interrupts_of_graph_runs() -> None:
    model = Model(has_hooks=False)
    now = setting(model, ExtractionOptions(postprocessing_function=add_unused_call))
    assert strain(now, live_run, 8, files=FILES) > 3


@quietly
@pytest.mark.parametrize("file", [patchable_graph.__file__, execution_context.__file__])
def test_interrupts_at_the_beginning_and_end_of_an_unpatched_run_of_graphs(file: str) -> None:
    model = Model(has_hooks=False)
    now = setting(model, ExtractionOptions(postprocessing_function=add_unused_call))
    at = 0
    while interrupted(lambda: now.pg(X), at, file):
        now.check(str(at))
        at += 1
    assert at > 10  # so many places there are at least


TAKE_BACK = ("interrupts.py", "observers.py", "modules.py", "running.py", "interpretation.py", "verification.py")


@quietly
@pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")
@pytest.mark.parametrize("action", [verify, interpret])
def test_interrupts_at_each_line_of_what_takes_things_back(action: Callable[[Setting], None]) -> None:
    patches = {"linear": ZeroPatch()}
    now = Setting(nn.Linear(4, 4), lambda module: PatchableGraph(module, X), lambda module: module(X), patches)
    assert look_after_each(now, faults_at_each_line(anew(now, action), TAKE_BACK)) > 20


class Noisy(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(4)


def test_interrupts_leave_buffers_and_random_numbers_as_they_were() -> None:
    model = Noisy(4)
    pg = PatchableGraph(model, X)
    before, random_state = snapshot(model), torch.get_rng_state()
    for fault, act in faults_at_each_line(lambda: lambda: pg.verify(X), ("observers.py", "model_state.py")):
        act()
        assert same_state(model, before) is None, fault.where
        assert torch.equal(torch.get_rng_state(), random_state), fault.where


def generating() -> Setting:
    case = case_by_name("gpt2-eager")
    call, ids = case.example(), torch.tensor([[5, 6, 7]])
    settings = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    patches = {
        "transformer.h_0.output": AddPatch(value=1.0, steps="decoding"),
        "transformer.h_1.mlp.act.mul_3": ZeroPatch(),
    }
    return Setting(
        case.build(),
        lambda model: call.run(functools.partial(PatchableGraph, model)),
        lambda module: module.generate(ids, **settings),
        patches,
    )


@quietly
def test_interrupts_of_generation() -> None:
    assert strain(generating(), Setting.run_patched, 3) > 1


@quietly
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")
@pytest.mark.parametrize("action", [*ACTIONS, Setting.run_patched])
def test_many_interrupts(action: Callable[[Setting], None]) -> None:
    strain(setting(Model()), action, 1000, FIRST_SEED, FILES)


@quietly
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")
@pytest.mark.parametrize("action", [capture_, live_run, backward, verify, to_fx, interpret, Setting.run_patched])
def test_interrupts_at_each_line(action: Callable[[Setting], None]) -> None:
    now = setting(Model())
    look_after_each(now, faults_at_each_line(anew(now, action), files=FILES))


@quietly
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")
@pytest.mark.parametrize("action", ACTIONS)
def test_lack_of_memory_at_many_points(action: Callable[[Setting], None]) -> None:
    strain(setting(Model()), action, 300, FIRST_SEED, FILES, MemoryError)


@quietly
@pytest.mark.exhaustive
def test_many_interrupts_of_generation() -> None:
    strain(generating(), Setting.run_patched, 300, FIRST_SEED)


def of_the_zoo(case: Case) -> Setting:
    """A model of the zoo, with a patch on an operation of every kind of module in it."""
    model = case.build()
    pg = run(functools.partial(PatchableGraph, model), case.example())
    kinds = {}
    for path, meta in pg.nodes.items():
        if meta.kind in ("op", "output") and meta.shape is not None and "|" not in path:
            kinds.setdefault(path.split(".")[-1], path)
    return Setting(
        model,
        lambda module: run(functools.partial(PatchableGraph, module), case.example()),
        lambda module: run(module, case.example()),
        {path: identity() for path in list(kinds.values())[:12]},
    )


@quietly
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")
@each_case(lambda case: leaves_its_state_alone(case) and runs_the_same_code_again(case))
@pytest.mark.parametrize("action", [capture_, live_run])
def test_interrupts_over_the_zoo(case: Case, action: Callable[[Setting], None]) -> None:
    now = of_the_zoo(case)
    with without_recomputing(case):
        strain(now, action, 20, FIRST_SEED)
