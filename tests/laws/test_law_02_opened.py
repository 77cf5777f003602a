"""Law 2 for attention that was opened: identities on every node, steps included, on every call of models of the zoo.

Where a step is patched, its call takes the steps in place of the fused kernel, which rounds differently.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from graphpatch_notebook import CustomPatch, ExtractionOptions, PatchableGraph
from tests.zoo import Case, case_by_name, installed
from tests.zoo.values import bit_equal, flatten

OPTIONS = ExtractionOptions(decompose=["scaled_dot_product_attention", "multi_head_attention_forward"])
TORCH = ["torch-attention", "torch-encoder-layer-post", "torch-decoder-layer", "torch-transformer"]
LANGUAGE = ["gemma3-sdpa", "qwen2-sdpa", "bert-sdpa", "bart-sdpa", "llama-bfloat16-sdpa"]
if installed.TRANSFORMERS >= (5, 0):  # before, T5 writes its attention out
    LANGUAGE.append("t5-sdpa")
OTHERS = ["clip-sdpa", "whisper-sdpa", "vit-sdpa"]


@pytest.mark.parametrize(
    "case", [case_by_name(name) for name in (*TORCH, *LANGUAGE, *OTHERS)], ids=lambda case: case.name
)
def test_on_every_call(case: Case) -> None:
    model, example = case.build(), case.example()
    pg = PatchableGraph(model, OPTIONS, *example.args, **example.kwargs)
    tolerance = 0.1 if "bfloat16" in case.name else 1e-5
    patches = {path: CustomPatch(lambda value: value, requires_clone=False, any_shape=True) for path in pg.nodes}
    again = case.calls(model)
    for name, call in case.calls(model).items():
        expected = dict(flatten(call.run(model)))
        with warnings.catch_warnings(), pg.patch(patches):
            warnings.simplefilter("ignore")  # other inputs take other branches
            found = dict(flatten(again[name].run(pg)))
        assert found.keys() == expected.keys(), name
        for path, value in expected.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(
                    found[path], value, rtol=tolerance, atol=tolerance, equal_nan=True, msg=f"{name} {path}"
                )


@pytest.mark.parametrize("case", [case_by_name(name) for name in TORCH[:2] + LANGUAGE[:1]], ids=lambda case: case.name)
def test_without_patches_the_model_runs_as_it_is(case: Case) -> None:
    model, example = case.build(), case.example()
    pg = PatchableGraph(model, OPTIONS, *example.args, **example.kwargs)
    again = case.calls(model)
    with torch.no_grad():
        for name, call in case.calls(model).items():
            assert bit_equal(again[name].run(pg), call.run(model)) is None, name
