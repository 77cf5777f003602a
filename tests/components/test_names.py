"""Component names: the text and back, and what they mean among the components of a model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpatch_notebook.components import Component
from graphpatch_notebook.components.names import ComponentName, look_up, parse_name, why_missing
from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.patches.slices import composed
from graphpatch_notebook.paths import is_component_name

small = st.integers(-9, 9)
bounds = st.none() | small
numbers = small | st.just(slice(None)) | st.builds(slice, bounds, bounds) | st.lists(small, min_size=2).map(tuple)
parts = small | st.builds(slice, bounds, bounds, st.none() | st.integers(1, 3)) | st.just(...)
slices = st.lists(parts, max_size=3).filter(lambda index: index.count(...) < 2).map(tuple)
stacks = st.sampled_from(["", "decoder", "model.text_model.encoder"])
layered = st.builds(
    ComponentName, st.sampled_from([("resid_pre",), ("attn", "z"), ("mlp", "post")]), stacks, numbers, index=slices
)
of_members = st.builds(
    ComponentName, st.sampled_from([("attn", "heads", "z"), ("experts", "out")]), stacks, numbers, numbers, slices
)
outside = st.builds(ComponentName, st.sampled_from([("@embed",), ("@logits",)]), stacks, index=slices)


@given(layered | of_members | outside)
def test_text_and_back(name):
    assert parse_name(str(name)) == name
    assert is_component_name(str(name))


@pytest.mark.parametrize(
    "text",
    [
        "layers[3]",
        "layers[x].resid_pre",
        "layers[1.5].resid_pre",
        "layers[3].attn.heads[2]",
        "layers[3].attn[2].z",
        "layers[3].mlp.post[::-1]",
        "layers[3].mlp.post[__import__('os')]",
        "layers[3].mlp.post[[0, 2]]",
        "layers[[]].resid_pre",
        "layers[[1:2]].resid_pre",
        "layers[3].",
        "layers[3].resid_pre.",
        "h_3.attn",
        "@",
    ],
)
def test_other_texts(text):
    with pytest.raises(ValueError, match=re.escape(text)):
        parse_name(text)


def index_of(draw, shape, dims):
    return tuple(
        draw(st.integers(-size, size - 1) | st.builds(slice, bounds, bounds, st.none() | st.integers(1, 3)))
        for size in shape[:dims]
    )


@given(st.data())
def test_composed_index_takes_a_part_of_a_part(data):
    tensor = torch.arange(3 * 4 * 5).reshape(3, 4, 5)
    outer = index_of(data.draw, tensor.shape, data.draw(st.integers(0, 3)))
    part = tensor[outer]
    inner = index_of(data.draw, part.shape, data.draw(st.integers(0, part.dim()))) if part.numel() else ()
    index = composed(outer, inner, tensor.shape)
    assert torch.equal(tensor[index], part[inner])
    with_ellipsis = (..., *inner) if len(inner) == part.dim() else (*inner, ...)
    assert torch.equal(tensor[composed(outer, with_ellipsis, tensor.shape)], part[with_ellipsis])


@dataclass
class Model:
    parts: dict[str, Component]
    layers: dict[str, int]
    missing: dict[str, str] = field(default_factory=dict)

    def __contains__(self, name):
        return name in self.parts

    def __getitem__(self, name):
        return self.parts[name]

    def __iter__(self):
        return iter(self.parts)

    def why_missing(self, name):
        return why_missing(self.missing, name)


@pytest.fixture(scope="module")
def model():
    """Two layers: attention with its heads in a dimension, or packed; and experts that are modules, in the second."""
    parts = []
    for layer in range(2):
        stream = ("batch", "position", "channel")
        parts += [
            Component(f"layers[{layer}].resid_pre", f"h_{layer}.x", (2, 5, 12), stream),
            Component(
                f"layers[{layer}].attn.z", f"h_{layer}.z", (2, 4, 5, 3), ("batch", "head", "position", "channel")
            ),
            Component(
                f"layers[{layer}].attn.k", f"h_{layer}.k", (2, 2, 5, 3), ("batch", "head", "position", "channel")
            ),
            Component(
                f"layers[{layer}].attn_out",
                f"h_{layer}.qkv",
                (2, 5, 36),
                stream,
                (slice(None), slice(None), slice(0, 12)),
            ),
        ]
    parts += [
        Component(f"layers[1].experts[{number}].out", f"h_1.e_{number}", (7, 12), ("token", "channel"))
        for number in range(3)
    ]
    parts.append(Component("@logits", "output", (2, 5, 50), ("batch", "position", "vocab")))
    return Model(
        {part.name: part for part in parts},
        {"": 2},
        {"layers[*].attn.pattern": "attention is one fused call", "layers[0].experts[*].out": "they run as one call"},
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layers[0].resid_pre", [("layers[0].resid_pre", "h_0.x", ())]),
        ("layers[-1].resid_pre[:, -1]", [("layers[1].resid_pre[:, -1]", "h_1.x", (slice(None), -1))]),
        ("layers[*].resid_pre", [(f"layers[{i}].resid_pre", f"h_{i}.x", ()) for i in range(2)]),
        ("layers[1, 0].resid_pre", [(f"layers[{i}].resid_pre", f"h_{i}.x", ()) for i in (1, 0)]),
        ("layers[[1, 0]].resid_pre", [(f"layers[{i}].resid_pre", f"h_{i}.x", ()) for i in (1, 0)]),
        ("layers[[1]].res*", [("layers[1].resid_pre", "h_1.x", ())]),
        (
            "layers[0].*[0]",
            [("layers[0].resid_pre[0]", "h_0.x", (0,)),
             ("layers[0].attn_out[0]", "h_0.qkv", (0, slice(None), slice(0, 12)))],
        ),
        ("layers[*].attn.*", [(f"layers[{i}].attn.{part}", f"h_{i}.{part}", ()) for i in range(2) for part in "zk"]),
        (
            "layers[0].a**.heads[[0, -1]].*[0]",
            [(f"layers[0].attn.heads[{i}].{part}[0]", f"h_0.{part}", (0, i))
             for part, heads in (("z", (0, 3)), ("k", (0, 1))) for i in heads],
        ),
        (
            "layers[0].attn.heads[3].*",
            [("layers[0].attn.heads[3].z", "h_0.z", (slice(None), 3)),
             ("layers[0].attn.heads[1].k", "h_0.k", (slice(None), 1))],
        ),
        ("layers[*].exp*.*", [(f"layers[1].experts[{i}].out", f"h_1.e_{i}", ()) for i in range(3)]),
        ("@*", [("@logits", "output", ())]),
        ("layers[0].attn.heads[-1].z", [("layers[0].attn.heads[3].z", "h_0.z", (slice(None), 3))]),
        ("layers[0].attn.heads[1].z[:, 2]", [("layers[0].attn.heads[1].z[:, 2]", "h_0.z", (slice(None), 1, 2))]),
        ("layers[0].attn.heads[*].k", [(f"layers[0].attn.heads[{i}].k", "h_0.k", (slice(None), i)) for i in range(2)]),
        (
            "layers[0].attn_out[..., 4:]",
            [("layers[0].attn_out[..., 4:]", "h_0.qkv", (slice(None), slice(None), slice(4, 12, 1)))],
        ),
        ("layers[*].experts[0:2].out", [(f"layers[1].experts[{i}].out", f"h_1.e_{i}", ()) for i in range(2)]),
        ("@logits[0]", [("@logits[0]", "output", (0,))]),
        ("**.attn.heads[1].*[0]",
         [(f"layers[{i}].attn.heads[{head}].{part}[0]", f"h_{i}.{part}", (0, head))
          for i in range(2) for part, head in (("z", 1), ("k", 0))]),
        ("*.attn.z", [(f"layers[{i}].attn.z", f"h_{i}.z", ()) for i in range(2)]),
        ("**.experts[2].out[0]", [("layers[1].experts[2].out[0]", "h_1.e_2", (0,))]),
        ("**.layers[-1].resid_pre", [("layers[1].resid_pre", "h_1.x", ())]),
        ("**.@*[0]", [("@logits[0]", "output", (0,))]),
    ],
)  # fmt: skip
def test_look_up(model, text, expected):
    found = look_up(model, text)
    assert [(one.name, one.path, one.index) for one in found] == expected
    for one in found:  # each name means itself
        assert look_up(model, one.name) == [one]


@pytest.mark.parametrize(
    "text",
    [
        "layers[2].resid_pre",
        "layers[5:].resid_pre",
        "layers[0].attn.heads[4].z",
        "layers[0].attn.heads[2].k",
        "layers[0].attn.heads[2].resid_pre",
        "model.layers[0].mlp.output",
        "layers[0].resid_per",
        "layers[0].attn.q*",
        "layers[0].heads[0].resid*",
        "layers[0].experts[0].*",
        "layers[0].experts[1].out[0]",
        "layers[0].experts[1:].out",
        "layers[1].attn.pattern",
        "layers[*].attn.pattern",
        "layers[1].experts[3].out",
        "layers[0].resid_pre[..., 0, ...]",
        "layers[0].resid_pre[0, 0, 0, 0]",
        "decoder.layers[0].resid_pre",
        "@embed",
        "layers[0]",
        "layers[1].attn.heads[3].result",
        "layers[0].attn.result",
        "**.attn.heads[4].z",
        "**.attn.heads[0].pattern",
        "*.layers[*].resid_pre",
    ],
)
def test_look_up_of_what_is_not_there(model, text):
    with pytest.raises(UnknownPathError, match=re.escape(text)):
        look_up(model, text)


def test_errors_name_what_is_near_or_meant(model):
    for text, near in (
        ("layers[0].resid_per", "layers[0].resid_pre"),
        ("layers[0].attn.heads[2].k", "layers[0].attn.heads[1].k"),  # which head 2 of four reads
        ("layers[1].attn.heads[3].result", "layers[1].attn.heads[3].z"),
        ("layers[1].attn.pattern", "attention is one fused call"),  # as the model says
    ):
        with pytest.raises(UnknownPathError, match=re.escape(near)):
            look_up(model, text)


def test_patterns_of_stacks():
    parts = [
        Component(f"{stack}.layers[{i}].{part}", f"{stack}.{part}_{i}", (2, 5, 12), ("batch", "position", "channel"))
        for stack, count in (("model.encoder", 1), ("model.decoder", 2))
        for i in range(count)
        for part in ("mlp_out", *["cross_attn_out"] * (stack == "model.decoder"))
    ]
    model = Model({part.name: part for part in parts}, {"model.encoder": 1, "model.decoder": 2})
    meant = {
        "**.layers[*].mlp_out": ["encoder.layers[0].mlp_out", "decoder.layers[0].mlp_out", "decoder.layers[1].mlp_out"],
        "*.*.layers[0].mlp_out": ["encoder.layers[0].mlp_out", "decoder.layers[0].mlp_out"],
        "**.layers[1].mlp_out": ["decoder.layers[1].mlp_out"],
        "**.layers[*].cross*": ["decoder.layers[0].cross_attn_out", "decoder.layers[1].cross_attn_out"],
        "model.d*.layers[0].*": ["decoder.layers[0].mlp_out", "decoder.layers[0].cross_attn_out"],
    }
    for text, expected in meant.items():
        assert [one.name for one in look_up(model, text)] == [f"model.{name}" for name in expected]
    for text in ("layers[0].mlp_out", "*.layers[0].mlp_out", "model.decoder.layers[2].mlp_out", "**.layers[2].mlp_out"):
        with pytest.raises(UnknownPathError, match=re.escape(text)):
            look_up(model, text)
