"""What states of the residual stream say at each position: the probable next tokens, and one token's probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.engine.cells import PatchMap
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.methods.arguments import check_graph
from graphpatch_notebook.experiments.methods.lens import (
    arranged,
    check_states,
    checked_tokens,
    component,
    keys_of_logits,
    layer_count,
    stream_states,
)
from graphpatch_notebook.experiments.methods.reference_runs import record
from graphpatch_notebook.experiments.methods.sweeps import run_sweep
from graphpatch_notebook.patchable_graph import PatchableGraph, captured, runs_where_the_model_is
from graphpatch_notebook.patches.kinds import Patch, ReplacePatch
from graphpatch_notebook.values import Key, take
from graphpatch_notebook.warning_places import collected_warnings

_PARTS = {"attention": "attn_out", "mlp": "mlp_out"}
STREAMS = ("residual", *_PARTS)
"""The values that are read: the states of the stream, and what attention and MLPs write to it."""

_AXES = ("batch", "position", "vocab")


@dataclass(frozen=True)
class Readout:
    """What one state says at each position.

    Attributes:
        tokens: The most probable tokens, the first first, of shape (position, top).
        probabilities: Their probabilities.
        target: The probability of the target token, of shape (position,).
        rank: How many tokens are more probable than the target.
    """

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    probabilities: np.ndarray[Any, np.dtype[np.float64]]
    target: np.ndarray[Any, np.dtype[np.float64]]
    rank: np.ndarray[Any, np.dtype[np.int64]]

    @classmethod
    def of(cls, values: np.ndarray[Any, np.dtype[np.float64]]) -> Readout:
        """Returns the readout in the numbers of `_ReadLogits`."""
        top = (values.shape[1] - 2) // 2
        return cls(values[:, :top].astype(np.int64), values[:, top:-2], values[:, -2], values[:, -1].astype(np.int64))


@dataclass(frozen=True)
class ReadStates:
    """The states of a stream in one run, and what they say.

    Attributes:
        names: The component of each state, the first layer first.
        layers: The layer that computes each state; `None` for the embeddings.
        states: The states.
        readouts: What each state says.
        remarks: Warnings of the run.
    """

    names: Sequence[str]
    layers: Sequence[int | None]
    states: Sequence[Tensor]
    readouts: Sequence[Readout]
    remarks: Sequence[str] = ()


class Readouts:
    """Reads the states of a model on some inputs, without and with patches.

    The target is the token whose probability is read: one for all positions, or one for each; `None` for the most
    probable next token of each position in the model's output. `top` is how many probable tokens are read.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        inputs: Inputs,
        *,
        target: int | Sequence[int] | None = None,
        top: int = 10,
        row: int = 0,
        stack: str = "",
    ) -> None:
        check_graph(pg)
        self._pg, self._inputs = pg, inputs
        self._start, self._count = f"{stack}." if stack else "", layer_count(pg, stack)
        self._last = component(pg, f"{self._start}layers[{self._count - 1}].resid_post")
        logits = component(pg, "@logits")
        crossing = {name.partition("layers[")[0] for name in pg.components if ".cross_attn." in name}
        if crossing and self._start not in crossing:
            raise ExperimentError(
                f"the logits are for the positions of other stacks, {sorted(crossing)}, than {stack!r}"
            )
        if sorted(logits.axes) != sorted(_AXES):
            raise ExperimentError(f"a lens view needs logits of {', '.join(_AXES)}, not of {', '.join(logits.axes)}")
        if inputs.rows is not None and not 0 <= row < inputs.rows:
            raise ExperimentError(f"row {row} is not one of the {inputs.rows} rows of the batch")
        self.row, self.rows = row, inputs.rows or 1
        logits_of = _LogitsOfRow(keys_of_logits(pg, logits), logits.axes, row)
        run = record(pg, inputs, [self._last.name], logits_of)
        found = run.measurement.values
        if len(found) != run.values[self._last.name].shape[self._last.axes.index("position")]:
            raise ExperimentError(
                f"the model returned logits for {len(found)} positions, which are not those of the states: give inputs "
                "for which it returns all, or another stack="
            )
        wanted = checked_tokens(getattr(target, "tolist", lambda: target)(), logits)
        tokens = found.argmax(-1).tolist() if wanted is None else wanted
        self.target: list[int] = [tokens] * len(found) if isinstance(tokens, int) else list(tokens)
        if len(self.target) != len(found):
            raise ExperimentError(f"give one target token, or one for each of {len(found)} positions, not {target!r}")
        self._metric = _ReadLogits(logits_of, tuple(self.target), min(top, found.shape[-1]))

    def names(self, stream: str) -> tuple[list[str], list[int | None]]:
        """Returns the components of a stream, and the layer that computes each of them; `None` for the embeddings."""
        layers = range(self._count)
        if stream == "residual":
            after = [f"{self._start}layers[{layer}].resid_post" for layer in (-1, *layers)]
            states = zip(after, stream_states(self._start, self._count), strict=True)
            return [one if one in self._pg.components else other for one, other in states], [None, *layers]
        if stream not in _PARTS:
            raise ExperimentError(f"stream must be one of {', '.join(map(repr, STREAMS))}, not {stream!r}")
        names = {layer: f"{self._start}layers[{layer}].{_PARTS[stream]}" for layer in layers}
        if not self.has(stream):
            component(self._pg, names[0])  # raises an error with the reason
        found = {layer: name for layer, name in names.items() if name in self._pg.components}
        return list(found.values()), list(found)

    def has(self, stream: str) -> bool:
        """Whether the model has a stream: some layers may lack it."""
        parts = (f"{self._start}layers[{layer}].{_PARTS.get(stream)}" for layer in range(self._count))
        return stream == "residual" or any(part in self._pg.components for part in parts)

    def read(self, stream: str, patches: Mapping[str, Sequence[Patch[Any]]] | None = None) -> ReadStates:
        """Returns what the states of a stream say, without or with patches, which act on each readout.

        Raises:
            ExperimentError: A state has another shape than the residual stream, or its logits cannot be computed.
        """
        names, layers = self.names(stream)
        with collected_warnings() as remarks:
            given: PatchMap = patches or {}
            with self._pg.patch(given):
                states = record(self._pg, self._inputs, dict.fromkeys([*names, self._last.name])).values
            check_states(states, names, self._last.name)
            found = self._read([states[name] for name in names], patches or {})
        return ReadStates(names, layers, [states[name] for name in names], found, remarks)

    def _read(self, states: Sequence[Tensor], patches: Mapping[str, Sequence[Patch[Any]]]) -> list[Readout]:
        """Returns what states say, if they are the last state of the stream: patches behind it act on each of them."""
        order = {path: number for number, path in enumerate(self._pg.nodes)}
        places = {entry.target.path: path for entry, path in zip(self._entries(patches), patches, strict=True)}
        later = {path: patches[path] for place, path in places.items() if order[place] > order[self._last.path]}

        def replaced(state: int) -> PatchMap:
            return {**later, self._last.path: ReplacePatch(states[state])}

        axes = {"state": range(len(states))}
        result = run_sweep(self._pg, axes, replaced, self._inputs, metric=self._metric, progress=False)
        if result.attrs.get("errors"):
            raise ExperimentError(f"the logits of a state cannot be computed: {result.attrs['errors'][0]}")
        return [Readout.of(values) for values in result.values]

    def _entries(self, patches: PatchMap) -> Sequence[Any]:
        return captured(self._pg).entries_of(patches)


