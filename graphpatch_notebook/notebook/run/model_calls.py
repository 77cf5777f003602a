"""Calls of a graph for the tree browser: on the same inputs, from the same state, which is restored afterwards."""

from __future__ import annotations

import ast
import ctypes
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from graphpatch_notebook.capture.inputs import ExampleInputs
from graphpatch_notebook.errors import ChosenPatchError, GraphPatchError, SessionError, cut
from graphpatch_notebook.notebook.display.tables import file_label
from graphpatch_notebook.notebook.messages import RunState
from graphpatch_notebook.notebook.session.expressions import (
    evaluated_call,
    parse_arguments,
    undefined,
    written_arguments,
)
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.options import options_among
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patching.model_state import copied, copied_output, preserved
from graphpatch_notebook.warning_places import collected_warnings

NO_INPUTS = (
    "there are no example inputs for this graph; type the arguments of a call in the field Inputs, or give some: "
    "pg.browse(inputs=...)"
)


@dataclass(frozen=True)
class RunInputs:
    """The inputs of one run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    text: str = "..."  # the known arguments, as Python code

    def copy(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a copy for one call, since a model may write into its inputs, or extend a cache."""
        args, kwargs = copied((self.args, self.kwargs))
        return args, kwargs


def inputs_for_run(session: Session, namespace: dict[str, Any], typed: str | None, given: Any) -> RunInputs:
    """Returns the inputs of a run: the typed ones (Python code), else the given ones, else the example inputs.

    The code of the example inputs is evaluated again, if it is known and its variables still exist, so that what runs
    is what the views show.

    Raises:
        ChosenPatchError: The code is not valid, or cannot be evaluated (`field` is `inputs`).
        SessionError: There are no inputs.
    """
    examples: ExampleInputs | None = captured(session.graph).examples
    code = typed.strip() if typed is not None else ""
    if not code and given is not None:
        args, kwargs = given_arguments(given)
        default = "*inputs" if len(args) > 1 else "**inputs" if kwargs else "inputs"
        return RunInputs(args, kwargs, written_arguments(args, kwargs, namespace) or default)
    if code:
        return evaluated_arguments(code, namespace)
    if session.origin.arguments is not None:
        try:
            return evaluated_arguments(session.origin.arguments, namespace)
        except ChosenPatchError:
            if examples is None:
                raise
    if examples is None:
        raise SessionError(NO_INPUTS)
    if (change := examples.change()) is not None:
        raise SessionError(f"the example inputs were changed since the capture ({change}): give others")
    return RunInputs(examples.args, examples.kwargs)


