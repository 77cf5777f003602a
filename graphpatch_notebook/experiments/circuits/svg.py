"""A circuit as SVG: for papers, and for readers without scripts."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from graphpatch_notebook.experiments.circuits.circuit import Circuit
from graphpatch_notebook.experiments.circuits.layout import LETTER, NODE_HEIGHT, CircuitLayout, PlacedEdge, PlacedNode

POSITIVE, NEGATIVE = "#b04339", "#3669be"
"""The colors of edges that raise and lower the metric: both ends of the diverging colormap of heatmaps."""
_FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
_LEGEND = 44.0


def svg_of(layout: CircuitLayout, circuit: Circuit) -> str:
    """Returns a picture of a circuit as SVG, with white background."""
    width = max(layout.width, 470.0)
    height = layout.height + _LEGEND
    title = f"Circuit of {len(layout.edges)} edges between {len(layout.nodes)} components"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label={quoteattr(title)} '
        f'font-family="{_FONT}" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        *_bands(layout, width),
        '<g fill="none" stroke-linecap="butt">',
        *(_edge(edge, layout) for edge in reversed(layout.edges)),
        "</g>",
        *(line for node in layout.nodes for line in _node(node)),
        *_legend(layout, circuit, layout.height),
        "</svg>",
    ]
    return "\n".join(lines)


def _bands(layout: CircuitLayout, width: float) -> Iterator[str]:
    for band in layout.bands:
        yield f'<rect x="0" y="{band.y:g}" width="{width:g}" height="{band.height:g}" fill="#f4f5f7"/>'
        middle = band.y + band.height / 2
        yield f'<text x="10" y="{middle + 4:g}" fill="#57606a">{escape(band.label)}</text>'


def _edge(placed: PlacedEdge, layout: CircuitLayout) -> str:
    edge = placed.edge
    color, dash = (NEGATIVE, ' stroke-dasharray="6 4"') if edge.score < 0 else (POSITIVE, "")
    return (
        f'<path class="edge" d="{placed.line}" stroke="{color}" stroke-width="{placed.width:g}" stroke-opacity="0.8"'
        f"{dash}><title>{escape(f'{edge.sender} → {edge.receiver}: {edge.score:+.4g}')}</title></path>"
    )


def _node(node: PlacedNode) -> Iterator[str]:
    x, y = node.x - node.width / 2, node.y - NODE_HEIGHT / 2
    yield f'<g class="node"><title>{escape(node.name)}</title>'
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


def _legend(layout: CircuitLayout, circuit: Circuit, y: float) -> Iterator[str]:
    if not layout.edges:
        return
    largest = max(abs(edge.edge.score) for edge in layout.edges)
    name = "raises" if circuit.metric else "raises"
    x, line = 14.0, y + 18.0
    for score, color, dash in ((largest, POSITIVE, ""), (-largest, NEGATIVE, ' stroke-dasharray="6 4"')):
        text = f"{name if score > 0 else 'lowers'} the metric by {abs(score):.3g}"
        yield f'<path d="M{x:g} {line:g}h34" stroke="{color}" stroke-width="8" stroke-opacity="0.8"{dash}/>'
        yield f'<text x="{x + 42:g}" y="{line + 4:g}" fill="#24292f">{escape(text)}</text>'
        x += 60 + LETTER * len(text)
