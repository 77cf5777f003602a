"""Feature pages as HTML: without scripts, so that saved notebooks, GitHub and mail show them as kernels do."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from graphpatch_notebook.texts import token_text

if TYPE_CHECKING:
    from graphpatch_notebook.experiments.datasets.feature_pages import FeaturePage

_Array: TypeAlias = "np.ndarray[Any, Any]"
_MOST_LINES = 8
_BEFORE, _AFTER = 40, 15
"""How many tokens around the peak are shown."""
_WIDTH, _HEIGHT = 320, 90
_POSITIVE, _NEGATIVE = "217,95,2", "94,87,178"
_TABLE = "border-collapse:collapse;color:inherit;font-family:monospace;font-size:12px;text-align:left"


def page_html(page: FeaturePage) -> str:
    """Returns a page as HTML. Its colors can be read on a light and on a dark background."""
    active = f"active at {page.density:.2%} of {page.positions:,} positions"
    scale = max((float(np.abs(row).max()) for row in page.activations if len(row)), default=0.0) or 1.0
    logits = [
        [(token_text(page.tokenizer, token).replace(" ", "␣"), effect) for token, effect in pairs]
        for pairs in (page.promoted, page.suppressed)
    ]
    parts = [
        _histogram(page),
        _table("Raises" if logits[0] else "Logits", logits[0], page.unknown),
        _table("Lowers", logits[1], ""),
        _table("Written by heads" if page.heads else "Written by", page.heads, page.unread),
        _table("Written by features", page.features, ""),
    ]
    rows = "".join(_example(page, number, scale) for number in range(len(page.examples)))
    return (
        f'<div style="font-size:13px;line-height:1.5;max-width:1000px"><div><b>{_text(page.name)}</b> '
        f'<span style="opacity:.7">{active}</span></div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:24px;margin:8px 0">{"".join(parts)}</div>{rows}</div>'
    )


def _text(text: str) -> str:
    """Returns a text on one line, with spaces and line breaks that are seen."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    return html.escape(shown)


def _table(title: str, pairs: Sequence[tuple[str, float]], why: str) -> str:
    if not pairs:
        return f'<div style="max-width:20em;opacity:.7">{title}: {_text(why)}</div>' if why else ""
    rows = "".join(
        f'<tr><td style="text-align:left;white-space:pre;padding:0 12px 0 0">{_text(name)}</td>'
        f'<td style="text-align:right">{value:+.3g}</td></tr>'
        for name, value in pairs
    )
    return f'<table style="{_TABLE}"><tr><th colspan="2" style="text-align:left">{title}</th></tr>{rows}</table>'


def _histogram(page: FeaturePage) -> str:
    """Returns bars on a logarithmic scale: most features are zero at most positions."""
    heights = np.log1p(page.counts) / np.log1p(max(1, int(page.counts.max()))) * _HEIGHT
    step = _WIDTH / len(heights)
    bars = "".join(
        f'<rect x="{number * step:.1f}" y="{_HEIGHT - height:.1f}" width="{max(step - 1, 0.5):.1f}" '
        f'height="{height:.1f}" fill="rgb({_POSITIVE if page.edges[number] >= 0 else _NEGATIVE})">'
        f"<title>{page.edges[number]:.4g} to {page.edges[number + 1]:.4g}: {count:,}</title></rect>"
        for number, (height, count) in enumerate(zip(heights, page.counts.tolist(), strict=True))
    )
    ends = "".join(
        f'<text x="{x}" y="{_HEIGHT + 14}" text-anchor="{anchor}" fill="currentColor" font-size="11">{edge:.3g}</text>'
        for x, anchor, edge in ((0, "start", page.edges[0]), (_WIDTH, "end", page.edges[-1]))
    )
    return (
        f'<div><svg width="{_WIDTH}" height="{_HEIGHT + 18}" role="img" aria-label="histogram of activations">{bars}'
        f'{ends}</svg><div style="opacity:.7;font-size:11px">Activations (bars: logarithm of the count)</div></div>'
    )


