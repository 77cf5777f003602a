"""The front end's types of messages are those of the kernel, and what views hold is of these types."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import torch
import xarray as xr

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import (
    Circuit,
    Edge,
    show_attention,
    show_circuit,
    show_generation,
    show_heatmap,
    show_lens,
    show_tokens,
)
from graphpatch_notebook.notebook import messages
from tests.tiny_models import gpt2

TYPES = {
    "session": messages.SessionState,
    "attention": messages.Attention,
    "lens": messages.Lens,
    "generation": messages.Generation,
    "coloring": messages.Coloring,
    "heatmap": messages.ResultHeatmap,
    "cell_items": messages.CellItems,
    "circuit": messages.CircuitPicture,
}
"""By the name of a trait."""


def test_the_generated_types_are_current() -> None:
    script = Path(__file__).parents[2] / "js" / "messages.py"
    spec = importlib.util.spec_from_file_location("js_messages", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FILE.read_text("utf8") == module.typescript(), "run: python js/messages.py"


def test_traits_are_of_the_types_that_the_front_end_has() -> None:
    model = gpt2()
    ids = torch.arange(5)[None]
    pg = PatchableGraph(model, ids)
    feeds = {"layers[0].mlp": ("layers[0].mlp_out",), "@logits": ()}
    edges = (Edge("@embed", "layers[0].mlp", 2.0), Edge("layers[0].mlp_out", "@logits", 1.5))
    circuit = Circuit(edges, feeds, candidates=3, clean=2.0, corrupted=0.0)
    result = xr.DataArray(torch.rand(2, 2).numpy(), dims=("layer", "head"), name="effect")
    found: set[str] = set()
    views: list[Any] = [
        pg.browse(circuit=circuit),
        show_attention(pg, ids),
        show_lens(pg, ids),
        show_generation(pg, ids, max_new_tokens=2),
        show_tokens(pg, "layers[1].resid_post", score=[1]),
        show_heatmap(result),
        show_heatmap(result, pg=pg),
        show_circuit(circuit),
    ]
    for view in views:
        with contextlib.closing(view):
            kinds = {**TYPES, "about": messages.About if hasattr(view, "skeleton") else messages.AboutView}
            for name in kinds.keys() & {*view.keys}:
                if getattr(view, name) is not None:
                    msgspec.convert(getattr(view, name), kinds[name])
                    found.add(name)
            if hasattr(view, "skeleton"):
                msgspec.convert(json.loads(zlib.decompress(view.skeleton)), messages.Columns)
    assert found == {*TYPES, "about"}
