"""Feature pages: what activates a feature most, how its activations are distributed, what it writes; and their HTML.

One pass over the dataset serves all features. Each batch becomes a summary (`_Summary`), and summaries are added: the
result does not depend on how the dataset is cut into batches, and memory not on its size.

The histogram has bins of a width that is a power of two. Where a batch has larger activations than fit, bins are joined
two by two, which is exact: so the range does not have to be known before.
"""

from __future__ import annotations

import base64
import html
import math
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError, GraphError, whole_file
from graphpatch_notebook.experiments.datasets.batches import RowReader, numbered
from graphpatch_notebook.experiments.datasets.feature_weights import FeaturePlace, sources, through_norm
from graphpatch_notebook.experiments.datasets.store import ActivationStore, ShardFolder, digest_of, settings_of
from graphpatch_notebook.experiments.engine import map_batches
from graphpatch_notebook.experiments.engine.inputs import Examples, Inputs, batches_of, check_graph
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.slices import PositionSelection
from graphpatch_notebook.patching.model_state import runs_where_the_model_is
from graphpatch_notebook.texts import token_text
from graphpatch_notebook.values import digest

_LOG_HALF = 6
_HALF = 2**_LOG_HALF
"""Half of the bins are for negative activations."""
_AT_ONCE = 2**24
_SAVED_AFTER = 30.0
_TENSORS = ("peaks", "examples", "activations", "active", "exponents", "bins")


@dataclass(frozen=True, eq=False)
class FeaturePage:
    """What is known of a feature from a dataset. Notebooks show it as a page, and `save_html` writes one.

    Attributes:
        name: The name of the feature.
        examples: The numbers in the dataset of the examples that activate it most, the strongest first. Of equal ones,
            the first of the dataset comes first.
        peaks: The largest activation in each of these.
        activations: The activations in each of these, one for each position that is not padding.
        tokens: The tokens of each of these; `None` for models that do not take tokens.
        inputs: The first tensor of the input of each of these, for models that do not take tokens; else empty.
        positions: How many positions there are in the dataset, without padding.
        density: At which share of these the activation is positive.
        counts: How many activations are in each bin of the histogram.
        edges: The edges of the bins, one more than there are: from each one to right before the next one.
        promoted: The tokens whose logits it raises most, as pairs of token and effect.
        suppressed: Those whose logits it lowers most.
        unknown: Why its effects on logits are not known; empty if they are.
        heads: The heads that write most into what it reads, as pairs of name and strength.
        features: The features that write most into it.
        unread: Why these are not known; empty if they are.
        tokenizer: What gives the texts of tokens; `None` for numbers.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> ids = torch.arange(60).reshape(12, 5) % 20
        >>> page = show_feature(PatchableGraph(model, ids[:1]), "layers[1].mlp.post[..., 5]", ids, batch_size=4)
        >>> page.tokens[0].shape, page.activations[0].shape, len(page.edges) - len(page.counts)
        ((5,), (5,), 1)
    """

    name: str
    examples: np.ndarray[Any, Any]
    peaks: np.ndarray[Any, Any]
    activations: Sequence[np.ndarray[Any, Any]]
    tokens: Sequence[np.ndarray[Any, Any]] | None
    inputs: Sequence[Tensor]
    positions: int
    density: float
    counts: np.ndarray[Any, Any]
    edges: np.ndarray[Any, Any]
    promoted: Sequence[tuple[int, float]] = ()
    suppressed: Sequence[tuple[int, float]] = ()
    unknown: str = ""
    heads: Sequence[tuple[str, float]] = ()
    features: Sequence[tuple[str, float]] = ()
    unread: str = ""
    tokenizer: Any = field(default=None, repr=False)

    def __repr__(self) -> str:
        peak = f", up to {self.peaks[0]:.4g}" if len(self.peaks) else ""
        return f"<FeaturePage of {self.name}: active at {self.density:.2%} of {self.positions:,} positions{peak}>"

    def _repr_html_(self) -> str:
        return page_html(self)

    def save_html(self, file: str | os.PathLike[str]) -> None:
        """Saves the page as one file of HTML, without scripts.

        Args:
            file: The file to write; it replaces a file of that name.

        Example:
            >>> import numpy as np
            >>> one = np.ones(1)
            >>> page = FeaturePage("a", one, one, [one], [one.astype(int)], (), 1, 1.0, one, np.array([1.0, 2.0]))
            >>> page.save_html(getfixture("tmp_path") / "a.html")
        """
        title, page = html.escape(self.name), page_html(self)
        with whole_file(Path(file)) as written:
            written.write_text(f"<!DOCTYPE html><meta charset='utf-8'><title>{title}</title>\n{page}\n", "utf8")


