"""Text files that commands write: whole or not at all, and never over what somebody else has written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from graphpatch_notebook.errors import SessionFileError
from graphpatch_notebook.whole_files import whole_file

_WRITABLE = 0o222


def check_no_nul(file: str | os.PathLike[str]) -> None:
    """Makes sure that a name is one that a file can have.

    Raises:
        SessionFileError: It is not.
    """
    if "\0" in os.fspath(file):
        raise SessionFileError(f"{str(file)!r} is no name of a file: there is a zero character in it")


def real_file(file: str | os.PathLike[str]) -> Path:
    """Returns the file to write: where links lead, `~` being the home directory.

    Raises:
        SessionFileError: It is no file, a link to nothing, or somebody wants it to stay as it is.
        OSError: The system does not say what it is.
    """
    check_no_nul(file)
    try:
        given = Path(file).expanduser()
        target = Path(os.path.realpath(given))
    except RuntimeError as error:  # no such user
        raise SessionFileError(f"{str(file)!r} cannot be written: {error}") from error
    if os.path.islink(target):  # noqa: PTH114  # which takes names that are too long
        raise SessionFileError(f"{str(file)!r} cannot be written: it is a link that leads to itself")
    if not target.exists():
        if os.path.islink(given):  # noqa: PTH114
            raise SessionFileError(
                f"{str(file)!r} is a link to {str(target)!r}, which does not exist: give another name"
            )
        return target
    if not target.is_file():
        what = "a directory" if target.is_dir() else "no plain file"
        raise SessionFileError(f"{str(target)!r} is {what}: give the name of a file")
    # Another file in its place would be possible, but somebody wants this one to stay.
    if not target.stat().st_mode & _WRITABLE or not os.access(target, os.W_OK):
        raise SessionFileError(f"{str(target)!r} is read-only: choose another name, or make it writable")
    return target


def digest(text: str) -> str:
    """Returns the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def replace_text(target: Path, text: str) -> None:
    """Puts a file with this text in the place of `target`.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    if target.exists() and target.stat().st_nlink > 1:
        # It has other names, under which it is to be found changed, too.
        target.write_text(text, encoding="utf8", newline="\n")
        return
    with whole_file(target) as written:
        written.write_bytes(text.encode())
