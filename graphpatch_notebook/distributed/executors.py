"""Runs tasks on a graph elsewhere, by anything that has `submit`; and the checkpoint of a sweep, a file for each chunk.

What a cluster does itself is left to it: starting and restarting workers, and waiting for them.

sweep.json      identifies the sweep
000000.json     the results of some cells by number, with a checksum: a file is complete, or does not exist
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import pickle
import queue
import threading
import uuid
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.records import spliced_calls
from graphpatch_notebook.errors import (
    ExperimentError,
    add_note,
    collected_warnings,
    reading,
    warn_each_time,
    whole_file,
)
from graphpatch_notebook.inspection.meanings import Meanings, differing_names, meanings
from graphpatch_notebook.inspection.resolution import kept_for
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patching import innermost
from graphpatch_notebook.patching.model_state import is_distributed, processes_of, runs_where_the_model_is, sharding_of
from graphpatch_notebook.torch_compat import is_fully_sharded
from graphpatch_notebook.values import digest

_SAMPLED = 1024
_SWEEP, _NAMES = "sweep.json", "names"


@runs_where_the_model_is
def weights_digest(pg: PatchableGraph) -> str:
    """Returns a digest of the modes of a model, and of names, shapes, dtypes and some values of parameters and buffers.

    If the model is sharded, the digest covers all processes, and all of them must call this.

    Raises:
        GraphError: The model has no weights.
    """
    captured(pg).check_weights()
    found, module = {}, captured(pg).module
    each: Any
    for each in module.modules():
        if is_fully_sharded(each) and hasattr(each, "reshard"):  # not the older FSDP
            each.reshard()  # a call may leave weights whole
    held = [("", module), *((call.target, call.frame.module) for call in spliced_calls(pg.nodes.root))]
    tensors = [pair for start, one in held for pair in (*one.named_parameters(start), *one.named_buffers(start))]
    for name, tensor in tensors:
        part: Any = tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
        is_plain = type(part.data) is Tensor and not part.is_quantized
        sample = part.detach().reshape(-1)[:: max(1, -(-part.numel() // _SAMPLED))] if is_plain else None
        found[name] = (str(tensor.dtype), tuple(tensor.shape), sample)
    own = digest(found, [getattr(each, "training", False) for each in module.modules()])
    processes = processes_of(captured(pg).root)
    return own if processes is None else digest(processes.gathered(own))


def _reading(file: Path) -> AbstractContextManager[None]:
    return reading(repr(str(file)), ExperimentError, ". Delete it to run its cells again; without sweep.json, all")


def _checksum(cells: Mapping[Any, Any]) -> int:
    return zlib.crc32(json.dumps(cells).encode())  # the same of what was read: numbers are written exactly


class Checkpoint:
    """The checkpoint of one sweep.

    Args:
        folder: The name of the folder; it need not exist.
        own: JSON data that identifies the sweep, by what messages call it; under `names`, their meanings.
        parse: Returns a result from its JSON data.

    Attributes:
        done: The results in the folder, by the number of the cell.

    Raises:
        ExperimentError: The folder holds other data, or a damaged file. It is not changed.
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], own: Mapping[str, Any], parse: Callable[[Any], Any]) -> None:
        self._folder = Path(folder).expanduser()
        self._folder.mkdir(parents=True, exist_ok=True)
        header = self._folder / _SWEEP
        if not header.exists():
            if any(self._folder.iterdir()):
                raise ExperimentError(
                    f"checkpoint={str(folder)!r} is a folder that was not written by a sweep: give another name"
                )
            with whole_file(header) as file:
                file.write_text(json.dumps(own))
        with _reading(header):
            found = json.loads(header.read_text())
            differing = [name for name in own if name != _NAMES and found.get(name) != own[name]]
            if not differing and (names := differing_names(own.get(_NAMES, {}), found.get(_NAMES, {}))):
                differing = [f"names, which mean other values ({names}),"]
        if differing:
            raise ExperimentError(
                f"checkpoint={str(folder)!r} holds another sweep: its {', '.join(differing)} differ. Give another "
                "name, or delete the folder to start over"
            )
        files = sorted(self._folder.glob("[0-9]*.json"))
        self._count = int(files[-1].stem) + 1 if files else 0
        self.done: dict[int, Any] = {}
        for file in files:
            with _reading(file):
                found = json.loads(file.read_text())
                if found["checksum"] != _checksum(cells := found["cells"]):
                    raise ValueError("it has other results than were written")
                self.done |= {int(number): parse(data) for number, data in cells.items()}

    def append(self, cells: Mapping[int, Any]) -> None:
        """Writes the results of a chunk, as JSON data by the number of the cell, and returns when they are on the disk.

        If that fails (for example, because the disk is full), a warning is issued and the sweep continues in memory.
        """
        if not cells:
            return
        try:
            with whole_file(self._folder / f"{self._count:06}.json") as file:
                file.write_text(json.dumps({"checksum": _checksum(cells), "cells": cells}))
            self._count += 1
        except OSError as error:
            warn_each_time(f"results of {len(cells)} cells are kept in memory only: {error}", "experiment")


