"""Python kernels that begin with torch and transformers imported, which takes seconds: forks of one process.

Each is a kernel of its own, as `ipykernel` starts it. Jupyter starts this file as the kernel's process; it asks the
process that forks for a kernel, sends signals on to it, and ends with it, as the kernel ends with this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

_LENGTH = 8


@contextlib.contextmanager
def warm_kernels(folder: Path) -> Iterator[dict[str, str]]:
    """Starts the process that forks. Gives the variables with which Jupyter takes its kernels for those of Python."""
    # The folder of an address of its own, since addresses have at most about 100 characters.
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as listening:
        address = str(Path(short) / "address")
        specification = {
            "argv": [sys.executable, "-S", "-E", __file__, address, "-f", "{connection_file}"],
            "display_name": "Python 3",
            "language": "python",
        }
        file = folder / "kernels" / "python3" / "kernel.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(specification), "utf8")
        listening.bind(address)
        listening.listen(64)
        process = subprocess.Popen([sys.executable, __file__], stdin=listening.fileno())
        listening.close()
        try:
            yield {"JUPYTER_PATH": str(folder)}
        finally:
            process.terminate()
            process.wait()


def _fork_kernels(listening: socket.socket) -> None:
    import ipykernel.kernelapp  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        asking, _ = listening.accept()
        _, streams, _, _ = socket.recv_fds(asking, 1, 3)
        size = int.from_bytes(_received(asking, _LENGTH), "big")
        arguments, folder, variables = json.loads(_received(asking, size))
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            _become_kernel(asking, arguments, folder, variables)
        asking.close()
        for stream in streams:
            os.close(stream)


def _become_kernel(asking: socket.socket, arguments: list[str], folder: str, variables: dict[str, str]) -> None:
    from ipykernel.kernelapp import launch_new_instance

    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    os.environ.pop("JPY_PARENT_PID", None)  # a kernel whose parent is another process ends at once
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [path for path in paths if path and path not in sys.path]  # in place of the folder of this file
    sys.argv = ["ipykernel_launcher", *arguments]
    del sys.modules["__main__"].__dict__["__file__"]
    asking.sendall(os.getpid().to_bytes(_LENGTH, "big"))
    threading.Thread(target=_end_with, args=(asking,), daemon=True).start()
    launch_new_instance()
    os._exit(0)


def _end_with(asking: socket.socket) -> None:
    with contextlib.suppress(OSError):
        asking.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _be_kernel(address: str, arguments: list[str]) -> None:
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = json.dumps([arguments, str(Path.cwd()), dict(os.environ)]).encode()
        socket.send_fds(server, [b"\0"], [0, 1, 2])
        server.sendall(len(request).to_bytes(_LENGTH, "big") + request)
        kernel = int.from_bytes(_received(server, _LENGTH), "big")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(kernel, number))
        server.settimeout(1)
        while os.getppid() == parent:  # Jupyter may be killed, and cannot end its kernels then
            with contextlib.suppress(TimeoutError):
                server.recv(1)
                return


def _received(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += source.recv(size - len(data)) or sys.exit("the other process is gone")
    return data


if __name__ == "__main__":
    if len(sys.argv) == 1:
        _fork_kernels(socket.socket(fileno=0))
    else:
        _be_kernel(sys.argv[1], sys.argv[2:])
