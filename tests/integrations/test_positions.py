"""A position means the same values with a cache and without, in whatever node of whatever model it can be told."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from graphpatch_notebook import PatchableGraph, PatchMapError, PatchShapeError, RecordPatch
from tests.zoo import CASES
from tests.zoo.case import tokens

LENGTH, NEW = 7, 4
EARLY, LATE = 2, LENGTH + 1  # one position of the prompt, and one that a decoding step computes
MODELS = ["gpt2-eager", "llama-sdpa", "mixtral-eager", "gemma3-eager", "bloom-eager", "falcon-alibi-eager"]


def with_positions(pg: PatchableGraph) -> list[str]:
    """Returns the nodes of which it can be told, on entry, which dimension runs along the sequence."""
    found = []
    for path, node in pg.nodes.items():
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
        except PatchShapeError as error:
            refused = re.match("'([^']*)'", str(error))
            assert refused is not None
            left.remove(refused[1])
            continue
        return {path: record.activations for path, record in records.items() if record.activations}


@pytest.mark.parametrize("name", MODELS)
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