_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")
_AHEAD = 32
"""How many results of `map_batches` may wait for an earlier one: so many are in memory."""
_POLL = 1.0  # seconds; on Windows, a wait without a timeout cannot be interrupted
_RECIPE = """\
    def build():
        model = AutoModelForCausalLM.from_pretrained("gpt2").eval()
        return PatchableGraph(model, **tokenizer("The", return_tensors="pt"))

    pg.sweep(..., executor=executor, recipe=build)  # or recipe="FILE", which pg.save("FILE") wrote"""

Task = Callable[[Any], Any]
"""Returns the result of one task, given what is to be done."""


class RayExecutor(Executor):
    """An executor for `executor=` that runs tasks on a Ray cluster.

    Connect with `ray.init(...)` first. Each worker builds the model once.

    Args:
        **options: What a task needs, as for `ray.remote`: `num_gpus=1` gives each worker a GPU of its own
            (`CUDA_VISIBLE_DEVICES`), and so one model for each GPU; `num_cpus`, `memory`, `resources`.

    Raises:
        ExperimentError: Ray is not installed.

    Example:
        >>> import ray  # doctest: +SKIP
        >>> ray.init("auto")  # doctest: +SKIP
        >>> pg.sweep(..., executor=RayExecutor(num_gpus=1), recipe=build)  # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        from graphpatch_notebook.errors import extra

        ray = extra("ray", "RayExecutor", ": pip install ray")
        # With `max_calls=0`, workers with GPUs keep the model after a task.
        self._call = ray.remote(**{"num_cpus": 1, "max_retries": 0, "max_calls": 0} | options)(_call)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Returns a future of `fn(*args, **kwargs)`."""
        return self._call.remote(fn, args, kwargs).future()  # type: ignore[no-any-return]


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def map_batches(
    pg: PatchableGraph,
    function: Callable[[PatchableGraph, _Batch], _Result],
    batches: Iterable[_Batch],
    *,
    executor: Any = None,
    recipe: Any = None,
) -> Iterator[_Result]:
    """Yields `function(pg, batch)` for each batch, in order.

    With `executor=`, batches run in threads, in other processes or on a cluster, with the same results as here. At most
    32 results wait for an earlier one. A batch whose worker dies runs once more, on another worker.

    Args:
        pg: The graph.
        function: What to compute. For other processes it is pickled, and so is what it returns.
        batches: The batches, which are read when they are needed.
        executor: As for `pg.sweep`.
        recipe: As for `pg.sweep`.

    Raises:
        ExperimentError: The executor cannot be used, a worker has another model, or a batch ended its worker twice.
        Exception: What the function raises.

    Example:
        Scores over a dataset, with a running mean and standard error:

        >>> import torch
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from graphpatch_notebook.experiments import attribute, average
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.ones(1, 2))
        >>> pairs = [(torch.randn(1, 2), torch.zeros(1, 2)) for _ in range(8)]
        >>> with ThreadPoolExecutor(2) as executor:
        ...     scores = map_batches(pg, lambda pg, pair: attribute(pg, torch.sum, *pair), pairs, executor=executor)
        ...     int(average(scores)["count"].max())
        8
    """
    if executor is None:
        return (function(pg, batch) for batch in batches)
    return _in_order(Workers(executor, recipe, pg, functools.partial(_BatchTask, function)), batches)


