"""The picture of an attribution graph, and the graph as data: how features, tokens and errors make each other."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from graphpatch_notebook.errors import ExperimentError, UnknownPathError, warn_each_time
from graphpatch_notebook.experiments.circuits import circuit as circuits
from graphpatch_notebook.experiments.circuits.circuit import READABLE, Edge, LayoutRow, PictureNode, written_svg
from graphpatch_notebook.paths import nearest

Kind: TypeAlias = Literal["feature", "error", "embed", "logit"]
Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of an attribution graph: a value at one position.

    Attributes:
        name: The name of the value: `layers[2].mlp_out.sae.latents[17]`, `layers[2].mlp_out.sae.error`, `@embed`, or
            `@logits[42]`.
        position: Its position in the sequence.
        kind: `"feature"`, `"error"`, `"embed"` or `"logit"`.
        layer: The number of the layer; -1 for embeddings, and the number of layers for logits.
        value: The activation of a feature, or the probability of a logit.
        label: What pictures show.
        gain: By what share of itself a feature's activation grows, if one is added to what is linear in the stream.

    Example:
        >>> print(GraphNode("@embed", 4, "embed", -1, label="John"))
        John at 4
    """

    name: str
    position: int
    kind: Kind
    layer: int
    value: float = 0.0
    label: str = ""
    gain: float = 0.0

    def __str__(self) -> str:
        return f"{self.label or self.name} at {self.position}"


