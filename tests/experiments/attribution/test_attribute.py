"""`attribute`: the scores of all nodes, against plain torch, exact patching and finite differences."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import CustomPatch, PatchableGraph, ReplacePatch, UnknownPathError, ZeroPatch
from graphpatch_notebook.errors import ExperimentError, GraphPatchWarning
from graphpatch_notebook.experiments import attribute, attribute_edges
from graphpatch_notebook.experiments.attribution.gradient_runs import Choices
from tests.zoo import case_by_name
from tests.zoo.submodules import Submodules
from tests.zoo.transformers_models import with_cache


class Linear(Submodules, first=(4, 6), second=partial(nn.Linear, 6, 4, bias=False), dropout=partial(nn.Dropout, 0.5)):
    """Linear in every one of its values, with views, values of several uses, and writes in place."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.first(x))
        left, right = hidden.split(3, dim=-1)
        hidden = torch.cat([right * 2.0, left + right], dim=-1)
        hidden += self.first(x)
        hidden[:, 0] *= 3.0
        out = self.second(hidden) + x
        return out.contiguous().view(-1)


def exact(pg: PatchableGraph, metric: Callable[[Any], Tensor], clean: Tensor, corrupted: Tensor, path: str) -> float:
    """Returns what putting the clean value into the corrupted run really does."""
    values: list[Tensor] = []

    def kept(value: Tensor) -> Tensor:
        values.append(value.clone())
        return value

    with torch.no_grad():
        with pg.patch({path: CustomPatch(custom_op=kept)}):
            pg(clean)
        base = metric(pg(corrupted))
        with pg.patch({path: ReplacePatch(value=values[0])}):
            return float(metric(pg(corrupted)) - base)


def test_linear_models_are_attributed_exactly() -> None:
    torch.manual_seed(0)
    model = Linear().double().eval()
    clean, corrupted = torch.randn(2, 4).double(), torch.randn(2, 4).double()
    weights = torch.randn(8).double()

    def metric(output: Tensor) -> Tensor:
        return output @ weights

    pg = PatchableGraph(model, clean)

    scores = attribute(pg, metric, clean, corrupted)

    # The view in `hidden[:, 0] *= 3.0`: what is written into it goes to `hidden` itself.
    assert list(scores.attrs["skipped"]) == ["getitem"]
    assert scores.sizes["path"] == len(
        [node for node in pg.nodes.values() if node.dtype == torch.float64 and not node.is_size]
    )
    scores = scores.dropna("path")
    expected = [exact(pg, metric, clean, corrupted, path) for path in scores.coords["path"].values.tolist()]
    assert np.allclose(scores.values, expected, rtol=1e-10, atol=1e-12)
    assert np.count_nonzero(scores.values) > 15
    assert scores.attrs["clean"] == pytest.approx(metric(model(clean)).item())
    assert scores.attrs["corrupted"] == pytest.approx(metric(model(corrupted)).item())


@pytest.fixture
def tiny() -> tuple[nn.Module, PatchableGraph, Tensor, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    clean, corrupted = torch.randn(2, 3), torch.randn(2, 3)
    return model, PatchableGraph(model, clean), clean, corrupted


@pytest.mark.parametrize(
    "metric",
    [
        lambda output: output.argmax(),
        lambda output: output.sum().item(),
        lambda output: output.detach().sum(),
        lambda output: output.sum(-1),
    ],
)
def test_metrics_that_have_no_gradient(tiny: Any, metric: Any) -> None:
    _, pg, clean, corrupted = tiny
    with pytest.raises(ExperimentError, match="gradient"):
        attribute(pg, metric, clean, corrupted)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"method": "exact"}, "exact"),
        ({"method": "integrated", "steps": 0}, "steps"),
        ({"method": "integrated", "points": "middle"}, "points"),
        ({"paths": ["sub_0.outptu"]}, "sub_0"),
        ({"positions": True}, "position_dim="),
    ],
)
def test_arguments_that_cannot_be(tiny: Any, options: dict[str, Any], named: str) -> None:
    _, pg, clean, corrupted = tiny
    with pytest.raises((ExperimentError, UnknownPathError), match=named):
        attribute(pg, torch.sum, clean, corrupted, **options)


