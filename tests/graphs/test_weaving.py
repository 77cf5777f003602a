"""Graphs with patches woven into their code give what a patched run of the module's own code gives; over the zoo."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from graphpatch_notebook import PatchableGraph, ZeroPatch
from graphpatch_notebook.graphs import CompiledGraphModule, code_generations
from graphpatch_notebook.graphs.generated_code import generate, weave
from graphpatch_notebook.inspection.resolution import resolve
from graphpatch_notebook.patchable_graph import captured
from tests.laws.captures import (
    Capture,
    capture_of,
    identity,
    outcome,
    run,
    runs_the_same_code_again,
    some_cases,
    without_recomputing,
)
from tests.zoo import Case
from tests.zoo.submodules import Submodules

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]
SAMPLES = 12


def with_own_graphs(case: Case) -> Capture:
    """A capture of its own, in which each graph that equals its module on the example *is* the module."""
    capture = Capture.of(case)
    call = case.example()
    report = capture.pg.verify(*call.args, **call.kwargs)
    equal = {frame.path for frame in report if frame.status == "equal"}
    for graph_module in [capture.pg._graph_module, *descendants(capture.pg._graph_module)]:
        if isinstance(graph_module, CompiledGraphModule) and graph_module.path in equal:
            graph_module.recompile()
    return capture


def descendants(graph_module: Any) -> list[Any]:
    return [d for callee in graph_module.callees for d in (callee, *descendants(callee))]


# Where the graph of the caller says another thing than its code, and each is right: the ops of hooks are part of the
# graph, with the values that they got; of a container that goes through a child it knows its tensors.
SAYS_ANOTHER_THING = {
    "awkward-user-hooks": {"first.input"},
    "awkward-container-passed-through": {"child.output|value", "child.output|list.sub_0"},
}


def can_be_compared(case: Case) -> bool:
    # Under a function mode the live run leaves torch's fast paths, which a graph never takes.
    return runs_the_same_code_again(case) and not case.mutates_state and case.tolerance == 0


def tensors(capture: Capture) -> list[str]:
    """The paths to patch: numbers that steer loops do so no more in a graph, which has the example's control flow.

    Values inside a fused call are left out, too: a graph keeps the call as one operation.
    """
    left_out = SAYS_ANOTHER_THING.get(capture.case.name, set())
    nodes = capture.pg.nodes.items()
    return [
        path
        for path, node in nodes
        if node.shape is not None and not node.opens and path not in left_out and not is_given_twice(capture, path)
    ]


def is_given_twice(capture: Capture, path: str) -> bool:
    """Whether this is an input that was one tensor with another one: a graph refuses patches there."""
    target = resolve(captured(capture.pg).root, path)
    names = {name for pair in target.frame.conditions.same_inputs for name, _ in pair}
    return target.node.kind == "input" and target.node.target in names


@some_cases(can_be_compared, every=3)
def test_woven_code_gives_what_live_runs_give(case: Case) -> None:
    live, woven = capture_of(case), with_own_graphs(case)
    all_paths = tensors(live)
    assert all_paths == tensors(woven)
    paths = [path for path in all_paths if not live.pg.nodes[path].is_view_filled_later]
    paths = live.random("woven").sample(paths, min(SAMPLES, len(paths)))
    with warnings.catch_warnings(), without_recomputing(case):
        warnings.simplefilter("ignore")
        expected = run(live.reference, case.example())
        assert live.difference(expected, run(woven.pg, case.example())) is None
        with woven.pg.patch({path: identity() for path in all_paths}):
            assert live.difference(expected, run(woven.pg, case.example())) is None
        for path in paths:
            with live.pg.patch({path: ZeroPatch(any_shape=True)}):
                expected = outcome(live.pg, case.example())
                if live.difference(expected, outcome(live.pg, case.example())) is not None:
                    continue  # a zero there leaves memory uninitialised: no two runs are equal
            with woven.pg.patch({path: ZeroPatch(any_shape=True)}):
                found = outcome(woven.pg, case.example())
            assert type(expected) is type(found), path
            assert expected == "raises" or live.difference(expected, found) is None, path


class Mlp(Submodules, up=(3, 4), down=(4, 2)):
    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        hidden[:, 0] = 7
        return self.down(hidden * scale)


X = torch.linspace(-1, 1, 6).view(2, 3)


def test_code_is_generated_once_for_each_set_of_patched_nodes() -> None:
    pg = PatchableGraph(Mlp(), X)
    pg._graph_module.recompile()
    before = code_generations()
    for _ in range(3):
        pg(X)
        with pg.patch({"hidden": ZeroPatch()}):
            pg(X)
        with pg.patch({"hidden": identity()}), pg.patch({"hidden": ZeroPatch()}):  # other patches on the same node
            pg(X)
        with pg.patch({"mul": ZeroPatch(), "x": ZeroPatch()}):
            pg(X)
    assert code_generations() - before == 3


def test_woven_code_reads_like_the_graph() -> None:
    pg = PatchableGraph(Mlp(), X)
    root = pg._graph_module
    assert isinstance(root, CompiledGraphModule)
    code = generate(weave(root.graph, {"x", "setitem"})).text
    assert code.splitlines()[:3] == [
        "def forward(self, x : torch.Tensor, scale = 2.0):",
        "    woven_patched = graphpatch_notebook_graphs_generated_code_woven_patched(x, 'x');  x = None",
        "    up = self.up(woven_patched);  woven_patched = None",
    ]
    assert "code_woven_patched(hidden, 'setitem')" in code  # the value of `x[i] = v` is what was written into