@dataclass(frozen=True)
class _BatchTask:
    function: Callable[[PatchableGraph, Any], Any]
    pg: PatchableGraph

    def __call__(self, batch: Any) -> tuple[Any, BaseException | None]:
        try:
            return self.function(self.pg, batch), None
        except Exception as error:
            return None, sendable(error)


def _in_order(workers: Workers, batches: Iterable[Any]) -> Iterator[Any]:
    waiting: dict[int, Any] = {}
    following = 0
    for number, found in workers.results(batches, _AHEAD):
        waiting[number] = (None, ExperimentError(found.reason)) if isinstance(found, Lost) else found
        while following in waiting:
            result, error = waiting.pop(following)
            if error is not None:
                add_note(error, f"raised for batch {following}")
                raise error
            following += 1
            yield result


# -- here --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lost:
    """The result of a task that was lost with its worker, twice.

    Attributes:
        reason: Why, as a message.
    """

    reason: str


class Workers:
    """Submits the tasks of one call to an executor.

    Args:
        executor: The executor.
        recipe: How a worker builds the graph; not needed in threads.
        pg: The graph, which threads use.
        start: Returns what runs tasks on a graph: each thread of a worker calls it once.
        names: The meanings that names must have in the workers. Default: those of all names.

    Raises:
        ExperimentError: The executor cannot be used for this graph, or `start` cannot be pickled.
    """

    def __init__(
        self,
        executor: Any,
        recipe: Any,
        pg: PatchableGraph,
        start: Callable[[PatchableGraph], Task],
        names: Meanings | None = None,
    ) -> None:
        check_executor(executor, recipe, pg)
        self._given = self._executor = executor
        self._done: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._messages: set[str] = set()
        self._has_results = False
        self._run: Callable[[Any, int], Any]
        if isinstance(executor, ThreadPoolExecutor):
            tasks = _Tasks(pg, start)
            self._is_elsewhere, self._run = False, lambda content, _: (tasks.run, content)
        else:
            path = str(Path(recipe).expanduser().absolute()) if isinstance(recipe, (str, os.PathLike)) else recipe
            known = zlib.compress(dumps(kept_for(pg.nodes, meanings) if names is None else names))
            call = uuid.uuid4().hex, dumps(path), weights_digest(pg), known, dumps(start)
            # Some schedulers know a task by its arguments, and would return the error of its last attempt.
            self._is_elsewhere, self._run = True, lambda content, attempt: (_run_task, *call, dumps(content), attempt)

    def results(self, contents: Iterable[Any], ahead: int) -> Generator[tuple[int, Any]]:
        """Yields number and result of each task as they are done; `Lost` for those that lost their worker twice.

        Args:
            contents: What is to be done, in each task: read when there is room.
            ahead: How many tasks are submitted from the first one on that is not done.

        Raises:
            ExperimentError: The first tasks cannot run: the recipe fails, or builds another model.
            KeyboardInterrupt: It was interrupted. What was done by then is yielded before.
        """
        running: dict[int, tuple[Any, Any]] = {}
        try:
            for number, content in enumerate(contents):
                self._submit(running, number, content, 0)
                while running and number - next(iter(running)) >= ahead - 1:
                    yield from self._next(running)
            while running:
                yield from self._next(running)
        except KeyboardInterrupt:
            for number, (_, future) in running.items():
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    if future.done():
                        yield number, self._received(future)
            raise
        finally:
            for _, future in running.values():
                with contextlib.suppress(Exception):
                    getattr(future, "release", future.cancel)()  # `cancel` of Dask waits for a scheduler that is gone
            if self._executor is not self._given:
                for process in (vars(self._executor)["_processes"] or {}).values():  # one may be in a long task
                    process.terminate()
                self._executor.shutdown(wait=False, cancel_futures=True)
                self._executor = self._given

    def _submit(self, running: dict[int, Any], number: int, content: Any, attempt: int) -> None:
        task = self._run(content, attempt)
        try:
            future = self._executor.submit(*task)
        except Exception as error:  # such as a pool whose process died
            future = Future()
            future.set_exception(error)
        running[number] = content, future
        future.add_done_callback(lambda _: self._done.put((number, attempt)))

    def _next(self, running: dict[int, tuple[Any, Any]]) -> Iterator[tuple[int, Any]]:
        try:
            number, attempt = self._done.get(timeout=_POLL)
        except queue.Empty:
            return
        if number not in running:  # it ran again, alone
            return
        content, future = running[number]
        try:
            result = self._received(future)
        except BrokenExecutor:
            yield from self._one_by_one(running)
            return
        except (Exception, asyncio.CancelledError) as error:
            is_ours = isinstance(error, ExperimentError)
            if is_ours and not self._has_results:
                raise ExperimentError(f"the executor cannot run this: {error}") from error
            if attempt == 0 and not is_ours:
                self._submit(running, number, content, 1)
                return
            result = Lost(f"{type(error).__name__}: {error}")
        del running[number]
        yield number, result

    def _received(self, future: Any) -> Any:
        """Returns the result of a task, and gives its warnings here."""
        found = future.result()
        result, messages = pickle.loads(found) if self._is_elsewhere else found
        self._has_results = True
        for message, kind in messages.items():
            if message not in self._messages:
                warn_each_time(message, kind)
        self._messages.update(messages)
        return result

    def _one_by_one(self, running: dict[int, tuple[Any, Any]]) -> Iterator[tuple[int, Any]]:
        """Yields the results of the tasks that a broken pool had, run alone, which shows whose worker ends."""
        tasks = sorted(running.items())
        running.clear()
        is_broken = True
        for number, (content, _) in tasks:
            if is_broken:
                self._renew()
            try:
                result, is_broken = self._received(self._executor.submit(*self._run(content, 1))), False
            except (Exception, asyncio.CancelledError) as error:
                result, is_broken = Lost(f"{type(error).__name__}: {error}"), isinstance(error, BrokenExecutor)
            yield number, result
        if is_broken:
            self._renew()

    def _renew(self) -> None:
        """Starts a pool like the one that broke: Python's own takes no more tasks when a worker has ended."""
        if type(self._executor) is ProcessPoolExecutor:  # which does not say how it was made
            settings = ("_max_workers", "_mp_context", "_initializer", "_initargs")
            made: list[Any] = [vars(self._executor)[name] for name in settings]
            self._executor = ProcessPoolExecutor(*made)


