"""Attribution graphs beside those of circuit-tracer, on small random models with random transcoders.

`hatch run circuit-tracer:compare` installs circuit-tracer, which asks for other versions than the tests do, in an
environment of its own, prints a table, and fails if a weight differs by more than rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from circuit_tracer.attribution.attribute import attribute  # type: ignore[import-not-found]
from circuit_tracer.graph import prune_graph  # type: ignore[import-not-found]
from circuit_tracer.replacement_model.replacement_model_transformerlens import (  # type: ignore[import-not-found]
    TransformerLensReplacementModel,
)
from circuit_tracer.transcoder.single_layer_transcoder import (  # type: ignore[import-not-found]
    SingleLayerTranscoder,
    TranscoderSet,
)
from circuit_tracer.utils.create_graph_files import (  # type: ignore[import-not-found]
    build_model,
    create_nodes,
    create_used_nodes_and_edges,
)
from torch import Tensor, nn
from transformer_lens import HookedTransformerConfig  # type: ignore[import-not-found]
from transformer_lens.pretrained.weight_conversions import (  # type: ignore[import-not-found]
    convert_gemma_weights,
    convert_llama_weights,
)
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import AttributionGraph, GraphNode, attribution_graph

WIDTH, LAYERS, HEADS, FEATURES, TOKENS, LENGTH = 32, 3, 4, 48, 50, 7
TARGETS = [5, 9]
_CONFIG: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": WIDTH // HEADS,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HOOKED: dict[str, Any] = {
    "n_layers": LAYERS,
    "d_model": WIDTH,
    "d_head": WIDTH // HEADS,
    "n_heads": HEADS,
    "d_mlp": 64,
    "d_vocab": TOKENS,
    "n_ctx": 32,
    "n_key_value_heads": 2,
    "gated_mlp": True,
    "final_rms": True,
    "positional_embedding_type": "rotary",
    "rotary_dim": WIDTH // HEADS,
    "rotary_base": 10000,
    "normalization_type": "RMS",
    "eps": 1e-6,
    "device": "cpu",
}


Made: TypeAlias = tuple[nn.Module, Any, Any, list[Tensor]]


def llama() -> Made:
    """Returns a model, and what TransformerLens makes of it: its config and weights; and the weights of MLPs' norms."""
    model = LlamaForCausalLM(LlamaConfig(**_CONFIG)).eval()
    config = HookedTransformerConfig(**_HOOKED, act_fn="silu", original_architecture="LlamaForCausalLM")
    norms = [layer.post_attention_layernorm.weight.detach() for layer in model.model.layers]
    return model, config, convert_llama_weights(model, config), norms


