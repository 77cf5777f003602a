"""The same story in each host of notebooks: open, search, attention, click a head to zero it, run, copy the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import BrowserContext, expect

from tests.browser.chromium import opened
from tests.browser.notebook_page import NotebookPage
from tests.browser.server import Server, environment, free_port, wait_until_started
from tests.browser.tree_page import TreePage, TreeView, click_head

MODEL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from graphpatch_notebook import PatchableGraph

torch.manual_seed(0)
sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
config = GPT2Config(**sizes, use_cache=False, initializer_range=1.0)
pg = PatchableGraph(GPT2LMHeadModel(config).eval(), torch.arange(6)[None])
browser = pg.browse(views=("attention",))
browser
"""
HEAD = "layers[0].attn.heads[1].z"
MARIMO = """
import marimo

app = marimo.App(width="medium")

@app.cell
def _():
"""


def has_the_story(view: TreeView, cells: Literal["inserts", "copies"]) -> None:
    """Runs the story to its end."""
    expect(view.tree).to_be_visible()
    view.search("op:softmax")
    expect(view.row("pattern")).to_be_visible()
    expect(view.row("mlp")).to_have_count(0)
    attention = view.place.get_by_role("region", name="Attention")
    click_head(attention, 0, 1)
    attention.get_by_role("button", name="Zero").click()
    expect(view.chosen).to_contain_text(HEAD)
    expect(attention.get_by_text("Patched", exact=True)).to_be_visible()
    view.button("Run").click()
    expect(view.runs).to_contain_text(re.compile(r"ran with patch #1"))
    expect(view.runs).to_contain_text("→")
    view.button("Copy as Python").click()
    expect(view.button("Copy as Python")).to_contain_text("Copied")
    assert "ZeroPatch()" in view.page.evaluate("navigator.clipboard.readText()")
    view.button("Insert cell").click()
    if cells == "inserts":
        expect(view.button("Insert cell")).to_contain_text("Inserted")
    else:
        expect(view.place.get_by_role("textbox", name="Python code")).to_have_value(re.compile("ZeroPatch"))
        expect(view.patches).to_contain_text("in the clipboard")


def looks_right(view: TreeView) -> None:
    """The parts are as wide as the place that the host gives them, and nothing of them is cut."""
    root = view.place.locator(".gp-root").first
    assert root.evaluate("root => root.scrollWidth <= root.clientWidth")
    assert view.tree.evaluate("tree => tree.getBoundingClientRect().height") > 100


def test_jupyterlab(show: Callable[..., TreePage]) -> None:
    view = show(MODEL)
    has_the_story(view, "inserts")
    assert "ZeroPatch()" in view.notebook.sources()[1]
    looks_right(view)


def test_notebook_7(context: BrowserContext, server: Server, write: Callable[..., str]) -> None:
    # It reports a setting of JupyterLab's that it does not have as an error.
    with opened(context, is_silent=False) as (page, watch):
        notebook = NotebookPage(page, server)
        notebook.open(write(MODEL), host="notebooks")
        notebook.run(0)
        view = TreeView(page, notebook.cell(0))
        has_the_story(view, "inserts")
        assert "ZeroPatch()" in notebook.sources()[1]
        looks_right(view)
        assert watch.offsite == watch.dialogs == []


def test_voila(context: BrowserContext, server: Server, write: Callable[..., str]) -> None:
    # Its page asks for fonts and MathJax from other machines.
    with opened(context, is_silent=False) as (page, watch):
        page.goto(f"{server.url}/voila/render/{write(MODEL)}", wait_until="commit")
        view = TreeView(page, page)
        has_the_story(view, "copies")
        looks_right(view)
        assert watch.errors == watch.dialogs == []


@pytest.fixture
def marimo(tmp_path: Path) -> Iterator[str]:
    """The address of a notebook in marimo."""
    file = tmp_path / "story.py"
    # marimo shows what a cell ends with, and nothing beside it.
    source = MODEL.strip().removesuffix("browser") + "import marimo\nmarimo.vstack([*browser.views, browser])"
    body = "\n".join(f"    {line}" for line in source.splitlines())
    file.write_text(f"{MARIMO}{body}\n    return\n", encoding="utf8")
    port = free_port()
    command = [sys.executable, "-m", "marimo", "run", file.name, "--headless", "--no-token", "--host=127.0.0.1"]
    log = tmp_path / "marimo.log"
    with log.open("w") as written:
        process = subprocess.Popen(
            [*command, f"--port={port}"],
            cwd=tmp_path,
            env=environment(tmp_path) | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)},
            stdout=written,
            stderr=written,
        )
        try:
            wait_until_started(process, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def test_marimo(context: BrowserContext, marimo: str) -> None:
    with opened(context) as (page, _):
        page.goto(marimo, wait_until="commit")
        view = TreeView(page, page)
        has_the_story(view, "copies")
        looks_right(view)


def test_embedded_by_requirejs(
    cdn: None, context: BrowserContext, server: Server, request: pytest.FixtureRequest
) -> None:
    name = f"{request.node.name}.ipynb"
    template = (Path(__file__).parent / "embedded.html").read_text("utf8")
    text = template.replace("PATH", json.dumps(name), 1).replace("CODE", json.dumps(MODEL), 1)
    (server.folder.parent / "pages" / "embedded.html").write_text(text, encoding="utf8")
    with opened(context, is_silent=False) as (page, watch):
        try:
            page.goto(f"{server.url}/static/embedded.html")
            view = TreeView(page, page)
            has_the_story(view, "copies")
            looks_right(view)
            root = page.locator(".gp-root").first
            for theme, color in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(31, 31, 31)")):
                page.evaluate(
                    """([theme, color]) => {
                      document.body.className = `vscode-${theme}`;
                      document.body.style.setProperty("--vscode-editor-background", color);
                    }""",
                    [theme, color],
                )
                expect(root).to_have_attribute("data-gp-theme", theme)
                expect(root).to_have_css("background-color", color)
            assert watch.errors == watch.dialogs == []
        finally:
            server.end_kernels(name)
