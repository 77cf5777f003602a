"""Configs made small by the names of their fields: few layers, narrow, short, nested configs likewise.

Sizes are powers of two, because models cut them in halves and quarters: width 64, 4 heads of 16, 2 key/value heads.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Rule: TypeAlias = Callable[[int], int]
MOST_LAYERS = 8


def _at_most(size: int) -> Rule:
    return lambda default: min(default, size)


# The first pattern that matches the whole name of a field decides.
_RULES: list[tuple[str, Rule]] = [
    (r".*vocab_size|.*vocab_size_per_layer_input|char_vocab_size|hash_byte_group_vocab", _at_most(128)),
    (r".*type_vocab_size", _at_most(2)),
    (r"mamba_(n|num)_heads|mamba_num_heads", _at_most(8)),
    (r"mamba_head_dim|mamba_d_head", _at_most(16)),
    (r"mamba_d_ssm", _at_most(128)),
    (r".*(ssm_state_size|mamba_d_state|state_size)", _at_most(8)),
    (r"linear_num_(key|value)_heads", lambda default: 2 if default <= 16 else 4),
    (r".*(qk_rope_head_dim)", _at_most(8)),
    (r".*rotary_dim", _at_most(8)),
    (r"index_n_heads", _at_most(4)),
    (r"index_topk", _at_most(4)),
    (r".*(key_value_heads|kv_heads|kv_n_heads)", _at_most(2)),
    (r"pruned_heads|guided_attention_loss_num_heads", lambda default: default),
    (r".*(attention_heads|num_heads|n_heads?|attn_heads)", _at_most(4)),
    (r".*(head_dim|d_kv|kv_channels|attention_head_size|d_head|dim_head|query_pre_attn_scalar)", _at_most(16)),
    (r".*lora_rank|.*_lowrank", _at_most(16)),
    (r".*(experts_per_tok|moe_topk|moe_k|num_experts_per_token|moe_top_k)", _at_most(2)),
    (r".*(num_experts|routed_experts|local_experts|moe_num_experts|expert_num)", _at_most(4)),
    (r"n_group", _at_most(2)),
    (r"topk_group", _at_most(1)),
    (r"expert_capacity", _at_most(8)),
    (r".*(num_mel_bins|feature_size|input_feat_per_channel|input_feat_size)", _at_most(16)),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|dff|dim_ff|d_inner|mlp_dim|ffn_hidden_dim)", _at_most(96)),
    (
        r"(feed_forward|dense|expert_ffn|centroid|shared_expert).*_(size|hidden_size)|intermediate_size_mlp",
        _at_most(96),
    ),
    (r".*image_size|crop_size", _at_most(64)),
    (r".*patch_size", _at_most(16)),
    (r".*(num_conv_pos_embeddings)", _at_most(8)),
    (r".*(num_conv_pos_embedding_groups)", _at_most(4)),
    (r"codevector_dim|proj_codevector_dim|num_codevectors_per_group", _at_most(16)),
    (r"max_source_positions|max_speech_positions", _at_most(32)),
    (
        r".*(position_embeddings|n_positions|n_ctx|max_seq_len|context_length|target_positions|text_positions)",
        _at_most(128),
    ),
    (r"sliding_window|attention_window|attention_window_size|keep_window_size|mamba_chunk_size", _at_most(8)),
    (r"sliding_window_size|local_attention", _at_most(8)),
    (r".*(position_bias_num_buckets|relative_attention_num_buckets)", _at_most(8)),
    (r"num_adapter_layers|num_mtp_layers|num_nextn_predict_layers|num_fov_head_layers", lambda default: default),
    (r".*(_layers|n_layer|num_layers|num_blocks|depth)", _at_most(2)),
    (r".*num_queries|num_latents|num_detection_tokens", _at_most(8)),
    (
        r".*(hidden_size|d_model|n_embd|emb_dim|embedding_size|dim|hidden_dim|embed_dim|input_size|output_size|d_latents)",
        _at_most(64),
    ),
    (r".*(hidden_size_per_layer_input|downsample_hidden_size|hidden_size_global)", _at_most(64)),
    (r".*(_channels|lru_width|output_proj_dims|conv_dim|projection_dim|classifier_proj_size)", _at_most(64)),
]
_PATTERNS = [(re.compile(pattern), rule) for pattern, rule in _RULES]
_TOKEN_ID = re.compile(r".*(_token_id|_token_index|_index|_token_ids|begin_suppress_tokens)")
_LAYER_TYPES = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types", "attention_types")


def small_config(config_class: Any, overrides: Mapping[str, Any] | None = None) -> Any:
    """Returns a small config of that class.

    Args:
        config_class: A config class of transformers.
        overrides: Settings that are not to be found by name; for a nested config, a mapping of its own.
    """
    overrides = dict(overrides or {})
    settings = _shrunk_fields(config_class)
    for name, nested_class, given in _nested(config_class):
        inner = overrides.pop(name, {})
        if inner is not None:
            inner = small_config(nested_class, {**given, **inner})
        settings[name] = inner
    return config_class(**{**settings, **overrides})


def _nested(config_class: Any) -> list[tuple[str, Any, dict[str, Any]]]:
    found = []
    for name, spec in getattr(config_class, "sub_configs_defaults", {}).items():
        if spec.optional:
            continue
        is_plain = hasattr(spec.config_class, "model_type") and spec.config_class.model_type
        nested = spec.config_class if is_plain else spec.get_config_class(spec.model_type)
        found.append((name, nested, {}))
    return found


def _shrunk_fields(config_class: Any) -> dict[str, Any]:
    defaults = {field.name: _default(field) for field in dataclasses.fields(config_class)}
    layers = _layer_count(config_class)
    settings: dict[str, Any] = {}
    next_token = 100
    for name, default in defaults.items():
        if _TOKEN_ID.fullmatch(name):
            small, next_token = _small_token(default, next_token)
        elif name in ("num_hidden_layers", "n_layer", "n_layers") and isinstance(default, int):
            small = min(default, layers)
        elif isinstance(default, (list, tuple)):
            small = _small_sequence(name, default)
        elif isinstance(default, int) and not isinstance(default, bool):
            small = _small_number(name, default)
        else:
            continue
        if small != default:
            settings[name] = small
    if isinstance(defaults.get("num_heads"), (list, tuple)) and isinstance(defaults.get("embed_dim"), int):
        settings["embed_dim"] = defaults["num_heads"][0] * 8
    settings |= _filled_in(config_class(), defaults)
    heads, kv_heads = "num_attention_heads", "num_key_value_heads"
    if defaults.get(heads) and defaults.get(heads) == defaults.get(kv_heads):
        settings[kv_heads] = settings.get(heads, defaults[heads])
    return settings


# Fields that some configs leave open, and their models do not: with what each is filled in.
_OPEN = {"head_dim": 16, "num_key_value_heads": 2, "num_experts_per_tok": 2, "n_routed_experts": 4, "vocab_size": 128}


def _filled_in(config: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a value for each such field of a config that is still open once the config is made."""
    return {name: value for name, value in _OPEN.items() if name in defaults and vars(config).get(name, value) is None}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _layer_count(config_class: Any) -> int:
    """As many layers as it takes to have one of each type, within reason."""
    config = config_class()
    kinds = next((list(getattr(config, name)) for name in _LAYER_TYPES if getattr(config, name, None)), [])
    firsts = [kinds.index(kind) + 1 for kind in {str(kind): kind for kind in kinds}.values()]
    return min(max([2, *firsts]), MOST_LAYERS)


def _small_token(default: Any, next_token: int) -> tuple[Any, int]:
    if isinstance(default, (list, tuple)):
        return type(default)(min(each, 2) for each in default), next_token
    if isinstance(default, int) and default >= 100:
        return next_token, next_token + 1
    return default, next_token


def _small_number(name: str, default: int) -> int:
    return next((rule(default) for pattern, rule in _PATTERNS if pattern.fullmatch(name)), default)


def _small_sequence(name: str, default: Any) -> Any:
    if not default or not all(isinstance(each, int) and not isinstance(each, bool) for each in default):
        return default
    if re.fullmatch(r".*(depths|num_blocks|block_repeats|layers|block_sizes|numb_of_layers)|depth", name):
        return type(default)(min(each, 2) for each in default)
    if re.fullmatch(r"image_size", name):
        return type(default)(min(each, 64) for each in default)
    if re.fullmatch(r".*(hidden_sizes|embed_dims?|unit_dims|_channels|conv_dim|tdnn_dim|channel_size)", name):
        factor = 1
        while max(default) // factor > 64 and all(each % (factor * 8) == 0 for each in default):
            factor *= 2
        return type(default)(each // factor for each in default)
    return default