class RemoteReadouts(Readouts):
    """Reads the states of a model in other processes; the states stay there."""

    def __init__(self, pg: PatchableGraph, inputs: Inputs, **options: Any) -> None:
        self._options = options
        super().__init__(pg, inputs, **options)

    def read(self, stream: str, patches: Mapping[str, Sequence[Patch[Any]]] | None = None) -> ReadStates:
        """Returns what the states of a stream say, without the states: see `Readouts.read`."""
        return _read_there(self._pg, self._inputs, self._options | {"target": self.target}, stream, patches)


@runs_where_the_model_is
def _read_there(
    pg: PatchableGraph,
    inputs: Inputs,
    options: Mapping[str, Any],
    stream: str,
    patches: Mapping[str, Sequence[Patch[Any]]] | None,
) -> ReadStates:
    return replace(Readouts(pg, inputs, **options).read(stream, patches), states=())


@dataclass(frozen=True)
class _LogitsOfRow:
    """The metric: the logits of one row of the batch, of shape (position, vocab)."""

    keys: tuple[Key, ...]
    axes: tuple[str, ...]
    row: int

    def __call__(self, output: Any) -> Tensor:
        for key in self.keys:
            output = take(output, key)
        return arranged(output.detach(), self.axes, _AXES)[self.row]


@dataclass(frozen=True)
class _ReadLogits:
    """The metric: the numbers of a `Readout`, for each position."""

    logits_of: _LogitsOfRow
    target: tuple[int, ...]
    top: int

    def __call__(self, output: Any) -> Tensor:
        logits = self.logits_of(output).float()
        probabilities = logits.softmax(-1)
        found = probabilities.topk(self.top)
        target = torch.tensor(self.target, device=logits.device)[:, None]
        rank = (logits > logits.gather(-1, target)).sum(-1, keepdim=True)
        parts = [found.indices, found.values, probabilities.gather(-1, target), rank]
        return torch.cat([part.double() for part in parts], -1)
