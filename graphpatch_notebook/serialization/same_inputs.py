"""Inputs that were one tensor when a frame was captured: its graph, which is a record, cannot tell them apart.

`attention(x, x, x)`: the graph reads one of the three names, whichever the code meant. Without patches that is right
for all calls of this form; a patch on one of them would change too much or nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from graphpatch_notebook.capture.inputs import bind
from graphpatch_notebook.capture.records import Frame, Node, Ref, Structure
from graphpatch_notebook.values import Key


def indistinct_inputs(frame: Frame) -> list[Node]:
    """Returns the inputs of `frame` that share a value with another one; for graphs that are no records, none."""
    if frame.call is None or frame.has_own_graph:
        return []
    signature = inspect.Signature([inspect.Parameter(p.name, p.kind, default=p.default) for p in frame.parameters])
    given = bind(signature, frame.call.args, frame.call.kwargs) or {}
    refs = [(name, ref) for name, value in given.items() for ref in _refs(value)]
    shared = {
        name
        for i, (one, ref) in enumerate(refs)
        for j, (other, known) in enumerate(refs)
        if i != j and ref.node is known.node and _overlap(ref.dig, known.dig)
        for name in (one, other)
    }
    return [node for node in frame.inputs() if node.target in shared]


def _overlap(a: tuple[Key, ...], b: tuple[Key, ...]) -> bool:
    return a[: len(b)] == b[: len(a)]


def _refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        if not getattr(value.node, "is_plumbing", False):
            yield value
    elif isinstance(value, Structure):
        for _, child in value.children:
            yield from _refs(child)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _refs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _refs(item)
