"""Law 9: threads with different contexts on one `PatchableGraph` never see each other's patches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, GraphPatchWarning, PatchableGraph, ProbePatch, ZeroPatch
from tests.laws.captures import Capture, capture_of, leaves_its_state_alone, run, some_cases
from tests.zoo import Case, case_by_name
from tests.zoo.values import bit_equal, same_state, snapshot

PATHS = [
    "transformer.h_0.mlp.act.mul_3",
    "transformer.h_0.mlp.output",
    "transformer.h_1.attn.c_proj.weight",
    "transformer.h_1.ln_1.input",
    "transformer.h_1.attn.attn_weights",
]


@pytest.fixture
def gpt2() -> Capture:
    return capture_of(case_by_name("gpt2-eager"))


def patched_logits(capture: Capture, path: str | None) -> Tensor:
    with torch.no_grad():
        call = capture.case.example()
        if path is None:
            return capture.pg(*call.args, **call.kwargs).logits
        with capture.pg.patch({path: AddPatch(0.5)}, strict=True):
            return capture.pg(*call.args, **call.kwargs).logits


def test_tasks_have_contexts_of_their_own(gpt2: Capture) -> None:
    """Without `torch.no_grad`, which is a setting of the thread: tasks that take turns would leave it on."""
    expected = {path: patched_logits(gpt2, path) for path in PATHS}

    async def work(path: str) -> bool:
        call = gpt2.case.example()
        with gpt2.pg.patch({path: AddPatch(0.5)}):
            await asyncio.sleep(0)
            logits = gpt2.pg(*call.args, **call.kwargs).logits
            await asyncio.sleep(0)
            return torch.equal(logits, expected[path])

    async def all_of_them() -> list[bool]:
        return await asyncio.gather(*(work(path) for path in PATHS * 3))

    assert all(asyncio.run(all_of_them()))


@some_cases(leaves_its_state_alone, every=3)
def test_the_original_model_is_unaffected_inside_the_block(case: Case) -> None:
    capture = capture_of(case)
    expected = run(capture.reference, case.example())
    probes = {path: ProbePatch() for path in capture.pg.nodes}
    zeros = {path: ZeroPatch() for path, meta in capture.pg.nodes.items() if meta.kind in ("output", "op")}
    with (
        pytest.warns(GraphPatchWarning, match="itself was called"),
        capture.pg.patch(probes),
        capture.pg.patch({path: zeros[path] for path in zeros if capture.pg.nodes[path].shape}),
    ):
        assert bit_equal(expected, run(capture.model, case.example())) is None
    assert all(probe.activation is None for probe in probes.values())


class Waiting:
    """Where a thread waits: when it is there, `is_there` is set, and it waits for `goes_on`."""

    def __init__(self) -> None:
        self.thread: int | None = None
        self.is_there, self.goes_on = threading.Event(), threading.Event()

    def in_thread(self) -> None:
        if threading.get_ident() == self.thread:
            self.thread = None
            self.is_there.set()
            assert self.goes_on.wait(60)

    def run(self, function: Callable[[], object]) -> Future[object]:
        """Starts a thread with the function, and returns when it waits."""
        self.__init__()  # type: ignore[misc]

        def waits() -> object:
            self.thread = threading.get_ident()
            return function()

        future = POOL.submit(waits)
        assert self.is_there.wait(60)
        return future

    def end(self, future: Future[object]) -> object:
        self.goes_on.set()
        return future.result(60)


WAITING = Waiting()
POOL = ThreadPoolExecutor(1)
X = torch.linspace(-1, 1, 6).view(2, 3)


def test_contexts_and_runs_in_another_thread_that_overlap_leave_each_other_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    patches = {"sub_0.output": AddPatch(1.0), "sub_1.input": AddPatch(0.5)}
    model[0].register_forward_hook(lambda _module, _args, output: output * 2)
    model[1].register_forward_pre_hook(lambda _module, _args: WAITING.in_thread())
    expected = model[1](model[0](X) + 1.0 + 0.5)
    pg, before = PatchableGraph(model, X), snapshot(model)
    with torch.no_grad():
        with pg.patch(patches, strict=True):  # ends while the other thread runs the model
            running = WAITING.run(lambda: pg.verify(X))
            assert torch.equal(pg(X), expected)
        WAITING.end(running)
        assert same_state(model, before) is None
        running = WAITING.run(lambda: pg.verify(X))  # begins before the context, and ends in it
        with pg.patch(patches, strict=True):
            assert torch.equal(pg(X), expected)
            WAITING.end(running)
            assert torch.equal(pg(X), expected)
    assert same_state(model, before) is None


def test_the_model_runs_on_while_a_context_ends_in_another_thread() -> None:
    """`Module.__call__` goes through the hooks that there were, and looks up which of them take keyword arguments."""
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_pre_hook(lambda _module, _args: WAITING.in_thread())
    pg, expected = PatchableGraph(model, X), model(X)
    with pg.patch({"sub_0.input": AddPatch(1.0)}):
        running = WAITING.run(lambda: model(X))
    assert torch.equal(WAITING.end(running), expected)  # type: ignore[arg-type]
