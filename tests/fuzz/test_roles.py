"""Random transformers written by hand: what components are, and what their dimensions are, as their own code says.

None may be wrong, also at other sizes than the example's; a quarter may be missing.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.libraries.comparing import Expected, Trial, outcome_of

SEEDS = range(*map(int, os.environ.get("GRAPHPATCH_ROLES_SEEDS", "0 18").split()))
MOST_MISSING = 0.25
VOCABULARY = 17
LAYOUTS = ("b h t c", "h b t c", "(b h) t c", "(h b) t c", "t b h c", "b t h c")
CHOICES: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "is_sequence_first": (False, False, True),
    "softmax": ("call", "written out", "sinks", "fused"),
    "are_scores_transposed": (False, False, True),
    "sharing": (1, 1, 2, "all"),  # heads of queries that share keys
    "rotary": (False, False, True),
    "split": ("separate", "fused", "einsum"),
    "mask": ("fill", "add", "none"),
    "mlp": ("plain", "gated"),
    "norm": ("layer", "rms"),
    "is_parallel": (False, False, False, True),
    "sizes": ("different", "equal", "one token", "one row"),
    "layers": ("blocks", "blocks", "pairs", "flat", "zipped", "wrapped", "joined", "single"),
    "kind": ("usual",) * 6 + ("shared keys", "talking", "local", "sigmoid", "table", "module of torch", "heads"),
}
_kept: dict[str, tuple[Tensor, str]] = {}


def keep(name: str, value: Tensor, axes: str) -> None:
    """Keeps a value under the name of its component, with its dimensions: in parentheses, those that are one."""
    _kept[name] = value.detach().clone(), axes


def rotated(x: Tensor) -> Tensor:
    """Rotates queries or keys of shape `(..., positions, channels)`."""
    one, other = x.chunk(2, -1)
    angles = torch.arange(x.shape[-2])[:, None] / 10 ** torch.linspace(0, 1, one.shape[-1])
    return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, number: int, chosen: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.number, self.chosen, self.size = heads, number, chosen, width // heads
        self.shared = heads if chosen["sharing"] == "all" else chosen["sharing"] if heads % 2 == 0 else 1
        self.key_heads = heads // self.shared
        widths = [width, self.key_heads * self.size, self.key_heads * self.size]
        self.widths = widths
        if chosen["split"] == "fused":
            self.qkv = nn.Linear(width, sum(widths))
        elif chosen["split"] == "separate":
            self.maps = nn.ModuleList(nn.Linear(width, each) for each in widths)
        else:
            counts = [heads, self.key_heads, self.key_heads]
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(n, width, self.size) / 2) for n in counts)
        self.out, self.sinks = nn.Linear(width, width), nn.Parameter(torch.randn(heads))

    def projected(self, x: Tensor) -> list[Tensor]:
        """Returns queries, keys and values as (batch, position, head, channel), or the first two exchanged."""
        if self.chosen["split"] == "einsum":
            return [torch.einsum("abw,hwc->abhc", x, weight) for weight in self.weights]
        parts = self.qkv(x).split(self.widths, -1) if self.chosen["split"] == "fused" else [m(x) for m in self.maps]
        return [part.unflatten(-1, (-1, self.size)) for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        start, chosen, is_first = f"layers[{self.number}].attn", self.chosen, self.chosen["is_sequence_first"]
        q, k, v = self.projected(x)
        # (batch, head, position, channel) from here, unless the layout says otherwise
        order = (1, 2, 0, 3) if is_first else (0, 2, 1, 3)
        q, k, v = (each.permute(order) for each in (q, k, v))
        for name, value in zip("qkv", (q, k, v), strict=True):
            keep(f"{start}.{name}", value, "b h t c")
        if chosen["rotary"]:
            q, k = rotated(q), rotated(k)
            keep(f"{start}.q_rot", q, "b h t c")
            keep(f"{start}.k_rot", k, "b h t c")
        if self.shared > 1:
            k, v = (each.repeat_interleave(self.shared, 1) for each in (k, v))
        z = self.attended(q, k, v, start)
        keep(f"{start}.z", z, "b h t c")
        z = z.permute(2, 0, 1, 3) if is_first else z.transpose(1, 2)
        return self.out(z.flatten(2))

    def attended(self, q: Tensor, k: Tensor, v: Tensor, start: str) -> Tensor:
        """Returns `z`, as (batch, head, position, channel)."""
        chosen, (batch, heads, length, size) = self.chosen, q.shape
        if chosen["softmax"] == "fused":
            mask = None if chosen["mask"] == "none" else torch.ones(length, length).tril().bool()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        layout = chosen["layout"]
        if layout in ("t b h c", "b t h c"):
            return self.attended_by_einsum(q, k, v, start)
        if layout == "(b h) t c":
            q, k, v = (each.flatten(0, 1) for each in (q, k, v))
        elif layout != "b h t c":
            q, k, v = (each.transpose(0, 1) for each in (q, k, v))
            if layout == "(h b) t c":
                q, k, v = (each.flatten(0, 1) for each in (q, k, v))
        if chosen["are_scores_transposed"] and chosen["softmax"] != "sinks":
            pattern = self.pattern(k @ q.transpose(-1, -2) / size**0.5, start, -2, "k q")
            z = (v.transpose(-1, -2) @ pattern).transpose(-1, -2)
        else:
            pattern = self.pattern(q @ k.transpose(-1, -2) / size**0.5, start, -1, "q k")
            z = pattern @ v
        if layout.startswith("("):
            z = z.unflatten(0, (batch, heads) if layout == "(b h) t c" else (heads, batch))
        return z if "b h" in layout else z.transpose(0, 1)

    def attended_by_einsum(self, q: Tensor, k: Tensor, v: Tensor, start: str) -> Tensor:
        letters = self.chosen["layout"].replace(" ", "")
        q, k, v = (torch.einsum(f"bhtc->{letters}", each) for each in (q, k, v))
        queries, keys = letters.replace("t", "q"), letters.replace("t", "k")
        scores = torch.einsum(f"{queries},{keys}->bhqk", q, k) / q.shape[-1] ** 0.5
        pattern = self.pattern(scores, start, -1, "q k", "b h")
        return torch.einsum(f"bhqk,{keys}->bhqc", pattern, v)

    def pattern(self, scores: Tensor, start: str, dim: int, last: str, outer: str = "") -> Tensor:
        chosen = self.chosen
        axes = f"{outer or chosen['layout'].removesuffix(' t c')} {last}"
        length = scores.shape[-1]
        hidden = torch.ones(length, length).triu(1).bool()
        hidden = hidden if dim == -1 else hidden.T
        if chosen["mask"] == "fill":
            scores = scores.masked_fill(hidden, -1e9)
        elif chosen["mask"] == "add":
            scores = scores + hidden * -1e9
        keep(f"{start}.scores", scores, axes)
        if chosen["softmax"] == "sinks" and chosen["layout"] in ("b h t c", "b t h c", "t b h c"):
            sinks = self.sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
            pattern = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        elif chosen["softmax"] == "written out":
            shares = (scores - scores.amax(dim, keepdim=True)).exp()
            pattern = shares / shares.sum(dim, keepdim=True)
        else:
            pattern = scores.softmax(dim)
        keep(f"{start}.pattern", pattern, axes)
        return pattern


class OtherAttention(nn.Module):
    """Attention of other kinds, and what resembles it."""

    def __init__(self, width: int, heads: int, number: int, chosen: dict[str, Any]) -> None:
        super().__init__()
        self.start, self.kind, self.heads = f"layers[{number}].attn", chosen["kind"], heads
        self.is_sequence_first = chosen["is_sequence_first"]
        if self.kind == "module of torch":
            self.whole = nn.MultiheadAttention(width, heads, batch_first=not self.is_sequence_first)
            return
        shared = width // heads if self.kind == "shared keys" else width
        self.maps = nn.ModuleList(nn.Linear(width, each) for each in (width, shared, shared))
        self.out, self.mixing = nn.Linear(width, width), nn.Parameter(torch.randn(2, heads, heads))
        self.table = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "module of torch":
            out, pattern = self.whole(x, x, x, average_attn_weights=False)
            keep(f"{self.start}.pattern", pattern, "b h q k")
            return out
        x = x.transpose(0, 1) if self.is_sequence_first else x
        q, k, v = (each(x) for each in self.maps)
        if self.kind == "heads":
            parts = zip(*(each.chunk(self.heads, -1) for each in (q, k, v)), strict=True)
            z = torch.cat([self.one_head(number, *part) for number, part in enumerate(parts)], -1)
        elif self.kind == "table":
            z = self.table[: x.shape[1], : x.shape[1]].softmax(-1) @ v
        else:
            z = self.attended(q, k, v).transpose(1, 2).flatten(2)
        out = self.out(z)
        return out.transpose(0, 1) if self.is_sequence_first else out

    def one_head(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        pattern = scores.softmax(-1)
        values = zip(("q", "k", "v", "scores", "pattern", "z"), (q, k, v, scores, pattern, pattern @ v), strict=True)
        for name, value in values:
            keep(f"{self.start}.heads[{number}].{name}", value, "b q k" if name in ("scores", "pattern") else "b t c")
        return value

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, size, length = self.start, q.shape[-1] // self.heads, q.shape[1]
        q, axes = q.unflatten(-1, (-1, size)).transpose(1, 2), "b t c" if self.kind == "shared keys" else "b h t c"
        letters = "bjd" if self.kind == "shared keys" else "bhjd"
        if self.kind != "shared keys":
            k, v = (each.unflatten(-1, (-1, size)).transpose(1, 2) for each in (k, v))
        scores = torch.einsum(f"bhid,{letters}->bhij", q, k) / size**0.5
        if self.kind == "sigmoid":
            return torch.einsum(f"bhij,{letters}->bhid", scores.sigmoid(), v)
        if self.kind == "talking":
            scores = torch.einsum("bhij,hg->bgij", scores, self.mixing[0])
        if self.kind == "local":
            place = torch.arange(length)
            scores = scores.masked_fill((place[:, None] - place).abs() > 1, float("-inf"))
        pattern = scores.softmax(-1)
        if self.kind == "talking":  # which have no names inside: a head of the pattern is none of the values
            return torch.einsum(f"bhij,{letters}->bhid", torch.einsum("bhij,hg->bgij", pattern, self.mixing[1]), v)
        for name, value, each in (("q", q, "b h t c"), ("k", k, axes), ("v", v, axes)):
            keep(f"{start}.{name}", value, each)
        keep(f"{start}.scores", scores, "b h q k")
        keep(f"{start}.pattern", pattern, "b h q k")
        z = torch.einsum(f"bhij,{letters}->bhid", pattern, v)
        keep(f"{start}.z", z, "b h t c")
        return z


class Mlp(nn.Module):
    def __init__(self, width: int, number: int, chosen: dict[str, Any]) -> None:
        super().__init__()
        self.up, self.down, self.number = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width), number
        self.gate = nn.Linear(width, 2 * width + 1) if chosen["mlp"] == "gated" else None
        self.axes = "t b n" if chosen["is_sequence_first"] else "b t n"

    def forward(self, x: Tensor) -> Tensor:
        pre = self.up(x) if self.gate is None else self.gate(x)
        post = F.gelu(pre) if self.gate is None else F.silu(pre) * self.up(x)
        keep(f"layers[{self.number}].mlp.pre", pre, self.axes)
        keep(f"layers[{self.number}].mlp.post", post, self.axes)
        return self.down(post)


class Normed(nn.Module):
    """A part of a layer, and the norm in front of it."""

    def __init__(self, width: int, part: nn.Module, chosen: dict[str, Any]) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(width) if chosen["norm"] == "layer" else nn.RMSNorm(width), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.norm(x))


class Added(nn.Module):
    """A part that is added to what it reads."""

    def __init__(self, fn: nn.Module, name: str, axes: str) -> None:
        super().__init__()
        self.fn, self.name, self.axes = fn, name, axes

    def forward(self, x: Tensor) -> Tensor:
        written = self.fn(x)
        if self.name:
            keep(self.name, written, self.axes)
        return x + written


class Joined(nn.Module):
    """Attention and an MLP that are added to each other, behind one norm."""

    def __init__(self, attention: Normed, mlp: Normed, number: int, axes: str, written: str) -> None:
        super().__init__()
        self.attention, self.mlp, self.start, self.axes = attention, mlp.part, f"layers[{number}]", axes
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention.norm(x)
        values = [self.attention.part(h), self.mlp(h)]
        for name, value in zip((self.written, "mlp_out"), values, strict=True):
            keep(f"{self.start}.{name}", value, self.axes)
        return values[0] + values[1]


@dataclass
class Stream:
    """How a layer adds to the stream."""

    axes: str
    written: str
    is_parallel: bool

    def layer(self, x: Tensor, attention: nn.Module, mlp: nn.Module, number: int) -> Tensor:
        start = f"layers[{number}]"
        keep(f"{start}.resid_pre", x, self.axes)
        written = attention(x)
        keep(f"{start}.{self.written}", written, self.axes)
        middle = x + written
        result = mlp(x if self.is_parallel else middle)
        keep(f"{start}.mlp_out", result, self.axes)
        if not self.is_parallel:
            keep(f"{start}.resid_mid", middle, self.axes)
        x = middle + result
        keep(f"{start}.resid_post", x, self.axes)
        return x


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module, number: int, stream: Stream) -> None:
        super().__init__()
        self.attention, self.mlp, self.number, self.stream = attention, mlp, number, stream

    def forward(self, x: Tensor) -> Tensor:
        return self.stream.layer(x, self.attention, self.mlp, self.number)


class Model(nn.Module):
    def __init__(self, width: int, heads: int, chosen: dict[str, Any]) -> None:
        super().__init__()
        self.embed, self.norm, self.unembed = (
            nn.Embedding(VOCABULARY, width),
            nn.LayerNorm(width),
            nn.Linear(width, VOCABULARY),
        )
        self.chosen, self.style = chosen, chosen["layers"]
        self.is_sequence_first = chosen["is_sequence_first"]
        self.axes = axes = "t b c" if self.is_sequence_first else "b t c"
        written = "mixer_out" if chosen["kind"] in ("sigmoid", "table") else "attn_out"
        self.stream = Stream(axes, written, chosen["is_parallel"])
        kind = Attention if chosen["kind"] == "usual" else OtherAttention
        pairs = [
            (Normed(width, kind(width, heads, n, chosen), chosen), Normed(width, Mlp(width, n, chosen), chosen))
            for n in range(1 if self.style == "single" else 2)
        ]
        if self.style == "blocks":
            self.parts = nn.ModuleList(Block(*pair, n, self.stream) for n, pair in enumerate(pairs))
        elif self.style == "pairs":
            self.parts = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)
        elif self.style == "flat":
            self.parts = nn.ModuleList(part for pair in pairs for part in pair)
        elif self.style == "zipped":
            self.attentions, self.mlps = (nn.ModuleList(parts) for parts in zip(*pairs, strict=True))
        elif self.style == "wrapped":
            self.parts = nn.ModuleList(
                nn.ModuleList(
                    Added(part, f"layers[{n}].{name}", axes)
                    for part, name in zip(pair, (written, "mlp_out"), strict=True)
                )
                for n, pair in enumerate(pairs)
            )
        elif self.style == "joined":
            self.parts = nn.ModuleList(Added(Joined(*pair, n, axes, written), "", axes) for n, pair in enumerate(pairs))
        else:
            self.attention, self.mlp = pairs[0]

    def run(self, x: Tensor) -> Tensor:
        """Returns the stream behind the layers."""
        if self.style in ("wrapped", "joined"):
            for number, parts in enumerate(self.parts):
                keep(f"layers[{number}].resid_pre", x, self.axes)
                for count, part in enumerate(parts if self.style == "wrapped" else [parts]):
                    if count:
                        keep(f"layers[{number}].resid_mid", x, self.axes)
                    x = part(x)
                keep(f"layers[{number}].resid_post", x, self.axes)
            return x
        if self.style == "blocks":
            for block in self.parts:
                x = block(x)
            return x
        pairs = {
            "pairs": lambda: self.parts,
            "flat": lambda: zip(self.parts[::2], self.parts[1::2], strict=True),
            "zipped": lambda: zip(self.attentions, self.mlps, strict=True),
            "single": lambda: [(self.attention, self.mlp)],
        }[self.style]()
        for number, (attention, mlp) in enumerate(pairs):
            x = self.stream.layer(x, attention, mlp, number)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        keep("@embed", x, "b t c")
        x = self.run(x.transpose(0, 1) if self.is_sequence_first else x)
        x = self.norm(x)
        keep("@final_norm", x, self.axes)
        x = self.unembed(x)
        x = x.transpose(0, 1) if self.is_sequence_first else x
        keep("@logits", x, "b t v")
        return x


def chosen_of(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    return {name: rng.choice(values) for name, values in CHOICES.items()}


def in_parts(value: Tensor, axes: str, heads: int) -> tuple[Tensor, str]:
    """Returns a kept value, in a run on three rows, with a dimension for each of its letters."""
    if axes.startswith("("):
        value = value.unflatten(0, (3, heads) if axes.startswith("(b") else (heads, 3))
    return value, axes.replace("(", "").replace(")", "")


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_found_is_what_the_code_says(seed: int) -> None:
    chosen = chosen_of(seed)
    torch.manual_seed(seed)
    heads, size = {"equal": (4, 4)}.get(chosen["sizes"], (4, 6))
    rows, length = {"equal": (4, 4), "one token": (3, 1), "one row": (1, 5)}.get(chosen["sizes"], (2, 5))
    example, others = (torch.randint(0, VOCABULARY, shape) for shape in ((rows, length), (3, 7)))

    def expected(model: nn.Module, inputs: tuple[Any, ...]) -> Expected:
        _kept.clear()
        model(*inputs)
        return {name: in_parts(*kept, heads) for name, kept in _kept.items()}

    outcome = outcome_of(Trial("", lambda: Model(heads * size, heads, chosen), (example,), (others,), expected))
    assert outcome.wrong == {}, chosen
    assert len(outcome.missing) <= MOST_MISSING * (len(outcome.right) + len(outcome.missing)), (chosen, outcome.missing)
