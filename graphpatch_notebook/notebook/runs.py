"""Runs that views start, each in its own thread: *Run* and *Show activation* of the tree browser, and other views.

start            evaluates inputs, patch values and slices with the user's variables, in the caller's thread
  -> Job         runs the model without and with the patches, each on a copy of the inputs and from the same state
  -> report      compares the two (`run_report`), and sets the variables of probes
status           returns the progress of the run, or its report
"""

from __future__ import annotations

import ast
import ctypes
import itertools
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import Context
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from graphpatch_notebook.errors import ChosenPatchError, GraphPatchError, SessionError, collected_warnings, cut
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, resolve
from graphpatch_notebook.notebook.display.tables import file_label
from graphpatch_notebook.notebook.display.tokens import MOST_ROWS, TokenInputs, TokenLabels, logits_of, predictions
from graphpatch_notebook.notebook.messages import (
    ActivationStatus,
    ActivationView,
    JobStatus,
    NoPlot,
    RunReport,
    RunState,
    RunStatus,
)
from graphpatch_notebook.notebook.run_report import KeptValue, Plane, changes, copy_of, probe_report, view_of
from graphpatch_notebook.notebook.session.expressions import (
    evaluated_call,
    parse_arguments,
    undefined,
    written_arguments,
)
from graphpatch_notebook.notebook.session.session import ResolvedPatches, Session
from graphpatch_notebook.notebook.session.workspace import Results, Workspace
from graphpatch_notebook.options import options_among
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch, ProbePatch
from graphpatch_notebook.patching import held_value, tensor_at
from graphpatch_notebook.patching.model_state import copied, copied_output, preserved
from graphpatch_notebook.values import TensorSpec

T = TypeVar("T")
R = TypeVar("R")

_TORCH, _PACKAGE = (f"{folder}{os.sep}" for folder in (torch.__path__[0], Path(__file__).parents[1]))
_THREADING = threading.__file__
_MOST_KEPT = 8
_NO_INPUTS = (
    "there are no example inputs for this graph; type the arguments of a call in the field Inputs, or give some: "
    "pg.browse(inputs=...)"
)


