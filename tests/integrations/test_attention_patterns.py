"""Attention patterns of transformers models that run fused attention, against the same weights loaded as `eager`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    CustomPatch,
    PatchableGraph,
    PatchValueError,
    ProbePatch,
    RecordPatch,
    ZeroPatch,
)
from tests.zoo import case_by_name, installed
from tests.zoo.case import tokens

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
HEADS, WIDTH = 4, 12


@dataclass(frozen=True)
class Family:
    """An architecture of the zoo: where its second attention is, and the module that takes the heads' results."""

    name: str
    node: str
    module: str
    projection: str

    def models(self) -> tuple[Any, Any]:
        """Returns the model with fused attention, and with the same weights the one that shows its patterns."""
        return case_by_name(f"{self.name}-sdpa").build(), case_by_name(f"{self.name}-eager").build()

    @property
    def pattern(self) -> str:
        return f"{self.node}.pattern"


FAMILIES = [
    Family("gpt2", "transformer.h_1.attn", "transformer.h.1.attn", "c_proj"),
    Family("llama", "model.layers_1.self_attn", "model.layers.1.self_attn", "o_proj"),
    Family("bert", "bert.encoder.layer_1.attention.self", "bert.encoder.layer.1.attention", "output.dense"),
]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)

IDS = tokens(3, 7)
PADDING = (torch.arange(7) >= torch.tensor([0, 2, 4])[:, None]).long()
CALLS = {"plain": {}, "padded": {"attention_mask": PADDING}}
each_call = pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))


def logits(model: Any, **kwargs: Any) -> Tensor:
    return model(input_ids=IDS, **kwargs).logits  # type: ignore[no-any-return]


@each_family
@each_call
@torch.no_grad()
def test_probes_find_the_patterns_of_eager_attention(family: Family, call: dict[str, Any]) -> None:
    fused, eager = family.models()
    expected = eager(input_ids=IDS, **call, output_attentions=True)
    pg = PatchableGraph(fused, input_ids=IDS)
    probe = ProbePatch()
    with pg.patch({family.pattern: probe}):
        found = logits(pg, **call)
    assert probe.activation is not None
    # Rows of padding, which nobody attends to, are whatever the kernel makes of them.
    rows = call.get("attention_mask", torch.ones_like(IDS)).bool()
    torch.testing.assert_close(probe.activation.transpose(1, 2)[rows], expected.attentions[1].transpose(1, 2)[rows])
    torch.testing.assert_close(found[rows], expected.logits[rows], **TOLERANCE)


@pytest.mark.parametrize(("family", "call"), [*itertools.product(FAMILIES[:2], CALLS)])
@torch.no_grad()
def test_generation_with_a_cache(family: Family, call: str) -> None:
    """Patterns of the prefill and of each decoding step, and a head that is zeroed in all of them."""
    fused, eager = family.models()
    kwargs = {**CALLS[call], "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    pg = PatchableGraph(fused, input_ids=IDS)
    record = RecordPatch()
    with pg.patch({family.pattern: [ZeroPatch(slice=(slice(None), 1)), record]}):
        found = pg.generate(IDS, **kwargs)

    def cut_out(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = args[0].clone()
        changed[..., WIDTH : 2 * WIDTH] = 0
        return (changed, *args[1:])

    with eager.get_submodule(f"{family.module}.{family.projection}").register_forward_pre_hook(cut_out):
        expected = eager.generate(IDS, **kwargs)
    assert torch.equal(found, expected)
    assert [tuple(pattern.shape[2:]) for pattern in record.activations] == [(7, 7), (1, 8), (1, 9), (1, 10), (1, 11)]


@torch.no_grad()
def test_calls_stay_fused_at_the_steps_that_no_patch_is_for() -> None:
    fused, _ = FAMILIES[0].models()
    pg = PatchableGraph(fused, input_ids=IDS)
    kwargs = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = fused.generate(IDS, **kwargs)
    record = RecordPatch(steps=2)
    with pg.patch({FAMILIES[0].pattern: [record, ZeroPatch(slice=(slice(None), 1), steps=2)]}):
        found = pg.generate(IDS, **kwargs)
    assert [tuple(pattern.shape) for pattern in record.activations] == [(3, HEADS, 1, 9)]
    assert all(map(torch.equal, found.logits[:2], expected.logits[:2]))
    assert not torch.allclose(found.logits[2], expected.logits[2], **TOLERANCE)


@torch.no_grad()
def test_heads_that_transformers_packs_are_where_the_names_say() -> None:
    """A padded decoding step of grouped heads has them as rows, where each name still means its own head."""
    fused, eager = FAMILIES[1].models()
    pg = PatchableGraph(fused, input_ids=IDS)
    settings: dict[str, Any] = {"attention_mask": PADDING, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected: list[Tensor] = []

    def double(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = args[0].clone()
        expected.append(changed[..., WIDTH : 2 * WIDTH].clone())
        changed[..., WIDTH : 2 * WIDTH] *= 2
        return (changed, *args[1:])

    attention = eager.get_submodule(FAMILIES[1].module)
    with attention.o_proj.register_forward_pre_hook(double):
        tokens_of_eager = eager.generate(IDS, **settings)
    z, scores, pattern = RecordPatch(), RecordPatch(), RecordPatch()
    at = "layers[1].attn"
    patches = {f"{at}.heads[1].z": [z, CustomPatch(lambda value: value * 2)], f"{at}.scores": scores}
    with pg.patch({**patches, f"{at}.pattern": pattern}):
        assert torch.equal(pg.generate(IDS, **settings), tokens_of_eager)
    rows = PADDING.bool()
    torch.testing.assert_close(z.activations[0][rows], expected[0][rows], **TOLERANCE)
    for found, wanted in zip(z.activations[1:], expected[1:], strict=True):
        torch.testing.assert_close(found, wanted, **TOLERANCE)
    lengths = [(7, 7), (1, 8), (1, 9), (1, 10)]
    for before, after, sizes in zip(scores.activations, pattern.activations, lengths, strict=True):
        assert before.shape == after.shape == (3, HEADS, *sizes)
        torch.testing.assert_close(before.softmax(-1)[:, :, -1], after[:, :, -1])
    with (
        pg.patch({f"{at}.z": CustomPatch(lambda value: value[:, :, :1], any_shape=True, steps=1)}),
        pytest.raises(PatchValueError, match="packs heads that share keys at this step")
        if installed.TRANSFORMERS >= (5, 21)  # earlier ones pack none: 5.20 was tried
        else pytest.raises(RuntimeError),
    ):
        pg.generate(IDS, **settings)
