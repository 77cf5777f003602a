"""The models of libraries, small and with random weights, and what of their modules the components are."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.libraries.classics import CONTEXT, HEADS, TABLE, VOCABULARY, WIDTH, Part, block, gpt, ids, linear, sinusoids
from tests.libraries.comparing import HEAD_SIZE, LAYERS, Expected, Seen, Trial, add_kept, add_pattern, in_order, seen_by

TOKENS = (ids(2, 7),), (ids(3, 11, 1),)
COLUMNS = (ids(2, 7).T.clone(),), (ids(3, 11, 1).T.clone(),)
NOT_TRIED = ["timm, open_clip: they need torchvision, of which there is no build for the torch without CUDA in use"]


def patterns(found: Expected, *_: Any, is_causal: bool = True, **settings: Any) -> None:
    """Adds the patterns of all attentions that are not given."""
    for start in [name.removesuffix(".k") for name in found if name.endswith("attn.k")]:
        is_hidden = is_causal and "encoder.layers" not in start and "cross" not in start
        add_pattern(found, start, is_causal=is_hidden, **settings)


# -- PyTorch's modules, as its tutorials use them ----------------------------------------------------------------------


class TorchAttention(Part):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        return self.attn(x, x, x, need_weights=self.with_weights, attn_mask=mask)[0]


class LanguageModel(Part):
    def forward(self, src: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(src))
        return self.linear(self.encoder(self.position(self.embedding(src) * WIDTH**0.5), mask))


class Translator(Part):
    def forward(self, src: Tensor, tgt: Tensor, tgt_mask: Tensor) -> Tensor:
        given = self.position(self.src_emb(src) * WIDTH**0.5), self.position(self.tgt_emb(tgt) * WIDTH**0.5)
        return self.generator(self.transformer(*given, tgt_mask=tgt_mask))


def torch_layers(path: str, prefix: str = "", last: int = 2) -> str:
    """Returns the table of a stack of torch's layers."""
    return f"""
        {prefix}layers[{{n}}].resid_pre   in {path}.{{n}}                 t b c
        {prefix}layers[{{n}}].attn_out    out {path}.{{n}}.dropout1       t b c
        {prefix}layers[{{n}}].mlp_out     out {path}.{{n}}.dropout{last}  t b c
        {prefix}layers[{{n}}].resid_post  out {path}.{{n}}                t b c
        {prefix}layers[{{n}}].mlp.pre     out {path}.{{n}}.linear1        t b n
        {prefix}layers[{{n}}].mlp.post    in {path}.{{n}}.linear2         t b n
    """


def torch_attention(found: Expected, model: nn.Module, seen: Seen) -> None:
    """Adds what each `nn.MultiheadAttention` computes from its weights and what it is given."""
    for path, own in model.named_modules():
        if isinstance(own, nn.MultiheadAttention):
            stack = f"{path.partition('.layers')[0]}." if path.startswith("transformer.") else ""
            (number,) = filter(str.isdigit, path.split("."))
            start = f"{stack}layers[{number}].{'cross_attn' if 'multihead' in path else 'attn'}"
            axes = "b t h c" if own.batch_first else "t b h c"
            maps = zip(
                "qkv", seen.values["in", path], own.in_proj_weight.chunk(3), own.in_proj_bias.chunk(3), strict=False
            )
            for name, x, weight, bias in maps:
                found[f"{start}.{name}"] = F.linear(x, weight, bias).unflatten(-1, (HEADS, -1)), axes
    patterns(found)
    for start in [name.removesuffix("v") for name in found if name.endswith("attn.v")]:
        found[f"{start}z"] = found[f"{start}pattern"][0] @ in_order(found[f"{start}v"], "b h t c"), "b h t c"


