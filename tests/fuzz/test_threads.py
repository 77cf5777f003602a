"""Law 9 at length: eight threads, one graph, whatever each of them does meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from graphpatch_notebook import AddPatch, CustomPatch, ExtractionOptions, PatchableGraph, ProbePatch, ZeroPatch
from graphpatch_notebook.capture.modules import is_swapped
from tests.fuzz.graph_runs import add_unused_call
from tests.fuzz.test_programs import FIRST_SEED
from tests.fuzz.test_user_errors import X
from tests.fuzz.user_errors import Model
from tests.zoo import case_by_name
from tests.zoo.values import same_state, snapshot

THREADS = 8
PATCHES = {
    "inner_0.output|hidden": [ZeroPatch(slice=(..., 0)), ProbePatch()],
    "inner_1.hidden": AddPatch(value=1.0),
    "inner_1.scale": ZeroPatch(slice=1),
    "last.sub_0.linear": CustomPatch(custom_op=lambda t: t.tanh()),
    "add": AddPatch(value=0.5, slice=0),
}


def in_threads(work: Callable[[int], None]) -> None:
    """Runs `work` in eight threads that start at once; raises what any of them raises."""
    start = threading.Barrier(THREADS)

    def begin(number: int) -> None:
        start.wait()
        work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(begin, range(THREADS)))


def strain(pg: PatchableGraph, forwards: int, seed: int) -> None:
    """Enters and leaves contexts at random in each thread, in layers; every number must be the thread's own."""
    maps = [{path: patch} for path, patch in PATCHES.items() if "output" not in path]
    expected: dict[tuple[int, ...], Tensor] = {}

    def outcome(numbers: tuple[int, ...]) -> Tensor:
        with torch.no_grad(), ExitStack() as stack:
            for number in numbers:
                stack.enter_context(pg.patch(maps[number]))
            return pg(X)

    choices = [(), *((i,) for i in range(len(maps))), *((i, j) for i in range(len(maps)) for j in range(i))]
    expected = {numbers: outcome(numbers) for numbers in choices}
    shared = [pg.patch(patches) for patches in maps]

    def work(thread: int) -> None:
        rng = random.Random(seed * THREADS + thread)
        with torch.no_grad():
            for _ in range(forwards // THREADS):
                numbers = rng.choice(choices)
                probe = ProbePatch()
                with ExitStack() as stack:
                    for number in numbers:
                        stack.enter_context(shared[number] if rng.random() < 0.5 else pg.patch(maps[number]))
                    stack.enter_context(pg.patch({"output": probe}))
                    for _ in range(rng.randrange(1, 3)):
                        assert torch.equal(pg(X), expected[numbers]), numbers
                    assert torch.equal(probe.activation, expected[numbers])
                if rng.random() < 0.2:
                    with pytest.raises(ZeroDivisionError), pg.patch(maps[0]):
                        raise ZeroDivisionError
                assert torch.equal(pg(X), expected[()])

    in_threads(work)


def check(forwards: int, seed: int, *options: Any) -> None:
    model = Model(has_hooks=not options)
    pg = PatchableGraph(model, *options, X)
    before = snapshot(model)
    strain(pg, forwards, seed)
    assert same_state(model, before) is None
    assert not any(is_swapped(module) for module in model.modules())


@pytest.mark.parametrize("runs", ["live", "graphs"])
def test_contexts_at_random(runs: str) -> None:
    check(400, 0, *(() if runs == "live" else (editing(),)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("runs", ["live", "graphs"])
def test_contexts_at_random_at_length(runs: str) -> None:
    check(8000, FIRST_SEED, *(() if runs == "live" else (editing(),)))


def editing() -> ExtractionOptions:
    return ExtractionOptions(postprocessing_function=add_unused_call)


def generate_in_threads(rounds: int) -> None:
    case = case_by_name("gpt2-eager")
    call, ids = case.example(), torch.tensor([[5, 6, 7]])
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    pg = PatchableGraph(case.build(), *call.args, **call.kwargs)
    maps: list[dict[str, Any]] = [
        {},
        {"transformer.h_0.output": AddPatch(value=1.0, steps="decoding")},
        {"transformer.h_1.mlp.act.mul_3": AddPatch(value=2.0)},
        {"transformer.h_0.mlp.output": ZeroPatch(positions=4)},
    ]

    def generated(number: int) -> Tensor:
        full = {**settings, "output_logits": True, "return_dict_in_generate": True}
        with pg.patch(maps[number]):
            return torch.stack(pg.generate(ids, **full).logits)

    expected = [generated(number) for number in range(len(maps))]
    assert not torch.equal(expected[0], expected[1])

    def work(thread: int) -> None:
        for step in range(rounds):
            number = (thread + step) % len(maps)
            assert torch.equal(generated(number), expected[number]), number

    in_threads(work)


def test_generations_at_once() -> None:
    generate_in_threads(2)


@pytest.mark.exhaustive
def test_generations_at_once_at_length() -> None:
    generate_in_threads(40)


def test_sweeps_at_once() -> None:
    """A sweep in each thread, with patches of its own, and patched calls between them."""
    pg = PatchableGraph(Model(), X)
    paths = ["inner_1.hidden", "last.sub_0.linear", "inner_0.scale", "add"]

    def swept(thread: int) -> list[float]:
        def cell(unit: int) -> dict[str, Any]:
            return {paths[thread % len(paths)]: AddPatch(value=float(thread), slice=(..., unit))}

        result = pg.sweep({"unit": range(4)}, cell, X, metric=torch.sum, batch=None, progress=False)
        return [float(number) for number in result.values]

    expected = [swept(thread) for thread in range(THREADS)]

    def work(thread: int) -> None:
        for _ in range(3):
            assert swept(thread) == expected[thread]

    in_threads(work)


def test_captures_at_once() -> None:
    """Two threads may capture one model, while others run it patched."""
    model = Model()
    pg = PatchableGraph(model, X)
    with torch.no_grad(), pg.patch(PATCHES):
        expected = pg(X)
    names = list(pg.nodes)

    def work(thread: int) -> None:
        for _ in range(5):
            if thread % 2:
                assert list(PatchableGraph(model, X).nodes) == names
            else:
                with torch.no_grad(), pg.patch(PATCHES):
                    assert torch.equal(pg(X), expected)

    before = snapshot(model)
    in_threads(work)
    assert same_state(model, before) is None
