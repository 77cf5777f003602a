"""Values over datasets: what is stored, averaged and fitted is what one run of the plain model gives."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from graphpatch_notebook import GraphPatchError, PatchableGraph, ReplacePatch, ZeroPatch
from graphpatch_notebook.errors import ExperimentError, GraphPatchWarning, UnknownPathError
from graphpatch_notebook.experiments import (
    ActivationStore,
    average,
    mean_values,
    record_to,
)
from tests.hooks import registered
from tests.tiny_models import gpt2

LENGTH = 6
STREAMS = "layers[*].resid_post"


def build() -> nn.Module:
    return gpt2(width=8, vocabulary=30)


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return PatchableGraph(build(), torch.arange(LENGTH * 2).reshape(2, LENGTH))


def examples(count: int, seed: int = 1) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 30, (count, LENGTH), generator=random)
    lengths = torch.randint(1, LENGTH + 1, (count,), generator=random)
    return {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < lengths[:, None]).long()}


def tokens(length: int) -> Tensor:
    return torch.ones(1, length, dtype=torch.long)


def streams_of(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The stream after each layer, by plain hooks on one run of all examples."""
    found: list[Tensor] = []
    layers: Any = model.transformer.h  # type: ignore[union-attr]
    hooks = [
        layer.register_forward_hook(lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out))
        for layer in layers
    ]
    with registered(hooks), torch.no_grad():
        model(**inputs)
    return found


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 9), batch=st.integers(1, 5), shard=st.sampled_from([1, 700, 2**28]),
    positions=st.sampled_from([None, [0], [1, 3], slice(2, None), -1, [0, -2], slice(-2, None), slice(1, -1)]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_rows_are_those_of_one_run(
    pg: PatchableGraph,
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    batch: int,
    shard: int,
    positions: Any,
    seed: int,
) -> None:
    inputs, folder = examples(count, seed), tmp_path_factory.mktemp("store")
    mask = inputs["attention_mask"].bool()
    wanted = torch.zeros_like(mask)
    for row, kept in zip(wanted, mask, strict=True):  # negative ones count from the end of the example
        columns = kept.nonzero().flatten().tolist()
        if isinstance(positions, slice):
            row[columns[positions]] = True
        else:
            row[
                columns
                if positions is None
                else [columns[p] for p in np.ravel(positions) if -len(columns) <= p < len(columns)]
            ] = True
    example, position = (mask & wanted).nonzero(as_tuple=True)
    with nullcontext() if len(example) else pytest.warns(GraphPatchWarning, match="the store has no rows"):
        store = record_to(pg, folder, STREAMS, inputs, positions=positions, batch_size=batch, shard_bytes=shard)
    assert (store.example.tolist(), store.position.tolist()) == (example.tolist(), position.tolist())
    assert store.token.tolist() == inputs["input_ids"][example, position].tolist()
    assert store.examples == count
    for layer, expected in enumerate(streams_of(build(), inputs)):
        values = store[f"layers[{layer}].resid_post"]
        rows = expected[example, position]
        assert values.shape == tuple(rows.shape)
        assert torch.allclose(values[:], rows, atol=1e-5)
        assert np.allclose(np.asarray(values), rows, atol=1e-5)
        if len(rows):
            assert torch.equal(torch.cat(list(values.chunks())), values[:])
            assert torch.equal(values[-1], values[:][-1])
            assert torch.equal(values[position == position[0]], values.where(position=int(position[0])))
            assert torch.equal(values.where(example=int(example[-1])), values[:][example == example[-1]])


def test_a_process_that_is_killed_leaves_whole_shards(pg: PatchableGraph, tmp_path: Path) -> None:
    """Which other programs read, as plain safetensors, and after which the next call continues."""
    inputs, folder = examples(8), tmp_path / "store"

    def batches(until: int) -> Iterator[dict[str, Tensor]]:
        for number in range(4):
            if number == until:
                os.kill(os.getpid(), signal.SIGKILL)
            yield {name: value[2 * number : 2 * number + 2] for name, value in inputs.items()}

    given = {"target": record_to, "kwargs": {"shard_bytes": 1}}
    process = multiprocessing.get_context("fork").Process(args=(pg, folder, STREAMS, batches(3)), **given)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert ActivationStore(folder).examples == 6
    (folder / ".000003.safetensors.12ab34cd.tmp").touch()  # as a process that is killed while it writes leaves it
    ran = []
    with pg.transformer.h[0].register_forward_hook(lambda *_: ran.append(1)):
        store = record_to(pg, folder, STREAMS, batches(-1), shard_bytes=1)
    assert len(ran) == 1
    shards = sorted(folder.iterdir())
    assert [each.name for each in shards] == [*(f"{number:06}.safetensors" for number in range(4)), "store.json"]
    for path in store:
        rows = torch.cat([load_file(shard)[path] for shard in shards[:4]])
        assert torch.equal(rows, record_to(pg, tmp_path / "whole", STREAMS, inputs, batch_size=2)[path][:])


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = build()

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch)


