"""What stays of a view where the kernel that made it is gone: it is browsed; without scripts there is a static tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbconvert
import nbformat
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from tests.browser.chromium import opened
from tests.browser.notebook_page import NotebookPage, notebook_of
from tests.browser.server import CHECKOUT, Server, environment
from tests.browser.tree_page import TreePage, TreeView

MODEL = """
import torch
from graphpatch_notebook import PatchableGraph

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(dim=-1), torch.nn.Linear(4, 2))
pg = PatchableGraph(model, torch.rand(3, 4))
browser = pg.browse()
browser
"""


def static_tree(place: Page | Locator) -> Locator:
    return place.locator("details").filter(has_text="softmax").first


def is_browsed(view: TreeView) -> None:
    """Rows open, the search finds, details say what is known; nothing that needs the model is offered, or fails."""
    expect(view.tree).to_be_visible()
    expect(static_tree(view.place)).to_be_hidden()
    expect(view.place.get_by_text("This is a saved view to browse.").first).to_be_visible()
    view.search("op:softmax")
    expect(view.row("sub_0")).to_have_count(0)
    view.row("softmax").click()
    view.press("Enter")
    details = view.dialog("sub_1.softmax")
    expect(details).to_contain_text("[3, 4] f32")
    expect(details.get_by_role("status")).to_contain_text("saved view")
    view.press("Escape")
    view.search("")
    view.row("sub_0").click()
    view.press("ArrowRight")
    expect(view.row("weight")).to_be_visible()
    expect(view.patches).to_contain_text("sub_1.softmax")
    for name in ("Run", "Patch", "Undo", "Remove", "Copy as Python"):
        expect(view.place.get_by_role("button", name=name)).to_have_count(0)
    for alert in view.place.get_by_role("alert").all():
        expect(alert).to_have_text("")


@pytest.fixture(scope="module")
def saved(context: BrowserContext, server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A view with a patch in a notebook, which is saved with it, and in a page of one file."""
    file, alone = server.folder / "saved.ipynb", tmp_path_factory.mktemp("page") / "saved.html"
    nbformat.write(notebook_of([MODEL]), file)
    with opened(context) as (page, _):
        notebook = NotebookPage(page, server)
        notebook.open(file.name)
        notebook.run(0)
        view = TreePage(notebook, 0)
        expect(view.tree).to_be_visible()
        expect(static_tree(view.place)).to_be_hidden()
        view.patch("sub_1.softmax", "zero")
        notebook.execute(f"browser.save_html({str(alone)!r})")
        notebook.save()
    server.end_kernels(file.name)
    return file, alone


def test_reopened_notebook_is_browsed(saved: tuple[Path, Path], server: Server, notebook: NotebookPage) -> None:
    notebook.open(saved[0].name)
    is_browsed(TreePage(notebook, 0))


def test_shipped_notebook_shows_its_views_if_it_is_trusted_and_else_folded_trees(
    server: Server, context: BrowserContext
) -> None:
    for is_trusted in (False, True):
        file = server.folder / f"shipped_{is_trusted}.ipynb"
        file.write_text((CHECKOUT / "examples" / "09_by_clicks.ipynb").read_text("utf8"), "utf8")
        if is_trusted:
            command = [sys.executable, "-m", "jupyter", "trust", str(file)]
            subprocess.run(command, env=environment(server.folder.parent), check=True)
        with opened(context) as (page, _):
            notebook = NotebookPage(page, server)
            notebook.open(file.name)  # with a kernel that has run nothing
            shown = notebook.cell(notebook.position("browser ="))
            if is_trusted:
                view = TreeView(page, shown)
                view.search("op:softmax")
                expect(view.row("pattern")).to_be_visible()
                expect(shown.get_by_role("region", name="Attention")).to_be_visible()
                icons = "views => views.map(view => getComputedStyle(view, '::before').display)"
                assert {*shown.locator(".jupyter-widgets-disconnected").evaluate_all(icons)} == {"none"}
            else:
                expect(static_tree(shown)).to_be_hidden()  # it is in rows that are folded
                expect(shown.locator("summary").filter(has_text="transformer").first).to_be_visible()
                expect(shown.get_by_text("AttentionView of")).to_have_count(0)
                expect(shown.get_by_text("├─")).to_have_count(0)


def test_html_of_nbconvert_is_browsed_if_widgets_can_be_fetched(
    saved: tuple[Path, Path], cdn: None, context: BrowserContext, tmp_path: Path
) -> None:
    page_text, _ = nbconvert.HTMLExporter().from_filename(str(saved[0]))
    file = tmp_path / "exported.html"
    file.write_text(page_text, encoding="utf8")
    with opened(context, is_silent=False) as (page, watch):
        page.goto(file.as_uri(), wait_until="domcontentloaded")
        is_browsed(TreeView(page, page))
        assert watch.errors == []


def test_page_of_one_file_is_browsed_without_a_network(
    saved: tuple[Path, Path], browser: Browser, context: BrowserContext
) -> None:
    with opened(context) as (page, _):
        page.goto(saved[1].as_uri())
        is_browsed(TreeView(page, page))
    with browser.new_context(java_script_enabled=False) as without_scripts:
        page = without_scripts.new_page()
        page.goto(saved[1].as_uri())
        expect(static_tree(page)).to_be_visible()
