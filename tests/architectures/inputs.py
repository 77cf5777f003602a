"""What to feed an architecture: dummy tokens, pixels and features, by the name of its main input and its signature."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tests.architectures.families import Architecture
from tests.architectures.special import Special
from tests.zoo import Call
from tests.zoo.case import floats, tokens

LENGTH = 11


def example(architecture: Architecture, config: Any, special: Special, batch: int = 2, length: int = LENGTH) -> Call:
    """Returns the inputs of one call: fresh tensors with the same values at each call."""
    name = special.main_input or architecture.model_class.main_input_name
    given = {name: _main_input(name, config, special, batch, length)}
    parameters = inspect.signature(architecture.model_class.forward).parameters
    if "decoder_input_ids" in parameters and name != "decoder_input_ids":
        given["decoder_input_ids"] = tokens(batch, length - 4, seed=1)
    return Call.of(**{**given, **special.inputs(config, batch, length)})


def variants(architecture: Architecture, config: Any, special: Special) -> dict[str, Call]:
    """Returns calls that the example does not cover: other sizes, a mask, flags, no cache."""
    parameters = inspect.signature(architecture.model_class.forward).parameters
    length = special.other_length or LENGTH + 2
    calls = {"other_size": example(architecture, config, special, batch=3, length=length)}
    usual = example(architecture, config, special)
    if "attention_mask" in parameters and "input_ids" in usual.kwargs and "attention_mask" not in usual.kwargs:
        calls["masked"] = Call.of(**usual.kwargs, attention_mask=_right_padding(usual.kwargs["input_ids"]))
    flags = {"output_hidden_states": True, "return_dict": False}
    calls["flags"] = Call.of(**example(architecture, config, special).kwargs, **flags)
    if "use_cache" in parameters:
        calls["no_cache"] = Call.of(**{**example(architecture, config, special).kwargs, "use_cache": False})
    return calls


def those_that_run(model: nn.Module, calls: dict[str, Call]) -> list[str]:
    """Returns the names of the calls that the model takes, on its own: not every model knows every flag."""
    names = []
    for name, call in calls.items():
        try:
            with torch.no_grad():
                call.run(model)
        except Exception:  # of whatever kind
            continue
        names.append(name)
    return names


def _main_input(name: str, config: Any, special: Special, batch: int, length: int) -> Tensor:
    if name == "pixel_values":
        return floats(batch, *special.pixels(config))
    if name == "input_values":
        return floats(batch, *special.waveform(config, length))
    if name == "input_features":
        return floats(batch, *special.features(config, length))
    return tokens(batch, length)


def _right_padding(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return mask
