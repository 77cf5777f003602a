"""Components of models written by hand, in the styles of papers and courses, compared with values of their code."""

from __future__ import annotations

from collections.abc import Callable
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


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns what attention returns, with the shape of the queries."""
    mask = torch.full((q.shape[-2], k.shape[-2]), -1e9).triu(1)
    return (q @ k.transpose(-1, -2) + mask).softmax(-1) @ v


class Attention(Submodules, projections=copies((WIDTH, HEADS * SIZE), 3), out=(HEADS * SIZE, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (map_(x).view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for map_ in self.projections)
        return self.out(attended(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer with attention, or something in its place."""

    def __init__(self, attn: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.ln1, self.ln2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), attn()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, NEURONS), nn.GELU(), nn.Linear(NEURONS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


def two_blocks(attn: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(attn), Block(attn)).eval()


class Held(nn.Module):
    """Blocks, and a part that is called from a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.__dict__["blocks"] = {"a": self.first, "b": Block()}

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
        blocks = [Block() for _ in range(4)]
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
        return self.out(torch.cat([attended(q, k, v) for q, k, v in parts], -1))


def test_modules_for_heads_are_heads_of_one_attention() -> None:
    blocks = two_blocks(ByHead)
    x = torch.randn(2, LENGTH, WIDTH)
    pg = PatchableGraph(blocks, x)
    assert wrong_sums(pg, x) == {}
    name = "layers[0].attn.heads[1].z"
    q, k, v = blocks[0].attn.heads[1](blocks[0].ln1(x)).chunk(3, -1)
    torch.testing.assert_close(pg.record(name, x)[name], attended(q, k, v))
    assert len(pg.components.lookup("layers[*].attn.heads[*].pattern")) == 2 * HEADS


class Tiled(nn.Module):
    """Attention of four heads of queries, and two of keys and values, which are repeated one by one or all at once."""

    def __init__(self, is_tiled: bool) -> None:
        super().__init__()
        self.is_tiled = is_tiled
        self.q, self.o = nn.Linear(WIDTH, 4 * SIZE), nn.Linear(4 * SIZE, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 2 * SIZE), nn.Linear(WIDTH, 2 * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = (each.repeat(1, 2, 1, 1) if self.is_tiled else each.repeat_interleave(2, 1) for each in (k, v))
        return self.o(attended(q, k, v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("is_tiled", [True, False])
def test_heads_of_keys_are_those_that_a_head_of_queries_reads(is_tiled: bool) -> None:
    blocks = two_blocks(lambda: Tiled(is_tiled))
    x = torch.randn(2, LENGTH, WIDTH)
    pg = PatchableGraph(blocks, x)
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
        self.q, self.o = nn.Linear(WIDTH, 4 * SIZE), nn.Linear(4 * SIZE, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 2 * SIZE), nn.Linear(WIDTH, 2 * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 2, SIZE)).permute(0, 2, 3, 1, 4)
        k, v = (part(x).unflatten(-1, (2, 1, SIZE)).permute(0, 2, 3, 1, 4) for part in (self.k, self.v))
        return self.o(attended(q, k, v).permute(0, 3, 1, 2, 4).flatten(2))


def test_heads_in_two_dimensions_have_no_names() -> None:
    """Those of the keys, and those of the queries that share each: they are not read as one dimension of heads."""
    blocks = two_blocks(Grouped)
    x = torch.randn(3, LENGTH, WIDTH)
    pg = PatchableGraph(blocks, x)
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
    blocks = two_blocks(WeighsStates)
    components = PatchableGraph(blocks, torch.randn(2, LENGTH, WIDTH)).components
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
