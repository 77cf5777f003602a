"""Executors: the numbers of a run here, whatever happens to workers, and no weights on the way."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExperimentError,
    GraphPatchWarning,
    PatchableGraph,
    ZeroPatch,
)
from graphpatch_notebook.errors import SweepInterrupted
from graphpatch_notebook.experiments import (
    LogitDifference,
    Noise,
    RayExecutor,
    ablate,
    attribute,
    attribute_edges,
    average,
    causal_trace,
    faithfulness,
    map_batches,
    mean_values,
    path_patch,
    record_to,
)
from tests.tiny_models import gpt2

WIDTH = 128


def build(seed: int = 0) -> PatchableGraph:
    """The recipe: what another process can import."""
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers).eval()
    torch.set_rng_state(state)
    return PatchableGraph(model, torch.ones(2, WIDTH))


X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
AXES = {"layer": range(3), "unit": range(6)}
WEIGHT_BYTES = 3 * 4 * (WIDTH * WIDTH + WIDTH)


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return build()


@pytest.fixture(scope="module")
def here(pg: PatchableGraph) -> Any:
    return swept(pg)


def doubled(layer: int, unit: int) -> dict[str, CustomPatch]:
    return {f"sub_{2 * layer}.output": CustomPatch(custom_op=lambda t: t * 2, slice=(slice(None), unit))}


def swept(pg: PatchableGraph, make_patches: Callable[..., Any] = doubled, **options: Any) -> Any:
    options = {"metric": lambda output: output.exp().sum(), "batch": None, "progress": False} | options
    if "checkpoint" in options:
        options["checkpoint_key"] = "doubled"
    return pg.sweep(AXES, make_patches, options.pop("inputs", X), **options)


def acting(act: Callable[[int, int], None]) -> Callable[..., Any]:
    """Patches that do the same as `doubled`, and something besides."""

    def make_patches(layer: int, unit: int) -> dict[str, CustomPatch]:
        def op(value: torch.Tensor) -> torch.Tensor:
            act(layer, unit)
            return value * 2

        return {f"sub_{2 * layer}.output": CustomPatch(custom_op=op, slice=(slice(None), unit))}

    return make_patches


def forking() -> BaseContext:
    """Starts processes as new as those of "spawn", but what takes long to import is imported once for all of them.

    Also this file, which each process would import with all that it imports: what it is sent is defined here.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distributed", __name__])
    forkserver.ensure_running()  # else Dask preloads other things
    return context


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of a cluster of two processes, in which a chunk whose worker dies is not run again by the scheduler itself."""
    import dask
    import distributed

    folder, method = tmp_path_factory.mktemp("cluster"), forking().get_start_method()
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        dask.config.set({"distributed.worker.multiprocessing-method": method}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", local_directory=str(folder)
        ) as cluster,
        cluster.get_client() as client,
    ):
        yield client


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """What hangs fails."""

    def stop(*_: Any) -> None:
        pytest.fail(f"not done after {seconds} seconds")  # no `Exception`: nothing catches it

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_share_the_graph_and_not_the_patches(pg: PatchableGraph, here: Any) -> None:
    threads: set[int] = set()
    handle = pg._module.register_forward_hook(lambda *_: threads.add(threading.get_ident()) or time.sleep(0.005))
    with ThreadPoolExecutor(4) as executor:
        result = swept(pg, executor=executor)
    handle.remove()
    assert result.values.tobytes() == here.values.tobytes()
    assert len(threads) > 2


def test_what_is_of_one_thread_is_refused(pg: PatchableGraph) -> None:
    contexts = [pg.patch({"sub_0.output": AddPatch(value=1e-9)}), torch.autocast("cpu")]
    for context in contexts:
        with ThreadPoolExecutor(2) as executor, context, pytest.raises(ExperimentError):
            swept(pg, executor=executor)


def test_an_interrupt_cancels_what_has_not_begun(pg: PatchableGraph, here: Any) -> None:
    begun, go_on = [], threading.Event()

    def act(layer: int, unit: int) -> None:
        begun.append((layer, unit))
        if len(begun) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            go_on.wait(60)

    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(SweepInterrupted) as caught:
            swept(pg, acting(act), executor=executor)
        go_on.set()
    assert len(begun) == 5
    partial = caught.value.result.values.ravel()
    assert partial[:4].tolist() == here.values.ravel()[:4].tolist()
    assert np.isnan(partial[4:]).all()


@pytest.mark.parametrize("by_row", [False, True])
def test_only_the_cell_that_exits_is_lost(pg: PatchableGraph, here: Any, by_row: bool) -> None:
    """Also if it shares its chunk with others; and nothing ends here."""

    def exit_in(layer: int, unit: int) -> dict[str, CustomPatch]:
        def op(value: torch.Tensor) -> torch.Tensor:
            return sys.exit(3) if (layer, unit) == (1, 2) else value * 2

        return {f"sub_{2 * layer}.output": CustomPatch(op, slice=(slice(None), unit), by_row=by_row)}

    for away in ({"executor": ThreadPoolExecutor(1)}, {"executor": InPlace(), "recipe": build}):
        with pytest.warns(GraphPatchWarning, match="experiment]"):
            result = swept(pg, exit_in, batch="auto", **away)
        failed = np.isnan(result.values)
        assert np.argwhere(failed).tolist() == [[1, 2]]
        assert np.allclose(result.values[~failed], here.values[~failed], rtol=1e-5)
        assert "SystemExit: 3" in result.errors[0]["error"]


class Turning(torch.nn.Module):
    """Iterates in an order of its own in each process, as models do that iterate over sets."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.names, self.tables = (
            names,
            torch.nn.ParameterDict({name: torch.full((3,), float(ord(name))) for name in "ab"}),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = {name: x * self.tables[name] for name in self.names}
        return torch.relu(scaled["a"] - scaled["b"]) + x