def pytorch() -> Iterator[Trial]:
    def language_model() -> nn.Module:
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 40), LAYERS)
        ends = {"embedding": nn.Embedding(VOCABULARY, WIDTH), "linear": linear(VOCABULARY)}
        return LanguageModel(encoder=encoder, position=sinusoids(0), **ends)

    def translator() -> nn.Module:
        tables = {name: nn.Embedding(VOCABULARY, WIDTH) for name in ("src_emb", "tgt_emb")}
        transformer = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, 40)
        return Translator(transformer=transformer, position=sinusoids(0), generator=linear(VOCABULARY), **tables)

    def attention(layer: int, with_weights: bool) -> nn.Module:
        return block(
            layer, TorchAttention(attn=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), with_weights=with_weights)
        )

    def rest(found: Expected, model: nn.Module, seen: Seen) -> None:
        add_kept(found, model, seen)
        torch_attention(found, model, seen)

    def pairs(rows: int, source: int, target: int) -> tuple[Tensor, ...]:
        mask = nn.Transformer.generate_square_subsequent_mask(target)
        return ids(rows, source).T.clone(), ids(rows, target, 1).T.clone(), mask

    ends = "@embed out embedding t b c\n @logits out linear t b v"
    expected = seen_by(ends + torch_layers("encoder.layers"), torch_attention)
    yield Trial("PyTorch: language model", language_model, *COLUMNS, expected)
    cross = "transformer.decoder.layers[{n}].cross_attn_out out transformer.decoder.layers.{n}.dropout2 t b c"
    stacks = (
        torch_layers(f"transformer.{name}.layers", f"transformer.{name}.", n)
        for name, n in (("encoder", 2), ("decoder", 3))
    )
    expected = seen_by("\n".join(["@logits out generator t b v", cross, *stacks]), torch_attention)
    yield Trial("PyTorch: nn.Transformer", translator, pairs(2, 5, 7), pairs(3, 11, 6), expected)
    for weights in (True, False):
        name = f"nn.MultiheadAttention{', weights' if weights else ''}"
        yield Trial(
            f"PyTorch: {name}", partial(gpt, partial(attention, with_weights=weights)), *TOKENS, seen_by(TABLE, rest)
        )


# -- lucidrains --------------------------------------------------------------------------------------------------------


def x_transformers() -> Iterator[Trial]:
    from x_transformers import Decoder, Encoder, TransformerWrapper

    table = """
        @embed                 out token_emb                            b t c
        @final_norm            out attn_layers.final_norm               b t c
        @logits                out to_logits                            b t v
        layers[{n}].resid_pre  in attn_layers.layers.{a}.2#1            b t c
        layers[{n}].ln1        out attn_layers.layers.{a}.0.0           b t c
        layers[{n}].attn.q     out attn_layers.layers.{a}.1.to_q        b t (h c)
        layers[{n}].attn.k     out attn_layers.layers.{a}.1.to_k        b t (h c)
        layers[{n}].attn.v     out attn_layers.layers.{a}.1.to_v        b t (h c)
        layers[{n}].attn.z     in attn_layers.layers.{a}.1.to_out       b t (h c)
        layers[{n}].attn_out   out attn_layers.layers.{a}.1#0           b t c
        layers[{n}].resid_mid  out attn_layers.layers.{a}.2             b t c
        layers[{n}].ln2        out attn_layers.layers.{b}.0.0           b t c
        layers[{n}].mlp.post   out attn_layers.layers.{b}.1.ff.0        b t n
        layers[{n}].mlp_out    out attn_layers.layers.{b}.1             b t c
        layers[{n}].resid_post out attn_layers.layers.{b}.2             b t c
    """
    plain = "layers[{n}].mlp.pre out attn_layers.layers.{b}.1.ff.0.0 b t n\n @pos_embed out pos_emb t c"
    gated = """
        layers[{n}].mlp.pre    out attn_layers.layers.{b}.1.ff.0.proj[96:192] b t n
        layers[{n}].attn.q_rot in attn_layers.layers.{a}.1.attend#0     b h t c
        layers[{n}].attn.k_rot in attn_layers.layers.{a}.1.attend#1     b h t c
    """

    def build(kind: Any, settings: dict[str, Any]) -> nn.Module:
        layers = kind(dim=WIDTH, depth=LAYERS, heads=HEADS, attn_dim_head=HEAD_SIZE, **settings)
        return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=CONTEXT, attn_layers=layers)

    rotary = {"rotary_pos_emb": True, "ff_glu": True, "use_rmsnorm": True}
    for name, kind, settings in (
        ("Decoder", Decoder, {}), ("Encoder", Encoder, {}), ("rotary, gated", Decoder, rotary),
        ("one head of keys", Decoder, {"attn_one_kv_head": True}), ("grouped queries", Decoder, {"attn_kv_heads": 2}),
        ("flash", Decoder, {"attn_flash": True}),
    ):  # fmt: skip
        expected = seen_by(
            table + (gated if settings == rotary else plain),
            partial(patterns, is_causal=kind is Decoder, is_tiled=True),
        )
        yield Trial(f"x-transformers: {name}", partial(build, kind, settings), *TOKENS, expected)


