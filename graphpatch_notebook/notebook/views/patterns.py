"""Attention patterns of a run: quantized as they are computed, averaged over the batch, packed for the front end."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphpatch_notebook.components import Component, Components
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import Patch

_LEVELS = 255
_MOST_BYTES = 2**31
"""No more bytes than this are kept."""
_ENOUGH = 700_000
"""The packed bytes of a view that is saved in a notebook."""
_MOST_WHOLE = 4_000_000
_SMALLER = (48, 32, 24, 16)
"""The sides of the pictures of heads, if whole patterns would be too large: the first that fits."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention of a model."""

    name: str  # `layers[3].attn`
    layer: int
    stack: str  # empty if there is only one
    pattern: Component
    values: Component | None  # `None` if not found, or with other axes than heads, keys and channels

    @property
    def is_cross(self) -> bool:
        """Whether the keys are those of another sequence."""
        return self.name.endswith("cross_attn")

    @property
    def title(self) -> str:
        """The number of the layer, with the name of its stack if there are several."""
        return " ".join(filter(None, (self.stack, str(self.layer), "cross" if self.is_cross else "")))


def attention_layers(components: Components, layers: Sequence[int] | None = None) -> list[AttentionLayer]:
    """Returns the attentions of a model, in order.

    Raises:
        GraphError: There are none, and why; or a layer does not have one.
    """
    found = []
    for name, component in components.items():
        start, _, part = name.rpartition(".")
        if part != "pattern":
            continue
        stack, _, place = start.rpartition("layers[")
        values = components.get(f"{start}.v")
        is_usable = values is not None and {"key", "channel"} <= {*values.axes} <= {"batch", "head", "key", "channel"}
        number = int(place.partition("]")[0])
        found.append(AttentionLayer(start, number, stack.rstrip("."), component, values if is_usable else None))
    if not found:
        reasons = [why for name, why in components.missing.items() if name.endswith((".pattern", ".*", "layers[*]"))]
        raise GraphError(
            f"this model has no attention patterns to show: {next(iter(reasons), 'no attention was found in it')}; "
            "pg.components.missing has the reasons for all components"
        )
    if layers is None:
        return found
    chosen = [one for one in found if one.layer in {*layers}]
    if missing := sorted({*layers} - {one.layer for one in chosen}):
        there = ", ".join(str(one.layer) for one in found)
        raise GraphError(f"layers without an attention pattern: {', '.join(map(str, missing))}; there are {there}")
    return chosen


@dataclass(frozen=True)
class Quantized:
    """Numbers from 0 on as bytes: `cells / 255 * scales` is at most half a step, `scales / 510`, from each of them."""

    cells: Tensor  # `uint8`, of shape (row, head, ...); of several rows, the first is their mean
    scales: Tensor  # the largest numbers, of shape (row, head)

    @classmethod
    def of(cls, numbers: Tensor) -> Quantized:
        """Quantizes numbers of shape (batch, head, ...)."""
        cells = torch.empty((numbers.shape[0] + (numbers.shape[0] > 1), *numbers.shape[1:]), dtype=torch.uint8)
        scales = torch.empty(cells.shape[:2])
        mean = [numbers.float().mean(0)] if numbers.shape[0] > 1 else []
        for row, one in enumerate([*mean, *numbers]):
            known = one.detach().float().nan_to_num(0.0, 0.0, 0.0)
            scales[row] = known.flatten(1).amax(1).clamp_min(torch.finfo(torch.float32).tiny)
            steps = _LEVELS / scales[row].to(known.device)
            cells[row] = (known * steps.view(-1, *[1] * (known.dim() - 1))).round_().clamp_(0, _LEVELS).to(torch.uint8)
        return cls(cells, scales)


@dataclass(kw_only=True, eq=False)
class QuantizingPatch(Patch[Tensor]):
    """Keeps a pattern, or the lengths of values, quantized."""

    observes_only: ClassVar[bool] = True
    axes: tuple[str, ...]
    is_values: bool = False
    kept_bytes: list[int]  # one number: of all patches of the run
    kept: Quantized | None = None

    def op(self, original_output: Tensor) -> Tensor:
        """Keeps the value."""
        numbers = _arranged(original_output.detach(), self.axes, "channel" if self.is_values else "key")
        numbers = numbers.float().norm(dim=-1) if self.is_values else numbers
        self.kept_bytes[0] += numbers.numel()
        if self.kept_bytes[0] > _MOST_BYTES:
            raise GraphError(
                f"the attention patterns of these inputs take more than {_MOST_BYTES // 2**30} GB: give fewer or "
                "shorter inputs, or layers=[...]"
            )
        self.kept = Quantized.of(numbers)
        return original_output


