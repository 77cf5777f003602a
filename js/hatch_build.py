"""Hatch's build hook: bundles js/ into graphpatch_notebook/static/ when, and only when, the bundle is out of date."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("js", "package.json", "package-lock.json")
BUNDLE = ("widget.js", "widget.css")


def digest(root: Path) -> str:
    """Returns the hash of everything that the bundle may depend on; js/build.mjs computes the same."""
    paths = [path for source in SOURCES for path in ((root / source).rglob("*"), [root / source])[(root / source).is_file()]]
    named = sorted((p.relative_to(root).as_posix(), p) for p in paths if p.is_file() and "__pycache__" not in p.parts)
    result = hashlib.sha256()
    for name, path in named:
        result.update(name.encode() + path.read_bytes().replace(b"\r\n", b"\n"))
    return result.hexdigest()


class CustomHook(BuildHookInterface[Any]):
    """Runs npm where the bundle is not that of the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before each build."""
        root = Path(self.root)
        static = root / "graphpatch_notebook" / "static"
        is_there = all((static / name).exists() for name in BUNDLE)
        stamp = static / "source.sha256"
        is_current = is_there and stamp.exists() and stamp.read_text().strip() == digest(root)
        if is_current or (is_there and os.environ.get("GRAPHPATCH_SKIP_JS")):
            return
        npm = shutil.which("npm")
        if npm is None and is_there:
            self.app.display_warning("graphpatch-notebook: npm was not found, so the bundle is older than js/")
            return
        if npm is None:
            raise RuntimeError("graphpatch-notebook: a build without its bundle needs node >= 20 and npm")
        subprocess.run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=root, check=True)
        subprocess.run([npm, "run", "build"], cwd=root, check=True)