@runs_where_the_model_is
def feature_pages(
    pg: PatchableGraph,
    names: Any,
    dataset: Examples,
    *,
    top: int = 20,
    logits: int = 10,
    positions: PositionSelection | None = None,
    batch_size: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    executor: Any = None,
    recipe: Any = None,
) -> dict[str, FeaturePage]:
    """Returns a page for each feature: the examples that activate it most, a histogram, and the logits it writes to.

    The dataset is read once for all features, and memory does not depend on its size. Padding, where the
    `attention_mask` is 0, does not count.

    A feature is a number at each position: a latent, a neuron, a channel of any value, or a direction. What it adds to
    the logits goes through the final norm and the unembedding only. The norm divides by the scale of each state: here
    by 1, so that effects of one feature compare with each other, and with those of other features. Constant factors by
    which some models multiply what they write, or their logits (Granite, Cohere), are left out, too.

    What writes to a feature is that of its weights: a latent (`W_enc`, or `encoder.weight`), a neuron or a direction in
    the stream reads a direction there. Of features of earlier parts, latents if there are SAEs, else neurons, the
    strength is the cosine of what they write and this direction; of heads, it is the composition score: the norm of
    `W_OV` times the direction, relative to both norms.

    Args:
        pg: The graph.
        names: Names or patterns of features, one or several: `"layers[5].resid_post.sae.latents[17]"`,
            `"layers[*].mlp.post[..., 5]"`. A name of several numbers, such as `"layers[1].mlp.post"`, means each of
            them. Or a dict of directions: a path and a vector by the name to give it.
        dataset: An iterable of batches, or the inputs of all examples, with `batch_size`: as for `record_to`.
            Or an `ActivationStore` with these values: then the model does not run.
        top: How many examples a page has.
        logits: How many tokens it has whose logits are raised, and lowered, most, and how many heads and features that
            write to it.
        positions: The positions that count: an index, indices or a slice; `None` for all. `slice(1, None)` leaves out
            the first token, which activates some features most in every text. Pages show all tokens.
        batch_size: How many examples run at once, if `dataset` has the inputs of all examples.
        folder: A folder to keep results in, of any number of batches, every half minute and at the end. A call with
            the folder of an earlier one continues after its batches: one that was interrupted, or a longer dataset.
        executor: Runs batches elsewhere, as for `pg.sweep`.
        recipe: As for `pg.sweep`.

    Returns:
        The pages by the names of the features.

    Raises:
        UnknownPathError: A path does not exist, or a pattern matches nothing; nothing ran.
        ExperimentError: A direction has another size than the value; the dataset is empty; an activation is infinite
            or not a number; it is not known which dimension of a value holds the batch; or the folder has results of
            other features, weights, patches or batches.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> ids = torch.arange(60).reshape(12, 5) % 20
        >>> pages = feature_pages(PatchableGraph(model, ids[:1]), "layers[1].mlp.post", ids, top=3, batch_size=4)
        >>> page = pages["layers[1].mlp.post[..., 5]"]
        >>> len(pages), len(page.examples), page.positions, page.counts.sum(), len(page.promoted)
        (32, 3, 60, np.int64(60), 10)

    Source:
        Bricken et al., Towards Monosemanticity (2023), for the pages; Elhage et al., A mathematical framework for
        transformer circuits (2021), for composition scores.
    """
    check_graph(pg)
    if top < 1:
        raise ExperimentError(f"top must be at least 1, not {top}")
    features = _features(pg, names)
    read = _Read(RowReader(pg, list(features), None), RowReader(pg, list(features), positions), features, top)
    if positions is not None and (without := read.reader.without_positions):
        raise ExperimentError(f"{without[0]!r} does not have the positions of the inputs: leave positions= out")
    with torch.no_grad():
        fields = [each for base, own in features.items() for each in _weight_fields(pg, base, own, logits)]
    kept = None
    if folder is not None:
        own = digest([[each.names, each.which] for each in features.values()], top, positions)
        kept = ShardFolder(Path(folder), {"paths": {}, "features": own, **settings_of(pg)})
    if isinstance(dataset, ActivationStore):
        if folder is not None:
            raise ExperimentError("pages of a store are not kept, since they take no run: leave folder= out")
        results = read.stored(pg, dataset, positions)
    else:
        batches, first = batches_of(pg, dataset, batch_size), 0
        if kept is not None:
            batches, first = kept.remaining(batches), kept.examples
        results = map_batches(pg, read, numbered(batches, first), executor=executor, recipe=recipe)
    found = _summed(results, kept, top)
    if found is None:
        raise ExperimentError("the dataset has no examples")
    if not found.count:
        raise ExperimentError("the dataset has no examples at these positions")
    every = enumerate(name for own in features.values() for name in own.names)
    return {name: found.page(number, name, pg.tokenizer, fields[number]) for number, name in every}


