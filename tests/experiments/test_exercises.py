"""25 standard exercises of interpretability, from texts: in few statements, and with the numbers of plain torch.

What a user writes stands in `with statements(n):`, after the model, its prompts and a metric. The rest of each test is
the same exercise by hooks. (The attribution graph of exercise 17 is not here.)
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GPT2LMHeadModel

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    FromPatch,
    PatchableGraph,
    ReplacePatch,
    SkipPatch,
    ZeroPatch,
)
from graphpatch_notebook.experiments import (
    DAS,
    BoundlessDAS,
    LogitDifference,
    LoReFT,
    Noise,
    ablate,
    attribute,
    attribute_edges,
    causal_trace,
    composition_scores,
    direct_logit_attribution,
    direction,
    faithfulness,
    fit,
    head_scores,
    intervene,
    logit_lens,
    mean_values,
    path_patch,
    probes,
    project_out,
    record_to,
)
from tests.experiments.hooked import edited, outputs, putting
from tests.hooks import registered

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = "then Mary and John went home and then Mary gave it to"
OTHER = "then Mary and John went home and then John gave it to"
WORDS = ["<s>", *TEXT.split()]
FRAME = "then {} and {} went home and then {} gave it to"
NAMES = ["John", "Mary", "Anna", "Emma", "Noah", "Vera", "Adam", "Lucy", "Theo", "Ruth"]
NO_PROGRESS = {"progress": False}


@contextlib.contextmanager
def statements(count: int) -> Iterator[None]:
    """Marks what a user writes: at most so many statements, which `test_exercises_are_short` counts."""
    yield


def load(name: str) -> tuple[GPT2LMHeadModel, Any]:
    model = GPT2LMHeadModel.from_pretrained(EXAMPLES / name).eval().requires_grad_(False)
    return model, AutoTokenizer.from_pretrained(EXAMPLES / name)


MODEL, TOKENIZER = load("indirect_objects_model")
BLOCKS = MODEL.transformer.h
EAGER = GPT2LMHeadModel.from_pretrained(EXAMPLES / "indirect_objects_model", attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return PatchableGraph(MODEL, TEXT, tokenizer=TOKENIZER)


def ids_of(*texts: str) -> Tensor:
    return torch.tensor([TOKENIZER.encode(text) for text in texts])


JOHN, MARY = (TOKENIZER.encode(name)[1] for name in ("John", "Mary"))
METRIC = LogitDifference(correct=JOHN, wrong=MARY)


def difference(logits: Tensor) -> Tensor:
    return (logits[:, -1, JOHN] - logits[:, -1, MARY]).mean()


def logits_of(ids: Tensor, edits: dict[str, Callable[[Tensor], Tensor]] | None = None, **options: Any) -> Tensor:
    """Returns the logits of the model under hooks on modules."""
    with torch.no_grad(), edited(MODEL, edits or {}, **options):
        return MODEL(ids).logits


def values_of(ids: Tensor, *names: str, of_inputs: bool = False) -> list[Tensor]:
    return outputs(MODEL, list(names), lambda: MODEL(ids), of_inputs=of_inputs)


def head(number: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns an edit of what one head gives: 16 columns of the input of `c_proj`."""

    def edit(value: Tensor) -> Tensor:
        columns = slice(16 * number, 16 * number + 16)
        value = value.clone()
        value[..., columns] = change(value[..., columns])
        return value

    return edit


def close(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    found, expected = (each.detach() if isinstance(each, Tensor) else np.asarray(each) for each in (found, expected))
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=tolerance)


def tokens(result: Any) -> list[str]:
    """Returns the labels of the positions of a result."""
    return result.attrs["tokens"]


def test_01_induction_heads_by_pattern_and_by_ablation() -> None:
    model, tokenizer = load("induction_model")
    text = "garden lamp drum orange garden lamp"
    pg = PatchableGraph(model, text, tokenizer=tokenizer)
    drum, orange = (tokenizer.encode(word)[1] for word in ("drum", "orange"))
    metric = LogitDifference(correct=drum, wrong=orange)
    with statements(1):
        scores = head_scores(pg, text).sel(score="induction")
    with statements(1):
        effect = ablate(pg, "layers[*].attn.heads[*].z", text, metric=metric, **NO_PROGRESS)
    ids = torch.tensor([tokenizer.encode(text)])
    eager = GPT2LMHeadModel.from_pretrained(EXAMPLES / "induction_model", attn_implementation="eager").eval()
    patterns = torch.stack(eager(ids, output_attentions=True).attentions)[:, 0]
    close(scores, (patterns[:, :, 5, 2] + patterns[:, :, 6, 3]) / 2)
    for layer in range(2):
        for number in range(4):
            edits = {f"transformer.h.{layer}.attn.c_proj": head(number, torch.zeros_like)}
            with torch.no_grad(), edited(model, edits, of_inputs=True):
                logits = model(ids).logits[0, -1]
            close(effect[layer, number], logits[drum] - logits[orange])


