"""TransformerLens 4: a bridge around the model of transformers."""

from __future__ import annotations

from typing import Any

from transformer_lens.model_bridge.sources import build_bridge_from_module

from tests.benchmarks.peer_tools.lens import Lens


class Bridge(Lens):
    def made(self, model: Any) -> Any:
        return build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config)
