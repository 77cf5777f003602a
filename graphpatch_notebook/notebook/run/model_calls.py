"""Calls of a graph for the widget: each on the same inputs and from the same state, which is there again afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.records import SourceLine, line_at
from graphpatch_notebook.checks.model_state import copied_output
from graphpatch_notebook.errors import GraphPatchError
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.notebook.display.labels import file_label
from graphpatch_notebook.notebook.display.tokens import TokenInputs
from graphpatch_notebook.notebook.run.run_inputs import RunInputs
from graphpatch_notebook.notebook.run.run_state import RunState
from graphpatch_notebook.notebook.run.worker import Job, ThreadSettings
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import Patch, RecordPatch
from graphpatch_notebook.warning_places import collected_warnings

T = TypeVar("T")
_TORCH = os.path.dirname(torch.__file__) + os.sep
Separate = Callable[[Any], Any]
PatchMap = Mapping[str, list[Patch[Any]]]

_one_at_a_time = threading.Lock()
_MOMENT = 0.02


@dataclass
class PassCount:
    """How many calls are done; may be read from another thread meanwhile.

    Attributes:
        total: How many there will be.
        done: How many there were.
    """

    total: int
    done: int = 0


@dataclass
class Outcome:
    """What came of the calls.

    Attributes:
        outputs: What they returned.
        warnings: What this package had to say meanwhile.
        tokens: The tokens in the inputs.
    """

    outputs: list[Any] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    tokens: TokenInputs | None = None


class Passes:
    """Calls of a graph, one with each of several patch maps.

    They run without gradients (an autograd graph of a large model that nobody asked for would fill the memory), unless
    the model or a patch cannot do without.

    Args:
        graph: The graph.
        inputs: What to call it on. Each call has a copy.
        patch_maps: The patches of each call.
        settings: Those of the user's thread.
        count: Told how many calls are done.
        take: Called after each call, with its position, before anything is put back. It is given what makes a value
            stay what it is then.
    """

    def __init__(
        self,
        graph: PatchableGraph,
        inputs: RunInputs,
        patch_maps: Sequence[PatchMap],
        settings: ThreadSettings,
        count: PassCount,
        take: Callable[[int, Separate], None],
    ) -> None:
        self._graph = graph
        self._inputs = inputs
        self._patch_maps = patch_maps
        self._settings = settings
        self._count = count
        self._take = take

    def run(self, job: Job[T]) -> Outcome:
        """Makes the calls, in the thread of the job.

        Raises:
            KeyboardInterrupt: Somebody interrupted.
            Exception: Whatever the model raises.
        """
        with _turn(job), self._settings.applied():
            try:
                return self._all(job, has_gradients=False)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
            self._begin_anew()
            return self._all(job, has_gradients=True)

    def _all(self, job: Job[Any], has_gradients: bool) -> Outcome:
        outcome = Outcome()
        state = RunState(self._graph)
        with afterwards(state.restore), torch.set_grad_enabled(has_gradients), collected_warnings() as outcome.warnings:
            for position, patch_map in enumerate(self._patch_maps, 1):
                output = self._call(job, patch_map, outcome)
                is_last = position == len(self._patch_maps)
                outcome.outputs.append(state.separated(output) if is_last else _apart(output, outcome))
                self._take(self._count.done, state.separated)
                if (remark := state.remark(is_last)) is not None:
                    outcome.warnings.append(remark)
                state.restore()
                self._count.done += 1
                self._note_change(state, outcome)
        return outcome

    def _call(self, job: Job[Any], patch_map: PatchMap, outcome: Outcome) -> Any:
        args, kwargs = self._inputs.copy()
        if outcome.tokens is None:
            outcome.tokens = TokenInputs.of(self._graph, args, kwargs)

        def call() -> Any:
            with self._graph.patch(dict(patch_map.items())) if patch_map else nullcontext():
                return self._graph(*args, **kwargs)

        return job.interruptibly(call)

    def _note_change(self, state: RunState, outcome: Outcome) -> None:
        change = state.change_of_model()
        if change is not None and self._count.done < self._count.total:
            outcome.warnings.append(
                f"{change}, which stays so: the run with the patches began where the one without them had ended, and "
                "some of the differences may come from that"
            )

    def _begin_anew(self) -> None:
        self._count.done = 0
        for patch_map in self._patch_maps:
            for patch in (patch for patches in patch_map.values() for patch in patches):
                if isinstance(patch, RecordPatch):
                    patch.activations.clear()


@contextmanager
def _turn(job: Job[Any]) -> Iterator[None]:
    """Waits until no other session's calls go on: they may be of the same model, and the random numbers are shared."""
    # Not in the call that can be interrupted: an interrupt between getting the lock and knowing it would keep it.
    while not _one_at_a_time.acquire(timeout=_MOMENT):
        job.interruptibly(lambda: None)
    try:
        yield
    finally:
        _one_at_a_time.release()


def _apart(output: Any, outcome: Outcome) -> Any:
    """Returns a copy of an output: the next call may write into the same tensors, wherever the model has them from."""
    try:
        return copied_output(output)
    except Exception as error:
        outcome.warnings.append(
            f"the output without the patches cannot be copied ({type(error).__name__}: {error}): if the model writes "
            "into tensors that it returned before, they show no difference"
        )
        return output


def in_words(error: BaseException) -> str:
    """Returns what is said of an error that a run ended with: what it is, and the innermost line of the user's code."""
    if isinstance(error, GraphPatchError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    line = _innermost_line(error)
    where = (
        [] if line is None else [f"{file_label(line.file)}:{line.line}, in {line.function}: {line.text}".rstrip(": ")]
    )
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return "\n".join([text, *where, *notes])


def _innermost_line(error: BaseException) -> SourceLine | None:
    """Returns the innermost line outside of this package and of torch; if there is none, that of one of its modules."""
    traceback, found, is_torchs = error.__traceback__, None, True
    while traceback is not None:
        code = traceback.tb_frame.f_code
        is_deeper = is_torchs or not code.co_filename.startswith(_TORCH)
        if call_sites.is_users(code) and is_deeper:
            found = SourceLine(code.co_filename, line_at(code, traceback.tb_lasti), code.co_name)
            is_torchs = code.co_filename.startswith(_TORCH)
        traceback = traceback.tb_next
    return found