def check_executor(executor: Any, recipe: Any, pg: PatchableGraph) -> None:
    """Checks that an executor can be used with this recipe for this graph.

    Raises:
        ExperimentError: It cannot be used.
    """
    is_autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    if innermost(captured(pg)) is not None or is_autocast:
        raise ExperimentError(
            "patch contexts and autocast apply to the thread that entered them, and executor= runs the model "
            "elsewhere: leave the with block, and have make_patches return these patches too"
        )
    if not callable(getattr(executor, "submit", None)):
        raise ExperimentError(
            f"executor= takes an executor, with a method submit that returns a future, not {type(executor).__name__}; "
            "such as concurrent.futures.ThreadPoolExecutor(2)"
        )
    if sharding_of(captured(pg).root) is not None:
        raise ExperimentError("the model is sharded over processes, which run it in one order: leave executor= out")
    if isinstance(executor, ThreadPoolExecutor):
        return
    if captured(pg).permanent:
        raise ExperimentError(
            "this graph has permanent patches, and recipe= builds one without them: have make_patches return these too"
        )
    if isinstance(recipe, Module) or not (callable(recipe) or isinstance(recipe, (str, os.PathLike))):
        raise ExperimentError(
            f"{type(executor).__name__} runs the model in other processes: recipe= is a function that builds the "
            f"PatchableGraph there, or the name of a file, not {type(recipe).__name__}:\n{_RECIPE}"
        )


# -- in a worker -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tasks:
    """Runs the tasks of one call in this process."""

    pg: PatchableGraph
    start: Callable[[PatchableGraph], Task]
    _by_thread: dict[int, Task] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def run(self, content: Any) -> tuple[Any, dict[str, str]]:
        """Returns the result of a task, and the kinds of its warnings by message."""
        thread = threading.get_ident()
        with collected_warnings() as messages:
            with self._lock:
                if thread not in self._by_thread:
                    self._by_thread[thread] = self.start(self.pg)
            try:
                return self._by_thread[thread](content), messages
            except SystemExit as error:  # it would end the worker, or be raised where the results are taken
                raise RuntimeError(f"SystemExit: {error}") from None


