"""Law 5 where the user's code raises: in the model, its hooks, its gradients, in patches, metrics and edited graphs."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExtractionOptions,
    PatchableGraph,
    ProbePatch,
    RecordPatch,
    ZeroPatch,
)
from graphpatch_notebook.errors import GraphPatchError
from tests.fuzz.test_programs import FIRST_SEED
from tests.fuzz.user_errors import ERRORS, STEPS, EachOperation, Model, nothing_changes_in_the_process
from tests.zoo.values import bit_equal, same_state, snapshot

X = torch.linspace(-1, 1, 12).view(3, 4)
Action: TypeAlias = "Callable[[Setting], object]"


def bent(t: Tensor) -> Tensor:
    STEPS.step()
    result = t.tanh()
    STEPS.step()
    return result


def patches() -> dict[str, Any]:
    return {
        "inner_0.output|hidden": [ZeroPatch(slice=(..., 0)), CustomPatch(bent), ProbePatch()],
        "inner_1.hidden": CustomPatch(bent, slice=(..., slice(0, 2))),
        "inner_1.scale": CustomPatch(bent),
        "inner_0.x": CustomPatch(bent),
        "inner_0.linear.output": AddPatch(value=1.0),
        "last.sub_0.linear": RecordPatch(),
        "add": AddPatch(value=0.5, slice=0),
        "output": CustomPatch(bent),
    }


class Setting:
    """A model, what it gives, and what must still be so after an error."""

    def __init__(self, *options: Any) -> None:
        STEPS.reset()
        self.options = options
        self.model = Model(has_hooks=not options)  # an edited graph takes no hooks on what it calls
        self.unpatched = self.model(X)
        self.pg = self.captured()
        self.before = snapshot(self.model)
        self.patched = self.run_patched()

    def captured(self) -> PatchableGraph:
        return PatchableGraph(self.model, *self.options, X)

    def run_patched(self) -> Any:
        with self.pg.patch(patches()):
            return self.pg(X)

    def check(self) -> None:
        STEPS.reset()
        assert same_state(self.model, self.before) is None
        assert not self.model.last.training
        assert bit_equal(self.model(X), self.unpatched) is None
        assert bit_equal(self.run_patched(), self.patched) is None
        assert bit_equal(self.pg(X), self.unpatched) is None


def capture_(now: Setting) -> None:
    now.pg = now.captured()


def capture_step_by_step(now: Setting) -> None:
    with EachOperation():  # a part in which the mode raises becomes an `OpaqueGraphModule`, with a warning
        now.captured()


def unpatched(now: Setting) -> None:
    now.pg(X)


def patched(now: Setting) -> None:
    now.run_patched()


def patched_step_by_step(now: Setting) -> None:
    with EachOperation():
        now.run_patched()


def nested(now: Setting) -> None:
    with now.pg.patch({"add": AddPatch(value=1.0)}), torch.no_grad(), now.pg.patch(patches()):
        now.pg(X)
        STEPS.step()
        now.pg(X)


def handled_inside(now: Setting) -> None:
    """The user's code goes on in the block: the next call in it is a whole one."""
    with now.pg.patch(patches()):
        try:
            now.pg(X)
        except (Exception, KeyboardInterrupt, SystemExit):
            STEPS.at = -1
            assert bit_equal(now.pg(X), now.patched) is None
            raise


def backward(now: Setting) -> None:
    with now.pg.patch(patches()):
        torch.autograd.grad(now.pg(X).sum(), now.model.inner.scale)


def told_after_calls(now: Setting) -> None:
    context = now.pg.patch(patches())
    context.after_call = STEPS.step
    with context:
        now.pg(X)


def verify(now: Setting) -> None:
    now.pg.verify(X)


def save(now: Setting) -> None:
    with tempfile.TemporaryDirectory() as folder:
        now.pg.save(f"{folder}/graph.safetensors", check=[((X,), {})])


def interpret(now: Setting) -> None:
    now.pg.interpreter(lambda path, value: STEPS.step()).run(X)


