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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.errors import ChosenPatchError, SessionError
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, resolve
from graphpatch_notebook.notebook.display.tokens import TokenInputs, TokenLabels, next_tokens
from graphpatch_notebook.notebook.messages import (
    ActivationStatus,
    ActivationView,
    JobStatus,
    NoPlot,
    RunReport,
    RunStatus,
)
from graphpatch_notebook.notebook.run.model_calls import (
    NO_INPUTS,
    CallCount,
    Job,
    ModelCalls,
    ThreadSettings,
    given_arguments,
    in_words,
    inputs_for_run,
)
from graphpatch_notebook.notebook.run.run_report import (
    KeptValue,
    Picture,
    Plane,
    Readable,
    changes,
    copy_of,
    picture,
    probe_report,
    readable,
    statistics_of,
)
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatches
from graphpatch_notebook.notebook.session.expressions import written_arguments
from graphpatch_notebook.notebook.session.session import ResolvedPatches, Session
from graphpatch_notebook.notebook.session.workspace import Results, Workspace
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.patches.kinds import Patch, ProbePatch
from graphpatch_notebook.patching import held_value, is_part_of_splice, tensor_at
from graphpatch_notebook.values import TensorSpec

_MOST_KEPT = 8
_BUSY = "a run is in progress; wait for it to finish, or interrupt it"


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

    report: RunReport
    buffers: list[bytes]