def test_02_direct_logit_attribution_by_head_and_mlp_at_all_positions(pg: PatchableGraph) -> None:
    with statements(1):
        parts = direct_logit_attribution(pg, TEXT, target="John", minus="Mary", by="head", position=None)
    ids = ids_of(TEXT)
    stream, *mlps = values_of(ids, "transformer.h.3", *(f"transformer.h.{n}.mlp" for n in range(4)))
    inputs = values_of(ids, *(f"transformer.h.{n}.attn.c_proj" for n in range(4)), of_inputs=True)
    norm = MODEL.transformer.ln_f
    answer = MODEL.lm_head.weight[JOHN] - MODEL.lm_head.weight[MARY]

    def read(value: Tensor) -> Tensor:
        centered = value - value.mean(-1, keepdim=True)
        return centered / (stream.var(-1, correction=0, keepdim=True) + norm.eps).sqrt() * norm.weight @ answer

    for layer in range(4):
        close(parts["mlp"][layer], read(mlps[layer]), 1e-3)
        for number in range(4):
            rows = slice(16 * number, 16 * number + 16)
            written = inputs[layer][..., rows] @ BLOCKS[layer].attn.c_proj.weight[rows]
            close(parts["attn"][layer, number], read(written), 1e-3)
    assert tokens(parts) == WORDS


def test_03_logit_lens_of_streams_and_mid_at_all_positions(pg: PatchableGraph) -> None:
    with statements(1):
        lens = logit_lens(pg, TEXT, streams=["layers[*].resid_mid", "layers[*].resid_post"])
    ids = ids_of(TEXT)
    for layer in range(4):
        before, attended, after = values_of(
            ids, f"transformer.h.{layer}.ln_1", f"transformer.h.{layer}.attn", f"transformer.h.{layer}"
        )
        (before,) = values_of(ids, f"transformer.h.{layer}.ln_1", of_inputs=True)
        for kind, stream in (("mid", before + attended), ("post", after)):
            found = lens.sel(stream=f"layers[{layer}].resid_{kind}")
            close(found, MODEL.lm_head(MODEL.transformer.ln_f(stream)), 1e-3)
    assert tokens(lens) == WORDS


def test_04_activation_patching_by_layer_position_and_head(pg: PatchableGraph) -> None:
    kinds = [f"layers[*].attn.heads[*].{kind}" for kind in ("z", "q", "k", "v", "pattern")]
    pairs = [TEXT, FRAME.format("John", "Mary", "Mary")], [OTHER, FRAME.format("John", "Mary", "John")]
    with statements(1):
        streams = causal_trace(pg, TEXT, OTHER, "layers[*].resid_pre", None, METRIC, **NO_PROGRESS)
    with statements(1):
        heads = causal_trace(pg, TEXT, OTHER, kinds, False, METRIC, **NO_PROGRESS)
    with statements(1):
        over = causal_trace(pg, *pairs, "layers[*].resid_pre", None, METRIC, batch_size=1, **NO_PROGRESS)
    expected = [by_position(text, other) for text, other in zip(*pairs, strict=True)]
    close(streams, expected[0])
    close(over, torch.stack(expected).mean(0))
    assert tokens(streams) == WORDS
    for layer in range(4):
        queries_keys_values = f"transformer.h.{layer}.attn.c_attn"
        (read,) = values_of(ids_of(TEXT), queries_keys_values)
        (joined,) = values_of(ids_of(TEXT), f"transformer.h.{layer}.attn.c_proj", of_inputs=True)
        for number in range(4):
            for start, kind in enumerate(("q", "k", "v")):
                columns = slice(64 * start + 16 * number, 64 * start + 16 * number + 16)
                found = heads.sel(component=f"attn.heads[*].{kind}")[layer, number]
                close(found, difference(logits_of(ids_of(OTHER), {queries_keys_values: putting(read, (..., columns))})))
            columns = slice(16 * number, 16 * number + 16)
            edits = {f"transformer.h.{layer}.attn.c_proj": putting(joined, (..., columns))}
            found = heads.sel(component="attn.heads[*].z")[layer, number]
            close(found, difference(logits_of(ids_of(OTHER), edits, of_inputs=True)))
            # The head's values of this run, weighted by the pattern of the other one.
            (values,) = values_of(ids_of(OTHER), queries_keys_values)
            pattern = EAGER(ids_of(TEXT), output_attentions=True).attentions[layer][:, number]
            z = pattern @ values[..., 128 + 16 * number : 144 + 16 * number]
            edits = {f"transformer.h.{layer}.attn.c_proj": head(number, lambda _, z=z: z)}
            found = heads.sel(component="attn.heads[*].pattern")[layer, number]
            close(found, difference(logits_of(ids_of(OTHER), edits, of_inputs=True)))


