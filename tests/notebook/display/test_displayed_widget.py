"""What all widgets have: the page of one file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from graphpatch_notebook.notebook.display.displayed_widget import DisplayedWidget
from tests.notebook.browser.test_static_tree import read
from tests.notebook.hostile import hostile_graph


def test_a_saved_page_holds_the_widget_and_nothing_of_the_model_that_runs(tmp_path: Path) -> None:
    browser: DisplayedWidget = hostile_graph().browse()
    other: DisplayedWidget = hostile_graph().browse()
    browser.save_html(tmp_path / "a <page>.html")
    text = (tmp_path / "a <page>.html").read_text("utf8")
    assert len(text) < 200_000
    scripts = re.findall(r'<script type="([^"]+)"[^>]*>(.*?)</script>', text, re.DOTALL)
    kinds = dict(scripts)
    assert len(scripts) == len(kinds) == text.count("<script")
    assert not {name for name, _ in read(re.sub(r"(?s)<(head|script).*?</\1>", "", text)).attributes} & {"src", "href"}
    kind = "application/vnd.jupyter.widget-{}+json"
    assert kinds.keys() == {kind.format("state"), kind.format("view"), "module"}
    assert json.loads(kinds[kind.format("view")])["model_id"] == browser.model_id
    states = json.loads(kinds[kind.format("state")])["state"]
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
