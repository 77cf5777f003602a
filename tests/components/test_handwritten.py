"""Components of models written by hand, in the styles of papers and courses, compared with values of their code."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphpatch_notebook import PatchableGraph

WIDTH, HEADS, SIZE, NEURONS, LENGTH = 12, 3, 4, 20, 5
_kept: list[dict[str, Tensor]] = []


def keep(name: str, value: Tensor) -> None:
    """Keeps a value of the run under the name of its component, with the batch, positions and heads in this order."""
    for kept in _kept:
        kept[name] = value.detach().clone()


@contextmanager
def keeping() -> Iterator[dict[str, Tensor]]:
    _kept.append({})
    try:
        yield _kept[-1]
    finally:
        _kept.pop()


def rotated(x: Tensor, style: str) -> Tensor:
    """Rotates queries or keys of shape `(..., positions, channels)`."""
    angles = torch.arange(x.shape[-2])[:, None] / 10 ** torch.arange(0, 1, 2 / SIZE)
    if style == "complex":
        turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * torch.polar(angles * 0 + 1, angles)
        return torch.view_as_real(turned).flatten(-2).type_as(x)
    one, other = (x[..., ::2], x[..., 1::2]) if style == "interleaved" else x.chunk(2, -1)
    parts = one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()
    return torch.stack(parts, -1).flatten(-2) if style == "interleaved" else torch.cat(parts, -1)


class Attention(nn.Module):
    def __init__(self, number: int, rotary: str, is_sequence_first: bool) -> None:
        super().__init__()
        self.number, self.rotary, self.is_sequence_first = number, rotary, is_sequence_first
        self.projections = nn.ModuleList(nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.W_O = nn.Parameter(torch.randn(HEADS, SIZE, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        start = f"layers[{self.number}].attn"
        if self.is_sequence_first:
            x = x.transpose(0, 1)
        q, k, v = (map_(x).view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for map_ in self.projections)
        for name, value in (("q", q), ("k", k), ("v", v)):
            keep(f"{start}.{name}", value.transpose(1, 2))
        if self.rotary:
            q, k = rotated(q, self.rotary), rotated(k, self.rotary)
            keep(f"{start}.q_rot", q.transpose(1, 2))
            keep(f"{start}.k_rot", k.transpose(1, 2))
        q = q / math.sqrt(SIZE)
        pattern = (q @ k.transpose(-1, -2) + torch.full((x.shape[1], x.shape[1]), -1e9).triu(1)).softmax(-1)
        keep(f"{start}.pattern", pattern)
        z = pattern @ v
        keep(f"{start}.z", z.transpose(1, 2))
        out = torch.einsum("bhqd,hdm->bqm", z, self.W_O)
        return out.transpose(0, 1) if self.is_sequence_first else out


class Block(nn.Module):
    def __init__(self, number: int, rotary: str, is_sequence_first: bool) -> None:
        super().__init__()
        self.number = number
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(number, rotary, is_sequence_first)
        self.W_in, self.b_in = nn.Parameter(torch.randn(WIDTH, NEURONS)), nn.Parameter(torch.randn(NEURONS))
        self.W_out, self.b_out = nn.Parameter(torch.randn(NEURONS, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        def in_order(value: Tensor) -> Tensor:
            return value.transpose(0, 1) if self.attn.is_sequence_first else value

        start = f"layers[{self.number}]"
        keep(f"{start}.resid_pre", in_order(x))
        x = x + self.attn(self.ln1(x))
        keep(f"{start}.resid_mid", in_order(x))
        pre = self.ln2(x) @ self.W_in + self.b_in
        keep(f"{start}.mlp.pre", in_order(pre))
        post = F.gelu(pre)
        keep(f"{start}.mlp.post", in_order(post))
        x = x + (post @ self.W_out + self.b_out)
        keep(f"{start}.resid_post", in_order(x))
        return x


class Model(nn.Module):
    def __init__(self, layers: str, rotary: str, is_sequence_first: bool) -> None:
        super().__init__()
        self.layers, self.is_sequence_first = layers, is_sequence_first
        self.embed, self.norm, self.unembed = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20)
        blocks = {name: Block(number, rotary, is_sequence_first) for number, name in enumerate(("block1", "block2"))}
        if layers == "dict":
            self.blocks = nn.ModuleDict(blocks)
        elif layers == "list":
            self.blocks = nn.ModuleList(blocks.values())
        else:
            self.block1, self.block2 = blocks.values()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        keep("@embed", x)
        if self.is_sequence_first:
            x = x.transpose(0, 1)
        blocks = {"dict": lambda: self.blocks.values(), "list": lambda: self.blocks}
        for block in blocks.get(self.layers, lambda: (self.block1, self.block2))():
            x = block(x)
        x = self.norm(x.transpose(0, 1) if self.is_sequence_first else x)
        keep("@final_norm", x)
        logits = self.unembed(x)
        keep("@logits", logits)
        return logits


def in_order(value: Tensor, axes: tuple[str, ...]) -> Tensor:
    wanted = ("batch", "head", "query", "key") if axes[-1] == "key" else ("batch", "position", "head", axes[-1])
    named = ["position" if axis in ("query", "key") and wanted[-1] != "key" else axis for axis in axes]
    return value.permute([named.index(axis) for axis in wanted if axis in named])


@pytest.mark.parametrize("batch", [2, LENGTH], ids=["two rows", "as many rows as positions"])
@pytest.mark.parametrize(
    ("layers", "rotary", "is_sequence_first"),
    [
        ("dict", "", False),
        ("attributes", "half", False),
        ("list", "interleaved", False),
        ("list", "complex", False),
        ("list", "half", True),
        ("dict", "", True),
    ],
)
def test_components_are_the_values_in_the_code(layers: str, rotary: str, is_sequence_first: bool, batch: int) -> None:
    torch.manual_seed(0)
    model = Model(layers, rotary, is_sequence_first).eval()
    ids = torch.randint(0, 20, (batch, LENGTH))
    pg = PatchableGraph(model, ids)
    for given in (ids, torch.randint(0, 20, (3, LENGTH + 2))):
        with keeping() as kept:
            model(given)
        recorded = pg.record(list(kept), given)
        for name, value in kept.items():
            found = in_order(recorded[name], pg.components[name].axes)
            torch.testing.assert_close(found, value, msg=lambda text, name=name: f"{name}: {text}")
    components = pg.components.verify()
    assert {name: component.doubt for name, component in components.items() if component.doubt} == {}


class Held(nn.Module):
    """Blocks, and a part that is called from a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Block(number, "", False) for number in range(2))
        self.__dict__["blocks"] = {"a": self.first, "b": Block(1, "", False)}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def test_modules_that_a_plain_dict_holds_are_absent_with_the_reason() -> None:
    pg = PatchableGraph(Held().eval(), torch.randn(2, LENGTH, WIDTH))
    assert "no module of a list" in pg.components.missing["layers[*]"]
