"""Tiny transformers models with random weights: 29 architectures, eager and sdpa attention where they differ.

Sizes are chosen so that none can be mistaken for another: 4 heads of 12, 2 key/value heads, width 48, batches of 1, 3
and 5, lengths of 1, 7, 11 and 13, sliding windows of 9 (longer than the example, shorter than the variants).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import installed
from .case import Call, Case, floats, seeded, tokens

EAGER = ("eager",)
BOTH = ("eager", "sdpa")

Variants = Callable[[Any, bool], dict[str, Call]]

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **_SPECIAL,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_ENCODER = {**_DECODER, "max_position_embeddings": 40}
_TOWER = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
_SEQ2SEQ = {
    "vocab_size": 99,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 72,
    **_SPECIAL,
    "decoder_start_token_id": 2,
}


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """One family: class names (imported when built), its config, the attentions it has, and what to feed it."""

    name: str
    config: str
    model: str
    settings: Mapping[str, Any]
    attentions: tuple[str, ...] = BOTH
    example: Callable[[], Call]
    variants: Variants
    without_grad: frozenset[str] = frozenset()
    notes: str = ""
    prepare: Callable[[Any], object] = field(default=lambda model: None)
    training: bool = False

    def cases(self) -> list[Case]:
        return [self._case(attention) for attention in self.attentions]

    def _case(self, attention: str) -> Case:
        is_eager = attention == "eager"
        return Case(
            name=f"{self.name}-{attention}" if attention else self.name,
            build=lambda: self._build(attention),
            example=self.example,
            variants=lambda model: self.variants(model, is_eager),
            training=self.training,
            without_grad=self.without_grad,
            notes=self.notes,
        )

    def _build(self, attention: str) -> nn.Module:
        import transformers

        model_class = getattr(transformers, self.model)
        if attention == "sdpa" and not model_class._supports_sdpa:  # T5, before transformers 5
            attention = "eager"
        settings = {**self.settings, "attn_implementation": attention} if attention else self.settings
        config = getattr(transformers, self.config)(**settings)
        model = seeded(lambda: model_class(config), training=self.training)
        self.prepare(model)
        return model


def _enable_checkpointing(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:  # transformers 4
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _prefill(model: nn.Module, **inputs: Any) -> Any:
    """The cache that a run on these inputs fills."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = model(**inputs, use_cache=True)
    return output.cache_params if hasattr(output, "cache_params") else output.past_key_values


def with_cache(model: nn.Module, cache: Any, before: str = "past_key_values") -> dict[str, Any]:
    """The cache as an input of the model, whose name was `before` until transformers named it `cache`."""
    parameters = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in parameters else before: cache}


def _left_padding(*paddings: int, total: int) -> Tensor:
    return (torch.arange(total) >= torch.tensor(paddings)[:, None]).long()


def _right_padding(*paddings: int, total: int) -> Tensor:
    return _left_padding(*paddings, total=total).flip(1)


