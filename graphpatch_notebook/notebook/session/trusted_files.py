"""Which session files the user trusts: the digests of their texts, one a line, in a file in IPython's directory.

A file that changes has another digest, and is not trusted any more. Where the list cannot be read or written, nothing
is trusted beyond the session: the user is asked again.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from IPython.paths import get_ipython_dir


def holds(digest: str) -> bool:
    """Whether the user trusts the file of this digest."""
    try:
        return digest in _list().read_text(encoding="utf8").split()
    except (OSError, UnicodeDecodeError):
        return False


def add(digest: str) -> None:
    """Remembers that the user trusts the file of this digest."""
    if not holds(digest):
        with contextlib.suppress(OSError), _list().open("a", encoding="utf8", newline="\n") as file:
            file.write(f"{digest}\n")


def _list() -> Path:
    return Path(get_ipython_dir()) / "graphpatch_trusted_sessions"