def _color(activation: float, scale: float) -> str:
    share = min(abs(activation) / scale, 1.0)
    return f"background:rgba({_POSITIVE if activation > 0 else _NEGATIVE},{0.75 * share:.2f})" if share > 0.01 else ""


def _example(page: FeaturePage, number: int, scale: float) -> str:
    activations = page.activations[number]
    title = f"example {page.examples[number]}, up to {page.peaks[number]:.4g}"
    if page.tokens is None:
        shown = _input(page.inputs[number].float().numpy()) + _strip(activations, scale)
    else:
        shown = _tokens(page, page.tokens[number], activations, page.peaks[number], scale)
    return (
        f'<div style="display:flex;gap:12px;align-items:center;border-top:1px solid #8884;padding:4px 0" '
        f'title="{title}"><span style="flex:none;width:5em;text-align:right;font-family:monospace">'
        f"{page.peaks[number]:.3g}</span><div>{shown}</div></div>"
    )


def _tokens(page: FeaturePage, tokens: _Array, activations: _Array, peak: float, scale: float) -> str:
    """Returns the tokens around the peak, colored by the activation; without colors, if there is one for all."""
    texts = [_text(token_text(page.tokenizer, token)) for token in tokens.tolist()]
    if len(activations) != len(texts):
        return " ".join(texts)
    center = int(np.nanargmin(np.abs(activations - peak)))
    window = range(max(0, center - _BEFORE), min(len(texts), center + _AFTER))
    spans = [
        f'<span style="white-space:pre-wrap;border-radius:2px;padding:0 2px;{_color(activations[at], scale)}" '
        f'title="{activations[at]:.4g}">{texts[at]}</span>'
        for at in window
    ]
    before, after = ("…" if window.start else ""), ("…" if window.stop < len(texts) else "")
    return before + "<wbr>".join(spans) + after


def _strip(activations: _Array, scale: float) -> str:
    """Returns a cell for each position, colored by the activation."""
    cells = "".join(
        f'<span style="flex:1;min-width:2px;height:12px;{_color(each, scale)}" title="{at}: {each:.4g}"></span>'
        for at, each in enumerate(activations.tolist())
    )
    return f'<div style="display:flex;width:{_WIDTH}px;border:1px solid rgba(128,128,128,.4)">{cells}</div>'


def _input(row: _Array) -> str:
    """Returns a picture of an image, of shape (1 or 3, height, width), or of a series, of which time is the longer one.

    Other inputs have none.
    """
    if not row.size or row.ndim > 3 or (row.ndim == 3 and row.shape[0] not in (1, 3)):
        return ""
    low, high = float(row.min()), float(row.max())
    unit = (row - low) / (high - low or 1.0)
    if row.ndim == 3:
        data = base64.b64encode(_png((unit * 255).round().astype(np.uint8))).decode()
        return f'<img style="width:112px;image-rendering:pixelated" alt="" src="data:image/png;base64,{data}">'
    lines = unit[None] if unit.ndim == 1 else unit if unit.shape[1] >= unit.shape[0] else unit.T
    points = np.linspace(0, _WIDTH, lines.shape[1])
    drawn = "".join(
        f'<polyline fill="none" stroke="currentColor" opacity=".6" points="'
        f'{" ".join(f"{x:.1f},{40 - 38 * y:.1f}" for x, y in zip(points, line, strict=True))}"/>'
        for line in lines[:_MOST_LINES]
    )
    return f'<svg width="{_WIDTH}" height="42" style="display:block">{drawn}</svg>'


def _png(image: _Array) -> bytes:
    """Returns an image of shape (1 or 3, height, width) and dtype uint8 as a PNG file."""
    channels, height, width = image.shape
    lines = np.insert(image.transpose(1, 2, 0).reshape(height, -1), 0, 0, axis=1)  # each line begins with its filter

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines.tobytes())), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
