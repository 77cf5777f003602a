"""The generation config of a `PatchableGraph` is its own, unless the options say otherwise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import CompileConfig, GenerationConfig

from graphpatch_notebook import PatchableGraph
from tests.zoo import CASES
from tests.zoo.case import tokens

IDS = tokens(2, 5).clamp(min=3)


def build() -> Any:
    model: Any = next(case for case in CASES if case.name == "gpt2-sdpa").build()
    model.generation_config.max_new_tokens = 3
    model.generation_config.min_new_tokens = 3
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture
def model() -> Any:
    return build()


@pytest.fixture
def pg(model: Any) -> PatchableGraph:
    return PatchableGraph(model, IDS)


def test_another_config_as_if_it_were_the_models(model: Any, pg: PatchableGraph) -> None:
    """Also what it leaves open: nothing of the model's own config comes in."""
    config = GenerationConfig(max_new_tokens=4, do_sample=True, temperature=2.0)
    pg.generation_config = config
    torch.manual_seed(0)
    found = pg.generate(IDS)
    assert model.generation_config.max_new_tokens == 3
    other = build()
    other.generation_config = copy.deepcopy(config)
    torch.manual_seed(0)
    assert torch.equal(other.generate(IDS), found)


def test_the_model_is_left_as_it_was(model: Any, pg: PatchableGraph) -> None:
    before = dict(vars(model))
    pg.generation_config.cache_implementation = "static"
    pg.generation_config.compile_config = CompileConfig(backend=lambda graph, _, **__: graph.forward, fullgraph=False)
    pg.generation_config.compile_config._compile_all_devices = True
    pg.generate(IDS)
    kept = {"_previous_max_cache_length", "_cache"}
    assert {name for name in vars(model) if vars(model)[name] is not before.get(name)} <= kept
