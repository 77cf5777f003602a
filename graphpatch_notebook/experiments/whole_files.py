"""Files that are whole, or not there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(file: Path, data: bytes) -> None:
    """Puts a file with these contents in the place of `file`; a link stays, and what it leads to is replaced.

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
        written.replace(target)
    finally:
        written.unlink(missing_ok=True)