@dataclass
class _StartedJob:
    """A job that was started for a run, or for an activation, which has a key."""

    id: int
    job: Job[Any]
    count: CallCount  # does not keep the graph alive
    key: Hashable = None  # identifies the value of an activation

    def forget_value(self) -> None:
        """Drops the value that is kept for other slices."""
        if isinstance(self.job.result, ShownValue):
            self.job.result.forget_value()

    def status(self) -> tuple[JobStatus, list[bytes]]:
        """Returns the status for the front end, and its binary parts."""
        state = self.job.state
        fraction = 1.0 if state == "done" else self.count.done / self.count.total or None
        error = self.job.error if state == "failed" else None
        result = self.job.result if state == "done" else None
        known: dict[str, Any] = {"id": self.id, "state": state, "seconds": self.job.seconds}
        known |= {"fraction": fraction, "error": error}
        if isinstance(result, _Report):
            return RunStatus(**known, report=result.report), result.buffers
        if isinstance(result, ShownValue):
            return ActivationStatus(**known, view=result.view), result.buffers
        return (RunStatus if self.key is None else ActivationStatus)(**known), []


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
        self.tokenizer: Any = None
        self.inputs = inputs
        self.typed: str | None = None
        self._results = Results(namespace) if results is None else results
        self._settings = ThreadSettings()
        self._numbers = itertools.count(1)
        self._started: dict[int, _StartedJob] = {}
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
        has_examples = captured(self._session.graph).examples is not None or self._session.origin.arguments is not None
        return None if self.is_given or has_examples else NO_INPUTS

    def _calls(self, inputs: str | None, total: int) -> ModelCalls:
        """Returns calls on the inputs; `inputs` are arguments as Python code."""
        # Requests may arrive in a thread of the kernel, which does not have the settings of the user's thread.
        if self._settings.thread == threading.get_ident():
            self._settings = ThreadSettings()
        typed = inputs if inputs is not None and inputs.strip() else self.typed
        found = inputs_for_run(self._session, self._namespace(), typed, self.inputs)
        return ModelCalls(self._session.graph, found, self._settings, CallCount(total))

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
        probes = self._probes_alone(chosen, resolved, namespace)
        calls = self._calls(inputs, 1 + bool(resolved.patch_map) + bool(probes))
        names = {name: namespace[name] for one, _ in resolved.observing if one.index for name in one.index.names}
        return self._add(Job(lambda job: self._run(job, calls, chosen, resolved, probes, names), in_words), calls.count)

    def _probes_alone(
        self, chosen: ChosenPatches, resolved: ResolvedPatches, namespace: dict[str, Any]
    ) -> ResolvedPatches | None:
        """Returns the probes for a call without the other patches; `None` if there is nothing to compare."""
        root = captured(self._session.graph).root
        # Parts of splices do not exist without the splices.
        alone = [one for one, _ in resolved.observing if not is_part_of_splice(root, one.path)]
        if not alone or len(resolved.observing) == len(chosen.enabled):
            return None
        return self._session.resolve(namespace, chosen.only(one.number for one in alone))

    def _run(
        self,
        job: Job[_Report],
        calls: ModelCalls,
        chosen: ChosenPatches,
        resolved: ResolvedPatches,
        probes: ResolvedPatches | None,
        names: dict[str, Any],
    ) -> _Report:
        def call(patches: ResolvedPatches) -> tuple[Any, list[KeptValue]]:
            read = lambda: [KeptValue.of(one, patch, names) for one, patch in patches.observing]  # noqa: E731
            return calls.call(job, patches.patch_map, read)

        unpatched, _ = call(ResolvedPatches({}, ()))
        before = {} if probes is None else {one.chosen.number: one for one in call(probes)[1]}
        output, kept = call(resolved) if resolved.patch_map else (unpatched, [])

        def make() -> _Report:
            inputs = TokenInputs.of(calls.graph, calls.inputs.args, calls.inputs.kwargs)
            root = captured(calls.graph).root

            def labels(path: str) -> TokenLabels | None:
                return inputs.labels(self.tokenizer, root, path)

            listed, remarks = changes(unpatched, output)
            tokens = next_tokens(unpatched, output, self.tokenizer, inputs)
            if tokens is not None and inputs.rows > 1:
                remarks.append(f"the next tokens are those of the first row of {inputs.rows}")
            buffers: list[bytes] = []
            report = RunReport(
                call=f"{self._session.origin.graph}({calls.inputs.text})",
                seconds=job.seconds,
                patches=[one.number for one in chosen.enabled],
                warnings=[*dict.fromkeys(calls.warnings), *remarks],
                tokens=tokens,
                changes=listed,
                probes=[probe_report(one, before.get(one.chosen.number), labels, buffers) for one in kept],
            )
            return _Report(report, buffers)

        report = job.interruptibly(make)
        # From here on, nothing is interrupted: either all variables are set, or none.
        activations = {str(one.chosen.name): one.value for one in kept if one.value is not None}
        self._results.remove(str(one.chosen.name) for one in kept if one.value is None)
        self._results.put(activations)
        self.last = RunResult(output, unpatched, activations)
        return report

    # -- activations ---------------------------------------------------------------------------------------------------

    def start_activation(self, path: str, plane: str | None, is_patched: bool, inputs: str | None) -> int:
        """Starts to get the value of a node, and returns the number of the job. Interrupts an earlier such job.

        Another slice of the value that is shown needs no run, unless a cell has run since.

        Args:
            path: The path of the node.
            plane: The slice to plot, as the user typed it.
            is_patched: Whether the chosen patches are applied.
            inputs: The arguments of the call as Python code; `None`: the default ones.

        Raises:
            ChosenPatchError: `plane` or `inputs` is not valid, or `path` does not exist; `field` says which.
            SessionError: A value cannot be evaluated, there are no inputs, or a run is in progress. Nothing ran.
        """
        session, namespace = self._session, self._namespace()
        try:
            target = resolve(captured(session.graph).root, path)
        except Unresolvable as problem:
            raise ChosenPatchError("path", problem.message) from None
        wanted, chosen = Plane.of(plane, namespace), session.chosen
        # Any cell may have changed variables and weights: `_ih` is the history of IPython.
        cells = len(namespace.get("_ih", ()))
        version = chosen.version if is_patched else None
        key = (target.text, version, inputs, id(self.inputs), captured(session.graph).edits, cells)
        for work in self._started.values():
            result = work.job.result if work.job.state == "done" else None
            if work.key == key and isinstance(result, ShownValue) and result.show(wanted):
                return work.id
        if isinstance(target.spec, TensorSpec) and not inputs and self.inputs is None:
            wanted.part(torch.empty(target.spec.shape, device="meta"))  # raises an error if it is not valid
        for number in [work.id for work in self._started.values() if work.key is not None]:
            self.close_activation(number)
        self._check_idle()
        patch_map: dict[str, list[Patch[Any]]] = session.resolve(namespace, chosen).patch_map if is_patched else {}
        calls = None if is_held(target) and target.text not in patch_map else self._calls(inputs, 1)
        tokenizer = self.tokenizer
        job = Job(lambda job: shown_activation(job, target, calls, patch_map, wanted, tokenizer), in_words)
        return self._add(job, CallCount(1) if calls is None else calls.count, key)

    def close_activation(self, number: int) -> None:
        """Interrupts an activation, and drops its value."""
        work = self._started.get(number)
        if work is not None:
            work.job.interrupt()
            work.forget_value()

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def wait(self, number: int, seconds: float | None = None) -> None:
        """Waits until a run, or the job for an activation, has finished."""
        self._find(number).job.wait(seconds)

    def status(self, number: int) -> tuple[JobStatus, list[bytes]]:
        """Returns the status of a run or an activation, and its binary parts."""
        found = self._find(number)
        status, buffers = found.status()
        # The state of an older run does not matter any more.
        if found.key is None and (self.state is None or number >= self.state["id"]):
            before, self.state = self.state, {"id": number, "state": status.state}
            if self.state != before:
                self._notify()
        return status, buffers

    def interrupt(self, number: int) -> None:
        """Interrupts a job at its next line of Python. It leaves no patches active and sets no variables."""
        self._find(number).job.interrupt()

    def _check_idle(self) -> None:
        if any(work.job.state == "running" and not work.job.is_interrupted for work in self._started.values()):
            raise SessionError(_BUSY)

    def _add(self, job: Job[Any], count: CallCount, key: Hashable = None) -> int:
        work = _StartedJob(next(self._numbers), job, count, key)
        self._started[work.id] = work
        for old in list(self._started)[:-_MOST_KEPT]:
            del self._started[old]
        return work.id

    def _find(self, number: int) -> _StartedJob:
        work = self._started.get(number)
        if work is None:
            raise SessionError(f"run {number} is not available any more; run again")
        return work

    def _notify(self) -> None:
        for follower in tuple(self.followers):
            follower.follow_runs()


