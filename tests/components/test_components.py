"""Components that are found in known models are the values that hooks on the modules of these models see."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from graphpatch_notebook import PatchableGraph, ProbePatch, UnknownPathError, ZeroPatch
from tests.components.sums import wrong_sums
from tests.hooks import registered
from tests.zoo import case_by_name
from tests.zoo.submodules import Submodules, copies

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 61, 48, 4, 2, 7


class PlainBlock(
    Submodules,
    first=partial(nn.LayerNorm, WIDTH),
    second=partial(nn.LayerNorm, WIDTH),
    asks=(WIDTH, WIDTH),
    answers=(WIDTH, WIDTH),
    tells=(WIDTH, WIDTH),
    mixes=(WIDTH, WIDTH),
    wide=(WIDTH, 2 * WIDTH),
    narrow=(2 * WIDTH, WIDTH),
):
    """A layer that says what it does with names of its own."""

    def forward(self, stream: Tensor) -> Tensor:
        batch, length, _ = stream.shape
        read = self.first(stream)
        a, b, c = (
            m(read).view(batch, length, HEADS, -1).transpose(1, 2) for m in (self.asks, self.answers, self.tells)
        )
        scores = a @ b.transpose(-1, -2) / 12**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -1e9)
        mixed = scores.softmax(-1) @ c
        stream = stream + self.mixes(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return stream + self.narrow(torch.relu(self.wide(self.second(stream))))


class Plain(
    Submodules,
    words=partial(nn.Embedding, VOCABULARY, WIDTH),
    places=partial(nn.Embedding, 32, WIDTH),
    steps=copies(PlainBlock, LAYERS),
    last=partial(nn.LayerNorm, WIDTH),
    guess=partial(nn.Linear, WIDTH, VOCABULARY, bias=False),
):
    """A transformer written down by hand."""

    def forward(self, input_ids: Tensor) -> Tensor:
        stream = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for step in self.steps:
            stream = step(stream)
        return self.guess(self.last(stream))


class NanoAttention(Submodules, c_attn=(WIDTH, 3 * WIDTH), c_proj=(WIDTH, WIDTH)):
    """Attention as nanoGPT has it."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, WIDTH))


class NanoBlock(
    Submodules,
    ln_1=partial(nn.LayerNorm, WIDTH),
    attn=NanoAttention,
    ln_2=partial(nn.LayerNorm, WIDTH),
    mlp=[(WIDTH, 4 * WIDTH), nn.GELU, (4 * WIDTH, WIDTH)],
):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Nano(nn.Module):
    """A language model as nanoGPT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(32, WIDTH),
                "h": nn.ModuleList(NanoBlock() for _ in range(LAYERS)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.transformer.wte(input_ids) + self.transformer.wpe(torch.arange(input_ids.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


@dataclasses.dataclass(frozen=True)
class Known:
    """A model, and where plain hooks see its components: module, `in`, `out`, or `heads` (an input by heads).

    Attributes:
        build: Makes the model.
        inputs: Its inputs, by name.
        layer: Its layers, with `{}` for the number.
        places: For components of a layer, and of the model, the module below the layer (or the model) and what of it.
        missing: Components that the model has not.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    layer: str
    places: dict[str, tuple[str, str]]
    stack: str = ""
    missing: tuple[str, ...] = ()


def token_ids() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))}


def pairs_of_ids() -> dict[str, Tensor]:
    return {**token_ids(), "decoder_input_ids": token_ids()["input_ids"][:, :5]}


def pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "head_dim": 12}


def of_transformers(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**settings))

    return build