def turning(names: str) -> PatchableGraph:
    return PatchableGraph(Turning(names), torch.ones(1, 3))


def test_names_mean_the_same_in_workers_and_checkpoints(tmp_path: Path) -> None:
    """Those that the patches use: `mul` is the product with another table there, and `relu` the same value."""
    here = turning("ab")

    def swept(pg: PatchableGraph, path: str, **options: Any) -> Any:
        axes, options = {"unit": range(3)}, {"metric": torch.sum, "progress": False} | options
        return pg.sweep(axes, lambda unit: {path: ZeroPatch(slice=(..., unit))}, torch.ones(1, 3), **options)

    expected = swept(here, "relu")
    assert swept(here, "relu", executor=InPlace(), recipe=functools.partial(turning, "ba")).identical(expected)
    assert swept(here, "mul", executor=InPlace(), recipe=functools.partial(turning, "ab")).size == 3
    with pytest.raises(ExperimentError, match="'mul'"):
        swept(here, "mul", executor=InPlace(), recipe=functools.partial(turning, "ba"))
    swept(here, "mul", checkpoint=tmp_path / "mul")
    with pytest.raises(ExperimentError, match="'mul'"):
        swept(turning("ba"), "mul", checkpoint=tmp_path / "mul")


# -- processes ---------------------------------------------------------------------------------------------------------