def _forget(reference: weakref.ref[Runs]) -> None:
    """Drops all tensors, when the graph is deleted. Finished reports stay."""
    runs = reference()
    if runs is not None:
        runs.last = runs.inputs = None
        for work in list(runs._started.values()):
            work.forget_value()


_shared: weakref.WeakKeyDictionary[Session, weakref.ref[Runs]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


# --------------------------------------------------------------------------------------------------------------------
# The value of one node for display: read from the model if it is a parameter or buffer, else probed in a run


def is_held(target: Target) -> bool:
    """Whether the value is a parameter or buffer, so that the model need not run."""
    if target.node.kind not in ("parameter", "buffer") or target.dig:
        return False
    try:
        value = tensor_at(target.frame.module, target.node.target)
    except Exception:  # it may exist only while the model runs
        return False
    return isinstance(value, Tensor) and value.device.type != "meta"


def shown_activation(
    job: Job[Any],
    target: Target,
    calls: ModelCalls | None,
    patch_map: dict[str, list[Patch[Any]]],
    plane: Plane,
    tokenizer: Any,
) -> ShownValue:
    """Returns the value of a node in a call with patches, in the thread of the job; without `calls`, as it is now."""
    labels = None
    if calls is None:
        value = held_value(target.frame.module, target.node.target)
    else:
        probe = ProbePatch()
        patch_map.setdefault(target.text, []).append(probe)  # last: sees the patched value
        _, value = calls.call(job, patch_map, lambda: copy_of(probe.activation))
        if value is None:
            raise SessionError("; ".join(calls.warnings) or f"{target.text!r} was not computed in this run")
        tokens = TokenInputs.of(calls.graph, calls.inputs.args, calls.inputs.kwargs)
        labels = tokens.labels(tokenizer, target.frame.root, target.text)
    return job.interruptibly(lambda: ShownValue(target.text, value, plane, labels))


class ShownValue:
    """The display of a value: `view` is for the front end, `buffers` are the values of its heatmap.

    The value is kept for other slices, until `forget_value`.
    """

    def __init__(self, path: str, value: Any, plane: Plane, labels: TokenLabels | None) -> None:
        self._path, self._labels = path, labels
        self._numbers: Readable | None = readable(value)
        self._statistics = statistics_of(value, self._numbers)
        try:
            self.show(plane)
        except ChosenPatchError as error:  # its shape differs from the recorded one
            self._draw(Picture(NoPlot(str(error))))

    def _draw(self, drawn: Picture) -> None:
        self.buffers = [] if drawn.values is None else [drawn.values]
        self.view = ActivationView(self._path, self._statistics, drawn.plot, drawn.row_labels, drawn.column_labels)

    def show(self, plane: Plane) -> bool:
        """Shows a slice of the value, and returns whether that was possible: whether the value is still kept.

        Raises:
            ChosenPatchError: The slice is not valid for the value (`field` is `plane`).
        """
        if self._numbers is not None:
            self._draw(picture(self._numbers, plane, self._labels))
        return self._numbers is not None

    def forget_value(self) -> None:
        """Drops the value; what is displayed stays."""
        self._numbers = None