def vit_pytorch() -> Iterator[Trial]:
    table = """
        @final_norm            out transformer.norm                     b t c
        @logits                out .                                   b v
        layers[{n}].resid_pre  in transformer.layers.{n}.0              b t c
        layers[{n}].ln1        out transformer.layers.{n}.0.norm        b t c
        layers[{n}].attn.q     out transformer.layers.{n}.0.to_qkv[0:24]  b t (h c)
        layers[{n}].attn.k     out transformer.layers.{n}.0.to_qkv[24:48] b t (h c)
        layers[{n}].attn.v     out transformer.layers.{n}.0.to_qkv[48:72] b t (h c)
        layers[{n}].attn.scores  in transformer.layers.{n}.0.attend     b h q k
        layers[{n}].attn.pattern out transformer.layers.{n}.0.attend    b h q k
        layers[{n}].attn.z     in transformer.layers.{n}.0.to_out       b t (h c)
        layers[{n}].attn_out   out transformer.layers.{n}.0             b t c
        layers[{n}].resid_mid  in transformer.layers.{n}.1              b t c
        layers[{n}].ln2        out transformer.layers.{n}.1.net.0       b t c
        layers[{n}].mlp.pre    out transformer.layers.{n}.1.net.1       b t n
        layers[{n}].mlp.post   out transformer.layers.{n}.1.net.2       b t n
        layers[{n}].mlp_out    out transformer.layers.{n}.1             b t c
    """

    def images(rows: int) -> tuple[Tensor]:
        return (torch.randn(rows, 3, 16, 12, generator=torch.Generator().manual_seed(rows)),)

    sizes = {"image_size": (16, 12), "patch_size": 4, "num_classes": 9, "dim": WIDTH, "mlp_dim": 40}
    sizes |= {"depth": LAYERS, "heads": HEADS, "dim_head": HEAD_SIZE}
    for file, name, more in (("vit", "ViT", {}), ("vit", "ViT", {"pool": "mean"}), ("simple_vit", "SimpleViT", {})):
        build = partial(getattr(_file_of("vit_pytorch", file), name), **sizes, **more)
        yield Trial(f"vit-pytorch: {name}{', mean' if more else ''}", build, images(2), images(3), seen_by(table))