@pytest.mark.parametrize(
    ("points", "fractions"),
    [("left", [0, 1 / 3, 2 / 3]), ("midpoint", [1 / 6, 1 / 2, 5 / 6]), ("right", [1 / 3, 2 / 3, 1])],
)
def test_points_of_integrated_gradients_are_those_of_plain_torch(points: Any, fractions: list[float]) -> None:
    """Nodes and edges have the means of the gradients of runs whose embeddings are interpolated by a hook."""
    case = case_by_name("gpt2-sdpa")
    clean, corrupted = torch.tensor([[5, 17, 40, 61]]), torch.tensor([[5, 33, 40, 12]])
    model = case.build().double()

    def metric(output: Any) -> Tensor:
        return output.logits[:, -1, 7].mean().exp()

    def values(ids: Tensor, embedded: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
        kept: dict[str, Tensor] = {}
        handles = [
            model.transformer.wte.register_forward_hook(lambda *_: embedded),
            model.transformer.h[0].mlp.register_forward_hook(lambda _, __, out: kept.__setitem__("mlp", out)),
            model.transformer.ln_f.register_forward_pre_hook(lambda _, args: kept.__setitem__("final", args[0])),
        ]
        result = metric(model(ids))
        for handle in handles:
            handle.remove()
        return kept, result

    ends = [model.transformer.wte(ids).detach() for ids in (corrupted, clean)]
    change = (values(clean)[0]["mlp"] - values(corrupted)[0]["mlp"]).detach()
    node = edge = torch.tensor(0.0)
    for fraction in fractions:
        kept, result = values(corrupted, torch.lerp(*ends, fraction).requires_grad_())
        by_mlp, by_final = torch.autograd.grad(result, [kept["mlp"], kept["final"]])
        node, edge = node + (change * by_mlp).sum() / 3, edge + (change * by_final).sum() / 3

    pg, options = PatchableGraph(model, clean), {"method": "integrated", "steps": 3, "points": points}
    scores = attribute(pg, metric, clean, corrupted, paths=["layers[0].mlp_out"], **options)
    edges = attribute_edges(pg, metric, clean, corrupted, **options)

    assert scores.item() == pytest.approx(node.item(), rel=1e-9)
    assert edges.sel(sender="layers[0].mlp_out", receiver="@logits").item() == pytest.approx(edge.item(), rel=1e-9)
    assert scores.attrs["points"] == edges.attrs["points"] == points


@pytest.mark.parametrize(("method", "frozen"), [("gradient", True), ("integrated", False), ("secant", False)])
def test_groups_that_fit_in_memory_give_the_same_scores(method: Any, frozen: bool) -> None:
    case = case_by_name("llama-sdpa")
    model = case.build().requires_grad_(not frozen)
    clean, corrupted = torch.tensor([[5, 17, 40, 61]]), torch.tensor([[5, 33, 40, 12]])
    pg = PatchableGraph(model, clean)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))

    def metric(output: Any) -> Tensor:
        return output.logits[:, -1, 7].mean()

    expected = attribute(pg, metric, clean, corrupted, method=method, steps=2)
    in_one_go, calls[:] = len(calls), []
    found = attribute(pg, metric, clean, corrupted, method=method, steps=2, max_bytes=20_000)

    assert in_one_go == (4 if method == "integrated" else 2)
    assert (len(calls) > 2 * in_one_go) is (method != "integrated")
    assert found.equals(expected)


def test_values_without_a_score_are_named() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor, is_long: bool = False) -> Tensor:
            rotated = torch.fft.fft(x)
            unused = x * 5.0
            with torch.no_grad():
                constant = x.sum()
            counted = x.relu().count_nonzero()
            long = x.new_zeros(int(counted) + 1) + x.mean()
            if not is_long:
                short = x * 3.0
                x = short + 1.0
            masked = torch.where(x > 0, x, -torch.inf).softmax(-1)
            return masked.sum() * rotated.real.sum() + long.mean() + constant.detach() + unused.detach().sum()

    clean, corrupted = torch.tensor([[1.0, 2.0]]), torch.tensor([[-1.0, 3.0]])
    pg = PatchableGraph(Odd(), clean)
    chosen = ["rotated", "counted", "unused", "constant", "long", "short", "masked", "x"]

    scores = attribute(pg, torch.sum, clean, corrupted, paths=chosen)
    skipped = scores.attrs["skipped"]

    assert list(skipped) == ["rotated", "counted", "unused", "constant", "long"]
    assert skipped["rotated"] == "of dtype complex64: scores are of floating-point values"
    assert skipped["counted"].startswith("of dtype int64")
    assert "no gradient reaches it" in skipped["unused"]
    assert "only through operations without a gradient" in skipped["constant"]
    assert "(3,)" in skipped["long"]
    assert scores.isnull().values.tolist() == [path in skipped for path in chosen]

    for is_long, why in (((True, True), "was not computed"), ((False, True), "0 times in the corrupted run")):
        inputs = [{"x": x, "is_long": long} for x, long in zip((clean, corrupted), is_long, strict=True)]
        assert why in attribute(pg, torch.sum, *inputs).attrs["skipped"]["short"]


