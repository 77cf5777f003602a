"""Runs that the tree browser starts with *Run* and *Show activation*, each in its own thread.

start            evaluates inputs, patch values and slices with the user's variables, in the caller's thread
  -> Job         runs the model without and with the patches (`model_calls`, `jobs`)
  -> report      compares the two (`run_report`), and sets the variables of probes
status           returns the progress of the run, or its report
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from graphpatch_notebook.errors import ChosenPatchError, SessionError
from graphpatch_notebook.inspection.resolution import Unresolvable, resolve
from graphpatch_notebook.notebook.display.tokens import TokenInputs, TokenLabels, next_tokens
from graphpatch_notebook.notebook.run.activation import Activation, ShownValue
from graphpatch_notebook.notebook.run.jobs import Job, ThreadSettings
from graphpatch_notebook.notebook.run.model_calls import (
    CallCount,
    ModelCalls,
    Separate,
    given_arguments,
    in_words,
    inputs_for_run,
    no_inputs,
)
from graphpatch_notebook.notebook.run.run_report import Buffers, KeptValue, ProbedCalls, changes, with_copied_weights
from graphpatch_notebook.notebook.run.value_plots import Plane
from graphpatch_notebook.notebook.session.origin import written_arguments
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Results, Workspace
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.values import TensorSpec

_MOST_KEPT = 8
_BUSY = "a run is in progress; wait for it to finish, or interrupt it"


@dataclass
class StartedJob:
    """A job that was started, for a run or an activation."""

    id: int
    job: Job[Any]
    count: CallCount
    shows: Literal["report", "view"] = "report"  # the attribute of the result that its status has
    key: Hashable = None  # identifies the value of an activation

    def forget_value(self) -> None:
        """Drops the value that is kept for other slices, and what identifies it."""
        self.key = None
        if isinstance(self.job.result, ShownValue):
            self.job.result.forget_value()

    def status(self) -> tuple[dict[str, Any], list[bytes]]:
        """Returns the `RunStatus` or `ActivationStatus` of the front end, and its binary parts."""
        state = self.job.state
        result: Any = self.job.result if state == "done" else None
        status = {
            **self.job.status(state),
            "id": self.id,
            "fraction": 1.0 if state == "done" else self.count.done / self.count.total or None,
            self.shows: getattr(result, self.shows, None),
        }
        return status, getattr(result, "buffers", [])


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


@dataclass
class _Report:
    """The report of a finished run, and its binary parts."""

    report: dict[str, Any]
    buffers: list[bytes] = field(default_factory=list)


class Runs:
    """The runs of one session, one at a time. All views of a graph share those of `Runs.of`.

    Runs of several sessions never overlap: a later one waits. A run uses copies of its inputs, in its own thread:

    - Patch contexts that are active in a cell do not apply. Autocast and the default device are those of the thread
      that starts the run, or those last seen in the thread that created this object, if that is another one.
    - The model stays in its mode (`train` or `eval`). It runs without gradients, unless it needs them.
    - Each call starts from the same buffers, tensors in attributes of modules, and random generators, which are
      restored afterwards; except for a generator of the model that neither its attributes nor a `forward` refer to.

    Do not train the model or draw random numbers during a run: buffers and generators are restored, too.

    Args:
        session: The session.
        namespace: Returns the user's variables.
        inputs: The inputs: a tuple of arguments, a dict of keyword arguments, or one value. `None`: the example inputs.
        results: Records which variables hold results of probes; a new one by default.

    Attributes:
        tokenizer: Turns tokens into text (`decode` or `convert_ids_to_tokens`); `None` without one.
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
        >>> status["report"]["changes"][0]["norm_after"], variables["zeros"]
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
        self.tokenizer: Any = None
        self.inputs = inputs
        self.typed: str | None = None
        self._results = Results(namespace) if results is None else results
        self._settings = ThreadSettings()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._started: dict[int, StartedJob] = {}
        self._latest: Job[Any] | None = None
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

    def forget(self) -> None:
        """Drops all tensors, when the graph is deleted. Finished reports stay."""
        # Without the lock: the graph may be deleted in any thread, even in one that holds the lock.
        self.last = self.inputs = None
        for work in list(self._started.values()):
            work.forget_value()

    # -- the inputs ----------------------------------------------------------------------------------------------------

    def use(self, *, inputs: Any = None, typed: str | None = None, tokenizer: Any = None) -> None:
        """Sets the inputs of runs and the tokenizer. What is not given stays as it is."""
        if inputs is not None or typed is not None:
            self.inputs, self.typed = inputs, typed
        if tokenizer is not None:
            self.tokenizer = tokenizer
        self._notify()

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
        return None if self.typed is not None else no_inputs(self._session, self.inputs)

    # -- run -----------------------------------------------------------------------------------------------------------

    def start(self, inputs: str | None) -> int:
        """Starts a run with the chosen patches, and returns its number. `inputs` are the arguments as Python code.

        Raises:
            ChosenPatchError: The inputs cannot be evaluated (`field` is `inputs`).
            SessionError: A value cannot be evaluated, there are no inputs, or a run is in progress. Nothing ran.
        """
        self._check_idle()
        session, namespace = self._session, self._namespace()
        chosen = session.chosen
        resolved = session.resolve(namespace, chosen)
        found = inputs_for_run(session, namespace, self._chosen_inputs(inputs), self.inputs)
        probed = ProbedCalls(captured(session.graph).root, chosen, resolved, namespace)
        count = CallCount(len(probed.maps))
        names = {name: namespace[name] for one, _ in resolved.observing if one.index for name in one.index.names}
        kept: list[KeptValue] = []
        model = captured(session.graph).module

        def take(position: int, separate: Separate) -> None:
            def apart(value: Any) -> Any:
                return with_copied_weights(separate(value), model)

            if position == count.total - 1:
                kept[:] = [KeptValue.of(one, patch, names, apart) for one, patch in resolved.observing]
            elif position == count.total - 2:
                probed.take(names)

        settings = self._current_settings()
        calls = ModelCalls(session.graph, found, probed.maps, settings, count, take)
        head = {
            "call": f"{session.origin.graph}({found.text})",
            "patches": [one.number for one in chosen.enabled],
            "warnings": [remark for remark in (found.remark, settings.remark()) if remark],
        }
        with self._lock:
            before = self._check_idle()
            job = Job(lambda job: self._run(job, before, calls, kept, probed, head), in_words)
            return self._note(StartedJob(next(self._numbers), job, count))

    def _chosen_inputs(self, inputs: str | None) -> str | None:
        return inputs if inputs is not None and inputs.strip() else self.typed

    def _run(
        self,
        job: Job[_Report],
        before: Job[Any] | None,
        calls: ModelCalls,
        kept: list[KeptValue],
        probed: ProbedCalls,
        head: dict[str, Any],
    ) -> _Report:
        _wait_for(job, before)
        results = calls.run(job)
        unpatched, output, inputs = results.outputs[0], results.outputs[-1], results.tokens
        buffers = Buffers()

        def make() -> dict[str, Any]:
            found = changes(unpatched, output)
            root = captured(self._session.graph).root

            def labels(path: str) -> TokenLabels | None:
                return None if inputs is None else inputs.labels(self.tokenizer, root, path)

            tokens, remarks = self._tokens(unpatched, output, inputs)
            return {
                **head,
                "seconds": job.seconds,
                "warnings": [*head["warnings"], *dict.fromkeys(results.warnings), *found.remarks, *remarks],
                "tokens": tokens,
                "changes": found.listed,
                "probes": probed.reports(kept, labels, buffers),
            }

        report = job.interruptibly(make)
        # From here on, nothing is interrupted: either all variables are set, or none.
        activations = {str(one.chosen.name): one.value for one in kept if one.value is not None}
        self._results.remove(str(one.chosen.name) for one in kept if one.value is None)
        self._results.put(activations)
        self.last = RunResult(output, unpatched, activations)
        return _Report(report, buffers.parts)

    def _tokens(
        self, unpatched: Any, output: Any, inputs: TokenInputs | None
    ) -> tuple[dict[str, Any] | None, list[str]]:
        found = next_tokens(unpatched, output, self.tokenizer, inputs) if inputs is not None else None
        is_one_of_many = found is not None and inputs is not None and inputs.rows > 1
        remark = f"the next tokens are those of the first row of {inputs.rows}" if is_one_of_many and inputs else None
        return found, [] if remark is None else [remark]

    # -- activations ---------------------------------------------------------------------------------------------------

    def start_activation(self, path: str, plane: str | None, is_patched: bool, inputs: str | None) -> int:
        """Starts a job that shows the value of a node, and returns its number.

        With `is_patched`, the model runs with the chosen patches, and the patched value is shown. `plane` is a slice
        with one or two dimensions left.

        The last value shown is kept until `close_activation`: showing another slice of it does not run the model,
        unless a cell ran since.

        Raises:
            ChosenPatchError: The `path`, `plane` or `inputs` named by `field` are not valid.
            SessionError: As for `start`.
        """
        session, namespace, inputs = self._session, self._namespace(), self._chosen_inputs(inputs)
        try:
            target = resolve(captured(session.graph).root, path)
        except Unresolvable as problem:
            raise ChosenPatchError("path", problem.message) from None
        wanted = Plane.of(plane, namespace)
        version = session.chosen.version if is_patched else None
        key = (target.text, version, inputs, id(self.inputs), captured(session.graph).edits, _cells(namespace))
        if (known := self._shown_already(key, wanted)) is not None:
            return known
        if isinstance(target.spec, TensorSpec) and not inputs and self.inputs is None:
            wanted.part(torch.empty(target.spec.shape, device="meta"))  # raises an error if it is not valid
        self._check_idle(replaces_activation=True)
        count, tokenizer, settings = CallCount(1), self.tokenizer, self._current_settings()
        activation = Activation(session, target, is_patched, inputs, self.inputs, namespace, settings, count)
        with self._lock:
            before = self._check_idle(replaces_activation=True)
            for other in self._started.values():  # at most one value is kept
                other.forget_value()

            def show(job: Job[ShownValue]) -> ShownValue:
                _wait_for(job, before)
                return activation.shown(job, wanted, tokenizer)

            return self._note(StartedJob(next(self._numbers), Job(show, in_words), count, "view", key))

    def _shown_already(self, key: Hashable, plane: Plane) -> int | None:
        """Shows another slice of the value that is kept, and returns the number of its job; else `None`."""
        with self._lock:
            known = next((work for work in self._started.values() if work.key == key), None)
            shown = None if known is None or known.job.state != "done" else known.job.result
            return known.id if known is not None and shown is not None and shown.show(plane) else None

    def close_activation(self, number: int) -> None:
        """Drops the value that is kept for an activation."""
        with self._lock:
            work = self._started.pop(number, None)
        if work is not None:
            work.job.interrupt()
            work.forget_value()

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def wait(self, number: int, seconds: float | None = None) -> None:
        """Waits until a run, or the job for an activation, has finished."""
        self._find(number).job.wait(seconds)

    def status(self, number: int) -> tuple[dict[str, Any], list[bytes]]:
        """Returns the `RunStatus` of a run, or the `ActivationStatus` of an activation, and its binary parts."""
        found = self._find(number)
        status, buffers = found.status()
        # The state of an older run does not matter any more.
        if found.shows == "report" and (self.state is None or number >= self.state["id"]):
            before, self.state = self.state, {"id": number, "state": status["state"]}
            if self.state != before:
                self._notify()
        return status, buffers

    def interrupt(self, number: int) -> None:
        """Interrupts a job at its next line of Python. It leaves no patches active and sets no variables."""
        self._find(number).job.interrupt()

    def _current_settings(self) -> ThreadSettings:
        # Requests may arrive in a thread of the kernel, which does not have the settings of the user's thread.
        if self._settings.thread == threading.get_ident():
            self._settings = ThreadSettings()
        return self._settings

    def _check_idle(self, replaces_activation: bool = False) -> Job[Any] | None:
        """Returns the previous job, which may have been interrupted and not have finished yet.

        Raises:
            SessionError: The previous job is running.
        """
        latest = self._latest
        if latest is None or latest.state != "running" or latest.is_interrupted:
            return latest
        if replaces_activation and any(work.job is latest and work.shows == "view" for work in self._started.values()):
            latest.interrupt()
            return latest
        raise SessionError(_BUSY)

    def _note(self, work: StartedJob) -> int:
        self._latest = work.job
        self._started[work.id] = work
        for old in list(self._started)[:-_MOST_KEPT]:
            del self._started[old]
        return work.id

    def _find(self, number: int) -> StartedJob:
        work = self._started.get(number)
        if work is None:
            raise SessionError(f"run {number} is not available any more; run again")
        return work

    def _notify(self) -> None:
        for follower in tuple(self.followers):
            follower.follow_runs()


def _cells(namespace: dict[str, Any]) -> int:
    """Returns the number of cells that the user has run: any of them may have changed variables and weights."""
    return len(namespace.get("_ih", ()))  # the history of IPython


def _forget(reference: weakref.ref[Runs]) -> None:
    runs = reference()
    if runs is not None:
        runs.forget()


def _wait_for(job: Job[Any], before: Job[Any] | None) -> None:
    """Waits until the previous job, which was interrupted, has restored the model."""

    def wait() -> None:
        while before is not None and before.state == "running":
            before.wait(0.05)

    job.interruptibly(wait)


_shared: weakref.WeakKeyDictionary[Session, weakref.ref[Runs]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
