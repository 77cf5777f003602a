"""Names the node that raised an error, from the traceback, so that runs without errors do not cost time."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.records import Node, Site
from graphpatch_notebook.errors import GraphPatchError, add_note, has_note
from graphpatch_notebook.execution.stand_in import original_of
from graphpatch_notebook.graphs.generated_code import name_assigned_at
from graphpatch_notebook.inspection.error_notes import arguments_at_capture, arguments_text, failure_note
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import is_module_call

if TYPE_CHECKING:
    from graphpatch_notebook.execution.run import Run

_MOST_NAMED = 4
_FILE_OF_CALLS = Module.register_buffer.__code__.co_filename


def explain(error: Exception, run: Run) -> None:
    """Adds a note that names the node to an error of a run, and the patches that were applied before."""
    hide_frames(error)
    # Errors with a meaning to the interpreter must not change; our own name their path themselves.
    if isinstance(error, (GraphPatchError, StopIteration, StopAsyncIteration)) or has_note(error) or not run.reached:
        return
    patched = [
        f"{entry.target.path!r} ({type(patch).__name__})"
        for entry in run.plan.entries
        if id(entry) in run.fired
        for patch in entry.patches
        if not patch.observes_only
    ]
    with contextlib.suppress(Exception):  # the user must see the error, even if the note fails
        before = f"\n  patched before: {_listed(patched)}" if patched else ""
        add_note(error, _failure(error, run) + before)


def hide_frames(error: Exception) -> None:
    """Hides the frames of this package, and for an error of ours, which names its path, all of the way down to it.

    IPython and pytest leave out frames with a variable of this name.
    """
    is_ours = isinstance(error, GraphPatchError) and error.__cause__ is None  # else the user's code raised it
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    above: FrameType | None = sys._getframe(1)
    while above is not None and (above.f_code.co_filename == _FILE_OF_CALLS or call_sites.is_own(above.f_code)):
        frames.append(above)
        above = above.f_back
    for frame in frames:
        # Of functions only: the variables of modules and classes stay.
        if (is_ours or call_sites.is_own(frame.f_code)) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            frame.f_locals["__tracebackhide__"] = True


def _failure(error: Exception, run: Run) -> str:
    """Returns the note: the nodes of the innermost module's frames whose line of the user's code raised the error."""
    module: Module = run.root
    step: tuple[CodeType, int] | None = None  # the innermost call site of the user's code in its forward
    variables: dict[str, Any] = {}  # there
    name = call = ""  # the node of a graph that runs in place of the code; the arguments, if the mode saw the call
    entry = error.__traceback__
    while entry is not None:
        code, found, lasti = entry.tb_frame.f_code, entry.tb_frame.f_locals, entry.tb_lasti
        number, entry = entry.tb_lineno, entry.tb_next
        if is_module_call(code):
            module, step, name = original_of(found["self"]), None, ""
        elif (assigned := name_assigned_at(code, number)) is not None:
            name = assigned
        elif found.get("self") is run and code.co_name in ("__torch_function__", "on_apply") and step is not None:
            call = arguments_text(found["args"], found["kwargs"] or {})
            break
        elif call_sites.facts_of(code).is_users:
            step, variables = (code, call_sites.facts_of(code).offsets[lasti]), found
    frames = run.plan.callers.frames_of(module)
    nodes = [(one, node) for one in frames for node in one.nodes if node.whole is node and _is_at(node, step, name)]
    tensors = {key: value for key, value in variables.items() if isinstance(value, Tensor)} if not call else {}
    more = (f"variables there: {arguments_text((), tensors)}",) if tensors else ()
    line = "" if step is None else str(Site((step,)).source_lines()[0])
    if not nodes:
        where = _listed([repr(format_path(frame.path) or "the model") for frame in frames])
        what = f"code of {where} ({type(module).__name__})" if where else f"code of a {type(module).__name__}"
        return failure_note(what, line, call, more=more)
    (_, first), names = nodes[0], [repr(format_path((*one.path, node.name))) for one, node in nodes]
    if first.site is not None:
        line = str(first.site.source_lines()[-1])
    what = f"{' or '.join(names[:_MOST_NAMED])}{' or others' * (len(names) > _MOST_NAMED)} ({first.op})"
    return failure_note(what, line, call, arguments_at_capture(first), more)


def _is_at(node: Node, step: tuple[CodeType, int] | None, name: str) -> bool:
    if name:
        return node.name == name
    return node.kind == "op" and node.site is not None and node.site.steps[-1:] == (step,)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + f", and {len(names) - _MOST_NAMED} more" * (len(names) > _MOST_NAMED)