def show_feature(pg: PatchableGraph, name: Any, dataset: Examples, **options: Any) -> FeaturePage:
    """Returns the page of one feature: for several, `feature_pages` reads the dataset only once.

    Args:
        pg: The graph.
        name: The name, or a dict of one direction, as for `feature_pages`.
        dataset: The dataset, as for `feature_pages`.
        **options: As for `feature_pages`.

    Raises:
        ExperimentError: The name means several features; or as for `feature_pages`.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> ids = torch.arange(60).reshape(12, 5) % 20
        >>> pg, vector = PatchableGraph(model, ids[:1]), torch.ones(8)
        >>> page = show_feature(pg, {"sum": ("layers[1].resid_post", vector)}, ids, batch_size=4)
        >>> page.save_html(getfixture("tmp_path") / "sum.html")
    """
    found = [each for own in _features(pg, name).values() for each in own.names]
    if len(found) > 1:
        raise ExperimentError(f"{name!r} means {len(found)} features: give one, or use feature_pages")
    return feature_pages(pg, name, dataset, **options)[found[0]]


# -- which numbers features are ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Features:
    """Features of one value: columns of it with flat channels, or products with directions.

    Attributes:
        names: Their names.
        which: The numbers of the columns, or the directions, (features, channels).
        size: How many channels there are.
    """

    names: Sequence[str]
    which: Tensor
    size: int

    def of(self, whole: Tensor) -> Tensor:
        """Returns their activations, (..., features), from the whole value, (..., channels)."""
        if whole.shape[-1] != self.size:
            raise ExperimentError(
                f"the value of {self.names[0]!r} has {whole.shape[-1]} numbers at a position of a batch, and "
                f"{self.size} in the example"
            )
        whole = whole if whole.dtype == torch.float64 else whole.float()
        return whole[..., self.which] if self.which.ndim == 1 else whole @ self.which.to(whole).mT

    def rows(self, matrix: Tensor, most: int) -> Iterator[Tensor]:
        """Yields the rows of some of them after the other, from the rows of all channels."""
        for some in self.which.split(most):
            yield (matrix[some] if some.ndim == 1 else some.to(matrix) @ matrix).detach()


def _features(pg: PatchableGraph, names: Any) -> dict[str, _Features]:
    """Returns features, by the name of the value that they are a part of."""
    model = captured(pg)
    known: _Known = {}
    found: dict[str, dict[str, Any]] = {}
    sizes: dict[str, int] = {}
    if isinstance(names, Mapping):
        make: Callable[[Any], Tensor] = torch.stack
        for name, (path, vector) in names.items():
            targets = model.targets_of(str(path))
            base, sizes[base], _ = _channels(pg, targets[0], known)
            direction = torch.as_tensor(vector).detach().flatten().cpu().double()
            if len(targets) > 1 or len(direction) != sizes[base]:
                raise ExperimentError(
                    f"{name!r} has {len(direction)} numbers, and {str(path)!r} means {len(targets)} values with "
                    f"{sizes[base]} numbers at a position: give one path, and a vector of this size"
                )
            found.setdefault(base, {})[str(name)] = direction
    else:
        make = torch.tensor
        for text in [names] if isinstance(names, str) or not isinstance(names, Iterable) else names:
            for target in model.targets_of(str(text)):
                base, sizes[base], columns = _channels(pg, target, known)
                found.setdefault(base, {}).update(columns)
    if not found:
        raise ExperimentError("there are no features: give a name, such as 'layers[1].mlp.post[..., 5]'")
    return {base: _Features([*own], make([*own.values()]), sizes[base]) for base, own in found.items()}