def by_position(text: str, other: str) -> Tensor:
    """Returns the metric with the stream before each layer restored at each position, of shape (layers, positions)."""
    names = [f"transformer.h.{layer}" for layer in range(4)]
    found = torch.zeros(4, 13)
    for layer, clean in enumerate(values_of(ids_of(text), *names, of_inputs=True)):
        for position in range(13):
            edits = {names[layer]: putting(clean, (slice(None), position))}
            found[layer, position] = difference(logits_of(ids_of(other), edits, of_inputs=True))
    return found


def test_05_path_patching_to_the_logits_and_to_queries(pg: PatchableGraph) -> None:
    heads, held = "layers[*].attn.heads[*].z", "layers[*].attn.z"
    with statements(1):
        direct = path_patch(pg, heads, None, OTHER, TEXT, METRIC, components=held, **NO_PROGRESS)
    with statements(1):
        queries = path_patch(
            pg,
            heads,
            "layers[3].attn.heads[1, 2].q",
            OTHER,
            TEXT,
            METRIC,
            components=held,
            together=True,
            **NO_PROGRESS,
        )
    assert np.ptp(direct.values) > 1
    assert np.ptp(queries.values) > 0.01
    names = [f"transformer.h.{layer}.attn.c_proj" for layer in range(4)]
    kept, new = (values_of(ids_of(text), *names, of_inputs=True) for text in (TEXT, OTHER))
    for layer in range(4):
        for number in range(4):
            edits = {name: putting(value, ...) for name, value in zip(names, kept, strict=True)}
            edits[names[layer]] = lambda _, at=(layer, number): head(
                at[1], lambda _: new[at[0]][..., 16 * at[1] : 16 * at[1] + 16]
            )(kept[at[0]])
            close(direct[layer, number], difference(logits_of(ids_of(TEXT), edits, of_inputs=True)))
            with edited(MODEL, edits, of_inputs=True):
                (read,) = values_of(ids_of(TEXT), "transformer.h.3.attn.c_attn")
            replaced = {"transformer.h.3.attn.c_attn": putting(read, (..., slice(16, 48)))}
            close(queries[layer, number], difference(logits_of(ids_of(TEXT), replaced)))


def test_06_attribution_patching_edges_and_faithfulness(pg: PatchableGraph) -> None:
    with statements(1):
        nodes = attribute(pg, METRIC, TEXT, OTHER, paths=["layers[*].resid_pre"], positions=True)
    with statements(1):
        eap = attribute_edges(pg, METRIC, TEXT, OTHER)
    with statements(1):
        eap_ig = attribute_edges(pg, METRIC, TEXT, OTHER, method="integrated", points="left", steps=5)
    with statements(1):
        curve = faithfulness(pg, {"EAP": eap, "EAP-IG": eap_ig}, METRIC, TEXT, OTHER, sizes=[20, 1.0], random=None)
    clean, corrupted = ids_of(TEXT), ids_of(OTHER)
    names = [f"transformer.h.{layer}" for layer in range(4)]
    before, after = (values_of(ids, *names, of_inputs=True) for ids in (clean, corrupted))
    gradients = gradients_at(names, after[0])
    for layer in range(4):
        close(nodes[layer], ((before[layer] - after[layer]) * gradients[layer]).sum((0, 2)), 1e-3)
    assert tokens(nodes) == WORDS

    writes = [f"transformer.h.{layer}.mlp" for layer in range(4)]
    changes = [one - other for one, other in zip(values_of(clean, *writes), values_of(corrupted, *writes), strict=True)]
    reads = [f"transformer.h.{layer}.ln_2" for layer in range(4)]
    points = [after[0] + step / 5 * (before[0] - after[0]) for step in range(5)]
    integrated = [
        torch.stack(each).mean(0) for each in zip(*(gradients_at(reads, point) for point in points), strict=True)
    ]
    for scores, gradients in ((eap, gradients_at(reads, after[0])), (eap_ig, integrated)):
        for sender in range(4):
            for receiver in range(sender + 1, 4):
                found = scores.sel(sender=f"layers[{sender}].mlp_out", receiver=f"layers[{receiver}].mlp")
                close(found, (changes[sender] * gradients[receiver]).sum(), 1e-3)

    close(curve.faithfulness.isel(size=-1), [1, 1], 1e-3)
    # A circuit of one path, from the embeddings by the first MLP to the logits.
    path = [("@embed", "layers[0].mlp"), ("layers[0].mlp_out", "@logits")]
    kept = eap.where(False)
    for sender, receiver in path:
        kept.loc[{"sender": sender, "receiver": receiver}] = 1
    (by_edges,) = faithfulness(pg, kept, METRIC, TEXT, OTHER, sizes=[2], random=None).faithfulness.values.flatten()
    with edited(MODEL, {"transformer.h.0.ln_2": lambda value: value + before[0] - after[0]}, of_inputs=True):
        (changed,) = values_of(corrupted, "transformer.h.0.mlp")
    (original,) = values_of(corrupted, "transformer.h.0.mlp")
    passed = logits_of(corrupted, {"transformer.ln_f": lambda value: value + changed - original}, of_inputs=True)
    low, high = (difference(logits_of(ids)) for ids in (corrupted, clean))
    close(by_edges, (difference(passed) - low) / (high - low), 1e-3)


