"""The heatmap of a result in JupyterLab: drawn, read with mouse and keyboard, and a click that arrives in Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.notebook_page import NotebookPage
from tests.browser.server import Server

RESULT = """
import numpy as np
import xarray as xr
from graphpatch_notebook.experiments import show_heatmap

paths = [f"transformer.h_{layer}.mlp.output" for layer in range(12)]
rows, columns = np.mgrid[:12, :16]
values = np.exp(-((rows - 4) ** 2 + (columns - 7) ** 2) / 12)
values -= 0.3 * np.exp(-((rows - 10) ** 2 + (columns - 2) ** 2) / 4)
values[10, 2] = -0.3
values[6, 7] = np.nan
result = xr.DataArray(
    values, {"path": paths}, ["path", "position"], name="LogitDifference", attrs={"baseline": 0.0, "corrupted": 0.0}
)
tokens = ["<|endoftext|>", "The", " Space", " Need", "le", " is", " in", " downtown", " Se", "attle", ",", "\\n", " in",
          " the", " state", " of"]
"""
SHOW = """
heatmap = show_heatmap(result, tokens=tokens, title="Restoring the MLP of one layer")
heatmap
"""
LARGE = """
large = xr.DataArray(
    np.random.default_rng(0).standard_normal((80, 400)),
    {"path": [f"model.layers_{layer}.output" for layer in range(80)]},
    ["path", "position"],
    name="effect",
)
show_heatmap(large)
"""


def shown(notebook: NotebookPage, cell: int) -> Locator:
    heatmap = notebook.cell(cell).get_by_role("region", name="Heatmap")
    expect(heatmap).to_be_visible()
    return heatmap


def point_at(canvas: Locator, row: float, column: float, rows: int, columns: int, *, is_click: bool = False) -> None:
    """Points at a cell, counted from the top left one."""
    box = canvas.bounding_box()
    assert box is not None
    position = {"x": (column + 0.5) * box["width"] / columns, "y": (row + 0.5) * box["height"] / rows}
    canvas.click(position=position) if is_click else canvas.hover(position=position)


@pytest.fixture
def heatmap(notebook: NotebookPage, write: Callable[..., str]) -> Locator:
    notebook.open(write(RESULT, SHOW, LARGE))
    notebook.run(0)
    notebook.run(1)
    return shown(notebook, 1)


def test_a_heatmap_is_drawn_read_clicked_made_larger_and_scrolls(
    heatmap: Locator, notebook: NotebookPage, page: Page, take_picture: Callable[[str], Path]
) -> None:
    canvas = heatmap.get_by_role("img")
    point_at(canvas, 11 - 4, 7, 12, 16)
    place = "path transformer.h_4.mlp.output, position 7 (␣downtown)"
    expect(heatmap).to_contain_text(f"{place}: 1")
    point_at(canvas, 11 - 10, 2, 12, 16, is_click=True)
    expect(heatmap).to_contain_text(re.compile(r"Selected: path transformer\.h_10\.mlp\.output, position 2 \(␣Space\)"))
    notebook.wait_for_value("heatmap.selected", ["transformer.h_10.mlp.output", 2])
    assert notebook.value("float(result.sel(path=heatmap.selected[0])[heatmap.selected[1]])") == pytest.approx(-0.3)
    take_picture("light")

    canvas.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(heatmap).to_contain_text("Selected: path transformer.h_9.mlp.output")
    notebook.wait_for_value("heatmap.selected", ["transformer.h_9.mlp.output", 2])

    notebook.use_theme("dark")
    take_picture("dark")
    notebook.use_theme("light")

    notebook.run(2)
    large = shown(notebook, 2)
    canvas = large.get_by_role("img")
    canvas.scroll_into_view_if_needed()
    take_picture("small")
    before = canvas.bounding_box()
    for _ in range(4):
        large.get_by_role("button", name="Larger cells").click()
    assert before is not None
    notebook.page.wait_for_function(
        "([canvas, width]) => canvas.getBoundingClientRect().width > width",
        arg=[canvas.element_handle(), 4 * before["width"]],
    )
    canvas.focus()
    for key in ("ArrowDown", "Control+End"):
        notebook.page.keyboard.press(key)
    expect(large).to_contain_text("path model.layers_0.output, position 398 to 399")
    expect(large.get_by_text("layers_0", exact=True)).to_be_in_viewport()
    take_picture("large")


def test_a_reopened_notebook_shows_a_table(
    heatmap: Locator, notebook: NotebookPage, server: Server, page: Page, take_picture: Callable[[str], Path]
) -> None:
    table = notebook.cell(1).get_by_role("table")
    expect(table).to_be_hidden()
    notebook.save()
    (file,) = server.folder.glob("test_a_reopened_notebook_shows_a_table*.ipynb")
    content = nbformat.read(file, as_version=4)
    content.metadata["kernelspec"] = {"name": "elsewhere", "display_name": "Elsewhere", "language": "elsewhere"}
    del content.metadata["language_info"]
    nbformat.write(content, server.folder / "reopened_heatmap.ipynb")
    notebook.open("reopened_heatmap.ipynb", has_kernel=False)
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="No Kernel").click()
    expect(dialog).to_be_hidden()
    expect(table).to_be_visible()
    expect(table.get_by_role("row").nth(1)).to_contain_text("h_11")
    take_picture("reopened")
