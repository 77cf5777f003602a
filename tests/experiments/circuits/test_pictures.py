"""Pictures of circuits: where nodes and edges go, and the SVG."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from graphpatch_notebook.experiments import Circuit, Edge
from graphpatch_notebook.experiments.circuits.circuit import NODE_HEIGHT, lay_out

SVG = "{http://www.w3.org/2000/svg}"


def made(layers: int, heads: int, kept: int, seed: int = 0, kv_heads: int | None = None) -> Circuit:
    """A circuit of a decoder, of random edges."""
    kv_heads = kv_heads or heads
    senders, feeds, pairs = ["@embed"], {}, []
    for layer in range(layers):
        outputs = [f"layers[{layer}].attn.heads[{head}].z" for head in range(heads)]
        group = heads // kv_heads
        inputs = {f"layers[{layer}].attn.heads[{head}].q": (outputs[head],) for head in range(heads)}
        for kind, head in itertools.product("kv", range(kv_heads)):
            inputs[f"layers[{layer}].attn.heads[{head}].{kind}"] = tuple(outputs[head * group : (head + 1) * group])
        pairs += itertools.product(senders, inputs)
        senders += outputs
        pairs += [(sender, f"layers[{layer}].mlp") for sender in senders]
        senders.append(f"layers[{layer}].mlp_out")
        feeds |= inputs | {f"layers[{layer}].mlp": (senders[-1],)}
    pairs += [(sender, "@logits") for sender in senders]
    chooser = random.Random(seed)
    edges = [Edge(*pair, chooser.uniform(-1, 1)) for pair in pairs]
    edges.sort(key=lambda edge: -abs(edge.score))
    return Circuit(tuple(edges[:kept]), {**feeds, "@logits": ()}, len(edges), clean=2.0, corrupted=-1.0)


def placed(circuit: Circuit, count: int, seed: int = 0) -> Circuit:
    """The circuit with each edge at a random one of so many positions."""
    chooser = random.Random(seed)
    edges = tuple(replace(edge, position=chooser.randrange(count)) for edge in circuit.edges)
    return replace(circuit, edges=edges, tokens=tuple("abcdefgh"[:count]))


CIRCUITS = [made(1, 2, 3), made(3, 4, 40, 1), made(4, 8, 90, 2), made(3, 4, 50, 3, kv_heads=2), made(12, 12, 300, 4)]
CIRCUITS += [placed(made(2, 2, 12), 3), placed(made(3, 4, 50, 3, kv_heads=2), 5)]


@pytest.mark.parametrize("circuit", CIRCUITS, ids=lambda circuit: str(len(circuit.edges)))
def test_edges_go_upwards_and_nodes_do_not_overlap(circuit: Circuit) -> None:
    picture = lay_out(circuit)
    nodes = picture["nodes"]
    strongest = sorted(circuit.edges, key=lambda edge: -abs(edge.score))
    for each, edge in zip(picture["edges"], strongest, strict=True):
        assert (each["sender"], each["receiver"], each["score"]) == (edge.sender, edge.receiver, edge.score)
        sender, receivers = nodes[each["from"]], [nodes[number] for number in each["to"]]
        assert sender["name"] == edge.sender
        assert set() < {node["name"] for node in receivers} <= {*circuit.targets(edge.receiver)}
        assert {node["position"] for node in (sender, *receivers)} == {edge.position}
        numbers = [float(number) for number in re.findall(r"-?\d+\.\d", each["line"])]
        lowest, highest = max(numbers[1::2]), min(numbers[1::2])
        assert lowest == sender["y"] - NODE_HEIGHT / 2
        assert highest == min(node["y"] for node in receivers) + NODE_HEIGHT / 2 < lowest
    for node in nodes:
        assert node["width"] / 2 <= node["x"] <= picture["width"] - node["width"] / 2
        assert NODE_HEIGHT / 2 <= node["y"] <= picture["height"] - NODE_HEIGHT / 2
    for one, other in itertools.combinations(nodes, 2):
        assert one["y"] != other["y"] or abs(one["x"] - other["x"]) >= (one["width"] + other["width"]) / 2 + 15


def test_tokens_go_across() -> None:
    """The nodes of a position are in its column; dotted lines lead from keys and values to where their head writes."""
    circuit = placed(made(3, 4, 50, 3, kv_heads=2), 5)
    picture = lay_out(circuit)
    columns = picture["columns"]
    assert [column["label"] for column in columns] == ["a", "b", "c", "d", "e"]
    sides = [[], [], [], [], []]
    for node in picture["nodes"]:
        sides[node["position"]] += [node["x"] - node["width"] / 2, node["x"] + node["width"] / 2]
    for column, (one, other) in zip(columns, itertools.pairwise([*sides, [picture["width"]]]), strict=True):
        assert min(one) < column["x"] < max(one) < min(other)

    head = "layers[1].attn.heads[0]"
    feeds = {f"{head}.k": (f"{head}.z",), f"{head}.q": (f"{head}.z",), "@logits": ()}
    edges = (
        Edge("@embed", f"{head}.k", 1.0, 1),
        Edge("@embed", f"{head}.q", 1.0, 4),
        Edge(f"{head}.z", "@logits", 1.0, 4),
    )
    circuit = Circuit(edges, feeds, 9, clean=1.0, corrupted=0.0)
    picture = lay_out(circuit)
    nodes = {(node["name"], node["position"]): node for node in picture["nodes"]}
    assert set(nodes) == {("@embed", 1), ("@embed", 4), (f"{head}.z", 1), (f"{head}.z", 4), ("@logits", 4)}
    (link,) = picture["links"]
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d", link["line"])]
    first, last = nodes[f"{head}.z", 1], nodes[f"{head}.z", 4]
    assert [picture["nodes"][number] for number in link["ends"]] == [first, last]
    assert (numbers[0], numbers[-2]) == pytest.approx((first["x"] + first["width"] / 2, last["x"] - last["width"] / 2))
    texts = [text.text for text in ElementTree.fromstring(circuit.to_svg()).iter(f"{SVG}text")]
    assert texts.index("1") < texts.index("4")
    assert "attention across positions" in circuit.to_svg()
    # Where it writes before the position at which it reads, there is no line.
    earlier = replace(circuit, edges=(*edges, Edge(f"{head}.z", "@logits", 0.5, 0)))
    assert len(lay_out(earlier)["links"]) == 1


def test_an_edge_to_shared_keys_ends_at_each_of_the_heads_that_pass_something_on() -> None:
    feeds = {"layers[0].attn.heads[0].k": ("layers[0].attn.heads[0].z", "layers[0].attn.heads[1].z"), "@logits": ()}
    shared = Edge("@embed", "layers[0].attn.heads[0].k", 1.0)
    outs = [Edge(f"layers[0].attn.heads[{head}].z", "@logits", 0.5) for head in (0, 1)]
    for used in ([0], [1], [0, 1]):
        circuit = Circuit((shared, *(outs[head] for head in used)), feeds, 9, clean=1.0, corrupted=0.0)
        picture = lay_out(circuit)
        placed = next(one for one in picture["edges"] if one["receiver"] == shared.receiver)
        names = [picture["nodes"][number]["name"] for number in placed["to"]]
        assert names == [f"layers[0].attn.heads[{head}].z" for head in used]
        assert placed["line"].count("M") == len(used)


@pytest.mark.parametrize("count", [None, 5])
def test_the_svg_has_each_name_and_as_many_edges_as_asked(count: int | None) -> None:
    circuit = replace(made(3, 4, 40, 1), faithfulness=0.912)
    root = ElementTree.fromstring(circuit.to_svg(edges=count))
    kept = sorted(circuit.edges, key=lambda edge: -abs(edge.score))[:count]
    drawn = [line.find(f"{SVG}title").text for line in root.iter(f"{SVG}path") if line.get("class") == "edge"]
    assert sorted(drawn) == sorted(f"{edge.sender} → {edge.receiver}: {edge.score:+.4g}" for edge in kept)
    names = {node.find(f"{SVG}title").text for node in root.iter(f"{SVG}g") if node.get("class") == "node"}
    assert names == {*replace(circuit, edges=tuple(kept)).nodes}
    widths = [float(line.get("stroke-width")) for line in root.iter(f"{SVG}path") if line.get("class") == "edge"]
    assert widths == sorted(widths)  # strong edges are drawn last, over weak ones
    dashed = sum(path.get("stroke-dasharray") is not None for path in root.iter(f"{SVG}path") if path.get("class"))
    assert dashed == sum(edge.score < 0 for edge in kept)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    total = f"40 of {circuit.candidates} edges, faithfulness 0.912"
    assert texts[-1] == (total if count is None else f"{total}, the strongest 5 are shown")


def test_a_circuit_is_python_that_makes_the_same_circuit_and_a_file(tmp_path) -> None:
    circuit = CIRCUITS[1]
    text = circuit.to_svg(tmp_path / "circuit.svg")
    assert (tmp_path / "circuit.svg").read_text("utf8") == text
    assert not list(ElementTree.fromstring(replace(circuit, edges=()).to_svg()).iter(f"{SVG}path"))
    code, _, _ = circuit.to_python().partition("with pg.patch")
    namespace: dict = {}
    exec(code.replace(", circuit_patches", ""), namespace)
    assert namespace["circuit"] == circuit