def sweep(now: Setting, **settings: Any) -> None:
    def cell(unit: int) -> dict[str, Any]:
        STEPS.step()
        return {"inner_1.hidden": CustomPatch(bent, slice=(..., unit)), "last.output": AddPatch(value=1.0)}

    def metric(output: Tensor) -> Tensor:
        STEPS.step()
        return output.sum()

    now.pg.sweep({"unit": range(3)}, cell, X, metric=metric, progress=False, **settings)


def sweep_by_loop(now: Setting) -> None:
    sweep(now, batch=None)


ACTIONS: list[Action] = [
    capture_,
    capture_step_by_step,
    unpatched,
    patched,
    patched_step_by_step,
    nested,
    handled_inside,
    backward,
    told_after_calls,
    verify,
    save,
    interpret,
    sweep,
    sweep_by_loop,
]
MAY_HANDLE = {verify, save, interpret, sweep, sweep_by_loop}
"""Where the package tells of an error of the user's in its own way: a report, an own error, NaN in a cell.

So it does, too, of one that comes while an edited graph is compared with its module before it runs.
"""

BY_MODE = {capture_step_by_step, patched_step_by_step}
"""A mode sees the package's own looks at tensors, too, and torch takes a `TypeError` in operators for another thing."""


def edited() -> ExtractionOptions:
    def edit(graph_module: Any, module: nn.Module) -> None:
        output = next(node for node in graph_module.graph.nodes if node.op == "output")
        with graph_module.graph.inserting_before(output):
            graph_module.graph.call_function(STEPS.step, (1,))

    return ExtractionOptions(postprocessing_function=edit)


def strain(now: Setting, action: Action, count: int, seed: int) -> int:
    """Raises at `count` random steps of an action, and looks after each; returns how many errors came."""
    STEPS.reset()
    action(now)
    steps, came, rng = STEPS.count, 0, random.Random(seed)
    now.pg = now.captured()
    for at in sorted(rng.sample(range(steps), count)) if count < steps else range(steps):
        error = rng.choice(ERRORS)()
        raised: BaseException | None = None
        with nothing_changes_in_the_process():
            STEPS.reset(at, error)
            try:
                action(now)
            except (Exception, KeyboardInterrupt, SystemExit) as found:
                raised = found
        came += STEPS.raised is not None
        assert STEPS.raised is None or raised is not None or action in MAY_HANDLE | BY_MODE, (at, error)
        if STEPS.raised is not None and not now.options and action not in MAY_HANDLE | BY_MODE:
            assert raised is error, (at, error, raised)
        elif raised is not None and action not in BY_MODE:
            is_ours = isinstance(raised, (GraphPatchError, KeyboardInterrupt, SystemExit))
            assert raised is error or is_ours, (at, error, raised)
        if not isinstance(error, Exception) and STEPS.raised is not None:
            assert isinstance(raised, type(error)), (at, error, raised)
        now.check()
        STEPS.reset()
        if now.options:
            action(now)
    return came


quietly = pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")


@quietly
@pytest.mark.parametrize("action", ACTIONS)
def test_some_errors(action: Action) -> None:
    assert strain(Setting(), action, 6, 0) > 1


@quietly
@pytest.mark.parametrize("action", [unpatched, patched, nested, backward])
def test_some_errors_in_edited_graphs(action: Action) -> None:
    assert strain(Setting(edited()), action, 4, 0) > 0


@quietly
@pytest.mark.exhaustive
@pytest.mark.parametrize("action", ACTIONS)
def test_many_errors(action: Action) -> None:
    for round in range(3):
        strain(Setting(), action, 200, FIRST_SEED + round)


@quietly
@pytest.mark.exhaustive
@pytest.mark.parametrize("action", [unpatched, patched, nested, handled_inside, backward, sweep])
def test_many_errors_in_edited_graphs(action: Action) -> None:
    for round in range(3):
        strain(Setting(edited()), action, 200, FIRST_SEED + round)
