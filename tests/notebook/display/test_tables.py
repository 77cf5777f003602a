"""Tables hold what comes from anywhere, and show it as text: in a pipe, a terminal of any width, and HTML."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from io import StringIO

import pytest
from IPython.lib.pretty import pretty

from graphpatch_notebook.notebook.display.tables import Column, Table, visible
from tests.notebook.browser.test_static_tree import read
from tests.notebook.hostile import KEYS

pytestmark = pytest.mark.hosts

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def table(cells: list[list[str]], **options: object) -> Table[list[str]]:
    columns = [Column("first"), Column("second", "tensor"), Column("third", "note", is_cut=True)]
    return Table(columns, cells, lambda row: row, **options)  # type: ignore[arg-type]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    return monkeypatch


def shown_at(stdout: StringIO, value: object) -> str:
    """What IPython writes of a value where its output goes to `stdout`."""
    with contextlib.redirect_stdout(stdout):
        return pretty(value)


def test_plain_text_is_aligned_whole_and_without_colors() -> None:
    shown = repr(table([["a", "名前", "c" * 200], ["abcdef", "x", ""]], title="Title", notes=["note"]))
    title, head, first, second, note = shown.split("\n")
    assert (title, note) == ("Title", "note")
    assert head == "first   second  third"
    assert first == "a       名前    " + "c" * 200  # these two letters are two columns wide each
    assert second == "abcdef  x"
    assert str(table([["a", "b", "c"]])) == repr(table([["a", "b", "c"]]))


def test_a_table_without_rows_says_so() -> None:
    empty = table([], title="Title", empty="no patches chosen")
    assert repr(empty) == "Title\nno patches chosen"
    assert "no patches chosen" in empty._repr_html_()
    assert "<table" not in empty._repr_html_()


def test_it_is_the_sequence_of_all_its_rows() -> None:
    rows = [[str(number), "", ""] for number in range(60)]
    long = table(rows, how_to_narrow="look elsewhere")
    assert list(long) == rows
    assert len(long) == 60
    assert long[-1] == rows[-1]
    assert long[2:4] == rows[2:4]
    assert repr(long).endswith("\n… 10 more: look elsewhere")
    assert repr(long).count("\n") == 51
    assert "49" in read(long._repr_html_()).texts


# --------------------------------------------------------------------------------------------------------------------
# Colors


# What JupyterLab has: its text is not wholly black on white (.87), and wholly white on #111.


@pytest.mark.parametrize("width", [20, 80, 200])
def test_in_a_terminal_long_columns_are_cut_and_paths_stay_whole(terminal: pytest.MonkeyPatch, width: int) -> None:
    terminal.setenv("COLUMNS", str(width))
    path = "model.layers_17.self_attn.q_proj.linear"
    shown = shown_at(Terminal(), table([[path, "[1, 2] f32", "x = " + "f(" * 60]]))
    assert "\x1b[32m" in shown
    line = ANSI.sub("", shown).split("\n")[1]
    assert line.startswith(f"{path}  [1, 2] f32  x = ")
    assert line.endswith("…") == (width < 200)
    assert len(line) == {20: len(path) + 26, 80: 80, 200: len(path) + 138}[width]


@pytest.mark.parametrize("text", [*KEYS, "\u202eright to left", "\x9b31m", "\ud800", "\r", "tab\t", "\u2028"])
def test_hostile_text_is_shown_as_text(terminal: pytest.MonkeyPatch, text: str) -> None:
    hostile = table([[text] * 3], title=text, notes=[text])
    terminal.setenv("COLUMNS", "200")
    for shown in (repr(hostile), ANSI.sub("", shown_at(Terminal(), hostile))):
        assert shown.replace("\n", "").isprintable()
        assert shown.count("\n") == 3
        assert shown.count(visible(text)) == 5
    html = read(hostile._repr_html_())
    assert html.tags <= {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert {name for name, _ in html.attributes} == {"style"}
    assert html.texts.count(visible(text)) == 5