def _channels(pg: PatchableGraph, target: Target, known: _Known) -> tuple[str, int, dict[str, int]]:
    """Returns the whole value that a target is a part of, its number of channels, and those of the part by name."""
    component, base = target.component, target.text
    key = (target.path, () if component is None else component.axes, "" if target.index else base)
    if key not in known:
        if component is not None and target.index:
            whole = (each for each in pg.components.values() if each.path == component.path and not each.index)
            base = next(each.name for each in whole if each.axes == component.axes)
        shape = component.shape if component is not None else getattr(target.whole, "shape", ())
        places = {*RowReader(pg, base, None).by_path[base], _unread_positions(pg, base)}
        dims = [dim for dim in range(len(shape)) if dim not in places]
        known[key] = base, dims, np.arange(math.prod(shape[dim] for dim in dims)).reshape([shape[dim] for dim in dims])
    base, dims, numbers = known[key]
    part = numbers[tuple(target.index[dim] if dim < len(target.index) else slice(None) for dim in dims)]
    if part.size == 1:
        return base, numbers.size, {target.text: int(part.item())}
    form = "{}[{}]" if base.endswith(".latents") else "{}[..., {}]"
    places_of = ((column, np.unravel_index(column, numbers.shape)) for column in part.flatten().tolist())
    return base, numbers.size, {form.format(base, ", ".join(map(str, map(int, at)))): n for n, at in places_of}


_Known: TypeAlias = "dict[Any, tuple[str, list[int], np.ndarray[Any, Any]]]"


def _unread_positions(pg: PatchableGraph, base: str) -> int | None:
    """Returns the dimension of positions that are not those of the inputs, such as patches of an image."""
    axes = pg.components[base].axes if base in pg.components else ()
    return axes.index("position") if "position" in axes else None