_STREAM = {"resid_pre": ("", "in"), "resid_post": ("", "out")}
_LLAMA = {
    **_STREAM,
    "ln1": ("input_layernorm", "out"),
    "ln2": ("post_attention_layernorm", "out"),
    "attn_out": ("self_attn", "out"),
    "attn.q": ("self_attn.q_proj", "out heads"),
    "attn.k": ("self_attn.k_proj", "out heads"),
    "attn.v": ("self_attn.v_proj", "out heads"),
    "attn.z": ("self_attn.o_proj", "in heads"),
    "mlp_out": ("mlp", "out"),
    "@embed": ("model.embed_tokens", "out"),
    "@final_norm": ("model.norm", "out"),
    "@logits": ("lm_head", "out"),
}
_LLAMA_MLP = {"mlp.pre": ("mlp.gate_proj", "out"), "mlp.post": ("mlp.down_proj", "in")}
KNOWN = {
    "gpt2": Known(
        of_transformers(
            "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS
        ),
        token_ids,
        "transformer.h.{}",
        {
            **_STREAM,
            "ln1": ("ln_1", "out"),
            "ln2": ("ln_2", "out"),
            "attn_out": ("attn", "out"),
            "attn.z": ("attn.c_proj", "in heads"),
            "mlp_out": ("mlp", "out"),
            "mlp.pre": ("mlp.c_fc", "out"),
            "mlp.post": ("mlp.c_proj", "in"),
            "@embed": ("transformer.wte", "out"),
            "@pos_embed": ("transformer.wpe", "out"),
            "@final_norm": ("transformer.ln_f", "out"),
            "@logits": ("lm_head", "out"),
        },
        missing=("layers[0].attn.q_rot", "layers[0].router"),
    ),
    "llama": Known(
        of_transformers("LlamaForCausalLM", "LlamaConfig", **_GROUPED, attn_implementation="eager"),
        token_ids,
        "model.layers.{}",
        {**_LLAMA, **_LLAMA_MLP},
        missing=("@pos_embed",),
    ),
    "gemma2": Known(
        of_transformers("Gemma2ForCausalLM", "Gemma2Config", **_GROUPED, attn_implementation="eager"),
        token_ids,
        "model.layers.{}",
        {
            **{name: place for name, place in _LLAMA.items() if name != "@embed"},  # the module scales it
            **_LLAMA_MLP,
            "ln2": ("pre_feedforward_layernorm", "out"),
            "attn_out": ("post_attention_layernorm", "out"),
            "mlp_out": ("post_feedforward_layernorm", "out"),
            "@logits": ("", "out"),  # capped behind the head
        },
    ),
    "mixtral": Known(
        of_transformers("MixtralForCausalLM", "MixtralConfig", **_GROUPED, num_local_experts=4),
        token_ids,
        "model.layers.{}",
        {**_LLAMA, "router": ("mlp.gate", "out")},
        missing=("layers[0].mlp.post",),
    ),
    "bert": Known(
        of_transformers("BertForMaskedLM", "BertConfig", **_COMMON),
        token_ids,
        "bert.encoder.layer.{}",
        {
            **_STREAM,
            "ln1": ("attention.output.LayerNorm", "out"),
            "resid_mid": ("attention", "out"),
            "ln2": ("output.LayerNorm", "out"),
            "attn_out": ("attention.output.dense", "out"),
            "attn.q": ("attention.self.query", "out heads"),
            "attn.k": ("attention.self.key", "out heads"),
            "attn.v": ("attention.self.value", "out heads"),
            "attn.z": ("attention.output.dense", "in heads"),
            "mlp.pre": ("intermediate.dense", "out"),
            "mlp.post": ("output.dense", "in"),
            "mlp_out": ("output.dense", "out"),
            "@embed": ("bert.embeddings.word_embeddings", "out"),
            "@pos_embed": ("bert.embeddings.position_embeddings", "out"),
            "@logits": ("cls.predictions.decoder", "out"),
        },
        missing=("@final_norm",),
    ),
    "vit": Known(
        of_transformers(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=WIDTH,
            intermediate_size=80,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=16,
            patch_size=4,
        ),
        pictures,
        "vit.layers.{}",
        {
            **_STREAM,
            "ln1": ("layernorm_before", "out"),
            "ln2": ("layernorm_after", "out"),
            "@embed": ("vit.embeddings.patch_embeddings.projection", "out"),
            "@final_norm": ("vit.layernorm", "out"),
            "@logits": ("classifier", "out"),
        },
    ),
    "t5": Known(
        of_transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=12,
            d_ff=80,
            num_layers=LAYERS,
            num_heads=HEADS,
            decoder_start_token_id=0,
        ),
        pairs_of_ids,
        "decoder.block.{}",
        {
            **_STREAM,
            "ln1": ("layer.0.layer_norm", "out"),
            "ln_cross": ("layer.1.layer_norm", "out"),
            "ln2": ("layer.2.layer_norm", "out"),
            "attn.q": ("layer.0.SelfAttention.q", "out heads"),
            "attn_out": ("layer.0.SelfAttention.o", "out"),
            "cross_attn.q": ("layer.1.EncDecAttention.q", "out heads"),
            "cross_attn.k": ("layer.1.EncDecAttention.k", "out heads"),
            "cross_attn.v": ("layer.1.EncDecAttention.v", "out heads"),
            "cross_attn.z": ("layer.1.EncDecAttention.o", "in heads"),
            "cross_attn_out": ("layer.1.EncDecAttention.o", "out"),
            "mlp.post": ("layer.2.DenseReluDense.wo", "in"),
            "mlp_out": ("layer.2.DenseReluDense", "out"),
        },
        stack="decoder.",
    ),
    "mamba": Known(
        of_transformers(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            state_size=4,
        ),
        token_ids,
        "backbone.layers.{}",
        {**_STREAM, "ln1": ("norm", "out"), "mixer_out": ("mixer", "out"), "@logits": ("lm_head", "out")},
        missing=("layers[0].mlp_out",),
    ),
    "plain": Known(
        Plain,
        token_ids,
        "steps.{}",
        {
            **_STREAM,
            "ln1": ("first", "out"),
            "ln2": ("second", "out"),
            "attn.q": ("asks", "out heads"),
            "attn.k": ("answers", "out heads"),
            "attn.v": ("tells", "out heads"),
            "attn.z": ("mixes", "in heads"),
            "attn_out": ("mixes", "out"),
            "mlp.pre": ("wide", "out"),
            "mlp.post": ("narrow", "in"),
            "mlp_out": ("narrow", "out"),
            "@embed": ("words", "out"),
            "@pos_embed": ("places", "out"),
            "@final_norm": ("last", "out"),
            "@logits": ("guess", "out"),
        },
    ),
    "nano": Known(
        Nano,
        token_ids,
        "transformer.h.{}",
        {
            **_STREAM,
            "attn.z": ("attn.c_proj", "in heads"),
            "attn_out": ("attn", "out"),
            "mlp.pre": ("mlp.0", "out"),
            "mlp.post": ("mlp.2", "in"),
            "mlp_out": ("mlp", "out"),
            "@logits": ("lm_head", "out"),
        },
    ),
}


Case = tuple[Known, nn.Module, PatchableGraph]


@pytest.fixture(scope="module", params=list(KNOWN))
def case(request: pytest.FixtureRequest) -> Case:
    known = KNOWN[request.param]
    torch.manual_seed(0)
    model = known.build().eval()
    for parameter in model.parameters():  # biases of zero, and norms of one, would hide mistakes
        parameter.data += 0.1 * torch.randn_like(parameter)
    return known, model, PatchableGraph(model, **known.inputs())


def seen_by_hooks(known: Known, model: nn.Module) -> dict[str, Tensor]:
    """Returns what plain hooks on the model's modules see of each component."""
    found: dict[str, Tensor] = {}

    def watch(name: str, path: str, what: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            value = output if what.startswith("out") else args[0] if args else next(iter(kwargs.values()))
            value = value if isinstance(value, Tensor) else value["logits"] if "logits" in value else value[0]
            if what.endswith("heads"):
                value = value.view(*value.shape[:2], -1, WIDTH // HEADS)
            found[name] = value

        return model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)

    hooks = []
    for part, (path, what) in known.places.items():
        for number in range(LAYERS):
            inside = known.layer.format(number) + (f".{path}" if path else "")
            is_word = part.startswith("@")
            name = part if is_word else f"{known.stack}layers[{number}].{part}"
            hooks.append(watch(name, path if is_word else inside, what))
    with registered(hooks):
        model(**known.inputs())
    return found


@torch.no_grad()
def test_components_are_what_hooks_see(case: Case) -> None:
    known, model, pg = case
    expected = seen_by_hooks(known, model)
    probes = {name: ProbePatch() for name in expected}
    with pg.patch(probes):
        pg(**known.inputs())
    for name, value in expected.items():
        component = pg.components[name]
        seen = probes[name].activation
        assert seen.shape == component.shape, name
        assert len(component.axes) == seen.ndim, name
        torch.testing.assert_close(seen.reshape(value.shape), value, msg=name)


def test_the_stream_is_the_sum_of_what_layers_add(case: Case) -> None:
    known, _, pg = case
    assert wrong_sums(pg, **known.inputs()) == {}


def test_attention_has_scores_and_pattern_also_where_it_is_fused(case: Case) -> None:
    _, _, pg = case
    cores = [name.removesuffix(".z") for name in pg.components if name.endswith("attn.z")]
    for name in cores:
        assert pg.components[f"{name}.pattern"].axes == ("batch", "head", "query", "key")
        assert pg.components[f"{name}.scores"].shape == pg.components[f"{name}.pattern"].shape


def test_what_a_model_has_not_is_absent(case: Case) -> None:
    known, _, pg = case
    assert not set(known.missing) & set(pg.components)
    assert all(reason for reason in pg.components.missing.values())


def test_the_table_has_equal_components_of_several_layers_in_one_row(case: Case) -> None:
    _, _, pg = case
    components, shown = pg.components, dict[str, str]()
    for line in repr(components).splitlines()[1:]:
        name, path = re.split(r"\s{2,}", line)[:2]
        for each in components.lookup(name):
            assert each.name not in shown
            number = re.search(r"layers\[(\d+)", each.name)
            shown[each.name] = path.replace("*", number[1]) if number else path
    assert shown == {name: each.path for name, each in components.items()}
    assert len(repr(components).splitlines()) < len(components)


class Encoder(nn.Module):
    """Torch's encoder, which has the batch second unless it is asked not to."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=batch_first, norm_first=True)
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.guess = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.guess(self.encoder(self.words(ids)))


class SequenceFirstBlock(PlainBlock):
    """A layer that merges the batch and the heads, which are next to each other."""

    def forward(self, stream: Tensor) -> Tensor:
        length, batch, _ = stream.shape
        read = self.first(stream)
        a, b, c = (
            m(read).view(length, batch * HEADS, -1).transpose(0, 1) for m in (self.asks, self.answers, self.tells)
        )
        mixed = torch.bmm((torch.bmm(a, b.transpose(1, 2)) / 12**0.5).softmax(-1), c)
        stream = stream + self.mixes(mixed.transpose(0, 1).reshape(length, batch, WIDTH))
        return stream + self.narrow(torch.relu(self.wide(self.second(stream))))


class NanoSequenceFirst(
    Submodules,
    words=partial(nn.Embedding, VOCABULARY, WIDTH),
    steps=copies(SequenceFirstBlock, LAYERS),
    guess=(WIDTH, VOCABULARY),
):
    """A model of tokens with the batch first, and a stream with the positions first."""

    def forward(self, ids: Tensor) -> Tensor:
        stream = self.words(ids).transpose(0, 1)
        for step in self.steps:
            stream = step(stream)
        return self.guess(stream.transpose(0, 1))


@pytest.mark.parametrize(
    ("build", "shape", "outside"),
    [
        (lambda: Encoder(batch_first=True), (2, LENGTH), ("batch", "position")),
        (lambda: Encoder(batch_first=False), (LENGTH, 2), ("position", "batch")),
        (NanoSequenceFirst, (2, LENGTH), ("batch", "position")),
    ],
)
def test_axes_say_whether_positions_come_first(
    build: Callable[[], nn.Module], shape: tuple[int, int], outside: tuple[str, str]
) -> None:
    """Also where the sizes do not show it: batches of as many rows as there are positions."""
    torch.manual_seed(0)
    for ids in (torch.randint(0, VOCABULARY, shape), torch.randint(0, VOCABULARY, (LENGTH, LENGTH))):
        pg = PatchableGraph(build().eval(), ids)
        components = pg.components
        assert wrong_sums(pg, ids) == {}
        assert components["@embed"].path_axes[:2] == components["@logits"].path_axes[:2] == outside
        for part in ("resid_pre", "ln1", "attn_out", "resid_mid", "mlp.pre", "mlp.post", "mlp_out", "resid_post"):
            assert components[f"layers[1].{part}"].axes[:2] == ("batch", "position"), part
            axes = components[f"layers[1].{part}"].path_axes
            assert axes[:2] == (("position", "batch") if build is NanoSequenceFirst else outside), part


class DeepBlock(PlainBlock):
    """An MLP that reads a mean of the states before the layers so far, weighted by attention at each position."""

    def forward(self, stream: Tensor, earlier: Tensor) -> Tensor:
        states = torch.cat([earlier, stream[:, :, None]], 2)
        query = self.second.weight.expand(*stream.shape[:2], 1, WIDTH)
        read = F.scaled_dot_product_attention(query, states, states).squeeze(2)
        return stream + self.narrow(torch.relu(self.wide(self.first(read))))


class Deep(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(DeepBlock() for _ in range(LAYERS))

    def forward(self, input_ids: Tensor) -> Tensor:
        stream = self.words(input_ids)
        earlier = stream[:, :, None]
        for step in self.steps:
            earlier, stream = torch.cat([earlier, stream[:, :, None]], 2), step(stream, earlier)
        return self.guess(self.last(stream))


def test_attention_to_earlier_layers_is_not_attention_to_positions() -> None:
    torch.manual_seed(0)
    pg = PatchableGraph(Deep().eval(), **token_ids())
    components = pg.components
    assert "layers[1].mlp_out" in components
    assert not any("attn" in name for name in components)
    assert wrong_sums(pg, **token_ids()) == {}


class BiasedBlock(PlainBlock):
    """A layer that adds a bias in the shape of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, stream: Tensor) -> Tensor:
        stream = super().forward(stream)
        return stream + self.bias.expand_as(stream)


