"""The browser as people live with it: keys of the host, quick clicks, graphs that are made again, blocking calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.notebook_page import NotebookPage
from tests.browser.tree_page import TreePage

GPT2 = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from graphpatch import PatchableGraph
%load_ext graphpatch
torch.manual_seed(0)
config = GPT2Config(n_layer=6, n_head=4, n_embd=32, vocab_size=50, attn_implementation="eager")
model = GPT2LMHeadModel(config).eval()
ids = torch.arange(14)[None]
pg = PatchableGraph(model, ids)
"""
MLP = "transformer.h_0.mlp"
BLOCKING = """
import time
import torch
from torch import nn
from graphpatch import PatchableGraph

pause = 0.0

class Blocking(nn.Module):
    def forward(self, x):
        time.sleep(pause)
        return x + 1

pg = PatchableGraph(Blocking(), torch.ones(2))
pg.browse()
"""
DIRTY = "return app.shell.currentWidget.context.model.dirty;"
SAVED = "await until(() => !app.shell.currentWidget.context.model.dirty); return true;"


@pytest.fixture
def look(page: Page, notebook: NotebookPage, take_picture: Callable[[str], Path]) -> Callable[[str], None]:
    """Takes pictures of the page, wide and narrow, light and dark."""

    def taken(name: str) -> None:
        for width in (1400, 700):
            page.set_viewport_size({"width": width, "height": 1200})
            for theme in ("dark", "light"):
                notebook.use_theme(theme)
                take_picture(f"{name}-{width}-{theme}")
        page.set_viewport_size({"width": 1400, "height": 1200})

    return taken


def opened(notebook: NotebookPage, write: Callable[..., str], *cells: str) -> TreePage:
    """Runs cells, the last of which shows a view."""
    notebook.open(write(*cells))
    notebook.run_all()
    notebook.scroll_to(len(cells) - 1)
    view = TreePage(notebook, len(cells) - 1)
    expect(view.tree).to_be_visible()
    return view


def test_keys_and_clicks_do_what_is_meant(
    notebook: NotebookPage, write: Callable[..., str], look: Callable[[str], None]
) -> None:
    view = opened(notebook, write, GPT2, 'pg.browse(views=("attention",))')
    actions = view.place.get_by_role("toolbar", name="Selection")
    # What the widget does not use is the host's: Ctrl+S saves, from the tree and while one types.
    for place in (view.tree, view.search_box):
        notebook.measure("app.shell.currentWidget.context.model.dirty = true;")
        place.focus()
        view.press("Control+s")
        assert notebook.measure(SAVED)
    # What it uses does nothing else: undo in a field, letters that are commands of the notebook.
    before = notebook.sources()
    view.search("mlp")
    view.search_box.focus()
    view.press("Control+z", "Control+a", "Control+x")
    view.tree.focus()
    view.press("d", "d", "x", "a", "b", "0", "Home")
    assert notebook.sources() == before

    keys = view.place.get_by_text("next match while searching")
    view.press("?")
    expect(keys).to_be_visible()
    look("keys")
    view.press("Escape")
    expect(keys).to_be_hidden()
    expect(view.tree).to_be_focused()

    # A module has the shape of its output, and is patched there.
    view.search(MLP)
    module = view.row("mlp")
    expect(module).to_contain_text("[1, 14, 32] f32")
    module.get_by_role("button", name="Patch mlp").click()
    editor = view.dialog(f"Patch {MLP}.output")
    editor.get_by_label("Kind", exact=True).select_option("add")
    value = editor.get_by_label("Value", exact=True)
    for typed, is_wrong in (("torch.ones(7)", True), ("torch.ones(32)", False), ("ids[0]", True), ("len(ids)", False)):
        value.fill(typed)
        expect(value).to_have_attribute("aria-invalid", "true") if is_wrong else expect(value).not_to_have_attribute(
            "aria-invalid", "true"
        )
        if typed == "torch.ones(7)":
            look("value")
    editor.get_by_label("Slice", exact=True).fill(":, ids")
    value.fill("1.0")
    view.press("Escape")
    module.click()
    expect(actions).to_contain_text(MLP)
    actions.get_by_role("button", name="Zero", exact=True).dblclick()
    expect(view.chosen).to_have_count(1)
    expect(view.chosen).to_contain_text(f"{MLP}.output")
    look("module")

    # Equal layers open together, which is said below the tree.
    view.search("")
    view.row("h_0 … h_5").click()
    view.row("h_3").locator(".gp-chevron").click()
    opened_too = view.place.get_by_text("Opened too: 5 equal modules")
    expect(opened_too).to_be_visible()
    look("opened")
    view.button("Only this one").click()
    expect(opened_too).to_be_hidden()
    expect(view.row("h_3")).to_have_attribute("aria-expanded", "true")
    expect(view.row("h_2")).to_have_attribute("aria-expanded", "false")
    view.row("ln_1").get_by_role("button", name="Details of ln_1").click()
    expect(view.dialog("transformer.h_3.ln_1").get_by_role("button", name="Patch output")).to_be_visible()
    look("details")
    view.press("Escape")

    # One cell is inserted, and one types there.
    view.button("Insert cell").dblclick()
    view.page.wait_for_timeout(1000)
    assert len(notebook.sources()) == 3
    view.page.keyboard.type("# mine\n")
    assert "# mine" in notebook.sources()[2]


def test_a_graph_that_is_made_again_keeps_its_patches(
    notebook: NotebookPage, write: Callable[..., str], look: Callable[[str], None]
) -> None:
    view = opened(notebook, write, GPT2, "pg.browse()")
    notebook.execute("from graphpatch_notebook.notebook.session.session import session_of")
    chosen = "[str(one) for one in session_of(pg).chosen.patches]"
    view.patch("transformer.h_0.mlp.act.mul", "zero")
    notebook.run_all()
    expect(view.chosen).to_have_count(1)
    said = view.place.get_by_text("1 patch carried over from the previous graph in pg")
    expect(said).to_be_visible()
    look("carried")
    notebook.execute("%graphpatch list")
    assert notebook.value(chosen) == ["zero transformer.h_0.mlp.act.mul"]
    view.patches.get_by_role("status").get_by_role("button", name="Undo").click()
    expect(view.chosen).to_have_count(0)
    expect(said).to_be_hidden()
    notebook.run(1)
    expect(view.tree).to_be_visible()
    expect(view.chosen).to_have_count(0)
    assert notebook.value(chosen) == []


def test_an_interrupt_says_what_it_waits_for(
    notebook: NotebookPage, write: Callable[..., str], look: Callable[[str], None]
) -> None:
    view = opened(notebook, write, BLOCKING)
    notebook.execute("pause = 8.0")
    view.button("Run").click()
    view.runs.get_by_role("button", name="Interrupt").click()
    expect(view.runs).to_contain_text(re.compile(r"waits for .*:\d+, in forward: time\.sleep\(pause\)"))
    look("waits")
    expect(view.runs).to_contain_text("Interrupted after")
