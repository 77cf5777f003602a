"""TransformerLens: a `HookedTransformer` is a module like any other, and so are its hook points: all have names."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from graphpatch_notebook import CustomPatch, PatchableGraph, ProbePatch, RecordPatch, ReplacePatch, ZeroPatch

GREEDY = {"do_sample": False, "stop_at_eos": False, "verbose": False}


@functools.cache
def lens(**settings: Any) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=2,
        d_model=16,
        n_ctx=24,
        d_head=4,
        n_heads=4,
        d_mlp=32,
        d_vocab=20,
        act_fn="gelu_new",
        device="cpu",
        seed=0,
        **settings,
    )
    model = HookedTransformer(config).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(noise, alpha=0.2)
    return model


@functools.cache
def captured() -> PatchableGraph:
    return PatchableGraph(lens(), ids(2, 7))


def ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 20, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_runs_as_it_is() -> None:
    model, pg = lens(), captured()
    for inputs in (ids(2, 7), ids(3, 11, seed=1)):
        assert torch.equal(model(inputs), pg(inputs))
        for expected, found in zip(model(inputs, return_type="both"), pg(inputs, return_type="both"), strict=True):
            assert torch.equal(expected, found)


def test_patches_that_change_nothing() -> None:
    model, pg = lens(), captured()
    same = {path: CustomPatch(custom_op=lambda value: value, requires_clone=False) for path in pg.nodes}
    with pg.patch(same, strict=True):
        assert torch.equal(model(ids(3, 11)), pg(ids(3, 11)))


@pytest.mark.parametrize(
    ("hook", "path"),
    [
        ("hook_embed", "hook_embed.output"),
        ("blocks.0.hook_resid_pre", "blocks_0.hook_resid_pre.output"),
        ("blocks.1.attn.hook_q", "blocks_1.attn.hook_q.output"),
        ("blocks.0.attn.hook_pattern", "blocks_0.attn.hook_pattern.output"),
        ("blocks.1.attn.hook_z", "blocks_1.attn.hook_z.output"),
        ("blocks.0.mlp.hook_post", "blocks_0.mlp.hook_post.output"),
        ("blocks.0.hook_resid_post", "blocks_0.hook_resid_post.output"),
    ],
)
def test_hook_points_as_with_its_own_hooks(hook: str, path: str) -> None:
    model, pg = lens(), captured()
    inputs = ids(3, 9)

    def zero_last(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[:, -1] = 0
        return value * 1.5

    expected = model.run_with_hooks(inputs, fwd_hooks=[(hook, zero_last)])
    patches = [ZeroPatch(slice=(slice(None), -1)), CustomPatch(custom_op=lambda value: value * 1.5)]
    with pg.patch({path: patches}):
        found = pg(inputs)
    assert torch.equal(expected, found)
    assert not torch.equal(model(inputs), found)


def test_probes_as_its_cache() -> None:
    model, pg = lens(), captured()
    _, cache = model.run_with_cache(ids(3, 9))
    paths = {
        "blocks.0.hook_resid_post": "blocks_0.hook_resid_post.output",
        "blocks.1.attn.hook_pattern": "blocks_1.attn.hook_pattern.output",
        "ln_final.hook_scale": "ln_final.hook_scale.output",
    }
    probes = {path: ProbePatch() for path in paths.values()}
    with pg.patch(probes):
        pg(ids(3, 9))
    for name, path in paths.items():
        assert torch.equal(cache[name], probes[path].activation)


def test_its_own_methods_run_patched() -> None:
    model, pg = lens(), captured()
    prompt = ids(2, 4)
    plain = model.generate(prompt, max_new_tokens=4, **GREEDY)
    assert torch.equal(plain, pg.generate(prompt, max_new_tokens=4, **GREEDY))
    record = RecordPatch()
    ban = ReplacePatch(value=-100.0, slice=(..., int(plain[0, 4])))
    with pg.patch({"unembed.output": [ban, record]}):
        found = pg.generate(prompt, max_new_tokens=4, **GREEDY)
    assert len(record.activations) == 4
    assert not (found[:, 4:] == plain[0, 4]).any()
    with pg.patch({"blocks_0.hook_resid_post.output": ZeroPatch()}):
        _, cache = pg.run_with_cache(prompt)
    assert torch.equal(cache["blocks.1.hook_resid_pre"], torch.zeros(2, 4, 16))
