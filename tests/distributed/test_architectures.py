"""The law of sharded models over six architectures of transformers, and what runs many forwards on one of them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from graphpatch_notebook import AddPatch, PatchableGraph, ZeroPatch
from graphpatch_notebook.experiments import attribute, causal_trace
from tests.distributed import ranks
from tests.distributed.architectures import SIX, disturb, examine, named
from tests.distributed.processes import run_on_ranks
from tests.test_docs import BLOCK, ROOT

pytestmark = pytest.mark.skipif(
    not (ranks.is_possible and hasattr(transformers, "distributed")), reason="this transformers shards in another way"
)

IDS = torch.tensor([[3, 14, 15, 9, 2, 6], [5, 3, 5, 8, 9, 7]])
OTHER = torch.tensor([[3, 14, 35, 9, 2, 6], [5, 3, 45, 8, 9, 7]])


# Qwen3 stands for Llama, too, and has norms of its heads; Mixtral has experts. `hatch run sharded` runs all others.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("qwen3", "mixtral") else [pytest.mark.exhaustive]) for n in SIX]
)
def test_law(name: str) -> None:
    (architecture,) = named((name,))
    found = examine(architecture, 2, seconds=120, most=30, most_gradients=6)
    assert found.names == []
    assert found.wrong == {}
    assert found.right >= 25
    if name not in ("mixtral", "deepseek_v3"):
        assert len(found.refused) <= 1  # parts of a table of embeddings, where a class of its own looks them up


PATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "heads": lambda: {"layers[0].attn.heads[1,2].z": ZeroPatch()},
    "pattern": lambda: {"layers[0].attn.pattern": ZeroPatch(slice=(slice(None), slice(1, 4)), steps="decoding")},
    "values of shared heads": lambda: {"layers[1].attn.v": AddPatch(value=1.0, slice=(..., 1, slice(None)))},
    "neurons at a position": lambda: {
        "layers[0].mlp.post": AddPatch(value=3.0, slice=(..., slice(40, 70)), positions=7)
    },
    "stream": lambda: {"model.layers_0.output": AddPatch(value=1.0, slice=(..., slice(5, 40)), steps="prefill")},
    "leaf": lambda: {
        "model.layers_0.self_attn.o_proj.output": ZeroPatch(slice=(..., slice(0, 9))),
        "model.layers_0.self_attn.o_proj.linear": AddPatch(value=1.0, slice=(..., slice(0, 12))),
    },
    "weight": lambda: {"model.layers_0.mlp.up_proj.weight": AddPatch(value=0.2, slice=(slice(20, 80),))},
}


def test_many_forwards(tmp_path: Path) -> None:
    """Generation, sweeps, attribution and tracing give what they give in one process, on both ranks."""
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        hidden_act="gelu_new",  # written out
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    disturb(model)
    model.save_pretrained(tmp_path)
    (first, printed), (second, nothing) = run_on_ranks(2, wrong_results, str(tmp_path), seconds=120)
    assert first == second == []
    plain = PatchableGraph(model, IDS[:1])
    with torch.no_grad(), plain.patch({"layers[0].attn.heads[3].z": ZeroPatch()}):
        assert printed == f"{plain(IDS[:1]).logits[0, -1].topk(3).indices.tolist()}\n"
    assert nothing == ""


def metric(output: Any) -> Tensor:
    return output.logits[:, -1, 7].mean()  # type: ignore[no-any-return]


def printed_by_the_guide(folder: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the script of the guide prints on this rank."""
    (source, *_) = BLOCK.findall((ROOT / "docs" / "guides" / "sharded.md").read_text("utf8"))[0]
    monkeypatch.setattr("sys.argv", ["patch_sharded.py", folder])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "patch_sharded.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def wrong_results(folder: str) -> tuple[list[str], str]:
    """What is not as in one process, and what the script of the guide prints."""
    kind = transformers.LlamaForCausalLM
    plain = PatchableGraph(kind.from_pretrained(folder).eval(), IDS)
    sharded = PatchableGraph(kind.from_pretrained(folder, tp_plan="auto").eval(), IDS)
    wrong = [] if list(plain.components) == list(sharded.components) else ["components"]
    mask = torch.ones_like(IDS)
    mask[0, :2] = 0
    for name, patches in PATCHES.items():
        texts = []
        for pg in (plain, sharded):
            with torch.no_grad(), pg.patch(patches()):
                texts.append(pg.generate(IDS, attention_mask=mask, max_new_tokens=4, do_sample=False))
                texts.append(pg(IDS).logits)
        if not torch.equal(texts[0], texts[2]) or not torch.allclose(texts[1], texts[3], atol=1e-4):
            wrong.append(name)
    wrong += [name for name, run in EXPERIMENTS.items() if not _are_close(run(plain), run(sharded))]
    wrong += [] if torch.allclose(plain.weights.W_Q[1, 2], sharded.weights.W_Q[1, 2]) else ["weights"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        return wrong, printed_by_the_guide(folder, monkeypatch)


EXPERIMENTS: dict[str, Callable[[PatchableGraph], Any]] = {
    "sweep": lambda pg: pg.sweep(
        {"head": range(4)},
        lambda head: {"layers[0].attn.z": ZeroPatch(slice=(..., head, slice(None)))},
        IDS,
        metric=metric,
        progress=False,
    ),
    "causal_trace": lambda pg: causal_trace(
        pg, IDS, OTHER, ["model.layers_0.output", "layers[1].mlp.post"], [2, 5], metric=metric, progress=False
    ),
    "secant": lambda pg: attribute(pg, metric, IDS, OTHER, method="secant"),
    "attribute": lambda pg: attribute(
        pg, metric, IDS, OTHER, paths=["model.layers_0.output", "layers[0].mlp.post", "layers[1].attn.heads[*].z"]
    ),
}


def _are_close(one: Any, other: Any) -> bool:
    return np.allclose(one.values, other.values, atol=1e-4, rtol=1e-3, equal_nan=True)