class Biased(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(BiasedBlock() for _ in range(LAYERS))


@pytest.mark.parametrize("length", [1, 5])
def test_kinds_of_tokens_are_not_positions(length: int) -> None:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    pg = PatchableGraph(BertModel(config).eval(), torch.randint(VOCABULARY, (2, length)))
    assert pg.components["@pos_embed"].path == "embeddings.position_embeddings.output"
    assert pg.weights.W_pos.shape == (512, 16)


def test_a_bias_in_the_shape_of_the_stream_is_not_a_component() -> None:
    torch.manual_seed(0)
    model = Biased().eval()
    components = PatchableGraph(model, **token_ids()).components
    assert components["layers[1].mlp_out"].path == "steps_1.narrow.output"
    assert not any("mlp2" in name for name in components)


def test_a_sum_that_does_not_hold_is_noticed() -> None:
    torch.manual_seed(0)
    pg = PatchableGraph(Plain().eval(), **token_ids())
    own = pg.components.evidence.stacks[0].layers[1].steps
    last = next(number for number, step in reversed([*enumerate(own)]) if step.kind == "add")
    own[last] = dataclasses.replace(own[last], other=own[last].source)
    assert [*wrong_sums(pg, **token_ids())] == ["layers[1]."]


class Experts(nn.Module):
    """Experts in a list or a dict, which are called one by one; there may be other modules in it."""

    def __init__(self, keys: list[str] | None) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        experts = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)]
        self.experts: Any = nn.ModuleList(experts)
        if keys is not None:
            self.experts = nn.ModuleDict({"dropout": nn.Dropout(0.0), **dict(zip(keys, experts, strict=True))})
        self.keys = keys

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for number in range(3):
            rows, column = torch.where(chosen == number)
            expert = self.experts[number if self.keys is None else self.keys[number]]
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, column, None])
        return x + out.view_as(x)