def gradients_at(names: list[str], start: Tensor) -> list[Tensor]:
    """Returns the gradients of the metric by what modules read, in a run from the sum of the embeddings on."""
    read: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Tensor], Tensor]:
        def edit(value: Tensor) -> Tensor:
            read[name] = value.clone().requires_grad_() if not value.requires_grad else value.clone()
            return read[name]

        return edit

    edits = {"transformer.drop": lambda _: start.clone().requires_grad_()}
    with edited(MODEL, edits), edited(MODEL, {name: keep(name) for name in names}, of_inputs=True):
        return list(torch.autograd.grad(difference(MODEL(ids_of(OTHER)).logits), list(read.values())))


def test_07_factored_matrices_and_composition(pg: PatchableGraph) -> None:
    with statements(1):
        ov = pg.weights.W_OV[1, 3]
    with statements(1):
        qk = pg.weights.W_QK[3, 2]
    with statements(1):
        scores = composition_scores(pg, "K")
    joined = [block.attn.c_attn.weight.view(64, 3, 4, 16) for block in BLOCKS]
    outward = [block.attn.c_proj.weight.view(4, 16, 64) for block in BLOCKS]
    close(ov.product, joined[1][:, 2, 3] @ outward[1][3])
    close(ov.norm(), (joined[1][:, 2, 3] @ outward[1][3]).norm())
    close(ov.singular_values, torch.linalg.svdvals(joined[1][:, 2, 3] @ outward[1][3])[:16], 1e-3)
    close(qk.product, joined[3][:, 0, 2] @ joined[3][:, 1, 2].T)
    written, read = joined[0][:, 2, 1] @ outward[0][1], joined[3][:, 1, 2] @ joined[3][:, 0, 2].T
    close(scores.sel(layer=0, head=1, to_layer=3, to_head=2), (written @ read).norm() / written.norm() / read.norm())


class SparseAutoencoder(nn.Module):
    def __init__(self, features: int = 96) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, features), nn.Linear(features, 64)
        self.requires_grad_(False)

    def encode(self, value: Tensor) -> Tensor:
        return torch.relu(self.up(value))

    def decode(self, latents: Tensor) -> Tensor:
        return self.down(latents)


def test_08_ablation_of_every_feature_of_an_sae(pg: PatchableGraph) -> None:
    sae = SparseAutoencoder()
    with statements(2):
        spliced = pg.splice({"layers[1].resid_post": sae})
        effect = ablate(spliced, "layers[1].resid_post.sae.latents[*]", TEXT, metric=METRIC, **NO_PROGRESS)
    assert effect.shape == (1, 96)
    for feature in range(96):

        def without(value: Tensor, feature: int = feature) -> Tensor:
            return value - sae.encode(value)[..., feature, None] * sae.down.weight[:, feature]

        close(effect[0, feature], difference(logits_of(ids_of(TEXT), {"transformer.h.1": without})), 1e-3)


