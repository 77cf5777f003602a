"""*Run* and *show activation* of the tree browser: the model runs in a thread of its own, and somebody asks how far.

start            inputs, values and slices are looked up among the user's variables, in the caller's thread
  -> Job         the model runs, without the patches and with them (`passes`, `worker`)
  -> report      what has changed (`run_report`); variables of probes are filled
status           where it is (`started_work`, `run_progress`), or the report
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.display.tokens import TokenInputs, next_tokens
from graphpatch_notebook.notebook.run.activation import Activation, Plane, Shown, Source, recorded_shape, target_of
from graphpatch_notebook.notebook.run.basis import Basis
from graphpatch_notebook.notebook.run.model_calls import PassCount, Passes, Separate, in_words
from graphpatch_notebook.notebook.run.probe_changes import ProbedPasses
from graphpatch_notebook.notebook.run.run_inputs import inputs_for_run, no_inputs
from graphpatch_notebook.notebook.run.run_report import Buffers, Taken, apart_from_weights, changes
from graphpatch_notebook.notebook.run.started_work import StartedWork
from graphpatch_notebook.notebook.run.worker import Job, ThreadSettings
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Results
from graphpatch_notebook.patchable_graph import captured

T = TypeVar("T")
_MOST_KEPT = 8
_BUSY = "a run is going on; wait until it is done, or interrupt it"


@dataclass(frozen=True)
class RunResult:
    """What a run gave: the tensors themselves, on the devices of the model, without gradients.

    Attributes:
        output: What the model returned with the patches.
        unpatched_output: What it returned without.
        activations: What probes and records kept, by the names of their variables.
    """

    output: Any
    unpatched_output: Any
    activations: dict[str, Any]


@dataclass
class _Report:
    """A finished run: its report, and the binary parts of it."""

    report: dict[str, Any]
    buffers: list[bytes] = field(default_factory=list)


class Runs:
    """The runs of one session: one at a time.

    Runs of other sessions wait for their turn. A run works on copies of its inputs, in a thread of its own: patch
    contexts of a cell do not hold there; autocast and the default device are those of the thread that asks for the run,
    or, if that is not the one that made this object, of the latter as last seen. It runs without gradients where the
    model can do without, in the modes (`train`, `eval`) that the model is in. Buffers, and tensors in attributes of
    modules, are as they were afterwards, and so are the random generators if the model draws from them; with and
    without patches it draws the same numbers. The report says where that cannot be kept up, with one exception: a
    generator of the model's own (`numpy.random.default_rng()`) that neither its attributes nor a `forward` name. Do not
    train the model meanwhile: buffers would be put back, too.

    Args:
        session: The session.
        namespace: Returns the user's variables.
        tokenizer: Says what tokens are in words (`decode` or `convert_ids_to_tokens`).
        inputs: What to run on: a tuple of arguments, a dict of keyword arguments, or one value. `None`: the example
            inputs.
        results: Knows which variables probes have filled; an own one, if left out.

    Attributes:
        last: What the last run gave that came to its end.

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
        tokenizer: Any = None,
        inputs: Any = None,
        results: Results | None = None,
    ) -> None:
        self._session = session
        self._namespace = namespace
        self.tokenizer = tokenizer
        self.inputs = inputs
        self._results = Results(namespace) if results is None else results
        self._settings = ThreadSettings()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._runs: dict[int, StartedWork[_Report]] = {}
        self._activations: dict[int, StartedWork[Shown]] = {}
        self._latest: Job[Any] | None = None
        self.last: RunResult | None = None
        weakref.finalize(session.graph, _forget, weakref.ref(self)).atexit = False

    def forget(self) -> None:
        """Lets go of all tensors: nobody can run any more. What is shown stays."""
        # Without the lock: the graph may end in any thread, also in one that has the lock.
        self.last = self.inputs = None
        for going in list(self._activations.values()):
            going.forget_value()

    def no_inputs(self) -> str | None:
        """Returns why there are no inputs to run on, in words; `None`: there are some."""
        return no_inputs(self._session, self.inputs)

    # -- run -----------------------------------------------------------------------------------------------------------

    def start(self, inputs: str | None) -> int:
        """Starts a run with the chosen patches; returns its number.

        Args:
            inputs: Arguments of a call as Python, evaluated now; `None`: what this object was given, or else the
                example inputs.

        Raises:
            ChosenPatchError: The inputs cannot be evaluated (`field` is `inputs`).
            SessionError: A value cannot be evaluated, there are no inputs to run on, or a run is going on. Nothing ran.
        """
        self._check_idle()
        session, namespace = self._session, self._namespace()
        chosen = session.chosen
        resolved = session.resolve(namespace, chosen)
        found = inputs_for_run(session, namespace, inputs, self.inputs)
        probed = ProbedPasses(captured(session.graph).root, chosen, resolved, namespace)
        count = PassCount(len(probed.maps))
        names = {name: namespace[name] for one, _ in resolved.observing if one.index for name in one.index.names}
        taken: list[Taken] = []
        model = captured(session.graph).module

        def take(position: int, separate: Separate) -> None:
            def apart(value: Any) -> Any:
                return apart_from_weights(separate(value), model)

            if position == count.total - 1:
                taken[:] = [Taken.of(one, patch, names, apart) for one, patch in resolved.observing]
            elif position == count.total - 2:
                probed.take(names)

        settings = self._current_settings()
        passes = Passes(session.graph, found, probed.maps, settings, count, take)
        head = {
            "call": f"{session.origin.graph}({found.text})",
            "patches": [one.number for one in chosen.enabled],
            "warnings": [remark for remark in (found.remark, settings.remark()) if remark],
        }
        with self._lock:
            before = self._check_idle()
            job = Job(lambda job: self._run(job, before, passes, taken, probed, head), in_words)
            return self._note(self._runs, job, count)

    def _run(
        self,
        job: Job[_Report],
        before: Job[Any] | None,
        passes: Passes,
        taken: list[Taken],
        probed: ProbedPasses,
        head: dict[str, Any],
    ) -> _Report:
        _wait_for(job, before)
        outcome = passes.run(job)
        unpatched, output, inputs = outcome.outputs[0], outcome.outputs[-1], outcome.tokens
        buffers = Buffers()

        def make() -> dict[str, Any]:
            found = changes(unpatched, output)
            labels = None if inputs is None else inputs.labels(self.tokenizer)
            tokens, remarks = self._tokens(unpatched, output, inputs)
            return {
                **head,
                "seconds": job.seconds,
                "warnings": [*head["warnings"], *dict.fromkeys(outcome.warnings), *found.remarks, *remarks],
                "tokens": tokens,
                "changes": found.listed,
                "probes": probed.reports(taken, labels, buffers),
            }

        report = job.interruptibly(make)
        # From here on nothing is interrupted: all variables are filled, or none.
        activations = {str(one.chosen.name): one.value for one in taken if one.value is not None}
        self._results.remove(str(one.chosen.name) for one in taken if one.value is None)
        self._results.put(activations)
        self.last = RunResult(output, unpatched, activations)
        return _Report(report, buffers.parts)

    def _tokens(
        self, unpatched: Any, output: Any, inputs: TokenInputs | None
    ) -> tuple[dict[str, Any] | None, list[str]]:
        found = next_tokens(unpatched, output, self.tokenizer, inputs) if inputs is not None else None
        is_one_of_many = found is not None and inputs is not None and inputs.rows > 1
        remark = f"the next tokens are those of the first of {inputs.rows} rows" if is_one_of_many and inputs else None
        return found, [] if remark is None else [remark]

    def status(self, number: int) -> tuple[dict[str, Any], list[bytes]]:
        """Returns the `RunStatus` of a run, and the binary parts of its report.

        Raises:
            SessionError: There was no such run, or many came after it.
        """
        going = self._find(self._runs, number)
        status = going.status(self._session)
        result = going.job.result if status["state"] == "done" else None
        return {**status, "report": result.report if result else None}, result.buffers if result else []

    def interrupt(self, number: int) -> None:
        """Has a run end at its next line of Python. Nothing is left of it: no patches, no values in variables."""
        self._find(self._runs, number).job.interrupt()

    # -- activations ---------------------------------------------------------------------------------------------------

    def start_activation(self, path: str, plane: str | None, is_patched: bool, inputs: str | None) -> int:
        """Starts what shows the value of a node; returns its number.

        The value of the node that was shown last is kept until `close_activation`: another plane of it runs nothing.

        Args:
            path: The node path.
            plane: A slice that leaves two dimensions, or one; `None`: the last two.
            is_patched: Whether the model runs with the chosen patches; shown is what came of them.
            inputs: As for `start`.

        Raises:
            ChosenPatchError: `field` (`path`, `plane` or `inputs`) says what is wrong.
            SessionError: As for `start`.
        """
        session, namespace = self._session, self._namespace()
        target = target_of(session, path)
        wanted = Plane.of(plane, namespace)
        basis = Basis(session, is_patched, inputs, self.inputs, namespace)
        source = Source(target.path, session.chosen.version if is_patched else None, inputs, basis)
        if (known := self._shown_already(source, wanted)) is not None:
            return known
        shape = recorded_shape(target)
        if shape is not None and not inputs and self.inputs is None:
            wanted.check(shape)
        self._check_idle(replaces_activation=True)
        count, tokenizer, settings = PassCount(1), self.tokenizer, self._current_settings()
        activation = Activation(session, target, is_patched, inputs, self.inputs, namespace, settings, count)
        with self._lock:
            before = self._check_idle(replaces_activation=True)
            for going in self._activations.values():  # at most one value is kept
                going.forget_value()

            def work(job: Job[Shown]) -> Shown:
                _wait_for(job, before)
                return activation.shown(job, wanted, tokenizer)

            return self._note(self._activations, Job(work, in_words), count, source)

    def _shown_already(self, source: Source, plane: Plane) -> int | None:
        """Shows another plane of a value that is kept; returns its number."""
        with self._lock:
            known = next((going for going in self._activations.values() if going.source == source), None)
            shown = None if known is None or known.job.state != "done" else known.job.result
            return known.id if known is not None and shown is not None and shown.show(plane) else None

    def activation_status(self, number: int) -> tuple[dict[str, Any], list[bytes]]:
        """Returns the `ActivationStatus`, and the values of its heatmap.

        Raises:
            SessionError: There was none with this number, or it was closed.
        """
        going = self._find(self._activations, number)
        status = going.status(self._session)
        result = going.job.result if status["state"] == "done" else None
        return {**status, "view": result.view if result else None}, result.buffers if result else []

    def interrupt_activation(self, number: int) -> None:
        """Has the run for an activation end at its next line of Python."""
        self._find(self._activations, number).job.interrupt()

    def close_activation(self, number: int) -> None:
        """Lets go of what was kept to show an activation."""
        with self._lock:
            going = self._activations.pop(number, None)
        if going is not None:
            going.job.interrupt()
            going.forget_value()

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def wait(self, number: int, seconds: float | None = None) -> None:
        """Waits for the end of a run, or of what shows an activation."""
        going: StartedWork[Any] = self._find({**self._runs, **self._activations}, number)
        going.job.wait(seconds)

    def _current_settings(self) -> ThreadSettings:
        # Requests may come in a thread of the kernel's own, which has no settings of the user's.
        if self._settings.thread == threading.get_ident():
            self._settings = ThreadSettings()
        return self._settings

    def _check_idle(self, replaces_activation: bool = False) -> Job[Any] | None:
        """Returns the job that went before, which may still be about to end.

        Raises:
            SessionError: It goes on.
        """
        latest = self._latest
        if latest is None or latest.state != "running" or latest.is_interrupted:
            return latest
        if replaces_activation and any(going.job is latest for going in self._activations.values()):
            latest.interrupt()
            return latest
        raise SessionError(_BUSY)

    def _note(
        self,
        goings: dict[int, StartedWork[T]],
        job: Job[T],
        count: PassCount,
        source: Source | None = None,
    ) -> int:
        self._latest = job
        number = next(self._numbers)
        goings[number] = StartedWork(number, job, count, source=source)
        for old in list(goings)[:-_MOST_KEPT]:
            del goings[old]
        return number

    def _find(self, goings: dict[int, StartedWork[T]], number: int) -> StartedWork[T]:
        going = goings.get(number)
        if going is None:
            raise SessionError(f"there is no run {number} any more; run again")
        return going


def _forget(reference: weakref.ref[Runs]) -> None:
    runs = reference()
    if runs is not None:
        runs.forget()


def _wait_for(job: Job[Any], before: Job[Any] | None) -> None:
    """Waits until the job before, which was interrupted, has left the model as it was."""

    def wait() -> None:
        while before is not None and before.state == "running":
            before.wait(0.05)

    job.interruptibly(wait)
