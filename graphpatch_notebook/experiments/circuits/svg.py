"""A circuit as SVG: for papers, and for readers without scripts."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from graphpatch_notebook.experiments.circuits.circuit import Circuit
from graphpatch_notebook.experiments.circuits.layout import (
    LETTER,
    NODE_HEIGHT,
    CircuitLayout,
    PlacedEdge,
    PlacedNode,
    lay_out,
)

POSITIVE, NEGATIVE = "#b04339", "#3669be"
"""The colors of edges that raise and lower the metric: both ends of the diverging colormap of heatmaps."""
_FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
_DASH = ' stroke-dasharray="8 4"'
_LINK = 'fill="none" stroke="#57606a" stroke-dasharray="2 4"'
_LEGEND, _LINE, _LEAST_WIDTH = 62.0, 24.0, 330.0


def svg_of(circuit: Circuit, most: int | None = None) -> str:
    """Returns a picture of a circuit, with at most `most` edges, as SVG with a white background."""
    shown = circuit.strongest(most)
    layout = lay_out(shown)
    width = max(layout.width, _LEAST_WIDTH)
    height = layout.height + _LEGEND + (_LINE if layout.links else 0)
    title = f"Circuit of {len(layout.edges)} edges between {len(layout.nodes)} components"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label={quoteattr(title)} '
        f'font-family="{_FONT}" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        *_bands(layout, width),
        *_tokens(layout),
        '<g fill="none" stroke-linecap="butt">',
        *(_edge(edge) for edge in reversed(layout.edges)),
        "</g>",
        *(line for node in layout.nodes for line in _node(node)),
        *_legend(layout, summary_of(circuit, len(shown.edges))),
        "</svg>",
    ]
    return "\n".join(lines)


def _bands(layout: CircuitLayout, width: float) -> Iterator[str]:
    for band in layout.bands:
        yield f'<rect x="0" y="{band.y:g}" width="{width:g}" height="{band.height:g}" fill="#f4f5f7"/>'
        middle = band.y + band.height / 2
        yield f'<text x="10" y="{middle + 4:g}" fill="#57606a">{escape(band.label)}</text>'


def _tokens(layout: CircuitLayout) -> Iterator[str]:
    for column in layout.columns:
        at = f'x="{column.x:g}" y="{layout.height - 10:g}"'
        yield f'<text class="token" {at} text-anchor="middle" fill="#57606a">{escape(column.label)}</text>'
    for link in layout.links:
        yield f'<path class="link" d="{link.line}" {_LINK}/>'


def _edge(placed: PlacedEdge) -> str:
    edge = placed.edge
    color, dash = (NEGATIVE, _DASH) if edge.score < 0 else (POSITIVE, "")
    return (
        f'<path class="edge" d="{placed.line}" stroke="{color}" stroke-width="{placed.width:g}" stroke-opacity="0.8"'
        f"{dash}><title>{escape(str(edge).replace('->', '→'))}</title></path>"
    )


def _node(node: PlacedNode) -> Iterator[str]:
    x, y = node.x - node.width / 2, node.y - NODE_HEIGHT / 2
    at = "" if node.position is None else f" at {node.position}"
    yield f'<g class="node"><title>{escape(node.name + at)}</title>'
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{node.width:.1f}" height="{NODE_HEIGHT:g}" rx="6" '
        'fill="#ffffff" stroke="#57606a"/>'
    )
    raised = 4 if node.ports else 0
    yield f'<text x="{node.x:.1f}" y="{node.y + 4 - raised:.1f}" text-anchor="middle">{escape(node.label)}</text>'
    for port in node.ports:
        at = f'x="{node.port_x(port):.1f}" y="{node.y + 14:.1f}"'
        yield f'<text {at} text-anchor="middle" font-size="10" fill="#57606a">{port}</text>'
    yield "</g>"


def _legend(layout: CircuitLayout, summary: str) -> Iterator[str]:
    if not layout.edges:
        return
    x, line = 14.0, layout.height + 18.0
    largest = max(abs(placed.edge.score) for placed in layout.edges)
    signs = {"−" if placed.edge.score < 0 else "+" for placed in layout.edges}
    for sign, color, dash in (("+", POSITIVE, ""), ("−", NEGATIVE, _DASH)):
        if sign not in signs:
            continue
        text = f"score {sign}{largest:.3g}"
        yield f'<path d="M{x:g} {line:g}h34" stroke="{color}" stroke-width="8" stroke-opacity="0.8"{dash}/>'
        yield f'<text x="{x + 42:g}" y="{line + 4:g}" fill="#24292f">{escape(text)}</text>'
        x += 64 + LETTER * len(text)
    if layout.links:
        line += _LINE
        yield f'<path d="M14 {line:g}h34" {_LINK}/>'
        yield f'<text x="56" y="{line + 4:g}" fill="#24292f">attention across positions</text>'
    yield f'<text x="14" y="{line + 30:g}" fill="#57606a">{escape(summary)}</text>'


def summary_of(circuit: Circuit, shown: int) -> str:
    """Returns a description of a circuit in one line, and how many edges are shown if these are not all."""
    return circuit.summary + (f", the strongest {shown} are shown" if shown < len(circuit.edges) else "")
