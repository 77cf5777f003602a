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


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 4)


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


# -- ARENA: einsum over weights with a dimension for the heads ---------------------------------------------------------


class ArenaAttention(Part):
    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("bpd,ndh->bpnh", x, self.W_Q) + self.b_Q
        k = torch.einsum("bpd,ndh->bpnh", x, self.W_K) + self.b_K
        v = torch.einsum("bpd,ndh->bpnh", x, self.W_V) + self.b_V
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) / HEAD_SIZE**0.5
        mask = torch.triu(torch.ones(scores.size(-2), scores.size(-1)), diagonal=1).bool()
        scores.masked_fill_(mask, self.IGNORE)
        pattern = scores.softmax(-1)
        z = torch.einsum("bknh,bnqk->bqnh", v, pattern)
        self.keep("b t h c", q=q, k=k, v=v, z=z)
        self.keep("b h q k", scores=scores, pattern=pattern)
        return torch.einsum("bqnh,nhd->bqd", z, self.W_O) + self.b_O


class ArenaMlp(Part):
    def forward(self, x: Tensor) -> Tensor:
        pre = torch.einsum("bpd,dm->bpm", x, self.W_in) + self.b_in
        post = F.gelu(pre)
        self.keep("b t n", pre=pre, post=post)
        return torch.einsum("bpm,md->bpd", post, self.W_out) + self.b_out


class ArenaNorm(Part):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.w + self.b


class Arena(Part):
    def forward(self, tokens: Tensor) -> Tensor:
        embed = self.W_E[tokens]
        pos_embed = self.W_pos[: tokens.shape[1]][None].expand(len(tokens), -1, -1)
        self.keep("b t c", **{"@embed": embed, "@pos_embed": pos_embed})
        x = self.ln_f(self.blocks(embed + pos_embed))
        return torch.einsum("bpd,dv->bpv", x, self.W_U) + self.b_U


def arena_norm() -> nn.Module:
    return ArenaNorm(w=nn.Parameter(torch.ones(WIDTH)), b=weight(WIDTH))


def arena() -> nn.Module:
    def layer(n: int) -> nn.Module:
        weights = {f"W_{name}": weight(HEADS, WIDTH, HEAD_SIZE) for name in "QKV"}
        biases = {f"b_{name}": weight(HEADS, HEAD_SIZE) for name in "QKV"}
        output = {"W_O": weight(HEADS, HEAD_SIZE, WIDTH), "b_O": weight(WIDTH)}
        ignore = nn.Buffer(torch.tensor(float("-inf")))
        attn = ArenaAttention(f"layers[{n}].attn.", IGNORE=ignore, **weights, **biases, **output)
        maps = {"W_in": weight(WIDTH, 40), "b_in": weight(40), "W_out": weight(40, WIDTH), "b_out": weight(WIDTH)}
        mlp = ArenaMlp(f"layers[{n}].mlp.", **maps)
        return Block(f"layers[{n}].", ln_1=arena_norm(), attn=attn, ln_2=arena_norm(), mlp=mlp)

    tables = {"W_E": weight(VOCABULARY, WIDTH), "W_pos": weight(CONTEXT, WIDTH), "W_U": weight(WIDTH, VOCABULARY)}
    blocks = nn.Sequential(*map(layer, range(LAYERS)))
    return Arena(blocks=blocks, ln_f=arena_norm(), b_U=weight(VOCABULARY), **tables)


# -- Karpathy's lecture: one module a head -----------------------------------------------------------------------------


class LectureHead(Part):
    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.key(x), self.query(x), self.value(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[: x.shape[1], : x.shape[1]] == 0, float("-inf"))
        pattern = F.softmax(wei, dim=-1)
        out = self.dropout(pattern) @ v
        self.keep("b t c", q=q, k=k, v=v, z=out)
        self.keep("b q k", scores=wei, pattern=pattern)
        return out


class LectureAttention(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.proj(torch.cat([h(x) for h in self.heads], dim=-1)))


def lecture_block(layer: int) -> nn.Module:
    def head(n: int) -> nn.Module:
        maps = {name: linear(HEAD_SIZE, bias=False) for name in ("key", "query", "value")}
        start = f"layers[{layer}].attn.heads[{n}]."
        return LectureHead(start, tril=nn.Buffer(TRIL), dropout=nn.Dropout(0.1), **maps)

    heads = nn.ModuleList(map(head, range(HEADS)))
    return block(layer, LectureAttention(heads=heads, proj=linear(), dropout=nn.Dropout(0.1)))


# -- Raschka: a mask in place, a shortcut ------------------------------------------------------------------------------


