"""Sweeps of language models: whatever a metric reads, and however it does, it has the numbers of the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, ReplacePatch, ZeroPatch
from tests.experiments.engine.loops import TOLERANCE, disagreement, leaves_of, looped, swept
from tests.experiments.hooked import GPT2_OUTPUT
from tests.integrations.offloaded import gpt2
from tests.zoo import Call
from tests.zoo.case import floats

pytestmark = [
    pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning"),
]

IDS = torch.arange(14).view(2, 7) + 3


def cells(pg: PatchableGraph) -> list[dict[str, Any]]:
    """Outputs of layers and what is in them, the last ones among them, at each kind of position."""
    is_gpt2 = "transformer.h_0.mlp.output" in pg.nodes
    output = GPT2_OUTPUT if is_gpt2 else "output"
    layers = [f"transformer.h_{i}" if is_gpt2 else f"model.layers_{i}" for i in range(2)]
    head = "lm_head.input"
    maps: list[dict[str, Any]] = []
    for layer in layers:
        for position in (0, 3, -1):
            maps.append({f"{layer}.{output}": ReplacePatch(value=floats(32), slice=(slice(None), position))})
            maps.append({f"{layer}.mlp.output": AddPatch(value=floats(32, seed=1), slice=(slice(None), position))})
        maps.append({f"{layer}.mlp.output": ZeroPatch()})
    maps.append({head: AddPatch(value=1.0, slice=(slice(None), -1))})
    maps.append({head: CustomPatch(custom_op=lambda h: h.flip(1))})
    maps.append({"lm_head.output": AddPatch(value=2.0, slice=(..., 5))})
    maps.append({"output|logits": ZeroPatch(slice=(slice(None), -1))})
    maps.append({"output|logits": CustomPatch(custom_op=lambda logits: logits.flip(1))})
    return [*maps, {}]


def written_into(output: Any) -> Tensor:
    last = output.logits[:, -1]
    last -= last.amax(-1, keepdim=True)
    output.logits.mul_(2)
    return output.logits[:, -1].sum(-1)


def replaced(output: Any) -> Tensor:
    output.logits = output.logits[:, -1:] * 2
    output["logits"] = output.logits + 1
    return output.logits.sum(-1)


METRICS: dict[str, Callable[[Any], Any]] = {
    "the logits as they are": lambda output: output.logits,
    "last": lambda output: output.logits[:, -1],
    "last by index": lambda output: output[0][:, -1],
    "last kept": lambda output: output.logits[:, -1:],
    "last by tensor": lambda output: output.logits[torch.arange(2), torch.tensor([-1, 6])],
    "last by mask": lambda output: output.logits[:, torch.arange(7) == 6],
    "last of the second": lambda output: output.logits[1][-1],
    "first": lambda output: output.logits[:, 0],
    "last two": lambda output: output.logits[:, -2:],
    "last and first": lambda output: output.logits[:, -1] - output.logits[:, 0],
    "mean": lambda output: output.logits.mean(),
    "shape": lambda output: [*output.logits.shape, output.logits.numel(), output.logits.stride(0)],
    "argmax": lambda output: output.logits[:, -1].argmax(-1),
    "top": lambda output: output.logits[:, -1].topk(3).indices,
    "across the batch": lambda output: output.logits[:, -1].softmax(0),
    "loss": lambda output: F.cross_entropy(output.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()),
    "dict": lambda output: {"a": output.logits[0, -1, 3], "b": output.logits[1, -1].mean().item(), "c": 1},
    "numpy": lambda output: output.logits[:, -1].numpy(),
    "list": lambda output: output.logits[:, -1].tolist(),
    "depends on values": lambda output: output.logits[:, -1 if output.logits[0, -1, 0] > 0 else 0],
    "written into": written_into,
    "replaced": replaced,
    "keys": lambda output: [len(output.keys()), len(output.to_tuple()), "past_key_values" in output],
    "cache": lambda output: torch.cat([layer.keys for layer in output.past_key_values.layers]),
    "length of the cache": lambda output: [output.past_key_values.get_seq_length(), len(output.logits)],
    "last and cache": lambda output: output.logits[:, -1].sum() + output.past_key_values.layers[1].values.sum(),
    "by attribute": lambda output: vars(output)["logits"][:, -1],
    "nothing": lambda output: 0.0,
}


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return PatchableGraph(gpt2(), input_ids=IDS)


def check(pg: PatchableGraph, metric: Callable[[Any], Any], make_call: Callable[[], Call], every: int) -> None:
    """Compares a sweep that shares forwards with the loop."""
    some = slice(None, None, every)
    found = swept(pg, cells(pg)[some], make_call(), metric)
    assert disagreement(looped(pg, cells(pg)[some], make_call, metric), found, TOLERANCE) is None, found.remarks


@pytest.mark.parametrize("what", METRICS)
def test_metrics_may_read_any_part_of_the_output(pg: PatchableGraph, what: str) -> None:
    check(pg, METRICS[what], lambda: Call.of(input_ids=IDS), 1 if "last" in what else 3)


@pytest.mark.parametrize("read", ["last", "all"])
def test_patched_tokens_share_work(pg: PatchableGraph, read: str) -> None:
    """The key/value cache, which has no rows, is left out, as for other values."""
    metric = (lambda output: output.logits[:, -1]) if read == "last" else lambda output: output.logits
    maps = [{"input_ids": ReplacePatch(value=n, slice=(slice(None), n % 7))} for n in range(12)]
    found = swept(pg, maps, Call.of(input_ids=IDS), metric)
    assert disagreement(looped(pg, maps, lambda: Call.of(input_ids=IDS), metric), found, TOLERANCE) is None
    assert found.attrs["remarks"] == []


def test_a_sweep_in_training_mode_says_how_to_share_work() -> None:
    pg = PatchableGraph(gpt2(), input_ids=IDS)
    maps = [{"lm_head.input": AddPatch(value=float(number))} for number in range(12)]
    for is_training in (True, False):
        pg.train(is_training)
        found = swept(pg, maps, Call.of(input_ids=IDS), lambda output: output.logits[:, -1, 3])
        assert ["pg.eval()" in remark for remark in found.attrs["remarks"]] == [True] * is_training


CALLS: dict[str, Callable[[], Call]] = {
    "one sequence": lambda: Call.of(input_ids=IDS[:1]),
    "left padding": lambda: Call.of(IDS, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])),
    "right padding": lambda: Call.of(IDS, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7])),
    "mask for all": lambda: Call.of(IDS, attention_mask=torch.full((1, 1, 7, 7), -1e4).triu(1)),
    "positions for all": lambda: Call.of(IDS, position_ids=torch.arange(1, 8)[None]),
    "no cache": lambda: Call.of(IDS, use_cache=False),
    "cache": lambda: Call.of(IDS, use_cache=True),
    "kept logits": lambda: Call.of(IDS, logits_to_keep=1),
    "two kept logits": lambda: Call.of(IDS, logits_to_keep=2),
    "tuple": lambda: Call.of(IDS, return_dict=False),
    "embeddings": lambda: Call.of(inputs_embeds=floats(2, 7, 32)),
    "as long as many": lambda: Call.of(torch.arange(25).view(5, 5)),
    "hidden states": lambda: Call.of(IDS, output_hidden_states=True),
    "labels": lambda: Call.of(IDS, labels=IDS),
}


@pytest.mark.parametrize("what", CALLS)
def test_sweeps_accept_all_forms_of_inputs(pg: PatchableGraph, what: str) -> None:
    def metric(output: Any) -> Tensor:
        return output[0 if what != "labels" else 1][:, -1]

    check(pg, metric, CALLS[what], 2)


@pytest.mark.parametrize("path", ["output", "c_fc.weight"])
@pytest.mark.parametrize("has_labels", [False, True])
def test_without_patches_a_metric_reads_all_outputs_as_in_a_cell(path: str, has_labels: bool) -> None:
    """The run without patches leaves out the cache for cells that share forwards: these do not, or only some."""
    pg = PatchableGraph(gpt2(), IDS)
    call = Call.of(IDS, labels=IDS) if has_labels else Call.of(IDS)  # the loss is one for all rows
    maps = [{f"transformer.h_0.mlp.{path}": AddPatch(value=float(n))} for n in range(5)]

    def metric(output: Any) -> int:
        return len(leaves_of(output))

    for some in (maps, [*maps, {"transformer.h_1.mlp.c_fc.bias": ZeroPatch()}]):
        expected = looped(pg, some, lambda: call, metric)
        assert disagreement(expected, swept(pg, some, call, metric)) is None