_lock = threading.Lock()
_graphs: dict[tuple[bytes, str], PatchableGraph] = {}  # one at most, by recipe and weights
_calls: dict[str, _Tasks] = {}  # one at most


def _run_task(
    call: str,
    recipe: bytes,
    weights: str,
    names: bytes,
    start: bytes,
    content: bytes,
    attempt: int,  # noqa: ARG001
) -> bytes:
    with _lock:
        if call not in _calls:
            _calls.clear()
            pg = _graph(recipe, weights)
            if differing := differing_names(pickle.loads(zlib.decompress(names)), kept_for(pg.nodes, meanings)):
                raise ExperimentError(f"names mean other values in the graph of a worker, by recipe=: {differing}")
            _calls[call] = _Tasks(pg, pickle.loads(start))
        tasks = _calls[call]
    # As bytes: between processes of one machine, torch would share the memory of each tensor.
    return dumps(tasks.run(pickle.loads(content)))


def _graph(recipe: bytes, weights: str) -> PatchableGraph:
    if (recipe, weights) not in _graphs:
        _graphs.clear()
        made = pickle.loads(recipe)
        try:
            pg = PatchableGraph.load(made) if isinstance(made, str) else made()
        except Exception as error:
            raise ExperimentError(f"the recipe failed in a worker: {type(error).__name__}: {error}") from error
        if not isinstance(pg, PatchableGraph):
            raise ExperimentError(f"the recipe must return a PatchableGraph, not {type(pg).__name__}")
        if weights_digest(pg) != weights:
            raise ExperimentError(
                "the model that the recipe builds in a worker has other weights, dtypes or modes (train or eval) than "
                "that of this graph"
            )
        _graphs[recipe, weights] = pg
    return _graphs[recipe, weights]


# -- pickling ----------------------------------------------------------------------------------------------------------


def dumps(value: Any) -> bytes:
    """Pickles a value for another process: functions by their code, and models not at all.

    Raises:
        ExperimentError: The value holds a model, or cannot be pickled.
    """
    stream = io.BytesIO()
    try:
        _pickler_class()(stream).dump(value)
    except ExperimentError:
        raise
    except Exception as error:  # whatever a user's class raises
        raise ExperimentError(f"cannot be sent to another process: {type(error).__name__}: {error}") from error
    return stream.getvalue()


@functools.cache
def _pickler_class() -> Any:
    from graphpatch_notebook.errors import extra

    class Pickler(extra("cloudpickle", "executor=").Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, PatchableGraph) or (
                isinstance(value, Module) and any(True for _ in value.parameters())
            ):
                raise ExperimentError(
                    f"the weights of a model ({type(value).__name__}) would be sent to other processes, since a "
                    "function or an argument refers to it: take what you need out of it before, and use the model "
                    f"where it runs (pg.run_there(function)) or build it there (recipe=):\n{_RECIPE}"
                )
            if type(value) is Tensor and value.layout is torch.strided and _is_view(value):
                return _same, (value.detach().clone().requires_grad_(value.requires_grad),)
            return super().reducer_override(value)

    return Pickler


def _is_view(tensor: Tensor) -> bool:
    # torch pickles the whole storage of a view, such as the embedding for one of its rows.
    return not tensor.is_meta and tensor.untyped_storage().nbytes() > tensor.nbytes


def _same(value: Any) -> Any:
    return value


def sendable(error: BaseException) -> BaseException:
    """Returns an error that can be pickled and unpickled: the same, or an `ExperimentError` with its text.

    `SystemExit`, of a function that ran elsewhere, is such an error, too: it would end the process here.
    """
    with contextlib.suppress(Exception):
        if not isinstance(error, SystemExit):
            pickle.loads(dumps(error))  # errors with own parameters may be pickled, but not unpickled
            return error
    return ExperimentError(f"{type(error).__name__}: {error}")