# --------------------------------------------------------------------------------------------------------------------
# The inputs of a run


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

    Texts are tokens there.

    The code of the example inputs is evaluated again, if it is known and its variables still exist, so that what runs
    is what the views show.

    Raises:
        ChosenPatchError: The code is not valid, or cannot be evaluated (`field` is `inputs`).
        SessionError: There are no inputs.
    """
    found = _inputs_for_run(session, namespace, typed, given)
    args, kwargs = captured(session.graph).tokenized(found.args, found.kwargs)
    return replace(found, args=args, kwargs=kwargs)


def _inputs_for_run(session: Session, namespace: dict[str, Any], typed: str | None, given: Any) -> RunInputs:
    examples = captured(session.graph).examples
    if typed is not None and typed.strip():
        return evaluated_arguments(typed.strip(), namespace)
    if given is not None:
        args, kwargs = given_arguments(given)
        default = "*inputs" if len(args) > 1 else "**inputs" if kwargs else "inputs"
        return RunInputs(args, kwargs, written_arguments(args, kwargs, namespace) or default)
    if session.origin.arguments is not None:
        try:
            return evaluated_arguments(session.origin.arguments, namespace)
        except ChosenPatchError:
            if examples is None:
                raise
    if examples is None:
        raise SessionError(_NO_INPUTS)
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
    call.keywords = [keyword for keyword in call.keywords if keyword.arg not in ("extraction_options", "tokenizer")]
    written = ", ".join(ast.unparse(argument) for argument in (*call.args, *call.keywords))
    try:
        _, args, kwargs = options_among(*evaluated_call(call, namespace, "inputs"))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, NameError) and error.name not in namespace:
            message = undefined(error.name, namespace)
        raise ChosenPatchError("inputs", f"inputs {cut(repr(text))}: {message}") from error
    return RunInputs(args, kwargs, written)


# --------------------------------------------------------------------------------------------------------------------
# Jobs: calls of the model in a thread, which can be observed and interrupted from another thread


_one_at_a_time = threading.Lock()
_MOMENT = 0.02
_ENOUGH_JUMPS = 100


class Job(Generic[T]):
    """A function that runs in its own thread. It receives the job, whose `interruptibly` it calls.

    Attributes:
        total: How many calls of the model it makes, of which `done` have ended.
        state: Its state. When it is "done", `result` is what the function returned; when it is "failed", `error` says
            why in words. The error itself is not kept: its traceback refers to tensors.
        is_interrupted: Whether it was interrupted. It may still be running for a moment.
    """

    def __init__(self, work: Callable[[Job[T]], T], total: int = 1) -> None:
        self.total, self.done = total, 0
        self.result: T | None = None
        self.error: str | None = None
        self.state: RunState = "running"
        self.is_interrupted = False
        self._lock = threading.Lock()
        self._is_open = False
        self._started = time.monotonic()
        self._ended: float | None = None
        # In Python 3.14, a thread may inherit the context variables of the thread that starts it.
        self._thread = threading.Thread(
            target=Context().run, args=(self._run, work), name="graphpatch-run", daemon=True
        )
        self._thread.start()

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
            self.error = in_words(error)
        self._ended = time.monotonic()
        self.state = state

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
                # Never revoked (the same function with NULL): up to CPython 3.12, all threads would then check for it
                # at every jump, and would not make progress under a profiler.
                # `PyThreadState_SetAsyncExc`: CPython 3.10 to 3.14. Tested by tests/notebook/test_jobs.py.
                ident, kind = ctypes.c_ulong(self._thread.ident), ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, kind)

    @property
    def waits_for(self) -> str | None:
        """The line that must end before an interrupt takes effect; `None` if it was not interrupted."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None or not self.is_interrupted or self.state != "running":
            return None
        return "".join(_innermost(traceback.extract_stack(frame))) or None

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the job has finished."""
        self._thread.join(seconds)


def _innermost(stack: Sequence[traceback.FrameSummary]) -> list[str]:
    """Returns the innermost line of the user's code, or else of torch, if there is one."""
    lines = [line for line in stack if not line.filename.startswith(_PACKAGE)]
    own = [line for line in lines if not line.filename.startswith((_TORCH, _THREADING))] or lines
    return [f"{file_label(one.filename)}:{one.lineno}, in {one.name}: {one.line}".rstrip(": ") for one in own[-1:]]


