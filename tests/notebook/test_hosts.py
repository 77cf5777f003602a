"""The same story in each host, a process of its own: load, wrap, find, zero, run a cell, export, run the export."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.notebook.hosts import SETTING, Kernel, Terminal, environment

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures("kernels_are_warm")]

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

ANSI = re.compile(r"\x1b\[[0-9;]*m")
CHANGED = "bool((patched != model(x)).any())"
UNTOUCHED = (
    "torch.equal(pg(x), model(x)) and not any('forward' in vars(m) or m._forward_hooks for m in model.modules())"
)
CHOICE = ["%graphpatch wrap pg = model(x)", "%graphpatch zero sub_1.softmax[:, -1]"]


@contextmanager
def terminal(command: list[str], folder: Path) -> Iterator[Terminal]:
    host = Terminal(command, folder)
    try:
        host.start()
        yield host
    finally:
        host.close()


# -- terminals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [["-m", "IPython", "--no-banner"], ["-m", "jupyter_console", "--kernel", "python3"]],
    ids=["ipython", "jupyter-console"],
)
def test_a_session_in_a_terminal(command: list[str], tmp_path: Path) -> None:
    with terminal(command, tmp_path) as host:
        for cell in SETTING:
            host.run(cell)
        assert "pg: Sequential, 15 nodes" in host.run("%graphpatch wrap pg = model(x)")
        found = host.run("%graphpatch find op:softmax")
        assert "sub_1.softmax" in found
        assert "[3, 4] f32" in found
        # A kernel cannot know whether its text is for a terminal or for a file.
        assert bool(host.colors("sub_1.softmax")) == ("IPython" in command)
        host.type("%graphpatch zero sub_1.\t")
        host.wait(r"zero sub_1\.\n +output\n +input\n +softmax$")
        host.type("soft\t")
        host.wait(r"%graphpatch zero sub_1\.softmax$")
        assert "#1 zero sub_1.softmax[:, -1] -> (3,)" in host.run("[:, -1]")
        assert "Out[7]: True" in host.run(f"%%graphpatch\npatched = pg(x)\n{CHANGED}")
        assert "Out[8]: True" in host.run(UNTOUCHED)
        assert re.search(r"\n1  zero +sub_1\.softmax\[:, -1\] +\(3,\)$", host.run("%graphpatch list"))
        code = host.run("%graphpatch export")
        assert 'with pg.patch({"sub_1.softmax": ZeroPatch(slice=(slice(None), -1))}):' in code
        assert "\x1b" not in code
        host.run("code = %graphpatch export")
        assert "Out[12]: True" in host.run("exec(str(code)); torch.equal(output, patched)")
        assert "UsageError: no node 'softmx' in sub_1; nearest: 'sub_1.softmax'" in host.run(
            "%graphpatch add sub_1.softmx 1"
        )
        host.enter("%%graphpatch\nprint('run' + 'ning', flush=True)\nwhile True: pg(x)")
        host.wait(r"\nrunning$")
        host.interrupt()
        assert "KeyboardInterrupt" in host.result(14)
        assert "Out[15]: True" in host.run(UNTOUCHED)


# -- notebooks ---------------------------------------------------------------------------------------------------------


def test_a_notebook_is_run_like_any_other(tmp_path: Path) -> None:
    sources = [
        *SETTING,
        *CHOICE,
        "%graphpatch list",
        "%%graphpatch\nimport asyncio\nawait asyncio.sleep(0)\npatched = pg(x)\nprint('in between')\npatched.shape",
        "%%graphpatch\npg(x);",
        CHANGED,
        "display(*(pg.browse() for _ in range(3)))",
        f"%%graphpatch\npatched = pg(x)\nwidth = patched.shape[1] - 2\npatched / (1 // width)\n{UNTOUCHED}",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = NotebookClient(
        notebook,
        timeout=600,
        startup_timeout=600,
        kernel_name="python3",
        store_widget_state=True,
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute(env=environment(tmp_path))
    shown = [cell.outputs for cell in notebook.cells]
    assert shown[5][0].data["text/plain"].endswith("1  zero  sub_1.softmax[:, -1]         (3,)")
    assert "<table" in shown[5][0].data["text/html"] or "<pre" in shown[5][0].data["text/html"]
    assert shown[6][0].text == "in between\n"
    assert shown[6][1].data == {"text/plain": "torch.Size([3, 2])"}
    assert shown[7] == []
    assert shown[8][0].data == {"text/plain": "True"}
    # The front end is in the notebook once, and views are small.
    models = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    views = [output["data"][WIDGET_VIEW]["model_id"] for output in shown[9][::2]]
    for number, static in zip(views, shown[9][1::2], strict=True):
        assert f"gp-static-{number}" in static["data"]["text/html"]
    (front_end,) = {models[number]["state"]["front_end"] for number in views}
    assert len(json.dumps(models.pop(front_end.removeprefix("IPY_MODEL_")))) < 100_000 * 4 / 3  # in base64
    assert len(json.dumps(models)) < 3 * 13_000
    (error,) = shown[10]
    traceback = ANSI.sub("", "\n".join(error.traceback))
    assert error.ename == "ZeroDivisionError"
    assert "----> 4 patched / (1 // width)" in traceback
    assert "graphpatch_notebook" not in traceback


# -- kernels -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernel")


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Iterator[Kernel]:
    host = Kernel(folder)
    try:
        for cell in [*SETTING, *CHOICE]:
            host.ok(cell)
        yield host
    finally:
        host.close()


@pytest.mark.parametrize("cell", ["pg.browse()", "display(pg.browse())", "%%graphpatch\npg(x)\npg.browse()"])
def test_a_cell_shows_the_widget_and_a_tree_without_it(kernel: Kernel, cell: str) -> None:
    messages = kernel.ok(cell).messages
    live, static = (message["content"]["data"] for message in messages if message["msg_type"] == "display_data")
    assert live.keys() == {WIDGET_VIEW}
    assert static["text/plain"].startswith("<root>: Sequential")
    assert f'class="gp-static gp-static-{live[WIDGET_VIEW]["model_id"]}"' in static["text/html"]
    assert "zero sub_1.softmax[:, -1]" in static["text/html"]


def test_a_kernel_through_a_whole_session(kernel: Kernel, folder: Path) -> None:
    # An interrupt in the middle of a call.
    ran = kernel.interrupted("%%graphpatch\nprint('running', flush=True)\nwhile True: pg(x)", "running")
    assert (ran.reply["status"], ran.reply["ename"]) == ("error", "KeyboardInterrupt")
    assert kernel.value(UNTOUCHED) == "True"
    assert "1 patch chosen" in kernel.value("%graphpatch list")
    # Cells that await, and what they leave behind.
    awaiting = "%%graphpatch\nimport asyncio\nawait asyncio.sleep(0.01)\npatched = pg(x)\n"
    later = "async def later():\n    await asyncio.sleep(0.05)\n    return pg(x)\ntask = asyncio.create_task(later())\n"
    assert kernel.value(awaiting + later + CHANGED) == "True"
    assert kernel.value("torch.equal(await task, model(x))") == "True"
    # Probes land in their variables, as the cell runs.
    kernel.ok("%graphpatch probe sub_1.output kept")
    assert kernel.value("%%graphpatch\n_ = pg(x)\nkept[:, -1].abs().sum().item()") == "0.0"
    assert kernel.value("kept.shape") == "torch.Size([3, 4])"
    # A script that needs nothing of this session.
    kernel.ok("%graphpatch export -o patches.py")
    kernel.ok("torch.save(model, 'model.pt'); torch.save((x, patched), 'values.pt')")
    script = (
        "import torch; model = torch.load('model.pt', weights_only=False); x, patched = torch.load('values.pt')\n"
        "exec(open('patches.py').read())\nprint(torch.equal(output, patched))"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    assert result.stdout == "True\n"
    # Unloading leaves a kernel that does not know the magic.
    kernel.ok("%unload_ext graphpatch")
    assert kernel.run("%%graphpatch\npg(x)").reply["ename"] == "UsageError"
    assert kernel.value(UNTOUCHED) == "True"


@pytest.mark.parametrize(
    ("cell", "status"),
    [
        ("%%graphpatch\nassert bool((pg(x) != model(x)).any())", 0),
        ("%%graphpatch\npg(x[:, 1:])", 1),
        ("%graphpatch zero no.such.path", 1),
    ],
    ids=["passes", "raises under the patches", "raises in a command"],
)
def test_ipython_c_has_the_exit_status_of_its_code(cell: str, status: int, tmp_path: Path) -> None:
    code = "\n".join([*SETTING, *CHOICE, f"get_ipython().run_cell({cell!r}).raise_error()"])
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout
