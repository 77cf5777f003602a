"""Interventions: the same numbers and gradients as by plain hooks; trained, they find what a model was built on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoTokenizer, GPT2LMHeadModel

from graphpatch_notebook import (
    CustomPatch,
    ExperimentError,
    PatchableGraph,
    UnknownPathError,
    ZeroPatch,
)
from graphpatch_notebook.experiments import DAS, L0Mask, LoReFT, LowRankSteering, fit, intervene
from tests.hooks import registered
from tests.tiny_models import gpt2

# -- hierarchical equality ---------------------------------------------------------------------------------------------


def test_masks_close_what_a_model_does_not_use() -> None:
    torch.manual_seed(0)
    weight = torch.tensor([2.0, 0, -1.0, 0, 0, 1.5])
    model = nn.Sequential(nn.Identity(), nn.Linear(6, 1, bias=False)).requires_grad_(False)
    model[1].weight.copy_(weight)
    pg, mask = PatchableGraph(model, torch.ones(1, 6)), {"sub_0.output": L0Mask(6, penalty=0.05)}
    batches = [(x, torch.randn(64, 6), x @ weight) for x in torch.randn(400, 64, 6)]
    fit(pg, mask, batches, lambda output, target: (output[:, 0] - target).square().mean(), lr=0.05)
    assert mask["sub_0.output"].gates.tolist() == [1, 0, 1, 0, 0, 1]
    base, source, _ = batches[0]
    kept = intervene(pg, mask, base, source)
    assert torch.allclose(kept, model(torch.where(weight != 0, base, source)), atol=1e-5)


def test_gates_have_the_hard_concrete_distribution() -> None:
    torch.manual_seed(0)
    mask = L0Mask(3, penalty=1.0)
    mask.logits.data = torch.tensor([-1.0, 0.5, 2.0])
    drawn = torch.stack([mask(torch.ones(3), torch.zeros(3)) for _ in range(4000)]).detach()
    assert mask.penalty().item() == pytest.approx((drawn > 0).float().mean(0).sum().item(), abs=0.05)
    uniform = torch.rand(4000, 3)
    concrete = torch.sigmoid((uniform.log() - (1 - uniform).log() + mask.logits) / (2 / 3)).detach()
    expected = (concrete * 1.2 - 0.1).clamp(0, 1)
    assert torch.allclose(drawn.mean(0), expected.mean(0), atol=0.03)
    assert torch.allclose((drawn == 1).float().mean(0), (expected == 1).float().mean(0), atol=0.03)


# -- against hooks -----------------------------------------------------------------------------------------------------

IDS = torch.arange(15).reshape(3, 5)
OTHER = torch.arange(30, 48).reshape(3, 6)
BLOCK, HEAD = "layers[1].resid_post", "layers[1].attn.heads[1].z"


def last_hidden(model: Any, ids: Tensor, path: str) -> Tensor:
    """The value at one of the two paths by a plain hook, as (batch, positions, channels)."""
    found: list[Tensor] = []
    block = model.transformer.h[1]
    if path == BLOCK:
        hook = block.register_forward_hook(lambda _, __, out: found.append(out))
    else:
        hook = block.attn.c_proj.register_forward_pre_hook(lambda _, args: found.append(args[0][..., 8:16]))
    with registered([hook]), torch.no_grad():
        model(ids)
    return found[0]


def by_hooks(model: Any, ids: Tensor, path: str, change: Any) -> Tensor:
    """Logits with the value at the path changed by a function."""
    block = model.transformer.h[1]
    if path == BLOCK:
        hook = block.register_forward_hook(lambda _, __, out: change(out.clone()))
    else:

        def before(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            return (torch.cat([args[0][..., :8], change(args[0][..., 8:16].clone()), args[0][..., 16:]], -1),)

        hook = block.attn.c_proj.register_forward_pre_hook(before)
    with registered([hook]):
        return model(ids).logits


PLACES: list[tuple[Any, Any, Tensor, Tensor]] = [
    (2, None, torch.full((3, 1), 2), torch.full((3, 1), 2)),
    (-1, None, torch.full((3, 1), 4), torch.full((3, 1), 5)),
    ([3, 0], [1, 5], torch.tensor([[3, 0]] * 3), torch.tensor([[1, 5]] * 3)),
    (slice(1, 3), range(3, 5), torch.tensor([[1, 2]] * 3), torch.tensor([[3, 4]] * 3)),
    ([[0], [3], [-1]], [[1], [1], [2]], torch.tensor([[0], [3], [4]]), torch.tensor([[1], [1], [2]])),
]


@pytest.mark.parametrize("path", [BLOCK, HEAD])
@pytest.mark.parametrize(("positions", "source_positions", "columns", "source_columns"), PLACES)
def test_positions_of_the_base_and_of_sources_are_those_of_hooks(
    path: str, positions: Any, source_positions: Any, columns: Tensor, source_columns: Tensor
) -> None:
    model, rows = gpt2(heads=4, width=32), torch.arange(3)[:, None]
    das = DAS(32 if path == BLOCK else 8, (2, 3))
    given = [last_hidden(model, ids, path)[rows, source_columns] for ids in (OTHER, OTHER.flip(0))]

    def change(value: Tensor) -> Tensor:
        value[rows, columns] = das(value[rows, columns], *given)
        return value

    expected = by_hooks(model, IDS, path, change)
    pg = PatchableGraph(model, IDS)
    places = {"positions": positions, "source_positions": source_positions}
    found = intervene(pg, {path: das}, IDS, OTHER, OTHER.flip(0), **places).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, model(IDS).logits, atol=1e-4)


@pytest.mark.parametrize("path", [BLOCK, HEAD])
@pytest.mark.parametrize("positions", [None, [-1, 2]])
def test_training_takes_the_steps_of_a_loop_with_hooks(path: str, positions: Any) -> None:
    model, target = gpt2(heads=4, width=32), torch.tensor([7, 8, 9])
    torch.manual_seed(0)
    trained, looped = (LoReFT(32 if path == BLOCK else 8, 2) for _ in range(2))
    looped.load_state_dict(trained.state_dict())
    optimizer, expected = torch.optim.SGD(looped.parameters(), lr=0.1), []

    def change(value: Tensor) -> Tensor:
        if positions is None:
            return looped(value)
        return torch.cat([value[:, :2], looped(value[:, 2:3]), value[:, 3:4], looped(value[:, 4:])], 1)

    for _ in range(3):
        optimizer.zero_grad()
        loss = cross_entropy(by_hooks(model, IDS, path, change)[:, -1], target)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    model.zero_grad()
    pg = PatchableGraph(model, IDS)
    sgd = torch.optim.SGD(trained.parameters(), lr=0.1)
    batch = {"base": IDS, "target": target, "positions": positions}
    found = fit(
        pg, {path: trained}, [batch], lambda out, y: cross_entropy(out.logits[:, -1], y), epochs=3, optimizer=sgd
    )
    assert found == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0]
    for one, other in zip(trained.parameters(), looped.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert not trained.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_several_values_have_interventions_of_their_own_inside_of_other_patches() -> None:
    model = gpt2(heads=4, width=32)
    pg = PatchableGraph(model, IDS)
    interventions = {"layers[0].attn.heads[*].z": L0Mask(), "layers[1].mlp_out": LowRankSteering(32, 1)}
    with pg.patch({"layers[1].mlp_out": ZeroPatch()}):
        by_masks = intervene(pg, {name: each.eval() for name, each in interventions.items()}, IDS, OTHER[:, :5])
        assert torch.allclose(by_masks.logits, pg(IDS).logits, atol=1e-5)
        interventions["layers[0].attn.heads[*].z"].logits.data.fill_(-9.0)  # closed: all heads are those of the source
        closed = intervene(pg, dict([*interventions.items()][:1]), IDS, OTHER[:, :5]).logits
        source = pg.record("layers[0].attn.z", OTHER[:, :5])["layers[0].attn.z"]
        with pg.patch({"layers[0].attn.z": CustomPatch(lambda _: source)}):
            assert torch.allclose(closed, pg(IDS).logits, atol=1e-5)


def test_values_in_half_precision_are_changed_in_that_of_the_parameters() -> None:
    pg, das = PatchableGraph(gpt2(heads=4, width=32).bfloat16(), IDS), DAS(32, 32)
    swapped = intervene(pg, {BLOCK: das}, IDS, OTHER[:, :5]).logits
    assert swapped.dtype == torch.bfloat16
    assert torch.allclose(swapped, pg(OTHER[:, :5]).logits, atol=0.02)


# -- texts and batches -------------------------------------------------------------------------------------------------

FOLDER = Path(__file__).parents[3] / "examples" / "indirect_objects_model"
MODEL = GPT2LMHeadModel.from_pretrained(FOLDER).eval()
BASE = ["then Mary and John went home and then Mary gave it to", "so Mary met John"]
SOURCE = ["then Mary and John went home and then John gave it to", "when Tom met Emma at the park"]


@pytest.fixture(scope="module")
def graph() -> PatchableGraph:
    return PatchableGraph(MODEL, BASE, tokenizer=AutoTokenizer.from_pretrained(FOLDER))


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_end_of_texts_is_before_their_padding(
    graph: PatchableGraph, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph.tokenizer, "padding_side", side)
    found = intervene(graph, {"layers[3].resid_post": DAS(64, 64)}, BASE, SOURCE, positions=-1).logits
    for row, base, source in zip(found, BASE, SOURCE, strict=True):
        length = len(graph.to_tokens(base)[0])
        own = row[-length:] if side == "left" else row[:length]
        assert torch.allclose(own[-1], graph(source).logits[0, -1], atol=1e-3)
        assert torch.allclose(own[:-1], graph(base).logits[0, :-1], atol=1e-3)


def test_batches_of_data_loaders_are_read_in_each_epoch(graph: PatchableGraph) -> None:
    mary = torch.tensor([graph.to_single_token("Mary")] * 2)

    def loss(output: Any, target: Tensor) -> Tensor:
        return cross_entropy(output.logits[:, -1], target)

    of_texts = [{"base": BASE[0], "sources": [SOURCE[0]], "target": mary[0], "positions": torch.tensor([-1])}] * 3
    of_tokens = TensorDataset(*(graph.to_tokens([text] * 3) for text in (BASE[0], SOURCE[0])), mary[[0, 0, 0]])
    first = []
    for dataset in (DataLoader(of_texts, batch_size=2), DataLoader(of_tokens, batch_size=2)):
        torch.manual_seed(0)
        das = {"layers[3].resid_post": DAS(64, 8)}
        losses = fit(graph, das, dataset, loss, epochs=3, positions=0 if len(first) == 0 else -1, lr=0.01)
        assert len(losses) == 6
        assert losses[-1] < losses[0]
        first.append(losses[0])
    assert first[0] == pytest.approx(first[1], abs=1e-5)


# -- errors ------------------------------------------------------------------------------------------------------------


PG = PatchableGraph(gpt2(heads=4, width=32).requires_grad_(False), IDS)


def changed(module: Any, *sources: Any, path: str = BLOCK, **positions: Any) -> Any:
    return lambda: intervene(PG, {path: module}, IDS, *sources, **positions)


def trained(dataset: Any, module: Any = None, loss: Any = lambda output, _: output.logits.sum()) -> Any:
    return lambda: fit(PG, {BLOCK: LoReFT(32, 1) if module is None else module}, dataset, loss)


OF_EACH_ROW = {"base": IDS, "target": 0, "positions": torch.tensor([0, 1, 2])}
INVALID: list[tuple[type[Exception], str, Any]] = [
    (UnknownPathError, r"layers\[7\]", changed(LoReFT(32, 1), path="layers[7].mlp_out")),
    (ExperimentError, r"layers\[1\].resid_post", changed(abs)),
    (ValueError, r"(?s)\(3, 5, 32\).*\(3, 6, 32\).*layers\[1\]", changed(DAS(32, 1), OTHER)),
    (ValueError, r"(?s)1 source.*layers\[1\]", changed(DAS(32, 1))),
    (ValueError, r"16 channels.*\(3, 5, 32\)", changed(LoReFT(16, 1))),
    (ValueError, r"\(5,\).*\(3, 5, 32\)", changed(L0Mask(5))),
    (ValueError, r"\(3, 5, 32\).*\(3, 5, 4\)", changed(nn.Linear(32, 4))),
    (ExperimentError, "row 0 has 5 positions", changed(LoReFT(32, 1), positions=5)),
    (ExperimentError, "row 0 has 5 positions", changed(LoReFT(32, 1), positions=[-6])),
    (ExperimentError, "3 rows", changed(LoReFT(32, 1), positions=[[1], [2]])),
    (ExperimentError, "3 rows", changed(LoReFT(32, 1), positions=[[1], [2], [3, 4]])),
    (ExperimentError, "positions", changed(LoReFT(32, 1), positions="last")),
    (ValueError, "4 channels", lambda: DAS(4, (3, 2))),
    (ExperimentError, "nothing to train", trained([(IDS, IDS)], nn.Tanh())),
    (ExperimentError, "nothing to train", trained([])),
    (ExperimentError, "iterator", trained(iter([(IDS, IDS)]))),
    (ExperimentError, "Tensor", trained([IDS])),
    (ExperimentError, "label", trained([{"base": IDS, "label": IDS}])),
    (ExperimentError, r"\(batch, 1\)", trained([OF_EACH_ROW])),
    (ExperimentError, r"\(3, 5, 50\)", trained([(IDS, IDS)], loss=lambda output, _: output.logits)),
    (ExperimentError, "scalar", trained([(IDS, IDS)], loss=lambda *_: torch.zeros(()))),
    (TypeError, "PatchableGraph", lambda: intervene(gpt2(), {BLOCK: LoReFT(32, 1)}, IDS)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("error", "match", "call"), INVALID)
def test_what_cannot_run_is_an_error_that_names_it(error: type[Exception], match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        call()


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu(), x.tanh()


def test_an_intervention_that_the_loss_does_not_depend_on_is_named() -> None:
    interventions = {"relu": LoReFT(2, 1), "tanh": LoReFT(2, 1)}
    with pytest.raises(ExperimentError, match="'tanh'"):
        fit(
            PatchableGraph(Two(), torch.ones(1, 2)), interventions, [(torch.ones(1, 2), 0)], lambda out, _: out[0].sum()
        )
