"""One server and one browser for all tests of this folder, which run one after the other in one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.chromium import Watch, launch, opened
from tests.browser.notebook_page import NotebookPage
from tests.browser.server import CHECKOUT, Server, serving


# First: before pytest leaves out by marks, and before pytest-xdist reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("browser")
            item.add_marker(pytest.mark.xdist_group("browser"))


# Package scope: while Playwright is there, asyncio has a running loop, which the tests of other folders must not meet.
@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
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


@pytest.fixture
def page_and_watch(browser: Browser) -> Iterator[tuple[Page, Watch]]:
    with opened(browser) as both:
        yield both


@pytest.fixture
def page(page_and_watch: tuple[Page, Watch]) -> Page:
    return page_and_watch[0]


@pytest.fixture
def notebook(page: Page, server: Server) -> NotebookPage:
    return NotebookPage(page, server)


@pytest.fixture
def write(server: Server, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Writes a notebook of code cells into the server's folder; returns its name there."""

    def written(*sources: str) -> str:
        cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
        name = f"{request.node.name}.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), server.folder / name)
        return name

    return written


KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


@pytest.fixture
def take_picture(page: Page, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Takes a picture of the page, for people to look at: in the folder of the variable GRAPHPATCH_SCREENSHOTS."""
    folder = Path(os.environ.get("GRAPHPATCH_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)

    def taken(name: str) -> Path:
        file = folder / f"{request.node.name}-{name}.png"
        page.screenshot(path=file)
        return file

    return taken
