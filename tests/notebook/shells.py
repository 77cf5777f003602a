"""Real IPython shells, in this process, and a model to work on in them."""

from __future__ import annotations

import atexit
import contextlib
import io
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import IPython
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from torch import Tensor
from traitlets.config import Config

from tests.zoo.submodules import Submodules


class Mlp(Submodules, seed=0, up=(4, 8), down=(8, 2)):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        return self.down(hidden * 2)


@dataclass
class Ran:
    """What came of a cell."""

    value: Any
    out: str
    err: str
    error: BaseException | None


class Shell:
    """An IPython shell that is spoken to in cells."""

    def __init__(self, ip: InteractiveShell) -> None:
        self.ip = ip

    @property
    def namespace(self) -> dict[str, Any]:
        return self.ip.user_ns

    def run(self, cell: str, **options: Any) -> Ran:
        """Runs a cell as a user does."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            result = self.ip.run_cell(cell, **{"store_history": True, **options})
        return Ran(result.result, out.getvalue(), err.getvalue(), result.error_before_exec or result.error_in_exec)

    def ok(self, cell: str, **options: Any) -> Ran:
        """Runs a cell that must not fail."""
        ran = self.run(cell, **options)
        assert ran.error is None, ran.out + ran.err
        return ran

    def refused(self, cell: str) -> str:
        """Runs a cell that must be refused by one line without a traceback; returns the line."""
        ran = self.run(cell)
        assert type(ran.error) is UsageError, ran.out
        message = str(ran.error)
        assert "\n" not in message
        assert ran.err == f"UsageError: {message}\n"
        assert "Traceback" not in ran.out
        return message


@contextlib.contextmanager
def opened() -> Iterator[Shell]:
    """Gives a shell, and leaves the process as it was."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor" if IPython.version_info >= (9,) else "NoColor"
    main, hook, paths = sys.modules["__main__"], sys.excepthook, list(sys.path)
    ip = InteractiveShell(config=config, user_module=types.ModuleType("__main__"))
    try:
        yield Shell(ip)
    finally:
        # It would be kept to the end of the process, which then collects garbage once for each shell there was.
        atexit.unregister(ip.atexit_operations)
        ip.restore_sys_module_state()
        sys.modules["__main__"], sys.excepthook, sys.path[:] = main, hook, paths