class RaschkaAttention(Part):
    def forward(self, x: Tensor) -> Tensor:
        b, num_tokens, _ = x.shape
        keys, queries, values = self.W_key(x), self.W_query(x), self.W_value(x)
        keys, queries, values = (
            each.view(b, num_tokens, HEADS, HEAD_SIZE).transpose(1, 2) for each in (keys, queries, values)
        )
        attn_scores = queries @ keys.transpose(2, 3)
        attn_scores.masked_fill_(self.mask.bool()[:num_tokens, :num_tokens], -torch.inf)
        scaled = attn_scores / keys.shape[-1] ** 0.5
        attn_weights = self.dropout(torch.softmax(scaled, dim=-1))
        context_vec = (attn_weights @ values).transpose(1, 2)
        self.keep("b h t c", q=queries, k=keys, v=values)
        self.keep("b h q k", scores=scaled, pattern=attn_weights)
        self.keep("b t h c", z=context_vec)
        return self.out_proj(context_vec.contiguous().view(b, num_tokens, WIDTH))


class RaschkaBlock(Part):
    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.drop_shortcut(self.attn(self.ln_1(x)))
        x = x + shortcut
        shortcut = x
        x = self.drop_shortcut(self.mlp(self.ln_2(x)))
        return x + shortcut


def raschka_block(layer: int) -> nn.Module:
    maps = {name: linear(bias=False) for name in ("W_query", "W_key", "W_value", "out_proj")}
    mask, dropout = nn.Buffer(1 - TRIL), nn.Dropout(0.1)
    attn = RaschkaAttention(f"layers[{layer}].attn.", mask=mask, dropout=dropout, **maps)
    mlp = Mlp(f"layers[{layer}].mlp.", c_fc=linear(40), gelu=Gelu(), c_proj=linear(WIDTH, 40))
    parts = {"attn": attn, "mlp": mlp, "drop_shortcut": nn.Dropout(0.1)}
    return RaschkaBlock(f"layers[{layer}].", ln_1=arena_norm(), ln_2=arena_norm(), **parts)


# -- Annotated Transformer: sublayers are closures, projections a list of clones ---------------------------------------