def _file_of(package: str, name: str) -> ModuleType:
    """Returns a module of a package that is not imported itself, as that needs torchvision."""
    found = importlib.util.find_spec(package)
    if found is None or found.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No module named {package!r}")
    spec = importlib.util.spec_from_file_location(name, f"{found.submodule_search_locations[0]}/{name}.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def palm_pytorch() -> Iterator[Trial]:
    from palm_pytorch import PaLM
    from palm_pytorch.palm_pytorch import apply_rotary_pos_emb

    table = """
        @embed                 out 0                                    b t c
        @final_norm            out 4                                    b t c
        @logits                out 5                                    b t v
        layers[{n}].resid_pre  in {m}                                   b t c
        layers[{n}].attn.q     out {m}.fn.fused_attn_ff_proj[0:24]      b t (h c)
        layers[{n}].attn.k     out {m}.fn.fused_attn_ff_proj[24:30]     b t (h c)
        layers[{n}].attn.v     out {m}.fn.fused_attn_ff_proj[30:36]     b t (h c)
        layers[{n}].attn.z     in {m}.fn.attn_out                       b t (h c)
        layers[{n}].attn_out   out {m}.fn.attn_out                      b t c
        layers[{n}].mlp.pre    out {m}.fn.fused_attn_ff_proj[84:132]    b t n
        layers[{n}].mlp.post   out {m}.fn.ff_out.0                      b t n
        layers[{n}].mlp_out    out {m}.fn.ff_out                        b t c
        layers[{n}].resid_post out {m}                                  b t c
    """

    def rest(found: Expected, model: Any, _: Seen) -> None:
        for n in range(LAYERS):
            for name in "qk":
                x = in_order(found[f"layers[{n}].attn.{name}"], "b h t c")
                turned = apply_rotary_pos_emb(model[n + 1].fn.rotary_emb(x.shape[2], device=None), x)
                found[f"layers[{n}].attn.{name}_rot"] = turned, "b h t c"
        patterns(found)
        shared = [name for name in found if re.search(r"attn\.(k|v|k_rot)$", name)]  # no dimension for one head
        found |= {name: (in_order(found[name], "h b t c")[0], "b t c") for name in shared}

    build = partial(PaLM, dim=WIDTH, num_tokens=VOCABULARY, depth=LAYERS, dim_head=HEAD_SIZE, heads=HEADS, ff_mult=2)
    yield Trial("PaLM-pytorch: PaLM", build, *TOKENS, seen_by(table, rest))


# -- language, speech, proteins ----------------------------------------------------------------------------------------


def litgpt() -> Iterator[Trial]:
    from litgpt.model import GPT, Config, apply_rope

    table = """
        @embed                 out transformer.wte                      b t c
        @final_norm            out transformer.ln_f                     b t c
        @logits                out .                                   b t v
        layers[{n}].resid_pre  in transformer.h.{n}                     b t c
        layers[{n}].ln1        out transformer.h.{n}.norm_1             b t c
        layers[{n}].attn.z     in transformer.h.{n}.attn.proj           b t (h c)
        layers[{n}].attn_out   out transformer.h.{n}.post_attention_norm b t c
        layers[{n}].mlp.post   in transformer.h.{n}.mlp.proj            b t n
        layers[{n}].mlp_out    out transformer.h.{n}.post_mlp_norm      b t c
        layers[{n}].resid_post out transformer.h.{n}                    b t c
    """

    def rest(found: Expected, model: Any, seen: Seen) -> None:
        config = model.config
        first = "fc" if hasattr(model.transformer.h[0].mlp, "fc") else "fc_1"
        widths = [n * HEAD_SIZE for n in (config.n_head, config.n_query_groups, config.n_query_groups)]
        for n in range(LAYERS):
            start, path = f"layers[{n}].", f"out transformer.h.{n}"
            found[f"{start}mlp.pre"] = seen.get(f"{path}.mlp.{first}"), "b t n"
            if not config.parallel_residual:
                found[f"{start}ln2"] = seen.get(f"{path}.norm_2"), "b t c"
                found[f"{start}resid_mid"] = seen.get(f"in transformer.h.{n}.norm_2"), "b t c"
            for name, x in zip("qkv", seen.get(f"{path}.attn.qkv").split(widths, -1), strict=True):
                q = x.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
                cos, sin = (each[: q.shape[2]].unsqueeze(0) for each in (model.cos, model.sin))
                turned = apply_rope(q[..., : config.rope_n_elem], cos, sin), q[..., config.rope_n_elem :]
                found[f"{start}attn.{name}"] = q, "b h t c"
                found |= {} if name == "v" else {f"{start}attn.{name}_rot": (torch.cat(turned, -1), "b h t c")}
        scale = (config.attention_scores_scalar or HEAD_SIZE) ** -0.5
        patterns(found, scale=scale, cap=config.attention_logit_softcapping)

    def build(name: str, more: dict[str, Any]) -> nn.Module:
        sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "head_size": HEAD_SIZE, "block_size": CONTEXT}
        vocabulary = {"vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY}
        return GPT(Config.from_name(name, **sizes, **vocabulary, intermediate_size=40, **more))

    grouped = {"n_query_groups": 2}
    for name, more in (
        ("pythia-14m", {"rotary_percentage": 0.34}), ("Llama-2-7b-hf", {}), ("Llama-3.2-1B", grouped), ("phi-2", {}),
        ("Gemma-2-2b", grouped), ("falcon-7b", {"n_query_groups": 1}),
    ):  # fmt: skip
        yield Trial(f"litgpt: {name}", partial(build, name, more), *TOKENS, seen_by(table, rest))


def whisper() -> Iterator[Trial]:
    from whisper.model import ModelDimensions, Whisper

    layer = """
        S.layers[{n}].resid_pre  in S.blocks.{n}                        b t c
        S.layers[{n}].ln1        out S.blocks.{n}.attn_ln               b t c
        S.layers[{n}].attn_out   out S.blocks.{n}.attn#0                b t c
        S.layers[{n}].ln2        out S.blocks.{n}.mlp_ln                b t c
        S.layers[{n}].mlp.pre    out S.blocks.{n}.mlp.0                 b t n
        S.layers[{n}].mlp.post   out S.blocks.{n}.mlp.1                 b t n
        S.layers[{n}].mlp_out    out S.blocks.{n}.mlp                   b t c
        S.layers[{n}].resid_post out S.blocks.{n}                       b t c
    """
    attention = """
        S.layers[{n}].K.q        out S.blocks.{n}.K.query               b t (h c)
        S.layers[{n}].K.k        out S.blocks.{n}.K.key                 b t (h c)
        S.layers[{n}].K.v        out S.blocks.{n}.K.value               b t (h c)
        S.layers[{n}].K.z        in S.blocks.{n}.K.out                  b t (h c)
    """
    rest = """
        encoder.@final_norm              out encoder.ln_post            b t c
        encoder.layers[{n}].resid_mid    in encoder.blocks.{n}.mlp_ln   b t c
        decoder.@embed                   out decoder.token_embedding    b t c
        decoder.@final_norm              out decoder.ln                 b t c
        decoder.layers[{n}].resid_mid    in decoder.blocks.{n}.cross_attn_ln b t c
        decoder.layers[{n}].ln_cross     out decoder.blocks.{n}.cross_attn_ln b t c
        decoder.layers[{n}].cross_attn_out out decoder.blocks.{n}.cross_attn#0 b t c
        @logits                          out .                         b t v
    """
    own = attention.replace("K", "attn")
    table = (layer + own).replace("S", "encoder") + (layer + own).replace("S", "decoder")
    table += attention.replace("S", "decoder").replace("K", "cross_attn") + rest

    def build() -> nn.Module:
        model = Whisper(ModelDimensions(8, 10, WIDTH, HEADS, LAYERS, VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS))
        nn.init.normal_(model.decoder.positional_embedding)
        return model

    def inputs(rows: int, length: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 8, 20, generator=torch.Generator().manual_seed(rows)), ids(rows, length)

    yield Trial("openai-whisper: Whisper", build, inputs(2, 7), inputs(3, 11), seen_by(table, patterns))


PRE_NORM = """
    layers[{n}].resid_pre  in PATH.{n}                  t b c
    layers[{n}].attn_out   out PATH.{n}.self_attn#0     t b c
    layers[{n}].resid_mid  in PATH.{n}.NORM2            t b c
    layers[{n}].ln1        out PATH.{n}.NORM1           t b c
    layers[{n}].ln2        out PATH.{n}.NORM2           t b c
    layers[{n}].resid_post out PATH.{n}#0               t b c
"""


def fair_esm() -> Iterator[Trial]:
    from esm.model.esm2 import ESM2

    table = (
        PRE_NORM.replace("PATH", "layers").replace("NORM1", "self_attn_layer_norm").replace("NORM2", "final_layer_norm")
    )
    table += """
        @embed                 out embed_tokens                         b t c
        @final_norm            out emb_layer_norm_after                 t b c
        @logits                out lm_head                              b t v
        layers[{n}].attn.q     out layers.{n}.self_attn.q_proj          t b (h c)
        layers[{n}].attn.k     out layers.{n}.self_attn.k_proj          t b (h c)
        layers[{n}].attn.v     out layers.{n}.self_attn.v_proj          t b (h c)
        layers[{n}].attn.z     in layers.{n}.self_attn.out_proj         t b (h c)
        layers[{n}].mlp.pre    out layers.{n}.fc1                       t b n
        layers[{n}].mlp.post   in layers.{n}.fc2                        t b n
        layers[{n}].mlp_out    out layers.{n}.fc2                       t b c
    """

    def rest(found: Expected, model: Any, _: Seen) -> None:
        for n in range(LAYERS):
            q, k = (in_order(found[f"layers[{n}].attn.{name}"], "b h t c") for name in "qk")
            turn = model.layers[n].self_attn.rot_emb
            for name, x in zip("qk", turn((q * HEAD_SIZE**-0.5).flatten(0, 1), k.flatten(0, 1)), strict=True):
                found[f"layers[{n}].attn.{name}_rot"] = x.unflatten(0, q.shape[:2]), "b h t c"
        patterns(found, is_causal=False, scale=1.0)

    build = partial(ESM2, num_layers=LAYERS, embed_dim=WIDTH, attention_heads=HEADS)
    yield Trial("fair-esm: ESM2", build, *TOKENS, seen_by(table, rest))


class Autoregressive(Part):
    """A decoder of labml-nn as its experiments use it: ids of shape (position, batch)."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), len(x)).tril().bool().unsqueeze(-1)
        return self.generator(self.encoder(self.embed(x), mask))


def labml_nn() -> Iterator[Trial]:
    from labml_nn.transformers import models
    from labml_nn.transformers.feed_forward import FeedForward
    from labml_nn.transformers.mha import MultiHeadAttention
    from labml_nn.transformers.rope import RotaryPEMultiHeadAttention

    table = PRE_NORM.replace("PATH", "encoder.layers").replace("NORM1", "norm_self_attn").replace("NORM2", "norm_ff")
    table = (
        table.replace("#0", "")
        + """
        @embed                 out embed.linear                         t b c
        @final_norm            out encoder.norm                         t b c
        @logits                out generator                            t b v
        layers[{n}].attn.q     out encoder.layers.{n}.self_attn.query   t b h c
        layers[{n}].attn.k     out encoder.layers.{n}.self_attn.key     t b h c
        layers[{n}].attn.v     out encoder.layers.{n}.self_attn.value   t b h c
        layers[{n}].attn.z     in encoder.layers.{n}.self_attn.output   t b (h c)
        layers[{n}].mlp.pre    out encoder.layers.{n}.feed_forward.layer1 t b n
        layers[{n}].mlp.post   in encoder.layers.{n}.feed_forward.layer2 t b n
        layers[{n}].mlp_out    out encoder.layers.{n}.feed_forward      t b c
    """
    )
    rotary = """
        layers[{n}].attn.q_rot out encoder.layers.{n}.self_attn.query_rotary_pe t b h c
        layers[{n}].attn.k_rot out encoder.layers.{n}.self_attn.key_rotary_pe   t b h c
    """

    def build(attention: Any) -> nn.Module:
        parts = {"self_attn": attention(HEADS, WIDTH), "feed_forward": FeedForward(WIDTH, 40), "dropout_prob": 0.1}
        encoder = models.Encoder(models.TransformerLayer(d_model=WIDTH, **parts), LAYERS)
        embed = models.EmbeddingsWithPositionalEncoding(WIDTH, VOCABULARY, CONTEXT)
        return Autoregressive(embed=embed, encoder=encoder, generator=models.Generator(VOCABULARY, WIDTH))

    turned = partial(RotaryPEMultiHeadAttention, rope_percentage=0.7)
    for name, kind, more in (("autoregressive", MultiHeadAttention, ""), ("rotary", turned, rotary)):
        yield Trial(f"labml-nn: {name}", partial(build, kind), *COLUMNS, seen_by(table + more, patterns))


def hooked_transformer() -> Iterator[Trial]:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    table = """
        @embed                 out hook_embed                           b t c
        @pos_embed             out hook_pos_embed                       b t c
        @final_norm            out ln_final                             b t c
        @logits                out unembed                              b t v
        layers[{n}].resid_pre  out blocks.{n}.hook_resid_pre            b t c
        layers[{n}].ln1        out blocks.{n}.ln1                       b t c
        layers[{n}].attn.q     out blocks.{n}.attn.hook_q               b t h c
        layers[{n}].attn.k     out blocks.{n}.attn.hook_k               b t h c
        layers[{n}].attn.v     out blocks.{n}.attn.hook_v               b t h c
        layers[{n}].attn.q_rot out blocks.{n}.attn.hook_rot_q           b t h c
        layers[{n}].attn.k_rot out blocks.{n}.attn.hook_rot_k           b t h c
        layers[{n}].attn.scores  out blocks.{n}.attn.hook_attn_scores   b h q k
        layers[{n}].attn.pattern out blocks.{n}.attn.hook_pattern       b h q k
        layers[{n}].attn.z     out blocks.{n}.attn.hook_z               b t h c
        layers[{n}].attn_out   out blocks.{n}.hook_attn_out             b t c
        layers[{n}].resid_mid  out blocks.{n}.hook_resid_mid            b t c
        layers[{n}].ln2        out blocks.{n}.ln2                       b t c
        layers[{n}].mlp.pre    out blocks.{n}.mlp.hook_pre              b t n
        layers[{n}].mlp.post   out blocks.{n}.mlp.hook_post             b t n
        layers[{n}].mlp_out    out blocks.{n}.hook_mlp_out              b t c
        layers[{n}].resid_post out blocks.{n}.hook_resid_post           b t c
    """

    def build(settings: dict[str, Any]) -> nn.Module:
        sizes = {"n_layers": LAYERS, "d_model": WIDTH, "n_ctx": CONTEXT, "d_head": HEAD_SIZE, "n_heads": HEADS}
        config = {"d_mlp": 40, "act_fn": "gelu", "d_vocab": VOCABULARY, "device": "cpu", "seed": 0}
        return HookedTransformer(HookedTransformerConfig(**sizes, **config | settings))

    rotary = {"positional_embedding_type": "rotary", "rotary_dim": HEAD_SIZE, "n_key_value_heads": 2}
    rotary |= {"gated_mlp": True, "normalization_type": "RMS", "act_fn": "silu"}
    for name, settings in (
        ("GPT-2", {}), ("rotary, gated", rotary), ("parallel", {"parallel_attn_mlp": True}),
        ("SoLU", {"act_fn": "solu_ln"}), ("attention only", {"attn_only": True}),
    ):  # fmt: skip
        yield Trial(f"HookedTransformer: {name}", partial(build, settings), *TOKENS, seen_by(table))


def torchmultimodal() -> Iterator[Trial]:
    from torchmultimodal.models.clip.text_encoder import CLIPTextEncoder

    table = PRE_NORM.replace("PATH", "encoder.layers").replace("NORM", "norm").replace("self_attn#0", "dropout1")
    table = (
        table.replace("#0", "")
        + """
        @embed                 out token_embedding                      b t c
        @final_norm            out ln_final                             b t c
        layers[{n}].mlp.pre    out encoder.layers.{n}.linear1           t b n
        layers[{n}].mlp.post   in encoder.layers.{n}.linear2            t b n
        layers[{n}].mlp_out    out encoder.layers.{n}.dropout2          t b c
    """
    )
    sizes = {"embedding_dim": 12, "context_length": 7, "vocab_size": VOCABULARY, "dim_feedforward": 40}
    build = partial(CLIPTextEncoder, width=WIDTH, heads=HEADS, layers=LAYERS, **sizes)
    yield Trial(
        "torchmultimodal: CLIPTextEncoder", build, (ids(2, 7),), (ids(3, 7, 1),), seen_by(table, torch_attention)
    )


MAKERS = [pytorch, x_transformers, vit_pytorch, palm_pytorch, litgpt, whisper, fair_esm, labml_nn, hooked_transformer]
MAKERS.append(torchmultimodal)


def trials_of_packages() -> tuple[list[Trial], list[str]]:
    """Returns the trials of the libraries that are installed, and why others are skipped."""
    found, skipped = list[Trial](), list(NOT_TRIED)
    for make in MAKERS:
        try:
            found += make()
        except ImportError as error:
            skipped.append(f"{make.__name__}: {error}")
    return found, skipped