def in_words(error: BaseException) -> str:
    """Returns the message for an error of a run: the error, and the innermost line of the user's code."""
    if isinstance(error, GraphPatchError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    where = _innermost(traceback.extract_tb(error.__traceback__))
    return "\n".join([text, *where, *map(str, getattr(error, "__notes__", ()))])


class ThreadSettings:
    """The settings of torch that belong to a thread and that a run depends on, read in the current thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._device = torch.get_default_device()
        self._threads = torch.get_num_threads()
        self._cuda = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @contextmanager
    def applied(self, job: Job[Any]) -> Iterator[None]:
        """Applies the settings in the thread of a job, and keeps runs of other sessions away, within the block."""
        with alone(job):
            # A new thread starts with the number of the environment variable, which would change how sums are split.
            torch.set_num_threads(self._threads)
            if self._cuda is not None:
                torch.cuda.set_device(self._cuda)
            with nullcontext() if self._device.type == "cpu" else self._device:
                yield


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


@dataclass
class ModelCalls:
    """Calls of a graph without gradients, each on a copy of the inputs and from the same state of the model."""

    graph: PatchableGraph
    inputs: RunInputs
    settings: ThreadSettings
    warnings: Iterable[str] = ()  # of the last call

    def call(
        self, job: Job[Any], patch_map: Mapping[str, Sequence[Patch[Any]]], read: Callable[[], R]
    ) -> tuple[Any, R]:
        """Calls the graph with patches, in the thread of the job.

        Returns:
            A copy of the output, and what `read` returned before the state of the model was restored.
        """
        with self.settings.applied(job), torch.no_grad(), collected_warnings() as self.warnings:
            args, kwargs = self.inputs.copy()

            def call() -> Any:
                with self.graph.patch(dict(patch_map.items())) if patch_map else nullcontext():
                    return self.graph(*args, **kwargs)

            with preserved(captured(self.graph).module):
                # A copy, since the next call may write into the same tensors.
                found = copied_output(job.interruptibly(call)), read()
        job.done += 1
        return found

    def labels(self, tokenizer: Any) -> Callable[[str], TokenLabels | None]:
        """Returns a function of a path: the texts of the tokens along the value there."""
        tokens, root = TokenInputs.of(self.graph, self.inputs.args, self.inputs.kwargs), captured(self.graph).root
        return lambda path: tokens.labels(tokenizer, root, path)


# --------------------------------------------------------------------------------------------------------------------
# The runs of one session


@dataclass(frozen=True)
class RunResult:
    """The results of a run: the tensors themselves, on the devices of the model, without gradients.

    Attributes:
        output: What the model returned with the patches.
        unpatched_output: What the model returned without the patches.
        activations: The values of probes and records, by the names of their variables.
    """

    output: Any
    unpatched_output: Any
    activations: dict[str, Any]


class Runs:
    """The runs of one session, one at a time. All views of a graph share those of `Runs.of`.

    Runs of several sessions never overlap: a later one waits. A run uses copies of its inputs, in its own thread:

    - Patch contexts and autocast of a cell do not apply. The default device is that of the thread that starts the run,
      or that last seen in the thread that created this object, if that is another one.
    - The model stays in its mode (`train` or `eval`). It runs without gradients.
    - Each call starts from the same state of the model and of the random generators, which is restored afterwards.

    Do not train the model or draw random numbers during a run: buffers and generators are restored, too.

    Args:
        session: The session.
        namespace: Returns the user's variables.
        inputs: The inputs: a tuple of arguments, a dict of keyword arguments, or one value. `None`: the example inputs.
        results: Records which variables hold results of probes; a new one by default.

    Attributes:
        typed: The default arguments of a call as Python code; `None`: those of `inputs`.
        last: The results of the last finished run.
        state: The number and state of the current or last run; `None` before the first one.
        followers: The views that show the runs. Their `follow_runs` is called when a run starts or ends, or the inputs
            change.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
        >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(1, 3))
        >>> session, variables = Session(pg), {}
        >>> _ = session.add(ChosenPatch("relu", "zero")), session.add(ChosenPatch("relu", "probe", name="zeros"))
        >>> runs = Runs(session, lambda: variables)
        >>> number = runs.start(None)
        >>> runs.wait(number)
        >>> status, buffers = runs.status(number)
        >>> status.report.changes[0].norm_after, variables["zeros"]
        (0.0, tensor([[0., 0., 0.]]))
    """

    def __init__(
        self,
        session: Session,
        namespace: Callable[[], dict[str, Any]],
        inputs: Any = None,
        results: Results | None = None,
    ) -> None:
        self._session = session
        self._namespace = namespace
        self.inputs = inputs
        self.typed: str | None = None
        self._results = Results(namespace) if results is None else results
        self._settings = ThreadSettings()
        self._numbers = itertools.count(1)
        self._started: dict[int, tuple[Job[Any], Hashable]] = {}  # with the key of an activation; `None` for a run
        self.last: RunResult | None = None
        self.state: dict[str, Any] | None = None
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()
        weakref.finalize(session.graph, _forget, weakref.ref(self)).atexit = False

    @staticmethod
    def of(session: Session, workspace: Workspace) -> Runs:
        """Returns the runs of a session, the same object as long as one of its views exists."""
        with _lock:
            reference = _shared.get(session)
            runs = reference() if reference is not None else None
            if runs is None:
                runs = Runs(session, lambda: workspace.namespace, results=workspace.results)
                _shared[session] = weakref.ref(runs)  # weak, since the value refers to the key
            return runs

    # -- the inputs ----------------------------------------------------------------------------------------------------

    def use(self, *, inputs: Any = None, typed: str | None = None) -> None:
        """Sets the inputs of runs. What is not given stays as it is."""
        if inputs is not None or typed is not None:
            self.inputs, self.typed = inputs, typed
        self._notify()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the graph; `None` without one."""
        return captured(self._session.graph).tokenizer

    def written(self) -> str | None:
        """Returns the default inputs of a run as Python code; `None` if their code is not known."""
        if self.typed is not None:
            return self.typed
        if self.inputs is not None:
            return written_arguments(*given_arguments(self.inputs), self._namespace())
        return self._session.origin.arguments

    @property
    def is_given(self) -> bool:
        """Whether runs use other inputs than the example inputs by default."""
        return self.typed is not None or self.inputs is not None

    @property
    def no_inputs(self) -> str | None:
        """A message if there are no inputs to run on; else `None`."""
        has_examples = captured(self._session.graph).examples is not None or self._session.origin.arguments is not None
        return None if self.is_given or has_examples else _NO_INPUTS

    def calls(self, inputs: str | None) -> ModelCalls:
        """Returns calls on the inputs; `inputs` are arguments as Python code."""
        # Requests may arrive in a thread of the kernel, which does not have the settings of the user's thread.
        if self._settings.thread == threading.get_ident():
            self._settings = ThreadSettings()
        typed = inputs if inputs is not None and inputs.strip() else self.typed
        found = inputs_for_run(self._session, self._namespace(), typed, self.inputs)
        return ModelCalls(self._session.graph, found, self._settings)

    def key(self, inputs: str | None) -> Hashable:
        """Returns a key of what a run without patches depends on. Any cell may have changed variables and weights."""
        cells = len(self._namespace().get("_ih", ()))  # the history of IPython
        return inputs, id(self.inputs), captured(self._session.graph).edits, cells

    # -- run -----------------------------------------------------------------------------------------------------------

    def start(self, inputs: str | None) -> int:
        """Starts a run with the chosen patches, and returns its number. `inputs` are the arguments as Python code.

        Raises:
            ChosenPatchError: The inputs cannot be evaluated (`field` is `inputs`).
            SessionError: A value cannot be evaluated, there are no inputs, or a run is in progress. Nothing ran.
        """
        self._check_idle()
        session, namespace = self._session, self._namespace()
        chosen, calls = session.chosen, self.calls(inputs)
        resolved = session.resolve(namespace, chosen)
        numbers = [one.number for one in chosen.enabled]
        alone = [one.number for one, _ in resolved.observing]  # for a call without the other patches
        is_compared = bool(alone) and len(resolved.observing) < len(numbers)
        probes = session.resolve(namespace, chosen.only(alone)) if is_compared else None
        names = {name: namespace[name] for one, _ in resolved.observing if one.index for name in one.index.names}

        def run(job: Job[Any]) -> tuple[RunReport, list[bytes]]:
            return self._run(job, calls, numbers, resolved, probes, names)

        return self._add(Job(run, 1 + bool(resolved.patch_map) + is_compared))

    def _run(
        self,
        job: Job[Any],
        calls: ModelCalls,
        numbers: list[int],
        resolved: ResolvedPatches,
        probes: ResolvedPatches | None,
        names: dict[str, Any],
    ) -> tuple[RunReport, list[bytes]]:
        def call(patches: ResolvedPatches) -> tuple[Any, list[KeptValue]]:
            read = lambda: [KeptValue.of(one, patch, names) for one, patch in patches.observing]  # noqa: E731
            return calls.call(job, patches.patch_map, read)

        unpatched, _ = call(ResolvedPatches({}, ()))
        before = {} if probes is None else {one.chosen.number: one for one in call(probes)[1]}
        output, kept = call(resolved) if resolved.patch_map else (unpatched, [])

        def report() -> tuple[RunReport, list[bytes]]:
            inputs = TokenInputs.of(calls.graph, calls.inputs.args, calls.inputs.kwargs)
            listed, remarks = changes(unpatched, output)
            predicted = predictions(unpatched, output, calls.graph, inputs)
            found = logits_of(output)
            if predicted and found is not None and len(found) > MOST_ROWS:
                what = "classes" if predicted[0].position is None else "tokens"
                remarks.append(f"the most probable {what} are those of the first {MOST_ROWS} rows of {len(found)}")
            buffers: list[bytes] = []
            labels = calls.labels(self.tokenizer)
            shown = [probe_report(one, before.get(one.chosen.number), labels, buffers) for one in kept]
            warnings = [*dict.fromkeys(calls.warnings), *remarks]
            call = f"{self._session.origin.graph}({calls.inputs.text})"
            return RunReport(call, job.seconds, numbers, warnings, predicted, listed, shown), buffers

        found = job.interruptibly(report)
        # From here on, nothing is interrupted: either all variables are set, or none.
        activations = {str(one.chosen.name): one.value for one in kept if one.value is not None}
        self._results.remove(str(one.chosen.name) for one in kept if one.value is None)
        self._results.put(activations)
        self.last = RunResult(output, unpatched, activations)
        return found

    # -- activations ---------------------------------------------------------------------------------------------------

    def start_activation(
        self, path: str, plane: str | None, is_patched: bool, inputs: str | None, axes: tuple[int, int] | None = None
    ) -> int:
        """Starts to get the value of a node, and returns the number of the job. Interrupts an earlier such job.

        Another slice of the value that is shown needs no run, unless a cell has run since.

        Args:
            path: The path of the node.
            plane: The slice to plot, as the user typed it.
            is_patched: Whether the chosen patches are applied.
            inputs: The arguments of the call as Python code; `None`: the default ones.
            axes: The dimensions that are rows and columns; `None`: the last two that the slice leaves.

        Raises:
            ChosenPatchError: `plane` or `inputs` is not valid, or `path` does not exist; `field` says which.
            SessionError: A value cannot be evaluated, there are no inputs, or a run is in progress. Nothing ran.
        """
        session, namespace = self._session, self._namespace()
        try:
            target = resolve(captured(session.graph).root, path)
        except Unresolvable as problem:
            raise ChosenPatchError("path", problem.message) from None
        wanted, chosen = Plane.of(plane, namespace, axes), session.chosen
        version = chosen.version if is_patched else None
        key = (target.text, version, self.key(inputs))
        for number, (job, other) in self._started.items():
            if other == key and job.state == "done" and job.result is not None and job.result.show(wanted):
                return number
        if isinstance(target.spec, TensorSpec) and not inputs and self.inputs is None:
            wanted.part(torch.empty(target.spec.shape, device="meta"))  # raises an error if it is not valid
        for number, (_, other) in self._started.items():
            if other is not None:
                self.close_activation(number)
        self._check_idle()
        patches = dict(session.resolve(namespace, chosen).patch_map) if is_patched else {}
        calls = None if is_held(target) and target.text not in patches else self.calls(inputs)
        tokenizer = self.tokenizer

        def run(job: Job[Any]) -> ShownValue:
            if calls is None:
                value, labels = held_value(target.frame.module, target.node.target), None
            else:
                probe = ProbePatch()
                own = [*patches.get(target.text, ()), probe]  # last: sees the patched value
                _, value = calls.call(job, {**patches, target.text: own}, lambda: copy_of(probe.activation))
                if value is None:
                    raise SessionError("; ".join(calls.warnings) or f"{target.text!r} was not computed in this run")
                labels = calls.labels(tokenizer)(target.text)
            return job.interruptibly(lambda: ShownValue(target.text, value, wanted, labels))

        return self._add(Job(run), key)

    def close_activation(self, number: int) -> None:
        """Interrupts an activation, and drops its value."""
        job, _ = self._started.get(number, (None, None))
        if job is not None:
            job.interrupt()
            if job.result is not None:
                job.result.value = None

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def wait(self, number: int, seconds: float | None = None) -> None:
        """Waits until a run, or the job for an activation, has finished."""
        self._find(number)[0].wait(seconds)

    def status(self, number: int) -> tuple[JobStatus, list[bytes]]:
        """Returns the status of a run or an activation, and its binary parts."""
        job, key = self._find(number)
        state = job.state
        known: dict[str, Any] = {"id": number, "state": state, "seconds": job.seconds}
        known["fraction"] = 1.0 if state == "done" else job.done / job.total or None
        known["error"] = job.error if state == "failed" else None
        known["waits_for"] = job.waits_for
        result = job.result if state == "done" else None
        if key is not None:
            view, buffers = (None, []) if result is None else (result.view, result.buffers)
            return ActivationStatus(**known, view=view), buffers
        # The state of an older run does not matter any more.
        if self.state is None or number >= self.state["id"]:
            before, self.state = self.state, {"id": number, "state": state}
            if self.state != before:
                self._notify()
        report, buffers = (None, []) if result is None else result
        return RunStatus(**known, report=report), buffers

    def interrupt(self, number: int) -> None:
        """Interrupts a job at its next line of Python. It leaves no patches active and sets no variables."""
        self._find(number)[0].interrupt()

    def _check_idle(self) -> None:
        if any(job.state == "running" and not job.is_interrupted for job, _ in self._started.values()):
            raise SessionError("a run is in progress; wait for it to finish, or interrupt it")

    def _add(self, job: Job[Any], key: Hashable = None) -> int:
        number = next(self._numbers)
        self._started[number] = job, key
        for old in list(self._started)[:-_MOST_KEPT]:
            del self._started[old]
        return number

    def _find(self, number: int) -> tuple[Job[Any], Hashable]:
        if number not in self._started:
            raise SessionError(f"run {number} is not available any more; run again")
        return self._started[number]

    def _notify(self) -> None:
        for follower in tuple(self.followers):
            follower.follow_runs()


