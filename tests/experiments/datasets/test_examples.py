"""Experiments over datasets are means of the same experiments on each batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray
from torch import Tensor

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments import (
    LogitDifference,
    ablate,
    attribute,
    causal_trace,
    direct_logit_attribution,
    head_scores,
    mean_values,
    path_patch,
    record_to,
)

HEADS = "layers[*].attn.heads[*].z"
METRIC = LogitDifference(3, 4)
CLEAN, OTHER = torch.randint(0, 20, (2, 7, 5), generator=torch.Generator().manual_seed(0))


def build() -> PatchableGraph:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=20, initializer_range=0.5, bos_token_id=0, eos_token_id=0
    )
    return PatchableGraph(GPT2LMHeadModel(config).eval(), CLEAN)


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return build()


# Each: the experiment on clean and corrupted inputs, which are datasets or those of one batch.
PAIRS: dict[str, Callable[..., Any]] = {
    "ablate": lambda pg, one, _, **more: ablate(pg, HEADS, one, metric=METRIC, **more),
    "resample": lambda pg, one, other, **more: ablate(
        pg, HEADS, one, metric=METRIC, method="resample", reference=other, **more
    ),
    "causal_trace": lambda pg, one, other, **more: causal_trace(
        pg, one, other, "layers[*].resid_post", None, METRIC, **more
    ),
    "path_patch": lambda pg, one, other, **more: path_patch(
        pg, "layers[0].attn.heads[*].z", None, one, other, METRIC, **more
    ),
    "attribute": lambda pg, one, other, **more: attribute(pg, METRIC, one, other, paths=HEADS, **more),
    "head_scores": lambda pg, one, _, **more: head_scores(pg, one, **more),
}


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "cut") for name in PAIRS), ("causal_trace", "list"), ("path_patch", "loader")]
)
def test_a_dataset_gives_the_mean_of_its_batches(pg: PatchableGraph, name: str, form: str) -> None:
    run, size = PAIRS[name], 3
    batches = [*zip(CLEAN.split(size), OTHER.split(size), strict=True)]
    alone = [run(pg, one, other, progress=False) for one, other in batches]
    numbers = np.stack([each.values for each in alone])
    weights = np.array([len(one) for one, _ in batches]).reshape([-1] + [1] * (numbers.ndim - 1)) * ~np.isnan(numbers)
    expected = (np.nan_to_num(numbers) * weights).sum(0) / weights.sum(0)
    given: tuple[Any, Any] = (CLEAN, OTHER)
    more: dict[str, Any] = {"batch_size": size}
    if form == "list":
        given, more = ([one for one, _ in batches], [other for _, other in batches]), {}
    elif form == "loader":
        given, more = tuple(torch.utils.data.DataLoader(each, batch_size=size) for each in given), {}
    found = run(pg, *given, progress=False, **more)
    np.testing.assert_allclose(found.values, expected, rtol=1e-5, atol=1e-6)
    xarray.testing.assert_equal(found.coords.to_dataset().drop_vars(["low", "high"]), alone[0].coords.to_dataset())
    kept = run(pg, *given, progress=False, keep_examples=True, **more)
    assert kept.dims[0] == "example"
    np.testing.assert_allclose(kept.values, numbers, rtol=1e-5, atol=1e-6)
    if "baseline" in found.attrs:
        baselines = [each.attrs["baseline"] for each in alone]
        assert found.attrs["baseline"] == pytest.approx(np.average(baselines, weights=[3, 3, 1]), rel=1e-5)


def test_the_interval_holds_the_middle_of_resampled_means(pg: PatchableGraph) -> None:
    kept = ablate(pg, HEADS, CLEAN, metric=METRIC, batch_size=1, keep_examples=True, progress=False)
    found = ablate(pg, HEADS, CLEAN, metric=METRIC, batch_size=1, progress=False)
    rows = np.random.default_rng(5).integers(0, len(CLEAN), (20_000, len(CLEAN)))
    low, high = np.percentile(kept.values[rows].mean(1), [2.5, 97.5], axis=0)
    scale = (high - low).max()
    np.testing.assert_allclose(found.low.values, low, atol=0.1 * scale)
    np.testing.assert_allclose(found.high.values, high, atol=0.1 * scale)
    one = ablate(pg, HEADS, [CLEAN], metric=METRIC, progress=False)
    assert np.isnan(one.low).all()
    assert np.isnan(one.high).all()


def test_rows_of_a_result_are_examples(pg: PatchableGraph) -> None:
    targets = CLEAN[:, 0]
    whole = direct_logit_attribution(pg, CLEAN, target=targets, by="head")
    found = direct_logit_attribution(pg, CLEAN, target=targets, by="head", batch_size=3, progress=False)
    for name, part in whole.items():
        np.testing.assert_allclose(found[name].values, part.mean("batch").values, atol=1e-6)
        assert f"{name}_low" in found.coords
    batches = [*map(list, zip(CLEAN.split(3), targets.split(3), strict=True))]
    given = [one for one, _ in batches], [target for _, target in batches]
    other = direct_logit_attribution(pg, given[0], target=given[1], by="head", progress=False, keep_examples=True)
    np.testing.assert_allclose(other["attn"].transpose(*whole["attn"].rename(batch="example").dims), whole["attn"])


def _ends(batches: list[Tensor]) -> Iterator[Tensor]:
    yield from batches


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (lambda pg: causal_trace(pg, [CLEAN], [OTHER, OTHER], HEADS, False, METRIC), r"\['clean'\]"),
        (lambda pg: ablate(pg, HEADS, [CLEAN, CLEAN], metric=[METRIC]), r"\['metric'\]"),
        (lambda pg: ablate(pg, HEADS, [], metric=METRIC), "no examples"),
        (lambda pg: ablate(pg, HEADS, CLEAN, metric=METRIC, keep_examples=True), "keep_examples"),
        (lambda pg: ablate(pg, HEADS, [CLEAN], metric=METRIC, checkpoint="folder"), "checkpoint="),
        (lambda pg: ablate(pg, HEADS, _ends([CLEAN]), metric=METRIC, batch_size=2), "batch_size="),
        (lambda pg: mean_values(pg, HEADS, SimpleNamespace(ids=CLEAN)), r"SimpleNamespace .*\[inputs\]"),
        (lambda pg: ablate(pg, HEADS, [CLEAN, CLEAN[:, :4]], metric=METRIC, positions=True), "positions="),
    ],
)
def test_what_does_not_fit_is_an_error(pg: PatchableGraph, run: Callable[..., Any], match: str) -> None:
    with pytest.raises(ExperimentError, match=match):
        functools.partial(run, pg)()


def test_positions_that_count_from_the_end_are_those_of_batches_of_any_length(pg: PatchableGraph) -> None:
    pairs = [(CLEAN[:2], OTHER[:2]), (CLEAN[2:5, :4], OTHER[2:5, :4])]
    clean, other = ([pair[side] for pair in pairs] for side in (0, 1))
    options: dict[str, Any] = {"positions": [-1, 0], "progress": False}
    found = [
        (
            ablate(pg, HEADS, clean, metric=METRIC, **options),
            [ablate(pg, HEADS, a, metric=METRIC, **options) for a in clean],
        ),
        (
            causal_trace(pg, clean, other, HEADS, metric=METRIC, **options),
            [causal_trace(pg, a, b, HEADS, metric=METRIC, **options) for a, b in pairs],
        ),
        (
            attribute(pg, METRIC, clean, other, paths=HEADS, **options),
            [attribute(pg, METRIC, a, b, paths=HEADS, positions=[-1, 0]) for a, b in pairs],
        ),
    ]
    for whole, (first, second) in found:
        assert whole.coords["position"].values.tolist() == [-1, 0]
        assert np.allclose(whole.values, (2 * first.values + 3 * second.values) / 5, atol=1e-6)


def test_datasets_of_hugging_face(pg: PatchableGraph, tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"input_ids": CLEAN.tolist(), "attention_mask": torch.ones_like(CLEAN).tolist(), "label": ["a"] * 7}
    whole = datasets.Dataset.from_dict(columns)
    tensors = {"input_ids": CLEAN, "attention_mask": torch.ones_like(CLEAN)}
    for given in (whole, whole.with_format("numpy"), whole.to_iterable_dataset()):
        found = ablate(pg, HEADS, given, metric=METRIC, batch_size=3, progress=False)
        xarray.testing.assert_equal(found, ablate(pg, HEADS, tensors, metric=METRIC, batch_size=3, progress=False))
    store = record_to(pg, tmp_path, "layers[1].resid_post", whole, batch_size=3)
    assert torch.equal(
        store["layers[1].resid_post"][:], pg.record("layers[1].resid_post", CLEAN)["resid_post", 1].flatten(0, 1)
    )
    ragged = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    for bad, size in ((whole, None), (ragged, 2), (whole.select_columns("label"), 2)):
        with pytest.raises(ExperimentError, match="batch_size=|columns"):
            ablate(pg, HEADS, bad, metric=METRIC, batch_size=size, progress=False)
