"""What names of fields do not tell: for each architecture that needs it, other settings or inputs, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.architectures.families import Architecture
from tests.zoo.case import floats, tokens


def _no_inputs(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {}


def _pixels(config: Any) -> tuple[int, ...]:
    size = _found(config, "image_size", 64)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return _found(config, "num_channels", 3), height, width


def _waveform(config: Any, length: int) -> tuple[int, ...]:
    return (200 * length,)


def _features(config: Any, length: int) -> tuple[int, ...]:
    bins = _found(config, "num_mel_bins", None) or _found(config, "feature_size", 16)
    return bins, 2 * _found(config, "max_source_positions", 32)


def _found(config: Any, name: str, default: Any) -> Any:
    """The value of a field of a config, or of one nested in it."""
    value = getattr(config, name, None)
    if value is not None:
        return value
    nested = [getattr(config, each, None) for each in getattr(config, "sub_configs", {})]
    found = [getattr(each, name) for each in nested if getattr(each, name, None) is not None]
    return found[0] if found else default


@dataclass(frozen=True, kw_only=True)
class Special:
    """How an architecture differs from what its config and signature tell.

    Attributes:
        why: The reason.
        settings: Of the config, over the shrunk ones.
        main_input: The name of the input, where the class names another one.
        inputs: More inputs of a call.
        pixels: The shape of an image; `waveform`, of a sound; `features`, of a spectrogram; all without the batch.
        other_length: A length that differs from the example's, where 13 is none that the model takes.
    """

    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    main_input: str | None = None
    inputs: Callable[[Any, int, int], dict[str, Any]] = _no_inputs
    pixels: Callable[[Any], tuple[int, ...]] = _pixels
    waveform: Callable[[Any, int], tuple[int, ...]] = _waveform
    features: Callable[[Any, int], tuple[int, ...]] = _features
    other_length: int | None = None


def _codebooks(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": tokens(batch * _found(config, "num_codebooks", 4), length)}


def _language(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {"lang_ids": torch.zeros(batch, dtype=torch.long)}


def _no_cache(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {"use_cache": False}


def _video(frames: int) -> Callable[[Any], tuple[int, ...]]:
    return lambda config: (_found(config, "num_frames", frames), *_pixels(config))


def _frames_first(config: Any, length: int) -> tuple[int, ...]:
    return 4 * length, _found(config, "num_mel_bins", 16)


def _patches(config: Any, batch: int, length: int) -> dict[str, Any]:
    size = _found(config, "patch_size", 16)
    return {
        "pixel_values": floats(batch, 16, 3 * size * size),
        "pixel_attention_mask": torch.ones(batch, 16, dtype=torch.long),
        "spatial_shapes": torch.full((batch, 2), 4),
    }


def _tiles(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {
        "pixel_values": floats(batch, 1, _found(config, "max_num_tiles", 4), *_pixels(config)),
        "aspect_ratio_ids": torch.ones(batch, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(batch, 1, _found(config, "max_num_tiles", 4), dtype=torch.long),
    }


def _delayed(config: Any, batch: int, length: int) -> dict[str, Any]:
    channels = config.decoder_config.num_channels
    return {"decoder_input_ids": tokens(batch, length * channels, seed=1).reshape(batch, length, channels)}


def _rotary(*kinds: str) -> dict[str, Any]:
    return {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in kinds}}


_SWIN = Special(why="windows of 7 do not cut the small maps evenly", settings={"window_size": 2})
_VIDEO = "takes frames of a video"
_CODEBOOKS = Special(why="tokens of several codebooks in one batch", inputs=_codebooks)

ORDINARY = Special(why="")
SPECIAL: dict[str, Special] = {
    "audio-spectrogram-transformer": Special(
        why="its table of positions has as many entries as the sound has patches",
        settings={"max_length": 44, "frequency_stride": 8, "time_stride": 8},
        waveform=lambda config, length: (44, config.num_mel_bins),
    ),
    "bamba": Special(why="has attention where this says so", settings={"attn_layer_indices": [1]}),
    "bit": Special(why="widths must be multiples of the groups", settings={"num_groups": 4}),
    "blt": Special(
        why="hashes groups of bytes; a cache asks its config for what it does not have",
        settings={"encoder_hash_byte_group_vocab": 128},
        inputs=_no_cache,
    ),
    "causal-reformer": Special(
        why="axial positions multiply to the length, and their widths add up; a decoder when asked",
        settings={"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 48], "is_decoder": True},
    ),
    "canary": Special(why="takes frames before bins", features=_frames_first),
    "cohere_asr": Special(why="takes frames before bins", features=_frames_first),
    "cohere_compass_text": Special(
        why="has no rotary parameters by default", settings=_rotary("full_attention", "sliding_attention")
    ),
    "cvt": Special(
        why="lists of three stages, as deep as they say",
        settings={"embed_dim": (16, 24, 48), "num_heads": (1, 3, 6), "depth": (1, 2, 10)},
    ),
    "dbrx": Special(
        why="has no rotary base by default", settings={"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}}
    ),
    "dia": Special(why="decodes all channels of a codec at once", inputs=_delayed),
    "donut-swin": _SWIN,
    "dinov3_convnext": Special(
        why="its sizes are in no field by default", settings={"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
    ),
    "efficientnet": Special(
        why="multiplies depth and width, and wants what its stages pass on",
        settings={
            "width_coefficient": 1.0,
            "depth_coefficient": 1.0,
            "in_channels": (32, 16, 24, 40, 80, 112, 192),
            "out_channels": (16, 24, 40, 80, 112, 192, 320),
        },
    ),
    "dots3_note_text": Special(
        why="has sizes of its own for sliding attention, which are no fields",
        settings={
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": 24,
            "swa_qk_nope_head_dim": 16,
            "swa_v_head_dim": 16,
        },
    ),
    "dots1": Special(why="has no experts by default", settings={"n_shared_experts": 1, "n_routed_experts": 4}),
    "esm": Special(why="has no padding by default", settings={"vocab_size": 128, "pad_token_id": 1}),
    "esmc": Special(why="a vocabulary of 64", settings={"vocab_size": 128}),
    "gemma3n_text": Special(why="shares keys and values between layers", settings={"num_kv_shared_layers": 0}),
    "gpt_neo": Special(why="lists its layers in pairs", settings={"attention_types": [[["global", "local"], 1]]}),
    "granitemoehybrid": Special(
        why="has attention where this says so", settings={"layer_types": ["linear_attention", "full_attention"]}
    ),
    "hgnet_v2": Special(
        why="widths of stages depend on each other",
        settings={
            "stem_channels": (3, 8, 12),
            "stage_in_channels": (12, 16, 24, 32),
            "stage_mid_channels": (12, 16, 24, 32),
            "stage_out_channels": (16, 24, 32, 48),
            "hidden_sizes": (16, 24, 32, 48),
        },
    ),
    "lasr_ctc": Special(why="takes frames before bins", features=_frames_first),
    "glm_moe_dsa": Special(why="begins with dense layers", settings={"mlp_layer_types": ["dense", "sparse"]}),
    "lfm2_moe": Special(
        why="has no types of layers by default, and begins with dense ones",
        settings={"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "llama4": Special(why="the class for pictures says tokens", main_input="pixel_values"),
    "longcat_flash": Special(why="rotary tables as wide as the rotary part", settings={"head_dim": 8}),
    "mamba2": Special(why="heads times their width is twice the width", settings={"num_heads": 8, "head_dim": 16}),
    "vision-mllama": Special(why="takes tiles of pictures", main_input="pixel_values", inputs=_tiles),
    "mpnet": Special(
        why="adds special tokens to the vocabulary, and counts on 32 buckets",
        settings={"vocab_size": 130, "relative_attention_num_buckets": 32},
    ),
    "musicgen": _CODEBOOKS,
    "musicgen_melody": _CODEBOOKS,
    "nllb-moe": Special(
        why="has experts in every fourth layer", settings={"encoder_sparse_step": 2, "decoder_sparse_step": 2}
    ),
    "parakeet_ctc": Special(why="takes frames before bins", features=_frames_first),
    "masked-perceiver": Special(why="the classifier has another input", main_input="inputs"),
    "vision-perceiver": Special(why="the main input says tokens", main_input="pixel_values"),
    "qwen4_exp_text": Special(
        why="has no sizes of the indexer by default",
        settings={
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
        },
    ),
    "reformer": Special(
        why="axial positions multiply to the length, and their widths add up",
        settings={"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 48]},
    ),
    "siglip2": Special(why="takes patches", inputs=_patches),
    "speech_to_text": Special(why="takes frames before bins", features=_frames_first),
    "speecht5": Special(why="more positions than that", settings={"vocab_size": 128}),
    "swin": _SWIN,
    "textnet": Special(why="widths of stages depend on the stem", settings={"stem_out_channels": 8}),
    "timesformer": Special(why=_VIDEO, pixels=_video(8)),
    "videomae": Special(why=_VIDEO, pixels=_video(16)),
    "videoprism_vision_model": Special(why=_VIDEO, pixels=_video(16)),
    "vivit": Special(why=_VIDEO, pixels=_video(32)),
    "wav2vec2-bert": Special(
        why="takes stacks of frames", features=lambda config, length: (4 * length, config.feature_projection_input_dim)
    ),
    "xlstm": Special(why="queries are half as wide as values", settings={"num_heads": 4, "hidden_size": 64}),
    "xmod": Special(why="asks for a language", inputs=_language),
    "zamba": Special(
        why="shares one layer of attention between several",
        settings={"num_hidden_layers": 5, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "zamba2": Special(
        why="lists its layers",
        settings={
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        },
    ),
}


def special_of(architecture: Architecture) -> Special:
    return SPECIAL.get(architecture.name) or SPECIAL.get(architecture.model_type, ORDINARY)
