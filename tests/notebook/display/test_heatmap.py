"""The widget of `show_heatmap`: what the front end gets and may set, what is selected, what stays without a kernel."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import comm
import ipywidgets
import numpy as np
import pytest
import xarray as xr
from IPython.core.interactiveshell import InteractiveShell

from graphpatch_notebook.experiments import show_heatmap
from graphpatch_notebook.notebook.views.results import MOST_BYTES
from tests.notebook.browser.test_static_tree import read
from tests.notebook.browser.test_widget import Line

pytestmark = pytest.mark.hosts

PATHS = [f"transformer.h_{layer}.mlp.output" for layer in range(3)]
TOKENS = ["The", " cat", "\n", "<b>"]


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(comm, "create_comm", lambda *args, **options: Line(*args, **options))
    InteractiveShell.clear_instance()  # of other tests
    yield
    ipywidgets.Widget.close_all()


def a_result(**attrs: Any) -> xr.DataArray:
    values = np.arange(12.0).reshape(3, 4)
    return xr.DataArray(values, {"path": PATHS}, ["path", "position"], name="score", attrs=attrs)


def numbers(heatmap: Any) -> list[float]:
    return list(struct.unpack(f"<{len(heatmap.values) // 4}f", heatmap.values))


# -- what the front end gets


def test_the_front_end_gets_rows_from_the_top() -> None:
    heatmap = show_heatmap(a_result(baseline=2.0, corrupted=2.0), tokens=TOKENS, title="Restored")
    (state,) = heatmap.comm.states()
    about = state["heatmap"]
    assert about["rows"] == {
        "name": "path",
        "title": "path: transformer.*.mlp.output",
        "values": PATHS[::-1],
        "labels": ["h_2", "h_1", "h_0"],
        "tokens": None,
    }
    shown = ["The", "␣cat", "⏎", "<b>"]
    assert about["columns"] | {"labels": shown, "tokens": shown} == about["columns"]
    assert about["columns"]["values"] == ["0", "1", "2", "3"]
    assert (about["low"], about["high"], about["map"], about["center"]) == (-7.0, 11.0, "diverging", "corrupted 2")
    assert (about["title"], about["name"], about["full"]) == ("Restored", "score", [3, 4])
    assert (about["missing"], about["reduced"]) == (None, None)
    assert about["model_id"] == heatmap.model_id
    assert numbers(heatmap) == a_result().values[::-1].ravel().tolist()
    assert state["cell"] is None
    assert "selected" not in state


def test_large_results_are_sent_in_blocks_of_which_the_strongest_is_seen() -> None:
    values = np.zeros((600, 300))
    values[:, 0] = np.nan
    values[7, 150] = -5.0
    values[8, 151] = 4.0
    values[9, 150] = 3.0
    values[599, 299] = 1.0
    paths = [f"a.h_{row}.output" for row in range(600)]
    result = xr.DataArray(values, {"path": paths}, ["path", "position"], attrs={"baseline": 0.0})
    heatmap = show_heatmap(result)
    about = heatmap.heatmap
    assert about["reduced"] == "each cell is the number farthest from baseline 0 of 3 x 2 of 600 x 300"
    assert about["full"] == [600, 300]
    assert about["rows"]["labels"] is None
    assert about["rows"]["title"] == "path: a.*.output"
    assert about["rows"]["values"][0] == "a.h_599.output to a.h_597.output"
    assert about["columns"]["values"][-1] == "298 to 299"
    shown = np.array(numbers(heatmap)).reshape(200, 150)
    assert shown[0, -1] == 1.0
    assert np.sort(shown.ravel())[[0, -1]].tolist() == [-5.0, 3.0]
    assert not np.isnan(shown).any()
    heatmap.cell = [197, 75]
    assert shown[197, 75] == -5.0
    assert heatmap.selected == ("a.h_7.output", 150)
    heatmap.cell = [0, 149]
    assert heatmap.selected == ("a.h_599.output", 299)


# -- what is selected


def test_a_click_selects_by_coordinates() -> None:
    heatmap = show_heatmap(a_result())
    heard: list[Any] = []
    heatmap.observe(lambda change: heard.append(change["new"]), "selected")
    heatmap.comm.set(cell=[0, 1])
    assert heatmap.selected == (PATHS[2], 1)
    heatmap.comm.set(cell=None)
    assert heard == [(PATHS[2], 1), None]


# -- where it is shown


def static(heatmap: Any) -> str:
    return heatmap._marked_html()  # type: ignore[no-any-return]


def test_the_table_has_all_numbers_of_a_small_result() -> None:
    result = a_result(baseline=0.0)
    result.values[2, 0] = np.nan
    reader = read(static(show_heatmap(result, tokens=TOKENS, title="A & B")))
    assert reader.tags == {"div", "p", "strong", "table", "tr", "th", "td"}
    assert {name for name, _ in reader.attributes} == {"class"}
    texts = [text for text in reader.texts if text.strip()]
    assert texts[0] == "A & B: score, 3 x 4 (path x position), from 0 to 11"
    assert texts[2:] == [
        *("path: transformer.*.mlp.output / position", "The", "␣cat", "⏎", "<b>"),
        *("h_2", "–", "9", "10", "11"),
        *("h_1", "4", "5", "6", "7"),
        *("h_0", "0", "1", "2", "3"),
    ]


def test_of_a_large_result_the_strongest_cells_stay() -> None:
    values = np.random.default_rng(0).standard_normal((90, 100))
    values[80, 3] = -9.0
    result = xr.DataArray(values, {"path": [f"h_{row}" * 50 for row in range(90)]}, ["path", "position"])
    text = static(show_heatmap(result, tokens=["<script>" * 30] * 100))
    assert len(text.encode()) <= MOST_BYTES
    reader = read(text)
    assert reader.tags == {"div", "p", "strong", "ol", "li", "code"}
    assert any(one.startswith("path h_80") for one in reader.texts[:12])
    assert ": -9" in reader.texts
    assert "<script>" not in text
