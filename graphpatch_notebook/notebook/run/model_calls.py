"""Calls of a graph for the tree browser: on the same inputs, from the same state, which is restored afterwards."""

from __future__ import annotations

import ast
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from graphpatch_notebook.capture.inputs import ExampleInputs
from graphpatch_notebook.checks.model_state import ModuleState, copied, copied_output
from graphpatch_notebook.errors import ChosenPatchError, GraphPatchError, SessionError
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.notebook.display.labels import file_label
from graphpatch_notebook.notebook.display.tokens import TokenInputs
from graphpatch_notebook.notebook.run.jobs import Job, ThreadSettings
from graphpatch_notebook.notebook.session.expressions import (
    check_runs_anywhere,
    parse_arguments,
    quoted,
    undefined,
)
from graphpatch_notebook.notebook.session.origin import changed_variables, written_arguments
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.options import options_among
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch, RecordPatch
from graphpatch_notebook.warning_places import collected_warnings

_REPAIR = "type the arguments of a call in the field Inputs, or give some: pg.browse(inputs=...)"
_CALL = "<graphpatch>"  # not a name that a user could have


@dataclass(frozen=True)
class RunInputs:
    """The inputs of one run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    text: str = "..."  # the known arguments, as Python code
    examples: ExampleInputs | None = None  # if these are the inputs: unchanged until they are copied
    remark: str | None = None

    def copy(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a copy for one call, since a model may write into its inputs, or extend a cache.

        Raises:
            SessionError: The example inputs were changed since the capture.
        """
        args, kwargs = copied((self.args, self.kwargs))
        if self.examples is not None and (problem := _change_of(self.examples)) is not None:
            raise SessionError(problem)
        return args, kwargs


def inputs_for_run(session: Session, namespace: dict[str, Any], typed: str | None, given: Any) -> RunInputs:
    """Returns the inputs of a run: the typed ones (Python code), else the given ones, else the example inputs.

    Raises:
        ChosenPatchError: The typed arguments are not valid, or cannot be evaluated (`field` is `inputs`).
        SessionError: There are no inputs, or the example inputs were changed since the capture.
    """
    if typed is not None and typed.strip():
        args, kwargs = evaluated_arguments(typed, namespace)
        return RunInputs(args, kwargs, typed.strip())
    if given is not None:
        args, kwargs = given_arguments(given)
        default = "*inputs" if len(args) > 1 else "**inputs" if kwargs else "inputs"
        return RunInputs(args, kwargs, written_arguments(args, kwargs, namespace) or default)
    if (problem := no_inputs(session)) is not None:
        raise SessionError(problem)
    written = _without_options(session.origin.arguments)
    examples: ExampleInputs | None = captured(session.graph).examples
    if examples is None:
        args, kwargs = evaluated_arguments(str(written), namespace)
        return RunInputs(args, kwargs, str(written))
    changed = [] if written is None else changed_variables(written, examples, namespace)
    if written is not None and not changed:
        return RunInputs(examples.args, examples.kwargs, written, examples)
    remark = None
    if changed:
        remark = (
            f"{', '.join(changed)} has changed since the capture: this run used the example inputs of the capture; "
        )
        remark += f"to use the current values, type {written} in the field Inputs"
    return RunInputs(examples.args, examples.kwargs, "...", examples, remark)


def no_inputs(session: Session, given: Any = None) -> str | None:
    """Returns a message if a run without typed inputs has nothing to run on; else `None`."""
    examples: ExampleInputs | None = captured(session.graph).examples
    if given is not None:
        return None
    if examples is not None:
        return _change_of(examples)
    known = session.origin.arguments is not None
    return None if known else f"there are no example inputs for this graph; {_REPAIR}"


def _change_of(examples: ExampleInputs) -> str | None:
    change = examples.change()
    return None if change is None else f"the example inputs were changed since the capture ({change}); {_REPAIR}"


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