def test_patches_that_are_active_belong_to_both_runs(tiny: Any) -> None:
    _, pg, clean, corrupted = tiny
    with pg.patch({"sub_1.output": ZeroPatch(slice=(slice(None), 0))}):
        scores = attribute(pg, torch.sum, clean, corrupted)
        assert scores.attrs["clean"] == pytest.approx(pg(clean).sum().item())
    free = attribute(pg, torch.sum, clean, corrupted)
    assert scores.sel(path="sub_0.output") != free.sel(path="sub_0.output")


def test_an_edited_graph_is_scored_as_the_model_under_the_same_patches(tiny: Any) -> None:
    _, pg, clean, corrupted = tiny
    patches = {"sub_1.output": ZeroPatch(slice=(slice(None), 0))}
    with pg.patch(patches):
        expected = attribute(pg, torch.sum, clean, corrupted)
    scores = attribute(pg.edit(patches), torch.sum, clean, corrupted)
    for path in ("sub_0.output", "sub_1.output", "output"):
        assert scores.sel(path=path).item() == pytest.approx(expected.sel(path=path).item())
    assert scores.attrs["clean"] == expected.attrs["clean"]


def token_model(name: str = "gpt2-eager") -> nn.Module:
    return case_by_name(name).build().double()


def last_logit(output: Any) -> Tensor:
    return output.logits[:, -1, 7].mean()


def test_positions_after_a_cache_are_refused() -> None:
    model = token_model("llama-sdpa")
    prompt, clean, corrupted = torch.tensor([[5, 17, 40]]), torch.tensor([[61, 23]]), torch.tensor([[61, 9]])
    pg = PatchableGraph(model, prompt)
    with torch.no_grad():
        cache = model(prompt, use_cache=True).past_key_values
    inputs = [{"input_ids": ids, **with_cache(model, cache)} for ids in (clean, corrupted)]
    paths = ["model.embed_tokens.output", "lm_head.output"]
    assert attribute(pg, last_logit, *inputs, paths=paths).notnull().all()
    with pytest.raises(ExperimentError, match="cache"):
        attribute(pg, last_logit, *inputs, positions=True, paths=paths)


def test_scores_under_activation_checkpointing_are_those_without_it_or_unknown() -> None:
    clean, corrupted = torch.tensor([[5, 17, 40]]), torch.tensor([[61, 23, 9]])
    plain, checkpointed = token_model(), token_model()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed.train()
    for module in checkpointed.modules():
        module.p = 0.0  # of dropout
    expected, scores = (
        attribute(PatchableGraph(model, clean, use_cache=False), last_logit, clean, corrupted)
        for model in (plain, checkpointed)
    )
    unknown = scores.path[scores.isnull()].values.tolist()
    assert set(unknown) <= set(scores.attrs["skipped"])
    assert {"transformer.h_0.output", "transformer.h_0.mlp.act.output"}.isdisjoint(unknown)
    known = [path for path in expected.path.values if path not in unknown]
    assert len(known) > len(unknown)
    np.testing.assert_allclose(scores.sel(path=known), expected.sel(path=known), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("positions", [[2, 6], -7, slice(6, None), slice("a"), "last", False, []])
def test_positions_that_the_sequence_has_not(positions: Any) -> None:
    ids = torch.tensor([[5, 17, 40, 61, 23, 9]])
    model = token_model()
    pg = PatchableGraph(model, ids)
    model.register_forward_pre_hook(never)
    with pytest.raises(ExperimentError, match="positions"):
        attribute(pg, last_logit, ids, ids, positions=positions)


def never(*_: Any) -> Any:
    raise AssertionError("something ran")


@pytest.mark.parametrize(("mode", "frozen"), [(torch.no_grad, False), (torch.inference_mode, True)])
def test_parts_that_run_without_gradients(mode: Any, frozen: bool) -> None:
    """What comes of a frozen encoder is where the runs begin to differ, for the part behind it."""

    class Encoded(Submodules, encoder=[(3, 3), nn.Tanh], head=[(3, 3), nn.Tanh]):
        def forward(self, x: Tensor) -> Tensor:
            with mode():
                features = self.encoder(x)
            return self.head(features + 0.0)

    clean, corrupted = torch.randn(2, 3), torch.randn(2, 3)
    model = Encoded().requires_grad_(not frozen)
    scores = attribute(PatchableGraph(model, clean), torch.sum, clean, corrupted)

    with torch.no_grad():
        before, after = model.encoder(clean), model.encoder(corrupted)
    leaf = after.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model.head(leaf).sum(), leaf)
    assert scores.sel(path="add").item() == pytest.approx(((before - after) * gradient).sum().item(), rel=1e-4)
    assert scores.sel(path="head.output").item() == pytest.approx(scores.clean - scores.corrupted, rel=1e-4)
    skipped = scores.attrs["skipped"]
    assert "encoder.sub_0.linear" in skipped
    assert "head.sub_0.linear" not in skipped
    # What the encoder is given has an effect, but no gradient: no score, rather than a wrong one.
    assert "x" in skipped