# -- one pass ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """Reads a batch. It can be pickled."""

    reader: RowReader
    counted: RowReader
    features: Mapping[str, _Features]
    top: int

    def __call__(self, pg: PatchableGraph, batch: tuple[int, Inputs]) -> _Summary:
        first, inputs = batch
        rows, counted = (each.rows(pg, inputs, first) for each in (self.reader, self.counted))
        fresh = inputs.fresh()
        with torch.no_grad():
            recording = pg.record(list(self.reader.by_path), *fresh.args, **fresh.kwargs)
        wholes = {path: self._by_position(pg, path, recording, rows.kept.shape) for path in self.reader.by_path}
        values = self.values(wholes)
        everywhere = torch.ones(values.shape[:2], dtype=torch.bool)  # of positions that are not those of the inputs
        at_inputs = not self.reader.without_positions
        kept, used = ((each.kept if at_inputs else everywhere).to(values.device) for each in (rows, counted))
        shown = [row[is_kept] for row, is_kept in zip(rows.ids, rows.kept, strict=True)]
        if bool((rows.ids < 0).any()):
            wanted = (each for each in inputs.tensors() if each.is_floating_point() and len(each) == len(values))
            shown = list(next(wanted, torch.zeros(len(values), 0)))
        return _Summary.of(values, kept, used, first, shown, self.top, (digest_of(inputs),))

    def _by_position(self, pg: PatchableGraph, path: str, recording: Any, shape: torch.Size) -> Tensor:
        """Returns a value of shape (examples, positions, channels)."""
        if path not in recording:
            raise ExperimentError(f"the model did not compute {path!r} on a batch of the dataset")
        value: Tensor = recording[path].detach()
        row_dim, position_dim = self.reader.by_path[path]
        if position_dim is not None:
            return self.reader.by_position(path, value, shape).flatten(2)
        return self.of_examples(pg, path, value.movedim(row_dim, 0))

    def of_examples(self, pg: PatchableGraph, path: str, rows: Tensor) -> Tensor:
        """Returns a value with a row for each example, of shape (examples, positions, channels)."""
        dim, row_dim = _unread_positions(pg, path), self.reader.by_path[path][0]
        return rows.flatten(1)[:, None] if dim is None else rows.movedim(dim + (dim < row_dim), 1).flatten(2)

    def values(self, wholes: Mapping[str, Tensor]) -> Tensor:
        """Returns the features, of shape (examples, positions, features), from the whole values."""
        if len({whole.shape[:2] for whole in wholes.values()}) > 1:
            raise ExperimentError(f"{', '.join(wholes)} have different positions: ask for them one after the other")
        return torch.cat([self.features[path].of(whole) for path, whole in wholes.items()], -1)

    def stored(self, pg: PatchableGraph, store: ActivationStore, positions: Any) -> Iterator[_Summary]:
        """Yields the summaries of the files of a store. A file has all rows of an example."""
        values, start = [store[path] for path in self.reader.by_path], 0
        example, at_inputs = values[0].example, not self.reader.without_positions
        chosen = np.ones(len(values[0]), bool) if positions is None else values[0].is_among(position=positions)
        for chunks in zip(*(each.chunks() for each in values), strict=True):
            rows, start = slice(start, start + len(chunks[0])), start + len(chunks[0])
            by_path = dict(zip(self.reader.by_path, chunks, strict=True))
            first = int(example[rows].min(initial=len(example)))
            if not at_inputs:
                found = self.values({path: self.of_examples(pg, path, chunk) for path, chunk in by_path.items()})
                kept = torch.ones(found.shape[:2], dtype=torch.bool)
                yield _Summary.of(found, kept, kept, first, [torch.zeros(0)] * len(found), self.top)
            elif len(chunks[0]):
                at = torch.from_numpy(example[rows]) - first, torch.from_numpy(store.position[rows])
                shape = [int(each.max()) + 1 for each in at]
                wholes = {path: chunk.new_zeros(*shape, *chunk.shape[1:]) for path, chunk in by_path.items()}
                for path, chunk in by_path.items():
                    wholes[path][at] = chunk
                (kept, used), ids = torch.zeros(2, *shape, dtype=torch.bool), torch.full(shape, -1)
                kept[at], used[at], ids[at] = True, torch.from_numpy(chosen[rows]), torch.from_numpy(store.token[rows])
                shown = [row[row >= 0] if bool((row >= 0).any()) else torch.zeros(0) for row in ids]
                found = self.values({path: whole.flatten(2) for path, whole in wholes.items()})
                yield _Summary.of(found, kept, used, first, shown, self.top)


def _summed(results: Iterable[_Summary], kept: ShardFolder | None, top: int) -> _Summary | None:
    """Returns the sum of summaries, and of what a folder has, which keeps it."""
    found = None if kept is None or not kept.stored else _Summary.loaded(kept, top)
    saved = time.monotonic()
    try:
        for each in results:
            found = each if found is None else found.plus(each)
            if kept is not None and time.monotonic() - saved > _SAVED_AFTER:
                found.save(kept)
                saved = time.monotonic()
    finally:
        if kept is not None and found is not None:
            found.save(kept)
    return found


