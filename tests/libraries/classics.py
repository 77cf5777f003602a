"""The transformers of tutorials, written out in the style of their sources: each keeps what its values are by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.libraries.comparing import HEAD_SIZE, LAYERS, Trial, add_kept, keep, seen_by

WIDTH, HEADS, VOCABULARY, CONTEXT = 24, 4, 19, 16
TRIL = torch.tril(torch.ones(CONTEXT, CONTEXT))


def ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(4, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def linear(outputs: int = WIDTH, inputs: int = WIDTH, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias)


class Part(nn.Module):
    """A module with the parts that it is given; it keeps values under the name of its layer."""

    def __init__(self, start: str = "", **parts: Any) -> None:
        super().__init__()
        self.start = start
        for name, each in parts.items():
            setattr(self, name, each)

    def keep(self, axes: str, **values: Tensor) -> None:
        keep(self.start, axes, **values)


class Mlp(Part):
    def forward(self, x: Tensor) -> Tensor:
        pre = self.c_fc(x)
        post = self.gelu(pre)
        self.keep("b t n", pre=pre, post=post)
        return self.c_proj(post)


class Block(Part):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(Part):
    """Embeddings of tokens and positions, a `Sequential` of blocks, a norm, an unembedding."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        tokens, positions = self.tokens(idx), self.positions(torch.arange(idx.shape[1], device=idx.device))
        logits = self.head(self.ln_f(self.blocks(tokens + positions)))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(block: Callable[[int], nn.Module], norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(WIDTH)) -> Gpt:
    parts = {"tokens": nn.Embedding(VOCABULARY, WIDTH), "positions": nn.Embedding(CONTEXT, WIDTH)}
    return Gpt(blocks=nn.Sequential(*map(block, range(LAYERS))), ln_f=norm(), head=linear(VOCABULARY), **parts)


def block(layer: int, attn: nn.Module) -> Block:
    mlp = Mlp(f"layers[{layer}].mlp.", c_fc=linear(40), gelu=nn.GELU(), c_proj=linear(WIDTH, 40))
    return Block(f"layers[{layer}].", ln_1=nn.LayerNorm(WIDTH), attn=attn, ln_2=nn.LayerNorm(WIDTH), mlp=mlp)


# -- nanoGPT: a fused projection, tied embeddings, logits of the last position alone -----------------------------------


class NanoAttention(Part):
    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (each.view(B, T, HEADS, C // HEADS).transpose(1, 2) for each in self.c_attn(x).split(C, dim=2))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            pattern = F.softmax(att, dim=-1)
            self.keep("b h q k", scores=att, pattern=pattern)
            y = self.dropout(pattern) @ v
        self.keep("b h t c", q=q, k=k, v=v, z=y)
        return self.dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class NanoGpt(Part):
    def forward(self, idx: Tensor) -> tuple[Tensor, None]:
        x = self.drop(self.tokens(idx) + self.positions(torch.arange(0, idx.size(1), device=idx.device)))
        for each in self.blocks:
            x = each(x)
        return self.head(self.ln_f(x)[:, [-1], :]), None


def nano_gpt(*, flash: bool) -> nn.Module:
    def attention(layer: int) -> nn.Module:
        parts = {"c_attn": linear(3 * WIDTH), "c_proj": linear(), "dropout": nn.Dropout(0.1)}
        return NanoAttention(f"layers[{layer}].attn.", flash=flash, bias=nn.Buffer(TRIL[None, None]), **parts)

    made = gpt(lambda layer: block(layer, attention(layer)))
    made.tokens.weight = made.head.weight
    return NanoGpt(drop=nn.Dropout(0.1), **dict(made.named_children()))


# -- minGPT: the MLP is a closure, the activation is written out -------------------------------------------------------


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class MinAttention(Part):
    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        k, q, v = (each(x).view(B, T, HEADS, HEAD_SIZE).transpose(1, 2) for each in (self.key, self.query, self.value))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:T, :T] == 0, -1e10)
        pattern = F.softmax(att, dim=-1)
        y = pattern @ v
        self.keep("b h q k", scores=att, pattern=pattern)
        self.keep("b h t c", q=q, k=k, v=v, z=y)
        return self.proj(y.transpose(1, 2).contiguous().view(B, T, C))


def min_attention(layer: int) -> nn.Module:
    maps = {name: linear() for name in ("query", "key", "value", "proj")}
    return MinAttention(f"layers[{layer}].attn.", bias=nn.Buffer(TRIL), **maps)


def min_block(layer: int) -> nn.Module:
    found = block(layer, min_attention(layer))
    m = found.parts = found.mlp
    m.gelu = Gelu()
    del found.mlp
    found.mlp = lambda x: m(x)
    return found


class Sinusoids(Part):
    """Adds positions to embeddings that have them in dimension `dim`."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe.narrow(self.dim, 0, x.size(self.dim))


def sinusoids(dim: int) -> nn.Module:
    angles = torch.arange(CONTEXT)[:, None] * torch.exp(torch.arange(0, WIDTH, 2) * -(math.log(1e4) / WIDTH))
    return Sinusoids(dim=dim, pe=nn.Buffer(torch.stack([angles.sin(), angles.cos()], -1).flatten(1).unsqueeze(1 - dim)))


TABLE = """
    @embed                 out tokens              b t c
    @pos_embed             out positions           t c
    @final_norm            out ln_f                b t c
    layers[{n}].resid_pre  in blocks.{n}           b t c
    layers[{n}].ln1        out blocks.{n}.ln_1     b t c
    layers[{n}].attn_out   out blocks.{n}.attn     b t c
    layers[{n}].resid_mid  in blocks.{n}.ln_2      b t c
    layers[{n}].ln2        out blocks.{n}.ln_2     b t c
    layers[{n}].mlp_out    out blocks.{n}.mlp      b t c
    layers[{n}].mlp_out    out blocks.{n}.parts    b t c
    layers[{n}].resid_post out blocks.{n}          b t c
    @logits                out .#0                 b t v
"""


def written_out(name: str, build: Callable[[], nn.Module]) -> Trial:
    return Trial(f"written out: {name}", build, (ids(2, 7),), (ids(3, 11, 1),), seen_by(TABLE, add_kept))


CLASSICS = [
    written_out("nanoGPT", lambda: nano_gpt(flash=True)),
    written_out("nanoGPT, flash off", lambda: nano_gpt(flash=False)),
    written_out("minGPT", lambda: gpt(min_block)),
]