@dataclass(frozen=True, repr=False)
class AttributionGraph:
    """What the nodes of one prompt add to each other, as `attribution_graph` returns it.

    Attributes:
        nodes: Features, errors, embeddings and logits, in this order.
        weights: What each node adds to each other one, (to, from), in the units of what it adds to: a logit less the
            mean of all, the activation of a latent or of a gated neuron, or what the nonlinearity of another neuron
            reads.
        constants: What biases add to each node.
        left_out: What features add that are not nodes, since there are too many.
        completeness: The largest difference between a node and the sum of all that is added to it, relative to the sum
            of the magnitudes.
        tokens: The text of each position.
        skipped: Why parts of the model are not explained by features, by their names.
        groups: Names for nodes that belong together, with the numbers of these.

    Example:
        >>> token = GraphNode("@embed", 0, "embed", -1, label="the")
        >>> logit = GraphNode("@logits[5]", 0, "logit", 2, 0.9, "cat")
        >>> weights = np.array([[0.0, 0.0], [2.0, 0.0]], dtype=np.float32)
        >>> graph = AttributionGraph((token, logit), weights, np.zeros(2), np.zeros(2), completeness=0.0)
        >>> graph
        <AttributionGraph of 0 features, 0 errors, 1 embed, 1 logit; 1 edge, complete to 0.0e+00>
        the at 0 -> cat at 0: +2
        >>> graph.number("cat"), graph.predicted({0: 0.5})
        (1, array([ 0., -1.], dtype=float32))
    """

    nodes: tuple[GraphNode, ...]
    weights: Array
    constants: Array
    left_out: Array
    completeness: float
    tokens: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        strongest = "\n".join(
            f"{self.nodes[source]} -> {self.nodes[target]}: {self.weights[target, source]:+.4g}"
            for target, source in self.pairs()[:10]
        )
        return f"<AttributionGraph of {self.summary}>\n{strongest}"

    @property
    def summary(self) -> str:
        """What it has, in one line."""
        counts = {kind: sum(node.kind == kind for node in self.nodes) for kind in _TYPES}
        shown = ", ".join(f"{count:,} {kind}{'s' * (count != 1)}" for kind, count in counts.items())
        edges = f"{self.edge_count:,} edge{'s' * (self.edge_count != 1)}"
        return f"{shown}; {edges}, complete to {self.completeness:.1e}"

    @property
    def edge_count(self) -> int:
        """The number of edges."""
        return int(np.count_nonzero(self.weights))

    @property
    def length(self) -> int:
        """The number of positions."""
        return max(node.position for node in self.nodes) + 1

    def pairs(self) -> list[tuple[int, int]]:
        """Returns the pairs of nodes (to, from) that are connected, those with most influence on the logits first."""
        targets, sources = np.nonzero(self.weights)
        order = np.argsort(-self._edge_influence()[targets, sources], kind="stable")
        return list(zip(targets[order].tolist(), sources[order].tolist(), strict=True))

    def strongest(self, count: int | None) -> AttributionGraph:
        """Returns the graph with only the edges with most influence on the logits, and their nodes; `None` for all."""
        kept = np.zeros_like(self.weights, dtype=bool)
        for pair in self.pairs()[:count]:
            kept[pair] = True
        return self._with(kept.any(0) | kept.any(1), kept)

    def influence(self) -> Array:
        """Returns the influence of each node on the logits, directly and through others.

        It is the sum over all ways to a logit of the product of shares: the share of an edge is its magnitude among
        those of all edges into a node. Logits count by their probability.
        """
        shares, total = self._shares(), self._at_logits()
        wave = total @ shares
        found = wave.copy()
        while wave.any():
            wave = wave @ shares
            found += wave
        return found  # type: ignore[no-any-return]

    def pruned(self, nodes: float = 0.8, edges: float = 0.98) -> AttributionGraph:
        """Returns the graph with the nodes and edges that have most of the influence on the logits.

        Args:
            nodes: The share of the influence of all nodes that the kept ones have. Embeddings and logits are kept.
            edges: The share of the influence of all edges between these.

        Features and errors without an edge that leads on, and features without one that leads there, go, too. What
        is removed is added to `left_out`, so that sums stay what they are.
        """
        kinds = np.array([node.kind for node in self.nodes])
        influence, is_end = self.influence(), np.isin(kinds, ("embed", "logit"))
        is_kept = (influence >= _least(influence, nodes)) | is_end
        between = dataclasses.replace(self, weights=self.weights * np.outer(is_kept, is_kept))
        scores = between._edge_influence()
        kept = scores >= max(_least(scores.ravel(), edges), np.finfo(np.float32).tiny)
        while True:
            kept &= np.outer(is_kept, is_kept)
            leads_on, is_led_to = kept.any(0) | is_end, kept.any(1) | (kinds != "feature")
            if (is_kept <= leads_on & is_led_to).all():
                break
            is_kept &= leads_on & is_led_to
        return self._with(is_kept, kept)

    def number(self, name: str, position: int | None = None) -> int:
        """Returns the number of the node with a name or label, at a position if there are several.

        Raises:
            UnknownPathError: There is no such node, or several.
        """
        found = [
            number
            for number, node in enumerate(self.nodes)
            if name in (node.name, node.label) and position in (None, node.position)
        ]
        if len(found) != 1:
            where = "" if position is None else f" at {position}"
            if found:
                places = [self.nodes[number].position for number in found]
                raise UnknownPathError(f"{len(found)} nodes are called {name!r}{where}: give one of {places}")
            close = nearest(name, [node.label for node in self.nodes])
            raise UnknownPathError(f"no node {name!r}{where}; nearest: {close}")
        return found[0]

    def checked(self, factors: Mapping[int, float]) -> Mapping[int, float]:
        """Returns factors by the numbers of nodes, if they are of features, errors or embeddings.

        Raises:
            ExperimentError: They are not.
        """
        for number in factors:
            if type(number) is not int or not 0 <= number < len(self.nodes):
                raise ExperimentError(f"nodes have numbers from 0 to {len(self.nodes) - 1}, not {number!r}")
            if self.nodes[number].kind == "logit":
                raise ExperimentError(f"{self.nodes[number]} is a logit: give factors of features, errors, embeddings")
        return factors

    def predicted(self, factors: Mapping[int, float]) -> Array:
        """Returns the change of each node if some are multiplied by factors, in the units of `weights`.

        It is that of the frozen model, in which features pass on what they are changed by, and none falls silent or
        wakes up. Of what is multiplied, it is the change before that.

        Args:
            factors: By the numbers of features, errors or embeddings.

        Raises:
            ExperimentError: There are factors of others.
        """
        factors, change = self.checked(factors), np.zeros(len(self.nodes))
        shares = np.array([factors.get(number, 1.0) - 1.0 for number in range(len(self.nodes))])
        for number in sorted(range(len(self.nodes)), key=lambda number: self.nodes[number].layer):
            if self.nodes[number].kind in ("feature", "logit"):
                change[number] = self.weights[number] @ shares
                shares[number] = (1.0 + change[number] * self.nodes[number].gain) * (shares[number] + 1.0) - 1.0
        return change.astype(np.float32)

    def grouped(self, **groups: Sequence[int]) -> AttributionGraph:
        """Returns the graph with names for nodes that belong together, by their numbers, beside those that it has.

        Raises:
            ExperimentError: A group is empty, or has a node that the graph does not have, or that another group has.
        """
        own = {name: tuple(map(int, members)) for name, members in groups.items()}
        every = [number for members in {**self.groups, **own}.values() for number in members]
        if not all(own.values()) or len({*every}) < len(every) or not {*every} <= {*range(len(self.nodes))}:
            raise ExperimentError(f"groups have nodes from 0 to {len(self.nodes) - 1}, each in one group, not {own}")
        return dataclasses.replace(self, groups={**self.groups, **own})

    def merged(self) -> AttributionGraph:
        """Returns the graph with each group as one node, whose edges are sums.

        Its place is that of its last member.
        """
        owner, names = list(range(len(self.nodes))), dict[int, str]()
        for name, members in self.groups.items():
            last = max(members, key=lambda number: (self.nodes[number].layer, self.nodes[number].position))
            names[last] = name
            for number in members:
                owner[number] = last
        kept = sorted(set(owner))
        into = np.array([[one == each for one in owner] for each in kept], dtype=np.float32)
        weights = into @ self.weights @ into.T
        np.fill_diagonal(weights, 0.0)
        own = {n: dataclasses.replace(self.nodes[n], name=name, label=name) for n, name in names.items()}
        return dataclasses.replace(
            self,
            nodes=tuple(own.get(number, self.nodes[number]) for number in kept),
            weights=weights,
            constants=into @ self.constants,
            left_out=into @ self.left_out,
            groups={},
        )

    def picture(self) -> dict[str, Any]:
        """Returns the picture, as the front end draws it."""
        return lay_out_graph(self)

    def to_svg(self, file: str | os.PathLike[str] | None = None, *, edges: int | None = None) -> str:
        """Returns a picture for papers, as `Circuit.to_svg` does: layers upwards, tokens across, groups as one node."""
        return written_svg(self, file, edges)

    def _repr_svg_(self) -> str:
        return self.to_svg(edges=READABLE)

    def to_python(self) -> str:
        """Returns Python code that makes the graph."""
        return f'''\
from graphpatch_notebook.experiments import AttributionGraph

graph = AttributionGraph.from_json(r"""
{self.to_json()}
""")
'''

    def to_json(self, slug: str = "graph") -> str:
        """Returns the graph in the JSON format of Neuronpedia and circuit-tracer, with the edges that it has.

        Nodes have the additional field `name`; `metadata` has `completeness` and `skipped`.
        """
        ids = [_id(node, number) for number, node in enumerate(self.nodes)]
        groups = [[name, *(ids[each] for each in members)] for name, members in self.groups.items()]
        influence = self.influence()
        document = {
            "metadata": {
                "slug": slug,
                "scan": "graphpatch",
                "transcoder_list": [],
                "prompt_tokens": list(self.tokens),
                "prompt": " ".join(self.tokens),
                "schema_version": 1,
                "completeness": self.completeness,
                "skipped": dict(self.skipped),
            },
            "qParams": {"pinnedIds": [], "supernodes": groups, "linkType": "both", "clickedId": "", "sg_pos": ""},
            "nodes": [
                {
                    "node_id": own,
                    "jsNodeId": own,
                    "name": node.name,
                    "feature": _number_of(node.name),
                    "layer": _ENDS.get(node.kind, str(node.layer + (node.kind == "logit"))),
                    "ctx_idx": node.position,
                    "feature_type": _TYPES[node.kind],
                    "clerp": node.label,
                    "influence": float(share),
                    "activation": node.value if node.kind == "feature" else None,
                    "token_prob": node.value if node.kind == "logit" else 0.0,
                    "is_target_logit": node.kind == "logit",
                    "run_idx": 0,
                    "reverse_ctx_idx": 0,
                    "gain": node.gain,
                    "constant": float(constant),
                    "left_out": float(left_out),
                }
                for own, node, share, constant, left_out in zip(
                    ids, self.nodes, influence, self.constants, self.left_out, strict=True
                )
            ],
            "links": [
                {"source": ids[source], "target": ids[target], "weight": float(self.weights[target, source])}
                for target, source in self.pairs()
            ],
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> AttributionGraph:
        """Returns the graph in the JSON of `to_json`, of Neuronpedia, or of circuit-tracer.

        Those of other tools do not say what a feature is called here: its name is that of a transcoder at `mlp_out`.
        They may call an error of a layer and a feature of the first one the same, so that it is not known which of the
        two an edge comes from: a warning says so, and its weight is in `left_out`.

        Raises:
            ExperimentError: The text is not such a graph.
        """
        try:
            given = json.loads(text)
            metadata, nodes = given["metadata"], given["nodes"]
            ids = [str(node["node_id"]) for node in nodes]
            kinds = [node["feature_type"] for node in nodes]
            order = sorted(range(len(nodes)), key=lambda number: kinds[number] != _TYPES["error"])
            numbers = {ids[number]: number for number in order}  # nothing leads to an error
            weights = np.zeros((len(nodes), len(nodes)), dtype=np.float32)
            left_out = np.array([node.get("left_out", 0.0) for node in nodes], dtype=np.float32)
            unclear = {own for own, count in Counter(ids).items() if count > 1}
            for link in given["links"]:
                if link["source"] in unclear:
                    left_out[numbers[link["target"]]] += link["weight"]
                else:
                    weights[numbers[link["target"]], numbers[link["source"]]] = link["weight"]
            if unclear:
                warn_each_time(f"several nodes are called {sorted(unclear)}: their edges are left out", "experiment")
            supernodes = given.get("qParams", {}).get("supernodes", [])
            groups = {str(name): tuple(numbers[each] for each in own if each in numbers) for name, *own in supernodes}
            return cls(
                tuple(map(_read_node, nodes)),
                weights,
                np.array([node.get("constant", 0.0) for node in nodes], dtype=np.float32),
                left_out,
                float(metadata.get("completeness", math.nan)),
                tuple(map(str, metadata["prompt_tokens"])),
                dict(metadata.get("skipped", {})),
                groups,
            )
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ExperimentError(f"the text is not an attribution graph in Neuronpedia's format: {error!r}") from None

    def _with(self, is_kept: Any, kept: Any) -> AttributionGraph:
        rest = np.where(kept, 0, self.weights).sum(1)
        numbers = {int(old): new for new, old in enumerate(np.flatnonzero(is_kept))}
        return dataclasses.replace(
            self,
            nodes=tuple(self.nodes[old] for old in numbers),
            weights=np.where(kept, self.weights, 0)[np.ix_(is_kept, is_kept)],
            constants=self.constants[is_kept],
            left_out=(self.left_out + rest)[is_kept],
            groups={
                name: own
                for name, members in self.groups.items()
                if (own := tuple(numbers[each] for each in members if each in numbers))
            },
        )

    def _shares(self) -> Array:
        sizes = np.abs(self.weights)
        return sizes / np.maximum(sizes.sum(1, keepdims=True), 1e-10)  # type: ignore[no-any-return]

    def _edge_influence(self) -> Array:
        """Returns the influence of each edge: its share, times the influence of what it leads to."""
        return self._shares() * (self.influence() + self._at_logits())[:, None]

    def _at_logits(self) -> Array:
        return np.array([node.value if node.kind == "logit" else 0.0 for node in self.nodes], dtype=np.float32)


def _least(scores: Array, share: float) -> float:
    """Returns the smallest of the largest scores that together are a share of all."""
    order = np.sort(scores)[::-1]
    at = int(np.searchsorted(np.cumsum(order, dtype=np.float64) / max(order.sum(), 1e-30), share))
    return float(order[min(at, len(order) - 1)])


_TYPES: dict[Kind, str] = {
    "feature": "cross layer transcoder",
    "error": "mlp reconstruction error",
    "embed": "embedding",
    "logit": "logit",
}
"""What kinds are called in Neuronpedia's format."""
_ENDS = {"embed": "E"}


def _number_of(name: str) -> int:
    """Returns the number at the end of a name; -1 if it has none."""
    found = re.search(r"(\d+)\]$", name)
    return -1 if found is None else int(found[1])


def _id(node: GraphNode, number: int) -> str:
    """Returns what Neuronpedia's format calls a node: the layer, the feature and the position, in the form of kinds."""
    if node.kind == "error":
        return f"error_{node.layer}_{node.position}"
    if node.kind == "embed":
        return f"E_{node.position}_{node.position}"
    own = _number_of(node.name) if node.kind == "logit" or "latents[" in node.name else number
    return f"{node.layer + (node.kind == 'logit')}_{own}_{node.position}"


def _read_node(given: Mapping[str, Any]) -> GraphNode:
    kind = next(kind for kind, text in _TYPES.items() if text == given["feature_type"])
    words = str(given["node_id"]).split("_")
    layer = -1 if kind == "embed" else int(given["layer"]) - (kind == "logit")
    names: dict[Kind, str] = {
        "feature": f"layers[{layer}].mlp_out.sae.latents[{words[1]}]",
        "error": f"layers[{layer}].mlp_out.sae.error",
        "embed": "@embed",
        "logit": f"@logits[{words[1]}]",
    }
    value = float((given.get("token_prob") if kind == "logit" else given.get("activation")) or 0.0)
    gain = float(given.get("gain", 1 / value if kind == "feature" and value else 0.0))
    label = str(given.get("clerp") or f"{layer}.{words[1]}" if kind == "feature" else given.get("clerp") or kind)
    return GraphNode(str(given.get("name", names[kind])), int(given["ctx_idx"]), kind, layer, value, label, gain)


def _row_of(node: GraphNode) -> LayoutRow:
    return ("", node.layer if node.kind in ("feature", "error") else None, node.kind)


_BOW, _BOW_MORE = 12.0, 7.0
"""How far from a column's nodes an edge passes, and how much further for each row more."""


def _line(
    source: PictureNode, target: PictureNode, tops: Mapping[LayoutRow, float], column: Sequence[PictureNode]
) -> tuple[str, float]:
    """Returns the line of an edge, and how far right it gets: around the nodes between, if both are in one column.

    Straight, it would be hidden behind these, and behind other edges.
    """
    reach = max(node.width for node in column) / 2
    passed = len({node.row for node in column if tops[source.row] > tops[node.row] > tops[target.row]})
    if not passed or abs(source.x - target.x) > reach:
        return circuits.curve([source, target], tops), 0.0
    out = reach + _BOW + _BOW_MORE * passed
    start, end = tops[source.row] - circuits.NODE_HEIGHT / 2, tops[target.row] + circuits.NODE_HEIGHT / 2
    third = (start - end) / 3
    aside = (source.x + target.x) / 2 + out * 4 / 3  # a curve gets to 3/4 of where its two middle points are
    line = f"M{source.x:.1f} {start:.1f}C{aside:.1f} {start - third:.1f} {aside:.1f} {end + third:.1f} "
    return f"{line}{target.x:.1f} {end:.1f}", (source.x + target.x) / 2 + out


def lay_out_graph(graph: AttributionGraph) -> dict[str, Any]:
    """Returns the picture of a graph, in pixels: its `CircuitPicture`; groups are one node."""
    graph = graph.merged() if graph.groups else graph
    order = {"embed": 0, "error": 1, "feature": 1, "logit": 2}
    drawn = [
        PictureNode(node.name, node.label, circuits.width_of(node.label), _row_of(node), node.position)
        for node in graph.nodes
    ]
    layers = {_row_of(node): (order[node.kind], node.layer, node.kind) for node in graph.nodes}
    rows = {row: [node for node in drawn if node.row == row] for row in sorted(layers, key=layers.__getitem__)}
    pairs = graph.pairs()
    for target, source in pairs:
        drawn[source].near.append(drawn[target])
        drawn[target].near.append(drawn[source])
    positions = sorted({node.position for node in graph.nodes})
    centers = circuits.placed([*rows.values()], positions)
    tops, height = circuits.tops_of(list(rows))
    tokens = [graph.tokens[at] if at < len(graph.tokens) else str(at) for at in positions]
    largest = max((abs(float(graph.weights[pair])) for pair in pairs), default=1.0)
    at = {position: [node for node in drawn if node.position == position] for position in positions}
    lines = [_line(drawn[source], drawn[target], tops, at[graph.nodes[source].position]) for target, source in pairs]
    edges = [
        Edge(str(graph.nodes[source]), str(graph.nodes[target]), float(graph.weights[target, source]))
        for target, source in pairs
    ]
    ends = [node.x + node.width / 2 for node in drawn] + [end for _, end in lines]
    return {
        "width": round(max(ends, default=0.0) + circuits.MARGIN, 1),
        "height": height + circuits.TOKENS,
        "bands": circuits.bands_of(tops),
        "nodes": [
            {**circuits.drawn_node(one, tops[one.row]), "is_error": node.kind == "error"}
            for one, node in zip(drawn, graph.nodes, strict=True)
        ],
        "is_by_influence": True,
        "edges": [
            circuits.drawn_edge(edge, [source, target], circuits.thickness(edge.score, largest), line)
            for (target, source), edge, (line, _) in zip(pairs, edges, lines, strict=True)
        ],
        "columns": [{"label": token, "x": x} for token, x in zip(tokens, centers, strict=True)],
        "links": [],
    }
