"""Cells of a result are items of the selection of its graph."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import nn

from graphpatch_notebook import ZeroPatch
from graphpatch_notebook.experiments import show_heatmap
from graphpatch_notebook.notebook.session.session import session_of
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
            stack.enter_context(contextlib.closing(show_heatmap(result, pg=pg))) for result in (heads, traced, other)
        )
        browser = stack.enter_context(contextlib.closing(pg.browse()))
        assert one.cell_items == {
            "rows": [item_of(layer=1), item_of(layer=0)],
            "columns": [item_of(head=head) for head in range(4)],
            "all": item_of("layers[*].attn.heads[*].z"),
        }
        assert two.cell_items["rows"] == [item_of("layers[1].attn.z"), item_of("layers[0].mlp_out")]
        assert two.cell_items["columns"] == [item_of(position=place) for place in range(3)]
        assert three.cell_items == {"rows": None, "columns": None, "all": item_of()}
        item = item_of("layers[1].attn.heads[2].z")
        one.set_state({"selection": [item], "cell": [0, 2]})
        assert one.selected == (1, 2)
        assert two.selection == browser.selection == [item]
        one.set_state({"selection": ["wrong"]})
        assert one.selection == [item]
        browser.selection = [item_of(position=1)]
        assert one.selection == two.selection == [item_of(position=1)]


def zeroed(path: str, position: int) -> dict[str, ZeroPatch]:
    return {path: ZeroPatch(slice=(slice(None), position))}


def test_a_cell_becomes_a_patch() -> None:
    pg, ids = captured_model("gpt2")
    axes = {"path": ["layers[0].resid_post", "layers[1].resid_post"], "position": range(7)}
    result = pg.sweep(axes, zeroed, ids, metric=lambda out: out.logits.sum(), progress=False)
    with contextlib.closing(show_heatmap(result, pg=pg)) as view, contextlib.closing(pg.browse()) as browser:
        chosen = item_of(view.cell_items["all"]["name"].replace("*", "0"), position=4)
        asked: list[Any] = []
        view.send = lambda content, buffers=None: asked.append(content)  # type: ignore[method-assign]
        edit = {"action": "act", "act": "zero", "items": [chosen], "value": None, "steps": None}
        payload = {"edit": edit, "based_on": view.session["version"]}
        view._handle_custom_msg({"id": 1, "request": "edit", "payload": payload}, [])
        assert "error" not in asked[0]
        assert [patch["path"] for patch in view.session["patches"]] == ["layers[0].resid_post"]
        assert [patch["number"] for patch in browser.session["patches"]] == [1]
        session = session_of(pg)
        with pg.patch(session.resolve({}).patch_map):
            patched = pg(ids).logits.sum().item()
        session.clear()
    assert patched == result.sel(layer=0, position=4).item()

    def zero(_: nn.Module, args: Any, output: Any) -> None:
        (output[0] if isinstance(output, tuple) else output)[:, 4] = 0

    model = pg._module
    with model.transformer.h[0].register_forward_hook(zero), torch.no_grad():
        assert patched == model(ids).logits.sum().item()