class TakesKeywords(TakesDict):
    def forward(self, **inputs: Tensor) -> Any:  # type: ignore[override]
        return self.model(**inputs)


FORMS: dict[type[TakesDict], Callable[[dict[str, Tensor]], Any]] = {
    TakesDict: lambda given: (given,),
    TakesKeywords: lambda given: given,
}


@pytest.mark.parametrize(("kind", "batch_size"), [*zip(FORMS, (None, 2), strict=True)])
def test_tokens_may_be_in_containers(kind: type[TakesDict], batch_size: int | None, tmp_path: Path) -> None:
    """What has the positions is found by running, wherever the model takes it from, and padding next to it."""
    model, form, data = kind().eval(), FORMS[kind], examples(5)
    kept, path = data["attention_mask"].bool(), "model.transformer.h_1.output"
    stream = streams_of(model.model, data)[1]
    example = form({name: value[:2] for name, value in data.items()})
    pg = PatchableGraph(model, **example) if isinstance(example, dict) else PatchableGraph(model, *example)
    parts = [form({name: value[at : at + 2] for name, value in data.items()}) for at in range(0, 5, 2)]
    dataset = parts if batch_size is None else form(data)
    store = record_to(pg, tmp_path / "store", path, dataset, batch_size=batch_size)
    torch.testing.assert_close(store[path][:], stream[kept])
    assert store.token.tolist() == data["input_ids"][kept].tolist()
    assert store.position.tolist() == kept.nonzero()[:, 1].tolist()
    means = mean_values(pg, path, dataset, batch_size=batch_size)
    torch.testing.assert_close(means[path], stream[kept].mean(0))
    given = form(data)
    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
    torch.testing.assert_close(pg.record(path, *args, positions=[1], **kwargs)[path], stream[:, 1:2])
    if not kept[:, -1].all():
        with pytest.raises(GraphPatchError, match="attention_mask"), pg.patch({path: ZeroPatch(positions=-1)}):
            pg(*args, **kwargs)


def to(*given: Any, **options: Any) -> Any:
    return lambda pg, folder: record_to(pg, folder, *given, **options)


INVALID: list[tuple[type[Warning | Exception], Any]] = [
    (UnknownPathError, to("layers[9].resid_post", [])),
    (ExperimentError, to(STREAMS, examples(3))),
    (ExperimentError, to(STREAMS, [examples(3)], batch_size=2)),
    (ExperimentError, lambda pg, folder: record_to(pg, folder.parent, STREAMS, [examples(3)])),  # it is not empty
    (ExperimentError, to("layers[0].attn.pattern", map(tokens, (3, 4)))),
    (ExperimentError, lambda pg, folder: ActivationStore(folder)),
    (ExperimentError, to(STREAMS, [], positions=[[1], [2]])),
    (ExperimentError, to(STREAMS, [], positions=[])),
    (TypeError, lambda _, folder: record_to(build(), folder, STREAMS, [])),
    (ExperimentError, lambda pg, _: mean_values(pg, STREAMS, [])),
    (ExperimentError, lambda pg, _: mean_values(pg, "layers[1].attn.pattern", [tokens(1), tokens(3)])),
    (GraphPatchWarning, to(STREAMS, examples(4), batch_size=2, positions=[500])),
    (ExperimentError, lambda pg, _: average([])),
]


@pytest.mark.parametrize(("error", "call"), INVALID)
def test_invalid_calls_are_errors(pg: PatchableGraph, tmp_path: Path, error: type[Exception], call: Any) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(error):
        call(pg, tmp_path / "store")


