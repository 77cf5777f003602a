"""Safetensors files with a JSON document in their metadata: written as a whole, and read without pickle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
from torch import Tensor

from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.serialization.schema import SCHEMA, Document
from graphpatch_notebook.whole_files import whole_file

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
        GraphError: `writer`, a call, did not write the file, or it is damaged.
        FileNotFoundError, IsADirectoryError: The file does not exist, or is a folder.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load, load_file

    source = checked_file(file, "read")
    if isinstance(source, Path):
        source.open("rb").close()  # which raises the usual errors
    data = b"" if isinstance(source, Path) else source.read()
    try:
        if isinstance(source, Path):
            with safe_open(source, framework="pt") as opened:
                metadata, tensors = opened.metadata(), load_file(source)
        else:
            metadata = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            tensors = load(data)
        document = metadata[key].encode()
        version = msgspec.json.decode(document, type=Document).schema
        if version == SCHEMA:
            return name_of(source), msgspec.json.decode(document, type=kind), tensors
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise GraphError(
            f"{name_of(source)} is not a file that {writer} wrote, or it is damaged, or at its end: {error}; files "
            "of torch.save and pickles are never read, as these run code"
        ) from error
    raise GraphError(
        f"{name_of(source)} has version {version} of the format, and this version of graphpatch-notebook reads version "
        f"{SCHEMA}: write it again with {writer}"
    )