def test_09_steering_what_is_generated_in_a_padded_batch(pg: PatchableGraph) -> None:
    positive, negative = ([FRAME.format(*names) for names in each] for each in TO_MARY_AND_TO_JOHN)
    prompts = ["then Mary and John went", "so"]
    options = {"max_new_tokens": 3, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with statements(2):
        found = direction(pg, positive, negative, positions=-1, batch_size=2)
        steered = pg.edit(
            {"layers[2].resid_post": AddPatch(value=8 * found["layers[2].resid_post"], steps="decoding")}
        ).generate(prompts, **options)
    vector = difference_of_means(positive, negative)
    close(found["layers[2].resid_post"], vector)

    def steer(value: Tensor) -> Tensor:
        return value + 8 * vector if value.shape[1] == 1 else value

    inputs = TOKENIZER(prompts, return_tensors="pt", padding=True).to("cpu")
    with edited(MODEL, {"transformer.h.2": steer}):
        expected = MODEL.generate(inputs.input_ids, attention_mask=inputs.attention_mask, **options)
    assert torch.equal(steered, expected)
    assert not torch.equal(steered, pg.generate(prompts, **options))


TO_MARY_AND_TO_JOHN = (
    [("Mary", "John", "John"), ("John", "Mary", "John")],
    [("Mary", "John", "Mary"), ("John", "Mary", "Mary")],
)


def difference_of_means(positive: list[str], negative: list[str], layer: int = 2) -> Tensor:
    one, other = (
        values_of(ids_of(*texts), f"transformer.h.{layer}")[0][:, -1].mean(0) for texts in (positive, negative)
    )
    return one - other


def test_10_refusal_direction_removed_everywhere_and_from_the_weights(pg: PatchableGraph) -> None:
    positive, negative = ([FRAME.format(*names) for names in each] for each in TO_MARY_AND_TO_JOHN)
    with statements(2):
        found = direction(pg, positive, negative, positions=-1, batch_size=2)["layers[2].resid_post"]
        removed = pg.edit(project_out(pg, found))(positive).logits
    with statements(1):
        orthogonal = pg.edit(project_out(pg, found, weights=True))
    vector = difference_of_means(positive, negative)
    unit = vector / vector.norm()
    writers = ["transformer.wte", "transformer.wpe"]
    writers += [f"transformer.h.{layer}.{part}.c_proj" for layer in range(4) for part in ("attn", "mlp")]
    expected = logits_of(
        ids_of(*positive), {name: lambda value: value - (value @ unit)[..., None] * unit for name in writers}
    )
    close(removed, expected, 1e-3)
    close(orthogonal(positive).logits, expected, 1e-3)
    assert not torch.allclose(removed, MODEL(ids_of(*positive)).logits, atol=0.1)


def test_11_function_vectors_and_the_effect_of_each_head(pg: PatchableGraph) -> None:
    prompts = [FRAME.format("John", name, name) for name in NAMES[1:5]]
    other = FRAME.format("Anna", "Emma", "Anna")
    with statements(3):
        means = mean_values(pg, "layers[*].attn.heads[*].z", prompts, positions=-1, batch_size=4)
        effect = pg.sweep(
            {"path": list(means)},
            lambda path: {path: ReplacePatch(value=means[path], positions=-1)},
            other,
            metric=METRIC,
            **NO_PROGRESS,
        )
        vector = sum(
            means[f"layers[{layer}].attn.heads[{number}].z"] @ pg.weights.W_O[layer, number]
            for layer, number in effect.to_series().nlargest(3).index
        )
    names = [f"transformer.h.{layer}.attn.c_proj" for layer in range(4)]
    expected = [value[:, -1].mean(0).view(4, 16) for value in values_of(ids_of(*prompts), *names, of_inputs=True)]
    changed = {}
    for layer in range(4):
        for number in range(4):

            def replace(value: Tensor, at: tuple[int, int] = (layer, number)) -> Tensor:
                value = value.clone()
                value[:, -1, 16 * at[1] : 16 * at[1] + 16] = expected[at[0]][at[1]]
                return value

            changed[layer, number] = difference(logits_of(ids_of(other), {names[layer]: replace}, of_inputs=True))
            close(effect.sel(layer=layer, head=number), changed[layer, number])
    best = sorted(changed, key=lambda at: -changed[at])[:3]
    written = [
        expected[layer][number] @ BLOCKS[layer].attn.c_proj.weight.view(4, 16, 64)[number] for layer, number in best
    ]
    close(vector, sum(written))


def test_12_probes_with_accuracy_that_steer(pg: PatchableGraph, tmp_path: Path) -> None:
    triples = [(a, b, c) for a in NAMES for b in NAMES if a != b for c in (a, b)]
    texts, labels = (
        [FRAME.format(*names) for names in triples],
        [(b if a == c else a) in NAMES[:5] for a, b, c in triples],
    )
    with statements(2):
        found = probes(record_to(pg, tmp_path, "layers[*].resid_post", texts, batch_size=30), labels, positions=[9, 12])
        steered = pg.edit({"layers[1].resid_post": AddPatch(4 * found["layers[1].resid_post", 12].direction)})(TEXT)
    assert found.scores.accuracy.dims == ("path", "position")
    assert float(found.scores.accuracy.max()) > 0.9 > float(found.scores.random_labels.max())
    vector = found["layers[1].resid_post", 12].direction
    close(steered.logits, logits_of(ids_of(TEXT), {"transformer.h.1": lambda value: value + 4 * vector}))
    # On all examples, the probe says what its weights say of values by hooks.
    (values,) = values_of(ids_of(*texts), "transformer.h.3")
    probe = found["layers[3].resid_post", 12]
    said = values[:, 12] @ probe.weights.float() + probe.bias > 0
    assert (said == torch.tensor(labels)).float().mean() > 0.9
    assert torch.dot(probe.direction.float(), probe.weights.float()) > 0


def test_13_causal_tracing_with_noise_and_windows(pg: PatchableGraph) -> None:
    with statements(2):
        noise = Noise("@embed", positions=[2, 4], scale=0.5, samples=3)
        trace = causal_trace(pg, TEXT, noise, "layers[*].mlp_out", [4, 9, 12], METRIC, window=3, **NO_PROGRESS)
    names = [f"transformer.h.{layer}.mlp" for layer in range(4)]
    clean = values_of(ids_of(TEXT), *names)
    assert tokens(trace) == WORDS
    generator = torch.Generator().manual_seed(0)
    drawn = [0.5 * torch.randn(1, 2, 64, generator=generator) for _ in range(3)]

    def noisy(value: Tensor, draw: Tensor) -> Tensor:
        return value.index_add(1, torch.tensor([2, 4]), draw)

    for layer in range(4):
        for column, position in enumerate((4, 9, 12)):
            window = range(max(layer - 1, 0), min(layer + 2, 4))
            restored = {names[near]: putting(clean[near], (slice(None), position)) for near in window}
            runs = [
                logits_of(ids_of(TEXT), {**restored, "transformer.wte": functools.partial(noisy, draw=draw)})
                for draw in drawn
            ]
            close(trace[layer, column], torch.stack([difference(each) for each in runs]).mean())


def batch(size: int = 32) -> tuple[list[str], list[str], Tensor]:
    """Returns texts, texts with other names, and the answers to the latter."""
    drawn = [random.sample(NAMES, 4) for _ in range(size)]
    base, source = [FRAME.format(a, b, a) for a, b, _, _ in drawn], [FRAME.format(c, d, d) for _, _, c, d in drawn]
    return base, source, torch.tensor([TOKENIZER.encode(c)[1] for _, _, c, _ in drawn])


def loss(output: Any, answers: Tensor) -> Tensor:
    return cross_entropy(output.logits[:, -1], answers)


@pytest.mark.parametrize("kind", [DAS, BoundlessDAS], ids=["DAS", "boundless DAS"])
def test_14_interchange_in_a_trained_subspace(pg: PatchableGraph, kind: Any) -> None:
    random.seed(0), torch.manual_seed(0)
    batches = [batch() for _ in range(40)]
    base, source, answers = batch(64)
    size = (64, 8) if kind is DAS else (64,)
    with statements(3):
        trained = {"layers[2].resid_post": kind(*size)}
        fit(pg, trained, batches, loss, positions=-1, lr=0.02)
        said = intervene(pg, trained, base, source, positions=-1).logits[:, -1]
    module = trained["layers[2].resid_post"]
    (states,) = values_of(ids_of(*source), "transformer.h.2")

    def swap(value: Tensor) -> Tensor:
        return torch.cat([value[:, :-1], module(value[:, -1], states[:, -1])[:, None]], dim=1)

    close(said, logits_of(ids_of(*base), {"transformer.h.2": swap})[:, -1], 1e-3)
    assert (said.argmax(-1) == answers).float().mean() > 0.7


def test_14_representation_finetuning(pg: PatchableGraph) -> None:
    random.seed(0), torch.manual_seed(0)
    batches = [(batch()[0], torch.full((32,), TOKENIZER.encode("Otto")[1])) for _ in range(30)]
    with statements(3):
        reft = {"layers[2].resid_post": LoReFT(64, rank=1)}
        fit(pg, reft, batches, loss, positions=-1, lr=0.02)
        said = intervene(pg, reft, TEXT, positions=-1).logits[:, -1]
    module = reft["layers[2].resid_post"]
    edits = {"transformer.h.2": lambda value: torch.cat([value[:, :-1], module(value[:, -1:])], dim=1)}
    close(said, logits_of(ids_of(TEXT), edits)[:, -1], 1e-3)
    assert pg.to_str_tokens(said.argmax(-1)) == ["Otto"]


def test_15_attention_knockout_in_windows_of_layers(pg: PatchableGraph) -> None:
    windows = [range(2), range(1, 3), range(2, 4)]
    with statements(1):
        effect = pg.sweep(
            {"layers": windows},
            lambda layers: {
                f"layers[{n}].attn.scores": ReplacePatch(float("-inf"), slice=(..., -1, [2, 4])) for n in layers
            },
            TEXT,
            metric=METRIC,
            **NO_PROGRESS,
        )
    mask = torch.full((13, 13), float("-inf")).triu(1)
    blocked = mask.clone()
    blocked[-1, [2, 4]] = float("-inf")
    for found, layers in zip(effect, windows, strict=True):

        def block(module: nn.Module, args: Any, kwargs: Any, layers: Any = layers) -> Any:
            number = next(n for n in range(4) if BLOCKS[n].attn is module)
            return args, {**kwargs, "attention_mask": (blocked if number in layers else mask)[None, None]}

        with registered([each.attn.register_forward_pre_hook(block, with_kwargs=True) for each in BLOCKS]):
            close(found, difference(MODEL(ids_of(TEXT)).logits))


def test_16_clamping_capping_and_means_over_data(pg: PatchableGraph) -> None:
    reference = [FRAME.format(a, b, a) for a, b in itertools.pairwise(NAMES)]
    prompt = "then Mary and John went"
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with statements(1):
        clamped = pg.edit({"layers[1].mlp.post[:, :, 17]": ReplacePatch(value=9.0)})(TEXT).logits
    with statements(1):
        capped = pg.edit({"layers[*].mlp.post": CustomPatch(lambda post: post.clamp(max=0.3))}).generate(
            prompt, **options
        )
    with statements(1):
        means = ablate(pg, "layers[*].mlp_out", TEXT, metric=METRIC, method="mean", reference=reference, **NO_PROGRESS)
    names = [f"transformer.h.{layer}.mlp.c_proj" for layer in range(4)]
    expected = logits_of(
        ids_of(TEXT), {names[1]: lambda value: putting(torch.full_like(value, 9.0), (..., 17))(value)}, of_inputs=True
    )
    close(clamped, expected)
    with edited(MODEL, {name: lambda value: value.clamp(max=0.3) for name in names}, of_inputs=True):
        assert torch.equal(capped, MODEL.generate(ids_of(prompt), **options))
    assert not torch.equal(capped, MODEL.generate(ids_of(prompt), **options))
    for layer, value in enumerate(values_of(ids_of(*reference), *names)):
        edits = {names[layer]: lambda _, value=value: value.mean(0, keepdim=True)}
        close(means[layer], difference(logits_of(ids_of(TEXT), edits)))


def test_17_a_transcoder_in_place_of_an_mlp(pg: PatchableGraph) -> None:
    transcoder = SparseAutoencoder()
    with statements(1):
        replaced = pg.splice({("layers[1].ln2", "layers[1].mlp_out"): transcoder}, error=False)
    (read,) = values_of(ids_of(TEXT), "transformer.h.1.ln_2")
    edits = {"transformer.h.1.mlp": lambda _: transcoder.decode(transcoder.encode(read))}
    close(replaced(TEXT).logits, logits_of(ids_of(TEXT), edits))


def test_18_two_models_by_activations_and_weights(pg: PatchableGraph) -> None:
    tuned, _ = load("indirect_objects_model")
    tuned.transformer.h[1].attn.c_proj.weight *= 0.3
    other = PatchableGraph(tuned, TEXT, tokenizer=TOKENIZER)
    with statements(1):
        activations = other.record("layers[*].resid_post", TEXT).stack("resid_post") - pg.record(
            "layers[*].resid_post", TEXT
        ).stack("resid_post")
    with statements(1):
        weights = {
            path: torch.dist(weight, tuned.get_parameter(path)).item() for path, weight in MODEL.named_parameters()
        }
    with statements(1):
        patched = pg.edit(
            {path: ReplacePatch(value) for path, value in other.record("layers[1].attn_out", TEXT).items()}
        )(TEXT)
    ids = ids_of(TEXT)
    names = [f"transformer.h.{layer}" for layer in range(4)]
    for layer, value in enumerate(outputs(tuned, names, lambda: tuned(ids))):
        close(activations[layer], value - values_of(ids, names[layer])[0])
    assert [path for path, size in weights.items() if size] == ["transformer.h.1.attn.c_proj.weight"]
    (written,) = outputs(tuned, ["transformer.h.1.attn"], lambda: tuned(ids))
    close(patched.logits, logits_of(ids, {"transformer.h.1.attn": lambda _: written}))


def test_19_texts_to_disk_and_an_sae_trained_on_them(pg: PatchableGraph, tmp_path: Path) -> None:
    texts = [FRAME.format(a, b, c) for a in NAMES for b in NAMES if a != b for c in (a, b)]
    sae = SparseAutoencoder().requires_grad_()
    optimizer = torch.optim.Adam(sae.parameters(), lr=1e-2)
    with statements(1):
        store = record_to(pg, tmp_path, "layers[1].mlp_out", texts, batch_size=20)
    losses = []
    with statements(7):  # the loop
        for rows in torch.randperm(len(store["layers[1].mlp_out"])).split(65):
            values = store["layers[1].mlp_out"][rows]
            error = (sae.decode(sae.encode(values)) - values).square().mean()
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            losses.append(error.item())
    assert losses[-1] < losses[0]
    (expected,) = values_of(ids_of(*texts), "transformer.h.1.mlp")
    close(store["layers[1].mlp_out"][:], expected.flatten(0, 1))


def test_20_causal_scrubbing(pg: PatchableGraph) -> None:
    pairs = [("John", "Mary"), ("John", "Anna"), ("Mary", "John"), ("Mary", "Anna")]
    rows = [FRAME.format(one, two, two) for one, two in pairs]
    with statements(3):
        same = [1, 0, 3, 2]  # for each row, another one with the same answer
        scrubbed = pg.edit(
            {name: FromPatch(name, rows=same, positions=-1) for name in ("layers[2].attn_out", "layers[2].mlp_out")}
        )
        recovered = cross_entropy(scrubbed(rows).logits[:, -1], pg(rows).logits[:, -1].argmax(-1))

    def exchange(value: Tensor) -> Tensor:
        return torch.cat([value[:, :-1], value[same, -1:]], dim=1)

    logits = logits_of(ids_of(*rows), {"transformer.h.2.attn": exchange, "transformer.h.2.mlp": exchange})
    close(recovered, cross_entropy(logits[:, -1], MODEL(ids_of(*rows)).logits[:, -1].argmax(-1)))


def test_21_patchscopes_into_a_generation(pg: PatchableGraph) -> None:
    other = "then Emma and Noah went home"
    options = {"max_new_tokens": 3, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with statements(2):
        state = pg.record("layers[2].resid_post", TEXT, positions=-1)["resid_post", 2]
        said = pg.edit({"layers[0].resid_post": ReplacePatch(state, positions=-1, steps="prefill")}).generate(
            other, **options
        )
    (states,) = values_of(ids_of(TEXT), "transformer.h.2")

    def put_in(value: Tensor) -> Tensor:
        return torch.cat([value[:, :-1], states[:, -1:]], dim=1) if value.shape[1] > 1 else value

    with edited(MODEL, {"transformer.h.0": put_in}):
        assert torch.equal(said, MODEL.generate(ids_of(other), **options))
    assert not torch.equal(said, MODEL.generate(ids_of(other), **options))


def test_22_skipping_leaving_early_and_swapping_layers(pg: PatchableGraph) -> None:
    with statements(1):
        skipped = pg.edit({"layers[2].resid_post": SkipPatch()})(TEXT).logits
    with statements(1):
        early = pg.edit({"layers[3].resid_post": FromPatch("layers[1].resid_post")})(TEXT).logits
    with statements(1):
        swapped = pg.edit(
            {
                f"transformer.h_{to}.{path}": ReplacePatch(weight)
                for to, layer in ((1, 2), (2, 1))
                for path, weight in BLOCKS[layer].named_parameters()
            }
        )(TEXT).logits
    ids = ids_of(TEXT)
    before, after = values_of(ids, "transformer.h.2", of_inputs=True)[0], values_of(ids, "transformer.h.1")[0]
    close(skipped, logits_of(ids, {"transformer.h.2": lambda _: before}))
    close(early, MODEL.lm_head(MODEL.transformer.ln_f(after)), 1e-3)
    stream = values_of(ids, "transformer.drop")[0]
    for layer in (0, 2, 1, 3):
        stream = BLOCKS[layer](stream)
    close(swapped, MODEL.lm_head(MODEL.transformer.ln_f(stream[0] if isinstance(stream, tuple) else stream)), 1e-3)


def test_23_saliency_at_an_inner_value(pg: PatchableGraph) -> None:
    with statements(1):
        saliency = torch.autograd.functional.jacobian(
            lambda change: METRIC(pg.edit({"layers[1].resid_post": AddPatch(change)})(TEXT)), torch.zeros(1, 13, 64)
        )
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value.detach().requires_grad_())
        return kept[0]

    with edited(MODEL, {"transformer.h.1": keep}):
        (expected,) = torch.autograd.grad(difference(MODEL(ids_of(TEXT)).logits), kept)
    close(saliency, expected)
    assert saliency.abs().max() > 0.1


def test_24_another_intervention_for_each_row(pg: PatchableGraph) -> None:
    vector = torch.linspace(-1, 1, 64)
    with statements(1):
        together = pg.edit({"layers[1].mlp_out": [ZeroPatch(slice=1), AddPatch(vector, slice=2)]})([TEXT] * 3).logits
    edits = [lambda value: value, torch.zeros_like, lambda value: value + vector]
    for row, edit in zip(together, edits, strict=True):
        close(row, logits_of(ids_of(TEXT), {"transformer.h.1.mlp": edit})[0])


class HandWritten(nn.Module):
    """Attention without a module for its pattern."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.joined, self.out = embedding, nn.Linear(64, 192), nn.Linear(64, 62)

    def forward(self, input_ids: Tensor, sharpen: float | None = None) -> Tensor:
        query, key, value = self.joined(self.embedding(input_ids)).chunk(3, -1)
        weights = (query @ key.mT / 8).softmax(-1)
        if sharpen is not None:
            weights = weights**sharpen
        return self.out(weights @ value)


def test_25_a_value_inside_hand_written_attention() -> None:
    model = HandWritten(MODEL.transformer.wte).eval().requires_grad_(False)
    pg = PatchableGraph(model, TEXT, tokenizer=TOKENIZER)
    with statements(1):
        sharper = pg.edit({"weights": CustomPatch(lambda weights: weights**2)})(TEXT)
    close(sharper, model(ids_of(TEXT), sharpen=2))


def test_exercises_are_short() -> None:
    """Counts what stands in `with statements(n):`: functions and loops with what is in them."""
    blocks = [
        (node.items[0].context_expr.args[0].value, node)
        for node in ast.walk(ast.parse(Path(__file__).read_text("utf8")))
        if isinstance(node, ast.With) and ast.unparse(node.items[0].context_expr).startswith("statements(")
    ]
    assert len(blocks) > 40
    for asked, block in blocks:
        written = [each for line in block.body for each in ast.walk(line) if isinstance(each, ast.stmt)]
        assert len(written) <= asked, f"line {block.lineno}"
