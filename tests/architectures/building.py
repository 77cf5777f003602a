"""A case of the zoo for each architecture: built small, and tried on its inputs before any law is."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.architectures import inputs
from tests.architectures.families import Architecture
from tests.architectures.shrinking import small_config
from tests.architectures.special import special_of
from tests.zoo import Case
from tests.zoo.case import seeded
from tests.zoo.values import same_state, snapshot

MOST_PARAMETERS = 10_000_000


class NotSmall(Exception):
    """An architecture that cannot be built small, or does not run on dummy inputs; the message says why."""


def case_of(architecture: Architecture, settings: Mapping[str, Any] | None = None) -> Case:
    """Returns an architecture as a case of the zoo.

    Args:
        architecture: The architecture.
        settings: Settings of the config, of which those apply that it has.

    Raises:
        NotSmall: The case does not exist.
    """
    special = special_of(architecture)
    config = _config(architecture, settings or {})

    def build_new() -> nn.Module:
        return seeded(lambda: architecture.model_class(copy.deepcopy(config)))

    def build_settled() -> nn.Module:
        """Some models replace parts of themselves in their first run: what is examined is what they are then."""
        model = build_new()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            inputs.example(architecture, config, special).run(model)
        return model

    model = _tried("cannot be built", build_new)
    before = snapshot(model)
    _tried("does not run on dummy inputs", lambda: inputs.example(architecture, config, special).run(model))
    build = build_new if same_state(model, before) is None else build_settled
    names = inputs.those_that_run(model, inputs.variants(architecture, config, special))
    return Case(
        name=architecture.name,
        build=build,
        example=lambda: inputs.example(architecture, config, special),
        variants=lambda _: {name: inputs.variants(architecture, config, special)[name] for name in names},
    )


def _config(architecture: Architecture, settings: Mapping[str, Any]) -> Any:
    special = special_of(architecture)
    kind = architecture.config_class
    more = {
        name: value for name, value in settings.items() if name in {field.name for field in dataclasses.fields(kind)}
    }
    config = _tried("has no small config", lambda: small_config(kind, {**special.settings, **more}))
    if architecture.attention is not None:
        config._attn_implementation = architecture.attention
    with torch.device("meta"):
        model = _tried("cannot be built", lambda: architecture.model_class(copy.deepcopy(config)))
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MOST_PARAMETERS:
        raise NotSmall(f"{count / 1e6:.0f} million parameters are left when its config is shrunk")
    return config


def _tried(what: str, action: Any) -> Any:
    try:
        return action()
    except ImportError as error:
        raise NotSmall(f"needs a library that is not installed: {_in_a_line(error)}") from error
    except Exception as error:
        raise NotSmall(f"{what}: {_in_a_line(error)}") from error


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
