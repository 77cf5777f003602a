"""Sweeps by executors: the numbers of a sweep here, whatever happens to workers, and no weights on the way."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import enum
import functools
import multiprocessing
import os
import pickle
import re
import signal
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
    ExperimentWarning,
    PatchableGraph,
    ProbePatch,
    ReplacePatch,
)
from graphpatch_notebook.experiments import (
    LogitDifference,
    Noise,
    RayExecutor,
    SweepInterrupted,
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
from graphpatch_notebook.experiments.executors import clusters, dispatch
from graphpatch_notebook.experiments.executors.pickling import packed, unpacked
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


def test_one_probe_for_several_cells_is_refused(pg: PatchableGraph) -> None:
    """It would hold what any of them kept: the metric would read the value of another cell."""
    probe = ProbePatch()

    def probed(layer: int, unit: int) -> dict[str, Any]:
        return {**doubled(layer, unit), "sub_4.output": probe}

    with pg.patch({"sub_4.output": probe}):
        pg(X)
    kept = probe.activation
    with ThreadPoolExecutor(2) as executor:
        with pytest.raises(ExperimentError, match=r"several cells \(layer=0, unit=0; layer=0, unit=1\) have the same"):
            swept(pg, probed, metric=lambda _: probe.activation.sum(), executor=executor)
        assert probe.activation is kept  # nothing ran
        found = swept(pg, lambda layer, unit: {f"sub_{2 * layer}.output": ProbePatch()}, executor=executor)
    assert len(set(found.values.ravel().tolist())) == 1


class Factor(enum.IntEnum):
    """Pickled by its name, as enums of the standard library are on Python 3.10, and in early versions of 3.11."""

    DOUBLE = 2

    def __reduce_ex__(self, protocol: Any) -> str:
        return self.name


def test_members_of_an_enum_keep_nothing(pg: PatchableGraph, here: Any) -> None:
    def multiplied(layer: int, unit: int) -> dict[str, CustomPatch]:
        factor = Factor.DOUBLE
        return {f"sub_{2 * layer}.output": CustomPatch(custom_op=lambda t: t * factor, slice=(slice(None), unit))}

    with ThreadPoolExecutor(2) as executor:  # warnings are errors
        assert swept(pg, multiplied, executor=executor).equals(here)


def test_what_an_enum_keeps_counts(pg: PatchableGraph) -> None:
    class Counter(enum.Enum):
        CELLS = "cells"

    Counter.CELLS.count = 0  # type: ignore[attr-defined]

    def counted(layer: int, unit: int) -> dict[str, CustomPatch]:
        def op(value: torch.Tensor) -> torch.Tensor:
            Counter.CELLS.count += 1  # type: ignore[attr-defined]
            return value * Counter.CELLS.count  # type: ignore[attr-defined]

        return {f"sub_{2 * layer}.output": CustomPatch(custom_op=op, slice=(slice(None), unit))}

    expected = swept(pg, counted)
    Counter.CELLS.count = 0  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as executor, pytest.warns(ExperimentWarning, match="change what they refer to"):
        assert swept(pg, counted, executor=executor).equals(expected)


def acting(act: Callable[[int, int], None]) -> Callable[..., Any]:
    """Patches that do the same as `doubled`, and something besides."""

    def make_patches(layer: int, unit: int) -> dict[str, CustomPatch]:
        def op(value: torch.Tensor) -> torch.Tensor:
            act(layer, unit)
            return value * 2

        return {f"sub_{2 * layer}.output": CustomPatch(custom_op=op, slice=(slice(None), unit))}

    return make_patches


def once(file: Path) -> bool:
    """Whether nobody, in any process, has asked before."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def forking() -> BaseContext:
    """Starts processes as new as those of "spawn", but what takes long to import is imported once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distributed", "torch", "graphpatch_notebook.experiments"])
    forkserver.ensure_running()  # else Dask preloads other things
    return context


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, forking()) as executor:
        yield executor


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


@contextlib.contextmanager
def worker_for_good(address: str, folder: Path) -> Iterator[None]:
    """A worker process that nobody starts again."""
    process = forking().Process(target=work, args=(address, str(folder)))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def work(address: str, folder: str) -> None:
    import distributed

    async def until_killed() -> None:
        async with distributed.Worker(address, nthreads=1, dashboard=False, local_directory=folder) as worker:
            await worker.finished()

    asyncio.run(until_killed())


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_share_the_graph_and_not_the_patches(pg: PatchableGraph, here: Any) -> None:
    threads: dict[int, int] = collections.Counter()
    handle = pg._module.register_forward_hook(lambda *_: threads.update([threading.get_ident()]) or time.sleep(0.005))
    with ThreadPoolExecutor(4) as executor:
        result = swept(pg, executor=executor)
    handle.remove()
    assert result.values.tobytes() == here.values.tobytes()
    assert result.equals(here)
    assert len(threads) > 2
    assert threads[threading.get_ident()] < 6  # before anything is submitted, and the first cell


def test_what_holds_for_one_thread_only_is_noticed(pg: PatchableGraph) -> None:
    def metric(output: torch.Tensor) -> torch.Tensor:
        return output.exp().sum() + (0.5 if threading.current_thread() is threading.main_thread() else 0)

    with (
        ThreadPoolExecutor(2) as executor,
        pytest.raises(ExperimentError, match="in a thread of the executor: without"),
    ):
        swept(pg, executor=executor, metric=metric)


def test_patches_of_a_context_are_not_lost(pg: PatchableGraph) -> None:
    message = "the patches of a context hold for the thread that entered it"
    context = pg.patch({"sub_0.output": AddPatch(value=1e-9)})
    with ThreadPoolExecutor(2) as executor, context, pytest.raises(ExperimentError, match=message):
        swept(pg, executor=executor)


def test_threads_and_files_keep_the_numbers_of_rows(tmp_path: Path) -> None:
    """Cells in the rows of one forward, on a transformer whose layers before the patch are not run."""
    ids = torch.arange(8)[None]
    graph = PatchableGraph(gpt2(layers=3), ids)
    paths = [f"transformer.h_{layer}.{part}.output" for layer in range(3) for part in ("attn.c_proj", "mlp")]

    def sweep(**options: Any) -> Any:
        return graph.sweep(
            {"path": paths, "position": range(8)},
            lambda path, position: {path: ReplacePatch(value=torch.linspace(-1, 1, 16), slice=(0, position))},
            ids,
            metric=LogitDifference(3, 5),
            progress=False,
            **options,
        )

    here = sweep()
    with ThreadPoolExecutor(3) as executor:
        assert sweep(executor=executor).values.tobytes() == here.values.tobytes()
    file = tmp_path / "sweep.jsonl"
    sweep(checkpoint=file)
    lines = file.read_bytes().splitlines(keepends=True)
    assert 2 < len(lines) < here.size  # several cells a chunk
    for keep in range(1, len(lines), 2):
        file.write_bytes(b"".join(lines[:keep]))
        assert sweep(checkpoint=file).values.tobytes() == here.values.tobytes()


def test_an_interrupt_cancels_what_has_not_begun(pg: PatchableGraph, here: Any, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    go_on = threading.Event()

    def act(layer: int, unit: int) -> None:
        (begun / f"{layer} {unit}").touch()
        if len([*begun.iterdir()]) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            go_on.wait(60)

    file = tmp_path / "sweep.jsonl"
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(SweepInterrupted, match="stopped after 4 of 18 cells") as caught:
            swept(pg, acting(act), executor=executor, checkpoint=file)
        go_on.set()
    assert len([*begun.iterdir()]) == 5
    assert len(file.read_text().splitlines()) == 1 + 4
    partial = caught.value.result.values.ravel()
    assert partial[:4].tolist() == here.values.ravel()[:4].tolist()
    assert np.isnan(partial[4:]).all()


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
def test_processes_build_the_graph_once_and_are_sent_no_weights(
    pg: PatchableGraph, here: Any, processes: ProcessPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, file = tmp_path / "builds", tmp_path / "sweep.jsonl"

    def recipe() -> PatchableGraph:
        with log.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        return build()

    weighing = Weighing(processes)
    monkeypatch.setattr(dispatch, "_WORTH", 0.0)
    result = swept(pg, executor=weighing, recipe=recipe, checkpoint=file)
    assert result.values.tobytes() == here.values.tobytes()
    assert re.fullmatch(r"executor= took .* without executor= this call would be faster", result.remarks.pop())
    assert result.identical(here)
    assert len(file.read_text().splitlines()) == 2 + len(weighing.bytes)  # the first cell runs here
    assert max(weighing.bytes) < WEIGHT_BYTES / 20
    first = log.read_text().split()
    assert len(set(first)) == len(first) <= 2

    # Another sweep of the same recipe: nobody builds twice, and stale numbers are nobody's.
    inputs = X.flip(0) / 2
    other = swept(pg, executor=processes, recipe=recipe, inputs=inputs)
    assert other.values.tobytes() == swept(pg, inputs=inputs).values.tobytes()
    builds = log.read_text().split()
    assert len(set(builds)) == len(builds) <= 2


def test_a_recipe_is_a_function_or_a_file(
    pg: PatchableGraph, here: Any, processes: ProcessPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg.save(tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    for recipe in ("model.safetensors", Path("model.safetensors"), build, functools.partial(build, 0)):
        result = swept(pg, executor=processes, recipe=recipe)
        assert result.values.tobytes() == here.values.tobytes()


def wrong_recipes(folder: Path) -> list[tuple[Any, str]]:
    number = r"-?\d+\.\d+"

    def in_training() -> PatchableGraph:
        graph = build()
        graph.train()
        return graph

    def nearly() -> PatchableGraph:
        graph = build()
        with torch.no_grad():
            graph.get_parameter("4.bias")[:] += torch.linspace(-1e-3, 1e-3, WIDTH)
        return graph

    return [
        (functools.partial(build, 1), f"not the one of this graph: .* the metric is {number} there and {number} here"),
        (nearly, f"metric is {number} there and {number} here"),
        (in_training, "it is in training mode, and in evaluation mode here"),
        (lambda: build().graph, "must return a PatchableGraph, not "),
        (lambda: 1 / 0, "the recipe failed in a worker: ZeroDivisionError: division by zero"),
        (folder / "nothing.safetensors", "the recipe failed in a worker: .*nothing"),
    ]


def test_numbers_of_another_model_are_refused(
    pg: PatchableGraph, processes: ProcessPoolExecutor, tmp_path: Path
) -> None:
    for recipe, message in wrong_recipes(tmp_path):
        with pytest.raises(ExperimentError, match=message):
            swept(pg, executor=processes, recipe=recipe)


def test_one_process_with_another_model_fails_its_cells_only(
    pg: PatchableGraph, here: Any, processes: ProcessPoolExecutor, tmp_path: Path
) -> None:
    flag, marks = tmp_path / "flag", tmp_path / "marks"
    marks.mkdir()

    def recipe() -> PatchableGraph:
        if once(flag):
            return build()
        deadline = time.monotonic() + 120
        while not any(marks.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return build(1)

    def act(layer: int, unit: int) -> None:
        time.sleep(0.05)
        if unit == 5:  # some are back by then
            (marks / "some").touch()

    with pytest.warns(ExperimentWarning, match="not the one of this graph"):
        result = swept(pg, acting(act), executor=processes, recipe=recipe)
    failed = np.isnan(result.values)
    assert 0 < failed.sum() == len(result.attrs["errors"]) < 18
    assert result.values[~failed].tolist() == here.values[~failed].tolist()


@pytest.mark.slow
def test_a_killed_process_loses_nothing(pg: PatchableGraph, here: Any, tmp_path: Path) -> None:
    flag, parent = tmp_path / "killed", os.getpid()

    def act(layer: int, unit: int) -> None:
        if (layer, unit) == (1, 3) and os.getpid() != parent and once(flag):
            os.kill(os.getpid(), signal.SIGKILL)

    message = r"executor is broken \(BrokenProcessPool.* are run in this process"
    executor = ProcessPoolExecutor(1, forking())
    with executor, pytest.warns(ExperimentWarning, match=message):
        result = swept(pg, acting(act), executor=executor, recipe=build)
    assert flag.exists()
    assert result.values.tobytes() == here.values.tobytes()


@pytest.mark.slow
def test_what_kills_its_process_is_not_run_here(
    pg: PatchableGraph,
    here: Any,
) -> None:
    parent = os.getpid()

    def act(layer: int, unit: int) -> None:
        if (layer, unit) == (2, 4):
            assert os.getpid() != parent, "it is run here"
            os.kill(os.getpid(), signal.SIGKILL)

    executor = ProcessPoolExecutor(1, forking())
    with executor, at_most(240), pytest.warns(ExperimentWarning) as caught:
        result = swept(pg, acting(act), executor=executor, recipe=build)
    assert "layer=2, unit=4: its process was lost twice" in str(caught[-1].message)
    failed = np.isnan(result.values)
    assert np.argwhere(failed).tolist() == [[2, 4]]
    assert result.values[~failed].tolist() == here.values[~failed].tolist()


def test_warnings_of_workers_are_given_here(pg: PatchableGraph, processes: ProcessPoolExecutor) -> None:
    patches = {"sub_0.output": AddPatch(value=1.0), "output": AddPatch(value=1.0, steps="decoding")}
    with ThreadPoolExecutor(1) as threads, pytest.warns(ExperimentWarning) as in_thread:
        one = pg.sweep({"n": range(2)}, lambda n: patches, X, metric=torch.sum, executor=threads, progress=False)
    with pytest.warns(ExperimentWarning) as in_process:
        other = pg.sweep(
            {"n": range(2)}, lambda n: patches, X, metric=torch.sum, executor=processes, recipe=build, progress=False
        )
    assert one.identical(other)
    assert [str(w.message) for w in in_thread] == [str(w.message) for w in in_process]
    assert {w.category for w in in_process} == {ExperimentWarning}


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


def test_a_new_thread_does_not_disturb_running_ones() -> None:
    """It compares the model with that of the call, and puts back what that changes: not what another run is doing."""
    pg, metric = language_model(), LogitDifference(3, 5)
    pairs = [(torch.arange(6)[None] + start, torch.arange(6, 12)[None] + start) for start in (0, 20)]

    def scores(pg: PatchableGraph, pair: Any) -> Any:
        return attribute(pg, metric, *pair).values

    here = list(map_batches(pg, scores, pairs))
    for _ in range(8):
        with ThreadPoolExecutor(2) as threads:
            for mine, there in zip(here, map_batches(pg, scores, pairs, executor=threads), strict=True):
                np.testing.assert_array_equal(mine, there)


def test_batches_come_in_order_and_are_read_when_there_is_room(pg: PatchableGraph) -> None:
    read: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(200):
            read.append(number)
            yield number

    def late(pg: PatchableGraph, number: int) -> int:
        time.sleep(0.2 if number == 0 else 0)
        return -number

    with ThreadPoolExecutor(4) as executor:
        results = map_batches(pg, late, batches(), executor=executor)
        assert next(results) == 0
        assert 1 < len(read) <= 33
        assert list(results) == [-number for number in range(1, 200)]


def test_the_error_of_a_batch_is_raised_here(pg: PatchableGraph) -> None:
    def fail(pg: PatchableGraph, number: int) -> int:
        return number if number != 2 else [][number]

    for away in ({"executor": InPlace(), "recipe": build}, {"executor": ThreadPoolExecutor(1)}):
        results = map_batches(pg, fail, range(5), **away)
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(IndexError) as caught:
            next(results)
        assert "raised for batch 2" in "".join(traceback.format_exception(caught.value))


# -- what is refused ---------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def score(self, output: torch.Tensor) -> torch.Tensor:
        return output.sum()


def refusals() -> dict[str, tuple[dict[str, Any], str]]:
    model = Model()
    graph = PatchableGraph(model, torch.ones(1, 4))
    closure = lambda output: (output - model.linear.bias).sum()  # noqa: E731
    names: dict[str, Any] = {"network": model}
    lock = threading.Lock()
    exec("def by_global(output): return (output - network.linear.bias).sum()", names)

    def patches(n: int) -> Any:
        return {"linear.output": CustomPatch(custom_op=(lambda t: model.linear(t)) if n == 1 else torch.neg)}

    through = "its weights would be sent to other processes"
    return {
        "closure": ({"metric": closure}, f"the metric holds the model \\(Model\\), by its variable 'model': {through}"),
        "global": ({"metric": names["by_global"]}, f"the metric holds .*, by its variable 'network': {through}"),
        "method": ({"metric": model.score}, f"the metric holds the model \\(Model\\): {through}"),
        "patches": ({"make_patches": patches}, f"the patch map of n=1 holds the model .*{through}"),
        "recipe": ({"recipe": graph}, f"recipe= is the model itself \\(PatchableGraph\\): {through}(.|\n)*def build"),
        "module": ({"recipe": model}, f"recipe= is the model itself \\(Model\\): {through}"),
        "lambda": ({"recipe": lambda: graph}, f"the recipe holds .*PatchableGraph.* variable 'graph': {through}"),
        "partial": ({"recipe": functools.partial(PatchableGraph, model)}, f"the recipe holds the model .*{through}"),
        "none": ({"recipe": None}, r"say with recipe= how to build(.|\n)*def build"),
        "number": ({"recipe": 3}, "recipe= takes a function without arguments"),
        "unpicklable": ({"metric": lambda output: output.sum() if lock else 0}, "the metric cannot be sent to"),
        "executor": ({"executor": 4}, "executor= takes an executor, .* not int"),
        "gradients": ({"backward": True}, "backward=True .* executor= runs cells elsewhere"),
    }  # fmt: skip


@pytest.mark.parametrize("what", refusals())
def test_models_are_never_sent(what: str) -> None:
    """Nothing is submitted, and so no process is started."""
    options, message = refusals()[what]
    model = Model()
    pg = PatchableGraph(model, torch.ones(1, 4))
    options = {
        "make_patches": lambda n: {"output": AddPatch(value=1.0)},
        "metric": torch.sum,
        "recipe": functools.partial(int),
        "executor": ProcessPoolExecutor(1),
        "batch": None,
    } | options
    with pytest.raises(ExperimentError, match=message):
        pg.sweep({"n": range(3)}, options.pop("make_patches"), torch.ones(1, 4), progress=False, **options)


def test_inputs_with_a_model_are_refused() -> None:
    with pytest.raises(ExperimentError, match=re.escape("what the model runs on holds the model (Linear)")):
        packed([("what the model runs on", {"past": [torch.nn.Linear(2, 2)]})])


def test_packed_values_hold_equal_things() -> None:
    loss = torch.nn.CrossEntropyLoss()  # a module, but without weights
    big = torch.arange(100_000.0).reshape(1000, 100)
    leaf = big[5].clone().requires_grad_()
    shared = [1, 2]
    parts = [
        ("a", (loss, big[3], big[:, 2:4], leaf, shared)),
        ("b", {"again": shared, "row": ReplacePatch(value=big[7])}),
    ]
    data = packed(parts)
    assert len(data) < 20_000 < big.nbytes
    (other_loss, row, columns, other_leaf, first), mapping = unpacked(data)
    assert type(other_loss) is type(loss)
    assert torch.equal(row, big[3])
    assert torch.equal(columns, big[:, 2:4])
    assert torch.equal(other_leaf, leaf)
    assert other_leaf.requires_grad
    assert mapping["again"] is first
    assert torch.equal(mapping["row"].value, big[7])


def test_a_sweep_that_is_done_needs_no_workers(pg: PatchableGraph, here: Any, tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    swept(pg, checkpoint=file)
    with ThreadPoolExecutor(1) as executor:
        pass
    assert swept(pg, checkpoint=file, executor=executor).identical(here)
    with pytest.raises(ExperimentError, match="executor= does not accept work: RuntimeError: .*shutdown"):
        swept(pg, executor=executor)


# -- a cluster ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cluster_whose_worker_is_killed_loses_nothing(
    pg: PatchableGraph, here: Any, client: Any, tmp_path: Path
) -> None:
    pids, flag, file = tmp_path / "pids", tmp_path / "killed", tmp_path / "sweep.jsonl"
    parent = os.getpid()

    def act(layer: int, unit: int) -> None:
        with pids.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        if (layer, unit) == (1, 3) and os.getpid() != parent and once(flag):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)

    executor = client.get_executor(pure=False)
    result = swept(pg, acting(act), executor=executor, recipe=build, checkpoint=file)
    assert result.values.tobytes() == here.values.tobytes()
    assert flag.exists()
    first, *others = pids.read_text().split()
    assert first == str(parent)  # the first cell, to see whether its function keeps a state
    assert str(parent) not in others
    assert len(set(others)) >= 2


@pytest.mark.slow
def test_the_client_of_a_cluster_is_an_executor(pg: PatchableGraph, here: Any, client: Any) -> None:
    """Its futures are of another kind than those of `client.get_executor()`."""
    assert swept(pg, executor=client, recipe=build).values.tobytes() == here.values.tobytes()


@pytest.mark.slow
def test_a_cell_that_kills_every_worker_does_not_lose_the_others(pg: PatchableGraph, here: Any, client: Any) -> None:
    def act(layer: int, unit: int) -> None:
        if (layer, unit) == (2, 0):
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.warns(ExperimentWarning, match="layer=2, unit=0: its worker was lost 2 times, .*: KilledWorker"):
        result = swept(pg, acting(act), executor=client.get_executor(), recipe=build)
    failed = np.isnan(result.values)
    assert failed[2, 0]
    assert not failed[:2].any()  # others of its layer may be in its chunk
    assert result.values[~failed].tolist() == here.values[~failed].tolist()


@pytest.mark.slow
def test_where_no_worker_is_left_the_rest_is_run_here(
    pg: PatchableGraph, here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not what killed them. Nobody starts these workers again, so that their futures never end."""
    import distributed

    monkeypatch.setattr(clusters, "_PATIENCE", 2.0)
    parent, pids = os.getpid(), tmp_path / "pids"

    def act(layer: int, unit: int) -> None:
        if (layer, unit) == (1, 0):
            assert os.getpid() != parent, "it is run here"
            with pids.open("a") as stream:
                stream.write(f"{os.getpid()}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    with (
        at_most(240),
        distributed.LocalCluster(n_workers=0, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
        worker_for_good(cluster.scheduler_address, tmp_path),
    ):
        client.wait_for_workers(1)
        names = "|".join(client.nthreads())
        with pytest.warns(ExperimentWarning) as caught:
            result = swept(pg, acting(act), executor=client, recipe=build)
    assert len(pids.read_text().split()) == 1
    failed = np.isnan(result.values)
    assert failed[1, 0]
    assert failed.sum() <= 4  # a worker may have had another one waiting
    assert result.values[~failed].tolist() == here.values[~failed].tolist()
    messages = " ".join(str(warning.message) for warning in caught)
    count = failed.sum()
    assert re.search(
        rf"all its workers were lost \(({names})[^)]*\)\); {count} that workers may have been lost with are not "
        r"run; all others that it has not done are run in this process",
        messages,
    )
    (why,) = (each["error"] for each in result.errors if each["cell"] == {"layer": 1, "unit": 0})
    assert why.startswith("its worker was lost, and no other is left; here it may end this process")


@pytest.mark.parametrize("gone", ["client", "scheduler"])
def test_a_cluster_that_goes_away_is_an_error(pg: PatchableGraph, gone: str, tmp_path: Path) -> None:
    """Nobody knows what was run there, or what of it can be run here."""
    import distributed

    mark, file = tmp_path / "mark", tmp_path / "sweep.jsonl"

    def act(layer: int, unit: int) -> None:
        if (layer, unit) >= (1, 0):
            mark.touch()
            time.sleep(0.5)

    def go_away() -> None:
        # What a worker has done is lost with it until the client has it.
        while not mark.exists() or len(file.read_text().splitlines()) < 2:
            time.sleep(0.01)
        (client if gone == "client" else cluster).close()

    with (
        at_most(240),
        distributed.LocalCluster(1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        distributed.Client(cluster.scheduler_address, timeout=5) as client,
    ):
        going = threading.Thread(target=go_away)
        going.start()
        for _ in range(2):
            with pytest.raises(
                ExperimentError, match="client of the cluster was closed|does not accept work: ClosedClient"
            ):
                swept(pg, acting(act), executor=client, recipe=build, checkpoint=file)
            going.join()
    assert 1 < len(file.read_text().splitlines()) < 18


def test_a_cluster_that_is_restarted_loses_nothing(pg: PatchableGraph, here: Any, client: Any, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def act(layer: int, unit: int) -> None:
        if (layer, unit) == (1, 0):
            mark.touch()
        time.sleep(0.05)

    def restart() -> None:
        while not mark.exists():
            time.sleep(0.01)
        client.restart(wait_for_workers=False)

    restarting = threading.Thread(target=restart)
    restarting.start()
    with at_most(240):
        result = swept(pg, acting(act), executor=client, recipe=build)
        restarting.join()
    assert result.values.tobytes() == here.values.tobytes()


# -- Ray ---------------------------------------------------------------------------------------------------------------


def started() -> tuple[Any, Any]:
    """A cluster whose head runs no tasks, and its only other node, with room for one worker."""
    from ray.cluster_utils import Cluster

    few = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True, "object_store_memory": 10**8}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **few})
    return cluster, cluster.add_node(num_cpus=1, **few)


