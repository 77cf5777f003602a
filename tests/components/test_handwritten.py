"""Components of models written by hand, in the styles of papers and courses, compared with values of their code."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphpatch_notebook import ExperimentError, PatchableGraph, UnknownPathError, ZeroPatch
from graphpatch_notebook.experiments import attribute_edges, composition_scores, keep_heads

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


def attended(q: Tensor, k: Tensor, v: Tensor, style: str) -> tuple[Tensor, Tensor]:
    """Returns the pattern, with queries and keys last, and what attention returns, with the shape of the queries."""
    mask = torch.full((q.shape[-2], k.shape[-2]), -1e9).triu(1)
    if style == "keys in rows":
        pattern = torch.softmax(k @ q.transpose(-1, -2) + mask.T, -2)
        return pattern.transpose(-1, -2), (v.transpose(-1, -2) @ pattern).transpose(-1, -2)
    if style == "keys first":
        pattern = torch.einsum("bhkd,bhqd->bhqk", k, q).add(mask).softmax(dim=3)
        return pattern, torch.einsum("bhkd,bhqk->bhqd", v, pattern)
    if style == "transposed scores":
        pattern = ((k @ q.transpose(-1, -2)).transpose(-1, -2) + mask).softmax(-1)
        return pattern, pattern @ v
    pattern = (q @ k.transpose(-1, -2) + mask).softmax(-1)
    return pattern, pattern @ v


class Attention(nn.Module):
    def __init__(self, number: int, rotary: str, is_sequence_first: bool, products: str) -> None:
        super().__init__()
        self.number, self.rotary, self.is_sequence_first = number, rotary, is_sequence_first
        self.products = products
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
        if self.products == "heads first":
            q, k, v = (value.transpose(0, 1) for value in (q, k, v))
        pattern, z = attended(q, k, v, self.products)
        if self.products == "heads first":
            pattern, z = pattern.transpose(0, 1), z.transpose(0, 1)
        keep(f"{start}.pattern", pattern)
        keep(f"{start}.z", z.transpose(1, 2))
        out = torch.einsum("bhqd,hdm->bqm", z, self.W_O)
        return out.transpose(0, 1) if self.is_sequence_first else out


class Block(nn.Module):
    def __init__(self, number: int, rotary: str, is_sequence_first: bool, products: str = "") -> None:
        super().__init__()
        self.number = number
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(number, rotary, is_sequence_first, products)
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
    def __init__(self, layers: str, rotary: str, is_sequence_first: bool, products: str = "") -> None:
        super().__init__()
        self.layers, self.is_sequence_first = layers, is_sequence_first
        self.embed, self.norm, self.unembed = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20)
        blocks = {f"block{n + 1}": Block(n, rotary, is_sequence_first, products) for n in range(2)}
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
    if {"query", "key"} <= set(axes):
        return value.permute([axes.index(axis) for axis in ("batch", "head", "query", "key")])
    known = ("batch", "position", "head")
    named = ["position" if axis in ("query", "key") else axis for axis in axes]
    order = sorted(named, key=lambda axis: known.index(axis) if axis in known else len(known))
    return value.permute([named.index(axis) for axis in order])


@pytest.mark.parametrize("batch", [2, LENGTH], ids=["two rows", "as many rows as positions"])
@pytest.mark.parametrize(
    ("layers", "rotary", "is_sequence_first", "products"),
    [
        ("dict", "", False, ""),
        ("attributes", "half", False, ""),
        ("list", "interleaved", False, ""),
        ("list", "complex", False, ""),
        ("list", "half", True, ""),
        ("dict", "", True, ""),
        ("list", "", False, "heads first"),
        ("list", "half", True, "heads first"),
        ("list", "", False, "keys in rows"),
        ("list", "half", False, "keys first"),
        ("list", "", False, "transposed scores"),
    ],
)
def test_components_are_the_values_in_the_code(
    layers: str, rotary: str, is_sequence_first: bool, products: str, batch: int
) -> None:
    torch.manual_seed(0)
    model = Model(layers, rotary, is_sequence_first, products).eval()
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


class InTwoLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [Block(number, "", False) for number in range(4)]
        self.parts = nn.ModuleList(nn.ModuleList(blocks[start : start + 2]) for start in (0, 2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            for block in part:
                x = block(x)
        return self.norm(x)


def test_a_norm_of_the_next_list_of_layers_is_not_the_final_one() -> None:
    components = PatchableGraph(InTwoLists().eval(), torch.randn(2, LENGTH, WIDTH)).components
    assert components.layers == {"parts_0": 2, "parts_1": 2}
    assert components["parts_1.@final_norm"].path == "norm.output"
    assert components.why_missing("parts_0.@final_norm") == "no norm reads what the last layer returns"


class ByHead(nn.Module):
    """Attention with a module for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3 * SIZE) for _ in range(HEADS))
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = [head(x).chunk(3, -1) for head in self.heads]
        return self.out(torch.cat([attended(q, k, v, "")[1] for q, k, v in parts], -1))


def test_several_attentions_in_one_module_are_not_found_as_one() -> None:
    blocks = nn.Sequential(*(Block(number, "", False) for number in range(2)))
    for block in blocks:
        block.attn = ByHead()
        block.attn.is_sequence_first = False
    pg = PatchableGraph(blocks.eval(), torch.randn(2, LENGTH, WIDTH))
    components = pg.components.verify()
    assert not components["layers[0].attn_out"].doubt
    for part in ("q", "pattern", "z"):
        assert "it consists of 3 attentions" in str(components.why_missing(f"layers[1].attn.{part}"))


