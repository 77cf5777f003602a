"""Colored tokens: what is sent is the value at each position, along a direction, of a channel, or by a function."""

from __future__ import annotations

import contextlib
import zlib
from typing import Any

import numpy as np
import pytest
import torch
import traitlets
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import ChosenPatchError, ExperimentError
from graphpatch_notebook.experiments import show_tokens
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.session import session_of
from graphpatch_notebook.notebook.views.tokens import TokensView

IDS = torch.arange(10).reshape(2, 5)
DIRECTIONS = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pg() -> PatchableGraph:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 20}
    return PatchableGraph(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval(), IDS)


def sent(view: TokensView) -> np.ndarray[Any, Any]:
    """Reads the trait as the front end does: by run, score, row and position."""
    about = view.coloring
    shape = about["runs"], len(about["scores"]), len(about["rows"]), len(about["rows"][0])
    return np.frombuffer(zlib.decompress(view.numbers), "<f4").reshape(shape)


def hidden(pg: PatchableGraph, patched: Any = None) -> Tensor:
    """The state after the second layer, by a plain hook."""
    kept: list[Tensor] = []
    block = pg._module.transformer.h[1]
    handles = [block.register_forward_hook(lambda *call: kept.append(call[2]))]
    if patched is not None:
        handles.append(block.mlp.register_forward_hook(lambda *call: patched(call[2])))
    try:
        with torch.no_grad():
            pg._module(IDS)
    finally:
        for handle in handles:
            handle.remove()
    return kept[0][0] if isinstance(kept[0], tuple) else kept[0]


@pytest.mark.parametrize(
    ("score", "wanted"),
    [
        (3, lambda value: value[..., [3]]),
        ([0, -1], lambda value: value[..., [0, -1]]),
        (DIRECTIONS[0], lambda value: value @ DIRECTIONS[:1].T),
        (DIRECTIONS, lambda value: value @ DIRECTIONS.T),
        (lambda value: value.norm(dim=-1), lambda value: value.norm(dim=-1, keepdim=True)),
        (lambda value: value.relu()[..., :4], lambda value: value.relu()[..., :4]),
    ],
    ids=["channel", "channels", "direction", "directions", "function", "latents"],
)
def test_the_numbers_are_those_of_the_value_with_and_without_patches(
    pg: PatchableGraph, score: Any, wanted: Any
) -> None:
    with contextlib.closing(show_tokens(pg, "layers[1].resid_post", score=score)) as view:
        expected = wanted(hidden(pg)).movedim(-1, 0).numpy()
        assert np.allclose(sent(view)[0], expected, atol=1e-5)
        session_of(pg).add(ChosenPatch("layers[1].mlp_out", "zero"))
        view.update()
        changed = wanted(hidden(pg, torch.zeros_like)).movedim(-1, 0).numpy()
        found = sent(view)
        assert np.allclose(found[0], expected, atol=1e-5)
        assert np.allclose(found[1], changed, atol=1e-5)
        assert not np.allclose(found[0], found[1])


def test_the_front_end_does_not_set_what_the_kernel_computes(pg: PatchableGraph) -> None:
    with contextlib.closing(show_tokens(pg, "layers[1].resid_post", score=2)) as view:
        view.set_state({"coloring": {}, "numbers": b""})
        with pytest.raises(traitlets.TraitError):
            view.coloring = {}
        assert np.allclose(sent(view)[0, 0], hidden(pg)[..., 2].numpy(), atol=1e-5)


def test_names_texts_and_what_is_shown_without_scripts(pg: PatchableGraph) -> None:
    texts = [[f"<{at}>" for at in range(5)], [*"abcde"]]
    neurons = "layers[0].mlp.post"
    with contextlib.closing(show_tokens(pg, neurons, score=[1, 2], names=["one", "two"], tokens=texts)) as view:
        assert view.coloring["scores"] == ["one", "two"]
        assert view.coloring["rows"] == texts
        assert "&lt;3&gt;" in str(view._static_html())
        assert repr(view).endswith(": 2 scores of layers[0].mlp.post, 2 x 5>")


@pytest.mark.parametrize(
    ("path", "options", "error", "match"),
    [
        ("layers[1].resid_post", {}, ExperimentError, r"8 numbers for each token, its shape is \[2, 5, 8\]"),
        ("layers[1].resid_post", {"score": 8}, ExperimentError, "not a channel 8"),
        ("layers[1].resid_post", {"score": torch.ones(7)}, ExperimentError, r"\[7\] does not fit"),
        ("layers[1].resid_post", {"score": lambda value: value[0]}, ExperimentError, r"shape \[5, 8\]"),
        ("layers[1].resid_post", {"score": [1, 2], "names": ["a"]}, ExperimentError, "1 names= for 2"),
        ("layers[1].attn.pattern", {"score": 0}, ExperimentError, "has no positions"),
        ("layers[9].resid_post", {"score": 0}, ChosenPatchError, "layers"),
    ],
)
def test_what_does_not_fit_is_refused(
    pg: PatchableGraph, path: str, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        show_tokens(pg, path, **options)