def _forget(reference: weakref.ref[Runs]) -> None:
    """Drops all tensors, when the graph is deleted. Finished reports stay."""
    runs = reference()
    if runs is not None:
        runs.last = runs.inputs = None
        for number, (_, key) in list(runs._started.items()):
            if key is not None:
                runs.close_activation(number)


_shared: weakref.WeakKeyDictionary[Session, weakref.ref[Runs]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def is_held(target: Target) -> bool:
    """Whether the value is a parameter or buffer, so that the model need not run."""
    if target.node.kind not in ("parameter", "buffer") or target.dig:
        return False
    try:
        value = tensor_at(target.frame.module, target.node.target)
    except Exception:  # it may exist only while the model runs
        return False
    return isinstance(value, Tensor) and value.device.type != "meta"


class ShownValue:
    """The display of a value: `view` is for the front end, `buffers` are the values of its heatmap.

    `value` is kept for other slices, until it is set to `None`.
    """

    view: ActivationView
    buffers: list[bytes]

    def __init__(self, path: str, value: Any, plane: Plane, labels: TokenLabels | None) -> None:
        self.value, self._path, self._labels = value, path, labels
        try:
            self.show(plane)
        except ChosenPatchError as error:  # its shape differs from the recorded one
            self.show(Plane())
            self.view.plot = NoPlot(str(error))

    def show(self, plane: Plane) -> bool:
        """Shows a slice of the value, and returns whether that was possible: whether the value is still kept.

        Raises:
            ChosenPatchError: The slice is not valid for the value (`field` is `plane`).
        """
        if self.value is None:
            return False
        buffers: list[bytes] = []
        self.view = view_of(self._path, self.value, plane, self._labels, buffers)
        self.buffers = buffers
        return True
