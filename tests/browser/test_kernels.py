"""What a view does while its kernel is busy, when it is told to stop, when its graph is made again, and is gone."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import expect

from tests.browser.notebook_page import NotebookPage
from tests.browser.tree_page import TreePage

# Quick when it is wrapped; then each layer waits, if that is wished, until it may go on.
SLOW = """
import threading
import torch
from torch import nn
from graphpatch import PatchableGraph
from graphpatch.notebook.session.session import session_of

gate = threading.Event()
gate.set()
is_busy = False

class Layer(nn.Module):
    def forward(self, x):
        gate.wait()
        return x + 1

pg = PatchableGraph(nn.Sequential(*(Layer() for _ in range(100))), torch.ones(2))
browser = pg.browse()
browser
"""
BUSY = "print('runs', is_busy)\nwhile is_busy:\n    pass"
CHOSEN = "[str(one) for one in session_of(pg).chosen.patches]"


def test_views_answer_while_the_model_or_a_cell_runs_and_both_are_interrupted(show: Callable[..., TreePage]) -> None:
    notebook = show(SLOW, BUSY).notebook
    view = TreePage(notebook, 0)
    notebook.execute("gate.clear(); is_busy = True")
    view.button("Run").click()
    progress = view.runs.get_by_role("progressbar")
    expect(progress).to_be_visible()
    expect(view.runs).to_contain_text(re.compile(r"\d m?s"))
    view.go_to("sub_5.add")  # the tree answers meanwhile
    view.patch("sub_7.add", "zero")
    assert notebook.value("1 + 1") == 2  # and so does the kernel
    view.runs.get_by_role("button", name="Interrupt").click()
    expect(view.runs).to_contain_text(re.compile(r"waits for .*:\d+, in forward: gate\.wait\(\)"))
    notebook.execute("gate.set()")
    expect(view.runs).to_contain_text("Interrupted after")
    expect(progress).to_be_hidden()
    view.button("Run").click()
    expect(view.runs).to_contain_text("ran with patch #1")
    expect(view.runs).to_contain_text("101 → 92")
    assert notebook.value("pg(torch.ones(2)).tolist()") == [101, 101]

    # While a cell runs, views answer, or say that the kernel is busy.
    view.search("")
    notebook.start(1)
    # An interrupt that comes before the kernel has begun with the cell is lost.
    expect(notebook.cell(1).locator(".jp-OutputArea-output").last).to_contain_text("runs True")
    view.search("5")
    expect(view.row("sub_5")).to_be_visible()
    view.go_to("sub_5.add")
    view.tree.focus()
    view.press("Enter")
    popup = view.dialog("sub_5.add")
    expect(popup.get_by_text(re.compile("return x \\+ 1|kernel is busy")).first).to_be_visible()
    notebook.interrupt_kernel()
    expect(popup.get_by_text("return x + 1").first).to_be_visible()


def test_a_graph_that_is_made_again_keeps_its_patches(show: Callable[..., TreePage]) -> None:
    view = show(f"%load_ext graphpatch\n{SLOW}")
    notebook = view.notebook
    view.patch("sub_7.add", "zero")
    notebook.run_all()
    expect(view.chosen).to_have_count(1)
    said = view.place.get_by_text("1 patch carried over from the previous graph in pg")
    expect(said).to_be_visible()
    assert notebook.value(CHOSEN) == ["zero sub_7.add"]
    view.patches.get_by_role("status").get_by_role("button", name="Undo").click()
    expect(view.chosen).to_have_count(0)
    expect(said).to_be_hidden()
    assert notebook.value(CHOSEN) == []


def test_keys_of_the_host_and_typing_into_the_inserted_cell(show: Callable[..., TreePage]) -> None:
    view = show(SLOW)
    notebook = view.notebook
    # What the widget does not use is the host's: Ctrl+S saves, from the tree and while one types.
    for place in (view.tree, view.search_box):
        notebook.measure("app.shell.currentWidget.context.model.dirty = true;")
        place.focus()
        view.press("Control+s")
        assert notebook.measure("await until(() => !app.shell.currentWidget.context.model.dirty); return true;")
    # What it uses does nothing else: undo in a field.
    before = notebook.sources()
    view.search("mlp")
    view.search_box.focus()
    view.press("Control+z", "Control+a", "Control+x")
    assert notebook.sources() == before
    # One cell is inserted, and one types there.
    view.patch("sub_7.add", "zero")
    view.button("Insert cell").dblclick()
    expect(view.button("Insert cell")).to_contain_text("Inserted")
    view.page.keyboard.type("# mine\n")
    assert [len(notebook.sources()), "# mine" in notebook.sources()[1]] == [2, True]


def test_the_page_says_that_the_kernel_was_restarted_or_shut_down(
    notebook: NotebookPage, write: Callable[..., str]
) -> None:
    notebook.open(write(SLOW))
    notebook.run(0)
    view = TreePage(notebook, 0)
    expect(view.tree).to_be_visible()
    notebook.restart_kernel()
    said = view.place.get_by_text(re.compile("kernel.*run the cell again", re.IGNORECASE)).first
    expect(said).to_be_visible()
    notebook.run(0)
    expect(said).to_be_hidden()
    view.patch("sub_5.add", "zero")
    notebook.shut_down_kernel()
    expect(said).to_be_visible()
