"""A Jupyter server of our own, all of whose files lie in one folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CHECKOUT = Path(__file__).parents[2]
START_SECONDS = 600

# Nothing that JupyterLab would fetch, and no toast over the page that tells of news. Notebooks keep their widgets.
_SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": False,
    },
    "@jupyter-widgets/jupyterlab-manager/plugin": {"saveState": True},
}


@dataclass(frozen=True)
class Server:
    """A server that runs: where it is, and the folder whose notebooks it shows."""

    url: str
    folder: Path

    def address(self, file: str, host: Literal["doc/tree", "notebooks"] = "doc/tree") -> str:
        """Returns where a notebook of the folder is: in Notebook 7, or in JupyterLab's mode for one document."""
        return f"{self.url}/{host}/{file}"

    def end_kernels(self, file: str) -> None:
        """Ends the kernels of a notebook, which go on after its page is closed."""
        with urllib.request.urlopen(f"{self.url}/api/sessions", timeout=600) as answer:
            sessions = json.load(answer)
        for session in sessions:
            if session["path"] == file:
                request = urllib.request.Request(f"{self.url}/api/sessions/{session['id']}", method="DELETE")
                urllib.request.urlopen(request, timeout=600).close()


@contextmanager
def serving(folder: Path, python: str = sys.executable) -> Iterator[Server]:
    """Runs JupyterLab, Notebook 7 and Voila for the notebooks in `folder / "notebooks"`; their own files lie beside it.

    They serve `folder / "pages" / name` as `/static/name`.
    """
    notebooks = folder / "notebooks"
    notebooks.mkdir(exist_ok=True)
    (folder / "pages").mkdir()
    for name, values in _SETTINGS.items():
        settings = folder / "settings" / f"{name}.jupyterlab-settings"
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(json.dumps(values))
    log = folder / "server.log"
    port = free_port()
    with log.open("w") as written:
        process = subprocess.Popen(
            _command(python, folder, port), env=environment(folder), cwd=notebooks, stdout=written, stderr=written
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_started(process, f"{url}/api/status", log)
            yield Server(url, notebooks)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


def _command(python: str, folder: Path, port: int) -> list[str]:
    return [
        python,
        *("-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"),
        *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
        *("--IdentityProvider.token=", "--ServerApp.password=", "--ServerApp.disable_check_xsrf=True"),
        f"--ServerApp.root_dir={folder / 'notebooks'}",
        f"--ServerApp.extra_static_paths={folder / 'pages'}",
        "--JupyterNotebookApp.expose_app_in_browser=True",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
        f"--LabApp.workspaces_dir={folder / 'workspaces'}",
        f"--LabApp.user_settings_dir={folder / 'settings'}",
    ]


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "IPYTHONDIR": str(folder / "ipython"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH")))),
    }


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def wait_until_started(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Waits until a server answers.

    Raises:
        RuntimeError: It did not start; the message has the end of its log.
    """
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.1)  # there is nothing to wait on but the port
        else:
            return
    raise RuntimeError(f"the server did not start; its log ends with:\n{log.read_text()[-3000:]}")
