"""A position means the same values with a cache and without, in whatever node of whatever model it can be told."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    CustomPatch,
    GraphPatchWarning,
    PatchableGraph,
    PatchMapError,
    PatchValueError,
    RecordPatch,
    ZeroPatch,
)
from graphpatch_notebook.inspection.resolution import resolve
from graphpatch_notebook.patchable_graph import captured
from tests.zoo import CASES
from tests.zoo.case import tokens
from tests.zoo.submodules import Submodules
from tests.zoo.values import bit_equal

LENGTH, NEW = 7, 4
EARLY, LATE = 2, LENGTH + 1  # one position of the prompt, and one that a decoding step computes
MODELS = ["gpt2-eager", "gemma3-eager", "falcon-alibi-eager"]
# What is in the llama and the mixtral is in Gemma or DeepSeek, too; the biases of the bloom are those of the falcon.
STOOD_FOR = ["llama-sdpa", "mixtral-eager", "bloom-eager"]


def with_positions(pg: PatchableGraph) -> list[str]:
    """Returns the nodes, of every third one, of which it can be told on entry which dimension is the sequence's."""
    found = []
    for path, node in [*pg.nodes.items()][::3]:  # layers repeat, so that each kind of node is there
        if node.shape is not None:
            with suppress(PatchMapError), pg.patch({path: RecordPatch(positions=[EARLY, LATE])}):
                found.append(path)
    return found


def recorded(pg: PatchableGraph, paths: Iterable[str], use_cache: bool) -> dict[str, list[Tensor]]:
    """Returns what records of the two positions keep, where they can be told in this generation too."""
    left = list(paths)
    while True:
        records = {path: RecordPatch(positions=[EARLY, LATE]) for path in left}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # nodes that a generation does not come to
                with pg.patch(records):
                    pg.generate(
                        tokens(3, LENGTH).clamp(min=3),
                        max_new_tokens=NEW,
                        min_new_tokens=NEW,
                        use_cache=use_cache,
                        pad_token_id=0,
                    )
        except PatchValueError as error:
            refused = re.match("'([^']*)'", str(error))
            assert refused is not None
            left.remove(refused[1])
            continue
        return {path: record.activations for path, record in records.items() if record.activations}


@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in STOOD_FOR)])
def test_positions_with_and_without_a_cache(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    pg = PatchableGraph(case.build(), tokens(3, LENGTH))
    paths = with_positions(pg)
    without = recorded(pg, paths, use_cache=False)
    with_cache = recorded(pg, without, use_cache=True)
    compared = 0
    for path, values in with_cache.items():
        shape = pg.nodes[path].shape
        assert shape is not None
        dims = [dim for dim, size in enumerate(shape) if size == LENGTH]
        if len(dims) != 1 or len(values) < 2:
            continue
        (dim,) = dims
        whole = next((value for value in without[path] if value.shape[dim] == 2), None)
        if whole is None:
            continue
        # What holds the whole sequence at each step (keys) holds the late position together with the early one.
        early, found = values[0], next((v for v in values if v.shape[dim] == 2), values[1]).narrow(dim, -1, 1)
        expected = whole.narrow(dim, 0, 1), whole.narrow(dim, 1, 1)
        if early.shape == expected[0].shape and found.shape == expected[1].shape and early.is_floating_point():
            torch.testing.assert_close(early, expected[0], rtol=1e-3, atol=1e-4, msg=f"{path}, position {EARLY}")
            torch.testing.assert_close(found, expected[1], rtol=1e-3, atol=1e-4, msg=f"{path}, position {LATE}")
            compared += 1
    assert compared > len(paths) / 2


class Sorting(Submodules, linear=(4, 4)):
    """Works on the rows in the order of the tokens, and puts them back."""

    def forward(self, hidden: Tensor, order: Tensor) -> Tensor:
        return self.linear(hidden[order.argsort()])[order.argsort().argsort()]


class Routed(Submodules, embedding=partial(nn.Embedding, 20, 4), expert=(4, 4), sorting=Sorting):
    """Gives some tokens to an expert, twice; each position has its effect on itself only."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        is_even = input_ids % 2 == 0
        scattered = hidden.masked_scatter(is_even.unsqueeze(-1), self.expert(hidden[is_even]))
        restored = self.sorting(scattered[0], input_ids[0]) + scattered
        row, column = torch.where(is_even)
        put = restored.index_put((row, column), self.expert(restored[row, column]))
        return put * 2


def test_rows_that_are_chosen_by_values_have_no_positions() -> None:
    """As many rows as the sequence has tokens, by accident: row 1 is not the token at position 1."""
    model = Routed()
    ids = torch.tensor([[2, 4, 1, 3, 5, 7, 9], [1, 1, 6, 6, 6, 1, 1], [3, 8, 8, 3, 3, 3, 3]])
    pg = PatchableGraph(model, input_ids=ids)
    chosen = [path for path in pg.nodes if path.startswith(("expert_", "sorting.linear")) and "ias" not in path]
    for path in [path for path in chosen if "weight" not in path]:
        with (
            pytest.raises(PatchMapError, match=re.escape(repr(path))),
            pg.patch({path: ZeroPatch(positions=1)}),
        ):
            pass
    plain = model(ids)
    for path in ("embedding.output", "scattered", "sorting.hidden", "sorting.output", "restored", "put", "output"):
        with pg.patch({path: ZeroPatch(positions=1)}):
            found = pg(ids)
        others = [position for position in range(LENGTH) if position != 1]
        assert bit_equal(found[:, others], plain[:, others]) is None, path
        assert bit_equal(found[:, 1], plain[:, 1]) is not None, path


@pytest.mark.parametrize(
    "name",
    [
        *["gpt2-sdpa", "deepseek-v3-eager", "bert-eager", "t5-eager"],
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama-eager", "whisper-sdpa")),
    ],
)
def test_patches_that_change_nothing_at_some_positions(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    model = case.build()
    call, same_call = case.example(), case.example()
    pg = PatchableGraph(model, *case.example().args, **case.example().kwargs)
    patches = {path: CustomPatch(custom_op=torch.clone, positions=[0, 2]) for path in with_positions(pg)}
    assert len(patches) > len(pg.nodes) / 12
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".aliased view", GraphPatchWarning)  # DeepSeek fills views in later
        # Values inside a fused call are left out: its steps equal it within rounding only.
        paths = [path for path in patches if not (is_filled_later(pg, path) or pg.nodes[path].opens)]
        with pg.patch({path: patches[path] for path in paths}):
            found = same_call.run(pg)
        assert bit_equal(call.run(model), found) is None


def is_filled_later(pg: PatchableGraph, path: str) -> bool:
    """Whether a patch on this node cuts a view off from the tensor that the model fills in through it."""
    return resolve(captured(pg).root, path).node.is_view_filled_later


@pytest.mark.parametrize("kept", [slice(0, 1), slice(0, 0)], ids=["one position", "none"])
def test_a_function_at_some_positions_keeps_the_shape(kept: slice) -> None:
    """What has one position could be broadcast to both."""
    model = next(case for case in CASES if case.name == "gpt2-eager").build()
    pg = PatchableGraph(model, tokens(3, LENGTH))
    patch = CustomPatch(lambda value: value[:, kept], positions=[EARLY, 3])
    with pytest.raises(PatchValueError, match="'layers\\[0\\].resid_post'"), pg.patch({"layers[0].resid_post": patch}):
        pg(tokens(3, LENGTH))
