"""What was found to go wrong in sweeps, each as small as it can be."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from graphpatch_notebook import AddPatch, PatchableGraph
from graphpatch_notebook.errors import GraphPatchWarning
from tests.experiments.engine.loops import TOLERANCE, disagreement, looped, swept
from tests.zoo import Call
from tests.zoo.case import floats, seeded
from tests.zoo.submodules import Submodules

X = floats(2, 4)


class OtherWord(Submodules, a=(4, 4), b=(4, 4)):
    """Means something of its own by a word of language models."""

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
