"""Whether the graph of a frame may stand for its module.

A graph is a record of one run: it has the example's branches and flags in it. It is believed for calls of one form (a
*signature*: see `checks.call_signature`) once it was seen to equal the module bit for bit on such a call.

The first call of a new form runs the module itself, whose result the caller gets; then the graph runs on copies of the
inputs, with the buffers and the random state as they were. Both must return the same bits, write the same into inputs
and buffers, and leave the same random state. Else the graph is refused for calls of this form, with the reason, and
the module runs. Submodules are examined in the same way when the trial comes to them, and return what their module
returns: so a verdict is about one frame, and a frame that fails spoils no other.

That leaves what submodules hand to each other behind the graphs' back (globals, context variables). So the graph that
the user called is examined once more when all below it are known: then the whole of it runs as graphs, on trial.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from graphpatch_notebook.checks.call_signature import UnseenError, Watch, input_key, settings_key
from graphpatch_notebook.checks.equality import IncomparableError, difference
from graphpatch_notebook.checks.model_state import ModuleState, copied
from graphpatch_notebook.errors import LiveFallbackWarning
from graphpatch_notebook.graph_modules.live_runs import Runnable, is_live_only, live_only, run_live
from graphpatch_notebook.interrupts import afterwards, holding
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.warning_places import level_of_caller, warn

_MOST_VERDICTS = 1000


@runtime_checkable
class RunnableGraph(Runnable, Protocol):
    """What this needs of a graph module."""

    @property
    def doubts(self) -> list[str]:
        """What speaks against the graph, whatever the inputs."""

    @property
    def belief(self) -> Belief:
        """The verdicts on the graph so far."""

    def run_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the graph."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a graph does not stand for its module.

    Attributes:
        text: The reason in words.
        is_difference: Whether both were run, and differ (or only the graph raises); else they cannot be compared.
        may_pass: Whether it may be another time: a lack of memory, say, is no property of the call.
    """

    text: str
    is_difference: bool = False
    may_pass: bool = False


@dataclass(slots=True)
class Belief:
    """The verdicts on one graph, by signature.

    Attributes:
        verdicts: For each signature why the graph was refused, or `None` where it is believed.
        confirmed: The signatures for which it was also found equal with all graphs below it running.
        watch: What the module looked like when these verdicts were found: they hold as long as it does.
        reason: Why the graph did not run in the last call; `None` where it did, or where nothing was called.
        reported: Reasons that the user was warned of.
    """

    verdicts: dict[Hashable, Refusal | None] = field(default_factory=dict)
    confirmed: set[Hashable] = field(default_factory=set)
    watch: Watch | None = None
    reason: str | None = None
    reported: set[str] = field(default_factory=set)


_examinations = itertools.count()
# Examinations put buffers and the random state back, which two at a time must not do.
_lock = threading.RLock()


