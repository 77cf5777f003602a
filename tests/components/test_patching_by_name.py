"""A component name in place of a path: patches and probes of it see the part that it means, and no more."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    PatchableGraph,
    PatchMapError,
    PatchValueError,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    UnknownPathError,
    ZeroPatch,
)
from tests.zoo.submodules import Submodules, copies


class Block(Submodules, mlp=[(6, 12), nn.GELU, (12, 6)]):
    def forward(self, x):
        return x + self.mlp(x)


class Tokens(Submodules, embed=partial(nn.Embedding, 11, 6), layers=copies(Block, 3)):
    """Takes tokens, so that there are positions."""

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


x = torch.arange(10).reshape(2, 5)


@pytest.fixture(scope="module")
def pg():
    torch.manual_seed(0)
    return PatchableGraph(Tokens(), x)


def hooked(pg, layer, edit):
    """Returns the output of the model when `edit` changes a clone of what the MLP of a layer returns."""

    def hook(module, args, output):
        changed = output.clone()
        returned = edit(changed)
        return changed if returned is None else returned

    with pg.layers[layer].mlp.register_forward_hook(hook):
        return pg._module(x)


def outputs(pg, patch_map):
    with pg.patch(patch_map):
        return pg(x)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_slice_in_the_name_and_one_of_the_patch_are_taken_one_after_the_other(pg, data):
    shape = torch.Size([2, 5, 6])
    cuts = st.sampled_from([slice(None), slice(1, None), slice(-2, None)])
    index = tuple(data.draw(st.integers(-size, size - 1) | cuts) for size in shape)
    part = torch.empty(shape)[index]
    inner = tuple(data.draw(st.integers(0, size - 1) | st.just(slice(0, 1))) for size in part.shape)
    text = ", ".join(
        str(p) if isinstance(p, int) else f"{'' if p.start is None else p.start}:{'' if p.stop is None else p.stop}"
        for p in index
    )

    def edit(output):
        output[index][inner] = 3.0

    probe = ProbePatch()
    patched = outputs(pg, {f"layers[1].mlp_out[{text}]": [probe, ReplacePatch(value=3.0, slice=inner or None)]})
    assert torch.equal(patched, hooked(pg, 1, edit))
    assert probe.activation.shape == part.shape


def test_each_kind_of_patch_gets_the_part(pg):
    seen = RecordPatch()

    def double(value):
        assert value.shape == (2, 5, 2)
        return value * 2

    def edit(output):
        part = output[:, :, 2:4]
        part[:] = part * 2 + 1
        part[:, :, 0] = 0

    patches = [CustomPatch(double), AddPatch(value=1.0), ZeroPatch(slice=(..., 0)), seen]
    patched = outputs(pg, {"layers[-1].mlp_out[:, :, 2:4]": patches})
    assert torch.equal(patched, hooked(pg, 2, edit))
    assert [value.shape for value in seen.activations] == [(2, 5, 2)]


def test_a_pattern_that_matches_no_path_matches_names(pg):
    by_pattern, by_name = pg.record("**.mlp_out", x), pg.record("layers[*].mlp_out", x)
    assert list(by_pattern) == list(by_name) == [f"layers[{layer}].mlp_out" for layer in range(3)]
    assert all(map(torch.equal, by_pattern.values(), by_name.values()))
    assert torch.equal(outputs(pg, {"**.mlp_out": ZeroPatch()}), outputs(pg, {"layers[*].mlp_out": ZeroPatch()}))
    assert list(pg.record("**.mlp.output", x)) == [f"layers_{layer}.mlp.output" for layer in range(3)]  # a real path


def test_positions_are_those_of_the_value_whatever_part_is_taken(pg):
    def edit(output):
        output[1, 3, 2:] = 0

    assert torch.equal(outputs(pg, {"layers[1].mlp_out[1, :, 2:]": ZeroPatch(positions=3)}), hooked(pg, 1, edit))
    probe = ProbePatch(positions=[0, 2])
    outputs(pg, {"layers[1].mlp_out[:, :, 4]": probe})
    assert probe.activation.shape == (2, 2)
    with pytest.raises(PatchMapError, match="mlp_out"):
        pg.patch({"layers[1].mlp_out[:, 2:]": ZeroPatch(positions=3)}).__enter__()


def test_problems_are_found_before_anything_runs(pg):
    with pytest.raises(UnknownPathError, match=r"layers\[0\]\.mlp\.post"):
        pg.patch({"layers[0].mlp.post[..., [3, 5]]": ZeroPatch()}).__enter__()
    patch_map = {
        "layers[0].mlp_otu": ZeroPatch(),
        "layers[3].mlp_out": ZeroPatch(),
        "layers[0].mlp_out[:, :, 6]": ZeroPatch(),
        "layers[0].mlp_out[..., 1:3]": ZeroPatch(slice=(..., 2)),
        "layers[0].mlp_out[0]": ZeroPatch(slice=(0, 0, 0)),
    }
    with pytest.raises(UnknownPathError) as error:
        pg.patch(patch_map).__enter__()
    assert all(name in str(error.value) for name in patch_map)


def test_a_part_that_is_not_there_in_a_run(pg):
    with pg.patch({"layers[0].mlp_out[:, 4]": ZeroPatch()}), pytest.raises(PatchValueError, match="mlp"):
        pg(x[:, :3])


def test_a_patch_must_keep_the_shape_of_a_part(pg):
    shorter = CustomPatch(lambda value: value[..., :1])
    with pg.patch({"layers[0].mlp_out[:, :, 2:4]": shorter}), pytest.raises(PatchValueError, match="mlp"):
        pg(x)


@pytest.mark.parametrize("part", ["[:, 7]", "[:, -1]", "[2]", "[:, 7:9]", "[:, 1:-1]"])
def test_brackets_are_for_the_sizes_of_the_run(pg, part):
    """And not for those of the example, which is shorter and has fewer rows."""
    name, longer = "layers[1].mlp_out", torch.arange(27).reshape(3, 9) % 11
    with torch.no_grad():
        expected = pg.record(name, longer)[name].clone()
        index = eval(f"np.s_{part}", {"np": np})
        assert torch.equal(pg.record(name + part, longer)[name + part], expected[index])
        with pg.patch({name + part: AddPatch(value=1.0)}):
            patched = pg.record(name, longer)[name]
    expected[index] += 1.0
    torch.testing.assert_close(patched, expected)
    with pytest.raises(PatchValueError, match="mlp"):
        pg.record(f"{name}[:, 9]", longer)
