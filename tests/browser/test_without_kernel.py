"""What stays of a notebook with a tree in it where no kernel runs: in JupyterLab, and in the HTML of nbconvert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbconvert
import nbformat
from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.browser.chromium import opened
from tests.browser.server import Server
from tests.browser.tree_page import TreePage


def static_tree(place: Page | Locator) -> Locator:
    return place.locator("details").filter(has_text="transformer").first


def saved(example: TreePage, server: Server) -> Path:
    """Patches a node, runs the cell again, saves; returns the file."""
    example.notebook.run(example.notebook.position("%graphpatch zero"))
    example.notebook.save()
    return server.folder / "05_browser.ipynb"


def test_static_tree_is_hidden_while_the_view_lives(example: TreePage) -> None:
    expect(static_tree(example.place)).to_be_hidden()


def test_reopened_notebook_shows_the_static_tree(
    example: TreePage, server: Server, take_picture: Callable[[str], Path]
) -> None:
    content = nbformat.read(saved(example, server), as_version=4)
    # Nobody has such a kernel; and nobody has signed such a notebook, so it is not trusted either.
    content.metadata["kernelspec"] = {"name": "elsewhere", "display_name": "Elsewhere", "language": "elsewhere"}
    del content.metadata["language_info"]
    nbformat.write(content, server.folder / "reopened.ipynb")
    notebook = example.notebook
    notebook.open("reopened.ipynb", has_kernel=False)
    dialog = example.page.get_by_role("dialog")
    dialog.get_by_role("button", name="No Kernel").click()
    expect(dialog).to_be_hidden()
    browse = notebook.position("browser = pg.browse(")
    notebook.scroll_to(browse)
    tree = static_tree(notebook.cell(browse))
    expect(tree).to_be_visible()
    take_picture("reopened")


def test_html_of_nbconvert_shows_the_static_tree(
    example: TreePage, server: Server, context: BrowserContext, tmp_path: Path
) -> None:
    page_text, _ = nbconvert.HTMLExporter().from_filename(str(saved(example, server)))
    file = tmp_path / "exported.html"
    file.write_text(page_text, encoding="utf8")
    # What nbconvert itself would fetch for formulas and widgets is out of reach.
    with opened(context, is_silent=False) as (page, watch):
        page.goto(file.as_uri(), wait_until="domcontentloaded")
        tree = static_tree(page)
        expect(tree).to_be_visible()
        page.screenshot(path=tmp_path / "exported.png")
