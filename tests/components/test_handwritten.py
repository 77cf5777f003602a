"""Components of models written by hand, in the styles of papers and courses, compared with values of their code."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphpatch_notebook import ExperimentError, ExtractionOptions, PatchableGraph, UnknownPathError
from graphpatch_notebook.experiments import attribute_edges, composition_scores, keep_heads
from tests.components.sums import wrong_sums
from tests.zoo.submodules import Submodules, copies

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
            torch.testing.assert_close(recorded[name], value, msg=lambda text, name=name: f"{name}: {text}")
    assert wrong_sums(pg, given) == {}


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


def test_modules_that_a_plain_dict_holds_are_layers() -> None:
    model, x = Held().eval(), torch.randn(2, LENGTH, WIDTH)
    pg = PatchableGraph(model, x)
    assert dict(pg.components.layers) == {"": 2}
    torch.testing.assert_close(pg.record("layers[1].resid_pre", x)["layers[1].resid_pre"], model.blocks["a"](x))


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


class ByHead(Submodules, heads=copies((WIDTH, 3 * SIZE), HEADS), out=(HEADS * SIZE, WIDTH)):
    """Attention with a module for each head."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [head(x).chunk(3, -1) for head in self.heads]
        return self.out(torch.cat([attended(q, k, v, "")[1] for q, k, v in parts], -1))


def test_modules_for_heads_are_heads_of_one_attention() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(number, "", False) for number in range(2)))
    for block in blocks:
        block.attn = ByHead()
        block.attn.is_sequence_first = False
    x = torch.randn(2, LENGTH, WIDTH)
    pg = PatchableGraph(blocks.eval(), x)
    assert wrong_sums(pg, x) == {}
    name = "layers[0].attn.heads[1].z"
    q, k, v = blocks[0].attn.heads[1](blocks[0].ln1(x)).chunk(3, -1)
    torch.testing.assert_close(pg.record(name, x)[name], attended(q, k, v, "")[1])
    assert len(pg.components.lookup("layers[*].attn.heads[*].pattern")) == 2 * HEADS


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


def test_heads_in_two_dimensions_have_no_names() -> None:
    """Those of the keys, and those of the queries that share each: they are not read as one dimension of heads."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(number, "", False) for number in range(2)))
    for block in blocks:
        block.attn = Grouped()
    x = torch.randn(3, LENGTH, WIDTH)
    pg = PatchableGraph(blocks.eval(), x)
    assert wrong_sums(pg, x) == {}
    assert "layers[1].attn_out" in pg.components
    assert not any(".attn." in name for name in pg.components)
    with pytest.raises(UnknownPathError):
        pg.components.lookup("layers[1].attn.heads[1].z")
    with pytest.raises(ExperimentError):
        keep_heads(pg, [(0, 1)], method="zero")


class WeighsStates(Submodules, shares=(WIDTH, 2), other=(WIDTH, WIDTH), out=(WIDTH, WIDTH)):
    """Weighs the stream and sums over earlier positions of it, by shares of the two at each position."""

    def forward(self, x: Tensor) -> Tensor:
        states = torch.stack([x, self.other(x).cumsum(1)], -2)
        return self.out(torch.einsum("bts,btsc->btc", self.shares(x).softmax(-1), states))


def test_shares_of_states_at_one_position_are_no_attention() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(number, "", False) for number in range(2)))
    for block in blocks:
        block.attn = WeighsStates()
        block.attn.is_sequence_first = False
    components = PatchableGraph(blocks.eval(), torch.randn(2, LENGTH, WIDTH)).components
    assert not [name for name in components if ".attn." in name and name.startswith("layers[1]")]
    assert "layers[1].mlp_out" in components


class Experts(Submodules, router=(WIDTH, 8), experts=copies((WIDTH, WIDTH), 8)):
    """A mixture of experts that writes into its result for each expert that a token chooses."""

    def forward(self, x: Tensor) -> Tensor:
        result, chosen = torch.zeros_like(x), self.router(x).argmax(-1)
        for number, expert in enumerate(self.experts):
            if (mask := chosen == number).any():
                result[mask] += expert(x[mask])
        return result


class Mixture(Submodules, experts=Experts):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x)


@pytest.mark.parametrize("seed", range(4))
def test_experts_with_noisy_routing_are_not_mixers(seed: int) -> None:
    torch.manual_seed(seed)
    pg = PatchableGraph(nn.Sequential(Mixture(), Mixture()).eval(), torch.randn(1, LENGTH, WIDTH))
    assert "layers[0].mlp_out" in pg.components


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
    x = torch.randn(1, 3, WIDTH)
    pg = PatchableGraph(nn.Sequential(Inline(), Inline()).eval(), x)
    assert "other inputs may have other experts" in str(pg.components.why_missing("layers[1].mlp_out"))
    assert wrong_sums(pg, x) == {}


class Plain(Submodules, parts=copies([(WIDTH, WIDTH), nn.ReLU], 4)):
    """Modules of which none adds to what it reads."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("layers", [["parts.0", "parts.1"], [["parts_0", "parts_1"], ["parts_2", "parts_3"]]])
def test_layers_are_what_the_user_says(layers: list[str | list[str]]) -> None:
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(2, LENGTH, WIDTH)
    assert "ExtractionOptions(layers=[...])" in PatchableGraph(model, x).components.missing["layers[*]"]
    pg = PatchableGraph(model, ExtractionOptions(layers=layers), x)
    end = 2 if isinstance(layers[0], str) else 4
    torch.testing.assert_close(
        pg.record("layers[1].resid_post", x)["layers[1].resid_post"], nn.Sequential(*model.parts[:end])(x)
    )
    with pytest.raises(UnknownPathError, match="'parts.9'"):
        PatchableGraph(model, ExtractionOptions(layers=["parts.9"]), x).components  # noqa: B018


