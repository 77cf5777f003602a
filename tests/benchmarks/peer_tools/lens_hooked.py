"""TransformerLens 3: a model of its own, from a config, which is given the weights of the other one."""

from __future__ import annotations

from typing import Any, ClassVar

from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights

from tests.benchmarks.peer_tools.lens import Lens


class Hooked(Lens):
    notes: ClassVar = {
        **Lens.notes,
        "construct": "its own implementation of GPT-2, made from a config and given the same weights, unprocessed",
    }

    def made(self, model: Any) -> Any:
        config = HookedTransformerConfig(
            n_layers=model.config.n_layer,
            d_model=model.config.n_embd,
            n_ctx=model.config.n_positions,
            d_head=model.config.n_embd // model.config.n_head,
            n_heads=model.config.n_head,
            d_mlp=4 * model.config.n_embd,
            d_vocab=model.config.vocab_size,
            act_fn="gelu_new",
            init_weights=False,
            device="cpu",
        )
        hooked = HookedTransformer(config)
        hooked.load_and_process_state_dict(
            convert_gpt2_weights(model, hooked.cfg),
            fold_ln=False,
            center_writing_weights=False,
            center_unembed=False,
            fold_value_biases=False,
        )
        return hooked.eval()