def evaluated_arguments(text: str, namespace: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments of typed code.

    Example:
        >>> evaluated_arguments("a, scale=2 * a", {"a": 3})
        ((3,), {'scale': 6})
    """
    try:
        call = parse_arguments(text)
        check_runs_anywhere(call, text)
    except ValueError as error:
        raise ChosenPatchError("inputs", str(error)) from None
    call.func = ast.copy_location(ast.Name(_CALL, ast.Load()), call.func)
    code = compile(ast.fix_missing_locations(ast.Expression(call)), "<inputs>", "eval")
    make: Callable[..., Any] = lambda *args, **kwargs: (args, kwargs)  # noqa: E731
    try:
        args, kwargs = eval(code, namespace, {_CALL: make})
        _, args, kwargs = options_among(args, kwargs)
    except NameError as error:
        message = undefined(error.name, namespace) if error.name not in namespace else f"NameError: {error}"
        raise ChosenPatchError("inputs", f"inputs {quoted(text)}: {message}") from error
    except Exception as error:
        raise ChosenPatchError("inputs", f"inputs {quoted(text)}: {type(error).__name__}: {error}") from error
    return args, kwargs


def _without_options(arguments: str | None) -> str | None:
    """Returns the code of the example inputs without options of the capture."""
    if arguments is None or "extraction_options" not in arguments:
        return arguments
    call = parse_arguments(arguments)
    call.keywords = [keyword for keyword in call.keywords if keyword.arg != "extraction_options"]
    return ", ".join(ast.unparse(argument) for argument in (*call.args, *call.keywords))


def _generators(graph: PatchableGraph) -> Iterator[Any]:
    """Yields what operations are given; some are random generators of functions that the model's code calls."""
    for frame in captured(graph).root.walk():
        for node in frame.nodes:
            yield from (*node.args, *node.kwargs.values())


T = TypeVar("T")
_TORCH, _PACKAGE = (f"{folder}{os.sep}" for folder in (torch.__path__[0], Path(__file__).parents[2]))
Separate = Callable[[Any], Any]
PatchMap = Mapping[str, list[Patch[Any]]]

_one_at_a_time = threading.Lock()
_MOMENT = 0.02


@dataclass
class CallCount:
    """The number of calls. Other threads may read it during the run."""

    total: int
    done: int = 0


@dataclass
class CallResults:
    """The results of the calls."""

    outputs: list[Any] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    tokens: TokenInputs | None = None


class ModelCalls:
    """Calls of a graph, one with each of several patch maps.

    They run without gradients, since an autograd graph of a large model could fill the memory. If the model or a patch
    needs gradients, the calls start again with them.

    Args:
        graph: The graph.
        inputs: The inputs. Each call gets a copy.
        patch_maps: The patches of each call.
        settings: The settings of the user's thread.
        count: Updated after each call.
        take: Called after each call, before the state is restored, with the position of the call and a function that
            returns a value which does not change when the state is restored.
    """

    def __init__(
        self,
        graph: PatchableGraph,
        inputs: RunInputs,
        patch_maps: Sequence[PatchMap],
        settings: ThreadSettings,
        count: CallCount,
        take: Callable[[int, Separate], None],
    ) -> None:
        self._graph = graph
        self._inputs = inputs
        self._patch_maps = patch_maps
        self._settings = settings
        self._count = count
        self._take = take

    def run(self, job: Job[T]) -> CallResults:
        """Makes the calls, in the thread of the job."""
        with alone(job), self._settings.applied():
            try:
                return self._all(job, has_gradients=False)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
            self._start_again()
            return self._all(job, has_gradients=True)

    def _all(self, job: Job[Any], has_gradients: bool) -> CallResults:
        results = CallResults()
        state = ModuleState(captured(self._graph).module, _generators(self._graph))
        with afterwards(state.restore), torch.set_grad_enabled(has_gradients), collected_warnings() as results.warnings:
            for position, patch_map in enumerate(self._patch_maps, 1):
                output = self._call(job, patch_map, results)
                is_last = position == len(self._patch_maps)
                results.outputs.append(state.separated(output) if is_last else _copied(output, results))
                self._take(self._count.done, state.separated)
                state.restore()
                self._count.done += 1
                self._note_change(state, results)
        return results

    def _call(self, job: Job[Any], patch_map: PatchMap, results: CallResults) -> Any:
        args, kwargs = self._inputs.copy()
        if results.tokens is None:
            results.tokens = TokenInputs.of(self._graph, args, kwargs)

        def call() -> Any:
            with self._graph.patch(dict(patch_map.items())) if patch_map else nullcontext():
                return self._graph(*args, **kwargs)

        return job.interruptibly(call)

    def _note_change(self, state: ModuleState, results: CallResults) -> None:
        change = next(state.changes(), None)
        if change is not None and self._count.done < self._count.total:
            # In place of the `StateWarning`: it says what this means here.
            results.warnings[:] = [text for text in results.warnings if str(change) not in text]
            results.warnings.append(
                f"{change}, which cannot be restored: the run with the patches started with this change, which may "
                "cause some of the differences"
            )

    def _start_again(self) -> None:
        self._count.done = 0
        for patch_map in self._patch_maps:
            for patch in (patch for patches in patch_map.values() for patch in patches):
                if isinstance(patch, RecordPatch):
                    patch.activations.clear()


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


def _copied(output: Any, results: CallResults) -> Any:
    """Returns a copy of an output, since the next call may write into the same tensors."""
    try:
        return copied_output(output)
    except Exception as error:
        results.warnings.append(
            f"the output without the patches cannot be copied ({type(error).__name__}: {error}): if the model writes "
            "into tensors that it returned before, these show no difference"
        )
        return output


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
