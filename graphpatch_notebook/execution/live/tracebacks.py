"""Finds the node that raised an error from the traceback, so that runs without errors do not cost time.

The traceback of an error holds the chain of call sites that identifies an op in a run, and the module calls between
them. So the way from the outermost `forward` down to the error is also a way down the captured frames. If a loop makes
several nodes of one call site, all of them are candidates.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, TracebackType
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.observers import TRANSPARENT
from graphpatch_notebook.capture.records import Frame, Node, Ref, SourceLine, line_at
from graphpatch_notebook.errors import GraphPatchError, add_note, has_note
from graphpatch_notebook.execution.live.frames import FrameRun
from graphpatch_notebook.execution.live.patched_operations import LiveMode
from graphpatch_notebook.graphs import GraphModule
from graphpatch_notebook.graphs.generated_code import name_assigned_at
from graphpatch_notebook.inspection.error_notes import arguments_at_capture, arguments_text, failure_note
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import code_of_apply, is_module_call

_MOST_NAMES, _MOST_PATCHED = 4, 6
_OPENED = LiveMode.open_call.__code__
_APPLY = code_of_apply()


@dataclass(slots=True)
class _TracebackPath:
    """The path down a traceback, followed frame by frame."""

    frames: list[Frame]  # the captured frames that this may be: several if a module was called in a loop
    module: Module  # the module whose frame it is
    # The call sites from its `forward` on, outermost first.
    steps: list[tuple[CodeType, int]] = field(default_factory=list)
    fx_name: str | None = None  # the name of the node of a graph that runs
    leaf: FrameType | None = None  # the innermost Python frame of the user's code
    # The arguments of the torch call that was made there, if any Python frame holds them.
    call: tuple[Any, dict[str, Any]] | None = None
    # How often this frame called each module so far (by id), if the run saw it.
    counts: dict[int, int] = field(default_factory=dict)
    # The call sites down to a call that was opened into its steps: the last step has this site itself.
    opened: list[tuple[CodeType, int]] | None = None

    def enter(self, module: Module) -> None:
        """Goes down into a call of `module`."""
        calls = [n for frame in self.frames for n in frame.calls() if n.frame.module is module]
        here = [n for n in calls if n.site is not None and list(n.site.steps) == self.steps]
        if id(module) in self.counts:  # the run that began last
            here = [n for n in here or calls if n.call_index == self.counts[id(module)] - 1]
        self.frames = [n.frame for n in here or calls]
        self.module, self.steps, self.fx_name, self.counts = module, [], None, {}

    def nodes(self) -> list[tuple[Frame, Node]]:
        """Returns the recorded ops that this may be."""
        if self.fx_name is not None:
            return [(frame, frame.names[self.fx_name]) for frame in self.frames if self.fx_name in frame.names]
        return self._ops_at(self.steps) or (self._ops_at(self.opened) if self.opened is not None else [])

    def _ops_at(self, steps: list[tuple[CodeType, int]]) -> list[tuple[Frame, Node]]:
        return [
            (frame, node)
            for frame in self.frames
            for node in frame.nodes
            if node.kind == "op" and node.site is not None and list(node.site.steps) == steps
        ]


def hide_way_to(error: Exception) -> None:
    """Hides the way down to an error of ours in notebooks, a page of torch's lines: the message names the node.

    The traceback itself stays complete: IPython and pytest skip frames with a variable of this name, on request.
    """
    if not isinstance(error, GraphPatchError) or error.__cause__ is not None:
        return  # the user's code raised it, and must be visible
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == _FILE_OF_CALLS or call_sites.is_own(frame.f_code)):
        _hide(frame)
        frame = frame.f_back
    for below, _ in _entries(error.__traceback__):
        _hide(below)


_FILE_OF_CALLS = Module.register_buffer.__code__.co_filename


def _hide(frame: FrameType) -> None:
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function: the variables of modules and classes stay
        frame.f_locals["__tracebackhide__"] = True


def explain(error: Exception, module: Module, frames: Sequence[Frame], patched: Sequence[str]) -> None:
    """Adds a note that names the node to an error caught around a call of `module`, unless it has one already.

    `frames` are the captured frames that the call may be, and `patched` the patches that were applied before, as texts.
    """
    # Errors with a meaning to the interpreter must not change; our own name their path themselves.
    if isinstance(error, (GraphPatchError, StopIteration, StopAsyncIteration)) or has_note(error):
        return
    with contextlib.suppress(Exception):  # the user must see the error, even if the note fails
        failure = _failure_in(error.__traceback__, frames, module)
        more = f", and {len(patched) - _MOST_PATCHED} more" if len(patched) > _MOST_PATCHED else ""
        before = f"patched before: {', '.join(patched[:_MOST_PATCHED])}{more}"
        add_note(error, f"{failure}\n  {before}" if patched else failure)


def _failure_in(traceback: TracebackType | None, frames: Sequence[Frame], module: Module) -> str:
    way = _TracebackPath(list(frames), module)
    for python_frame, lasti in _entries(traceback):
        if python_frame.f_code is _OPENED:  # the steps of an opened call are nodes themselves
            way.call, way.opened = None, list(way.steps)
        if way.call is None:  # operations inside any other call belong to the node of the call
            _follow(way, python_frame, lasti)
    candidates = [(frame, node) for frame, node in way.nodes() if node.whole is node] or way.nodes()
    line = str(_line(way)) if way.steps else ""
    now = arguments_text(*way.call) if way.call is not None else ""
    if not candidates:
        return failure_note(_frame_text(way), line, now, more=_locals_text(way))
    node = candidates[0][1]
    if not line and node.site is not None:  # a graph ran in place of the user's code
        line = str(node.site.source_lines()[-1])
    names = [repr(format_path((*frame.path, node.name))) for frame, node in candidates]
    more = f" or {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
    what = f"{' or '.join(names[:_MOST_NAMES])}{more} ({node.op})"
    at_capture = "" if way.opened is None and _is_last_step(node) else arguments_at_capture(node)
    return failure_note(what, line, now, at_capture, () if now else _locals_text(way))


def _is_last_step(node: Node) -> bool:
    """Whether the node is the last step of a call that capture opened, and represents all of it."""
    refs = (value for value in node.args if isinstance(value, Ref))
    return any(ref.node.composite is not None and ref.node.composite is not node.composite for ref in refs)


def _entries(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lasti
        traceback = traceback.tb_next


def _follow(way: _TracebackPath, python_frame: FrameType, lasti: int) -> None:
    code = python_frame.f_code
    owner = python_frame.f_locals.get("self")
    name = name_assigned_at(code, line_at(code, lasti))
    if name is not None:
        module = owner.frame.module if isinstance(owner, GraphModule) else owner
        if isinstance(module, Module) and module is not way.module:
            way.enter(module)
        way.fx_name, way.leaf = name, python_frame
    elif _is_call(python_frame):
        # The last two parameters of torch's `__torch_function__` and `apply`, and of our `on_apply`.
        flags = code.co_flags & inspect.CO_VARARGS, code.co_flags & inspect.CO_VARKEYWORDS
        count = code.co_argcount + sum(map(bool, flags))
        args, kwargs = (python_frame.f_locals[name] for name in code.co_varnames[count - 2 : count])
        way.call = args, kwargs or {}
    elif code.co_name == "on_forward" and call_sites.is_own(code):
        frame_run = next((value for value in python_frame.f_locals.values() if isinstance(value, FrameRun)), None)
        if frame_run is not None:
            way.frames = way.frames if frame_run.plan is None else [frame_run.plan.frame]
            way.counts = frame_run.counts
    elif is_module_call(code):
        if owner is way.module and not way.steps:  # where the way begins
            return
        way.enter(owner)  # type: ignore[arg-type]  # the `self` of `Module.__call__`
    elif call_sites.facts_of(code).is_users:
        is_direct = code.co_name == "forward" and isinstance(owner, Module) and owner is not way.module
        if is_direct and any(n.frame.module is owner for f in way.frames for n in f.calls()):
            way.enter(owner)  # type: ignore[arg-type]  # is a module, as just asked
        way.steps.append((code, call_sites.facts_of(code).offsets[lasti]))
        way.leaf = python_frame


def _is_call(python_frame: FrameType) -> bool:
    """Whether this Python frame holds the arguments of a torch call: a function mode, or an autograd function."""
    code = python_frame.f_code
    if code is _APPLY:
        return not issubclass(python_frame.f_locals["cls"], TRANSPARENT)
    return code.co_name in ("__torch_function__", "on_apply") and call_sites.is_own(code)


def _frame_text(way: _TracebackPath) -> str:
    name = type(way.module).__name__
    if not way.frames:
        return f"code of a {name} that was not captured"
    paths = [repr(format_path(frame.path) or "the model") for frame in way.frames]
    return f"code of {' or '.join(paths[:_MOST_NAMES])} ({name})"


def _line(way: _TracebackPath) -> SourceLine:
    code, offset = next((step for step in reversed(way.steps) if not call_sites.is_own(step[0])), way.steps[-1])
    return SourceLine(code.co_filename, line_at(code, offset), code.co_name)


def _locals_text(way: _TracebackPath) -> tuple[str, ...]:
    """Returns the shapes of the local variables there, if no mode saw the arguments of the call itself."""
    found = way.leaf.f_locals if way.leaf is not None and way.call is None else {}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    return (f"variables there: {arguments_text((), tensors)}",) if tensors else ()
