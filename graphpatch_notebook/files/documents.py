"""The documents in files, each part defined once, and the safetensors files whose metadata holds them.

`msgspec` writes the parts, and checks all types when it reads them. Values of arguments (`Any` here) are plain ones as
`values` writes them. Numbers refer to the lists of the document: modules, tensors, frames, lines of code, records of a
frame, and the steps of a graph before.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from torch import Tensor

from graphpatch_notebook._version import __version__
from graphpatch_notebook.capture.records import Kind
from graphpatch_notebook.errors import SerializationError
from graphpatch_notebook.interrupts import whole_file

SCHEMA = 3
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


class FunctionPart(DocumentPart):
    """A function by name (see `values`); with `keys`, what makes a container of this class with children there."""

    name: str
    keys: list[Any] | None = None


class StepPart(DocumentPart):
    """A node of an `fx.Graph`: `target` is its path, method or parameter, `record` the number of its record."""

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: str
    target: str | FunctionPart = ""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    record: Number | None = None


class RecordPart(DocumentPart):
    """The record of a value. A call has the number of its frame, its index, and the number of calls of that module."""

    kind: Kind
    name: str
    op: str
    spec: dict[str, Any]
    target: str | None = None
    lines: list[Number] = []
    flags: list[Literal["is_size", "is_hidden", "is_mutated_later", "is_view_filled_later"]] = []
    written_argument: Number | str | None = None
    call: tuple[Number, int, int] | None = None


class FramePart(DocumentPart):
    """A call of a module, with its graph, or the reason why none is stored; `is_own`: the graph *is* the module.

    `grad_mode` is that of the root, if the graphs hold for no other.
    """

    module: Number
    attribute_path: str
    training: bool
    parameters: list[dict[str, Any]]
    records: list[RecordPart]
    graph: list[StepPart] = []
    unstored: str | None = None
    is_own: bool = False
    same_inputs: Any = None
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


# -- files -------------------------------------------------------------------------------------------------------------

_T = TypeVar("_T", bound=Document)


def checked_file(file: Any, method: str) -> Path | IO[bytes]:
    """Returns a path, or an open binary file with this method, as it is.

    Raises:
        TypeError: It is neither the name of a file nor a file that is open for bytes.
    """
    if isinstance(file, (str, os.PathLike)):
        return Path(file)
    if not hasattr(file, method) or hasattr(file, "encoding"):
        raise TypeError(f"give the name of a file, or a file that is open for bytes, not {type(file).__name__}")
    return file  # type: ignore[no-any-return]


def name_of(file: Path | IO[bytes]) -> str:
    """Returns the name of a file for messages."""
    return file.name if isinstance(file, Path) else f"the {type(file).__name__}"


def write_document(file: Path | IO[bytes], key: str, document: Document, tensors: dict[str, Tensor]) -> None:
    """Writes a document, under this key, and its tensors."""
    from safetensors.torch import save, save_file

    metadata = {"format": "pt", key: msgspec.json.encode(document).decode()}
    if not isinstance(file, Path):
        file.write(save(tensors, metadata))
        return
    if not file.parent.is_dir():
        raise FileNotFoundError(f"the folder does not exist: {str(file.parent)!r}: make it first, or choose another")
    with whole_file(file) as written:
        save_file(tensors, written, metadata=metadata)


def read_document(file: Any, key: str, kind: type[_T], writer: str) -> tuple[str, _T, dict[str, Tensor]]:
    """Returns the name of a file for messages, its document and its tensors; nothing in it is run.

    Raises:
        SerializationError: `writer`, a call, did not write the file, or it is damaged.
        FileNotFoundError, IsADirectoryError: The file does not exist, or is a folder.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load, load_file

    source = checked_file(file, "read")
    if isinstance(source, Path):
        source.open("rb").close()  # which raises the usual errors
    try:
        if isinstance(source, Path):
            with safe_open(source, framework="pt") as opened:
                metadata, tensors = opened.metadata(), load_file(source)
        else:
            data = source.read()
            metadata = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            tensors = load(data)
        document = metadata[key].encode()
        version = msgspec.json.decode(document, type=Document).schema
        if version != SCHEMA:
            raise ValueError(f"it has version {version} of the format, and this graphpatch-notebook reads {SCHEMA}")
        return name_of(source), msgspec.json.decode(document, type=kind), tensors
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise SerializationError(
            f"{name_of(source)} is not a file that this version's {writer} wrote, or it is damaged: {error}; pickles "
            "and files of torch.save are never read, as these run code"
        ) from error
