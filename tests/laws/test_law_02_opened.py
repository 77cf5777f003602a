"""Law 2 inside fused calls: identities and probes on every node, on every call of models of the zoo.

Where a value inside is patched, its call takes the steps in place of the fused kernel, which rounds differently.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from graphpatch_notebook import CustomPatch, ExtractionOptions, PatchableGraph, ProbePatch
from tests.zoo import Case, case_by_name, installed
from tests.zoo.values import flatten

INTO_GRAPHS = ExtractionOptions(decompose=["scaled_dot_product_attention", "multi_head_attention_forward"])
TORCH = ["torch-attention", "torch-encoder-layer-post", "torch-decoder-layer", "torch-transformer"]
USUAL = ["gemma3-sdpa", "bart-sdpa", "llama-bfloat16-sdpa"]
OTHERS = ["qwen2-sdpa", "bert-sdpa", "clip-sdpa", "whisper-sdpa", "vit-sdpa"]
if installed.TRANSFORMERS >= (5, 0):  # before, T5 writes its attention out
    OTHERS.append("t5-sdpa")
NAMES = [*TORCH, *USUAL, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)]
FUSED = (functional.scaled_dot_product_attention, functional.multi_head_attention_forward)


def captured(case: Case, options: ExtractionOptions | None = None) -> tuple[Any, PatchableGraph]:
    model, example = case.build(), case.example()
    return model, PatchableGraph(model, options or ExtractionOptions(), *example.args, **example.kwargs)


class FusedCalls(TorchFunctionMode):
    """Counts the calls of fused functions."""

    count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in FUSED
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("case_name", "options"),
    [
        *((name, None) for name in (*TORCH, *USUAL)),
        *(pytest.param(name, None, marks=pytest.mark.exhaustive) for name in OTHERS),
        *(pytest.param(name, INTO_GRAPHS, id=f"{name}-in-graphs") for name in TORCH),
    ],
)
def test_on_every_call(case_name: str, options: ExtractionOptions | None) -> None:
    case = case_by_name(case_name)
    model, pg = captured(case, options)
    tolerance = 0.1 if "bfloat16" in case.name else 1e-5
    again = case.calls(model)
    patches = {path: CustomPatch(lambda value: value, requires_clone=False, any_shape=True) for path in pg.nodes}
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


@pytest.mark.parametrize("name", NAMES)
def test_what_is_recorded_without_being_computed_is_what_probes_find(name: str) -> None:
    """Shapes, dtypes and devices, and which calls are opened: those of which a value is probed, and no others."""
    case = case_by_name(name)
    model, pg = captured(case)
    inside = [path for path, meta in pg.nodes.items() if meta.opens is not None]
    assert inside
    probes = {path: ProbePatch() for path in inside}
    with torch.no_grad():
        with FusedCalls() as all_fused:
            case.example().run(model)
        with pg.patch(probes), FusedCalls() as none_fused:
            case.example().run(pg)
        with pg.patch({inside[-1]: ProbePatch()}), FusedCalls() as all_but_one:
            case.example().run(pg)
    for path, probe in probes.items():
        value, meta = probe.activation, pg.nodes[path]
        assert value is not None
        assert (value.shape, value.dtype, value.device) == (meta.shape, meta.dtype, meta.device), path
    patterns = [path for path in inside if pg.nodes[path].op == "softmax"]
    assert all_fused.count - none_fused.count == len(patterns)
    assert all_but_one.count == all_fused.count - 1
