"""An environment for each tool, made by `venv` and pip from PyPI: none of them is a dependency of this package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"  # the torch of all of them
FOLDER = ROOT / "build" / "peers"


class InstallationError(Exception):
    """pip could not make an environment; the text is the end of what it said."""


def environment(name: str, requirements: Sequence[str], folder: Path = FOLDER) -> Path:
    """The interpreter of an environment that has the requirements, made where it is not there yet.

    Args:
        name: Of its folder.
        requirements: What pip installs; none: the environment that this runs in.
        folder: Where environments lie; each takes 1 to 2 GB.

    Raises:
        InstallationError: pip failed.
    """
    if not requirements:
        return Path(sys.executable)
    place = folder / name
    interpreter, finished = place / "bin" / "python", place / "requirements.txt"
    wanted = "\n".join([*requirements, CONSTRAINTS.read_text()])
    if finished.exists() and finished.read_text() == wanted:
        return interpreter
    run(sys.executable, "-m", "venv", "--clear", str(place))
    run(str(interpreter), "-m", "pip", "install", "--quiet", *requirements)
    finished.write_text(wanted)
    return interpreter


def run(*command: str) -> None:
    constraint = os.environ.get("PIP_CONSTRAINT", str(CONSTRAINTS))
    done = subprocess.run(
        command, env={**os.environ, "PIP_CONSTRAINT": constraint}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise InstallationError(done.stderr.strip()[-600:])
