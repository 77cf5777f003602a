"""Patches on values of all kinds, and the errors that only the run can show."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import attrgetter, itemgetter
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    FromPatch,
    GraphPatchWarning,
    PatchableGraph,
    PatchMapError,
    PatchValueError,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    UnknownPathError,
    ZeroPatch,
)
from tests.components.families import captured_model
from tests.hooks import registered
from tests.zoo.awkward_values import Slots
from tests.zoo.submodules import Submodules


class Numbers(nn.Module):
    """Values that are no tensors, and decide what happens."""

    def forward(self, x: Tensor, steps: int = 2, scale: float = 0.5, is_shifted: bool = False) -> Tensor:
        total = x.sum().item()
        for _ in range(steps):
            x = x * scale
        if (x > 0).all():
            x = x + total
        return x + 1 if is_shifted else x


X = torch.ones(2, 2)


def patched(pg: PatchableGraph, path: str, patch: Any, *args: Any) -> Tensor:
    with pg.patch({path: patch}, strict=True):
        return pg(*args)


def test_ints_floats_and_bools_are_patched() -> None:
    pg = PatchableGraph(Numbers(), X, 2, 0.5, False)
    assert torch.equal(pg(X, 2, 0.5, False), torch.full((2, 2), 4.25))
    assert torch.equal(patched(pg, "steps", ReplacePatch(0), X, 2, 0.5, False), torch.full((2, 2), 5.0))
    assert torch.equal(patched(pg, "scale", AddPatch(0.5), X, 2, 0.5, False), torch.full((2, 2), 5.0))
    assert torch.equal(patched(pg, "is_shifted", ReplacePatch(True), X, 2, 0.5, False), torch.full((2, 2), 5.25))
    assert torch.equal(patched(pg, "total", ZeroPatch(), X, 2, 0.5, False), torch.full((2, 2), 0.25))
    assert torch.equal(patched(pg, "bool", ReplacePatch(False), X, 2, 0.5, False), torch.full((2, 2), 0.25))


@pytest.mark.parametrize(
    "patch",
    [
        ReplacePatch(torch.ones(3)),
        AddPatch(torch.ones(5, 2)),
        ZeroPatch(slice=7),
        AddPatch(torch.ones(2, 2, dtype=torch.complex64)),
        ReplacePatch(torch.ones(2, 2, device="meta")),
    ],
)
def test_errors_of_the_run_name_the_path(patch: Any) -> None:
    with pytest.raises(PatchValueError, match="'relu'"):
        patched(PatchableGraph(nn.ReLU(), X), "relu", patch, X)


class WritesLater(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept = x + 1
        left = kept[:, 0]
        left.fill_(7.0)
        return kept * 1


def test_a_patched_view_that_is_filled_later_is_warned_of() -> None:
    pg = PatchableGraph(WritesLater(), X)
    with pytest.warns(GraphPatchWarning, match="'left'"):
        patched(pg, "left", ZeroPatch(), X)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y += 1
        y[0] = 5.0
        return y * 2


def test_patches_on_in_place_operations_are_written_back() -> None:
    pg = PatchableGraph(InPlace(), X)
    assert torch.equal(patched(pg, "y_1", ZeroPatch(), X), torch.tensor([[10.0, 10.0], [0.0, 0.0]]))
    assert torch.equal(patched(pg, "setitem", AddPatch(1.0), X), torch.tensor([[12.0, 12.0], [6.0, 6.0]]))
    with pytest.raises(PatchValueError, match="'y_1'"):
        patched(pg, "y_1", CustomPatch(lambda value: value[0]), X)


def test_what_is_a_number_now_and_was_a_tensor_is_an_error() -> None:
    pg = PatchableGraph(Numbers(), X, 2, X)
    with pytest.raises(PatchValueError, match="'scale'"):
        patched(pg, "scale", ReplacePatch(X), X, 2, 0.5)


class Attrs:
    """What attrs makes of a class: `__attrs_attrs__`, and its own `__setattr__` if it is frozen."""

    __attrs_attrs__ = (SimpleNamespace(name="a"), SimpleNamespace(name="b"))

    def __init__(self, a: Any, b: Any) -> None:
        self.__dict__.update(a=a, b=b)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("frozen")


class Private:
    """It holds something of its own, with which a copy of its public fields would not be one."""

    __slots__ = ("_cache", "a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b, self._cache = a, b, 1


MAKERS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any], str]] = {
    "attrs": (Attrs, attrgetter("a", "b"), "a"),
    "slots": (Slots, attrgetter("scale", "shift"), "scale"),
    "namespace": (lambda a, b: SimpleNamespace(a=a, b=b), attrgetter("a", "b"), "a"),
    "queue": (lambda a, b: deque([a, b], maxlen=2), tuple, "sub_0"),
    "read-only": (lambda a, b: MappingProxyType({"a": a, "b": b}), itemgetter("a", "b"), "a"),
    "own": (Private, attrgetter("a", "b"), ""),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_objects_that_say_what_they_hold_are_containers(kind: str) -> None:
    """Patches on the first part of what goes into a module, and of what comes out, are those of hooks on it."""
    make, parts, first = MAKERS[kind]
    seen: list[Any] = []

    class Inner(nn.Module):
        def forward(self, pair: Any) -> Any:
            seen.append(pair)
            a, b = parts(pair)
            return make(a * 3, b - 1)

    class Outer(Submodules, inner=Inner):
        def forward(self, x: Tensor) -> Tensor:
            result = self.inner(make(x * 2, x + 1))
            seen.append(result)
            a, b = parts(result)
            return a * 5 + b

    pg = PatchableGraph(model := Outer(), X)
    if not first:
        assert not [path for path in pg.nodes if "|" in path]
        with pytest.raises(PatchMapError), pg.patch({"inner.output|a": ZeroPatch()}):
            pass
        return
    assert torch.equal(patched(pg, f"inner.pair|{first}", AddPatch(1.0), X), model(X) + 15)
    assert torch.equal(patched(pg, f"inner.output|{first}", AddPatch(1.0), X), model(X) + 5)
    assert torch.equal(pg.record(f"inner.output|{first}", X)[f"inner.output|{first}"], X * 6)
    assert {type(value) for value in seen} == {type(make(X, X))}
    assert {getattr(value, "maxlen", 2) for value in seen} == {2}
    pg.verify(X)


# -- values that are written later, in other ranks, and in other memory layouts ----------------------------------------


class WrittenLater(nn.Module):
    """Each value is written into by the next line, after a copy of it was used."""

    def forward(self, x: Tensor) -> Tensor:
        first = x * 2
        middle = first[:, :2] + 1
        first.mul_(10)
        second = middle.tanh()
        middle.zero_()
        target = x[:, :2] * 3
        second.add_(5)
        return target + second + first.sum()


READERS: dict[str, tuple[Callable[[str], Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "all": (lambda path: FromPatch(path, lambda value: value[:, :2]), lambda value, _: value[:, :2]),
    "rows": (lambda path: FromPatch(path, lambda v: v[:, :2], rows=[1, 0]), lambda value, _: value[[1, 0], :2]),
    "slice": (
        lambda path: FromPatch(path, lambda v: v[:, :1], slice=(slice(None), slice(1, 2))),
        lambda value, target: torch.cat([target[:, :1], value[:, :1]], 1),
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("path", ["first", "middle", "second"])
def test_sources_are_read_as_they_were_before_the_model_writes_into_them(path: str, reader: str) -> None:
    """By plain torch, and so do probes and records; the last line still gets what was written."""
    make, expected = READERS[reader]
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    came_up = {"first": x * 2, "middle": (x * 2)[:, :2] + 1, "second": ((x * 2)[:, :2] + 1).tanh()}
    probe, record = ProbePatch(), RecordPatch()
    pg = PatchableGraph(WrittenLater(), x)
    with pg.patch({"target": make(path), path: [probe, record]}):
        found = pg(x)
    target = expected(came_up[path], x[:, :2] * 3)
    assert torch.equal(found, target + (came_up["second"] + 5) + (x * 20).sum())
    assert torch.equal(probe.activation, came_up[path])
    assert torch.equal(record.activations[0], came_up[path])


class OtherRanks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 2
        return hidden.sum()


@pytest.mark.parametrize("flags", [(True, True, True), (False, True, True), (True, False, True), (True, True, False)])
@pytest.mark.parametrize("kinds", [(ProbePatch,) * 3, (ProbePatch, ZeroPatch, RecordPatch)])
def test_all_patches_on_a_value_of_another_rank_must_say_that_this_is_meant(kinds: Any, flags: Any) -> None:
    pg, other = PatchableGraph(OtherRanks(), torch.ones(2, 3)), torch.ones(2, 3, 4)
    patches = [kind(any_shape=flag) for kind, flag in zip(kinds, flags, strict=True)]
    with pg.patch({"hidden": patches}):
        if not all(flags):
            with pytest.raises(PatchValueError, match="'hidden'"):
                pg(other)
            return
        pg(other)
    changed = any(kind is ZeroPatch for kind in kinds)
    kept = [value for patch in patches for value in patch.values_kept()]
    assert [value.shape for value in kept] == [other.shape] * len(kept)
    assert [bool(value.any()) for value in kept] == [True, not changed, True][: len(kept)]


class Transposed(nn.Module):
    """What it computes last depends on where the entries are in memory, as sums of a kernel may."""

    def forward(self, x: Tensor) -> Tensor:
        turned = (x * 2).transpose(1, 2)
        return torch.as_strided(turned, (turned.numel(),), (1,))


CHANGES: dict[str, tuple[Any, Callable[[Tensor], Any]]] = {
    "zero": (ZeroPatch(slice=(slice(None), 1)), lambda value: value[:, 1].zero_()),
    "all": (AddPatch(value=1.0), lambda value: value.add_(1)),
    "add": (AddPatch(value=1.0, slice=(..., 2)), lambda value: value[..., 2].add_(1)),
    "replace": (ReplacePatch(value=7.0, slice=0), lambda value: value[0].fill_(7)),
    "custom": (
        CustomPatch(custom_op=lambda part: part * 3, slice=(slice(None), slice(0, 2))),
        lambda value: value[:, :2].mul_(3),
    ),
    "rows": (
        FromPatch("turned", lambda value: value[..., 0], rows=[1, 1], slice=(..., 0)),
        lambda value: value[0, :, 0].copy_(value[1, :, 0]),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_patched_value_keeps_its_place_in_memory(change: str) -> None:
    patch, edit = CHANGES[change]
    x = torch.arange(24.0).reshape(2, 3, 4)
    expected = (x * 2).transpose(1, 2)
    edit(expected)
    pg = PatchableGraph(Transposed(), x)
    with pg.patch({"turned": patch}):
        assert torch.equal(pg(x), torch.as_strided(expected, (24,), (1,)))


def test_components_of_a_recording_have_short_names() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=8, vocab_size=16)).eval()
    ids = torch.randint(0, 16, (2, 5))
    pg = PatchableGraph(model, ids)
    expected = model(ids, output_hidden_states=True).hidden_states
    recording = pg.record(["layers[*].resid_pre", "layers[*].attn.z", "layers[1:].mlp.post"], ids)
    assert torch.equal(recording["resid_pre", 2], expected[2])
    assert torch.equal(recording.stack("resid_pre"), torch.stack(expected[:3]))
    assert torch.equal(recording["z", 1, 1], recording["layers[1].attn.heads[1].z"])
    assert torch.equal(recording.stack("z")[2], recording["z", -1])
    assert torch.equal(recording.stack("post"), torch.stack([recording[f"layers[{n}].mlp.post"] for n in (1, 2)]))
    for absent in (("post", 0), ("q", 0), ("resid_pre", 7)):
        with pytest.raises(UnknownPathError, match=absent[0]):
            recording[absent]
    with pytest.raises(UnknownPathError, match="pattern"):
        recording.stack("pattern")


@pytest.mark.parametrize("name", ["gpt2", "vit", "transposed"])
def test_recordings_as_arrays_have_the_same_axes_on_every_model(name: str) -> None:
    torch.manual_seed(0)
    if name == "transposed":  # the positions come first
        layer = torch.nn.TransformerEncoderLayer(32, 4, 48, norm_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        given = torch.randn(7, 2, 32)
        recording = PatchableGraph(model, given).record("layers[*].resid_post", given)
        found = recording.to_dataarray("resid_post")
        assert found.dims == ("layer", "batch", "position", "channel")
        assert np.array_equal(found.sel(layer=1), recording["resid_post", 1].detach())
        return
    pg, given = captured_model(name)
    projections = {
        "gpt2": "transformer.h.{}.attn.c_proj",
        "vit": "vit.layers.{}.attention.o_proj",
    }
    kept: list[Tensor] = []
    modules = [pg._module.get_submodule(projections[name].format(number)) for number in range(2)]
    handles = [module.register_forward_pre_hook(lambda _, args: kept.append(args[0])) for module in modules]
    with torch.no_grad(), registered(handles):
        pg._module(given)
    recording = pg.record(["layers[*].attn.z", "layers[*].attn.pattern", "layers[*].resid_post"], given)
    found = recording.to_dataarray("z")
    assert found.dims == ("layer", "batch", "position", "head", "channel")
    assert found.coords["layer"].values.tolist() == [0, 1]
    for number, merged in enumerate(kept):
        assert np.allclose(found.sel(layer=number), merged.unflatten(-1, (4, 8)), atol=1e-6)
    assert recording.to_dataarray("pattern").dims == ("layer", "batch", "head", "query", "key")
    assert recording.to_dataarray("resid_post").dims == ("layer", "batch", "position", "channel")
    with pytest.raises(UnknownPathError, match="mlp_out"):
        recording.to_dataarray("mlp_out")


@pytest.mark.parametrize("name", ["gpt2", "neox", "mixtral"])
def test_states_of_the_stream_and_what_each_head_adds(name: str) -> None:
    pg, given = captured_model(name)
    with torch.no_grad():
        states = pg._module(given, output_hidden_states=True).hidden_states
        recording = pg.record(["layers[*].resid_*", "layers[*].attn.z", "layers[*].attn_out"], given)
        found, labels = recording.accumulated_resid(incl_mid=name != "neox", return_labels=True)
        results, heads = recording.stack_head_results(return_labels=True)
        by_layer = results.unflatten(0, (2, 4))
        assert heads == [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
        for layer in range(2):
            bias = 0 if layer in pg.weights.b_O.missing else pg.weights.b_O[layer]
            written = recording["attn_out", layer].view_as(found[0]) - bias
            torch.testing.assert_close(by_layer[layer].sum(0), written, rtol=1e-4, atol=1e-4)
            alone = recording["z", layer, 1] @ pg.weights.W_O[layer, 1]
            torch.testing.assert_close(by_layer[layer, 1], alone.view_as(found[0]), rtol=1e-4, atol=1e-5)
    before = recording.accumulated_resid()
    assert torch.equal(before[:2], torch.stack(states[:2]))  # the last one of transformers is normalized
    assert torch.equal(before[-1], recording["resid_post", 1])
    if name == "neox":  # attention and MLP read the same state
        assert labels == ["0_pre", "1_pre", "final_post"]
        assert torch.equal(found, before)
    else:
        assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "final_post"]
        assert torch.equal(found[::2], before)
        written = torch.stack([recording["attn_out", layer].view_as(before[0]) for layer in range(2)])
        torch.testing.assert_close(found[1::2], before[:2] + written)
    at_the_end = pg.record(["layers[*].attn.z"], given, positions=-1)
    torch.testing.assert_close(at_the_end.stack_head_results(), results[..., -1:, :])
    for call in (at_the_end.accumulated_resid, pg.record("layers[*].resid_post", given).stack_head_results):
        with pytest.raises(UnknownPathError, match=r"resid_pre|\.z"):
            call()


def test_a_graph_displays_its_tree() -> None:
    pg = PatchableGraph(torch.nn.Linear(2, 3), torch.ones(1, 2))
    assert pg._repr_html_() == pg.graph._repr_html_()
