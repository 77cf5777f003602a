"""One server and one browser for all tests of this folder, which run one after the other in one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.browser import leaving_out, widget_packages
from tests.browser.chromium import Watch, context_of, launch, opened
from tests.browser.leaving_out import is_left_out
from tests.browser.notebook_page import NotebookPage, notebook_of
from tests.browser.server import CHECKOUT, Server, serving
from tests.browser.tree_page import TreePage


# Around all others: the marks are there before pytest leaves out by marks, and a browser is looked for only if tests
# that need one are left.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("browser")
            item.add_marker("slow")
    yield
    driving = [item for item in items if item.get_closest_marker("browser")]
    without = [] if widget_packages.are_installed() else [item for item in driving if "cdn" in item.fixturenames]
    if without and not config.getoption("all_browser_tests"):
        leaving_out.note_packages(len(without))
        items[:] = [item for item in items if item not in without]
        driving = [item for item in driving if item not in without]
        config.hook.pytest_deselected(items=without)
    if driving and not config.getoption("all_browser_tests") and is_left_out(len(driving)):
        items[:] = [item for item in items if item not in driving]
        config.hook.pytest_deselected(items=driving)


# Package scope: while Playwright is there, asyncio has a running loop, which the tests of other folders must not meet.
@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, kernels_are_warm: None) -> Iterator[Server]:
    """A JupyterLab whose folder holds a copy of the examples."""
    folder = tmp_path_factory.mktemp("jupyter")
    shutil.copytree(CHECKOUT / "examples", folder / "notebooks")
    with serving(folder) as running:
        yield running


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = launch(playwright)
        yield started
        started.close()


@pytest.fixture(scope="package")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """One context for all pages, so that JupyterLab is fetched and compiled once."""
    with context_of(browser) as made:
        yield made


@pytest.fixture(scope="package")
def lab(context: BrowserContext, server: Server) -> Iterator[tuple[NotebookPage, Watch]]:
    """One notebook, page and kernel for all tests that need none of their own: `show` runs their cells there."""
    nbformat.write(notebook_of([""]), server.folder / "lab.ipynb")
    with opened(context, is_silent=False) as (page, watch):
        notebook = NotebookPage(page, server)
        notebook.open("lab.ipynb")
        yield notebook, watch
    server.end_kernels("lab.ipynb")


# Patches go to the next graph of the same name.
RESET = """
import ipywidgets
from graphpatch.notebook.session.session import session_of

if "pg" in globals():
    session_of(pg).clear()
ipywidgets.Widget.close_all()
get_ipython().reset(new_session=False)
"""


@pytest.fixture
def show(lab: tuple[NotebookPage, Watch]) -> Iterator[Callable[..., TreePage]]:
    """Runs cells in a notebook without others, in a kernel without variables; returns the view in the last of them."""
    notebook, watch = lab
    notebook.execute(RESET)

    def shown(*sources: str) -> TreePage:
        notebook.set_cells(sources)
        notebook.run_all()
        notebook.scroll_to(len(sources) - 1)
        return TreePage(notebook, len(sources) - 1)

    yield shown
    assert watch == Watch(), watch


@pytest.fixture(scope="module")
def example_and_watch(context: BrowserContext, server: Server) -> Iterator[tuple[NotebookPage, Watch]]:
    """The example notebook, run up to the view: one page for all tests of a module that begin there."""
    with opened(context, is_silent=False) as (page, watch):
        notebook = NotebookPage(page, server)
        notebook.open("05_browser.ipynb")
        browse = notebook.position("browser = pg.browse(")
        for cell in notebook.code_cells():
            if cell < browse:
                notebook.run(cell)
        yield notebook, watch


@pytest.fixture
def page_and_watch(
    context: BrowserContext, write: Callable[..., str], request: pytest.FixtureRequest
) -> Iterator[tuple[Page, Watch]]:
    """A page and the watch over it. `write` ends its kernels when the page is closed: JupyterLab throws before that."""
    if "example" in request.fixturenames:
        notebook, watch = request.getfixturevalue("example_and_watch")
        yield notebook.page, watch
        assert watch == Watch(), watch
    else:
        with opened(context) as both:
            yield both


@pytest.fixture
def page(page_and_watch: tuple[Page, Watch]) -> Page:
    return page_and_watch[0]


@pytest.fixture
def notebook(page: Page, server: Server) -> NotebookPage:
    return NotebookPage(page, server)


@pytest.fixture
def example(notebook: NotebookPage) -> TreePage:
    """The first view of the example notebook, as new: no patch is chosen, and no cell was inserted."""
    notebook.revert()
    notebook.execute("%graphpatch clear")
    browse = notebook.position("browser = pg.browse(")
    notebook.run(browse)
    notebook.scroll_to(browse)
    view = TreePage(notebook, browse)
    expect(view.tree).to_be_visible()
    return view


@pytest.fixture
def write(server: Server, request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    """Writes a notebook of code cells into the server's folder; returns its name there."""
    name = f"{request.node.name}.ipynb"

    def written(*sources: str) -> str:
        nbformat.write(notebook_of(sources), server.folder / name)
        return name

    yield written
    server.end_kernels(name)


@pytest.fixture
def cdn(context: BrowserContext) -> Iterator[None]:
    """Pages get the packages that show widgets, as from a content delivery network."""
    widget_packages.serve_packages(context)
    yield
    context.unroute_all()
