"""Blocks that end well, also by a KeyboardInterrupt: state is restored, and a file is complete or unchanged."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

# What the content of a file cannot cause: a mistake in code, a missing package, a warning that the user made an error.
_NOT_OF_FILES = (AssertionError, ImportError, NameError, Warning)
_PARTS_MISSING = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR)


@contextmanager
def afterwards(*steps: Callable[[], object]) -> Iterator[None]:
    """Runs steps, in order, when the block ends or raises."""
    with ExitStack() as stack:
        for step in reversed(steps):
            stack.callback(step)
        yield


@contextmanager
def holding(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Gives a context variable another value for the length of the block."""
    before = variable.get()
    try:
        variable.set(value)
        yield
    finally:
        variable.set(before)


@contextmanager
def reading(name: str, kind: type[Exception], hint: str = "") -> Iterator[None]:
    """Raises an error of this kind, which names the file, for all that a damaged file makes the block raise.

    What the operating system refuses (too many open files, no permission) is no damage, and stays what it is.
    """
    try:
        yield
    except Exception as error:
        is_refused = isinstance(error, OSError) and error.errno not in (None, *_PARTS_MISSING)
        if is_refused or isinstance(error, _NOT_OF_FILES):
            raise
        raise kind(f"{name} is damaged, or does not fit: {error}{hint}") from error


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Gives a name to write to, and then replaces `file` atomically; its mode stays.

    Links stay, and lead to it. What was loaded from the old file, or reads it now, is not disturbed.

    Raises:
        OSError: It cannot be written; what was there stays. The error names `file`, and is of the class of its number
            (`PermissionError`, ...).
    """
    target = Path(os.path.realpath(file))
    written = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        written.touch()  # raises the usual errors where nothing can be written
        yield written
        with written.open("rb+") as stream:
            os.fsync(stream.fileno())
        if target.exists() and not target.is_file():
            shutil.copyfile(written, target)  # a device stays what it is, and a folder is an error
            return
        if target.exists():
            shutil.copymode(target, written)
        written.replace(target)
    except Exception as error:
        from safetensors import SafetensorError

        if not isinstance(error, (OSError, SafetensorError)):
            raise
        number = getattr(error, "errno", None)
        if number is None:
            raise OSError(f"{str(file)!r} cannot be written, perhaps for lack of space") from error
        raise OSError(number, os.strerror(number), str(file)) from error
    finally:
        written.unlink(missing_ok=True)