@pytest.mark.slow
def test_ray(
    pg: PatchableGraph,
    here: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cell that kills two workers is NaN, all others are right; so it is if no node, or no head, is left."""
    import ray

    monkeypatch.setattr(clusters, "_LONG_PATIENCE", 1.0)
    executor, mark, parent = RayExecutor(), tmp_path / "mark", os.getpid()

    def kill(layer: int, unit: int) -> None:
        if (layer, unit) == (2, 4):
            os.kill(os.getpid(), signal.SIGKILL)

    def wait(layer: int, unit: int) -> None:
        if (layer, unit) == (1, 0):
            assert os.getpid() != parent, "it is run here"
            mark.touch()
            time.sleep(60)

    def remove_node() -> None:
        while not mark.exists():
            time.sleep(0.01)
        cluster.remove_node(node)

    with at_most(240):
        try:
            cluster, node = started()
        except Exception:  # on a busy machine a node may not be up after the 30 seconds that Ray waits
            ray.shutdown()
            cluster, node = started()
        try:
            ray.init(cluster.address, log_to_driver=False)
            with pytest.raises(ExperimentError, match="the recipe failed in a worker: ZeroDivisionError"):
                swept(pg, executor=executor, recipe=lambda: 1 / 0)
            with pytest.warns(ExperimentWarning, match="unit=4: its worker was lost 2 times, .*: WorkerCrashedError"):
                result = swept(pg, acting(kill), executor=executor, recipe=build, progress=True)
            check_all_but(result, here, [2, 4])
            assert re.search(r"18/18 .*\d workers?\]", capsys.readouterr().err)

            removing = threading.Thread(target=remove_node)
            removing.start()
            with pytest.warns(ExperimentWarning) as caught:
                result = swept(pg, acting(wait), executor=executor, recipe=build)
            removing.join()
            assert "; 1 that workers may have been lost with are not run; all others" in str(caught[0].message)
            check_all_but(result, here, [1, 0])
            never = RayExecutor(num_gpus=8)
            never.check()
            time.sleep(1.1)
            with pytest.warns(ExperimentWarning, match="the cluster has no node with 1 CPU, 8 GPU yet"):
                never.check()
            cluster.head_node.kill_gcs_server()
            executor.check()  # the head may be restarted
            monkeypatch.setattr(clusters, "_HEAD_PATIENCE", 0.0)
            with pytest.raises(clusters.WorkersLostError, match="the head of the Ray cluster does not answer"):
                executor.check()
            assert not ray.is_initialized()  # it would end this process
        finally:
            ray.shutdown()
            cluster.shutdown()
        with pytest.raises(ExperimentError, match="Ray is not connected"):
            swept(pg, executor=executor, recipe=build)


def check_all_but(result: Any, here: Any, failed: list[int]) -> None:
    assert np.argwhere(np.isnan(result.values)).tolist() == [failed]
    assert np.array_equal(result.values, np.where(np.isnan(result.values), np.nan, here.values), equal_nan=True)