class Weighing(Executor):
    """Hands on to another executor, and weighs what is submitted."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.bytes: list[int] = []

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.bytes.append(len(pickle.dumps((function, args, kwargs))))
        return self.executor.submit(function, *args, **kwargs)


@pytest.mark.slow
def test_processes_build_the_graph_once_are_sent_no_weights_and_may_die(
    pg: PatchableGraph, here: Any, tmp_path: Path
) -> None:
    log, folder, before = tmp_path / "builds", tmp_path / "sweep", {*multiprocessing.active_children()}

    def recipe() -> PatchableGraph:
        with log.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        return build()

    def kill(layer: int, unit: int) -> None:
        if (layer, unit) == (2, 4):
            os.kill(os.getpid(), signal.SIGKILL)

    with ProcessPoolExecutor(1, forking()) as executor, at_most(240):
        weighing = Weighing(executor)
        result = swept(pg, executor=weighing, recipe=recipe, checkpoint=folder)
        assert result.identical(here)
        assert len([*folder.glob("0*.json")]) == len(weighing.bytes)
        assert max(weighing.bytes) < WEIGHT_BYTES / 20

        # Another sweep of the same recipe: nobody builds twice, and its numbers are its own.
        inputs = X.flip(0) / 2
        other = swept(pg, executor=executor, recipe=recipe, inputs=inputs)
        assert other.values.tobytes() == swept(pg, inputs=inputs).values.tobytes()
        assert len(log.read_text().split()) == 1

        with pytest.warns(GraphPatchWarning, match="experiment]"):
            result = swept(pg, acting(kill), executor=executor, recipe=recipe)
    failed = np.isnan(result.values)
    assert np.argwhere(failed).tolist() == [[2, 4]]
    assert result.values[~failed].tolist() == here.values[~failed].tolist()
    assert "BrokenProcessPool" in result.errors[0]["error"]
    with at_most(60):
        while len({*multiprocessing.active_children()} - before) > 0:  # of the pool in place of the one that broke
            time.sleep(0.1)


def test_a_recipe_is_a_function_or_a_file(
    pg: PatchableGraph, here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg.save(tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    for recipe in ("model.safetensors", Path("model.safetensors"), build, functools.partial(build, 0)):
        assert swept(pg, executor=InPlace(), recipe=recipe).values.tobytes() == here.values.tobytes()


def in_training() -> PatchableGraph:
    graph = build()
    graph.train()
    return graph


def nearly() -> PatchableGraph:
    graph = build()
    with torch.no_grad():
        graph.get_parameter("4.bias")[:] += 1e-6
    return graph


def gelu() -> PatchableGraph:
    layers = list(build()._module)
    model = torch.nn.Sequential(*(torch.nn.GELU() if isinstance(each, torch.nn.Tanh) else each for each in layers))
    return PatchableGraph(model.eval(), torch.ones(2, WIDTH))


@pytest.mark.parametrize(
    "recipe",
    [functools.partial(build, 1), nearly, in_training, gelu, lambda: build().graph, lambda: 1 / 0, "none.safetensors"],
)
def test_numbers_of_another_model_are_refused(pg: PatchableGraph, recipe: Any) -> None:
    with pytest.raises(ExperimentError):
        swept(pg, executor=InPlace(), recipe=recipe)


class Losing(Executor):
    """Loses the worker of some tasks, at their first attempt or at each."""

    def __init__(self, lost: list[int], attempts: int) -> None:
        self.tasks, self.lost, self.attempts = 0, lost, attempts

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if args[-1] == 0:
            self.tasks += 1
        if args[-1] < self.attempts and (args[-1] or self.tasks - 1 in self.lost):
            future: Future[Any] = Future()
            future.set_exception(ConnectionError("the worker is gone"))
            return future
        return InPlace().submit(function, *args, **kwargs)


def test_what_a_lost_worker_had_runs_once_more(pg: PatchableGraph, here: Any) -> None:
    assert swept(pg, executor=Losing([1, 3], attempts=1), recipe=build).identical(here)
    with pytest.warns(GraphPatchWarning, match="experiment]"):
        result = swept(pg, executor=Losing([4], attempts=2), recipe=build)
    assert np.isnan(result.values).sum() == 1
    assert "the worker is gone" in result.errors[0]["error"]
    with pytest.raises(ExperimentError, match="the worker is gone"):
        list(map_batches(pg, lambda pg, n: n, range(3), executor=Losing([1], attempts=2), recipe=build))


def test_warnings_of_workers_are_given_here(pg: PatchableGraph) -> None:
    patches = {"sub_0.output": AddPatch(value=1.0), "output": AddPatch(value=1.0, steps="decoding")}
    for away in ({"executor": ThreadPoolExecutor(1)}, {"executor": InPlace(), "recipe": build}):
        with pytest.warns(GraphPatchWarning, match="not fired]") as caught:
            pg.sweep({"n": range(2)}, lambda n: patches, X, metric=torch.sum, batch=None, progress=False, **away)
        assert len({str(each.message) for each in caught}) == len(caught)


class InPlace(Executor):
    """Pickles what it is given, as for another process, and runs it at once."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        function, args, kwargs = pickle.loads(pickle.dumps((function, args, kwargs)))
        try:
            future.set_result(pickle.loads(pickle.dumps(function(*args, **kwargs))))
        except Exception as error:
            future.set_exception(error)
        return future


def language_model() -> PatchableGraph:
    with torch.random.fork_rng():
        return PatchableGraph(gpt2(), torch.arange(6)[None])


