"""The documents in files, each part defined once: what `msgspec` writes, and what it accepts, with all types checked.

Values of arguments (`Any` here) are plain ones as `plain_values` writes them. Numbers refer to the lists of the
document: modules, tensors, frames, lines of code, records of a frame, and the steps of a graph before.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from graphpatch_notebook._version import __version__
from graphpatch_notebook.capture.records import Kind

SCHEMA = 2
"""The version of documents. Increased whenever an older reader would misread a newer document, or the reverse."""

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class DocumentPart(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a document."""


class TensorPart(DocumentPart):
    """A tensor: a view of one of the stored arrays, which several tensors may share."""

    storage: str
    dtype: str
    shape: list[Number]
    stride: list[Number]
    offset: Number = 0
    device: str = "cpu"
    is_parameter: bool = False
    requires_grad: bool = False


class SpecPart(DocumentPart):
    """The spec of a value; `name` is the class, `container` the kind of a container of which only the name is known."""

    kind: Literal["tensor", "container", "value", "object", "unknown"]
    name: str = ""
    shape: list[Number] = []
    dtype: str = ""
    device: str = "cpu"
    value: Any = None
    container: Literal["", "tuple", "list", "mapping", "object"] = ""
    children: list[tuple[Any, SpecPart]] = []


class FunctionPart(DocumentPart):
    """A function of torch or Python by our name for it, an operator of `torch.ops`, or an import: `module:name`.

    A `container` is a function that makes one of this class with children at `keys`.
    """

    kind: Literal["known", "operator", "container", "imported", "autograd"]
    name: str
    keys: list[Any] = []


class StepPart(DocumentPart):
    """A node of an `fx.Graph`: `target` is its path, method or parameter, `record` the number of its record."""

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: str
    target: str | FunctionPart = ""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    record: Number | None = None


class ParameterPart(DocumentPart):
    """A parameter of `forward`; `kind` is that of `inspect`, `default` a list of the default if there is one."""

    name: str
    kind: int
    default: list[Any] = []


class RecordPart(DocumentPart):
    """The record of a value. A call has the number of its frame."""

    kind: Kind
    name: str
    op: str
    spec: SpecPart
    target: str | None = None
    lines: list[Number] = []
    flags: list[Literal["is_size", "is_hidden", "is_mutated_later", "is_view_filled_later"]] = []
    written_argument: Number | str | None = None
    frame: Number = 0
    call_index: Number = 0
    call_count: Number = 1


class FramePart(DocumentPart):
    """A call of a module, with its graph, or the reason why none is stored; `is_own`: the graph *is* the module.

    `grad_mode` is that of the root, if the graphs hold for no other.
    """

    module: Number
    attribute_path: str
    training: bool
    parameters: list[ParameterPart]
    records: list[RecordPart]
    graph: list[StepPart] = []
    unstored: str | None = None
    is_own: bool = False
    same_inputs: list[list[tuple[str, list[Any]]]] = []
    grad_mode: bool | None = None


class ModulePart(DocumentPart):
    """A module, without its code: `path` is where the model has it.

    `names` are attributes that graphs read: tensors and modules, by number.
    """

    cls: str
    path: str | None
    training: bool
    parameters: dict[str, Number | None] = {}
    buffers: dict[str, Number | None] = {}
    not_persistent: list[str] = []
    children: dict[str, Number | None] = {}
    names: dict[str, tuple[Literal["tensor", "module"], Number]] = {}


class Document(msgspec.Struct, kw_only=True):
    """What each document has."""

    schema: int = SCHEMA
    written_by: str = __version__


class GraphDocument(Document, forbid_unknown_fields=True, kw_only=True):
    """The document of `pg.save`. `sizes` are those of the inputs, `None` for those that the graph does not fix."""

    default_dtype: str
    sizes: list[list[Number | None]]
    frames: list[FramePart]
    modules: list[ModulePart]
    tensors: list[TensorPart]
    lines: list[tuple[str, int, str, str]]


class PatchPart(DocumentPart):
    """A patch: its kind, and its fields as plain values."""

    path: str
    kind: str
    fields: dict[str, Any]


class PatchDocument(Document, forbid_unknown_fields=True, kw_only=True):
    """The document of `save_patches`."""

    patches: list[PatchPart]
    tensors: list[TensorPart]