class Tiled(nn.Module):
    """Attention of four heads of queries, and two of keys and values, which are repeated one by one or all at once."""

    def __init__(self, is_tiled: bool) -> None:
        super().__init__()
        self.is_tiled, self.is_sequence_first = is_tiled, False
        self.q, self.o = nn.Linear(WIDTH, 4 * SIZE), nn.Linear(4 * SIZE, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 2 * SIZE), nn.Linear(WIDTH, 2 * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = (each.repeat(1, 2, 1, 1) if self.is_tiled else each.repeat_interleave(2, 1) for each in (k, v))
        return self.o(attended(q, k, v, "")[1].transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("is_tiled", [True, False])
def test_heads_of_keys_are_those_that_a_head_of_queries_reads(is_tiled: bool) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(number, "", False) for number in range(2)))
    for block in blocks:
        block.attn = Tiled(is_tiled)
    x = torch.randn(2, LENGTH, WIDTH)
    pg = PatchableGraph(blocks.eval(), x)
    read = [head % 2 if is_tiled else head // 2 for head in range(4)]
    for head in range(4):
        names = {component.name for component in pg.components.lookup(f"layers[1].attn.heads[{head}].*")}
        assert {f"layers[1].attn.heads[{read[head]}].{part}" for part in "kv"} <= names
    scores = composition_scores(pg, "K")
    for head in range(4):
        first, second = (block.attn for block in blocks)
        of_head, shared = (slice(number * SIZE, (number + 1) * SIZE) for number in (head, read[head]))
        writes = first.v.weight[shared].T @ first.o.weight[:, of_head].T
        reads = second.k.weight[shared].T @ second.q.weight[of_head]
        expected = (writes @ reads).norm() / (writes.norm() * reads.norm())
        assert scores.sel(layer=0, head=head, to_layer=1, to_head=head).item() == pytest.approx(
            expected.item(), rel=1e-4
        )
    edges = attribute_edges(pg, lambda output: output[:, -1].sum(), x, x.flip(0))
    for head in range(4):
        feeding = [name for name, fed in edges.attrs["feeds"].items() if f"layers[0].attn.heads[{head}].z" in fed]
        assert f"layers[0].attn.heads[{read[head]}].k" in feeding


class Grouped(nn.Module):
    """Attention of four heads of queries and two of keys, in which the heads that share keys have a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.is_sequence_first = False
        self.q, self.o = nn.Linear(WIDTH, 4 * SIZE), nn.Linear(4 * SIZE, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 2 * SIZE), nn.Linear(WIDTH, 2 * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 2, SIZE)).permute(0, 2, 3, 1, 4)
        k, v = (part(x).unflatten(-1, (2, 1, SIZE)).permute(0, 2, 3, 1, 4) for part in (self.k, self.v))
        return self.o(attended(q, k, v, "")[1].permute(0, 3, 1, 2, 4).flatten(2))


def test_heads_in_two_dimensions_are_not_read_as_one_dimension() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(number, "", False) for number in range(2)))
    for block in blocks:
        block.attn = Grouped()
    x = torch.randn(3, LENGTH, WIDTH)
    pg = PatchableGraph(blocks.eval(), x)
    components = pg.components.verify()
    assert not any(component.doubt for component in components.values())
    z = components["layers[1].attn.z"]
    assert (z.axes, z.shape[1:3]) == (("batch", "key_head", "query_head", "query", "channel"), (2, 2))
    with pytest.raises(UnknownPathError, match=r"has no dimension of the heads: its axes are batch, key_head, query_"):
        components.lookup("layers[1].attn.heads[1].z")
    with pytest.raises(ExperimentError, match="has no dimension of heads, but batch, key_head, query_head"):
        keep_heads(pg, [(0, 1)], method="zero")
    with torch.no_grad():
        with blocks[1].attn.o.register_forward_pre_hook(lambda _, given: (given[0].index_fill(-1, third, 0.0),)):
            third = torch.arange(2 * SIZE, 3 * SIZE)
            expected = blocks(x)
        with pg.patch({"layers[1].attn.z[:, 1, 0]": ZeroPatch()}):
            torch.testing.assert_close(pg(x), expected)


class Experts(nn.Module):
    """A mixture of experts that writes into its result for each expert that a token chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        result, chosen = torch.zeros_like(x), self.router(x).argmax(-1)
        for number, expert in enumerate(self.experts):
            if (mask := chosen == number).any():
                result[mask] += expert(x[mask])
        return result


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x)


@pytest.mark.parametrize("seed", range(4))
def test_experts_with_noisy_routing_are_not_mixers(seed: int) -> None:
    torch.manual_seed(seed)
    pg = PatchableGraph(nn.Sequential(Mixture(), Mixture()).eval(), torch.randn(1, LENGTH, WIDTH))
    assert pg.components.verify()["layers[0].mlp_out"].proof


class Inline(Experts):
    """A layer that adds experts to its input without a module of its own for the mixture."""

    def forward(self, x: Tensor) -> Tensor:
        result, chosen = torch.zeros_like(x), self.router(x).argmax(-1)
        for number, expert in enumerate(self.experts):
            if (mask := chosen == number).any():
                result[mask] += expert(x[mask])
        return x + result


def test_a_sum_over_experts_that_other_inputs_would_continue_is_absent() -> None:
    torch.manual_seed(0)
    pg = PatchableGraph(nn.Sequential(Inline(), Inline()).eval(), torch.randn(1, 3, WIDTH))
    assert "other inputs may have other experts" in str(pg.components.why_missing("layers[1].mlp_out"))
    assert all(not component.doubt for component in pg.components.verify().values())
