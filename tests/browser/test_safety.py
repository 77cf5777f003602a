"""Names, values and code come from the user's model: they are shown as text, whatever they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.notebook_page import NotebookPage
from tests.browser.tree_page import TreePage

HOSTILE = "<img src=x onerror=alert(1)>"
MODEL = f"""
import torch
from torch import nn
from graphpatch import PatchableGraph

class Layer(nn.Module):
    def forward(self, x):
        return x + 1  # {HOSTILE}

Layer.__name__ = Layer.__qualname__ = {HOSTILE!r}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module({HOSTILE!r}, Layer())

    def forward(self, x):
        return {{{HOSTILE!r}: getattr(self, {HOSTILE!r})(x)}}

class Tokenizer:
    def decode(self, tokens):
        return {HOSTILE!r}

pg = PatchableGraph(Model(), torch.ones(2), tokenizer=Tokenizer())
browser = pg.browse()
browser
"""


def test_hostile_names_are_shown_and_nothing_of_them_runs(
    notebook: NotebookPage, write: Callable[..., str], take_picture: Callable[[str], Path]
) -> None:
    # That no dialog came up, and that nothing was fetched, is checked for every page at its end.
    notebook.open(write(MODEL))
    notebook.run(0)
    view = TreePage(notebook, 0)
    row = view.tree.get_by_role("treeitem").filter(has_text=HOSTILE).first
    expect(row).to_be_visible()
    row.click()
    view.press("Enter")
    expect(view.place.get_by_role("dialog")).to_contain_text(HOSTILE)
    view.press("Escape")
    view.search(HOSTILE)
    view.search("add")
    view.row("add").click()
    view.press("+")
    editor = view.place.get_by_role("dialog")
    editor.get_by_label("Slice", exact=True).fill(HOSTILE)
    expect(editor.get_by_label("Slice", exact=True)).to_have_attribute("aria-invalid", "true")
    editor.get_by_label("Slice", exact=True).fill("")
    editor.get_by_label("Kind", exact=True).select_option("add")
    editor.get_by_label("Value", exact=True).fill(f"len({HOSTILE!r})")
    editor.get_by_role("button", name="Apply", exact=True).click()
    expect(view.chosen).to_contain_text(HOSTILE)
    view.button("Run").click()
    expect(view.runs).to_contain_text(HOSTILE)
    take_picture("hostile")
    assert view.place.locator("img").count() == 0
