"""Files that are whole, or not there."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


def write_whole(file: Path, data: bytes) -> None:
    """Puts a file with these contents and the same mode in the place of `file`; links stay, and lead to it.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    target = Path(os.path.realpath(file))
    written = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        with written.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            shutil.copymode(target, written)
        written.replace(target)
    finally:
        written.unlink(missing_ok=True)
