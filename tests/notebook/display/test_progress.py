"""Progress in real terminals, kernels and pipes: shown while something takes long, where it belongs, and gone after."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import nbformat
import pexpect
import pytest
from nbclient import NotebookClient

from tests.notebook.hosts import environment

SLOW_MODEL = """
import contextlib, sys, time
import torch
from torch import nn
from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.notebook.display.progress import capture_progress

class Step(nn.Module):
    def forward(self, x):
        time.sleep(0.05)
        return x + 1

class Slow(nn.Module):
    def __init__(self, steps=12, repeats=1, fails=False):
        super().__init__()
        self.steps = nn.ModuleList(Step() for _ in range(steps))
        self.repeats, self.fails = repeats, fails

    def forward(self, x):
        for step in [*self.steps] * self.repeats:
            x = step(x)
        return x / 0 if not self.fails else x.no_such_method()

def captured(delay=0.2, **settings):
    model = Slow(**settings)
    with capture_progress(model, delay):
        return PatchableGraph(model, torch.ones(2))
"""


def python_file(folder: Path, source: str) -> str:
    file = folder / "script.py"
    file.write_text(SLOW_MODEL + textwrap.dedent(source), encoding="utf8")
    return str(file)


# -- terminals ---------------------------------------------------------------------------------------------------------

STORY = """

def say(text):
    print(f"<{text}>", flush=True)

say("short")
captured(delay=1.0, steps=2)
say("capture")
captured(steps=20)
say("many calls")
captured(steps=4, repeats=5)
say("error")
with contextlib.suppress(AttributeError):
    captured(steps=20, fails=True)
say("interrupt")
try:
    captured(steps=400)
except KeyboardInterrupt:
    say("interrupted")
"""


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a terminal of 100 columns is sent in each part of the story."""
    folder = tmp_path_factory.mktemp("terminal")
    settings = {"env": environment(folder), "dimensions": (24, 100), "encoding": "utf8", "timeout": 60}
    terminal = pexpect.spawn(sys.executable, [python_file(folder, STORY)], **settings)
    terminal.logfile_read = sent = io.StringIO()
    terminal.expect("<interrupt>")
    terminal.expect("Capturing Slow")
    time.sleep(0.3)
    terminal.sendintr()
    terminal.expect(pexpect.EOF)
    parts = re.split(r"<([\w ]+)>", sent.getvalue())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_nothing_below_the_delay(screens: dict[str, str]) -> None:
    assert screens["short"].strip() == ""


def test_a_line_that_counts_calls(screens: dict[str, str]) -> None:
    done = [int(n) for n in re.findall(r"Capturing Slow: running, (\d+) of about 21 module calls", screens["capture"])]
    assert len(set(done)) > 2
    assert done == sorted(done)
    assert re.search(r"running, \d+ module calls", screens["many calls"])  # more than expected


@pytest.mark.parametrize("part", ["capture", "many calls", "error", "interrupt"])
def test_the_terminal_is_left_clean(screens: dict[str, str], part: str) -> None:
    last = screens[part].rpartition("\x1b[K")[2]
    assert last.strip() == ""


def test_an_interrupt_ends_the_capture(screens: dict[str, str]) -> None:
    assert "interrupted" in screens


# -- pipes -------------------------------------------------------------------------------------------------------------


def test_nothing_in_a_pipe_and_rich_is_not_imported_for_it(tmp_path: Path) -> None:
    source = """
    captured()
    print("rich" in sys.modules, "IPython" in sys.modules)
    """
    result = subprocess.run(
        [sys.executable, python_file(tmp_path, source)], capture_output=True, text=True, timeout=60, check=True
    )
    assert (result.stdout, result.stderr) == ("False False\n", "")


# -- kernels -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notebook() -> nbformat.NotebookNode:
    sources = [
        SLOW_MODEL,
        "print('before'); pg = captured(steps=20); print('after')",
        "captured(delay=1.0, steps=2); 'short'",
        "captured(steps=20, fails=True)",
        "pg.graph.x._shape",
    ]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=60, kernel_name="python3", allow_errors=True).execute()
    return notebook


def outputs(notebook: nbformat.NotebookNode, cell: int) -> list[tuple[str, str]]:
    return [
        (output.output_type, output.text if "text" in output else output.get("data", {}).get("text/plain", ""))
        for output in notebook.cells[cell].outputs
    ]


@pytest.mark.hosts
def test_one_line_is_left_in_the_cell_it_belongs_to(notebook: nbformat.NotebookNode) -> None:
    (_, before), (kind, line), (_, after) = outputs(notebook, 1)
    assert (before, kind, after) == ("before\n", "display_data", "after\n")
    assert re.fullmatch(r"Capturing Slow: 21 module calls, \d\.\d s", line)
    assert list(notebook.cells[1].outputs[1].data) == ["text/plain"]
    assert outputs(notebook, 2) == [("execute_result", "'short'")]
    assert not notebook.metadata.get("widgets")


@pytest.mark.hosts
def test_a_capture_that_fails_says_where_it_stopped(notebook: nbformat.NotebookNode) -> None:
    (_, line), (kind, _) = outputs(notebook, 3)
    assert re.fullmatch(r"Capturing Slow: stopped, 20 module calls, \d\.\d s", line)
    assert kind == "error"
    assert outputs(notebook, 4) == [("execute_result", "torch.Size([2])")]


# -- without a display -------------------------------------------------------------------------------------------------
