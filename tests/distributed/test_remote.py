"""A graph whose model runs in the engines of a cluster: the same numbers as here, errors by name, nothing hangs."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ipyparallel
import numpy as np
import pytest
import torch
from torch import nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    GraphPatchWarning,
    PatchableGraph,
    PatchNotFiredError,
    PatchValueError,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    StopPatch,
    UnknownPathError,
    ZeroPatch,
)
from graphpatch_notebook.errors import ExperimentError, GraphError
from graphpatch_notebook.experiments import (
    DAS,
    LogitDifference,
    attribute,
    direction,
    intervene,
    logit_lens,
    mean_values,
    project_out,
    record_to,
    remote,
)
from tests.test_docs import BLOCK

IDS = torch.arange(10).reshape(2, 5)
HEAD = {"layers[1].attn.heads[2].z": ZeroPatch()}


def build() -> nn.Module:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=20, bos_token_id=None, eos_token_id=None)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with ipyparallel.Cluster(n=2, engine_timeout=300, send_engines_connection_env=False) as client:
        client.wait_for_engines(2, timeout=300)
        # As many threads as here, or sums differ in their last bits.
        client[:].apply_sync(torch.set_num_threads, torch.get_num_threads())
        yield client


@pytest.fixture(scope="module")
def there(client: Any) -> PatchableGraph:
    return remote(client, build, input_ids=IDS[:1])


@pytest.fixture(scope="module")
def here() -> PatchableGraph:
    return PatchableGraph(build(), input_ids=IDS[:1])


def logits(pg: PatchableGraph) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = pg(input_ids=IDS).logits
    return result


def test_names_shapes_and_components_are_known_without_weights(there: PatchableGraph, here: PatchableGraph) -> None:
    assert {p: m.shape for p, m in there.nodes.items()} == {p: m.shape for p, m in here.nodes.items()}
    assert list(there.components) == list(here.components)
    assert all(parameter.is_meta for parameter in there.parameters())


def test_calls_give_the_same_numbers(there: PatchableGraph, here: PatchableGraph) -> None:
    assert torch.equal(logits(there), logits(here))
    for patches in (
        HEAD,
        {"layers[0].resid_post": AddPatch(value=torch.ones(16), slice=(..., 1, slice(None)))},
        {"layers[0].mlp_out": [CustomPatch(lambda value: value * 2), ReplacePatch(value=3.0, slice=(0, 0))]},
    ):
        with there.patch(patches), here.patch(patches):
            assert torch.equal(logits(there), logits(here))
            with there.patch(HEAD), here.patch(HEAD):
                assert torch.equal(logits(there), logits(here))
    edited = there.edit(HEAD)
    assert torch.equal(logits(edited), logits(here.edit(HEAD)))


def test_probes_records_stops_and_generation(there: PatchableGraph, here: PatchableGraph) -> None:
    kept = []
    for pg in (there, here):
        probe, record = ProbePatch(), RecordPatch()
        with (
            torch.no_grad(),
            pg.patch({"layers[1].attn.z": [ZeroPatch(slice=(..., 0)), probe], "@embed": record} | HEAD),
        ):
            pg(input_ids=IDS)
            pg(input_ids=IDS + 1)
            pg.generation_config.max_new_tokens = 3
            new = pg.generate(IDS, do_sample=False)
        kept.append([probe.activation, *record.activations, new])
        kept[-1] += [pg.run_until("layers[0].resid_post", input_ids=IDS)]
        kept[-1] += list(pg.record("layers[*].resid_post", input_ids=IDS).values())
    assert len(kept[0]) == len(kept[1])
    assert all(map(torch.equal, *kept))
    with there.patch({"@embed": StopPatch()}):
        assert there(input_ids=IDS).shape == (2, 5, 16)
    with there.patch({"@embed": ZeroPatch(steps=[1])}):
        there.generate(IDS, max_new_tokens=2)
        with pytest.raises(GraphError, match="steps="):
            there(input_ids=IDS)


def test_experiments_run_there(there: PatchableGraph, here: PatchableGraph) -> None:
    metric = LogitDifference(3, 4)
    axes, inputs = {"layer": [0, 1]}, {"input_ids": IDS, "metric": metric, "progress": False}
    sweeps = [pg.sweep(axes, lambda layer: {f"layers[{layer}].mlp_out": ZeroPatch()}, **inputs) for pg in (there, here)]
    assert np.array_equal(sweeps[0], sweeps[1])
    scores = [attribute(pg, metric, {"input_ids": IDS}, {"input_ids": IDS + 3}) for pg in (there, here)]
    assert np.array_equal(scores[0], scores[1], equal_nan=True)
    lenses = [logit_lens(pg, input_ids=IDS) for pg in (there, here)]
    assert np.array_equal(lenses[0], lenses[1])
    found = [
        direction(pg, IDS[:1], IDS[1:], positions=-1, batch_size=1)["layers[0].resid_post"] for pg in (there, here)
    ]
    assert torch.equal(*found)
    removed = [logits(pg.edit(project_out(pg, found[0], weights=True))) for pg in (there, here)]
    assert torch.equal(*removed)
    with pytest.raises(ExperimentError, match="run_there"):  # modules there would be copies, which are not trained
        intervene(there, {"layers[1].resid_post": DAS(16, 4)}, IDS, IDS + 3)
    assert str(there.verify(input_ids=IDS)) == str(here.verify(input_ids=IDS))


def test_errors_and_warnings_come_back(there: PatchableGraph) -> None:
    with pytest.raises(UnknownPathError, match=r"layers\[7\]"), there.patch({"layers[7].mlp_out": ZeroPatch()}):
        pass
    patches = {"layers[0].mlp_out": ReplacePatch(value=torch.ones(1, 3, 3))}
    with there.patch(patches), pytest.raises(PatchValueError, match="layers"):
        logits(there)
    with pytest.warns(GraphPatchWarning, match="not fired]"), there.patch({"@embed": ZeroPatch(steps=[5])}):
        there(input_ids=IDS)
    strict = there.patch({"@embed": ZeroPatch(steps=[5])}, strict=True)
    with pytest.raises(PatchNotFiredError, match="steps"), strict:
        there(input_ids=IDS)
    assert logits(there).shape == (2, 5, 20)


def test_a_function_that_exits_ends_neither_process(there: PatchableGraph) -> None:
    for leave in (sys.exit, lambda pg: sys.exit(3)):
        with pytest.raises(ExperimentError, match="^SystemExit: "):
            there.run_there(leave)
    assert logits(there).shape == (2, 5, 20)


@pytest.mark.parametrize(
    "use",
    [
        lambda pg: pg.save("file"),
        lambda pg: pg.to_fx((), {"input_ids": IDS}),
        lambda pg: pg.interpreter().run(input_ids=IDS),
        lambda pg: pg.load_state_dict({}),
        lambda pg: pg.weights,
        lambda pg: copy.deepcopy(pg),
        lambda pg: setattr(pg, "training", True),
        lambda pg: pg.get_input_embeddings(),
        lambda pg: pg.run_there(lambda there: there.wte.weight if pg else None),
    ],
)  # fmt: skip
def test_what_needs_the_model_itself_says_where_it_is(there: PatchableGraph, use: Callable[[Any], Any]) -> None:
    with pytest.raises((GraphError, ExperimentError), match=r"pg\.run_there\("):
        use(there)


def test_modes_weights_and_components_are_those_of_the_engines(there: PatchableGraph, here: PatchableGraph) -> None:
    assert torch.equal(there.run_there(lambda pg: pg.weights.W_O[1, 2].detach()), here.weights.W_O[1, 2])
    assert str(there.components) == str(here.components)
    assert there.train().training
    assert not torch.equal(logits(there), logits(here))
    assert not there.eval().training
    assert torch.equal(logits(there), logits(here))
    there.double()
    assert logits(there).dtype == torch.float64
    there.float()
    assert torch.equal(logits(there), logits(here))


@pytest.mark.parametrize(("cluster", "recipe", "message"), [
    (object(), build, "a client of ipyparallel"), (None, nn.Linear(2, 2), "a function that builds the model"),
])  # fmt: skip
def test_bad_clusters_and_recipes(client: Any, cluster: Any, recipe: Any, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        remote(cluster or client, recipe, input_ids=IDS)


def test_an_interrupt_reaches_the_engines_and_leaves_them_usable(there: PatchableGraph) -> None:
    def slow(value: Any) -> Any:
        time.sleep(60)
        return value

    before = time.monotonic()
    threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with there.patch({"@embed": CustomPatch(slow)}), pytest.raises(KeyboardInterrupt):
        there(input_ids=IDS)
    assert logits(there).shape == (2, 5, 20)
    assert time.monotonic() - before < 50


def test_engines_are_the_ranks_of_a_sharded_model(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, engine in enumerate(client):
        engine.apply_sync(be_rank, rank)
    there = remote(client, functools.partial(build_rank, str(tmp_path / "group")), input_ids=IDS)
    here = PatchableGraph(build_llama(), input_ids=IDS)
    assert {p: m.shape for p, m in there.nodes.items()} == {p: m.shape for p, m in here.nodes.items()}
    units = ZeroPatch(slice=(..., slice(30, 40)))  # of both ranks
    for patches in ({"layers[1].attn.heads[3].z": ZeroPatch()}, {"layers[0].mlp.post": units}):
        found = []
        for pg in (there, here):
            with pg.patch(patches | {"layers[1].mlp.post": (probe := ProbePatch())}):
                found.append((logits(pg), probe.activation))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))
    assert there.nodes["model.layers_0.mlp.down_proj.input"].placement == "split along dimension 2"
    path = "layers[1].resid_post"
    stores = [
        record_to(pg, tmp_path / name, path, {"input_ids": IDS.repeat(3, 1)}, batch_size=2)[path][:]
        for pg, name in ((there, "there"), (here, "here"))
    ]
    assert torch.allclose(*stores, atol=1e-6)
    with pytest.raises(ExperimentError, match="leave executor= out"):
        mean_values(there, path, IDS, batch_size=1, executor=client)

    for name in ("_GRACE", "_PATIENCE"):
        monkeypatch.setattr(sys.modules[type(there).__module__], name, 0.1)
    with pytest.raises(ValueError, match="on one rank") as caught:
        there.run_there(fails_on_the_second)
    assert "raised in engine 1 of 2" in getattr(caught.value, "__notes__", ["raised in engine 1 of 2"])[-1]
    with pytest.raises(ExperimentError, match="engine 0 of the cluster still runs an earlier call"):
        logits(there)
    client[0].apply_sync(str)  # waits for it
    assert logits(there).shape == (2, 5, 64)


def fails_on_the_second(_: PatchableGraph) -> None:
    if torch.distributed.get_rank():
        raise ValueError("on one rank")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(2)  # as one that waits for the other in a collective, which cannot be interrupted
    signal.signal(signal.SIGINT, before)


def be_rank(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}


def build_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


def build_rank(store: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank, limit = int(os.environ["RANK"]), datetime.timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2, timeout=limit)
    split = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    model = build_llama()
    plan = {
        name: ColwiseParallel() if name.rpartition(".")[2] in split else RowwiseParallel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def test_the_guide_runs(client: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "remote.md").read_text("utf8")
    names: dict[str, Any] = {"client": client, "__name__": "page"}
    for source, expected in BLOCK.findall(page)[1:]:  # the first one starts a cluster
        assert run_code(source, names) == expected


def run_code(source: str, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "remote.md", "exec", dont_inherit=True), names)
    return printed.getvalue()


def test_a_dead_engine_is_named(client: Any) -> None:
    pg = remote(client[1:], build, input_ids=IDS)
    for what in ("engine 1 of the cluster did not answer", "engine 1 of the cluster has died"):
        with pg.patch({"@embed": CustomPatch(lambda _: os._exit(1))}), pytest.raises(ExperimentError, match=what):
            pg(input_ids=IDS)