@dataclass(frozen=True, eq=False)
class _Summary:
    """What pages need of some examples.

    Attributes:
        peaks: The largest activations, one for each example, of shape (features, top); -inf where there are fewer.
        examples: The numbers of the examples.
        activations: All activations of these, (features, top, positions); NaN at padding.
        count: How many positions there are.
        active: At how many of them each feature is positive.
        exponents: The width of the bins of each feature is 2 to the power of this.
        bins: How many activations are in each bin, (features, 2 * _HALF). The lower edge of the one in the middle is 0.
        inputs: The tokens of the examples among the top, or rows of another input, by the numbers of the examples.
        top: How many examples there are at most.
        total: How many examples it is of.
        digests: The digests of their batches.
    """

    peaks: Tensor
    examples: Tensor
    activations: Tensor
    count: int
    active: Tensor
    exponents: Tensor
    bins: Tensor
    inputs: Mapping[int, Tensor]
    top: int
    total: int
    digests: tuple[str, ...]

    @classmethod
    def of(
        cls,
        values: Tensor,
        kept: Tensor,
        counted: Tensor,
        first: int,
        inputs: Sequence[Tensor],
        top: int,
        digests: tuple[str, ...] = (),
    ) -> _Summary:
        """Returns the summary of a batch of activations, (examples, positions, features)."""
        flat, number = values[counted], torch.arange(values.shape[-1], device=values.device)
        if not flat.isfinite().all():
            raise ExperimentError("an activation is infinite or not a number on a batch of the dataset")
        best = values.masked_fill(~counted[..., None], -torch.inf).amax(1).mT.sort(descending=True, stable=True)
        chosen = best.indices[:, :top]
        activations = values.masked_fill(~kept[..., None], torch.nan)[chosen, :, number[:, None]]
        largest = flat.abs().amax(0) if len(flat) else flat.new_zeros(len(number))
        exponents = (largest.frexp().exponent.long() - _LOG_HALF).clamp(min=-100)
        exponents = exponents.where(largest > 0, -100)
        bins = []
        for some in number.split(max(1, _AT_ONCE // max(1, len(flat)))):
            at = (flat[:, some] * 2.0 ** -exponents[some].double()).floor().long() + _HALF
            at += 2 * _HALF * torch.arange(len(some), device=at.device)
            bins.append(at.flatten().bincount(minlength=2 * _HALF * len(some)).view(len(some), -1))
        parts = best.values[:, :top], chosen + first, activations, (flat > 0).sum(0), exponents, torch.cat(bins)
        peaks, examples, activations, active, exponents, whole = (each.cpu() for each in parts)
        used = {at: inputs[at - first].cpu().clone() for at in examples.unique().tolist()}
        total = len(values)
        return cls(peaks, examples, activations, len(flat), active, exponents, whole, used, top, total, digests)

    def plus(self, later: _Summary) -> _Summary:
        """Returns the summary of these examples and later ones."""
        both = (self, later)
        peaks, examples = (torch.cat([getattr(each, name) for each in both], 1) for name in ("peaks", "examples"))
        length = max(each.activations.shape[-1] for each in both)
        padded = [
            torch.nn.functional.pad(each.activations, (0, length - each.activations.shape[-1]), value=torch.nan)
            for each in both
        ]
        order = peaks.sort(descending=True, stable=True).indices[:, : self.top]
        examples, exponents = examples.gather(1, order), self.exponents.maximum(later.exponents)
        inputs = {**self.inputs, **later.inputs}
        return _Summary(
            peaks.gather(1, order),
            examples,
            torch.cat(padded, 1)[torch.arange(len(order))[:, None], order],
            self.count + later.count,
            self.active + later.active,
            exponents,
            self._with_exponents(exponents) + later._with_exponents(exponents),
            {at: inputs[at] for at in examples.unique().tolist()},
            self.top,
            self.total + later.total,
            self.digests + later.digests,
        )

    def save(self, folder: ShardFolder) -> None:
        """Writes the summary as the only shard of a folder."""
        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        inputs = {f"inputs.{at}": each for at, each in self.inputs.items()}
        folder.save(0, {**tensors, **inputs, "count": torch.tensor(self.count)}, self.total, self.digests)

    @classmethod
    def loaded(cls, folder: ShardFolder, top: int) -> _Summary:
        """Returns the summary in a folder."""
        tensors = folder.load(0)
        inputs = {int(name[7:]): each for name, each in tensors.items() if name.startswith("inputs.")}
        own: Any = {name: tensors[name] for name in _TENSORS} | {"count": int(tensors["count"])}
        return cls(**own, inputs=inputs, top=top, total=folder.examples, digests=folder.stored)

    def _with_exponents(self, exponents: Tensor) -> Tensor:
        """Returns the numbers in wider bins."""
        shifts = (exponents - self.exponents).clamp(max=2 * _LOG_HALF)[:, None]
        return torch.zeros_like(self.bins).scatter_add(1, (torch.arange(-_HALF, _HALF) >> shifts) + _HALF, self.bins)

    def page(self, number: int, name: str, tokenizer: Any, fields: Mapping[str, Any]) -> FeaturePage:
        """Returns the page of a feature."""
        chosen = self.peaks[number] > -torch.inf
        examples = self.examples[number][chosen]
        inputs = [self.inputs[at] for at in examples.tolist()]
        has_tokens = not any(each.is_floating_point() for each in inputs)
        used = self.bins[number].nonzero().flatten()
        first, last = int(used.min()), int(used.max()) + 1
        edges = np.arange(first - _HALF, last - _HALF + 1) * 2.0 ** int(self.exponents[number])
        return FeaturePage(
            name,
            examples.numpy(),
            self.peaks[number][chosen].numpy(),
            [row[~np.isnan(row)] for row in self.activations[number][chosen].numpy()],
            [each.numpy() for each in inputs] if has_tokens else None,
            () if has_tokens else inputs,
            self.count,
            int(self.active[number]) / self.count,
            self.bins[number][first:last].numpy(),
            edges,
            tokenizer=tokenizer,
            **fields,
        )


# -- what weights say --------------------------------------------------------------------------------------------------


def _weight_fields(pg: PatchableGraph, base: str, features: _Features, count: int) -> list[dict[str, Any]]:
    """Returns the fields of pages that weights give, for each feature, or why they are not known."""
    found: list[dict[str, Any]] = [{} for _ in features.names]
    for part, unknown in ((_effects, "unknown"), (_sources, "unread")):
        try:
            for number, fields in enumerate(part(pg, base, features, count)):
                found[number] |= fields
        except (GraphError, ExperimentError) as error:
            found = [fields | {unknown: str(error)} for fields in found]
    return found


def _effects(pg: PatchableGraph, base: str, features: _Features, count: int) -> Iterator[dict[str, Any]]:
    """Yields the tokens whose logits each feature raises, and lowers, most."""
    place = FeaturePlace.of_features(pg, base)
    matrix, stacks = place.written(pg), pg.components.evidence.stacks
    if place.output_norm(pg) is not None:
        raise ExperimentError(f"what {base!r} adds to the residual stream depends on the scale of a norm")
    norm = next((each.norm for each in stacks if each.name == place.stack), None)
    unembedding = through_norm(pg, norm, pg.weights[place.stack].W_U.double().mT, backwards=True).mT
    for rows in features.rows(matrix, max(1, _AT_ONCE // unembedding.shape[1])):
        logits = rows.to(unembedding) @ unembedding
        raised, lowered = (logits.topk(min(count, logits.shape[1]), largest=is_largest) for is_largest in (True, False))
        for most, at_most, least, at_least in zip(*(each.tolist() for each in (*raised, *lowered)), strict=True):
            promoted, suppressed = zip(at_most, most, strict=True), zip(at_least, least, strict=True)
            yield {"promoted": [*promoted], "suppressed": [*suppressed]}


def _sources(pg: PatchableGraph, base: str, features: _Features, count: int) -> Iterator[dict[str, Any]]:
    """Yields the heads and features that write most into what each feature reads."""
    read, matrix = FeaturePlace.of_features(pg, base).read(pg)
    for rows in features.rows(matrix, _AT_ONCE // 2**15):
        parts = sources(pg, read, rows)
        best = [scores.abs().topk(min(count, len(names))).indices for names, scores in parts]
        for number in range(len(rows)):
            own = ((*part, each[number].tolist()) for part, each in zip(parts, best, strict=True))
            pairs = [[(names[at], float(scores[number, at])) for at in order] for names, scores, order in own]
            yield dict(zip(("heads", "features"), pairs, strict=True))


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
        data = base64.b64encode(png_of((unit * 255).round().astype(np.uint8).transpose(1, 2, 0))).decode()
        return f'<img style="width:112px;image-rendering:pixelated" alt="" src="data:image/png;base64,{data}">'
    lines = unit[None] if unit.ndim == 1 else unit if unit.shape[1] >= unit.shape[0] else unit.T
    points = np.linspace(0, _WIDTH, lines.shape[1])
    drawn = "".join(
        f'<polyline fill="none" stroke="currentColor" opacity=".6" points="'
        f'{" ".join(f"{x:.1f},{40 - 38 * y:.1f}" for x, y in zip(points, line, strict=True))}"/>'
        for line in lines[:_MOST_LINES]
    )
    return f'<svg width="{_WIDTH}" height="42" style="display:block">{drawn}</svg>'


def png_of(image: _Array) -> bytes:
    """Returns bytes of shape (rows, columns), gray, or (rows, columns, 1 or 3) as a PNG file."""
    rows, columns = image.shape[:2]
    lines = np.insert(image.reshape(rows, -1), 0, 0, axis=1)  # each line begins with the number of its filter
    header = struct.pack(">IIBBBBB", columns, rows, 8, 2 if image.shape[2:] == (3,) else 0, 0, 0, 0)
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(lines.tobytes(), 9), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks.items()
    )
