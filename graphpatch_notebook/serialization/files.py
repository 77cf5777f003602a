"""Safetensors files with a JSON document in their metadata: checked, written as a whole, and read without pickle."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from graphpatch_notebook.errors import SerializationError
from graphpatch_notebook.serialization.codecs.reading import JsonValue, parsed
from graphpatch_notebook.whole_files import whole_file


def checked_target(file: Any, function: str) -> Path | IO[bytes]:
    """Returns the file to write, as a path if it is given by name. `function` is the public one, for messages.

    Raises:
        FileNotFoundError, IsADirectoryError: The folder does not exist, or `file` is a folder.
        TypeError: It is neither the name of a file nor an open binary file.
    """
    if hasattr(file, "write") and not isinstance(file, os.PathLike) and not _is_text(file):
        return file  # type: ignore[no-any-return]
    if not isinstance(file, (str, os.PathLike)):
        raise TypeError(
            f"{function} takes the name of a file, or a file that is open for bytes, not {type(file).__name__}"
        )
    path = Path(file)
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder: give the name of a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder does not exist: {str(path.parent)!r}: make it first, or choose another")
    return path


def _is_text(file: Any) -> bool:
    return hasattr(file, "encoding")  # also the files of `tempfile` and `codecs`, which are no `TextIOBase`


def write_document(file: Path | IO[bytes], key: str, content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes a JSON document, under this key, and its tensors."""
    from safetensors.torch import save, save_file

    metadata = {"format": "pt", key: json.dumps(content, allow_nan=False, separators=(",", ":"))}
    if not isinstance(file, Path):
        data = save(tensors, metadata)
        while data:  # a file without a buffer may write less: 2 GB at a time, on Linux
            count: Any = file.write(data)  # a file of the user may return nothing
            data = data[count:] if isinstance(count, int) else b""
        return
    with whole_file(file) as written:
        save_file(tensors, written, metadata=metadata)


def name_of(file: Path | IO[bytes]) -> str:
    """Returns the name of a file for messages."""
    return file.name if isinstance(file, Path) else f"the {type(file).__name__}"


def read_document(
    file: Any, key: str, writer: str, function: str, otherwise: str
) -> tuple[str, JsonValue, dict[str, Tensor]]:
    """Returns the name of a file for messages, its document and its tensors; nothing in it is run.

    `writer` is the call that writes such files, `function` the public function that reads them, and `otherwise` what
    the message says of a file without such a document.

    Raises:
        FileNotFoundError, IsADirectoryError: The file does not exist, or is a folder.
        TypeError: `file` is neither the name of a file nor an open binary file.
    """
    from safetensors import SafetensorError

    source: Any = Path(file) if isinstance(file, (str, os.PathLike)) else file
    if not isinstance(source, Path) and (not hasattr(source, "read") or _is_text(source)):
        raise TypeError(
            f"{function} takes the name of a file, or a file that is open for bytes, not {type(file).__name__}"
        )
    name = name_of(source)
    data = None if isinstance(source, Path) else source.read()
    try:
        if data is None:
            metadata, tensors = _contents(source, writer)
        else:
            metadata, tensors, size = _contents_of_bytes(data)
            if size < len(data) and hasattr(source, "seekable") and source.seekable():
                source.seek(size - len(data), io.SEEK_CUR)
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        if isinstance(error, (FileNotFoundError, IsADirectoryError)):
            raise
        raise SerializationError(
            f"{name} is not a file that {writer} wrote, or it is damaged: {error}; files of torch.save and "
            "pickles are never read, as these run code"
        ) from error
    if key not in metadata:
        raise SerializationError(f"{name} {otherwise}")
    return name, parsed(metadata[key], name), tensors


def _contents(file: Path, writer: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    from safetensors import safe_open

    if file.is_dir():
        raise IsADirectoryError(f"{str(file)!r} is a folder: give the name of a file that {writer} wrote")
    if not file.is_file():
        raise FileNotFoundError(f"the file does not exist: {str(file)!r}")
    with safe_open(file, framework="pt") as opened:
        return opened.metadata() or {}, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # no mapping


def _contents_of_bytes(data: bytes) -> tuple[dict[str, str], dict[str, Tensor], int]:
    """Returns the metadata, the tensors, and how many bytes they take: others may follow in an open file."""
    from safetensors.torch import load as loaded

    if not data:
        raise ValueError("there is nothing to read at its current position: file.seek(0) goes back to the start")
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", None) or {}
    size = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    return metadata, loaded(data[:size]), size
