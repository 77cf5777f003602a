"""Attribution graphs against hand-written models whose own code freezes what a graph freezes."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import ExperimentError, UnknownPathError
from graphpatch_notebook.experiments import AttributionGraph, attribute_score, attribution_graph, steer
from graphpatch_notebook.experiments.circuits import features
from graphpatch_notebook.experiments.circuits.features import linearized
from tests.tiny_models import gpt2

CAUSAL = ("dense", "grouped", "parallel", "post-norm")
KINDS = (*CAUSAL, "bidirectional")
WIDTH, HEADS, TOKENS, LENGTH, FEATURES = 16, 4, 20, 5, 24


class Norm(nn.Module):
    """A norm that notes its scale in `frozen`, or takes it from there."""

    def __init__(self, *, is_centered: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(WIDTH))
        self.bias = nn.Parameter(0.2 * torch.randn(WIDTH)) if is_centered else None

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.bias is None:
            return x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) if scale is None else scale) * self.weight
        x = x - x.mean(-1, keepdim=True)
        return (
            x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) if scale is None else scale) * self.weight
            + self.bias
        )

    def scale(self, x: Tensor) -> Tensor:
        x = x if self.bias is None else x - x.mean(-1, keepdim=True)
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.kind, self.groups = kind, 2 if kind == "grouped" else HEADS
        self.ln1, self.ln2 = (Norm(is_centered=kind != "grouped") for _ in range(2))
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, self.groups * size), nn.Linear(WIDTH, self.groups * size)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def scores(self, x: Tensor) -> Tensor:
        q, k = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k))
        scores = q @ k.repeat_interleave(HEADS // self.groups, 1).mT / 2
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return scores if self.kind == "bidirectional" else scores.masked_fill(later, -torch.inf)

    def attend(self, x: Tensor, pattern: Tensor) -> Tensor:
        v = self.v(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        return self.o((pattern @ v.repeat_interleave(HEADS // self.groups, 1)).transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "post-norm":
            x = x + self.ln1(self.attend(x, self.scores(x).softmax(-1)))
            return x + self.ln2(self.mlp(x))
        read = self.ln1(x)
        attended = self.attend(read, self.scores(read).softmax(-1))
        if self.kind == "parallel":
            return x + attended + self.mlp(self.ln2(x))
        x = x + attended
        return x + self.mlp(self.ln2(x))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))
        self.norm, self.head = Norm(is_centered=True), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Frozen:
    """The model with patterns and scales of one prompt, as a function of the embeddings and of what MLPs write."""

    def __init__(self, model: Model, ids: Tensor) -> None:
        self.model, self.patterns, self.scales = model, [], []
        x = self.embed = model.embed(ids)
        self.written: list[Tensor] = []
        for block in model.blocks:
            post = block.kind == "post-norm"
            read = x if post else block.ln1(x)
            self.patterns.append(block.scores(read).softmax(-1))
            attended = block.attend(read, self.patterns[-1])
            scales = [block.ln1.scale(attended if post else x)]
            middle = x + (block.ln1(attended) if post else attended)
            start = x if block.kind == "parallel" else middle
            written = block.mlp(start) if post else block.mlp(block.ln2(start))
            scales.append(block.ln2.scale(written if post else start))
            self.written.append(block.ln2(written) if post else written)
            x = middle + self.written[-1]
            self.scales.append(scales)
        self.last = model.norm.scale(x)

    def __call__(self, embed: Tensor, written: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Returns what each MLP reads, and the logits."""
        x, reads = embed, []
        for block, pattern, (one, two), write in zip(
            self.model.blocks, self.patterns, self.scales, written, strict=True
        ):
            post = block.kind == "post-norm"
            attended = block.attend(x if post else block.ln1(x, one), pattern)
            middle = x + (block.ln1(attended, one) if post else attended)
            start = x if block.kind == "parallel" else middle
            reads.append(start if post else block.ln2(start, two))
            x = middle + write
        return reads, self.model.head(self.model.norm(x, self.last))

    def change(
        self, embed: Tensor | None = None, layer: int = 0, write: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Returns how these change if the embeddings, or what one MLP writes, is added to nothing."""
        zero = torch.zeros_like(self.embed)
        written = [zero] * 3 if write is None else [write if n == layer else zero for n in range(3)]
        with torch.no_grad():
            (reads, logits), (none, nothing) = self(zero if embed is None else embed, written), self(zero, [zero] * 3)
        return [one - other for one, other in zip(reads, none, strict=True)], logits - nothing


class Transcoder(nn.Module):
    def __init__(self, *, has_skip: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)
        self.W_skip = nn.Parameter(0.2 * torch.randn(WIDTH, WIDTH)) if has_skip else None

    def encode(self, value: Tensor) -> Tensor:
        return torch.relu(self.encoder(value))

    def decode(self, latents: Tensor) -> Tensor:
        return self.decoder(latents)


def made(kind: str) -> tuple[Model, PatchableGraph, Tensor]:
    torch.manual_seed(KINDS.index(kind))
    model, ids = Model(kind).double().eval(), torch.randint(TOKENS, (1, LENGTH))
    return model, PatchableGraph(model, ids), ids


def places(kind: str) -> list[tuple[str, str]]:
    read = "resid_mid" if kind == "post-norm" else "ln2"
    return [(f"layers[{layer}].{read}", f"layers[{layer}].mlp_out") for layer in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_edge_is_a_change_of_the_frozen_model(kind: str) -> None:
    model, pg, ids = made(kind)
    frozen, saes = Frozen(model, ids), [Transcoder().double() for _ in range(3)]
    graph = attribution_graph(pg, ids, target=[3, 7], replacements=dict(zip(places(kind), saes, strict=True)))
    with torch.no_grad():
        reads, logits = frozen(frozen.embed, frozen.written)
        assert torch.allclose(logits, model(ids))
    assert graph.completeness < 1e-6
    effects = []
    for node in graph.nodes:
        write = torch.zeros(1, LENGTH, WIDTH, dtype=torch.float64)
        if node.kind == "embed":
            write[0, node.position] = frozen.embed[0, node.position].detach()
            effects.append(frozen.change(embed=write))
            continue
        if node.kind == "logit":
            effects.append(None)
            continue
        sae = saes[node.layer]
        with torch.no_grad():
            active = sae.encode(reads[node.layer])[0, node.position]
            write[0, node.position] = frozen.written[node.layer][0, node.position] - sae.decode(active)
            if node.kind == "feature":
                own = int(node.name.rpartition("[")[2][:-1])
                assert node.value == pytest.approx(float(active[own]))
                write[0, node.position] = active[own] * sae.decoder.weight[:, own]
        effects.append(frozen.change(layer=node.layer, write=write))
    for row, target in enumerate(graph.nodes):
        if target.kind not in ("feature", "logit"):
            assert not graph.weights[row].any()
            continue
        own = int(target.name.rpartition("[")[2][:-1])
        expected, total = [], 0.0
        for effect in effects:
            if effect is None:
                expected.append(0.0)
            elif target.kind == "logit":
                expected.append(float(effect[1][0, -1, own] - effect[1][0, -1].mean()))
            else:
                expected.append(
                    float(effect[0][target.layer][0, target.position] @ saes[target.layer].encoder.weight[own].detach())
                )
        np.testing.assert_allclose(graph.weights[row], expected, rtol=1e-5, atol=1e-6)
        total = graph.weights[row].sum(dtype=float) + graph.constants[row] + graph.left_out[row]
        value = float(logits[0, -1, own] - logits[0, -1].mean()) if target.kind == "logit" else target.value
        assert total == pytest.approx(value, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_neurons_stand_for_mlps_without_transcoders(kind: str) -> None:
    model, pg, ids = made(kind)
    frozen = Frozen(model, ids)
    graph = attribution_graph(pg, ids, target=3)
    assert graph.completeness < 1e-6
    reads, _ = frozen(frozen.embed, frozen.written)
    targets = [n for n, node in enumerate(graph.nodes) if node.kind == "feature" and node.layer == 2][::17]
    for source, node in list(enumerate(graph.nodes))[:: len(graph.nodes) // 12]:
        if node.kind != "feature":
            continue
        block, own = model.blocks[node.layer], int(node.name.rpartition(" ")[2][:-1])
        with torch.no_grad():
            neurons = nn.functional.gelu(block.up(reads[node.layer]))
            write = torch.zeros(1, LENGTH, WIDTH, dtype=torch.float64)
            write[0, node.position] = neurons[0, node.position, own] * block.down.weight[:, own]
            if kind == "post-norm":  # through the norm, with its scale held, without what it adds
                none = block.ln2(torch.zeros_like(write), frozen.scales[node.layer][1])
                write = block.ln2(write, frozen.scales[node.layer][1]) - none
            changed, logits = frozen.change(layer=node.layer, write=write)
        for target in targets:
            number = int(graph.nodes[target].name.rpartition(" ")[2][:-1])
            expected = float(changed[2][0, graph.nodes[target].position] @ model.blocks[2].up.weight[number].detach())
            assert graph.weights[target, source] == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert graph.weights[-1, source] == pytest.approx(
            float(logits[0, -1, 3] - logits[0, -1].mean()), rel=1e-4, abs=1e-6
        )


def test_a_skip_is_linear_and_its_sums_are_complete() -> None:
    _, pg, ids = made("dense")
    graph = attribution_graph(
        pg, ids, replacements={place: Transcoder(has_skip=True).double() for place in places("dense")}
    )
    assert graph.completeness < 1e-6
    without = attribution_graph(pg, ids, replacements={place: Transcoder().double() for place in places("dense")})
    assert without.completeness < 1e-6


class CrossLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(3, WIDTH, FEATURES))
        self.out = nn.Parameter(torch.randn(3, 3, FEATURES, WIDTH))

    def encode(self, read: Tensor) -> Tensor:
        return torch.relu(torch.einsum("lrd,ldf->lrf", read, self.into))

    def decode(self, latents: Tensor) -> Tensor:
        return torch.stack([sum(latents[one] @ self.out[one, at] for one in range(at + 1)) for at in range(3)])


def test_cross_layer_transcoders() -> None:
    model, pg, ids = made("dense")
    frozen, sae = Frozen(model, ids), CrossLayer().double()
    spliced = pg.splice({("layers[*].ln2", "layers[*].mlp_out"): sae}, across=True)
    graph = attribution_graph(spliced, ids, target=3)
    assert graph.completeness < 1e-6
    source = next(n for n, node in enumerate(graph.nodes) if node.kind == "feature" and node.layer == 0)
    node, total = graph.nodes[source], 0.0
    own = int(node.name.rpartition("[")[2][:-1])
    for layer in range(3):
        write = torch.zeros(1, LENGTH, WIDTH, dtype=torch.float64)
        write[0, node.position] = node.value * sae.out[0, layer, own].detach()
        logits = frozen.change(layer=layer, write=write)[1][0, -1]
        total += float(logits[3] - logits.mean())
    assert graph.weights[-1, source] == pytest.approx(total, rel=1e-5)


def test_what_is_spliced_in_must_be_a_transcoder() -> None:
    _, pg, ids = made("dense")
    with pytest.raises(ExperimentError, match=r"layers\[1\].mlp_out"):
        attribution_graph(pg.splice({"layers[1].mlp_out": Transcoder().double()}), ids)
    with pytest.raises(ExperimentError, match=r"layers\[1\].mlp_out"):
        attribution_graph(pg.splice({places("dense")[1]: Transcoder().double()}, error=False), ids)
    with pytest.raises(ExperimentError, match="rows?|row"):
        attribution_graph(pg, ids.expand(2, -1))
    with pytest.raises(ExperimentError, match="19"):
        attribution_graph(pg, ids, target=20)


def test_the_most_influential_features_are_chosen() -> None:
    _, pg, ids = made("dense")
    saes = {place: Transcoder().double() for place in places("dense")}
    whole, some = (attribution_graph(pg, ids, target=3, replacements=saes, max_nodes=most) for most in (1000, 40))
    assert sum(node.kind == "feature" for node in some.nodes) == 40
    known = {(node.name, node.position): number for number, node in enumerate(whole.nodes)}
    numbers = [known[node.name, node.position] for node in some.nodes]
    np.testing.assert_allclose(some.weights, whole.weights[np.ix_(numbers, numbers)], rtol=1e-5, atol=1e-7)
    sums = [graph.weights.sum(1) + graph.constants + graph.left_out for graph in (some, whole)]
    np.testing.assert_allclose(sums[0], sums[1][numbers], rtol=1e-4, atol=1e-5)
    kept = whole.influence()[[known[node.name, node.position] for node in some.nodes if node.kind == "feature"]]
    features = np.sort(whole.influence()[: sum(node.kind == "feature" for node in whole.nodes)])[::-1]
    assert kept.sum() > 0.9 * features[:40].sum()


def influence_of(weights: Tensor, ends: Tensor) -> Tensor:
    """All ways to the logits, by a matrix inverse."""
    shares = weights.abs() / weights.abs().sum(1, keepdim=True).clamp(min=1e-10)
    eye = torch.eye(len(weights), dtype=weights.dtype)
    return ends @ (torch.linalg.inv(eye - shares) - eye)


def test_influence_and_pruning() -> None:
    _, pg, ids = made("grouped")
    graph = attribution_graph(pg, ids, replacements={place: Transcoder().double() for place in places("grouped")})
    weights = torch.from_numpy(graph.weights).double()
    ends = torch.tensor([node.value if node.kind == "logit" else 0.0 for node in graph.nodes], dtype=torch.float64)
    np.testing.assert_allclose(graph.influence(), influence_of(weights, ends), rtol=1e-4, atol=1e-7)
    small = graph.pruned(0.7, 0.9)
    kinds = [node.kind for node in small.nodes]
    assert kinds.count("embed") == LENGTH
    assert 0 < kinds.count("feature") < sum(n.kind == "feature" for n in graph.nodes)
    for number, kind in enumerate(kinds):
        assert kind in ("embed", "logit") or small.weights[:, number].any()
        assert kind != "feature" or small.weights[number].any()
    known = {(node.name, node.position): number for number, node in enumerate(graph.nodes)}
    numbers = [known[node.name, node.position] for node in small.nodes]
    sums = [each.weights.sum(1) + each.constants + each.left_out for each in (small, graph)]
    np.testing.assert_allclose(sums[0], sums[1][numbers], rtol=1e-4, atol=1e-5)
    share = influence_of(weights, ends)
    kept = share[[number for number in numbers if graph.nodes[number].kind != "logit"]].sum() / share.sum()
    assert kept > 0.5
    whole = {(node.name, node.position) for node in graph.pruned(1.0, 1.0).nodes}
    for node, each in zip(graph.nodes, share, strict=True):
        assert (node.name, node.position) in whole or each < 1e-5


@pytest.mark.parametrize("has_transcoders", [True, False])
def test_a_frozen_run_answers_as_predicted(has_transcoders: bool) -> None:
    _, pg, ids = made("dense")
    saes: Any = {place: Transcoder().double() for place in places("dense")} if has_transcoders else None
    graph = attribution_graph(pg, ids, target=[3, 4], replacements=saes)
    feature = next(n for n, node in enumerate(graph.nodes) if node.kind == "feature" and node.position == 2)
    token = next(n for n, node in enumerate(graph.nodes) if node.kind == "embed" and node.position == 1)
    changes = steer(pg, graph, ids, factors={feature: 1 + 1e-5, token: 1 - 1e-5}, frozen=True, replacements=saes)
    predicted, actual = changes.sel(run="predicted"), changes.sel(run="actual")
    assert float(abs(predicted).max()) > 1e-7
    np.testing.assert_allclose(predicted, actual, atol=2e-3 * float(abs(predicted).max()))
    free = steer(pg, graph, ids, factors={feature: 1 + 1e-5}, replacements=saes).sel(run="actual")
    assert (
        float(
            abs(
                free
                - steer(pg, graph, ids, factors={feature: 1 + 1e-5}, frozen=True, replacements=saes).sel(run="actual")
            ).max()
        )
        > 0
    )
    with pytest.raises(ExperimentError, match="logit"):
        steer(pg, graph, ids, factors={len(graph.nodes) - 1: 0.0}, replacements=saes)


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_score_is_the_sum_of_what_makes_its_query_or_its_key(kind: str) -> None:
    model, pg, ids = made(kind)
    frozen = Frozen(model, ids)
    saes = {place: Transcoder().double() for place in places(kind)}
    parts = attribute_score(pg, ids, layer=1, head=2, query=4, key=1, replacements=saes)
    block = model.blocks[1]
    with torch.no_grad():
        x = model.blocks[0](frozen.embed)
        read = x if kind == "post-norm" else block.ln1(x)
        assert parts.attrs["score"] == pytest.approx(float(block.scores(read)[0, 2, 4, 1]))
    total = parts.sum("node").values + parts.attrs["constant"]
    np.testing.assert_allclose(total, parts.attrs["score"], rtol=1e-5)
    at = parts.position.values
    assert not parts.sel(side="query").values[at > 4].any()
    assert not parts.sel(side="key").values[at > 1].any()
    # What the embedding of the query's own position adds: a change of the query alone, of the frozen model.
    node = int(np.flatnonzero((parts.path.values == "@embed") & (at == 4))[0])
    write = torch.zeros_like(frozen.embed)
    write[0, 4] = frozen.embed[0, 4].detach()
    with torch.no_grad():
        first = model.blocks[0]
        if kind == "post-norm":
            stream = write + first.ln1(first.attend(write, frozen.patterns[0]), frozen.scales[0][0])
            stream = stream - first.ln1(first.attend(0 * write, frozen.patterns[0]), frozen.scales[0][0])
            query = block.q(stream) - block.q.bias
            key = block.k(x)
        else:
            normed = first.ln1(write, frozen.scales[0][0]) - first.ln1(0 * write, frozen.scales[0][0])
            stream = write + first.attend(normed, frozen.patterns[0]) - first.attend(0 * normed, frozen.patterns[0])
            query = (
                block.q(block.ln1(stream, frozen.scales[1][0]) - block.ln1(0 * stream, frozen.scales[1][0]))
                - block.q.bias
            )
            key = block.k(block.ln1(x))
        size = WIDTH // HEADS
        group = 2 // (HEADS // block.groups)
        expected = query[0, 4, 2 * size : 3 * size] @ key[0, 1, group * size : (group + 1) * size] / 2
    assert float(parts.sel(side="query")[node]) == pytest.approx(float(expected), rel=1e-5)


def test_json_is_that_of_neuronpedia() -> None:
    _, pg, ids = made("dense")
    graph = attribution_graph(
        pg, ids, target=3, replacements={place: Transcoder().double() for place in places("dense")}
    )
    small = graph.pruned(0.5, 0.9)
    features = [n for n, node in enumerate(small.nodes) if node.kind == "feature"]
    small = small.grouped(pair=features[:2])
    again = AttributionGraph.from_json(small.to_json())
    assert again.nodes == small.nodes
    assert again.groups == small.groups
    assert again.skipped == small.skipped
    for name in ("weights", "constants", "left_out"):
        np.testing.assert_array_equal(getattr(again, name), getattr(small, name))
    document = json.loads(small.to_json())
    assert {"metadata", "qParams", "nodes", "links"} <= {*document}
    assert len({node["node_id"] for node in document["nodes"]}) == len(small.nodes)
    for node in document["nodes"]:  # as other tools write it
        for own in ("name", "gain", "constant", "left_out"):
            del node[own]
    other = AttributionGraph.from_json(json.dumps(document))
    assert [(node.name, node.position, node.kind) for node in other.nodes] == [
        (node.name, node.position, node.kind) for node in small.nodes
    ]
    with pytest.raises(ExperimentError):
        AttributionGraph.from_json("{}")


def test_groups_are_one_node_whose_edges_are_sums() -> None:
    _, pg, ids = made("dense")
    graph = attribution_graph(
        pg, ids, target=3, replacements={place: Transcoder().double() for place in places("dense")}
    )
    members = [n for n, node in enumerate(graph.nodes) if node.kind == "feature" and node.layer == 1][:3]
    merged = graph.grouped(three=members).merged()
    assert len(merged.nodes) == len(graph.nodes) - 2
    number = merged.number("three")
    assert merged.weights[-1, number] == pytest.approx(graph.weights[-1, members].sum(), rel=1e-5)
    assert merged.weights[number].sum() == pytest.approx(graph.weights[members].sum(), rel=1e-5)
    assert graph.number(graph.nodes[4].name, graph.nodes[4].position) == 4
    for groups in ({"none": []}, {"far": [len(graph.nodes)]}, {"one": members, "other": members[:1]}):
        with pytest.raises(ExperimentError, match=str(len(graph.nodes) - 1)):
            graph.grouped(**groups)
    with pytest.raises(UnknownPathError, match="four"):
        graph.number("four")
    with pytest.raises(UnknownPathError, match="@embed"):
        graph.number("@embed")


def test_pictures_have_layers_upwards_and_tokens_across() -> None:
    _, pg, ids = made("dense")
    graph = attribution_graph(
        pg, ids, target=3, replacements={place: Transcoder().double() for place in places("dense")}
    )
    small = graph.strongest(30)
    picture = small.picture()
    assert len(picture["edges"]) == 30
    assert len(picture["nodes"]) == len(small.nodes)
    where = {node["name"] + str(node["position"]): node for node in picture["nodes"]}
    for one in small.nodes:
        for other in small.nodes:
            here, there = (where[each.name + str(each.position)] for each in (one, other))
            assert one.position >= other.position or here["x"] < there["x"]
            assert one.layer >= other.layer or here["y"] > there["y"]
    lines = [edge["line"] for edge in picture["edges"]]
    assert len(set(lines)) == len(lines)
    for edge in picture["edges"]:
        along = re.findall(r"-?[\d.]+", edge["line"])
        assert max(map(float, along[::2])) * 3 / 4 < picture["width"]
        assert picture["nodes"][edge["from"]]["y"] > picture["nodes"][edge["to"][0]]["y"]
    assert [node["is_error"] for node in picture["nodes"]] == [node.kind == "error" for node in small.nodes]
    assert picture["is_by_influence"]
    svg = graph.to_svg(edges=30)
    assert svg.count('class="edge"') == 30
    assert svg.count('fill="#d8dce1"') == sum(node.kind == "error" for node in small.nodes) > 0


def test_a_position_is_the_end_of_a_shorter_prompt() -> None:
    _, pg, ids = made("dense")
    found = []
    for given, position in ((ids, 2), (ids, 2 - LENGTH), (ids[:, :3], -1)):
        graph = attribution_graph(pg, given, target=3, position=position)
        assert graph.nodes[-1].position == 2
        edges = zip(graph.nodes, graph.weights[-1].tolist(), strict=True)
        found.append({(node.name, node.position): weight for node, weight in edges if weight})
    assert found[0] == found[1] == pytest.approx(found[2], rel=1e-5, abs=1e-7)
    with pytest.raises(ExperimentError, match="position"):
        attribution_graph(pg, ids, target=3, position=LENGTH)


def test_values_of_fused_projections_have_a_map_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys have no derivative, and are not computed with: the numbers are those of the whole map."""
    pg = PatchableGraph(gpt2(layers=2).double(), ids := torch.arange(LENGTH)[None])
    plan = linearized(pg, "")
    assert [*plan.slim] == ["layers[0].attn.v", "layers[1].attn.v"]
    graph = attribution_graph(pg, ids, target=3)
    monkeypatch.setattr(features, "_slim", lambda *_: None)
    assert not linearized(pg, "").slim
    whole = attribution_graph(pg, ids, target=3)
    np.testing.assert_allclose(graph.weights, whole.weights, rtol=1e-5, atol=1e-8)