def everything(pg: PatchableGraph, folder: Path, away: dict[str, Any]) -> dict[str, Any]:
    """The results of all that runs many forwards, as bytes."""
    clean, corrupted = torch.arange(6)[None], torch.arange(6, 12)[None]
    pairs = [(clean, corrupted), (clean + 20, corrupted + 20)]
    batches, others = [list(each) for each in zip(*pairs, strict=True)]
    metric, paths = LogitDifference(3, 5), ["layers[*].attn_out", "layers[*].mlp_out"]
    quiet = {"progress": False, **away}
    edges = attribute_edges(pg, metric, batches, others, **away)
    found = {
        "causal_trace": causal_trace(pg, clean, corrupted, paths, [2, 5], metric, **quiet),
        "noise": causal_trace(pg, clean, Noise("@embed", samples=2), paths, [5], metric, **quiet),
        "ablate": ablate(pg, paths, clean, metric=metric, **quiet),
        "path_patch": path_patch(pg, ["layers[0].attn_out"], [None], clean, corrupted, metric, **quiet),
        "attribute": average(map_batches(pg, lambda pg, pair: attribute(pg, metric, *pair), pairs, **away))["mean"],
        "attribute_edges": edges,
        "exact": attribute_edges(pg, metric, batches, others, method="exact", receivers="@logits", **away),
        "faithfulness": faithfulness(pg, edges, metric, batches, others, sizes=[5, 20], **away)["faithfulness"],
    }
    store = record_to(pg, folder, paths, torch.cat(batches), batch_size=1, **away)
    means = mean_values(pg, paths, torch.cat(batches), batch_size=1, **away)
    found |= {f"stored {path}": store[path][:] for path in store} | {f"mean {path}": means[path] for path in means}
    return {name: np.asarray(value).tobytes() for name, value in found.items()}


def test_all_that_runs_many_forwards_goes_out(tmp_path: Path) -> None:
    pg = language_model()
    here = everything(pg, tmp_path / "here", {})
    assert everything(pg, tmp_path / "there", {"executor": InPlace(), "recipe": language_model}) == here
    with ThreadPoolExecutor(2) as threads:
        assert everything(pg, tmp_path / "threads", {"executor": threads}) == here


def test_the_error_of_a_batch_is_raised_here(pg: PatchableGraph) -> None:
    def fail(pg: PatchableGraph, number: int) -> int:
        return number if number != 2 else [][number]

    for away in ({"executor": InPlace(), "recipe": build}, {"executor": ThreadPoolExecutor(1)}):
        results = map_batches(pg, fail, range(5), **away)
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(IndexError) as caught:
            next(results)
        assert "raised for batch 2" in "".join(traceback.format_exception(caught.value))


# -- pickling ----------------------------------------------------------------------------------------------------------


def test_models_are_never_sent(pg: PatchableGraph) -> None:
    model = pg._module

    def patches(layer: int, unit: int) -> dict[str, CustomPatch]:
        return {"sub_0.output": CustomPatch(custom_op=lambda t: model[0](t) if unit == 1 else t)}

    for options in ({"metric": lambda output: (output - model[0].bias).sum()}, {"recipe": lambda: pg}, {"recipe": pg}):
        with pytest.raises(ExperimentError):
            swept(pg, executor=InPlace(), **{"recipe": build} | options)
    with pytest.raises(ExperimentError):
        swept(pg, patches, executor=InPlace(), recipe=build)


# -- clusters ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dask(pg: PatchableGraph, here: Any, client: Any) -> None:
    """A cell that kills each worker is NaN."""

    def kill(layer: int, unit: int) -> None:
        if (layer, unit) == (2, 0):
            os.kill(os.getpid(), signal.SIGKILL)

    with at_most(240), pytest.warns(GraphPatchWarning, match="experiment]"):
        result = swept(pg, acting(kill), executor=client, recipe=build)
    failed = np.isnan(result.values)
    assert failed[2, 0]
    assert failed.sum() <= 4  # its workers may have had others, too
    assert result.values[~failed].tolist() == here.values[~failed].tolist()


@pytest.mark.slow
def test_ray(pg: PatchableGraph, here: Any) -> None:
    import ray

    with at_most(240):
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
        try:
            with pytest.raises(ExperimentError, match="ZeroDivisionError"):
                swept(pg, executor=RayExecutor(), recipe=lambda: 1 / 0)
            assert swept(pg, executor=RayExecutor(), recipe=build).identical(here)
        finally:
            ray.shutdown()
