"""The attention view: the patterns of all heads of a model, without and with the chosen patches.

`show_attention` -> `patterns.patterns_of_run` -> traits `attention` and `cells`
front end        -> requests: `update` runs the model with the patches, `head` returns a whole pattern

The front end is js/src/views/attention_view.ts. A page without scripts shows a picture of the heads.
"""

from __future__ import annotations

import base64
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import traitlets
from torch import Tensor

from graphpatch_notebook.components import Component, Components, find
from graphpatch_notebook.errors import GraphError, SessionError
from graphpatch_notebook.experiments.datasets.feature_pages import png_of
from graphpatch_notebook.experiments.engine import RemoteGraph
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.notebook.display.tables import escaped
from graphpatch_notebook.notebook.display.tokens import TokenInputs
from graphpatch_notebook.notebook.messages import Head, HeadRequest
from graphpatch_notebook.notebook.runs import RunInputs
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.notebook.views.linked import (
    Answer,
    ComputedView,
    Handlers,
    Patches,
    RequestContext,
    inputs_for_view,
)
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch, ProbePatch
from graphpatch_notebook.patching.model_state import preserved
from graphpatch_notebook.texts import token_text

MEAN = -1
"""The row that is the mean over the batch."""


@dataclass(frozen=True)
class AxisTokens:
    """The texts next to the patterns."""

    queries: list[list[str]]  # of each row of the batch; of the decoder, if there is one
    keys: list[list[str]]  # of the encoder; empty without one

    @classmethod
    def of(cls, graph: PatchableGraph, inputs: RunInputs, texts: Any, tokenizer: Any) -> AxisTokens:
        """Returns the texts of the tokens in the inputs, or those that were given."""
        if texts is not None:
            rows = [[*texts]] if all(isinstance(text, str) for text in texts) else [[*row] for row in texts]
            return cls(rows, [])
        found = TokenInputs.of(graph, inputs.args, inputs.kwargs)
        first: Any = inputs.kwargs.get("input_ids", inputs.args[0] if inputs.args else None)
        is_ids = isinstance(first, Tensor) and first.dim() == 2 and not first.is_floating_point() and first.numel() > 0
        keys = first.tolist() if is_ids and first.tolist() != found.batch else []
        if tokenizer is None:
            return cls([], [])
        return cls(*([[token_text(tokenizer, token) for token in row] for row in rows] for rows in (found.batch, keys)))

    def labels(self, count: int, row: int, *, is_encoder: bool) -> list[str]:
        """Returns a label for each of `count` positions: its token (of a mean, if all rows have it), or its number."""
        rows = [one for one in (self.keys if is_encoder and self.keys else self.queries) if len(one) == count]
        if not rows:
            return [str(position) for position in range(count)]
        if row != MEAN:
            return rows[min(row, len(rows) - 1)]
        return [
            texts[0] if len({*texts}) == 1 else str(position) for position, texts in enumerate(zip(*rows, strict=True))
        ]


