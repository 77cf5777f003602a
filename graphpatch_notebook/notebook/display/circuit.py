"""The picture of a circuit: the widget, what the front end draws, and static HTML.

front end  -- pinned ---->  checked; sets `selected`
`selected` -- pinned ---->  front end

The front end is js/src/circuits/. It draws the layout of `experiments/circuits/circuit.py`, as `Circuit.to_svg` does.
The tree browser shows the same picture above the tree. A saved notebook shows the SVG, and a list of the strongest
edges where pages allow no pictures.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import traitlets

from graphpatch_notebook.experiments.circuits.circuit import NODE_HEIGHT, READABLE, Circuit, lay_out, summary_of
from graphpatch_notebook.notebook.display.displayed_widget import DisplayedWidget
from graphpatch_notebook.notebook.display.labels import escaped
from graphpatch_notebook.notebook.messages import Natural

_MOST_EDGES = 300
"""No more edges than this are sent, the strongest."""
_LISTED = 20


class CircuitView(DisplayedWidget):
    """An interactive picture of a circuit, which `show_circuit` returns.

    In a notebook, it displays as a widget, with a picture that replaces it without a kernel. Elsewhere, it is one line.

    Args:
        circuit: The circuit.

    Attributes:
        selected: What is pinned: the name of a component, such as `"layers[1].attn.heads[2].z"`, or the sender and
            receiver of an edge, as a tuple; `None` if nothing is. In circuits with positions, a tuple that ends with
            the position. Set it to pin something, and use `observe` to react to clicks.

    Example:
        >>> from graphpatch_notebook.experiments import Circuit, Edge, show_circuit
        >>> feeds = {"layers[0].mlp": ("layers[0].mlp_out",), "@logits": ()}
        >>> edges = (Edge("@embed", "layers[0].mlp", 2.0), Edge("layers[0].mlp_out", "@logits", 1.5))
        >>> view = show_circuit(Circuit(edges, feeds, candidates=3, clean=2.0, corrupted=0.0))
        >>> view
        <CircuitView of 2 of 3 edges>
        >>> view.selected = "layers[0].mlp_out"
        >>> view.close()
    """

    circuit = traitlets.Dict(read_only=True).tag(sync=True, echo_update=False)
    model_id = traitlets.Unicode(read_only=True).tag(sync=True, echo_update=False)
    pinned: Any = traitlets.List(default_value=None, allow_none=True).tag(sync=True)
    selected: Any = traitlets.Any(default_value=None)

    FRONT_END: ClassVar[Mapping[str, Any]] = {"pinned": tuple[str, Natural] | None}

    def __init__(self, circuit: Circuit) -> None:
        self._circuit = circuit
        state = picture_of(circuit)
        self.set_trait("circuit", state)
        self.set_trait("model_id", self._own_id)
        self._places: dict[Any, list[Any]] = {
            **{_key(node, "name"): ["node", number] for number, node in enumerate(state["nodes"])},
            **{_key(edge, "sender", "receiver"): ["edge", number] for number, edge in enumerate(state["edges"])},
        }
        super().__init__()

    # -- what is pinned ------------------------------------------------------------------------------------------------

    def _check(self, name: str, value: Any) -> None:
        super()._check(name, value)
        if value is not None and [*value] not in self._places.values():
            raise traitlets.TraitError(f"{value!r} is not in the picture")

    @traitlets.validate("pinned")
    def _checked_pinned(self, proposal: Any) -> Any:
        return self._checked(proposal)

    @traitlets.validate("selected")
    def _checked_selection(self, proposal: Any) -> Any:
        chosen = proposal["value"]
        if chosen is not None and chosen not in self._places:
            raise traitlets.TraitError(
                f"{chosen!r} is not in the picture; it shows {len(self._places)} components and edges, such as "
                + ", ".join(map(repr, list(self._places)[:3]))
            )
        return chosen

    @traitlets.observe("pinned")
    def _follow_pinned(self, change: Any) -> None:
        self.selected = next((name for name, place in self._places.items() if place == change["new"]), None)

    @traitlets.observe("selected")
    def _follow_selection(self, change: Any) -> None:
        self.pinned = None if change["new"] is None else self._places[change["new"]]

    # -- display -------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<CircuitView of {self._circuit.summary}>"

    def _static_html(self) -> str:
        return static_circuit(self._circuit)


def _key(item: dict[str, Any], *names: str) -> Any:
    """Returns what selects a node or an edge: a name, or a tuple."""
    words = tuple(item[name] for name in names)
    if item["position"] is not None:
        return (*words, item["position"])
    return words if len(words) > 1 else words[0]


def picture_of(circuit: Circuit, row_of: Callable[[str], int | None] = lambda _: None) -> dict[str, Any]:
    """Returns the `CircuitPicture` of the front end."""
    shown = circuit.strongest(_MOST_EDGES)
    picture = lay_out(shown)
    number = {node: index for index, node in enumerate(picture.nodes)}
    rows = [row_of(node.name) for node in picture.nodes]
    return {
        "width": picture.width,
        "height": picture.height,
        "bands": [{"label": label, "y": y, "height": height} for label, y, height in picture.bands],
        "nodes": [
            {
                "name": node.name,
                "label": node.label,
                "x": node.x,
                "y": node.y,
                "width": node.width,
                "height": NODE_HEIGHT,
                "ports": [[port, round(x, 1)] for port, x in node.ports.items()],
                "row": -1 if row is None else row,
                "position": node.position,
            }
            for node, row in zip(picture.nodes, rows, strict=True)
        ],
        "edges": [
            {
                "sender": drawn.edge.sender,
                "receiver": drawn.edge.receiver,
                "score": drawn.edge.score,
                "position": drawn.edge.position,
                "from": number[drawn.sender],
                "to": [number[node] for node in drawn.receivers],
                "thickness": drawn.width,
                "line": drawn.line,
            }
            for drawn in picture.edges
        ],
        "columns": [{"label": label, "x": x} for label, x in picture.columns],
        "links": [{"ends": [number[one], number[other]], "line": line} for one, other, line in picture.links],
        "first": min(READABLE, len(shown.edges)),
        "summary": summary_of(circuit, len(shown.edges)),
        "python": circuit.to_python(),
        "json": circuit.to_json(),
    }


def static_circuit(circuit: Circuit) -> str:
    """Returns HTML with the picture of a circuit, and a list of its strongest edges, which pages may show instead."""
    picture = base64.b64encode(circuit.to_svg(edges=READABLE).encode()).decode()
    edges = circuit.strongest(_LISTED).edges
    rows = "".join(
        f"<li><code>{escaped(edge.sender)}</code> → <code>{escaped(edge.receiver)}</code>"
        f"{'' if edge.position is None else f' at {edge.position}'}: {edge.score:+.3g}</li>\n"
        for edge in edges
    )
    return (
        f"<p><strong>Circuit: {escaped(circuit.summary)}</strong> (a picture; for the live one, run the cell)</p>\n"
        f'<img alt="The circuit as a graph" src="data:image/svg+xml;base64,{picture}">\n'
        f"<details><summary>The strongest {len(edges)} edges</summary>\n<ol>\n{rows}</ol>\n</details>"
    )