def given_arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments that the given inputs represent.

    Example:
        >>> given_arguments((1, 2)), given_arguments({"x": 1}), given_arguments(3)
        (((1, 2), {}), ((), {'x': 1}), ((3,), {}))
    """
    if type(given) is tuple:
        return given, {}
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return (), dict(given)
    return (given,), {}


def evaluated_arguments(text: str, namespace: dict[str, Any]) -> RunInputs:
    """Returns the arguments of typed code, without options of the capture.

    Example:
        >>> evaluated_arguments("a, scale=2 * a", {"a": 3})
        RunInputs(args=(3,), kwargs={'scale': 6}, text='a, scale=2 * a')
    """
    try:
        call = parse_arguments(text)
    except ValueError as error:
        raise ChosenPatchError("inputs", str(error)) from None
    call.keywords = [keyword for keyword in call.keywords if keyword.arg != "extraction_options"]
    written = ", ".join(ast.unparse(argument) for argument in (*call.args, *call.keywords))
    try:
        _, args, kwargs = options_among(*evaluated_call(call, namespace, "inputs"))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, NameError) and error.name not in namespace:
            message = undefined(error.name, namespace)
        raise ChosenPatchError("inputs", f"inputs {cut(repr(text))}: {message}") from error
    return RunInputs(args, kwargs, written)


T = TypeVar("T")
_TORCH, _PACKAGE = (f"{folder}{os.sep}" for folder in (torch.__path__[0], Path(__file__).parents[2]))
PatchMap = Mapping[str, list[Patch[Any]]]

_one_at_a_time = threading.Lock()
_MOMENT = 0.02


@dataclass
class CallCount:
    """The number of calls. Other threads may read it during the run."""

    total: int
    done: int = 0


class ModelCalls:
    """Calls of a graph without gradients, each on a copy of the inputs and from the same state of the model.

    Attributes:
        count: Updated after each call.
        warnings: The warnings of the last call.
    """

    def __init__(self, graph: PatchableGraph, inputs: RunInputs, settings: ThreadSettings, count: CallCount) -> None:
        self.graph, self.inputs, self.count = graph, inputs, count
        self.warnings: list[str] = []
        self._settings = settings

    def call(self, job: Job[Any], patch_map: PatchMap, read: Callable[[], T]) -> tuple[Any, T]:
        """Calls the graph with patches, in the thread of the job.

        Returns:
            A copy of the output, and what `read` returned before the state of the model was restored.
        """
        with alone(job), self._settings.applied(), torch.no_grad(), collected_warnings() as self.warnings:
            args, kwargs = self.inputs.copy()

            def call() -> Any:
                with self.graph.patch(dict(patch_map.items())) if patch_map else nullcontext():
                    return self.graph(*args, **kwargs)

            with preserved(captured(self.graph).module):
                # A copy, since the next call may write into the same tensors.
                found = copied_output(job.interruptibly(call)), read()
        self.count.done += 1
        return found


@contextmanager
def alone(job: Job[Any] | None = None) -> Iterator[None]:
    """Waits for the calls of other sessions, which may use the same model, and share the random generators."""
    # Not within `interruptibly`: an interrupt right after `acquire` would leave the lock locked.
    while not _one_at_a_time.acquire(timeout=_MOMENT):
        if job is not None:
            job.interruptibly(lambda: None)
    try:
        yield
    finally:
        _one_at_a_time.release()


def in_words(error: BaseException) -> str:
    """Returns the message for an error of a run: the error, and the innermost line of the user's code."""
    if isinstance(error, GraphPatchError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    lines = [line for line in traceback.extract_tb(error.__traceback__) if not line.filename.startswith(_PACKAGE)]
    own = [line for line in lines if not line.filename.startswith(_TORCH)] or lines
    where = [
        f"{file_label(line.filename)}:{line.lineno}, in {line.name}: {line.line}".rstrip(": ") for line in own[-1:]
    ]
    return "\n".join([text, *where, *map(str, getattr(error, "__notes__", ()))])


# --------------------------------------------------------------------------------------------------------------------
# Jobs: calls of the model in a thread, which can be observed and interrupted from another thread


R = TypeVar("R")
_ENOUGH_JUMPS = 100


def raise_in_thread(ident: int, kind: type[BaseException]) -> None:
    """Raises an exception in another thread, as soon as it runs Python code again.

    Never revoke it (the same function with NULL): up to CPython 3.12, all threads would then check for it at every
    jump, and would not make progress under a profiler.

    `PyThreadState_SetAsyncExc`: CPython 3.10 to 3.14. Tested by tests/notebook/run/test_jobs.py.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))


class ThreadSettings:
    """The settings of torch that belong to a thread and that a run depends on, read in the current thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._device = torch.get_default_device()
        self._threads = torch.get_num_threads()
        self._cuda = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Applies the settings in the current thread, within the block."""
        # A new thread starts with the number of the environment variable, which would change how sums are split.
        torch.set_num_threads(self._threads)
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)
        with nullcontext() if self._device.type == "cpu" else self._device:
            yield


class Job(Generic[T]):
    """A function that runs in its own thread.

    It receives the job, whose `interruptibly` it calls. `in_words` returns the message for an error, which is not kept
    itself: its traceback refers to tensors.
    """

    def __init__(self, work: Callable[[Job[T]], T], in_words: Callable[[BaseException], str]) -> None:
        self.result: T | None = None  # if `state` is "done"
        self.error: str | None = None  # in words, if `state` is "failed"
        self._in_words = in_words
        self._state: RunState = "running"
        self._lock = threading.Lock()
        self._is_open = False
        self.is_interrupted = False  # it may still be running for a moment
        self._started = time.monotonic()
        self._ended: float | None = None
        # In Python 3.14, a thread may inherit the context variables of the thread that starts it.
        self._thread = threading.Thread(
            target=Context().run, args=(self._run, work), name="graphpatch-run", daemon=True
        )
        self._thread.start()

    @property
    def state(self) -> RunState:
        """The state of the job."""
        if self._state == "running" and not self._thread.is_alive():
            return "interrupted"  # so late that `_run` could not set the state
        return self._state

    @property
    def seconds(self) -> float:
        """The duration of the job so far, in seconds."""
        return (time.monotonic() if self._ended is None else self._ended) - self._started

    def _run(self, work: Callable[[Job[T]], T]) -> None:
        state: RunState = "failed"
        try:
            self.result = work(self)
            state = "done"
        except KeyboardInterrupt:
            state = "interrupted"
        except BaseException as error:
            self.error = self._in_words(error)
        self._ended = time.monotonic()
        self._state = state

    def interruptibly(self, call: Callable[[], R]) -> R:
        """Returns the result of `call`, the only code that an interrupt can stop. Code after it always runs.

        Raises:
            KeyboardInterrupt: The job was interrupted, before or during `call`.
            Exception: Any error that `call` raises.
        """
        with self._lock:
            if self.is_interrupted:
                raise KeyboardInterrupt
            self._is_open = True
        try:
            return call()
        finally:
            with self._lock:
                self._is_open = False
            # A pending interrupt is raised here at the latest: Python checks for it at each backward jump.
            for _ in range(_ENOUGH_JUMPS):
                pass

    def interrupt(self) -> None:
        """Interrupts the job at its next line of Python. Does nothing if the job has finished."""
        with self._lock:
            self.is_interrupted = True
            if self._is_open and self._thread.ident is not None:
                raise_in_thread(self._thread.ident, KeyboardInterrupt)

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the job has finished."""
        self._thread.join(seconds)
