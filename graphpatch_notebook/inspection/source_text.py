"""The text that `_code` shows: the code of a graph, and the lines of the user's code that called it or made a value."""

from __future__ import annotations

import inspect
import itertools
import linecache
from collections.abc import Callable

from torch.nn import Module

from graphpatch_notebook.capture.records import Frame, Node, SourceLine
from graphpatch_notebook.inspection.locations import Location
from graphpatch_notebook.inspection.resolution import graph_class


class CodeText(str):
    """Text whose repr is the text itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def code_text(location: Location, code_of: Callable[[Frame], str]) -> CodeText:
    """Returns the code of the graph at `location`, or the user's lines that computed the value there."""
    if location.graph is None:
        assert location.node is not None  # only the root has no node, and it is a graph
        return CodeText(_value_text(location.node, location.frame))
    if location.graph.opaque_reason is None:
        title, code = "Compiled code:", code_of(location.graph).strip("\n")
    else:
        title, code = "No compiled code:", f"{graph_class(location.graph)}, because {location.graph.opaque_reason}"
    if location.graph.custom_failure is not None:
        title = f"{title.removesuffix(':')} ({location.graph.custom_failure}):"
    if location.node is None:
        return CodeText(code if location.graph.opaque_reason is None else f"{title}\n{code}")
    return CodeText(f"Calling context:\n{_lines(location.node) or '(not known)'}\n{title}\n{code}")


def _value_text(node: Node, frame: Frame) -> str:
    if lines := _lines(node):
        return lines
    has_target = node.kind in ("input", "parameter", "buffer", "attribute")
    name = "" if node.kind == "output" else f" {(str(node.target) if has_target else node.op)!r}"
    title = f"{node.kind.capitalize()}{name} of {type(frame.module).__name__}"
    line = signature_line(frame.module) if node.kind in ("input", "output") else None
    return f"{title}\n{line}" if line else title


def _lines(node: Node) -> str:
    return "\n".join(map(str, node.site.source_lines())) if node.site is not None else ""


def signature_line(module: Module) -> SourceLine | None:
    """Returns the line of the user's code that defines the module's `forward`, below its decorators."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None:
        return None
    lines = itertools.count(code.co_firstlineno)
    texts = ((number, linecache.getline(code.co_filename, number).strip()) for number in lines)
    start = next(number for number, text in texts if text.startswith(("def ", "async def ")) or not text)
    return SourceLine(code.co_filename, start, code.co_name)
