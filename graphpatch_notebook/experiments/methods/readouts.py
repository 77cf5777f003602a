"""What states of the residual stream say at each position: the probable next tokens, and one token's probability.

`Readouts` keeps the run without patches, so that later readouts of other states run the end of the model only.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.checks.model_state import Fingerprint, ModuleState
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.execution import NEVER, FrameTree
from graphpatch_notebook.experiments.engine.cells import Cell, PatchMap
from graphpatch_notebook.experiments.engine.clean_run import Mark
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.purity import is_pure
from graphpatch_notebook.experiments.engine.runner import CellRunner
from graphpatch_notebook.experiments.engine.sweep_setup import SweepRequest
from graphpatch_notebook.experiments.methods.arguments import (
    check_graph,
    check_inputs,
)
from graphpatch_notebook.experiments.methods.lens import (
    arranged,
    checked_tokens,
    component,
    keys_of_logits,
    layer_count,
    stream_states,
)
from graphpatch_notebook.experiments.methods.reference_runs import record
from graphpatch_notebook.inspection.resolution import Target, resolve
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.patchable_graph import PatchableGraph, captured, runs_where_the_model_is
from graphpatch_notebook.patches.kinds import Patch, ReplacePatch
from graphpatch_notebook.sharded import sharding_of
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
        if sharding_of(captured(pg).root) is not None:
            raise ExperimentError(
                "a lens view: the model is sharded over processes, all of which must run the same; use logit_lens"
            )
        check_inputs(pg, inputs)
        self._pg, self._inputs = pg, inputs
        self._start, self._count = f"{stack}." if stack else "", layer_count(pg, stack)
        if (reader := _reader_of(pg, self._start)) is not None:
            raise ExperimentError(
                f"the logits are for the positions of the stack {reader!r}, which reads {stack!r} by cross attention: "
                f"a lens view needs stack={reader!r}; logit_lens reads states of {stack!r}, too"
            )
        self._last = component(pg, f"{self._start}layers[{self._count - 1}].resid_post")
        logits = component(pg, "@logits")
        if sorted(logits.axes) != sorted(_AXES):
            raise ExperimentError(
                f"the logits have the dimensions {', '.join(logits.axes)}: a lens view needs {', '.join(_AXES)}"
            )
        if inputs.rows is not None and not 0 <= row < inputs.rows:
            raise ExperimentError(f"row {row} is not one of the {inputs.rows} rows of the batch")
        self._metric = partial(_logits_of_row, keys_of_logits(pg, logits), logits.axes, row)
        tokens = getattr(target, "tolist", lambda: target)()  # of positions; those of a tensor would be of rows
        self._top, self._wanted = top, checked_tokens(tokens, logits)
        self.row, self.rows = row, inputs.rows or 1
        self._forget()

    def _forget(self) -> None:
        """Starts again: with the model as it is now."""
        self._made_for = self._fingerprint()
        self._runners: dict[frozenset[str], CellRunner] = {}
        self._clean: dict[str, ReadStates] = {}
        states, logits, _ = self._run([self._last.name], {}, self._metric)
        if len(logits) != states[self._last.name].shape[self._last.axes.index("position")]:
            raise ExperimentError(
                f"the model returned logits for {len(logits)} positions only: give inputs for which it returns all"
            )
        self.target = _target_of(self._wanted, logits)
        self._read_logits = _ReadLogits(self._metric, tuple(self.target), min(self._top, logits.shape[-1]))

    def _fingerprint(self) -> tuple[Any, ...]:
        return Fingerprint(ModuleState(captured(self._pg).module, is_look=True)), captured(self._pg).edits

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
        """Returns what the states of a stream say, without or with patches.

        States that equal those without patches are not read again. Patches after the last layer act on each readout.

        Raises:
            ExperimentError: A state has another shape than the residual stream, or its logits cannot be computed.
        """
        if self._made_for != self._fingerprint():
            self._forget()
        if stream not in self._clean:
            self._clean[stream] = self._read(stream, {}, {})
        clean = self._clean[stream]
        if patches is None:
            return clean
        known = zip(clean.states, clean.readouts, strict=True)
        return self._read(stream, patches, dict(zip(clean.names, known, strict=True)))

    def _read(
        self,
        stream: str,
        patches: Mapping[str, Sequence[Patch[Any]]],
        known: Mapping[str, tuple[Tensor, Readout]],
    ) -> ReadStates:
        names, layers = self.names(stream)
        later: dict[str, Sequence[Patch[Any]]] = {}
        with collected_warnings() as remarks:
            if (start := self._start_of(patches)) is not None:
                states, output = self._run_from(start, [*names, self._last.name], patches, known)
            else:
                states, output, later = self._run([*names, self._last.name], patches, self._read_logits)
        wrong = next((name for name in names if states[name].shape != states[self._last.name].shape), None)
        if wrong is not None:
            raise ExperimentError(
                f"{wrong!r} has shape {tuple(states[wrong].shape)}, and the residual stream "
                f"{tuple(states[self._last.name].shape)}: it cannot be read as a state of the stream"
            )
        same = {n: known[n][1] for n in names if n in known and not later and torch.equal(known[n][0], states[n])}
        if self._last.name in names and output is not None:
            same[self._last.name] = Readout.of(output)  # the model itself has read it
        changed = [name for name in names if name not in same]
        found = same | dict(zip(changed, self._readouts([states[name] for name in changed], later), strict=True))
        return ReadStates(names, layers, [states[n] for n in names], [found[n] for n in names], remarks)

    def _start_of(self, patches: Mapping[str, Sequence[Patch[Any]]]) -> float | None:
        """Returns when the first frame with a patch begins in the run without patches.

        `None`: a patch may act behind the last layer, or write into recorded values, or there are no such times.
        """
        clean = self._runner().clean if patches and is_pure(patches) else None
        if clean is None:
            return None
        spans = [clean.span_of(entry.target) for entry in captured(self._pg).entries_of(patches)]
        _, end = clean.span_of(self._target(self._last.name))
        return min(began for began, _ in spans) if max(ended for _, ended in spans) <= end < NEVER else None

    def _target(self, name: str) -> Target:
        return resolve(captured(self._pg).root, name)

    def _run_from(
        self,
        start: float,
        names: Sequence[str],
        patches: Mapping[str, Sequence[Patch[Any]]],
        known: Mapping[str, tuple[Tensor, Readout]],
    ) -> tuple[Mapping[str, Tensor], Any]:
        """Returns the values of components, those before a time without a run, and the metric of the output.

        The run ends with the last layer, without a metric, if several values are to be read.
        """
        runner = self._runner()
        assert runner.clean is not None
        before = {n: known[n][0] for n in names if n in known and runner.clean.span_of(self._target(n))[1] < start}
        wanted = {*names} - {*before}
        metric, until = (None, self._last.path) if len(wanted) > 1 else (self._read_logits, None)
        state = ModuleState(captured(self._pg).module)
        patched: PatchMap = {**patches}
        with afterwards(state.restore), runner.resumed(start) as inputs, self._pg.patch(patched):
            run = record(self._pg, inputs, wanted, metric, until)
        return {**before, **run.values}, None if metric is None else run.measurement.values

    def _run(
        self, names: Sequence[str], patches: Mapping[str, Sequence[Patch[Any]]], metric: Callable[[Any], Tensor]
    ) -> tuple[Mapping[str, Tensor], Any, dict[str, Sequence[Patch[Any]]]]:
        """Returns the values of components, the metric of the output, and the patches that act after the last layer."""
        tree = FrameTree()
        marks = {path: Mark(tree=tree) for path in patches}
        last = Mark(tree=tree)
        state = ModuleState(captured(self._pg).module)
        # In one context: a patch on a part of a splice needs the splice in the same patch map.
        marked: PatchMap = {path: [*given, marks[path]] for path, given in patches.items()}
        with afterwards(state.restore), self._pg.patch(marked), self._pg.patch({self._last.path: last}):
            run = record(self._pg, self._inputs, names, metric)
        later = {path: patches[path] for path, mark in marks.items() if last.occurred < mark.occurred < NEVER}
        return run.values, run.measurement.values, later

    def _runner(self, later: Collection[str] = ()) -> CellRunner:
        """Returns what runs the model from the last layer on, with patches at these paths."""
        runner = self._runners.get(frozenset(later))
        if runner is None:
            request = SweepRequest(self._inputs, self._read_logits, [self._last.path, *later])
            runner = self._runners[frozenset(later)] = CellRunner(self._pg, request)
        return runner

    def _readouts(self, states: Sequence[Tensor], later: Mapping[str, Sequence[Patch[Any]]]) -> list[Readout]:
        """Returns what states say, if they are the last state of the stream."""
        copies: list[PatchMap] = [{self._last.path: ReplacePatch(value), **later} for value in states]
        runner = self._runner(later)
        cells = [Cell(number, {"state": number}, patches) for number, patches in enumerate(copies)]
        chunks = [[cell] for cell in cells]
        if not later or is_pure(later):
            chunks = runner.chunks(cells, {cell.number: captured(self._pg).entries_of(cell.patches) for cell in cells})
        found: dict[int, Readout] = {}
        for chunk in chunks:
            for result in runner.run([(cell.number, cell.patches) for cell in chunk]):
                if result.measurement is None:
                    raise ExperimentError(f"the logits of a state of the stream cannot be computed: {result.error}")
                found[result.number] = Readout.of(result.measurement.values)
        return [found[number] for number in range(len(states))]


class RemoteReadouts(Readouts):
    """Reads the states of a model in other processes, which keep the run without patches; the states stay there."""

    def __init__(self, pg: PatchableGraph, inputs: Inputs, **options: Any) -> None:
        self._key, self._options = uuid.uuid4().hex, options
        super().__init__(pg, inputs, **options)

    def _forget(self) -> None:
        self.target, _ = _read_there(self._pg, self._key, self._inputs, self._options)

    def read(self, stream: str, patches: Mapping[str, Sequence[Patch[Any]]] | None = None) -> ReadStates:
        """Returns what the states of a stream say, without the states: see `Readouts.read`."""
        _, found = _read_there(self._pg, self._key, self._inputs, self._options, stream, patches)
        assert found is not None
        return found


_kept: dict[str, Readouts] = {}
"""Those of the view that has read last."""


@runs_where_the_model_is
def _read_there(
    pg: PatchableGraph,
    key: str,
    inputs: Inputs,
    options: Mapping[str, Any],
    stream: str | None = None,
    patches: Mapping[str, Sequence[Patch[Any]]] | None = None,
) -> tuple[list[int], ReadStates | None]:
    readouts = _kept.get(key)
    if readouts is None:
        _kept.clear()
        readouts = _kept[key] = Readouts(pg, inputs, **options)
    return readouts.target, None if stream is None else replace(readouts.read(stream, patches), states=())


def _logits_of_row(keys: tuple[Key, ...], axes: tuple[str, ...], row: int, output: Any) -> Tensor:
    """Returns the logits of one row of the batch, of shape (position, vocab)."""
    for key in keys:
        output = take(output, key)
    return arranged(output.detach(), axes, _AXES)[row]


@dataclass(frozen=True)
class _ReadLogits:
    """The metric: the numbers of a `Readout`, for each position."""

    logits_of: Callable[[Any], Tensor]
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


def _reader_of(pg: PatchableGraph, start: str) -> str | None:
    """Returns the stack that reads that at `start` by cross attention; `None` if there is none."""
    crossing = {name.partition("layers[")[0] for name in pg.components if ".cross_attn." in name}
    return next((one.removesuffix(".") for one in sorted(crossing) if start not in crossing), None)


def _target_of(target: Any, logits: Any) -> list[int]:
    """Returns the target of each position."""
    if target is None:
        return [int(token) for token in logits.argmax(-1)]
    tokens = [target] * len(logits) if isinstance(target, int) else [int(token) for token in target]
    if len(tokens) != len(logits):
        raise ExperimentError(
            f"give one target token, or one for each of the {len(logits)} positions, not {len(tokens)}"
        )
    return tokens