def gemma() -> Made:
    """The same for a Gemma 2, with norms before and behind attention and MLPs."""
    caps = {"final_logit_softcapping": None, "attn_logit_softcapping": None, "query_pre_attn_scalar": WIDTH // HEADS}
    model = Gemma2ForCausalLM(Gemma2Config(**_CONFIG, **caps, sliding_window=64)).eval()
    config = HookedTransformerConfig(
        **_HOOKED,
        act_fn="gelu_pytorch_tanh",
        original_architecture="Gemma2ForCausalLM",
        use_normalization_before_and_after=True,
        attn_scale=(WIDTH // HEADS) ** 0.5,
    )
    norms = [1 + layer.pre_feedforward_layernorm.weight.detach() for layer in model.model.layers]
    return model, config, convert_gemma_weights(model, config), norms


class Words:
    """What circuit-tracer asks of a tokenizer. Token 1 begins a prompt."""

    all_special_ids = (1,)
    bos_token_id, padding_side, vocab_size = 1, "right", TOKENS

    def decode(self, tokens: Any, **_: Any) -> str:
        return " ".join(map(str, torch.as_tensor(tokens).reshape(-1).tolist()))

    convert_ids_to_tokens = decode


class Reading(nn.Module):
    """A transcoder of circuit-tracer, which reads what a norm returns before it multiplies with its weights."""

    def __init__(self, transcoder: nn.Module, norm: Tensor) -> None:
        super().__init__()
        self.transcoder, self.norm = transcoder, norm

    def encode(self, value: Tensor) -> Any:
        return self.transcoder.encode(value / self.norm)  # type: ignore[operator]

    def decode(self, latents: Tensor) -> Any:
        return self.transcoder.decode(latents)  # type: ignore[operator]


def compared(
    make: Callable[[], tuple[nn.Module, Any, Any, list[Tensor]]],
) -> tuple[AttributionGraph, Any, float, float]:
    """Returns both graphs of one prompt, and the largest difference and weight. Theirs has no features at the start."""
    torch.manual_seed(0)
    model, config, weights, norms = make()
    transcoders = []
    for layer in range(LAYERS):
        made = SingleLayerTranscoder(
            WIDTH, FEATURES, torch.nn.functional.relu, layer, dtype=torch.float32, device=torch.device("cpu")
        )
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
        transcoders.append(made)
    every = TranscoderSet(
        dict(enumerate(transcoders)),
        feature_input_hook="ln2.hook_normalized",
        feature_output_hook="hook_mlp_out",
        scan="random",
    )
    hooked = TransformerLensReplacementModel.from_config(config, every)
    own = hooked.state_dict()
    for name, weight in weights.items():
        old = name.replace(".mlp.", ".mlp.old_mlp.").replace("unembed.", "unembed.old_unembed.")
        own[name if name in own else old].data.copy_(weight)
    ids = torch.randint(3, TOKENS, (1, LENGTH))
    ids[0, 0] = 1
    torch.testing.assert_close(hooked(ids), model(ids).logits, atol=1e-4, rtol=1e-4)
    hooked.tokenizer = Words()
    theirs = attribute(ids[0], hooked, attribution_targets=torch.tensor(TARGETS), batch_size=64)
    places = [(f"layers[{layer}].ln2", f"layers[{layer}].mlp_out") for layer in range(LAYERS)]
    saes = dict(zip(places, map(Reading, transcoders, norms), strict=True))
    ours = attribution_graph(PatchableGraph(model, ids), ids, target=TARGETS, replacements=saes)
    index = {key: number for number, key in enumerate(keys_of(theirs))}
    mine = list(map(key_of, ours.nodes))
    rows = [number for number, key in enumerate(mine) if key in index and key[0] in ("feature", "logit")]
    columns = [number for number, key in enumerate(mine) if key in index and key[:1] + key[2:3] != ("error", 0)]
    assert len(rows) == len(theirs.selected_features) + len(TARGETS)
    weights_there = theirs.adjacency_matrix.numpy()[
        np.ix_([index[mine[number]] for number in rows], [index[mine[number]] for number in columns])
    ]
    difference = np.abs(ours.weights[np.ix_(rows, columns)] - weights_there).max()
    return ours, theirs, float(difference), float(np.abs(weights_there).max())


def keys_of(graph: Any) -> list[tuple[Any, ...]]:
    """Returns what the rows of circuit-tracer's matrix are."""
    active = graph.active_features[graph.selected_features]
    return [
        *(("feature", *map(int, row)) for row in active),
        *(("error", layer, at) for layer in range(LAYERS) for at in range(LENGTH)),
        *(("embed", at) for at in range(LENGTH)),
        *(("logit", int(token)) for token in graph.logit_token_ids),
    ]


def key_of(node: GraphNode) -> tuple[Any, ...]:
    """Returns what a node is, in the same form."""
    number = int(node.name[node.name.rindex("[") + 1 : -1]) if node.kind in ("feature", "logit") else 0
    keys: dict[str, tuple[Any, ...]] = {
        "feature": (node.layer, node.position, number),
        "error": (node.layer, node.position),
        "embed": (node.position,),
        "logit": (number,),
    }
    return (node.kind, *keys[node.kind])


def read(graph: Any) -> AttributionGraph:
    """Returns the pruned graph of circuit-tracer, by way of its JSON; checks that its weights came along."""
    nodes_kept, edges_kept, scores = prune_graph(graph)
    nodes, links = create_used_nodes_and_edges(graph, create_nodes(graph, nodes_kept, Words(), scores), edges_kept)
    text = build_model(graph, nodes, links, "slug", "random", 0.8, Words()).model_dump_json()
    found = AttributionGraph.from_json(text)
    ids = [node["node_id"] for node in json.loads(text)["nodes"]]
    places = {own: number for number, own in enumerate(ids) if ids.count(own) == 1}
    for link in links:
        if {link["source"], link["target"]} <= {*places}:
            weight = found.weights[places[link["target"]], places[link["source"]]]
            np.testing.assert_allclose(weight, link["weight"], rtol=1e-5)
    return found


def main() -> None:
    """Prints the table."""
    print("model    features  largest weight  largest difference  nodes of its JSON")
    for name, make in {"Llama": llama, "Gemma 2": gemma}.items():
        ours, theirs, difference, largest = compared(make)
        features = sum(node.kind == "feature" for node in ours.nodes)
        print(f"{name:8} {features:8} {largest:15.3g} {difference:19.1e} {len(read(theirs).nodes):18}")
        assert difference < 1e-5 * largest


if __name__ == "__main__":
    main()
