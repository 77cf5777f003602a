"""The document of a graph: everything that is written except the numbers in its tensors.

{"schema": 1, "written_by": "0.1.0", "torch": "2.13.0", "options": {..}, "form": {..},
 "frames": [..], "modules": [..], "tensors": [..], "lines": [..]}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from graphpatch_notebook._version import __version__
from graphpatch_notebook.capture import chosen_decompositions, listed_doubts
from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.serialization.codecs.tensors import TensorTable
from graphpatch_notebook.serialization.codecs.value_reads import has_only_reads
from graphpatch_notebook.serialization.codecs.values import UnstorableError, encoded
from graphpatch_notebook.serialization.forms import Form, encoded_form
from graphpatch_notebook.serialization.frames import LineTable, boundary, encoded_nodes, encoded_parameters
from graphpatch_notebook.serialization.graphs import Builds, encoded_graph
from graphpatch_notebook.serialization.modules import LoadedRoot, ModuleTable

SCHEMA = 1
"""The version of the layout of documents. Increased whenever an older reader would misread a newer document."""


@dataclass
class Document:
    """The written form of a graph: the JSON, and the tensors and modules that it refers to by number."""

    content: dict[str, Any]
    tensors: TensorTable
    modules: list[Module]


class Reasons:
    """Why frames are not stored."""

    def __init__(self, root: Frame) -> None:
        self._root = root
        self._found: dict[int, str] = {}

    def add(self, frame: Frame, reason: str) -> None:
        """Notes that `frame`, and with it all below, is not stored; the first reason counts."""
        for inner in frame.walk():
            if inner is frame:
                self._found.setdefault(id(inner), reason)
            else:
                self._found.setdefault(id(inner), f"it is inside {_where(frame)}, which is not stored")

    def of(self, frame: Frame) -> str | None:
        """Returns why `frame` is not stored; `None` if it is."""
        return self._found.get(id(frame))

    def of_outermost(self, frame: Frame) -> str | None:
        """Returns why the outermost frame around `frame`, or `frame` itself, is not stored."""
        while frame.parent is not None and self.of(frame.parent) is not None:
            frame = frame.parent
        return self.of(frame)

    def settle(self) -> None:
        """Stores a module with all of its frames or with none, as one module of the file runs them all."""
        before = -1
        while before != len(self._found):
            before = len(self._found)
            without = {id(frame.module): frame for frame in self._root.walk() if self.of(frame) is not None}
            for frame in self._root.walk():
                if (other := without.get(id(frame.module))) is not None and self.of(frame) is None:
                    self.add(frame, f"it is the module of {_where(other)}, which is not stored")

    def by_path(self) -> dict[str, str]:
        """Returns the reasons by the paths of the frames, in order of execution."""
        frames = ((frame, self.of(frame)) for frame in self._root.walk())
        return {format_path(frame.path): reason for frame, reason in frames if reason is not None}

    def topmost(self) -> Iterator[tuple[str, str]]:
        """Yields paths and reasons of the frames that are not stored although those that call them are."""
        for frame in self._root.walk():
            reason = self.of(frame)
            if reason is not None and (frame.parent is None or self.of(frame.parent) is None):
                yield _where(frame), reason


def _where(frame: Frame) -> str:
    return repr(format_path(frame.path)) if frame.parent is not None else "the root"


def note_unstorable(root: Frame, builds: Builds, reasons: Reasons) -> None:
    """Finds the frames that have no graph, or one that may differ from the module, or one that cannot be written."""
    tensors = TensorTable()
    modules = ModuleTable(root.module, (frame.module for frame in root.walk()), tensors)
    for frame in root.walk():
        if reasons.of(frame) is None and (reason := _problem(frame, builds, modules)) is not None:
            reasons.add(frame, reason)


def is_own_graph(frame: Frame, root: Frame) -> bool:
    """Whether the graph of `frame` *is* its module, rather than a record of it, here and before it was loaded."""
    # All loaded graphs are custom ones; those that were edited or custom before they were saved count as edited.
    return frame.is_edited or (frame.has_own_graph and not isinstance(root.module, LoadedRoot))


def _problem(frame: Frame, builds: Builds, modules: ModuleTable) -> str | None:
    if frame.opaque_reason is not None:
        return frame.opaque_reason
    if frame.doubts and not has_only_reads(frame) and not frame.has_own_graph:
        return listed_doubts(frame.doubts)
    try:
        encoded_parameters(frame.parameters)
        encoded_graph(frame, builds, modules)
    except (GraphError, UnstorableError) as error:
        return str(error)
    return None


def document(root: Frame, builds: Builds, options: ExtractionOptions, reasons: Reasons) -> Document:
    """Returns the document of a graph, without the form of its calls."""
    frames = list(root.walk())
    numbers = {id(frame): number for number, frame in enumerate(frames)}
    tensors, lines = TensorTable(), LineTable()
    modules = ModuleTable(root.module, (frame.module for frame in frames), tensors)
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "written_by": __version__,
        "torch": str(torch.__version__),
        "options": encoded_options(options),
        "form": None,
        "frames": [_encoded_frame(frame, builds, numbers, modules, lines, reasons.of(frame)) for frame in frames],
    }
    for frame, entry in zip(frames, content["frames"], strict=True):
        if is_own_graph(frame, root) and reasons.of(frame) is None:
            entry["own_graph"] = True
    content["modules"] = modules.encoded()
    content["tensors"] = tensors.encoded()
    content["lines"] = lines.entries
    return Document(content, tensors, modules.modules)


def _encoded_frame(
    frame: Frame, builds: Builds, numbers: dict[int, int], modules: ModuleTable, lines: LineTable, reason: str | None
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "module": modules.number(frame.module),
        "attribute_path": frame.attribute_path,
        "training": frame.conditions.training,
        "unstored": reason,
    }
    if reason is None:
        entry["parameters"] = encoded_parameters(frame.parameters)
        entry["nodes"] = encoded_nodes(frame.graph_nodes, numbers, lines, _indistinct_inputs(frame))
        entry["graph"] = encoded_graph(frame, builds, modules)
        return entry
    try:
        entry["parameters"] = encoded_parameters(frame.parameters)
    except UnstorableError:  # the model's own module has them
        entry["parameters"] = []
    nodes = [n for n in boundary(frame) if n.kind != "input" or entry["parameters"]]
    entry["nodes"] = encoded_nodes(nodes, numbers, lines)
    return entry


def _indistinct_inputs(frame: Frame) -> list[Node]:
    """Returns the inputs of `frame` that were the same tensor as another input, which its graph cannot distinguish.

    `attention(x, x, x)`: the graph reads one of the three names, no matter which one the code reads. Without patches
    that is right for all calls of this form; a patch on one of them would change too much or nothing.
    """
    if frame.custom_graph is not None:  # which is not a record
        return []
    names = {name for pair in frame.conditions.same_inputs for name, _ in pair}
    return [node for node in frame.inputs() if node.target in names]


def with_form(found: Document, form: Form) -> Document:
    """Returns the document with the form of the calls that its graphs are valid for."""
    return Document({**found.content, "form": encoded_form(form)}, found.tensors, found.modules)


def encoded_options(options: ExtractionOptions) -> dict[str, Any]:
    """Returns the JSON of options, with names in place of functions and classes."""
    kept: dict[str, Any] = {}
    dropped: dict[str, str] = {}
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        if option.name == "decompose" and value is not None:
            value = tuple(decomposition.name for decomposition in chosen_decompositions(value).values())
        try:
            kept[option.name] = {"set": sorted(map(str, value))} if _is_text_set(value) else encoded(value)
        except UnstorableError:
            dropped[option.name] = _named(value)
    return {"kept": kept, "dropped": {name: text for name, text in dropped.items() if text}}


def _is_text_set(value: Any) -> bool:
    return isinstance(value, (set, frozenset)) and all(isinstance(item, str) for item in value)


def _named(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_named(key)}: {_named(item)}" for key, item in value.items())
    if isinstance(value, (set, frozenset, list, tuple)):
        return ", ".join(sorted(map(_named, value)))
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
