"""Text files that commands write: atomically, and never over the files of others."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from graphpatch_notebook.errors import SessionFileError
from graphpatch_notebook.whole_files import whole_file

_WRITABLE = 0o222


def check_no_nul(file: str | os.PathLike[str]) -> None:
    """Checks that a file name has no null character.

    Raises:
        SessionFileError: It has one.
    """
    if "\0" in os.fspath(file):
        raise SessionFileError(f"{str(file)!r} is not a file name: it contains a null character")


def real_file(file: str | os.PathLike[str]) -> Path:
    """Returns the file to write, with links and `~` resolved.

    Raises:
        SessionFileError: It is not a file, a broken link, or read-only.
        OSError: The file cannot be inspected.
    """
    check_no_nul(file)
    try:
        given = Path(file).expanduser()
        target = Path(os.path.realpath(given))
    except RuntimeError as error:  # unknown user in `~user`
        raise SessionFileError(f"{str(file)!r} cannot be written: {error}") from error
    if os.path.islink(target):  # noqa: PTH114  # unlike `Path`, it accepts names that are too long
        raise SessionFileError(f"{str(file)!r} cannot be written: it is a link to itself")
    if not target.exists():
        if os.path.islink(given):  # noqa: PTH114
            raise SessionFileError(
                f"{str(file)!r} is a link to {str(target)!r}, which does not exist: give another name"
            )
        return target
    if not target.is_file():
        what = "a directory" if target.is_dir() else "not a regular file"
        raise SessionFileError(f"{str(target)!r} is {what}: give the name of a file")
    # It could be replaced, but whether it is read-only is up to the user.
    if not target.stat().st_mode & _WRITABLE or not os.access(target, os.W_OK):
        raise SessionFileError(f"{str(target)!r} is read-only: choose another name, or make it writable")
    return target


def digest(text: str) -> str:
    """Returns the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def replace_text(target: Path, text: str) -> None:
    """Replaces the content of `target`.

    Raises:
        OSError: It cannot be written; its content is not changed.
    """
    if target.exists() and target.stat().st_nlink > 1:
        # Write in place, so that its other hard links change too.
        target.write_text(text, encoding="utf8", newline="\n")
        return
    with whole_file(target) as written:
        written.write_bytes(text.encode())
