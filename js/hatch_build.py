"""Hatch's build hook: bundles js/ into graphpatch_notebook/static/ when, and only when, the bundle is out of date."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("js/src", "js/build.mjs", "js/tsconfig.json", "package.json", "package-lock.json")
BUNDLE = ("widget.js", "widget.css", "loader.js", "saved_page.js")


def digest(root: Path) -> str:
    """Returns the hash of everything that the bundle may depend on; js/build.mjs computes the same."""
    named = [(file.relative_to(root).as_posix(), file) for source in SOURCES for file in _files(root / source)]
    result = hashlib.sha256()
    for name, file in sorted(named):
        result.update(name.encode() + file.read_bytes().replace(b"\r\n", b"\n"))
    return result.hexdigest()


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def is_current(root: Path) -> bool:
    """Whether the bundle is there, and was made of the sources as they are."""
    static = root / "graphpatch_notebook" / "static"
    stamp = static / "source.sha256"
    is_there = all((static / name).is_file() for name in (*BUNDLE, stamp.name))
    return is_there and stamp.read_text().strip() == digest(root)


class CustomHook(BuildHookInterface[Any]):
    """Runs npm where the bundle is not that of the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before each build."""
        root = Path(self.root)
        is_there = all((root / "graphpatch_notebook" / "static" / name).is_file() for name in BUNDLE)
        if is_current(root) or (is_there and os.environ.get("GRAPHPATCH_SKIP_JS")):
            return
        npm = shutil.which("npm")
        if npm is None and is_there:
            self.app.display_warning("graphpatch-notebook: npm was not found, so the bundle is not that of js/")
            return
        if npm is None:
            raise RuntimeError("graphpatch-notebook: a build without its bundle needs node >= 20 and npm")
        subprocess.run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=root, check=True)
        subprocess.run([npm, "run", "build"], cwd=root, check=True)
