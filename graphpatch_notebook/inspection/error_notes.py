"""Writes the note on an error about the node that raised it: its path and operation, the user's line, the shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graphpatch_notebook.capture.records import Node, Ref, Structure
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, ValueSpec, describe, spec_at

_MOST_LISTED = 8


def failure_note(what: str, line: str = "", now: str = "", at_capture: str = "", more: Iterable[str] = ()) -> str:
    """Returns the note: path and operation, the user's line, the arguments now and at capture, further sentences."""
    shapes = [f"arguments: {now}"] if now else []
    if at_capture and at_capture != now:
        shapes.append(f"arguments at capture: {at_capture}")
    return "\n  ".join([f"raised by {what}", *([line] if line else []), *shapes, *more])


def arguments_text(args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    """Returns a description of the arguments of a call: tensors by their shapes, numbers by their values."""
    return _joined([_text(value) for value in args] + [f"{name}={_text(value)}" for name, value in kwargs.items()])


def arguments_at_capture(node: Node) -> str:
    """Returns a description of the arguments of a recorded call, in the same form."""
    source = node.whole
    return arguments_text(source.args, source.kwargs)


def _text(value: Any) -> str:
    if isinstance(value, Ref):
        return _spec_text(spec_at(value.node.spec, value.dig))
    if isinstance(value, Structure):
        return value.type.__name__
    if type(value) in (tuple, list):  # of a recorded call: may hold `Ref`s
        inside = _joined([_text(item) for item in value])
        return f"({inside})" if type(value) is tuple else f"[{inside}]"
    return _spec_text(describe(value))


def _spec_text(spec: ValueSpec | None) -> str:
    if isinstance(spec, ScalarSpec):
        return repr(spec.value)
    if isinstance(spec, ContainerSpec):
        return f"{spec.type.__name__}({_joined([_spec_text(child) for _, _, child in spec.children])})"
    return "?" if spec is None else str(spec)


def _joined(texts: list[str]) -> str:
    return ", ".join(texts[:_MOST_LISTED]) + (", ..." if len(texts) > _MOST_LISTED else "")
