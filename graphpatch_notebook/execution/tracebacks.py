"""Names the node that raised an error, from the traceback, so that runs without errors do not cost time.

The traceback holds the frames that the run was in, and the chain of call sites that identifies an op in a frame. If a
loop makes several nodes of one call site, all of them are candidates.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.records import Frame, Node, SourceLine, line_at
from graphpatch_notebook.errors import GraphPatchError, add_note, has_note
from graphpatch_notebook.graphs.generated_code import name_assigned_at
from graphpatch_notebook.inspection.error_notes import arguments_at_capture, arguments_text, failure_note
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import is_module_call

if TYPE_CHECKING:
    from graphpatch_notebook.execution.run import Run

_MOST_NAMES, _MOST_PATCHED = 4, 6


def explain(error: Exception, run: Run) -> None:
    """Adds a note that names the node to an error of a run, and the patches that were applied before."""
    if isinstance(error, GraphPatchError) and error.__cause__ is None:  # else the user's code raised it
        _hide_frames(error)
    # Errors with a meaning to the interpreter must not change; our own name their path themselves.
    if isinstance(error, (GraphPatchError, StopIteration, StopAsyncIteration)) or has_note(error) or not run.reached:
        return
    with contextlib.suppress(Exception):  # the user must see the error, even if the note fails
        patched = run.changes()
        more = f", and {len(patched) - _MOST_PATCHED} more" if len(patched) > _MOST_PATCHED else ""
        before = f"\n  patched before: {', '.join(patched[:_MOST_PATCHED])}{more}" if patched else ""
        add_note(error, _failure(error, run) + before)


def _hide_frames(error: Exception) -> None:
    """Hides the way down to an error of ours in notebooks, a page of torch's lines: the message names the node.

    IPython and pytest skip frames with a variable of this name, on request.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    above: FrameType | None = sys._getframe(1)
    while above is not None and (above.f_code.co_filename == _FILE_OF_CALLS or call_sites.is_own(above.f_code)):
        frames.append(above)
        above = above.f_back
    for frame in frames:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function: the variables of modules and classes stay
            frame.f_locals["__tracebackhide__"] = True


_FILE_OF_CALLS = Module.register_buffer.__code__.co_filename


def _failure(error: Exception, run: Run) -> str:
    frames: list[Frame] = [run.plan.root.frame]  # the captured frames that this may be
    module = run.root
    steps: list[tuple[CodeType, int]] = []  # the call sites from its `forward` on, outermost first
    leaf: FrameType | None = None  # the innermost Python frame of the user's code
    nodes: list[tuple[Frame, Node]] = []  # the node of a graph that runs in place of code
    call = ""  # the arguments of the torch call that was made there, if the mode saw it
    entry = error.__traceback__
    while entry is not None:
        python_frame, lasti, entry = entry.tb_frame, entry.tb_lasti, entry.tb_next
        code, variables = python_frame.f_code, python_frame.f_locals
        owner = variables.get("self")
        if owner is run and code.co_name == "on_forward":
            module, steps, nodes = variables["module"], [], []
            plan = variables.get("plan")
            frames = run.plan.callers.frames_of(module) if plan is None else [plan.frame]
        elif (name := name_assigned_at(code, line_at(code, lasti))) is not None:
            frame = getattr(owner, "frame", None)  # of a graph that runs
            nodes = [(f, f.names[name]) for f in ([frame] if isinstance(frame, Frame) else frames) if name in f.names]
        elif owner is run and code.co_name in ("__torch_function__", "on_apply") and steps:
            call = arguments_text(variables["args"], variables["kwargs"] or {})
            break
        elif is_module_call(code) and owner is not module:
            calls = [node for frame in frames for node in frame.calls() if node.frame.module is owner]
            here = [node for node in calls if node.site is not None and list(node.site.steps) == steps]
            frames, module, steps, nodes = [node.frame for node in here or calls], owner, [], []  # type: ignore[assignment]
        elif call_sites.facts_of(code).is_users:
            steps.append((code, call_sites.facts_of(code).offsets[lasti]))
            leaf = python_frame
    nodes = nodes or [(frame, node) for frame in frames for node in frame.nodes if _is_at(node, steps)]
    nodes = [(frame, node) for frame, node in nodes if node.whole is node] or nodes
    line = str(_line(steps)) if steps else ""
    if nodes and not steps and (site := nodes[0][1].site) is not None:
        line = str(site.source_lines()[-1])
    found = {} if leaf is None or call else {k: v for k, v in leaf.f_locals.items() if isinstance(v, Tensor)}
    variables_there = (f"variables there: {arguments_text((), found)}",) if found else ()
    if not nodes:
        return failure_note(_frame_text(frames, module), line, call, more=variables_there)
    names = [repr(format_path((*frame.path, node.name))) for frame, node in nodes]
    what = f"{_listed(names)} ({nodes[0][1].op})"
    return failure_note(what, line, call, arguments_at_capture(nodes[0][1]), variables_there)


def _is_at(node: Node, steps: list[tuple[CodeType, int]]) -> bool:
    return node.kind == "op" and node.site is not None and list(node.site.steps) == steps


def _line(steps: Sequence[tuple[CodeType, int]]) -> SourceLine:
    code, offset = steps[-1]
    return SourceLine(code.co_filename, line_at(code, offset), code.co_name)


def _frame_text(frames: Sequence[Frame], module: Any) -> str:
    name = type(module).__name__ if isinstance(module, Module) else "module"
    if not frames:
        return f"code of a {name} that was not captured"
    return f"code of {_listed([repr(format_path(frame.path) or 'the model') for frame in frames])} ({name})"


def _listed(names: Sequence[str]) -> str:
    more = f" or {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
    return " or ".join(names[:_MOST_NAMES]) + more
