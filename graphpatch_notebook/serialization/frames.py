"""Writes the records of frames, and the specs of their values, as JSON, and reads them back as frames."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import torch
from torch.nn import Module

from graphpatch_notebook.capture.inputs import signature_with
from graphpatch_notebook.capture.records import (
    CallNode,
    Conditions,
    Frame,
    InputParameter,
    Kind,
    Node,
    OpNode,
    Site,
    SourceLine,
)
from graphpatch_notebook.graphs.copies import SavedSite
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.serialization.codecs.names import Allowed, class_described, described_class
from graphpatch_notebook.serialization.codecs.reading import JsonValue
from graphpatch_notebook.serialization.codecs.values import (
    UnstorableError,
    decoded,
    decoded_device,
    decoded_key,
    dtype_of,
    encoded,
    encoded_key,
)
from graphpatch_notebook.serialization.graphs import GraphReader, is_identifier
from graphpatch_notebook.serialization.modules import LoadedModule, StoredForward
from graphpatch_notebook.values import (
    ContainerSpec,
    ObjectSpec,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    dtype_name,
    key_text,
)

# By the words in files.
_FLAGS = {"is_plumbing": "is_size"} | {name: name for name in ("is_live", "is_mutated_later", "is_view_filled_later")}
_IN_PLACE = "is_in_place"
_BOUNDARY = ("input", "parameter", "buffer", "attribute", "call", "output")
_EMPTY = inspect.Parameter.empty
_LONGEST_LINE = 500


class LineTable:
    """The lines of code that records refer to, each once."""

    def __init__(self) -> None:
        self.entries: list[list[Any]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def number(self, line: SourceLine) -> int:
        """Returns the number of `line`."""
        entry = (line.file, line.line, line.function, line.text[:_LONGEST_LINE])
        known = self._numbers.get(entry)
        if known is None:
            known = self._numbers[entry] = len(self.entries)
            self.entries.append(list(entry))
        return known


# -- writing -----------------------------------------------------------------------------------------------------------


def boundary(frame: Frame) -> list[Node]:
    """Returns the nodes that a frame without a graph has."""
    return [node for node in frame.nodes if node.kind in _BOUNDARY]


def encoded_parameters(parameters: Iterable[InputParameter]) -> list[list[Any]]:
    """Returns the JSON of the parameters of `forward`."""
    result = []
    for parameter in parameters:
        default = [] if parameter.default is _EMPTY else [_default(parameter)]
        result.append([parameter.name, int(parameter.kind), *default])
    return result


def _default(parameter: InputParameter) -> Any:
    try:
        return encoded(parameter.default)
    except UnstorableError:
        kind = type(parameter.default).__name__
        raise UnstorableError(f"the default of its parameter {parameter.name!r} is an object ({kind})") from None


def encoded_nodes(
    nodes: Sequence[Node], frames: dict[int, int], lines: LineTable, unpatchable: Sequence[Node] = ()
) -> list[dict[str, Any]]:
    """Returns the JSON of records; a patch could not change the values of those in `unpatchable` alone."""
    return [_encoded_node(node, frames, lines, is_live=node.is_live and node not in unpatchable) for node in nodes]


def _encoded_node(node: Node, frames: dict[int, int], lines: LineTable, *, is_live: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": node.kind, "name": node.name, "op": node.op, "spec": encoded_spec(node.spec)}
    if node.kind not in ("op", "constant", "output"):
        entry["target"] = str(node.target)
    if node.site is not None:
        entry["lines"] = [lines.number(line) for line in node.site.source_lines()]
    flags = [word for word, name in _FLAGS.items() if (is_live if name == "is_live" else getattr(node, name))]
    if node.is_in_place:
        flags.append(_IN_PLACE)
        entry["written_argument"] = node.written_argument
    if flags != ["is_live"]:
        entry["flags"] = flags
    if isinstance(node, CallNode):
        entry |= {"frame": frames[id(node.frame)], "call_index": node.call_index, "call_count": node.call_count}
    return entry


# -- reading -----------------------------------------------------------------------------------------------------------


def decoded_lines(item: JsonValue) -> list[SourceLine]:
    """Returns the lines of code that records refer to."""
    found: list[SourceLine] = []
    for entry in item.items():
        file, line, function, text = entry.items(4)
        found.append(SourceLine(file.text(), line.whole(), function.text(), text.text()))
    return found


def decoded_parameters(item: JsonValue) -> list[InputParameter]:
    """Returns the parameters of `forward`."""
    result = []
    for entry in item.items():
        parts = entry.items()
        if not 2 <= len(parts) <= 3 or not is_identifier(parts[0].text()):
            raise entry.error("there should be the name of a parameter, its kind, and possibly its default")
        kind = inspect._ParameterKind(parts[1].whole(0, 4))
        result.append(InputParameter(parts[0].text(), kind, decoded(parts[2]) if len(parts) == 3 else _EMPTY))
    try:
        signature_with(result)
    except ValueError as error:
        raise item.error(f"no function has such parameters: {error}") from None
    return result


def decoded_nodes(
    item: JsonValue, frame: Frame, lines: Sequence[SourceLine], frames: Sequence[Frame]
) -> dict[int, CallNode]:
    """Adds the records in `item` to `frame`, and returns the calls among them, by the number of the called frame."""
    calls: dict[int, CallNode] = {}
    sites: dict[tuple[int, ...], Site] = {}
    for entry in item.items():
        fields = entry.fields(
            "kind", "name", "op", "spec",
            optional=("target", "lines", "flags", "written_argument", "frame", "call_index", "call_count"),
        )  # fmt: skip
        node = _decoded_node(entry, fields, frames)
        if not node.name or node.name in frame.names:
            raise fields["name"].error(f"a node cannot be called {node.name[:60]!r}")
        node.target = fields["target"].text() if "target" in fields else _target(node)
        if "lines" in fields and isinstance(node, (OpNode, CallNode)):
            numbers = tuple(number.whole(0, len(lines) - 1) for number in fields["lines"].items())
            node.site = sites.setdefault(numbers, SavedSite((), tuple(lines[number] for number in numbers)))
        _read_flags(fields, node)
        if isinstance(node, CallNode):
            number = fields["frame"].whole()
            if number in calls:
                raise fields["frame"].error("two calls refer to one frame")
            calls[number] = node
        frame.nodes.append(node)
        frame.names[node.name] = node
    return calls


def _decoded_node(entry: JsonValue, fields: dict[str, JsonValue], frames: Sequence[Frame]) -> Node:
    kind: Kind = fields["kind"].one_of(get_args(Kind))  # type: ignore[assignment]  # it is one of them
    name = fields["name"].text()
    common: dict[str, Any] = {
        "op": fields["op"].text(), "target": None, "spec": decoded_spec(fields["spec"]), "name": name, "base_name": name
    }  # fmt: skip
    if (kind == "call") != ("frame" in fields):
        raise entry.error("each call has a frame, and nothing else has")
    if kind == "call":
        index, count = _calls(entry, fields)
        frame = frames[fields["frame"].whole(0, len(frames) - 1)]
        return CallNode(frame=frame, call_index=index, call_count=count, **common)
    return OpNode(**common) if kind == "op" else Node(kind=kind, **common)


def _target(node: Node) -> Any:
    return _no_value if node.kind == "constant" else node.name


def _no_value() -> None:
    """Returns `None`, for a constant that is not stored."""


def _read_flags(fields: dict[str, JsonValue], node: Node) -> None:
    if "flags" in fields:
        flags = {flag.one_of((*_FLAGS, _IN_PLACE)) for flag in fields["flags"].items()}
        for word, name in _FLAGS.items():
            setattr(node, name, word in flags)
        if _IN_PLACE in flags and isinstance(node, OpNode):
            written = fields.get("written_argument")
            is_name = written is not None and type(written.value) is str
            node.written_argument = 0 if written is None else written.text() if is_name else written.whole(0, 1000)


def _calls(entry: JsonValue, fields: dict[str, JsonValue]) -> tuple[int, int]:
    if "call_index" not in fields or "call_count" not in fields:
        raise entry.error("there should be the index and the count of the call")
    count = fields["call_count"].whole(1)
    return fields["call_index"].whole(0, count - 1), count


def check_nodes(frame: Frame, item: JsonValue) -> None:
    """Checks the records of a frame: its inputs come first, its output last."""
    kinds = [node.kind for node in frame.nodes]
    inputs = [node for node in frame.nodes if node.kind == "input"]
    names = {parameter.name for parameter in frame.parameters}
    if kinds.count("output") != 1 or kinds[-1] != "output":
        raise item.error("a frame has one output, which is its last node")
    if not {node.target for node in inputs} <= names or len({node.target for node in inputs}) != len(inputs):
        raise item.error("each input of a frame is a parameter of forward")


def check_repeats(frame: Frame, item: JsonValue) -> None:
    """Checks that the calls of one module are numbered in order."""
    seen: dict[int, set[int]] = {}
    for node in frame.calls():
        indices = seen.setdefault(id(node.frame.module), set())
        if node.call_index in indices:
            raise item.error(f"two calls of one module in a frame have the number {node.call_index}")
        indices.add(node.call_index)


# -- reading the frames of a file --------------------------------------------------------------------------------------


_DEEPEST = 100
_FIELDS = ("module", "attribute_path", "training", "unstored", "parameters", "nodes")


class FrameReader:
    """Reads the frames of a file: callers before those that they call, so that the first is the root."""

    def __init__(
        self, item: JsonValue, modules: Sequence[Module], lines: Sequence[SourceLine], allowed: Allowed
    ) -> None:
        self._modules = modules
        self._lines = lines
        items = item.items()
        entries = [entry.fields(*_FIELDS, optional=("graph", "own_graph")) for entry in items]
        self._callers: dict[int, tuple[Frame, CallNode, int]] = {}
        self.frames = [self._frame(fields) for fields in entries]
        for number, fields in enumerate(entries):
            if (number == 0) == (number in self._callers):
                raise items[number].error("each frame but the first is called by one before it")
            self._add(number, fields, items[number])
        if len(self._callers) != len(entries) - 1:
            raise item.error("a call refers to a frame that is not there")
        for frame, fields, entry in zip(self.frames, entries, items, strict=True):
            check_nodes(frame, entry)
            check_repeats(frame, entry)
            if frame.opaque_reason is None:
                if "graph" not in fields:
                    raise entry.error("there should be a graph, or why there is none")
                frame.custom_graph = GraphReader(frame, allowed).read(fields["graph"].items())
                # All loaded graphs are custom ones. These were edited or custom before they were saved, too.
                frame.is_edited = "own_graph" in fields and fields["own_graph"].flag()
            if isinstance(frame.module, LoadedModule):
                _set_forward(frame.module, frame)

    def _add(self, number: int, fields: dict[str, JsonValue], item: JsonValue) -> None:
        frame, depth = self.frames[number], 0
        if number:
            frame.parent, frame.call, depth = self._callers[number]
            frame.capture = frame.parent.capture
        if depth > _DEEPEST:
            raise item.error("calls are nested too deeply")
        frame.parameters = decoded_parameters(fields["parameters"])
        if not fields["unstored"].is_null:
            frame.opaque_reason = fields["unstored"].text()
        for called, node in decoded_nodes(fields["nodes"], frame, self._lines, self.frames).items():
            if called <= number or called in self._callers:
                raise item.error(f"it cannot call the frame {called}, which comes before it or is called already")
            self._callers[called] = frame, node, depth + 1

    def _frame(self, fields: dict[str, JsonValue]) -> Frame:
        module = self._modules[fields["module"].whole(0, len(self._modules) - 1)]
        return Frame(module, fields["attribute_path"].text(), conditions=Conditions(fields["training"].flag()))


def _set_forward(module: LoadedModule, frame: Frame) -> None:
    """Gives the module a `forward` with the recorded signature, which raises an error with the reason."""
    reason = "its graph runs in a call of the PatchableGraph only"
    if frame.opaque_reason is not None:
        reason = (
            f"the file has no graph of {format_path(frame.path) or '<root>'!r}: {frame.opaque_reason}; give the "
            "model whose graph it is: PatchableGraph.load(file, model=model)"
        )
    module.__dict__["forward"] = StoredForward(type(module).__name__, frame.parameters, reason)


# -- descriptions of values --------------------------------------------------------------------------------------------


def encoded_spec(spec: ValueSpec) -> list[Any]:
    """Returns the JSON of `spec`; a value that cannot be written becomes the description of an object."""
    if isinstance(spec, TensorSpec):
        return ["tensor", list(spec.shape), dtype_name(spec.dtype), str(spec.device), spec.type_name]
    if isinstance(spec, ContainerSpec):
        try:
            children = [[encoded_key(key), encoded_spec(child)] for _, key, child in spec.children]
        except UnstorableError:  # a key of a dict that is an object
            return ["object", spec.type.__name__]
        return ["container", described_class(spec.type), children]
    if isinstance(spec, ScalarSpec):
        try:
            return ["value", encoded(spec.value)]
        except UnstorableError:
            return ["object", type(spec.value).__name__]
    return ["unknown"] if isinstance(spec, UnknownSpec) else ["object", str(spec)]


def decoded_spec(item: JsonValue, depth: int = 0) -> ValueSpec:
    """Returns the description in `item`."""
    if depth > _DEEPEST:
        raise item.error("it is nested too deeply")
    parts = item.items()
    kind = parts[0].one_of(("tensor", "container", "value", "object", "unknown")) if parts else ""
    if kind == "unknown":
        return UnknownSpec()
    if kind == "tensor":
        _, shape, dtype, device, name = item.items(5)
        sizes = torch.Size([size.whole() for size in shape.items()])
        return TensorSpec(sizes, dtype_of(dtype), decoded_device(device), name.text())
    if kind == "container":
        _, cls, inside = item.items(3)
        pairs = [pair.items(2) for pair in inside.items()]
        keyed = [(decoded_key(key), decoded_spec(child, depth + 1)) for key, child in pairs]
        return ContainerSpec(class_described(cls), tuple((key_text(key), key, child) for key, child in keyed))
    inner = item.items(2)[1]
    return ScalarSpec(decoded(inner)) if kind == "value" else ObjectSpec(inner.text())