def test_a_folder_of_other_values_or_another_dataset_is_refused(pg: PatchableGraph, tmp_path: Path) -> None:
    record_to(pg, tmp_path, STREAMS, examples(4), batch_size=2)
    trained = build()
    with torch.no_grad():
        trained.transformer.h[0].mlp.c_fc.bias.add_(1)  # type: ignore[union-attr, operator]
    for graph, paths, inputs, size, word in (
        (pg, STREAMS, examples(4, seed=2), 2, "dataset"),
        (pg, STREAMS, examples(4), 4, "dataset"),
        (pg, "layers[0].resid_post", examples(4), 2, "paths"),
        (PatchableGraph(trained, tokens(3)), STREAMS, examples(4), 2, "weights"),
        (PatchableGraph(build().train(), tokens(3)), STREAMS, examples(4), 2, "modes"),
    ):
        with pytest.raises(ExperimentError, match=word):
            record_to(graph, tmp_path, paths, inputs, batch_size=size)
    with pytest.raises(KeyError, match=r"nearest: 'layers\[1\].resid_post'"):
        ActivationStore(tmp_path)["layers[1].resid_mid"]
    assert record_to(pg, tmp_path, STREAMS, examples(4), batch_size=2).examples == 4


def test_rows_are_asked_for_by_numbers_that_are_stored(pg: PatchableGraph, tmp_path: Path) -> None:
    values = record_to(pg, tmp_path / "whole", STREAMS, examples(3), batch_size=2)["layers[0].resid_post"]
    listed = values.where(example=[1, 2], position=[0, 1])
    for example, position in ((slice(1, None), {0, 1}), (range(1, 3), slice(2))):
        assert torch.equal(values.where(example=example, position=position), listed)
    for asked in ({"example": 3}, {"position": 1000}, {"position": "0"}, {"position": 1.5}):
        with pytest.raises(ExperimentError):
            values.where(**asked)
    assert torch.equal(values.where(example=-1, position=[-1]), values[-1:])
    half = record_to(pg, tmp_path / "half", STREAMS, examples(3), batch_size=2, dtype=torch.bfloat16)
    assert torch.equal(half["layers[0].resid_post"][:], values[:].bfloat16())


def test_means_are_those_over_all_rows_and_ablate(pg: PatchableGraph) -> None:
    inputs = examples(7)
    means = mean_values(pg, STREAMS, inputs, batch_size=3)
    mask = inputs["attention_mask"].bool()
    for layer, expected in enumerate(streams_of(build(), inputs)):
        assert torch.allclose(means[f"layers[{layer}].resid_post"], expected[mask].mean(0), atol=1e-5)
    with pg.patch({"layers[1].resid_post": ReplacePatch(value=means["layers[1].resid_post"])}):
        logits = pg(**inputs).logits
    assert torch.allclose(logits, logits[:1, :1].expand_as(logits), atol=1e-5)


def test_encoders_and_decoders_have_positions_of_their_own(tmp_path: Path) -> None:
    from transformers import BartConfig, BartModel

    torch.manual_seed(0)
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1) | dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads"), 2
    )
    widths = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 8)
    model = BartModel(BartConfig(**sizes, **widths, vocab_size=30, max_position_embeddings=16)).eval()
    inputs = examples(5)
    decoded = torch.randint(3, 30, (5, 4))
    mask = torch.ones_like(decoded)
    mask[0, 2:] = 0
    inputs |= {"decoder_input_ids": decoded, "decoder_attention_mask": mask}
    pg = PatchableGraph(model, **inputs)
    found = []
    parts: list[Any] = [model.encoder.layers[0], model.decoder.layers[0]]
    hooks = [
        layer.register_forward_hook(lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out))
        for layer in parts
    ]
    with registered(hooks), torch.no_grad():
        model(**inputs)
    masks = inputs["attention_mask"].bool(), mask.bool()
    paths = [f"{stack}.layers[0].resid_post" for stack in ("encoder", "decoder")]
    for path, value, kept, ids in zip(paths, found, masks, (inputs["input_ids"], decoded), strict=True):
        store = record_to(pg, tmp_path / path[:7], path, inputs, batch_size=2)
        assert torch.allclose(store[path][:], value[kept], atol=1e-5)
        assert store.token.tolist() == ids[kept].tolist()
    with pytest.raises(ExperimentError, match="one after the other"):
        mean_values(pg, paths, inputs, batch_size=2)
