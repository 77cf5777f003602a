"""How exported code shows itself: in a terminal, in a notebook, in a pipe."""

from __future__ import annotations

import html
import os
import pty
import re
import subprocess
import sys

import pytest

from graphpatch_notebook.notebook.export import SourceCode
from tests.notebook.shells import Shell

pytestmark = pytest.mark.hosts

TEXT = 'from graphpatch import ZeroPatch\n\n# <script>alert("&")</script>\nx = {"a": 1.5}\nif x:\n    print(f\'{x}\')\n'
CODE = SourceCode(TEXT)
SHOW = f"from graphpatch_notebook.notebook.export import SourceCode as S; display(S({TEXT!r}))"


def test_it_is_a_text() -> None:
    assert CODE == TEXT
    assert repr(CODE) == TEXT.rstrip("\n")
    assert isinstance(CODE + "", str)
    compile(CODE, "<exported>", "exec")


def test_html_shows_the_code_and_nothing_else() -> None:
    shown = CODE._repr_html_()

    assert html.unescape(re.sub(r"<[^>]*>", "", shown)) == TEXT.rstrip("\n")
    assert "<script" not in shown
    assert re.search(r'<span style="color:#2c7fb8;[^"]*">from</span>', shown)


def test_ipython_formats(plain_shell: Shell) -> None:
    data, _ = plain_shell.ip.display_formatter.format(CODE)
    assert set(data) == {"text/plain", "text/html"}
    assert data["text/plain"] == TEXT.rstrip("\n")


def ipython(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", command],
        capture_output=True, text=True, check=True, env={**os.environ, **environment},
    )  # fmt: skip


def test_it_is_plain_in_a_pipe() -> None:
    assert ipython(SHOW).stdout == TEXT


def test_it_is_colored_in_a_terminal() -> None:
    """And no longer, once NO_COLOR is set."""
    master, slave = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color"}
    twice = f"import os; {SHOW}; print('---'); os.environ['NO_COLOR'] = '1'; display(S({TEXT!r}))"
    command = [sys.executable, "-m", "IPython", "--no-banner", "-c", twice]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        try:
            while chunk := os.read(master, 4096):
                shown += chunk
        except OSError:  # the other end is closed
            pass
        process.wait(30)
    os.close(master)
    escapes = r"\x1b(\][^\x07]*\x07|\[[?0-9;]*[a-zA-Z])"
    colored, plain = shown.decode().split("---\r\n")
    for text, has_colors in ((colored, True), (plain, False)):
        assert bool(re.search(r"\x1b\[[0-9;]+m", text)) == has_colors
        assert re.sub(escapes, "", text).replace("\r\n", "\n").rstrip("\n") == TEXT.rstrip("\n")
