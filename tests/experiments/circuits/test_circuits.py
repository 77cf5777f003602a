"""Edges and circuits: laws over architectures, and runs of a model as a circuit by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

from graphpatch_notebook import (
    ExperimentError,
    GraphPatchWarning,
    PatchableGraph,
    ReplacePatch,
    UnknownPathError,
)
from graphpatch_notebook.experiments import (
    Circuit,
    Edge,
    attribute_edges,
    circuit,
    circuit_patches,
    faithfulness,
    path_patch,
)
from tests.libraries.classics import VOCABULARY, arena
from tests.zoo.submodules import Submodules, copies

# -- tiny models -------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def made(kind: str, config: str, **options: Any) -> nn.Module:
    return getattr(transformers, kind)(getattr(transformers, config)(**options))  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return made("GPT2LMHeadModel", "GPT2Config", n_layer=2, n_head=2, n_embd=8, vocab_size=40, use_cache=False, **ends)


class Block(
    Submodules,
    norm_1=partial(nn.LayerNorm, 8),
    norm_2=partial(nn.LayerNorm, 8),
    qkv=(8, 16),
    out=partial(nn.Linear, 8, 8, bias=False),
    mlp=[(8, 16), nn.GELU, (16, 8)],
):
    """Two heads of queries that share keys and values, all from one linear map, and an MLP."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).split([8, 4, 4], -1)
        q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in (q, k, v))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        z = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(z.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Handwritten(
    Submodules,
    embed=partial(nn.Embedding, 40, 8),
    norm=partial(nn.LayerNorm, 8),
    unembed=(8, 40),
    layers=copies(Block, 2),
):
    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.unembed(self.norm(x)))


