"""Components that are found in known models are the values that hooks on the modules of these models see."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref
from collections.abc import Callable
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


@pytest.mark.parametrize("length", [1, 5])
def test_kinds_of_tokens_are_not_positions(length: int) -> None:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    pg = PatchableGraph(BertModel(config).eval(), torch.randint(VOCABULARY, (2, length)))
    assert pg.components["@pos_embed"].path == "embeddings.position_embeddings.output"
    assert pg.weights.W_pos.shape == (512, 16)


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
        with pytest.raises(UnknownPathError, match="experts"):
            pg.components.lookup(text)


def test_what_a_model_does_not_have_is_answered_with_the_reason() -> None:
    pg = PatchableGraph(nn.Sequential(FusedAttention(), FusedAttention()), torch.randn(2, 5, 8))
    for name in ("layers[1].attn.heads[1].q_rot", "@final_norm"):
        with pytest.raises(UnknownPathError, match=re.escape(name)):
            pg.patch({name: ZeroPatch()}).__enter__()
    with pytest.raises(KeyError, match="mixer_out"):
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


def test_keys_of_a_length_that_no_input_changes_are_keys() -> None:
    components = captured_case("whisper-sdpa").components
    pattern = components["model.decoder.layers[0].cross_attn.pattern"]
    assert pattern.axes == ("batch", "head", "query", "key")
    assert components["model.decoder.layers[0].cross_attn.k"].path_axes == ("batch", "head", "key", "channel")


def test_keys_that_are_written_into_views_of_new_memory_are_read_by_attention() -> None:
    """What that memory happened to hold does not decide on dimensions."""
    components = captured_case("deepseek-v3-eager").components
    assert (
        components["layers[0].resid_pre"].axes
        == components["layers[1].mlp_out"].axes
        == ("batch", "position", "channel")
    )
    axes = {
        part: components[f"layers[1].attn.{part}"].path_axes for part in ("q", "q_rot", "v", "scores", "pattern", "z")
    }
    assert axes.pop("v") == ("batch", "head", "key", "channel")
    assert axes.pop("scores") == axes.pop("pattern") == ("batch", "head", "query", "key")
    assert set(axes.values()) == {("batch", "head", "query", "channel")}
    assert "part by part" in str(components.why_missing("layers[1].attn.k"))


def captured_case(name: str) -> PatchableGraph:
    case = case_by_name(name)
    call = case.example()
    return PatchableGraph(case.build(), *call.args, **call.kwargs)


def test_what_was_found_is_freed_with_its_graph() -> None:
    pg = PatchableGraph(nn.Sequential(FusedAttention(), FusedAttention()), torch.randn(2, 5, 8))
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
