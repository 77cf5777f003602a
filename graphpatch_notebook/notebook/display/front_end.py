"""The bundled front end of the tree browser, as it goes to the page.

static/widget.js, widget.css  -> deflated, in a trait  (a third of the size, in messages and in saved notebooks)
static/loader.js              -> `_esm`: unpacks them

With ANYWIDGET_HMR=1 anywidget gets the files themselves, and watches them.
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from pathlib import Path

from graphpatch_notebook.errors import GraphError

_STATIC = Path(__file__).parents[2] / "static"


def for_anywidget() -> tuple[Path | str, Path | str]:
    """Returns script and style as anywidget loads them.

    Raises:
        GraphError: The front end is not built.
    """
    if _is_watched():
        # anywidget keeps every widget alive that has a file.
        return _file("widget.js"), _file("widget.css")
    return _file("loader.js").read_text("utf8"), ""


@functools.cache
def packed() -> bytes:
    """Returns what the loader unpacks: deflated JSON of `css` and `js`; nothing where anywidget has the files.

    Raises:
        GraphError: The front end is not built.
    """
    if _is_watched():
        return b""
    parts = {"css": _file("widget.css").read_text("utf8"), "js": _file("widget.js").read_text("utf8")}
    return zlib.compress(json.dumps(parts, ensure_ascii=False).encode(), 9)


def _is_watched() -> bool:
    return os.environ.get("ANYWIDGET_HMR") == "1"


def _file(name: str) -> Path:
    file = _STATIC / name
    if not file.is_file():
        raise GraphError(
            f"the front end of the tree browser is not built: {file} is missing. In a checkout, run "
            "`npm ci --ignore-scripts && npm run build` (node >= 20); else install graphpatch-notebook again"
        )
    return file
