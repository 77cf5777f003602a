"""Cells of a result are items of the selection of its graph."""

from __future__ import annotations

import contextlib

import numpy as np
import xarray as xr

from graphpatch_notebook.experiments import show_heatmap
from graphpatch_notebook.notebook.views.selection import item_of
from tests.components.families import captured_model


def test_cells_select_paths_layers_heads_and_positions() -> None:
    pg, _ = captured_model("gpt2")
    heads = xr.DataArray(np.arange(8.0).reshape(2, 4), dims=["layer", "head"])
    paths = ["transformer.h_0.mlp.output", "layers[1].attn.z"]
    traced = xr.DataArray(np.ones((2, 3)), {"path": paths}, ["path", "position"])
    other = xr.DataArray(np.ones((2, 2)), {"a": ["x", "y"]}, ["a", "b"])
    with contextlib.ExitStack() as stack:
        one, two, three = (
            stack.enter_context(contextlib.closing(show_heatmap(result, pg=pg, origin="upper")))
            for result in (heads, traced, other)
        )
        browser = stack.enter_context(contextlib.closing(pg.browse()))
        assert one.cell_items == {
            "rows": [item_of(layer=0), item_of(layer=1)],
            "columns": [item_of(head=head) for head in range(4)],
            "is_of_heads": True,
        }
        assert two.cell_items["rows"] == [item_of("layers[0].mlp_out"), item_of("layers[1].attn.z")]
        assert two.cell_items["columns"] == [item_of(position=place) for place in range(3)]
        assert three.cell_items == {"rows": None, "columns": None, "is_of_heads": False}
        item = item_of("layers[1].attn.heads[2].z")
        one.set_state({"selection": [item], "cell": [1, 2]})
        assert one.selected == (1, 2)
        assert two.selection == browser.selection == [item]
        one.set_state({"selection": ["wrong"]})
        assert one.selection == [item]
        browser.selection = [item_of(position=1)]
        assert one.selection == two.selection == [item_of(position=1)]
    upward = show_heatmap(heads, pg=pg, origin="lower")
    assert [part["layer"] for part in upward.cell_items["rows"]] == [1, 0]
    upward.close()