@pytest.mark.parametrize("keys", [None, ["expert_0", "expert_1", "expert_2"], ["math", "law", "art"]])
def test_experts_are_found_in_lists_and_in_dicts(keys: list[str] | None) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Experts(keys), Experts(keys)).eval(), torch.randn(2, 9, 8)
    pg = PatchableGraph(model, x)
    assert [name for name in pg.components if "experts" in name] == [
        f"layers[{layer}].experts[{number}].out" for layer in range(2) for number in range(3)
    ]
    for number in range(3):
        key = str(number) if keys is None else keys[number]
        kept: list[Tensor] = []
        with model.get_submodule(f"1.experts.{key}").register_forward_hook(
            lambda _, __, out, kept=kept: kept.append(out)
        ):
            model(x)
        probe = ProbePatch()
        with pg.patch({f"layers[1].experts[{number}].out": probe}):
            pg(x)
        assert probe.activation is not None
        assert torch.equal(probe.activation, kept[0])


class Marked(Tensor):
    """A tensor of another kind, as `DTensor` is one."""


class FusedAttention(Submodules, given=(8, 24), out=(8, 8)):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.given(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_attention_of_other_kinds_of_tensors_is_not_opened_for_that_reason() -> None:
    pg = PatchableGraph(nn.Sequential(FusedAttention(), FusedAttention()), torch.randn(2, 5, 8).as_subclass(Marked))
    assert "layers[0].attn.z" in pg.components
    why = pg.components.why_missing("layers[0].attn.pattern")
    assert "plain tensors" in why


class Sent(Submodules, gate=(8, 4), experts=copies([(8, 6), nn.GELU, (6, 8)], 4)):
    """A mixture whose router always chooses expert 1 or 3, and whose experts have lists of their own."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = (self.gate(tokens) + torch.tensor([-99.0, 0.0, -99.0, 0.0])).softmax(-1).topk(1, -1)
        added = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            if len(rows := (chosen == number).any(-1).nonzero().flatten()):
                added.index_add_(0, rows, expert(tokens[rows]) * weight[rows])
        return x + added.view_as(x)


def test_experts_that_did_not_run_are_absent_and_the_others_keep_their_numbers() -> None:
    torch.manual_seed(0)
    pg = PatchableGraph(nn.Sequential(Sent(), Sent()), torch.randn(2, 8, 8))
    found = pg.components.lookup("layers[1].experts[*].out")
    assert [(one.name, one.path) for one in found] == [
        (f"layers[1].experts[{number}].out", f"sub_1.experts_{number}.output") for number in (1, 3)
    ]
    assert pg.components.lookup("layers[1].experts[-1].out") == found[1:]
    for text in ("layers[1].experts[2].out", "layers[1].experts[0:1].out", "layers[1].experts[1, 2].out"):
        with pytest.raises(UnknownPathError, match="no token of the example inputs was sent to it"):
            pg.components.lookup(text)


def test_what_a_model_does_not_have_is_answered_with_the_reason() -> None:
    pg = PatchableGraph(nn.Sequential(FusedAttention(), FusedAttention()), torch.randn(2, 5, 8))
    for name, why in (
        ("layers[1].attn.heads[1].q_rot", "nothing rotates it"),
        ("@final_norm", "no norm reads"),
    ):
        with pytest.raises(UnknownPathError, match=why):
            pg.patch({name: ZeroPatch()}).__enter__()
    with pytest.raises(KeyError, match="unknown component 'layers.0..mixer_out'"):
        pg.components["layers[0].mixer_out"]
    assert "layers[0].mixer_out" not in pg.components


@torch.library.custom_op("graphpatch_tests::scan", mutates_args=())
def scan(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a * b).cumsum(-2) * c


@torch.library.custom_op("graphpatch_tests::rolled", mutates_args=())
def rolled(a: Tensor) -> Tensor:
    return a.roll(1, -2)


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Kernel(nn.Module):
    """Mixes positions by a kernel that cannot be opened."""

    def __init__(self, kernel: Callable[..., Tensor]) -> None:
        super().__init__()
        self.given, self.out, self.kernel = nn.Linear(8, 24), nn.Linear(8, 8), kernel

    def forward(self, x: Tensor) -> Tensor:
        parts = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.given(x).chunk(3, -1))
        return x + self.out(self.kernel(*parts).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        (lambda *given: FlashAttnFunc.apply(*given), "attn"),
        (lambda *given: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given)[0], "attn"),
        (scan, "mixer"),
    ],
    ids=["function", "operator", "scan"],
)
def test_kernels_that_cannot_be_opened_are_not_mlps(kernel: Callable[..., Tensor], kind: str) -> None:
    with torch.no_grad():
        model = nn.Sequential(Kernel(kernel), Kernel(kernel))
        pg = PatchableGraph(model, x := torch.randn(2, 5, 8))
        assert [name for name in pg.components if name.startswith("layers[1].")] == [
            f"layers[1].{part}" for part in ("resid_pre", f"{kind}_out", "resid_post")
        ]
        assert wrong_sums(pg, x) == {}


def test_what_moves_values_between_positions_in_secret_is_a_mixer() -> None:
    with torch.no_grad():
        model = nn.Sequential(*(Kernel(lambda q, k, v: rolled(q)) for _ in range(2)))
        components = PatchableGraph(model, torch.randn(2, 5, 8)).components
    assert "layers[0].mixer_out" in components
    assert "layers[0].mlp_out" not in components


@pytest.mark.parametrize("name", ["whisper-eager", "whisper-sdpa"])
def test_keys_of_a_length_that_no_input_changes_are_keys(name: str) -> None:
    case = case_by_name(name)
    components = captured_case(case).components
    pattern = components["model.decoder.layers[0].cross_attn.pattern"]
    assert pattern.axes == ("batch", "head", "query", "key")
    assert components["model.decoder.layers[0].cross_attn.k"].path_axes == ("batch", "head", "key", "channel")


def test_what_memory_happened_to_hold_does_not_decide_on_dimensions() -> None:
    """Keys are written part by part into a tensor without numbers."""
    components = captured_case(case_by_name("deepseek-v3-eager")).components
    assert components["layers[0].resid_pre"].axes == components["layers[1].mlp_out"].axes
    assert components["layers[0].resid_pre"].axes == ("batch", "position", "channel")


def test_windows_of_all_rows_are_not_positions() -> None:
    pg = captured_case(case_by_name("swin-eager"))
    start = "swin.encoder.layers_1.layers[0]"
    assert pg.components[f"{start}.attn.z"].axes == ("window", "position", "head", "channel")
    assert pg.components[f"{start}.attn.z"].path_axes == ("window", "head", "query", "channel")
    assert pg.components[f"{start}.attn_out"].axes == ("batch", "position", "channel")
    assert pg.weights["swin.encoder.layers_1"].W_Q[0].shape == (4, 24, 6)


def test_keys_that_are_written_into_views_of_new_memory_are_read_by_attention() -> None:
    components = captured_case(case_by_name("deepseek-v3-eager")).components
    axes = {
        part: components[f"layers[1].attn.{part}"].path_axes for part in ("q", "q_rot", "v", "scores", "pattern", "z")
    }
    assert axes.pop("v") == ("batch", "head", "key", "channel")
    assert axes.pop("scores") == axes.pop("pattern") == ("batch", "head", "query", "key")
    assert set(axes.values()) == {("batch", "head", "query", "channel")}
    assert "part by part" in str(components.why_missing("layers[1].attn.k"))


def captured_case(case: Any) -> PatchableGraph:
    call = case.example()
    return PatchableGraph(case.build(), *call.args, **call.kwargs)


def test_what_was_found_is_freed_with_its_graph() -> None:
    pg = PatchableGraph(Plain().eval(), **token_ids())
    flow = weakref.ref(pg.components.evidence.trails.flow)
    del pg
    gc.collect()
    assert flow() is None


def test_attention_whose_heads_are_experts_is_attention() -> None:
    from transformers import JetMoeConfig, JetMoeForCausalLM

    config = JetMoeConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8, intermediate_size=16,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = JetMoeForCausalLM(config).eval(), torch.arange(1, 11).reshape(2, 5)
    pg = PatchableGraph(model, ids, use_cache=False)
    kept: list[torch.Tensor] = []
    block = model.model.layers[0].self_attention
    with block.register_forward_hook(lambda _, args, output: kept.append(output[0])), torch.no_grad():
        model(ids, use_cache=False)
    found = pg.record("layers[0].attn_out", ids, use_cache=False)["layers[0].attn_out"]
    assert torch.equal(found, kept[0])
    assert pg.components["layers[0].mlp_out"].path.startswith("model.layers_0.mlp")
