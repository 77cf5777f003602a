"""How exported code shows itself: in a terminal, in a notebook, in a pipe."""

from __future__ import annotations

import html
import re

import pytest

from graphpatch_notebook.notebook.export import SourceCode

pytestmark = pytest.mark.hosts

TEXT = 'from graphpatch import ZeroPatch\n\n# <script>alert("&")</script>\nx = {"a": 1.5}\nif x:\n    print(f\'{x}\')\n'
CODE = SourceCode(TEXT)


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