class AttentionView(ComputedView):
    """An interactive view of attention patterns, which `show_attention` returns.

    In a notebook, it displays as a widget, with a picture that replaces it where scripts cannot run. The chosen patches
    of the graph have their effect: the view shows the patterns without and with them.

    Attributes:
        row: The row of the batch that is shown; -1 for the mean over the batch.
        selection: What is selected, in all views of the graph.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from graphpatch_notebook import PatchableGraph
        >>> from graphpatch_notebook.experiments import show_attention
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(5)[None])
        >>> view = show_attention(pg)
        >>> view
        <AttentionView of pg: 4 heads in 2 layers, 5 x 5>
        >>> view.close()
    """

    attention = traitlets.Dict(read_only=True).tag(sync=True, echo_update=False)
    cells = traitlets.Bytes(read_only=True).tag(sync=True, echo_update=False)
    row: Any = traitlets.Int().tag(sync=True)

    FRONT_END: ClassVar[Mapping[str, Any]] = {**ComputedView.FRONT_END, "row": int}
    VIEW: ClassVar[str] = "attention"
    COMPUTED: ClassVar[tuple[str, ...]] = ("attention", "cells")

    def __init__(
        self,
        graph: PatchableGraph,
        session: Session,
        workspace: Workspace,
        layers: list[AttentionLayer],
        inputs: RunInputs,
        tokens: AxisTokens,
        image: InputImage | None,
        generation: GeneratedAttention | None = None,
    ) -> None:
        self._generation = generation
        self._layers, self._inputs, self._tokens, self._image = layers, inputs, tokens, image
        self._version = self._shown_steps = 0
        self._clean: list[LayerPatterns] = []
        self._patched: list[LayerPatterns] | None = None
        super().__init__(graph, session, workspace)

    def _handlers(self) -> Handlers:
        return {**super()._handlers(), "head": self._head}

    # -- runs ----------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Runs the model again, without and with the chosen patches: after its weights have changed.

        Raises:
            SessionError: The run failed, or a value of a patch cannot be evaluated.
        """
        self._clean = []
        self.update()

    def _compute(self, graph: PatchableGraph, patches: Patches) -> Any:
        if self._generation is not None and self._clean and not self._generation.is_done:
            self._shown_steps = 0
            self._generation.run(graph, self._layers, *self._inputs.copy())
            self._clean, self._inputs = [], self._generation.inputs(self._inputs)
        clean = self._clean or self._patterns(graph, {})
        return clean, self._patterns(graph, patches) if patches else None

    def _follow(self, *, is_changed: bool = False) -> Answer:
        status, buffers = super()._follow(is_changed=is_changed)
        generation = self._generation
        if generation is not None and not generation.is_done and generation.steps > self._shown_steps:
            self._shown_steps = generation.steps
            self._keep((generation.patterns(), None))  # as far as it is generated
            self.renew(*self.COMPUTED)
        return status, buffers

    def _patterns(self, graph: PatchableGraph, patches: Patches) -> list[LayerPatterns]:
        given = (self._layers, patches, *self._inputs.copy())
        if isinstance(graph, RemoteGraph):  # quantized there, so that little is sent
            found: list[LayerPatterns] = graph.run_there(patterns_of_run, *given)
            return found
        return patterns_of_run(graph, *given)

    def _keep(self, found: tuple[list[LayerPatterns], list[LayerPatterns] | None]) -> None:
        self._clean, self._patched = found
        self._version += 1
        if self._generation is not None:
            self._tokens = self._generation.texts(self._clean[0].cells.cells.shape[-1], self._tokens)
            if not self._generation.has_started:
                self._computed_for = -1  # the first request starts it

    def _head(self, _: RequestContext, payload: HeadRequest) -> Answer:
        """Returns the pattern of a head, and its scale."""
        found = {"clean": self._clean, "patched": self._patched}[payload.run]
        layer, head = payload.layer, payload.head
        if payload.version != self._version or found is None:
            raise SessionError("the patterns have changed in the meantime; look at them again")
        if layer >= len(found) or head >= found[layer].cells.cells.shape[1]:
            raise SessionError(f"there is no head {head} in layer {layer} of this view")
        part = found[layer].cells
        cells = part.cells[self._place, head].contiguous().numpy().tobytes()
        return Head(float(part.scales[self._place, head])), [cells]

    # -- traits --------------------------------------------------------------------------------------------------------

    @property
    def _count(self) -> int:
        """How many rows the batch has."""
        rows = self._clean[0].cells.cells.shape[0] if self._clean else 1
        return rows - 1 if rows > 1 else rows

    @property
    def _place(self) -> int:
        """The index of the row in the stored patterns, which begin with the mean if there are several rows."""
        row = max(MEAN, min(int(self.row), self._count - 1))
        return row + 1 if self._count > 1 else 0

    @property
    def _is_mean(self) -> bool:
        return self._count > 1 and self.row == MEAN

    _checked_row = traitlets.validate("row")(ComputedView.checked)

    def _check(self, name: str, value: Any) -> None:
        super()._check(name, value)
        if name == "row" and not (MEAN if self._count > 1 else 0) <= value < self._count:
            raise traitlets.TraitError(f"there is no row {value}: the batch has {self._count}")

    @traitlets.observe("row")
    def _show_row(self, _: Any) -> None:
        self._version += 1
        self.renew("attention", "cells")

    def _makers(self) -> Mapping[str, Callable[[], Any]]:
        runs = [run for run in (self._clean, self._patched) if run]
        sent = functools.cache(lambda: packed(runs, self._place, has_lengths=not self._is_mean))
        described = lambda: self._described(*sent()[1:])  # noqa: E731
        return {**super()._makers(), "attention": described, "cells": lambda: sent()[0]}

    def _described(self, shapes: list[list[int]], is_whole: bool) -> dict[str, Any]:
        """Returns the `Attention` of the front end."""
        texts: dict[tuple[str, ...], int] = {}
        row = self.row if self._count > 1 else 0
        image = self._image
        layers = []
        for layer, patterns, shape in zip(self._layers, self._clean, shapes, strict=True):
            heads, queries, keys = patterns.cells.cells.shape[1:]
            is_encoder = "encoder" in layer.stack
            query_texts = tuple(self._tokens.labels(queries, row, is_encoder=is_encoder))
            key_texts = tuple(self._tokens.labels(keys, row, is_encoder=is_encoder or layer.is_cross))
            layers.append(
                {
                    "name": layer.name,
                    "title": layer.title,
                    "layer": layer.layer,
                    "is_cross": layer.is_cross,
                    "heads": heads,
                    # Each row of the batch has lengths of its own: the mean has none.
                    "value_heads": 0 if patterns.lengths is None or self._is_mean else patterns.lengths.cells.shape[1],
                    "full": [queries, keys],
                    "shape": shape,
                    "queries": texts.setdefault(query_texts, len(texts)),
                    "keys": texts.setdefault(key_texts, len(texts)),
                    "image": image.number_of(layer, keys) if image is not None else None,
                }
            )
        return {
            "version": self._version,
            "patches": self._computed_for,
            "runs": ["clean"] if self._patched is None else ["clean", "patched"],
            "rows": self._count,
            "is_whole": is_whole,
            "layers": layers,
            "tokens": [*map(list, texts)],
            "picture": None if image is None else image.url(max(row, 0)),
            "images": [] if image is None else image.patches,
        }

    # -- display -------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        heads = sum(one.cells.cells.shape[1] for one in self._clean)
        queries, keys = self._clean[0].cells.cells.shape[2:]
        name = self._session.origin.graph
        layers = f"{len(self._layers)} layer{'s' * (len(self._layers) != 1)}"
        return f"<AttentionView of {name}: {heads} heads in {layers}, {queries} x {keys}>"

    def _static_html(self) -> str:
        name, shown = self._session.origin.graph, self._patched or self._clean
        picture = base64.b64encode(picture_of([one.cells.cells[self._place] for one in shown])).decode()
        labels = self._tokens.labels(shown[0].cells.cells.shape[2], self.row, is_encoder=False)
        heads = sum(one.cells.cells.shape[1] for one in shown)
        patched = " with the chosen patches" if self._patched is not None else ""
        return (
            f"<p><strong>Attention of {escaped(name)}: {heads} heads in {len(shown)} layers{patched}</strong> "
            "(a picture; for the live one, run the cell)</p>\n"
            f'<img alt="Attention patterns, a row of heads for each layer, the first layer at the top" '
            f'src="data:image/png;base64,{picture}">\n'
            f"<details><summary>{len(labels)} tokens</summary>\n<p>{escaped(' '.join(labels))}</p>\n"
            "</details>"
        )


class InputImage:
    """The image among the inputs, and which tokens are its patches.

    Which they are is found by running: they are the positions at which the states before the first layer change when
    the image does. They are the rows of the image, in order.
    """

    def __init__(self, images: Tensor, found: Mapping[str, tuple[int, list[int]]]) -> None:
        self._images = images
        rows, columns = images.shape[1:3]
        self.patches: list[dict[str, Any]] = []
        self._of_stack: dict[str, tuple[int, int]] = {}  # how many positions there are, and the number of its patches
        for stack, (count, positions) in found.items():
            across = round(math.sqrt(len(positions) * columns / rows))
            if across and len(positions) % across == 0:
                self._of_stack[stack] = count, len(self.patches)
                self.patches.append({"positions": positions, "grid": [len(positions) // across, across]})

    @classmethod
    def of(
        cls, graph: PatchableGraph, layers: Sequence[AttentionLayer], inputs: RunInputs, image: Any
    ) -> InputImage | None:
        """Returns the image of a call; `None` if there is none, or no stack of layers has its patches.

        `image` is how it looks, if not as its input.

        Raises:
            GraphError: An image was given, and its patches were not found.
        """
        pixels = next((value for value in (*inputs.args, *inputs.kwargs.values()) if _is_image(value)), None)
        found = {} if pixels is None else changed_positions(graph, layers, inputs, pixels)
        images = _as_pictures(pixels if image is None else image) if found else None
        own = None if images is None else cls(images, found)
        if own is None or not own.patches:
            if image is not None:
                raise GraphError("no tokens of these inputs are patches of an image, row by row")
            return None
        return own

    def number_of(self, layer: AttentionLayer, keys: int) -> int | None:
        """Returns which patches the keys of a layer are."""
        count, number = self._of_stack.get(layer.stack, (0, 0))
        return number if count <= keys and not layer.is_cross else None  # more, after a generation

    def url(self, row: int) -> str:
        """Returns the image of a row of the batch."""
        picture = self._images[min(row, len(self._images) - 1)]
        return f"data:image/png;base64,{base64.b64encode(png_of(picture.numpy())).decode()}"


def _is_image(value: Any) -> bool:
    """Whether a value is a batch of images: of shape (batch, channels, rows, columns)."""
    return isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point() and value.shape[1] in (1, 3)


def _as_pictures(image: Any) -> Tensor:
    """Returns images as bytes, of shape (batch, rows, columns, 3)."""
    if _is_image(image):
        value = image.detach().float().cpu()
        low, high = value.amin((1, 2, 3), keepdim=True), value.amax((1, 2, 3), keepdim=True)
        value = 255 * (value - low) / (high - low).clamp_min(1e-12)
        pictures: Tensor = value.expand(-1, 3, -1, -1).movedim(1, -1).to(torch.uint8)
        return pictures
    given = value = torch.as_tensor(np.asarray(image))
    value = (value * 255).round() if value.is_floating_point() else value
    value = value[..., None].expand(-1, -1, 3) if value.dim() == 2 else value[..., :3]
    if value.dim() != 3 or value.shape[-1] != 3:
        raise GraphError(f"image= of shape {[*given.shape]} is not one of (rows, columns, 3)")
    return value.clamp(0, 255).to(torch.uint8)[None]


def changed_positions(
    graph: PatchableGraph, layers: Sequence[AttentionLayer], inputs: RunInputs, pixels: Tensor
) -> dict[str, tuple[int, list[int]]]:
    """Returns for each stack of layers how many positions it has, and at which of them an image changes its input."""
    components = find(captured(graph).root)
    names = {layer.stack: f"{layer.name.partition('layers[')[0]}layers[0].resid_pre" for layer in layers}
    names = {stack: name for stack, name in names.items() if name in components}
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0)).to(pixels)
    found: list[dict[str, Tensor]] = []
    for image in (pixels, pixels + pixels.std().clamp_min(1e-3) * noise):
        probes = {stack: ProbePatch(any_shape=True) for stack in names}
        given = [image if value is pixels else value for value in inputs.args]
        named = {name: image if value is pixels else value for name, value in inputs.kwargs.items()}
        args, kwargs = RunInputs((*given,), named).copy()
        with preserved(captured(graph).module), torch.no_grad():
            with graph.patch({names[stack]: probe for stack, probe in probes.items()}):
                graph(*args, **kwargs)
            found.append({stack: probe.activation for stack, probe in probes.items() if probe.activation is not None})
    positions = {}
    for stack, before in found[0].items():
        component = components[names[stack]]
        axes = [component.axes[dim] for dim in component.kept_dims]
        if "position" in axes and found[1][stack].shape == before.shape:
            dim = axes.index("position")
            changed = (before != found[1][stack]).movedim(dim, 0).flatten(1).any(1)
            positions[stack] = before.shape[dim], changed.nonzero().flatten().tolist()
    return {stack: (count, own) for stack, (count, own) in positions.items() if len(own) > 1}


_SIDE, _GAP = 32, 3


def picture_of(layers: Sequence[Tensor]) -> bytes:
    """Returns a gray PNG with a row of heads for each layer, given the cells as bytes, of shape (head, query, key).

    The darkest gray of each head is what nearly all of its cells do not exceed: in a causal pattern, the first query
    has nothing but one weight of 1.

    Example:
        >>> import torch
        >>> picture_of([torch.zeros(2, 4, 4, dtype=torch.uint8)])[1:4]
        b'PNG'
    """
    step = _SIDE + _GAP
    image = torch.full((len(layers) * step, max(len(cells) for cells in layers) * step), 255, dtype=torch.uint8)
    for number, cells in enumerate(layers):
        for head, one in enumerate(pooled(cells, _SIDE)):
            strong = one[one > 0].float()
            dark = float(strong.quantile(0.98)) if len(strong) else 255.0
            small = (240 - one * (240 / dark)).clamp_min(0).to(torch.uint8)
            repeats = [max(1, _SIDE // size) for size in small.shape]
            large = small.repeat_interleave(repeats[0], 0).repeat_interleave(repeats[1], 1)
            image[number * step :, head * step :][: large.shape[0], : large.shape[1]] = large
    return png_of(image.numpy())


def attention_of(
    graph: PatchableGraph,
    workspace: Workspace,
    inputs: Inputs | None = None,
    *,
    tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
    layers: Sequence[int] | None = None,
    image: Any = None,
    max_new_tokens: int = 0,
) -> AttentionView:
    """Returns a new attention view of a graph: `show_attention`."""
    found = attention_layers(find(captured(graph).root), layers)
    session, runs, given = inputs_for_view(graph, workspace, inputs)
    texts = AxisTokens.of(graph, given, tokens, runs.tokenizer)
    picture = InputImage.of(graph, found, given, image)
    generation = GeneratedAttention.of(graph, given, runs.tokenizer, max_new_tokens) if max_new_tokens else None
    return AttentionView(graph, session, workspace, found, given, texts, picture, generation)


# --------------------------------------------------------------------------------------------------------------------
# Attention patterns of a run: quantized as they are computed, averaged over the batch, packed for the front end


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
    values: Component | None  # `None` if not found, or with other axes than heads, positions and channels

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
        is_usable = values is not None and {"position", "channel"} <= {*values.axes} <= {*_ORDER_OF_VALUES}
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
    """Numbers from 0 on as bytes, `(cells / 255) ** 2 * scales`, so that small weights of long texts are kept."""

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
            parts = known / scales[row].to(known.device).view(-1, *[1] * (known.dim() - 1))
            cells[row] = (parts.clamp_(0, 1).sqrt_() * _LEVELS).round_().to(torch.uint8)
        return cls(cells, scales)


@dataclass(kw_only=True, eq=False)
class QuantizingPatch(Patch[Tensor]):
    """Keeps a pattern, or the lengths of values, quantized."""

    observes_only: ClassVar[bool] = True
    axes: tuple[str | None, ...]
    is_values: bool = False
    kept_bytes: list[int]  # one number: of all patches of the run
    kept: Quantized | None = None

    def op(self, original_output: Tensor) -> Tensor:
        """Keeps the value."""
        numbers = _arranged(original_output.detach(), self.axes, _ORDER_OF_VALUES if self.is_values else _ORDER)
        numbers = numbers.float().norm(dim=-1) if self.is_values else numbers
        self.kept_bytes[0] += numbers.numel()
        if self.kept_bytes[0] > _MOST_BYTES:
            raise GraphError(
                f"the attention patterns of these inputs take more than {_MOST_BYTES // 2**30} GB: give fewer or "
                "shorter inputs, or layers=[...]"
            )
        self.kept = Quantized.of(numbers)
        return original_output


_HEADS = ("group", "head", "batch_head")
_ORDER, _ORDER_OF_VALUES = (("batch", *_HEADS, *last) for last in (("query", "key"), ("position", "channel")))


def _arranged(value: Tensor, axes: tuple[str | None, ...], order: tuple[str, ...]) -> Tensor:
    """Returns a value with the dimensions (batch, head, ...), in order."""
    if not {*order[-2:]} <= {*axes} <= {*order} or len(axes) != value.dim():
        raise GraphError(f"a pattern with the dimensions {', '.join(map(str, axes))} cannot be shown")
    arranged = value.permute([axes.index(axis) for axis in order if axis in axes])
    return arranged.reshape(len(arranged) if "batch" in axes else 1, -1, *arranged.shape[-2:])


class LayerPatterns(NamedTuple):
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
    quantizing: dict[str, QuantizingPatch] = {}
    for layer in layers:
        for part, component in (("pattern", layer.pattern), ("v", layer.values)):
            if component is not None:
                axes = tuple(component.axes[dim] for dim in component.kept_dims)
                quantizing[f"{layer.name}.{part}"] = QuantizingPatch(
                    axes=axes, kept_bytes=total, is_values=part == "v", any_shape=True
                )
    # After the other patches.
    patch_map: dict[Any, Sequence[Patch[Any]]] = {**patches}
    patch_map |= {path: [*patches.get(path, ()), patch] for path, patch in quantizing.items()}
    with torch.no_grad(), graph.patch(patch_map):
        graph(*args, **kwargs)
    kept = {path: patch.kept for path, patch in quantizing.items() if patch.kept is not None}
    if missing := [layer.name for layer in layers if f"{layer.name}.pattern" not in kept]:
        raise GraphError(f"the model did not compute the patterns of {', '.join(missing[:3])} on these inputs")
    return [LayerPatterns(kept[f"{layer.name}.pattern"], kept.get(f"{layer.name}.v")) for layer in layers]


@dataclass(kw_only=True, eq=False)
class PatternRowsPatch(Patch[Tensor]):
    """Keeps the rows of a pattern, those of the prompt and of each later step of a generation."""

    observes_only: ClassVar[bool] = True
    axes: tuple[str | None, ...]
    kept: list[Tensor]  # each of shape (batch, head, query, key)

    def op(self, original_output: Tensor) -> Tensor:
        """Keeps the rows that are new: without a cache, a step computes those before again."""
        rows = _arranged(original_output.detach(), self.axes, _ORDER).float().cpu()
        done = sum(one.shape[2] for one in self.kept)
        self.kept.append(rows[:, :, done:] if rows.shape[2] > done else rows)
        return original_output


class GeneratedAttention:
    """A greedy generation without patches, whose attention is shown as far as it is generated.

    With patches, the same tokens are run, so that the patterns can be compared.
    """

    def __init__(self, prompt: list[int], tokenizer: Any, count: int) -> None:
        self._prompt, self._tokenizer, self._count = prompt, tokenizer, count
        self._tokens: list[int] = []
        self._patches: list[PatternRowsPatch] = []
        self.is_done = False

    @classmethod
    def of(cls, graph: PatchableGraph, inputs: RunInputs, tokenizer: Any, count: int) -> GeneratedAttention:
        """Returns the generation after a prompt.

        Raises:
            GraphError: The model cannot generate, or the inputs are not one prompt of token ids.
        """
        rows = TokenInputs.of(graph, inputs.args, inputs.kwargs).batch
        if not callable(getattr(captured(graph).module, "generate", None)) or len(rows) != 1:
            what = "a model with a method generate, and one prompt of token ids"
            raise GraphError(f"max_new_tokens={count} needs {what}, not {len(rows)}")
        return cls(rows[0], tokenizer, count)

    @property
    def has_started(self) -> bool:
        """Whether the generation has begun."""
        return bool(self._patches)

    @property
    def steps(self) -> int:
        """How many steps have ended: the first computes the rows of the prompt."""
        return min((len(patch.kept) for patch in self._patches), default=0)

    # what `generate` calls on a streamer

    def put(self, tokens: Tensor) -> None:
        """Called by `generate` with the prompt, then with each new token."""
        self._tokens += [int(token) for token in tokens.flatten()]

    def end(self) -> None:
        """Called by `generate` at the end."""

    def run(
        self, graph: PatchableGraph, layers: Sequence[AttentionLayer], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Generates."""
        self._tokens = []
        axes = [tuple(layer.pattern.axes[dim] for dim in layer.pattern.kept_dims) for layer in layers]
        self._patches = [PatternRowsPatch(axes=own, kept=[], any_shape=True) for own in axes]
        pairs = zip(layers, self._patches, strict=True)
        patch_map: dict[Any, Any] = {f"{layer.name}.pattern": [patch] for layer, patch in pairs}
        options = {"do_sample": False, "num_beams": 1, "max_new_tokens": self._count, "streamer": self}
        with torch.no_grad(), graph.patch(patch_map):
            graph.generate(*args, **{**kwargs, **options})
        self.is_done = True

    def patterns(self) -> list[LayerPatterns]:
        """Returns the patterns of the steps that have ended: a row for each token but the last, which is not run."""
        found = []
        for patch in self._patches:
            rows = patch.kept[: self.steps]
            keys = max(one.shape[-1] for one in rows)
            padded = [torch.nn.functional.pad(one, (0, keys - one.shape[-1])) for one in rows]
            found.append(LayerPatterns(Quantized.of(torch.cat(padded, 2)), None))
        return found

    def texts(self, count: int, before: AxisTokens) -> AxisTokens:
        """Returns the texts of the first tokens."""
        tokens = (self._tokens or self._prompt)[:count]
        if self._tokenizer is None:
            return before
        return AxisTokens([[token_text(self._tokenizer, token) for token in tokens]], [])

    def inputs(self, before: RunInputs) -> RunInputs:
        """Returns inputs that have all tokens of the generation that were run."""
        ids = torch.tensor([self._tokens[:-1]])

        def longer(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape != (1, len(self._prompt)):
                return value
            is_mask = value.tolist() != [self._prompt]
            last = value[:, -1:].expand(-1, ids.shape[1] - value.shape[1])
            return torch.cat([value, last], 1) if is_mask else ids.to(value.device)

        kwargs = {name: longer(value) for name, value in before.kwargs.items() if name != "position_ids"}
        return RunInputs((*map(longer, before.args),), kwargs, before.text)


def pooled(cells: Tensor, side: int) -> Tensor:
    """Returns cells of shape (head, query, key), reduced to at most `side` rows and columns by maxima of blocks."""
    sizes = [min(side, size) for size in cells.shape[1:]]
    if sizes == list(cells.shape[1:]):
        return cells
    blocks = [-(-full // size) for full, size in zip(cells.shape[1:], sizes, strict=True)]
    # The same blocks as the labels of a heatmap count them: all but the last have the same size.
    found: Tensor = torch.nn.functional.max_pool2d(cells.float(), blocks, blocks, ceil_mode=True)
    return found.to(torch.uint8)


def packed(
    runs: Sequence[Sequence[LayerPatterns]], row: int, *, has_lengths: bool = True
) -> tuple[bytes, list[list[int]], bool]:
    """Returns the patterns of one row of the batch, whole if they are small enough, else as smaller pictures.

    Returns:
        The data, compressed: for each run, for each layer, the scales of the heads; if there are lengths, their scales
        and bytes; the cells of the heads. Scales are float32, little-endian. The rows and columns of the pictures of
        the heads, for each layer. Whether the pictures are the patterns themselves.
    """
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
    return data, [[*cells.shape[1:]] for cells in pictures[0]], side >= longest


def _parts(one: LayerPatterns, cells: Tensor, row: int, *, has_lengths: bool) -> Iterable[bytes]:
    yield one.cells.scales[row].numpy().astype("<f4").tobytes()
    if has_lengths and one.lengths is not None:
        yield one.lengths.scales[row].numpy().astype("<f4").tobytes()
        yield one.lengths.cells[row].numpy().tobytes()
    yield cells.contiguous().numpy().tobytes()
