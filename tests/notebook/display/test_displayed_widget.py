"""What all widgets have: the page of one file."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from graphpatch_notebook.notebook.display.displayed_widget import DisplayedWidget
from tests.notebook.hostile import hostile_graph


class _Scripts(HTMLParser):
    """Collects the scripts of a page, by their types, and what the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: dict[str | None, str] = {}
        self.fetched: list[str | None] = []
        self._type: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.fetched += [named[name] for name in ("src", "href") if name in named]
        if tag == "script":
            assert named["type"] not in self.scripts
            self._type = named["type"]
            self.scripts[self._type] = ""

    def handle_data(self, data: str) -> None:
        if self._type is not None:
            self.scripts[self._type] += data

    def handle_endtag(self, tag: str) -> None:
        self._type = None


def test_a_saved_page_holds_the_widget_and_nothing_of_the_model_that_runs(tmp_path: Path) -> None:
    browser: DisplayedWidget = hostile_graph().browse()
    other: DisplayedWidget = hostile_graph().browse()
    browser.save_html(tmp_path / "a <page>.html")
    text = (tmp_path / "a <page>.html").read_text("utf8")
    assert len(text) < 200_000
    page = _Scripts()
    page.feed(text)
    assert page.fetched == []
    kind = "application/vnd.jupyter.widget-{}+json"
    assert page.scripts.keys() == {kind.format("state"), kind.format("view"), "module"}
    assert json.loads(page.scripts[kind.format("view")])["model_id"] == browser.model_id
    states = json.loads(page.scripts[kind.format("state")])["state"]
    assert states.keys() == {widget.model_id for one in (browser, browser.front_end) for widget in (one, one.layout)}
    saved = states[browser.model_id]
    sent = browser.get_state()
    kept = {*saved["state"], *(buffer["path"][0] for buffer in saved["buffers"])}
    assert kept >= {name for name in sent if name.startswith(("_esm", "skeleton", "front_end", "about", "session"))}
    browser.close()
    other.close()


def test_a_closed_widget_is_not_saved(tmp_path: Path) -> None:
    browser: DisplayedWidget = hostile_graph().browse()
    browser.close()
    with pytest.raises(ValueError, match="closed"):
        browser.save_html(tmp_path / "closed.html")
    assert not list(tmp_path.iterdir())