def _labels(*shape: int) -> Tensor:
    labels = tokens(*shape, seed=5)
    labels[:, : shape[1] // 3] = -100
    return labels


def _example() -> Call:
    return Call.of(input_ids=tokens(3, 7))


def _common_variants(is_eager: bool, make: Callable[[], Call]) -> dict[str, Call]:
    """Flags that change what comes back."""

    def with_flags(**flags: bool) -> Call:
        call = make()
        return Call(call.args, {**call.kwargs, **flags})

    variants = {
        "hidden_states": with_flags(output_hidden_states=True),
        "tuple": with_flags(return_dict=False),
    }
    if is_eager:
        variants["attentions"] = with_flags(output_attentions=True)
        variants["everything"] = with_flags(output_attentions=True, output_hidden_states=True, return_dict=False)
    return variants


def _causal_variants(model: Any, is_eager: bool, *, has_static_cache: bool = True) -> dict[str, Call]:
    from transformers import DynamicCache

    padded_past = _prefill(model, input_ids=tokens(3, 7, seed=1), attention_mask=_left_padding(0, 2, 4, total=7))
    variants = {
        "other_size": Call.of(input_ids=tokens(5, 11)),
        "one_token": Call.of(input_ids=tokens(1, 1)),
        "positional": Call.of(tokens(3, 13, seed=2)),
        "left_padding": Call.of(input_ids=tokens(3, 11), attention_mask=_left_padding(0, 2, 4, total=11)),
        "labels": Call.of(input_ids=tokens(3, 11), labels=_labels(3, 11)),
        "embeds": Call.of(inputs_embeds=floats(3, 11, 48)),
        "no_cache": Call.of(input_ids=tokens(3, 7), use_cache=False),
        "cache_empty": Call.of(
            input_ids=tokens(3, 11), **with_cache(model, DynamicCache(config=model.config)), use_cache=True
        ),
        "cache_step": Call.of(
            input_ids=tokens(3, 1), **with_cache(model, _prefill(model, input_ids=tokens(3, 7, seed=1))), use_cache=True
        ),
        "cache_step_far": Call.of(
            input_ids=tokens(5, 1),
            **with_cache(model, _prefill(model, input_ids=tokens(5, 13, seed=1))),
            use_cache=True,
        ),
        "cache_chunk_padded": Call.of(
            input_ids=tokens(3, 4),
            attention_mask=_left_padding(0, 2, 4, total=11),
            **with_cache(model, padded_past),
            use_cache=True,
        ),
        "last_logits": Call.of(input_ids=tokens(3, 11), logits_to_keep=1),
        **_common_variants(is_eager, lambda: Call.of(input_ids=tokens(5, 11))),
    }
    if has_static_cache:
        variants["cache_static"] = _static_cache_step(model)
    return variants


_IS_TRANSFORMERS_4 = installed.TRANSFORMERS < (5, 0)


def _static_cache_step(model: Any) -> Call:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=24)
    past = _prefill(model, input_ids=tokens(3, 7, seed=1), **with_cache(model, cache))
    return Call.of(input_ids=tokens(3, 1), **with_cache(model, past), use_cache=True)


def _dynamic_cache_only(model: Any, is_eager: bool) -> dict[str, Call]:
    return _causal_variants(model, is_eager, has_static_cache=False)


def _deepseek_variants(model: Any, is_eager: bool) -> dict[str, Call]:
    """Transformers 4 does not bring its values, narrower than its keys, together with static caches."""
    return _causal_variants(model, is_eager, has_static_cache=not _IS_TRANSFORMERS_4)


def _bloom_variants(model: Any, is_eager: bool) -> dict[str, Call]:
    """Older transformers give it no static caches, and transformers 4 does not let it cut its logits."""
    variants = _causal_variants(model, is_eager, has_static_cache=installed.TRANSFORMERS > (5, 0))
    return {name: call for name, call in variants.items() if not _IS_TRANSFORMERS_4 or name != "last_logits"}


def _training_variants(_: Any, is_eager: bool) -> dict[str, Call]:
    return {
        "other_size": Call.of(input_ids=tokens(5, 11)),
        "labels": Call.of(input_ids=tokens(3, 11), labels=_labels(3, 11)),
        **_common_variants(is_eager, _example),
    }


def _masked_variants(model: Any, is_eager: bool) -> dict[str, Call]:
    variants = {
        "other_size": Call.of(input_ids=tokens(5, 11)),
        "right_padding": Call.of(input_ids=tokens(3, 11), attention_mask=_right_padding(0, 2, 4, total=11)),
        "left_padding": Call.of(input_ids=tokens(3, 11), attention_mask=_left_padding(0, 2, 4, total=11)),
        "labels": Call.of(input_ids=tokens(3, 11), labels=_labels(3, 11)),
        "embeds": Call.of(inputs_embeds=floats(3, 11, 48)),
        **_common_variants(is_eager, lambda: Call.of(input_ids=tokens(5, 11))),
    }
    if getattr(model.config, "type_vocab_size", 0) > 1:
        variants["token_types"] = Call.of(input_ids=tokens(3, 11), token_type_ids=_right_padding(3, 5, 8, total=11))
    return variants


def _seq2seq_example() -> Call:
    return Call.of(input_ids=tokens(3, 11), decoder_input_ids=tokens(3, 7, seed=1))


def _seq2seq_variants(model: Any, is_eager: bool) -> dict[str, Call]:
    mask = _right_padding(0, 2, 4, total=11)
    return {
        "other_size": Call.of(input_ids=tokens(5, 7), decoder_input_ids=tokens(5, 13)),
        "padding": Call.of(input_ids=tokens(3, 11), attention_mask=mask, decoder_input_ids=tokens(3, 7)),
        "labels": Call.of(input_ids=tokens(3, 11), attention_mask=mask, labels=_labels(3, 7)),
        "no_cache": Call.of(input_ids=tokens(3, 11), decoder_input_ids=tokens(3, 7), use_cache=False),
        "embeds": Call.of(inputs_embeds=floats(3, 11, 48), decoder_inputs_embeds=floats(3, 7, 48, seed=1)),
        "cache_step": Call.of(
            encoder_outputs=_encoder_outputs(model, input_ids=tokens(3, 11)),
            decoder_input_ids=tokens(3, 1),
            **with_cache(model, _prefill(model, input_ids=tokens(3, 11), decoder_input_ids=tokens(3, 7, seed=1))),
            use_cache=True,
        ),
        **_common_variants(is_eager, _seq2seq_example),
    }


