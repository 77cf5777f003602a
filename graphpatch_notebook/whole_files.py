"""Writes files atomically: a file is complete, or does not exist."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Gives a name to write to; what is there afterwards takes the place, and the mode, of `file`.

    Links stay, and lead to it. What was loaded from the old file, or reads it now, is not disturbed.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    target = Path(os.path.realpath(file))
    written = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        yield written
        with written.open("rb+") as stream:
            os.fsync(stream.fileno())
        if target.exists():
            shutil.copymode(target, written)
        written.replace(target)
    finally:
        written.unlink(missing_ok=True)