def _arranged(value: Tensor, axes: tuple[str, ...], last: str) -> Tensor:
    """Returns a value with the dimensions (batch, head, ..., `last`)."""
    middle = [axis for axis in ("query", "key") if axis in axes and axis != last]
    missing = [axis for axis in (*middle, last) if axis not in axes]
    if missing or len(axes) != value.dim() or not {*axes} <= {"batch", "group", "head", "batch_head", *middle, last}:
        raise GraphError(f"a pattern with the dimensions {', '.join(axes)} cannot be shown")
    heads = [axis for axis in ("group", "head", "batch_head") if axis in axes]
    batch = [axis for axis in ("batch",) if axis in axes]
    arranged = value.permute([axes.index(axis) for axis in (*batch, *heads, *middle, last)])
    sizes = [value.shape[axes.index(axis)] for axis in (*middle, last)]
    return arranged.reshape(value.shape[axes.index("batch")] if batch else 1, -1, *sizes)


@dataclass(frozen=True)
class LayerPatterns:
    """The patterns of all heads of a layer in one run."""

    cells: Quantized  # of shape (row, head, query, key)
    lengths: Quantized | None  # of value vectors: (row, head, key), with their heads; `None` if unknown


def patterns_of_run(
    graph: PatchableGraph,
    layers: Sequence[AttentionLayer],
    patches: Mapping[str, Sequence[Patch[Any]]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[LayerPatterns]:
    """Runs a graph with patches, and returns the patterns of each layer."""
    total = [0]
    patterns = [QuantizingPatch(axes=_axes(one.pattern), kept_bytes=total, any_shape=True) for one in layers]
    lengths = [
        None
        if one.values is None
        else QuantizingPatch(axes=_axes(one.values), kept_bytes=total, is_values=True, any_shape=True)
        for one in layers
    ]
    patch_map: dict[str, list[Patch[Any]]] = {path: [*given] for path, given in patches.items()}
    for layer, pattern, values in zip(layers, patterns, lengths, strict=True):
        patch_map.setdefault(f"{layer.name}.pattern", []).append(pattern)  # after the other patches
        if values is not None:
            patch_map.setdefault(f"{layer.name}.v", []).append(values)
    with torch.no_grad(), graph.patch(dict(patch_map.items())):
        graph(*args, **kwargs)
    missing = [layer.name for layer, pattern in zip(layers, patterns, strict=True) if pattern.kept is None]
    if missing:
        raise GraphError(f"the model did not compute the patterns of {', '.join(missing[:3])} on these inputs")
    return [
        LayerPatterns(pattern.kept, None if values is None else values.kept)
        for pattern, values in zip(patterns, lengths, strict=True)
        if pattern.kept is not None
    ]


def _axes(component: Component) -> tuple[str, ...]:
    return tuple(component.axes[dim] for dim in component.kept_dims)


def pooled(cells: Tensor, side: int) -> Tensor:
    """Returns cells of shape (head, query, key), reduced to at most `side` rows and columns by maxima of blocks."""
    sizes = [min(side, size) for size in cells.shape[1:]]
    if sizes == list(cells.shape[1:]):
        return cells
    blocks = [-(-full // size) for full, size in zip(cells.shape[1:], sizes, strict=True)]
    # The same blocks as the labels of a heatmap count them: all but the last have the same size.
    found: Tensor = torch.nn.functional.max_pool2d(cells.float(), blocks, blocks, ceil_mode=True)
    return found.to(torch.uint8)


@dataclass(frozen=True)
class Packed:
    """Patterns as they are sent.

    Attributes:
        data: Compressed. For each run, for each layer: the scales of the heads; if there are lengths, their scales and
            bytes; the cells of the heads. Scales are float32, little-endian.
        shapes: For each layer, the rows and columns of the pictures of its heads.
        is_whole: Whether the pictures are the patterns themselves.
    """

    data: bytes
    shapes: list[list[int]]
    is_whole: bool


def packed(runs: Sequence[Sequence[LayerPatterns]], row: int, *, has_lengths: bool = True) -> Packed:
    """Returns the patterns of one row of the batch, whole if they are small enough, else as smaller pictures."""
    count = sum(one.cells.cells[row].numel() for run in runs for one in run)
    longest = max(max(one.cells.cells.shape[2:]) for one in runs[0])
    sides = [*([longest] if count <= _MOST_WHOLE else []), *(side for side in _SMALLER if side < longest)]
    for side in sides or [longest]:
        pictures = [[pooled(one.cells.cells[row], side) for one in run] for run in runs]
        both = zip((one for run in runs for one in run), (cells for drawn in pictures for cells in drawn), strict=True)
        parts = [part for one, cells in both for part in _parts(one, cells, row, has_lengths=has_lengths)]
        data = zlib.compress(b"".join(parts), 6)
        if len(data) <= _ENOUGH:
            break
    return Packed(data, [[*cells.shape[1:]] for cells in pictures[0]], side >= longest)


def _parts(one: LayerPatterns, cells: Tensor, row: int, *, has_lengths: bool) -> Iterable[bytes]:
    yield _floats(one.cells.scales[row])
    if has_lengths and one.lengths is not None:
        yield _floats(one.lengths.scales[row])
        yield one.lengths.cells[row].numpy().tobytes()
    yield cells.contiguous().numpy().tobytes()


def _floats(numbers: Tensor) -> bytes:
    return numbers.numpy().astype("<f4").tobytes()