def _encoder_outputs(model: Any, **inputs: Tensor) -> Any:
    with torch.no_grad():
        return model.get_encoder()(**inputs)


def _whisper_example() -> Call:
    return Call.of(input_features=floats(3, 10, 30), decoder_input_ids=tokens(3, 7))


def _whisper_variants(model: Any, is_eager: bool) -> dict[str, Call]:
    past = _prefill(model, input_features=floats(3, 10, 30), decoder_input_ids=tokens(3, 7, seed=1))
    return {
        "other_size": Call.of(input_features=floats(5, 10, 30), decoder_input_ids=tokens(5, 11)),
        "labels": Call.of(input_features=floats(3, 10, 30), labels=_labels(3, 7)),
        "no_cache": Call.of(input_features=floats(3, 10, 30), decoder_input_ids=tokens(3, 11), use_cache=False),
        "cache_step": Call.of(
            encoder_outputs=_encoder_outputs(model, input_features=floats(3, 10, 30)),
            decoder_input_ids=tokens(3, 1),
            **with_cache(model, past),
            use_cache=True,
        ),
        **_common_variants(is_eager, _whisper_example),
    }


def _mamba_variants(model: Any, _: bool) -> dict[str, Call]:
    return {
        "other_size": Call.of(input_ids=tokens(5, 11)),
        "one_token": Call.of(input_ids=tokens(1, 1)),
        "left_padding": Call.of(input_ids=tokens(3, 11), attention_mask=_left_padding(0, 2, 4, total=11)),
        "labels": Call.of(input_ids=tokens(3, 11), labels=_labels(3, 11)),
        "embeds": Call.of(inputs_embeds=floats(3, 11, 48)),
        "no_cache": Call.of(input_ids=tokens(3, 7), use_cache=False),
        "last_logits": Call.of(input_ids=tokens(3, 11), logits_to_keep=1),
        **_common_variants(False, lambda: Call.of(input_ids=tokens(5, 11))),
        **_mamba_cache_variants(model),
    }


def _mamba_cache_variants(model: Any) -> dict[str, Call]:
    """None in older transformers: these caches want to be told positions there, and were of another class."""
    from transformers import DynamicCache

    if "cache_position" in inspect.signature(model.forward).parameters:
        return {}
    empty = with_cache(model, DynamicCache(config=model.config), "cache_params")
    filled = with_cache(model, _prefill(model, input_ids=tokens(3, 7, seed=1)), "cache_params")
    return {
        "cache_empty": Call.of(input_ids=tokens(3, 11), **empty, use_cache=True),
        "cache_step": Call.of(input_ids=tokens(3, 1), **filled, use_cache=True),
    }


def _vit_example() -> Call:
    return Call.of(pixel_values=floats(3, 3, 16, 16))


def _vit_variants(_: Any, is_eager: bool) -> dict[str, Call]:
    return {
        "other_batch": Call.of(pixel_values=floats(5, 3, 16, 16)),
        "other_size": Call.of(pixel_values=floats(2, 3, 24, 20), interpolate_pos_encoding=True),
        "labels": Call.of(pixel_values=floats(3, 3, 16, 16), labels=torch.tensor([1, 0, 4])),
        **_common_variants(is_eager, _vit_example),
    }


def _clip_example() -> Call:
    return Call.of(input_ids=_clip_tokens(3, 7), pixel_values=floats(5, 3, 12, 12))


def _clip_tokens(batch: int, length: int) -> Tensor:
    ids = tokens(batch, length)
    ids[:, -2:] = 2
    return ids


def _clip_variants(_: Any, is_eager: bool) -> dict[str, Call]:
    return {
        "other_size": Call.of(input_ids=_clip_tokens(5, 11), pixel_values=floats(2, 3, 12, 12)),
        "padding": Call.of(
            input_ids=_clip_tokens(3, 11),
            pixel_values=floats(5, 3, 12, 12),
            attention_mask=_right_padding(0, 1, 1, total=11),
        ),
        "loss": Call.of(input_ids=_clip_tokens(3, 7), pixel_values=floats(3, 3, 12, 12), return_loss=True),
        "interpolated": Call.of(
            input_ids=_clip_tokens(3, 7), pixel_values=floats(3, 3, 16, 20), interpolate_pos_encoding=True
        ),
        **_common_variants(is_eager, _clip_example),
    }