class Mixing(nn.Module):
    """A layer that mixes positions in a way that resembles something else, and an MLP."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norms = kind, nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.maps, self.sinks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Parameter(torch.randn(1))
        self.up, self.down = nn.Linear(WIDTH, NEURONS), nn.Linear(NEURONS, WIDTH)

    def mixed(self, x: Tensor, hidden: Tensor) -> Tensor:
        if self.kind == "transform":
            return torch.fft.fft2(x).real
        q, k, v, out = self.maps
        if self.kind == "table":
            return out(out.weight[: x.shape[1], : x.shape[1]].softmax(-1) @ v(x))
        scores = q(x) @ k(x).transpose(-1, -2)
        if self.kind == "masked":  # True is what is hidden
            scores = scores.masked_fill(hidden, -1e9)
        scores = torch.cat([scores, self.sinks.expand(*scores.shape[:-1], 1)], -1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        return out(scores.softmax(-1)[..., :-1] @ v(x))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = self.norms[0](x + self.mixed(x, hidden))
        return self.norms[1](x + self.down(F.gelu(self.up(x))))


class Mixers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(11, WIDTH), nn.ModuleList(Mixing(kind) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        hidden = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, hidden)
        return x


@pytest.mark.parametrize(
    ("kind", "written"), [("transform", "mixer"), ("table", "mixer"), ("sinks", "attn"), ("masked", "attn")]
)
def test_a_part_is_what_it_does_to_positions(kind: str, written: str) -> None:
    """It does not matter which operations it has: the maximum of scores chooses nothing, a softmax may be a table's."""
    pg = PatchableGraph(Mixers(kind).eval(), torch.randint(0, 11, (2, LENGTH)))
    for number in range(2):
        start = f"layers[{number}]"
        found = [name for name in pg.components if name.startswith(start) and name.endswith("_out")]
        assert found == [f"{start}.{written}_out", f"{start}.mlp_out"]
        assert pg.components[f"{start}.mlp_out"].axes == ("batch", "position", "channel")
        assert (f"{start}.attn.pattern" in pg.components) == (written == "attn")


class AddedNorm(Submodules, norm=partial(nn.LayerNorm, WIDTH)):
    def forward(self, written: Tensor, x: Tensor) -> Tensor:
        return self.norm(written + x)


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = (
            nn.Embedding(11, WIDTH),
            nn.ModuleList(nn.ModuleList([nn.Linear(WIDTH, WIDTH), AddedNorm()]) for _ in range(2)),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for linear, add in self.layers:
            x = add(torch.fft.fft2(x).real, x)
            x = add(linear(x).relu(), x)
        return x


def test_a_module_that_adds_and_normalizes_is_no_norm() -> None:
    pg = PatchableGraph(Added().eval(), torch.randint(0, 11, (2, LENGTH)))
    assert {"layers[0].mixer_out", "layers[1].mixer_out", "layers[0].mlp_out", "layers[1].mlp_out"} <= {*pg.components}


class Merged(Submodules, norm=partial(nn.LayerNorm, WIDTH), maps=copies((WIDTH, WIDTH), 4)):
    """A layer with the heads of all rows in one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            linear(self.norm(x)).view(rows, length, HEADS, SIZE).transpose(1, 2).reshape(-1, length, SIZE)
            for linear in self.maps[:3]
        )
        z = (q @ k.mT).softmax(-1) @ v
        return x + self.maps[3](z.view(rows, HEADS, length, SIZE).transpose(1, 2).reshape(x.shape))


class ReadsNumbers(Submodules, embed=partial(nn.Embedding, 11, WIDTH), layers=copies(Merged, 2)):
    """Does not run at other sizes, as it needs its values."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + torch.from_numpy(x.detach().numpy() * 0)
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_dimension_that_may_hold_the_heads_of_all_rows_is_not_called_heads() -> None:
    components = PatchableGraph(ReadsNumbers().eval(), torch.randint(0, 11, (2, LENGTH))).components
    assert [name for name, each in components.items() if "head" in each.axes and "batch" not in each.axes] == []


class PositionsFirst(Submodules, maps=copies((WIDTH, WIDTH), 4)):
    """Heads and rows in one dimension, which a view that merges heads and channels separates from each other."""

    def forward(self, x: Tensor) -> Tensor:
        length, rows, _ = x.shape
        q, k, v = (each(x).view(length, rows * HEADS, SIZE).transpose(0, 1) for each in self.maps[:3])
        z = (q @ k.mT).softmax(-1) @ v
        return x + self.maps[3](z.transpose(0, 1).reshape(x.shape))


def test_a_dimension_that_merges_heads_and_channels_is_not_called_heads() -> None:
    class Model(Submodules, embed=partial(nn.Embedding, 11, WIDTH), layers=copies(PositionsFirst, 2)):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens).transpose(0, 1)
            for layer in self.layers:
                x = layer(x)
            return x.transpose(0, 1)

    pg = PatchableGraph(Model().eval(), torch.randint(0, 11, (2, LENGTH)))
    z = pg.components["layers[1].attn.z"]
    assert z.path_axes == ("batch_head", "query", "channel")
    assert (z.axes, z.shape) == (("batch", "position", "head", "channel"), (2, LENGTH, HEADS, SIZE))
    assert pg.nodes[z.path].shape == (2 * HEADS, LENGTH, SIZE)