class Arena(nn.Module):
    """ARENA's transformer, whose weights have heads as dimensions of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = arena()

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.model(input_ids % VOCABULARY))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "by hand": Handwritten,
    "arena (heads as dimensions)": Arena,
    "llama (grouped heads)": lambda: made("LlamaForCausalLM", "LlamaConfig", **SIZES, num_key_value_heads=2),
    "gemma2 (sandwich norms)": lambda: made(
        "Gemma2ForCausalLM", "Gemma2Config", **SIZES, num_key_value_heads=2, head_dim=8
    ),
    "neox (parallel blocks)": lambda: made("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES),
    "gptj (one norm)": lambda: made("GPTJForCausalLM", "GPTJConfig", **SIZES, rotary_dim=4, tie_word_embeddings=False),
    "olmo2 (norms over heads)": lambda: made("Olmo2ForCausalLM", "Olmo2Config", **SIZES, num_key_value_heads=2),
    "bert (post-norm)": lambda: made("BertForMaskedLM", "BertConfig", **SIZES),
    "t5 (encoder and decoder)": lambda: made(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        use_cache=False,
    ),
    "vit (images)": lambda: made(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
    ),
    "mamba (mixers)": lambda: made(
        "MambaForCausalLM", "MambaConfig", vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=2
    ),
}
EDGES = {
    "gpt2": 46,
    "by hand": 36,
    "arena (heads as dimensions)": 262,
    "llama (grouped heads)": 82,
    "gemma2 (sandwich norms)": 82,
    "neox (parallel blocks)": 102,
    "gptj (one norm)": 102,
    "olmo2 (norms over heads)": 54,
    "bert (post-norm)": 110,
    "t5 (encoder and decoder)": 48,
    "vit (images)": 110,
    "mamba (mixers)": 6,
}


class Task:
    """A model with random weights in double precision, its capture, a pair of inputs, and a metric."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = MODELS[name]().eval().double()
        for parameter in self.model.parameters():
            noise = torch.randn_like(parameter)
            parameter.data = noise * 0.3 if parameter.dim() > 1 else parameter.data + 0.1 * noise
        self.clean, self.corrupted = self.inputs(name), self.inputs(name)
        self.pg = PatchableGraph(self.model, **self.clean)

    def inputs(self, name: str) -> dict[str, Tensor]:
        if name.startswith("vit"):
            return {"pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.double)}
        names = ["input_ids", "decoder_input_ids"] if name.startswith("t5") else ["input_ids"]
        return {each: torch.randint(3, 40, (2, 5 + number)) for number, each in enumerate(names)}

    def metric(self, output: Any) -> Tensor:
        last = output.logits if output.logits.dim() == 2 else output.logits[:, -1]
        return (last[:, 0] - last[:, 1]).mean()

    def logits(self, inputs: dict[str, Tensor], **patches: Any) -> Tensor:
        with torch.no_grad(), self.pg.patch(patches.get("patches", {})):
            return self.pg(**inputs).logits  # type: ignore[no-any-return]

    def scores(self, method: Any, **options: Any) -> Any:
        return attribute_edges(self.pg, self.metric, self.clean, self.corrupted, method=method, **options)


task = functools.cache(Task)


@pytest.mark.parametrize("name", MODELS)
def test_circuits_follow_their_laws(name: str) -> None:
    """The secant explains the whole effect; all edges are the model on clean inputs, and none on corrupted ones."""
    it = task(name)
    scores, placed = it.scores("secant"), it.scores("secant", positions=True)
    assert (scores.attrs["edges"], scores.attrs["fallbacks"]) == (EDGES[name], {})
    np.testing.assert_allclose(placed.sum("position", min_count=1).values, scores.values, atol=1e-9)
    with torch.no_grad():
        clean, corrupted = (it.model(**inputs).logits for inputs in (it.clean, it.corrupted))
    for each in (scores, placed):
        assert each.attrs["conservation"] == pytest.approx(1.0, abs=1e-5)
        whole, empty = (circuit(it.pg, each, edges=count) for count in (each.attrs["edges"], 0))
        assert len(whole.edges) == np.isfinite(each.values).sum()  # no edge of the model is a dead end
        assert Circuit.from_json(whole.to_json()) == whole
        patched = it.logits(it.clean, patches=circuit_patches(it.pg, whole, it.corrupted))
        torch.testing.assert_close(patched, clean, rtol=1e-5, atol=1e-5)  # some norms compute in single precision
        assert torch.equal(it.logits(it.clean, patches=circuit_patches(it.pg, empty, it.corrupted)), corrupted)


@pytest.mark.parametrize("name", ["gpt2", "gemma2 (sandwich norms)"])
def test_one_sided_scores_sum_to_the_effects_of_both_ends(name: str) -> None:
    """Those of the edges out of a sender sum to its effect if only it is restored, and so for receivers: the mean."""
    it = task(name)
    values = {"@embed": "layers[0].resid_pre", "mlp": "ln2", "@logits": "@final_norm"}

    def effect(end: str) -> float:
        above, dot, last = end.rpartition(".")
        component = above + dot + values.get(last, last)
        with torch.no_grad():
            clean = it.pg.record(component, **it.clean)[component]
            with it.pg.patch({component: ReplacePatch(value=clean)}):
                patched = it.metric(it.pg(**it.corrupted))
            return (patched - it.metric(it.pg(**it.corrupted))).item()

    scores = it.scores("secant", one_sided=True)
    effects = [effect(end) for dim in ("sender", "receiver") for end in scores[dim].values]
    assert float(scores.sum()) == pytest.approx(sum(effects) / 2, rel=1e-4)  # norms in single precision
    some = it.scores("secant", one_sided=True, senders=scores.sender.values[2], positions=True)
    np.testing.assert_allclose(some.sum("position").values, scores[:, 2:3].fillna(0.0).values, atol=1e-6)


PATHS = {
    "arena (heads as dimensions)": ("layers[0].attn.heads[1].z", "layers[1].attn.heads[0].k"),
    "gpt2": ("layers[0].attn.heads[1].z", "layers[1].attn.heads[0].k"),
    "gemma2 (sandwich norms)": ("layers[0].mlp_out", "layers[1].attn.heads[1].v"),
    "bert (post-norm)": ("layers[0].mlp_out", "layers[1].attn.heads[2].q"),
    "neox (parallel blocks)": ("layers[0].mlp_out", "layers[1].attn.heads[3].q"),
}


@pytest.mark.parametrize("name", PATHS)
def test_exact_edges_are_path_patching(name: str) -> None:
    it, (sender, receiver) = task(name), PATHS[name]
    exact = it.scores("exact", senders=sender, receivers=receiver)
    patched = path_patch(it.pg, sender, receiver, it.clean, it.corrupted, it.metric, progress=False)
    assert exact.item() == pytest.approx(patched.item() - patched.attrs["corrupted"], rel=1e-6, abs=1e-12)


# -- by hand -----------------------------------------------------------------------------------------------------------

Read: TypeAlias = "Callable[[str, dict[str, Tensor]], Tensor]"


def run_by_hand(model: Any, ids: Tensor, read: Read) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the logits and what each sender writes, if a receiver reads what `read` makes of what was written."""
    wrote = {"@embed": model.embed(ids)}
    for number, block in enumerate(model.layers):
        start, before = f"layers[{number}]", dict(wrote)
        projected: dict[str, Tensor] = {}
        for at, name in enumerate(("heads[0].q", "heads[1].q", "heads[0].k", "heads[0].v")):
            rows = slice(4 * at, 4 * at + 4)
            given = block.norm_1(read(f"{start}.attn.{name}", before))
            projected[name] = functional.linear(given, block.qkv.weight[rows], block.qkv.bias[rows])
        for head in (0, 1):
            three = projected[f"heads[{head}].q"], projected["heads[0].k"], projected["heads[0].v"]
            z = functional.scaled_dot_product_attention(*three, is_causal=True)
            wrote[f"{start}.attn.heads[{head}].z"] = z @ block.out.weight[:, 4 * head : 4 * head + 4].T
        wrote[f"{start}.mlp_out"] = block.mlp(block.norm_2(read(f"{start}.mlp", dict(wrote))))
    return model.unembed(model.norm(read("@logits", wrote))), wrote


def everything(_: str, wrote: dict[str, Tensor]) -> Tensor:
    return sum(wrote.values(), torch.zeros(()))


def written_by_hand() -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """The model, and what its senders write on clean and on corrupted inputs."""
    it = task("by hand")
    with torch.no_grad():
        logits, clean = run_by_hand(it.model, it.clean["input_ids"], everything)
        torch.testing.assert_close(logits, it.model(**it.clean).logits)
        return it, clean, run_by_hand(it.model, it.corrupted["input_ids"], everything)[1]


@pytest.mark.parametrize(("share", "positions"), [(0.2, None), (0.7, None), (0.5, True), (0.7, [0, 2, -1])])
def test_a_circuit_equals_its_run_by_hand(share: float, positions: Any) -> None:
    it, _, base = written_by_hand()
    scores = it.scores("gradient", positions=positions)
    generator = np.random.default_rng(3)
    drawn = scores.copy(data=np.where(np.isnan(scores.values), np.nan, generator.random(scores.shape)))
    count = round(share * scores.attrs["edges"])
    chosen = circuit(it.pg, drawn, edges=count, prune=False)
    assert (len(chosen.edges), Circuit.from_json(chosen.to_json())) == (count, chosen)
    kept: dict[tuple[str, str], Tensor] = {}
    for edge in chosen.edges:
        mask = kept.setdefault((edge.sender, edge.receiver), torch.zeros(1, 5, 1, dtype=torch.double))
        mask[:, slice(None) if positions is None else edge.position] = 1

    def read(receiver: str, wrote: dict[str, Tensor]) -> Tensor:
        return sum(base[name] + kept.get((name, receiver), 0.0) * (wrote[name] - base[name]) for name in wrote)

    with torch.no_grad():
        expected, _ = run_by_hand(it.model, it.clean["input_ids"], read)
    for each in (chosen, chosen.without_dead_ends()):
        found = it.logits(it.clean, patches=circuit_patches(it.pg, each, it.corrupted))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_gradients_and_effects_equal_those_by_hand() -> None:
    """A gradient score is the derivative of the metric by the share of the sender's change that the receiver reads."""
    it, clean, base = written_by_hand()
    shares: dict[tuple[str, str], Tensor] = {}

    def metric() -> Tensor:
        logits, _ = run_by_hand(it.model, it.corrupted["input_ids"], read)
        return (logits[:, -1, 0] - logits[:, -1, 1]).mean()

    def read(receiver: str, wrote: dict[str, Tensor]) -> Tensor:
        for each in wrote:
            shares.setdefault((each, receiver), torch.zeros(5, 1, dtype=torch.double, requires_grad=True))
        return sum(wrote[each] + shares[each, receiver] * (clean[each] - base[each]) for each in wrote)

    before, scores, exact = metric(), it.scores("gradient", positions=True), it.scores("exact")
    found = torch.autograd.grad(before, list(shares.values()))
    assert len(found) == EDGES["by hand"]
    for (sender, receiver), gradient in zip(shares, found, strict=True):
        own = scores.sel(sender=sender, receiver=receiver).values
        np.testing.assert_allclose(own, gradient.numpy()[:, 0], rtol=1e-9, atol=1e-9)
    for pair in list(shares)[:: len(shares) // 6]:
        placed = it.scores("exact", senders=pair[0], receivers=pair[1], positions=[-1, 2])
        assert list(placed.position.values) == [4, 2]
        for at, found in ((slice(None), exact.sel(sender=pair[0], receiver=pair[1])), (4, placed[..., 0])):
            shares = {each: torch.zeros(5, 1, dtype=torch.double) for each in shares}
            shares[pair][at] = 1
            with torch.no_grad():
                assert found.item() == pytest.approx((metric() - before).item(), rel=1e-6, abs=1e-12)


# -- options -----------------------------------------------------------------------------------------------------------


def test_scores_of_parts_and_batches() -> None:
    it = task("gpt2")
    scores = it.scores("secant")
    np.testing.assert_allclose(it.scores("secant", max_bytes=1).values, scores.values, rtol=1e-9)
    part = it.scores("secant", senders="layers[*].mlp_out", receivers=["@logits", "layers[1].attn.heads[*].q"])
    assert list(part.sender.values) == ["layers[0].mlp_out", "layers[1].mlp_out"]
    np.testing.assert_array_equal(part.values, scores.sel(sender=part.sender, receiver=part.receiver).values)
    rows = [
        [{name: ids[[row]] for name, ids in inputs.items()} for row in (0, 1)] for inputs in (it.clean, it.corrupted)
    ]
    np.testing.assert_allclose(
        attribute_edges(it.pg, it.metric, *rows, method="secant").values, scores.values, rtol=1e-9
    )
    whole = it.scores("secant", heads=False)
    heads = [f"layers[0].attn.heads[{head}].z" for head in (0, 1)]
    total = scores.sel(receiver="@logits", sender=heads).sum().item()
    assert whole.sel(receiver="@logits", sender="layers[0].attn_out").item() == pytest.approx(total, rel=1e-9)


def test_dead_ends() -> None:
    feeds = {"layers[0].mlp": ("layers[0].mlp_out",), "layers[1].mlp": ("layers[1].mlp_out",), "@logits": ()}
    chain = [("@embed", "layers[0].mlp"), ("layers[0].mlp_out", "layers[1].mlp"), ("layers[1].mlp_out", "@logits")]
    whole = Circuit(tuple(Edge(*pair, 1.0) for pair in chain), feeds, 6, 1.0, 0.0)
    assert whole.without_dead_ends() is whole
    assert whole.nodes == ("@embed", "layers[0].mlp_out", "layers[1].mlp_out", "@logits")
    for number in range(3):
        left = [Edge(*pair, 1.0) for place, pair in enumerate(chain) if place != number]
        assert Circuit(tuple(left), feeds, 6, 1.0, 0.0).without_dead_ends().edges == ()
        guarded = Circuit(tuple(left), feeds, 6, 1.0, 0.0, missing={"layers[1].attn": "it cannot be followed"})
        assert guarded.without_dead_ends() == guarded == Circuit.from_json(guarded.to_json())


def test_faithfulness() -> None:
    it = task("gpt2")
    scores = {name: it.scores(name) for name in ("secant", "exact")}
    curves = faithfulness(it.pg, scores, it.metric, it.clean, it.corrupted, sizes=[0, 10, 0.5, 1.0])
    assert list(curves.ranking.values) == ["secant", "exact", "random"]
    assert list(curves["size"].values) == [0, 10, 23, 46]
    np.testing.assert_allclose(curves.faithfulness.values[:, [0, -1]], [[0, 1]] * 3, atol=1e-9)
    for name, row in zip(curves.ranking.values, curves.faithfulness.values, strict=True):
        shares = curves.share.values
        assert curves.CPR.sel(ranking=name).item() == pytest.approx(np.trapezoid(row, shares))
        assert curves.CMD.sel(ranking=name).item() == pytest.approx(np.trapezoid(np.abs(1 - row), shares))
    with torch.no_grad(), it.pg.patch(circuit_patches(it.pg, circuit(it.pg, scores["exact"], 10), it.corrupted)):
        metric = float(it.metric(it.pg(**it.clean)))
    assert curves.metric.sel(ranking="exact", size=10).item() == pytest.approx(metric)


def test_invalid_arguments_are_errors() -> None:
    it, other = task("gpt2"), task("llama (grouped heads)")
    scores = it.scores("gradient")
    feeds = circuit(it.pg, scores).feeds
    bare = scores.copy()
    bare.attrs = {}
    wrong = Circuit((Edge("@logits", "layers[0].mlp", 1.0),), feeds, 1, 1.0, 0.0)
    far = Circuit((Edge("@embed", "layers[0].mlp", 1.0, 7),), feeds, 1, 1.0, 0.0)
    bigram = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 5))  # it has an embedding and logits, but no layers
    ids = torch.zeros(1, 3, dtype=torch.long)
    calls: list[Any] = [
        lambda: it.scores("gradient", receivers=[]),
        lambda: it.scores("gradient", positions=5),
        lambda: it.scores("gradient", positions=[[1], [2]]),
        lambda: it.scores("gradient", one_sided=True),
        lambda: it.scores("secant", one_sided="edges"),
        lambda: it.scores("eap"),
        lambda: task("t5 (encoder and decoder)").scores("gradient", positions=-1),
        lambda: circuit(other.pg, scores),
        lambda: circuit(it.pg, scores.isel(sender=[0, 1])),
        lambda: faithfulness(it.pg, {"secant": bare}, it.metric, it.clean, it.corrupted),
        lambda: faithfulness(it.pg, [scores], it.metric, it.clean, it.corrupted),
        lambda: attribute_edges(it.pg, lambda out: out.logits.detach().sum(), it.clean, it.corrupted),
        lambda: attribute_edges(it.pg, it.metric, [it.clean], it.corrupted),
        lambda: attribute_edges(it.pg, lambda out: out.logits[:, -1, 0], it.clean, it.corrupted, method="exact"),
        lambda: attribute_edges(PatchableGraph(bigram, ids), torch.sum, ids, ids),
        lambda: Circuit.from_json("{}"),
        lambda: circuit_patches(it.pg, wrong, it.corrupted),
        lambda: circuit_patches(it.pg, far, it.corrupted),
    ]
    for call in calls:
        with pytest.raises(ExperimentError):
            call()
    with pytest.raises(UnknownPathError, match="mlp_out"):
        it.scores("gradient", senders="layers[0].mlp")
    with pytest.warns(GraphPatchWarning, match="empty"):
        assert circuit(it.pg, scores, edges=1).edges == ()
