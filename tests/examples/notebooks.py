"""Runs the example notebooks. As a script (`hatch run notebooks`) it runs them and saves them with their outputs."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))

# What stands before a file's name in source locations is this machine's own.
_MACHINE_FOLDERS = re.compile(rf"""{re.escape(str(EXAMPLES.parent))}/|(?<=["' ])/[^"'\n]*/site-packages/""")

_REPORT = """
import json

def _plain(value):
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value.to_dict() if hasattr(value, "to_dict") else value

print(json.dumps({name: _plain(globals()[name]) for name in NAMES}))
"""


def read(file: Path) -> NotebookNode:
    return nbformat.read(file, as_version=4)


def execute(notebook: NotebookNode, names: tuple[str, ...] = ()) -> tuple[NotebookNode, dict[str, Any]]:
    """Returns the notebook as a real kernel ran it, and the values that the variables `names` have at its end.

    The outputs are free of this machine's folders. The keys of dictionaries come back as strings, and results of
    experiments as dictionaries.
    """
    running = copy.deepcopy(notebook)
    running.cells.append(nbformat.v4.new_code_cell(_REPORT.replace("NAMES", repr(names))))
    client = NotebookClient(
        running,
        timeout=600,
        startup_timeout=600,  # the first kernel imports torch, which a cold disk may take minutes for
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(EXAMPLES)}},
    )
    # Threads of several kernels would wait for each other: most notebooks are many small steps.
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})
    report = running.cells.pop()
    for output in outputs(running):
        _remove_machine_folders(output)
    return running, json.loads(report.outputs[0].text)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def text(cell: NotebookNode) -> str:
    """Returns what a code cell shows, as plain text."""
    shown = (output["text"] if "text" in output else output["data"].get("text/plain", "") for output in cell.outputs)
    return "".join(shown)


def _remove_machine_folders(output: NotebookNode) -> None:
    if "text" in output:
        output["text"] = _MACHINE_FOLDERS.sub("", output["text"])
    for kind, value in output.get("data", {}).items():
        if isinstance(value, str):
            output["data"][kind] = _MACHINE_FOLDERS.sub("", value)


def main() -> None:
    for file in NOTEBOOKS:
        notebook, _ = execute(read(file))
        nbformat.write(notebook, file)
        print(f"ran {file.name}")


if __name__ == "__main__":
    main()