def run(graph_module: RunnableGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the graph where it is believed, else the module."""
    if is_live_only.get():
        return run_live(graph_module, args, kwargs)
    if _refusals.get() is not None:
        return _run(graph_module, args, kwargs)
    with reporting():
        before = next(_examinations)
        result = _run(graph_module, args, kwargs, is_outermost=True)
        if next(_examinations) != before + 1:  # new graphs have come into play below it
            graph_module.belief.confirmed.clear()
        return result


def _run(graph_module: RunnableGraph, args: tuple[Any, ...], kwargs: dict[str, Any], is_outermost: bool = False) -> Any:
    belief = graph_module.belief
    key, refusal = signature(graph_module, args, kwargs)
    if refusal is None:
        if key not in belief.verdicts:
            next(_examinations)
            return examine(graph_module, key, args, kwargs, lambda: run_live(graph_module, args, kwargs))
        refusal = belief.verdicts[key]
    if refusal is None and is_outermost and key not in belief.confirmed:
        return confirm(graph_module, key, args, kwargs)
    if refusal is None:
        belief.reason = None
        return graph_module.run_graph(args, kwargs)
    belief.reason = refusal.text
    _report(graph_module, refusal.text)
    return run_live(graph_module, args, kwargs)


def signature(
    graph_module: RunnableGraph, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Hashable, Refusal | None]:
    """Returns the key of this call in the verdicts, and why no verdict could hold, if there is a reason.

    Forgets the verdicts if the module has changed.
    """
    if graph_module.doubts:
        return None, Refusal("; ".join(graph_module.doubts))
    try:
        key = (input_key(args, kwargs), settings_key())
    except UnseenError as unseen:
        return None, Refusal(str(unseen))
    except Exception as error:  # of the user's own containers
        return None, Refusal(f"its inputs cannot be looked into ({type(error).__name__}: {error})")
    belief = graph_module.belief
    if belief.watch is None or belief.watch.sees_change() or len(belief.verdicts) >= _MOST_VERDICTS:
        belief.watch = Watch(graph_module.frame)
        belief.verdicts.clear()
        belief.confirmed.clear()
    return key, None if belief.watch.problem is None else Refusal(belief.watch.problem)


def doubt_of(graph_module: RunnableGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Returns why the graph is not known to equal the module for calls of this form; `None` where it is."""
    key, refusal = signature(graph_module, args, kwargs)
    if refusal is None:
        if key not in graph_module.belief.verdicts:
            return "it was not compared on such inputs"
        refusal = graph_module.belief.verdicts[key]
    return None if refusal is None else refusal.text


def examine(
    graph_module: RunnableGraph,
    key: Hashable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run_module: Callable[[], Any],
    *,
    is_alone: bool = False,
) -> Any:
    """Runs the module and then, on copies, its graph; notes the verdict, and returns what the module returned.

    Args:
        graph_module: The graph module.
        key: The signature of the call.
        args: The positional arguments of `forward`.
        kwargs: The keyword arguments.
        run_module: Runs the module on them.
        is_alone: Whether all submodules run as modules while the graph is on trial.
    """
    with _lock:
        before, copies, refusal = _prepared(graph_module, args, kwargs)
        result = run_module()
        if before is not None and (change := before.unrepeatable_change()) is not None:
            refusal = Refusal(change)
        if before is not None and refusal is None:
            after = ModuleState(graph_module.frame.module)
            with afterwards(after.restore):
                before.restore()
                with live_only() if is_alone else contextlib.nullcontext():
                    value, refusal = _trial(graph_module, copies)
                refusal = refusal or _difference(value, result, copies, (args, kwargs), graph_module, after)
        _decide(graph_module, key, refusal)
        return result


def confirm(graph_module: RunnableGraph, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Examines a graph that is believed once more, now that those below it run; returns what the module returned.

    This time the graph goes first: what the module leaves behind in globals must not be there for the graph to find.
    """
    with _lock:
        before, copies, refusal = _prepared(graph_module, args, kwargs)
        value: Any = None
        trial: ModuleState | None = None
        if before is not None:
            with afterwards(before.restore):
                value, refusal = _trial(graph_module, copies)
                trial = ModuleState(graph_module.frame.module)
        result = run_live(graph_module, args, kwargs)
        if refusal is None and trial is not None:
            refusal = _difference(value, result, copies, (args, kwargs), graph_module, trial)
        _decide(graph_module, key, refusal)
        if refusal is None:
            graph_module.belief.confirmed.add(key)
        return result


def _decide(graph_module: RunnableGraph, key: Hashable, refusal: Refusal | None) -> None:
    graph_module.belief.verdicts[key] = refusal
    graph_module.belief.reason = None if refusal is None else refusal.text
    if refusal is not None:
        _report(graph_module, refusal.text)


def _prepared(
    graph_module: RunnableGraph, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ModuleState | None, Any, Refusal | None]:
    try:
        return ModuleState(graph_module.frame.module), copied((args, kwargs)), None
    except Exception as error:
        return None, None, Refusal(f"its inputs cannot be copied ({type(error).__name__}: {error})")


def _trial(graph_module: RunnableGraph, copies: Any) -> tuple[Any, Refusal | None]:
    """Runs the graph on copies of the inputs: its value, and what went wrong."""
    try:
        return graph_module.run_graph(*copies), None
    except Exception as error:
        return None, Refusal(f"its graph raises {type(error).__name__}: {_first_line(error)}", is_difference=True)


def _difference(
    value: Any, result: Any, copies: Any, inputs: Any, graph_module: RunnableGraph, other: ModuleState
) -> Refusal | None:
    """Returns in what graph and module differ, if they do: the one of them that ran last left the state as it is."""
    try:
        text = (
            difference(value, result, "output")
            or difference(copies, inputs, "inputs")
            or ModuleState(graph_module.frame.module).difference(other)
        )
    except IncomparableError as error:
        return Refusal(str(error))
    except (RuntimeError, NotImplementedError) as error:  # the tensors of `torch.func`
        return Refusal(f"its values cannot be compared ({_first_line(error)})")
    return None if text is None else Refusal(text, is_difference=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def is_believed(graph_module: RunnableGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the graph was found equal for calls of this form, as far as inputs and plain attributes tell.

    For `torch.compile`, which has to be able to trace this, and guards what is read here.
    """
    watch = graph_module.belief.watch
    if graph_module.doubts or watch is None:
        return False
    if any(getattr(module, name) != value for module, name, value in watch.flags):
        return False
    try:
        key = (input_key(args, kwargs), settings_key())
    except UnseenError:
        return False
    belief = graph_module.belief
    if graph_module.frame.parent is None:
        return any(known == key for known in belief.confirmed)
    return any(refusal is None and known == key for known, refusal in belief.verdicts.items())


# -- what the user is told ---------------------------------------------------------------------------------------------

_refusals: ContextVar[list[str] | None] = ContextVar("graphpatch_refusals", default=None)


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Gives one warning at the end of the block for all graphs that were newly refused in it."""
    refusals: list[str] = []
    with holding(_refusals, refusals):
        yield
    if refusals:
        graphs = "a graph was" if len(refusals) == 1 else f"{len(refusals)} graphs were"
        more = f"\n  ... and {len(refusals) - 5} more" if len(refusals) > 5 else ""
        lines = "".join(f"\n  {line}" for line in refusals[:5])
        warn(
            f"{graphs} not believed for these inputs, so the original modules run instead:{lines}{more}",
            LiveFallbackWarning,
            stacklevel=level_of_caller(),
        )


def unreported() -> contextlib.AbstractContextManager[None]:
    """Keeps to itself which graphs are refused in the block."""
    return holding(_refusals, [])


def _report(graph_module: RunnableGraph, reason: str) -> None:
    refusals = _refusals.get()
    if refusals is not None and reason not in graph_module.belief.reported:
        graph_module.belief.reported.add(reason)
        frame = graph_module.frame
        refusals.append(f"{format_path(frame.path) or '<root>'} ({type(frame.module).__name__}): {reason}")