@pytest.mark.parametrize("method", ["gradient", "integrated", "secant"])
def test_frozen_models_have_scores_and_models_made_in_inference_mode_an_error(method: Any) -> None:
    def scores(pg: PatchableGraph) -> Any:
        return attribute(pg, torch.sum, torch.ones(1, 3), torch.zeros(1, 3), method=method)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 2))

    frozen = PatchableGraph(made().requires_grad_(False), torch.ones(1, 3))
    expected = scores(PatchableGraph(made(), torch.ones(1, 3)))
    assert scores(frozen).identical(expected)
    with torch.inference_mode():
        assert scores(frozen).identical(expected)
        pg = PatchableGraph(made(), torch.ones(1, 3))
        with pytest.raises(ExperimentError, match=r"0\.weight"):
            scores(pg)
    with pytest.raises(ExperimentError, match=r"0\.weight"):
        scores(pg)


CHOOSING: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: torch.topk(x, 2),
    "topk along a dimension": lambda x: x.topk(2, 0),
    "topk by name": lambda x: x.topk(k=2, dim=1),
    "sort": lambda x: x.sort(descending=True),
    "sort along a dimension": lambda x: torch.sort(x, 0),
    "max": lambda x: x.max(1),
    "max that keeps its dimension": lambda x: torch.max(x, dim=0, keepdim=True),
    "min": lambda x: x.min(-1),
}


@pytest.mark.parametrize("name", CHOOSING)
def test_frozen_choices_are_those_of_the_clean_run_with_values_of_the_corrupted_one(name: str) -> None:
    clean, corrupted = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    choose, choices = CHOOSING[name], Choices("frozen")
    (values, numbers), largest = choose(clean), clean.argmax(1)
    corrupted.requires_grad_()
    with choices.in_run(is_clean=True):
        assert torch.equal(choose(clean)[1], numbers)
        assert torch.equal(clean.argmax(1), largest)
        assert torch.equal(clean.argmax(1), largest)
    with choices.in_run(is_clean=False):
        found = choose(corrupted)
        assert torch.equal(corrupted.argmax(1), largest)
        with pytest.raises(ExperimentError, match="numbers of shape"):
            corrupted[:1].argmax(1)
    assert torch.equal(found[1], numbers)
    assert type(found) is type(choose(clean))
    # Each value is where the clean run found its own: all entries of the clean input differ.
    places = (clean[..., None, None] == values).reshape(20, -1).int().argmax(0)
    assert torch.equal(found[0], corrupted.flatten()[places].view(values.shape))
    (gradient,) = torch.autograd.grad(found[0].sum(), corrupted)
    assert torch.equal(gradient.flatten().nonzero()[:, 0], places.sort().values)
    with Choices("free").in_run(is_clean=False):
        assert torch.equal(choose(corrupted)[1], choose(corrupted.detach())[1])


def test_a_metric_that_fails_leaves_no_warning_about_contexts() -> None:
    x = torch.ones(2, 3)
    pg = PatchableGraph(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), x)

    def metric(_: Tensor) -> Tensor:
        raise KeyError("of the user")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyError, match="of the user"):
            attribute(pg, metric, x, 2 * x)
        gc.collect()
    assert not [each for each in caught if isinstance(each.message, GraphPatchWarning)]
