"""A circuit as data: some edges between the components of a model, with their scores.

`attribute_edges` describes the senders and receivers at the ends of edges. `Circuit.feeds` connects the two: which
senders are computed from a receiver.

An edge may belong to one position in the sequence: it passes on what the sender writes there. A sender at a position is
computed from queries and inputs of MLPs at the same position, and from other receivers (keys, values, mixers) at any.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from graphpatch_notebook.errors import ExperimentError

_FORMAT = "graphpatch circuit 1"
_LISTED = 10
READABLE = 60
"""The largest number of edges in a picture at first, the strongest ones: more are hard to distinguish."""


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge of a circuit.

    Attributes:
        sender: What is passed on: the name of a component's output.
        receiver: What reads it: the name of a component's input.
        score: The effect of the edge on the metric, as estimated by the method of the scores.
        position: The position of what is passed on; `None` for all of them.

    Example:
        >>> Edge("@embed", "layers[0].mlp", 2.0).receiver
        'layers[0].mlp'
    """

    sender: str
    receiver: str
    score: float
    position: int | None = None

    def __str__(self) -> str:
        at = "" if self.position is None else f" at {self.position}"
        return f"{self.sender} -> {self.receiver}{at}: {self.score:+.4g}"


@dataclass(frozen=True, repr=False)
class Circuit:
    """Some edges between the components of a model, as `circuit` returns them.

    Attributes:
        edges: The edges, largest magnitude of the score first.
        feeds: For each receiver of the model, the senders that are computed from it; empty for `@logits`.
        candidates: How many edges the model has.
        clean: The metric of the run on the clean inputs.
        corrupted: The metric of the run on the corrupted inputs.
        method: How the scores were computed.
        metric: The name of the metric.
        faithfulness: The share of `clean - corrupted` that remains if only these edges pass on what differs between
            the two runs; `None` if it was not measured. Pictures show it: `dataclasses.replace(circuit,
            faithfulness=0.9)`.
        tokens: The text of each position, for pictures of edges with positions; numbers if it is empty.
        missing: Why there are no edges to, or from, whole components: they read what all others write.
        ahead: The attention that is not causal, `layers[2].attn`: it reads keys and values at later positions, too. It
            is known for circuits of scores with positions.

    Example:
        >>> circuit = Circuit(
        ...     edges=(Edge("@embed", "layers[0].mlp", 2.0), Edge("layers[0].mlp_out", "@logits", 1.5)),
        ...     feeds={"layers[0].mlp": ("layers[0].mlp_out",), "@logits": ()},
        ...     candidates=3, clean=2.0, corrupted=0.0,
        ... )
        >>> circuit.nodes
        ('@embed', 'layers[0].mlp_out', '@logits')
        >>> circuit
        <Circuit of 2 of 3 edges>
        @embed -> layers[0].mlp: +2
        layers[0].mlp_out -> @logits: +1.5
        >>> Circuit.from_json(circuit.to_json()) == circuit
        True
    """

    edges: tuple[Edge, ...]
    feeds: Mapping[str, tuple[str, ...]]
    candidates: int
    clean: float
    corrupted: float
    method: str = ""
    metric: str = ""
    faithfulness: float | None = None
    tokens: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    ahead: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shown = self.strongest(_LISTED).edges
        lines = [str(edge) for edge in shown]
        more = [f"... and {len(self.edges) - len(shown)} more"] if len(shown) < len(self.edges) else []
        return "\n".join([f"<Circuit of {self.summary}>", *lines, *more])

    @property
    def summary(self) -> str:
        """How many edges it has, of how many, and its faithfulness if it is known."""
        known = "" if self.faithfulness is None else f", faithfulness {self.faithfulness:.3g}"
        return f"{len(self.edges):,} of {self.candidates:,} edges{known}"

    def strongest(self, count: int | None) -> Circuit:
        """Returns the circuit with only the `edges` with the largest scores; `None` for all."""
        if count is None or len(self.edges) <= count:
            return self
        return replace(self, edges=tuple(sorted(self.edges, key=lambda edge: -abs(edge.score))[:count]))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The components at both ends of edges, in the order of the model: senders by their names, and `@logits`."""
        used = {edge.sender for edge in self.edges}
        for edge in self.edges:
            used |= set(self.targets(edge.receiver))
        order = [sender for senders in self.feeds.values() for sender in senders]
        starts = [edge.sender for edge in self.edges if edge.sender not in order]
        ends = [receiver for receiver, senders in self.feeds.items() if not senders]
        return tuple(name for name in dict.fromkeys((*starts, *order, *ends)) if name in used)

    def targets(self, receiver: str) -> tuple[str, ...]:
        """Returns the nodes that a receiver belongs to: the senders that are computed from it, or else itself."""
        return self.feeds[receiver] or (receiver,)

    def without_dead_ends(self) -> Circuit:
        """Returns the circuit without edges that change nothing.

        An edge is kept if it is on a way from a sender that no receiver feeds (the embeddings) to a receiver that
        feeds no sender (the logits). All are kept if there are `missing` components, as any edge may lead into one.

        Example:
            >>> feeds = {"layers[0].mlp": ("layers[0].mlp_out",), "@logits": ()}
            >>> edges = (Edge("layers[0].mlp_out", "@logits", 1.5),)
            >>> Circuit(edges, feeds, candidates=3, clean=2.0, corrupted=0.0).without_dead_ends().edges
            ()
        """
        if self.missing:
            return self
        edges = list(self.edges)
        fed = {sender for senders in self.feeds.values() for sender in senders}
        while True:
            reached = {(sender, place_of(edge)) for edge in edges for sender in self.feeds[edge.receiver]}
            used = {(edge.sender, at) for edge in edges for at in (edge.position, None)}
            kept = [
                edge
                for edge in edges
                if (
                    edge.sender not in fed
                    or not reached.isdisjoint([(edge.sender, edge.position), (edge.sender, None)])
                )
                and (
                    not self.feeds[edge.receiver]
                    or any((sender, place_of(edge)) in used for sender in self.feeds[edge.receiver])
                )
            ]
            if len(kept) == len(edges):
                return replace(self, edges=tuple(kept)) if len(kept) < len(self.edges) else self
            edges = kept

    def to_json(self) -> str:
        """Returns the circuit as JSON."""
        document = {
            "format": _FORMAT,
            **{each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("edges", "feeds")},
            "missing": dict(self.missing),
            "edges": [
                [edge.sender, edge.receiver, edge.score, *(() if edge.position is None else (edge.position,))]
                for edge in self.edges
            ],
            "feeds": dict(self.feeds),
        }
        return json.dumps(document, indent=1)

    def to_python(self, graph: str = "pg", inputs: str = "clean", corrupted: str = "corrupted") -> str:
        """Returns Python code that makes the circuit, and runs the model with only its edges.

        The arguments are the variables of the `PatchableGraph`, and of the clean and the corrupted inputs.
        """
        return f'''\
from graphpatch_notebook.experiments import Circuit, circuit_patches

circuit = Circuit.from_json(r"""
{self.to_json()}
""")
with {graph}.patch(circuit_patches({graph}, circuit, {corrupted})):
    output = {graph}({inputs})
'''

    def to_svg(self, file: str | os.PathLike[str] | None = None, *, edges: int | None = None) -> str:
        """Returns a picture of the circuit for papers, and writes it to a file if `file` is given.

        Layers go upwards; if edges have positions, tokens go across, with dotted lines from where a component reads
        keys and values to the later positions at which it writes (to all if it is not causal). The width of an edge is
        proportional to the magnitude of its score; negative scores are blue and dashed. Fonts are not embedded.

        Args:
            file: The name of the file, such as `"circuit.svg"`.
            edges: Draws only this many of the strongest edges.

        Returns:
            The SVG as text.

        Example:
            >>> feeds = {"layers[0].mlp": ("layers[0].mlp_out",), "@logits": ()}
            >>> edges = (Edge("@embed", "layers[0].mlp", 2.0), Edge("layers[0].mlp_out", "@logits", 1.5))
            >>> Circuit(edges, feeds, candidates=3, clean=2.0, corrupted=0.0).to_svg()[:4]
            '<svg'
        """
        from graphpatch_notebook.experiments.circuits.picture import svg_of

        text = svg_of(self, edges)
        if file is not None:
            Path(file).write_text(text, encoding="utf8")
        return text

    def _repr_svg_(self) -> str:
        return self.to_svg(edges=READABLE)

    @classmethod
    def from_json(cls, text: str) -> Circuit:
        """Returns the circuit that `to_json` wrote.

        Raises:
            ExperimentError: The text is not a circuit.
        """
        try:
            given: dict[str, Any] = json.loads(text)
            if given.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT!r}")
            edges = tuple(Edge(str(s), str(r), float(score), *map(int, at)) for s, r, score, *at in given.pop("edges"))
            feeds = {str(name): tuple(map(str, senders)) for name, senders in given.pop("feeds").items()}
            given |= {name: tuple(map(str, given.get(name, ()))) for name in ("tokens", "ahead")}
            circuit = cls(edges, feeds, **given)
            circuit.check()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ExperimentError(f"the text is not a circuit: {error}") from None
        return circuit

    def check(self) -> None:
        """Raises a `ValueError` if an edge has a receiver that is not among `feeds`, or is there twice."""
        pairs = [(edge.sender, edge.receiver, edge.position) for edge in self.edges]
        if unknown := {edge.receiver for edge in self.edges}.difference(self.feeds):
            raise ValueError(f"the receivers {sorted(unknown)} are not among its receivers")
        if len({position is None for _, _, position in pairs}) > 1 or len(set(pairs)) < len(pairs):
            raise ValueError("it has an edge twice, or some of its edges have positions, and others have none")


def place_of(edge: Edge) -> int | None:
    """Returns the position of the senders that an edge leads to; `None` for any."""
    return edge.position if is_local(edge.receiver) else None


def is_local(receiver: str) -> bool:
    """Whether a receiver leads to senders at its own position only; later positions read keys and values, too."""
    return receiver.rpartition(".")[2] in ("q", "mlp")