class AnnotatedAttention(Part):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        rows = query.size(0)
        query, key, value = [
            lin(x).view(rows, -1, HEADS, HEAD_SIZE).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
        scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        self.attn = scores.softmax(dim=-1)
        x = torch.matmul(self.attn, value)
        self.keep("b h t c", q=query, k=key, v=value, z=x)
        self.keep("b h q k", scores=scores, pattern=self.attn)
        return self.linears[-1](x.transpose(1, 2).contiguous().view(rows, -1, WIDTH))


class Sublayer(Part):
    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        written = self.dropout(sublayer(self.norm(x)))
        self.keep("b t c", _out=written)
        return x + written


class AnnotatedLayer(Part):
    def forward(self, x: Tensor, mask: Tensor, memory: Any = None, src_mask: Any = None) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        if memory is not None:
            x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
        return self.sublayer[-1](x, self.feed_forward)


class AnnotatedStack(Part):
    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        for each in self.layers:
            x = each(x, *given)
        return self.norm(x)


class Sinusoids(Part):
    """Adds positions to embeddings that have them in dimension `dim`."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe.narrow(self.dim, 0, x.size(self.dim))


def sinusoids(dim: int) -> nn.Module:
    angles = torch.arange(CONTEXT)[:, None] * torch.exp(torch.arange(0, WIDTH, 2) * -(math.log(1e4) / WIDTH))
    return Sinusoids(dim=dim, pe=nn.Buffer(torch.stack([angles.sin(), angles.cos()], -1).flatten(1).unsqueeze(1 - dim)))


class Annotated(Part):
    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        memory = self.encoder(self.position(self.src_lut(src) * math.sqrt(WIDTH)), src_mask)
        x = self.decoder(self.position(self.tgt_lut(tgt) * math.sqrt(WIDTH)), tgt_mask, memory, src_mask)
        return self.proj(x)


def annotated() -> nn.Module:
    def stack(name: str, *kinds: str) -> nn.Module:
        def layer(n: int) -> nn.Module:
            start = f"{name}.layers[{n}]."
            attns = [
                AnnotatedAttention(f"{start}{kind}.", linears=nn.ModuleList([linear() for _ in range(4)]))
                for kind in ("attn", "cross_attn")
            ]
            parts = {"self_attn": attns[0], **({"src_attn": attns[1]} if "cross_attn" in kinds else {})}
            mlp = Mlp(f"{start}mlp.", c_fc=linear(40), gelu=nn.ReLU(), c_proj=linear(WIDTH, 40))
            made = [Sublayer(f"{start}{kind}", norm=arena_norm(), dropout=nn.Dropout(0.1)) for kind in kinds]
            return AnnotatedLayer(start, feed_forward=mlp, sublayer=nn.ModuleList(made), **parts)

        return AnnotatedStack(f"{name}.", layers=nn.ModuleList(map(layer, range(LAYERS))), norm=arena_norm())

    tables = {name: nn.Embedding(VOCABULARY, WIDTH) for name in ("src_lut", "tgt_lut")}
    stacks = {"encoder": stack("encoder", "attn", "mlp"), "decoder": stack("decoder", "attn", "cross_attn", "mlp")}
    return Annotated(position=sinusoids(1), proj=linear(VOCABULARY), **tables, **stacks)


def annotated_inputs(rows: int, source: int, target: int) -> tuple[Tensor, ...]:
    causal = (TRIL[:target, :target] == 1).expand(rows, -1, -1)
    return ids(rows, source), ids(rows, target, 1), torch.ones(rows, 1, source) == 1, causal


# -- what many write themselves: layers are steps of a loop over lists of parts ----------------------------------------


class Lists(Part):
    """Attention and MLPs in one list, in two, in pairs, or one of each in no list."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for n, (attn, ff) in enumerate(self.steps(self)):
            x = attn(self.norms[2 * n](x)) + x
            x = ff(self.norms[2 * n + 1](x)) + x
        return self.to_logits(self.norm(x))


def lists(kind: str) -> nn.Module:
    count = 1 if kind == "single" else LAYERS
    attns, mlps = [min_attention(n) for n in range(count)], [block(n, nn.Identity()).mlp for n in range(count)]
    pairs = list(zip(attns, mlps, strict=True))
    flat = [each for pair in pairs for each in pair]
    steps, parts = {
        "flat": (lambda self: zip(self.parts[::2], self.parts[1::2], strict=True), {"parts": nn.ModuleList(flat)}),
        "pairs": (lambda self: self.parts, {"parts": nn.ModuleList(map(nn.ModuleList, pairs))}),
        "zipped": (
            lambda self: zip(self.parts, self.mlps, strict=True),
            dict(zip(("parts", "mlps"), map(nn.ModuleList, (attns, mlps)), strict=True)),
        ),
        "single": (lambda self: [(self.attention, self.feedforward)], {"attention": attns[0], "feedforward": mlps[0]}),
    }[kind]
    norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2 * count)])
    ends = {"embed": nn.Embedding(VOCABULARY, WIDTH), "norm": nn.LayerNorm(WIDTH), "to_logits": linear(VOCABULARY)}
    return Lists(steps=steps, norms=norms, **ends, **parts)


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
STACK = """
    S.@final_norm            out S.norm            b t c
    S.layers[{n}].resid_pre  in S.layers.{n}       b t c
    S.layers[{n}].resid_post out S.layers.{n}      b t c
"""
LISTS = """
    @embed                 out embed               b t c
    @final_norm            out norm                b t c
    @logits                out to_logits           b t v
    layers[{n}].resid_pre  in norms.{a}            b t c
    layers[{n}].resid_mid  in norms.{b}            b t c
    layers[{n}].ln1        out norms.{a}           b t c
    layers[{n}].ln2        out norms.{b}           b t c
"""
ATTENTIONS = {"flat": "parts.{a}", "pairs": "parts.{n}.0", "zipped": "parts.{n}", "single": "attention"}


def written_out(name: str, build: Callable[[], nn.Module], *inputs: tuple[Tensor, ...], table: str = TABLE) -> Trial:
    example, others = inputs or ((ids(2, 7),), (ids(3, 11, 1),))
    return Trial(f"written out: {name}", build, example, others, seen_by(table, add_kept))


CLASSICS = [
    written_out("nanoGPT", lambda: nano_gpt(flash=True)),
    written_out("nanoGPT, flash off", lambda: nano_gpt(flash=False)),
    written_out("minGPT", lambda: gpt(min_block)),
    written_out("ARENA", arena),
    written_out("Karpathy's lecture", lambda: gpt(lecture_block)),
    written_out("Raschka", lambda: gpt(raschka_block, arena_norm)),
    written_out(
        "Annotated Transformer", annotated, annotated_inputs(2, 5, 7), annotated_inputs(3, 11, 6),
        table=STACK.replace("S", "encoder") + STACK.replace("S", "decoder") + "@logits out proj b t v",
    ),
    *(
        written_out(
            f"lists: {kind}", lambda kind=kind: lists(kind),
            table=f"{LISTS} layers[{'0' if kind == 'single' else '{n}'}].attn_out out {path} b t c",
        )
        for kind, path in ATTENTIONS.items()
    ),
]  # fmt: skip
