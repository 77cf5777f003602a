"""What was found to go wrong in sweeps, each as small as it can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, ProbePatch, RecordPatch, ZeroPatch
from graphpatch_notebook.errors import GraphPatchWarning
from tests.experiments.engine.awkward_prefixes import Layers
from tests.experiments.engine.loops import TOLERANCE, disagreement, looped, swept
from tests.zoo import Call
from tests.zoo.case import floats, seeded

X = floats(2, 4)


def itself(output: Tensor) -> Tensor:
    return output


@pytest.mark.parametrize("kind", [ProbePatch, RecordPatch])
def test_probes_that_cells_share(kind: Any) -> None:
    def maps() -> list[dict[str, Any]]:
        probe = kind()

        def kept(value: Tensor) -> Tensor:
            return value + (probe.activation if kind is ProbePatch else probe.activations[-1])

        return [
            {"a.output": AddPatch(value=float(number)), "b.output": probe, "c.output": CustomPatch(custom_op=kept)}
            for number in range(8)
        ]

    pg = PatchableGraph(seeded(Layers), X)
    loop = looped(pg, maps(), lambda: Call.of(X), itself)
    assert disagreement(loop, swept(pg, maps(), Call.of(X), itself), TOLERANCE) is None


class OtherWord(nn.Module):
    """Means something of its own by a word of language models."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor, logits_to_keep: int = 0) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        h = self.a(x)[:, -logits_to_keep:]
        return CausalLMOutput(logits=self.b(h - h.mean(1, keepdim=True)))


def test_models_with_another_meaning_of_logits_to_keep() -> None:
    x = floats(2, 5, 4)
    pg = PatchableGraph(seeded(OtherWord), x)
    maps = [{"a.output": AddPatch(value=float(turn), slice=(slice(None), turn % 5))} for turn in range(10)]

    def last(output: Any) -> Tensor:
        return output.logits[:, -1]

    loop = looped(pg, maps, lambda: Call.of(x), last)
    with pytest.warns(GraphPatchWarning, match="runs again as a loop"):
        found = swept(pg, maps, Call.of(x), last)
    assert disagreement(loop, found, TOLERANCE) is None


@pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")
def test_attention_that_asks_whether_values_are_the_same_object() -> None:
    x = floats(3, 7, 24)
    pg = PatchableGraph(seeded(lambda: nn.TransformerEncoderLayer(24, 4, 40, batch_first=True, norm_first=True)), x)
    maps: list[dict[str, Any]] = [
        {"self_attn.value": ZeroPatch()},
        {"dropout.output": AddPatch(value=10.0)},
        {"dropout.output": AddPatch(value=20.0)},
        {"self_attn.query_1": ZeroPatch()},
    ]
    loop = looped(pg, maps, lambda: Call.of(x), itself)
    assert disagreement(loop, swept(pg, maps, Call.of(x), itself), 1e-5) is None


class OwnGradient(nn.Module):
    """Takes a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.b(self.a(x).tanh()).square().sum()
            return torch.autograd.grad(energy, x)[0]


@pytest.mark.parametrize("batch", [None, "auto"])
def test_models_that_take_gradients_themselves(batch: Any) -> None:
    pg = PatchableGraph(seeded(OwnGradient), X)
    maps = [{"b.output": AddPatch(value=1.0, slice=(..., turn % 4))} for turn in range(8)]
    loop = looped(pg, maps, lambda: Call.of(X), itself)
    found = swept(pg, maps, Call.of(X), itself, batch=batch)
    assert disagreement(loop, found, 0.0 if batch is None else TOLERANCE) is None