def _causal(name: str, prefix: str, settings: Mapping[str, Any], **others: Any) -> _Architecture:
    defaults: dict[str, Any] = {
        "config": f"{prefix}Config",
        "model": f"{prefix}ForCausalLM",
        "example": _example,
        "variants": _causal_variants,
    }
    return _Architecture(name=name, settings=settings, **{**defaults, **others})


def _masked(name: str, prefix: str, settings: Mapping[str, Any], **others: Any) -> _Architecture:
    return _Architecture(
        name=name,
        config=f"{prefix}Config",
        model=f"{prefix}ForMaskedLM",
        settings=settings,
        example=_example,
        variants=_masked_variants,
        **others,
    )


_GPT2 = {
    "vocab_size": 99,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_ARCHITECTURES = [
    _causal("gpt2", "GPT2", _GPT2, model="GPT2LMHeadModel"),
    _causal(
        "gpt2-train",
        "GPT2",
        _GPT2,
        model="GPT2LMHeadModel",
        variants=_training_variants,
        attentions=EAGER,
        training=True,
        notes="Dropout in train mode.",
    ),
    _causal("llama", "Llama", _GROUPED),
    _causal(
        "llama-bfloat16",
        "Llama",
        _GROUPED,
        attentions=("sdpa",),
        prepare=lambda model: model.to(torch.bfloat16),
        notes="Weights in bfloat16, norms and rotary tables computed in float32; embeds arrive as float32.",
        variants=lambda model, is_eager: {
            name: call for name, call in _causal_variants(model, is_eager).items() if name != "embeds"
        },
    ),
    _causal(
        "llama-checkpointing",
        "Llama",
        _GROUPED,
        variants=_training_variants,
        attentions=("sdpa",),
        training=True,
        # With gradients there is no cache: without them, there is one by default since transformers 5.24.
        example=lambda: Call.of(input_ids=tokens(3, 7), use_cache=False),
        prepare=_enable_checkpointing,
        notes="Each layer's forward runs again during the backward pass.",
    ),
    _causal("mistral", "Mistral", {**_GROUPED, "sliding_window": 9}),
    _causal("mixtral", "Mixtral", {**_GROUPED, "sliding_window": 9, "num_local_experts": 6, "num_experts_per_tok": 2}),
    _causal(
        "mixtral-expert-loop",
        "Mixtral",
        {**_GROUPED, "num_local_experts": 6, "num_experts_per_tok": 2, "experts_implementation": "eager"},
        attentions=EAGER,
        notes="Loops over the experts that some token chose (the default multiplies groups of tokens at once).",
    ),
    _causal("qwen2", "Qwen2", {**_GROUPED, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    _causal(
        "qwen3",
        "Qwen3",
        {**_GROUPED, "head_dim": 20, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    _causal(
        "gemma2",
        "Gemma2",
        {**_GROUPED, "head_dim": 20, "query_pre_attn_scalar": 20, "sliding_window": 9},
        attentions=EAGER,
        notes="Soft caps on attention and logits; every other layer has a sliding window.",
    ),
    _causal(
        "gemma3",
        "Gemma3",
        {
            **_GROUPED,
            "head_dim": 20,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        config="Gemma3TextConfig",
    ),
    _causal("phi3", "Phi3", {**_GROUPED, "sliding_window": 9, "original_max_position_embeddings": 64}),
    _causal("gpt-neox", "GPTNeoX", _DECODER),
    _causal("gptj", "GPTJ", {**_GPT2, "rotary_dim": 8}, attentions=EAGER),
    _causal("opt", "OPT", {**_DECODER, "ffn_dim": 80, "word_embed_proj_dim": 48}),
    _causal(
        "bloom",
        "Bloom",
        {"vocab_size": 99, "hidden_size": 48, "n_layer": 2, "n_head": 4},
        attentions=EAGER,
        variants=_bloom_variants,
    ),
    _causal("falcon", "Falcon", {**_DECODER, "multi_query": True, "parallel_attn": True, "alibi": False}),
    _causal(
        "falcon-alibi",
        "Falcon",
        {**_DECODER, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": True},
        attentions=EAGER,
        variants=_dynamic_cache_only,
        notes="Cannot use a static cache: its mask is cut to the length of the cache, its biases are not.",
    ),
    _causal("olmo2", "Olmo2", _GROUPED),
    _masked("bert", "Bert", _ENCODER),
    _masked("roberta", "Roberta", _ENCODER),
    _masked(
        "distilbert",
        "DistilBert",
        {"vocab_size": 99, "dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 40},
    ),
    _masked(
        "deberta-v2",
        "DebertaV2",
        {
            **_ENCODER,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "conv_kernel_size": 3,
            "type_vocab_size": 2,
        },
        attentions=EAGER,
        notes="Relative positions go through functions compiled with torch.jit.script.",
    ),
    _Architecture(
        name="t5",
        config="T5Config",
        model="T5ForConditionalGeneration",
        settings={
            "vocab_size": 99,
            "d_model": 48,
            "d_kv": 12,
            "d_ff": 80,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "relative_attention_num_buckets": 8,
            "decoder_start_token_id": 0,
        },
        example=_seq2seq_example,
        variants=_seq2seq_variants,
    ),
    _Architecture(
        name="bart",
        config="BartConfig",
        model="BartForConditionalGeneration",
        settings={**_SEQ2SEQ, "max_position_embeddings": 40, "forced_eos_token_id": None},
        example=_seq2seq_example,
        variants=_seq2seq_variants,
    ),
    _Architecture(
        name="mamba",
        config="MambaConfig",
        model="MambaForCausalLM",
        settings={"vocab_size": 99, "hidden_size": 48, "state_size": 6, "num_hidden_layers": 2, "time_step_rank": 5},
        attentions=("",),
        example=_example,
        variants=_mamba_variants,
        without_grad=frozenset({"cache_step"}),
        notes=(
            "A loop over positions: another length calls the same operations another number of times. A step "
            "overwrites the states in its cache, which the backward pass would need."
        ),
    ),
    _Architecture(
        name="vit",
        config="ViTConfig",
        model="ViTForImageClassification",
        settings={**_TOWER, "image_size": 16, "patch_size": 4, "num_labels": 5},
        example=_vit_example,
        variants=_vit_variants,
    ),
    _Architecture(
        name="clip",
        config="CLIPConfig",
        model="CLIPModel",
        settings={
            "projection_dim": 20,
            "text_config": {**_TOWER, "vocab_size": 99, "max_position_embeddings": 24, **_SPECIAL},
            "vision_config": {**_TOWER, "image_size": 12, "patch_size": 4},
        },
        example=_clip_example,
        variants=_clip_variants,
        notes="Assigns into the outputs of its towers.",
    ),
    _causal(
        "deepseek-v3",
        "DeepseekV3",
        {
            **_DECODER,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 40,
            "n_routed_experts": 6,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 10,
            "v_head_dim": 14,
        },
        attentions=EAGER,
        variants=_deepseek_variants,
        notes="Fills views of uninitialised memory; keys and values differ in width; experts in groups.",
    ),
    _Architecture(
        name="pegasus",
        config="PegasusConfig",
        model="PegasusForConditionalGeneration",
        settings={**_SEQ2SEQ, "max_position_embeddings": 40, "forced_eos_token_id": None},
        attentions=EAGER,
        example=_seq2seq_example,
        variants=_seq2seq_variants,
        notes="Sinusoidal tables cut to the length.",
    ),
    _masked(
        "longformer",
        "Longformer",
        {**_ENCODER, "attention_window": 4, "type_vocab_size": 1},
        attentions=EAGER,
        notes="Pads to whole windows and loops over chunks.",
    ),
    _Architecture(
        name="swin",
        config="SwinConfig",
        model="SwinForImageClassification",
        settings={
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 12,
            "depths": [2, 1],
            "num_heads": [2, 4],
            "window_size": 3,
            "num_labels": 5,
        },
        attentions=EAGER,
        example=_vit_example,
        variants=_vit_variants,
        notes="Passes sizes on as plain numbers and returns them.",
    ),
    _Architecture(
        name="whisper",
        config="WhisperConfig",
        model="WhisperForConditionalGeneration",
        settings={**_SEQ2SEQ, "num_mel_bins": 10, "max_source_positions": 15, "max_target_positions": 24},
        example=_whisper_example,
        variants=_whisper_variants,
    ),
]

TRANSFORMERS: list[Case] = [case for architecture in _ARCHITECTURES for case in architecture.cases()]
