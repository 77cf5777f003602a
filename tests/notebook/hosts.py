"""The hosts of the magics, as a user sits before them: programs in a terminal with their screen, and kernels."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pexpect
import pyte
from jupyter_client import KernelManager

# What the tests of all hosts begin with.
SETTING = [
    "import torch; _ = torch.manual_seed(0); x = torch.rand(3, 4)",
    "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(dim=-1), torch.nn.Linear(4, 2))",
    "%load_ext graphpatch",
]
ROWS, COLUMNS = 300, 110
WAIT = 300.0
OF_TERMINALS = set("CLICOLOR COLORTERM COLUMNS FORCE_COLOR LINES NO_COLOR TTY_COMPATIBLE TTY_INTERACTIVE".split())
SHOWN = "execute_result"


def environment(folder: Path) -> dict[str, str]:
    """Returns variables for a process without the settings and the history of whoever runs the tests."""
    own = {
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "TERM": "xterm-256color",
        # Debuggers warn of frozen modules, on the screen.
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    return {name: value for name, value in os.environ.items() if name not in OF_TERMINALS} | own


class _Screen(pyte.Screen):
    """A screen that answers when it is asked where the cursor is."""

    def __init__(self, answer: Any) -> None:
        super().__init__(COLUMNS, ROWS)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        self._answer(data)


class Terminal:
    """A program in a terminal so high that nothing ever leaves it.

    Args:
        command: The program and its arguments; it is run by this Python.
        folder: Where it runs and keeps its files.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        self._process = pexpect.spawn(
            sys.executable,
            command,
            cwd=str(folder),
            env=environment(folder),
            dimensions=(ROWS, COLUMNS),
            encoding="utf8",
            timeout=WAIT,
        )
        self._screen = _Screen(self._process.send)
        self._stream = pyte.Stream(self._screen)
        self._prompt = 1

    @property
    def text(self) -> str:
        """What the screen shows, without the empty lines at its end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def colors(self, line: str) -> set[str]:
        """Returns the colors in the last line of the screen that contains `line`."""
        row = max(row for row, shown in enumerate(self._screen.display) if line in shown)
        return {cell.fg for cell in self._screen.buffer[row].values()} - {"default"}

    def type(self, keys: str) -> None:
        self._process.send(keys)

    def interrupt(self) -> None:
        self._process.sendintr()

    def wait(self, pattern: str, seconds: float = WAIT) -> str:
        """Waits until the screen shows a pattern; returns all that it shows then."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            left = end - time.monotonic()
            assert left > 0, f"{pattern!r} never came up:\n{self.text}"
            try:
                self._stream.feed(self._process.read_nonblocking(65536, min(left, 0.2)))
            except pexpect.TIMEOUT:
                continue
        return self.text

    def start(self) -> None:
        """Waits for the first prompt."""
        self.wait(r"In \[1\]:$")

    def enter(self, cell: str) -> None:
        """Types a cell and has it run."""
        self.type(cell.replace("\n", "\r") + ("\r\r\r" if cell.startswith("%%") else "\r"))

    def run(self, cell: str) -> str:
        """Runs a cell; returns what the screen shows from its first line on, to the next prompt."""
        number = self._prompt
        self.enter(cell)
        return self.result(number)

    def result(self, number: int) -> str:
        """Waits for the prompt after cell `number`; returns what stands before it, from the cell on."""
        self._prompt = number + 1
        shown = self.wait(rf"In \[{self._prompt}\]:$")
        return shown[shown.rindex(f"In [{number}]: ") : shown.rindex(f"In [{self._prompt}]:")].rstrip()

    def close(self) -> None:
        self._process.close(force=True)


@dataclass
class Ran:
    """What came of a cell: the reply, and the messages before it."""

    reply: dict[str, Any]
    messages: list[dict[str, Any]]


class Kernel:
    """A kernel, as front ends speak to it."""

    def __init__(self, folder: Path) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(folder), env=environment(folder))
        self.client = self._manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WAIT)

    def run(self, cell: str) -> Ran:
        """Runs a cell, whatever comes of it."""
        messages: list[dict[str, Any]] = []
        reply = self.client.execute_interactive(
            cell, store_history=True, allow_stdin=False, timeout=WAIT, output_hook=messages.append
        )
        return Ran(reply["content"], messages)

    def ok(self, cell: str) -> Ran:
        """Runs a cell that must not fail."""
        ran = self.run(cell)
        assert ran.reply["status"] == "ok", ran.reply
        return ran

    def value(self, cell: str) -> str:
        """Runs a cell; returns what its last expression shows, as text."""
        (shown,) = (m["content"]["data"]["text/plain"] for m in self.ok(cell).messages if m["msg_type"] == SHOWN)
        return str(shown)

    def interrupted(self, cell: str, after: str) -> Ran:
        """Runs a cell and interrupts it, once it has printed `after`."""
        is_done = False

        def on_output(message: dict[str, Any]) -> None:
            nonlocal is_done
            if not is_done and after in message["content"].get("text", ""):
                is_done = True
                self._manager.interrupt_kernel()

        reply = self.client.execute_interactive(cell, allow_stdin=False, timeout=WAIT, output_hook=on_output)
        return Ran(reply["content"], [])

    def close(self) -> None:
        self.client.stop_channels()
        self._manager.shutdown_kernel(now=True)
