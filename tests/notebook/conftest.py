"""What tests of the magics share: a real IPython shell, in this process."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphpatch_notebook
from tests.notebook.shells import Shell, opened


@pytest.fixture(autouse=True, scope="session")
def bundle() -> None:
    """A checkout without the bundle of the front end gets it: nothing else here depends on what is in it."""
    package = Path(graphpatch_notebook.__file__).parent
    with (package.parent / "package.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (package / "static" / "widget.js").is_file():
            for command in ("npm ci --ignore-scripts --no-audit --no-fund", "npm run build"):
                subprocess.run(command.split(), cwd=package.parent, check=True, capture_output=True)


@pytest.fixture
def plain_shell() -> Iterator[Shell]:
    """A shell without the extension."""
    with opened() as shell:
        yield shell


@pytest.fixture
def shell(plain_shell: Shell) -> Shell:
    """A shell with the extension, a small model and an input."""
    plain_shell.ok("%load_ext graphpatch_notebook")
    plain_shell.ok("from tests.notebook.shells import Mlp\nimport torch\nmodel, x = Mlp(), torch.ones(3, 4)")
    return plain_shell


@pytest.fixture
def pg(shell: Shell) -> Shell:
    """The same, with a graph in the variable `pg`."""
    shell.ok("%graphpatch wrap pg = model(x)")
    return shell
