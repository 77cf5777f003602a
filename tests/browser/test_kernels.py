"""What a view does while its kernel is busy, when it is told to stop, and when it is gone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.notebook_page import NotebookPage
from tests.browser.tree_page import TreePage

# Quick when it is wrapped; then as slow as is wished.
SLOW = """
import time
import torch
from torch import nn
from graphpatch import PatchableGraph

pause = 0.0

class Layer(nn.Module):
    def forward(self, x):
        time.sleep(pause)
        return x + 1

pg = PatchableGraph(nn.Sequential(*(Layer() for _ in range(100))), torch.ones(2))
browser = pg.browse()
browser
"""


def slow(notebook: NotebookPage, write: Callable[..., str]) -> TreePage:
    notebook.open(write(SLOW, "time.sleep(600)"))
    notebook.run(0)
    view = TreePage(notebook, 0)
    expect(view.tree).to_be_visible()
    return view


def test_views_answer_while_the_model_or_a_cell_runs_and_both_are_interrupted(
    notebook: NotebookPage, write: Callable[..., str], take_picture: Callable[[str], Path]
) -> None:
    view = slow(notebook, write)
    notebook.execute("pause = 2.0")
    view.button("Run").click()
    progress = view.runs.get_by_role("progressbar")
    expect(progress).to_be_visible()
    expect(view.runs).to_contain_text(re.compile(r"\d m?s"))
    take_picture("running")
    view.go_to("sub_5.add")  # the tree answers meanwhile
    view.patch("sub_7.add", "zero")
    assert notebook.value("1 + 1") == 2  # and so does the kernel
    view.runs.get_by_role("button", name="Interrupt").click()
    expect(view.runs).to_contain_text("Interrupted after")
    expect(progress).to_be_hidden()
    notebook.execute("pause = 0.0")
    view.button("Run").click()
    expect(view.runs).to_contain_text("ran with patch #1")
    expect(view.runs).to_contain_text("101 → 92")
    assert notebook.value("pg(torch.ones(2)).tolist()") == [101, 101]

    view.search("")
    notebook.start(1)  # while a cell runs, views answer, or say that the kernel is busy
    view.search("5")
    expect(view.row("sub_5")).to_be_visible()
    view.go_to("sub_5.add")
    view.tree.focus()
    view.press("Enter")
    popup = view.dialog("sub_5.add")
    expect(popup.get_by_text(re.compile("return x \\+ 1|kernel is busy")).first).to_be_visible()
    notebook.interrupt_kernel()
    expect(popup.get_by_text("return x + 1").first).to_be_visible()


def test_the_page_says_that_the_kernel_was_restarted_or_shut_down(
    notebook: NotebookPage, write: Callable[..., str], take_picture: Callable[[str], Path]
) -> None:
    view = slow(notebook, write)
    notebook.restart_kernel()
    said = view.place.get_by_text(re.compile("kernel.*run the cell again", re.IGNORECASE)).first
    expect(said).to_be_visible()
    take_picture("restarted")
    notebook.run(0)
    expect(said).to_be_hidden()
    view.patch("sub_5.add", "zero")
    notebook.shut_down_kernel()
    expect(said).to_be_visible()
