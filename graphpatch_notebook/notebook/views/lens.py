"""The lens view: what each layer says at each position, as a heatmap of layers and positions.

`Readouts` (experiments/methods/lens.py) computes the numbers; js/src/views/lens_view.ts draws them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import traitlets

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.grids import tick_text
from graphpatch_notebook.experiments.methods.lens import STREAMS, Readouts, ReadStates, numbers_of
from graphpatch_notebook.notebook.display.tables import escaped
from graphpatch_notebook.notebook.display.tokens import TokenInputs
from graphpatch_notebook.notebook.messages import LensRequest
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Workspace, counted
from graphpatch_notebook.notebook.views.linked import (
    Answer,
    ComputedView,
    Handlers,
    Patches,
    RequestContext,
    inputs_for_view,
)
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.texts import token_text

_TOP = 10
_MOST_STATIC = 250
"""How many cells the table without scripts has."""
_MOST_SENT = 700_000
"""About how many bytes are sent at most, before they are compressed."""


def lens_of(
    graph: PatchableGraph,
    workspace: Workspace,
    inputs: Inputs | None = None,
    *,
    target: int | str | Sequence[int | str] | None = None,
    stream: str | Sequence[str] = "residual",
    tokens: Sequence[str] | None = None,
    row: int = 0,
    stack: str = "",
) -> LensView:
    """Returns a new lens view of a graph: `show_lens`."""
    session, runs, given = inputs_for_view(graph, workspace, inputs)
    inputs = Inputs(*given.copy())
    readouts = Readouts(graph, inputs, target=numbers_of(graph, target), top=_TOP, row=row, stack=stack)
    size = len(readouts.target)
    if tokens is not None and len(tokens) != size:
        raise ExperimentError(f"tokens has {len(tokens)} texts for {size} positions")
    positions = _texts_of_inputs(graph, inputs, row, runs.tokenizer, size) if tokens is None else tokens
    streams = [*dict.fromkeys([stream] if isinstance(stream, str) else stream)]
    return LensView(graph, session, workspace, readouts, streams, target is not None, runs.tokenizer, positions)


def _texts_of_inputs(graph: PatchableGraph, inputs: Inputs, row: int, tokenizer: Any, size: int) -> list[str] | None:
    batch = TokenInputs.of(graph, inputs.args, inputs.kwargs).batch
    if not batch or tokenizer is None or len(batch[row]) != size:
        return None
    return [token_text(tokenizer, token) for token in batch[row]]


class LensView(ComputedView):
    """What each layer says at each position. `show_lens` returns it.

    Attributes:
        stream: The stream that is shown.
    """

    lens = traitlets.Dict(read_only=True).tag(sync=True, echo_update=False)
    cells = traitlets.Bytes(read_only=True).tag(sync=True, echo_update=False)
    stream = traitlets.Unicode().tag(sync=True)

    VIEW: ClassVar[str] = "lens"
    COMPUTED: ClassVar[tuple[str, ...]] = ("lens", "cells")
    FRONT_END: ClassVar[Mapping[str, Any]] = {**ComputedView.FRONT_END, "stream": str}

    def __init__(
        self,
        graph: PatchableGraph,
        session: Session,
        workspace: Workspace,
        readouts: Readouts,
        streams: list[str],
        has_target: bool,
        tokenizer: Any,
        positions: Sequence[str] | None,
    ) -> None:
        self._readouts, self._tokenizer, self._positions = readouts, tokenizer, positions
        self._streams, self._has_target = streams, has_target
        self._available = [stream for stream in STREAMS if readouts.has(stream)]
        self._clean: dict[str, ReadStates] = {}
        self._patched: dict[str, ReadStates] = {}
        super().__init__(graph, session, workspace)
        self.stream = self._streams[0]

    def show_stream(self, stream: str) -> None:
        """Shows a stream: one of `residual`, `attention` and `mlp`. It is computed if it was not shown before.

        Raises:
            ExperimentError: The model does not have it.
        """
        self._readouts.names(stream)
        if stream not in self._streams:
            self._streams.append(stream)
            self.update()
        self.stream = stream

    # -- the numbers ---------------------------------------------------------------------------------------------------

    def _compute(self, graph: PatchableGraph, patches: Patches) -> Any:
        streams = [*self._streams]
        clean = {stream: self._readouts.read(stream) for stream in streams}
        return clean, {stream: self._readouts.read(stream, patches) for stream in streams} if patches else {}

    def _keep(self, found: tuple[dict[str, ReadStates], dict[str, ReadStates]]) -> None:
        self._clean, self._patched = found

    def _handlers(self) -> Handlers:
        return {**super()._handlers(), "lens": self._show}

    def _show(self, _: RequestContext, payload: LensRequest) -> Answer:
        """Shows a stream, or only the patches as they are now, and returns the status of that."""
        is_new = payload.stream is not None and payload.stream not in self._streams
        if payload.stream is not None and is_new:
            self._readouts.names(payload.stream)
            self._streams.append(payload.stream)
        return self._follow(is_changed=is_new)

    def _check(self, name: str, value: Any) -> None:
        super()._check(name, value)
        if name == "stream" and value not in self._streams:
            shown = ", ".join(self._streams)
            raise traitlets.TraitError(f"stream must be one that is shown ({shown}); show_stream shows another")

    _checked_stream = traitlets.validate("stream")(ComputedView.checked)

    # -- values of traits ----------------------------------------------------------------------------------------------

    def _makers(self) -> Mapping[str, Callable[[], Any]]:
        return {**super()._makers(), "lens": self._state, "cells": self._packed}

    @property
    def _read_runs(self) -> list[dict[str, ReadStates]]:
        return [self._clean, *([self._patched] if self._patched else [])]

    @property
    def _top(self) -> int:
        """How many of the probable tokens are sent: fewer for large models and long inputs."""
        computed = self._clean[self._streams[0]].readouts[0].tokens.shape[1]
        cells = sum(len(read.readouts) for run in self._read_runs for read in run.values()) * len(self._readouts.target)
        return max(1, min(int(computed), _MOST_SENT // (8 * cells) - 1))

    @property
    def _vocabulary(self) -> list[int]:
        """All tokens that are shown."""
        shown = [
            row.tokens[:, : self._top] for run in self._read_runs for read in run.values() for row in read.readouts
        ]
        found = np.concatenate([np.array(self._readouts.target), *(tokens.ravel() for tokens in shown)])
        return [int(token) for token in np.unique(found)]

    def _state(self) -> dict[str, Any]:
        """Returns the `Lens` of the front end."""
        place = {token: number for number, token in enumerate(self._vocabulary)}
        return {
            "streams": [
                {"name": stream, "rows": [*map(_row, read.names, read.layers)]} for stream, read in self._clean.items()
            ],
            "available": self._available,
            "row": self._readouts.row,
            "rows": self._readouts.rows,
            "positions": None if self._positions is None else [*self._positions],
            "vocabulary": [token_text(self._tokenizer, token) for token in place],
            "target": [place[token] for token in self._readouts.target],
            "has_target": self._has_target,
            "top": self._top,
            "runs": len(self._read_runs),
            "version": self._computed_for,
            "remarks": [*dict.fromkeys(remark for read in self._patched.values() for remark in read.remarks)],
        }

    def _packed(self) -> bytes:
        """Returns the numbers: for each run and stream those of all rows, as `readLens` in lens_view.ts reads them."""
        vocabulary, top = np.array(self._vocabulary), self._top
        parts: list[bytes] = []
        for read in (read for run in self._read_runs for read in run.values()):
            of_rows = read.readouts
            tokens = np.stack([np.searchsorted(vocabulary, row.tokens[:, :top]) for row in of_rows])
            parts.append(tokens.astype("<u4").tobytes())
            parts.append(np.stack([row.probabilities[:, :top] for row in of_rows]).astype("<f4").tobytes())
            parts.append(np.stack([row.target for row in of_rows]).astype("<f4").tobytes())
            parts.append(np.stack([row.rank for row in of_rows]).astype("<u4").tobytes())
        return zlib.compress(b"".join(parts), 6)

    # -- display -------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        rows, positions = len(self._clean[self.stream].names), len(self._readouts.target)
        patches = f", with {counted(len(self._chosen))}" if self._patched else ""
        return f"<LensView of {self._session.origin.graph}, {self.stream}, {rows} x {positions}{patches}>"

    def _static_html(self) -> str | None:
        return "\n".join(
            line
            for run, what in zip(self._read_runs, ("", " with the patches"), strict=False)
            for line in self._table(run[self.stream or self._streams[0]], what)
        )

    def _table(self, read: ReadStates, what: str) -> Iterator[str]:
        """Yields a table of the last positions: the most probable token of each cell."""
        count = len(self._readouts.target)
        texts = [*map(str, range(count))] if self._positions is None else self._positions
        shown = range(max(0, count - max(1, _MOST_STATIC // len(read.names))), count)
        title = escaped(f"Logit lens of {self._session.origin.graph}, {self.stream or self._streams[0]}{what}")
        note = "" if len(shown) == count else f", the last {len(shown)} of {count} positions"
        yield f"<p><strong>{title}</strong> (the most probable tokens{note}; for the live one, run the cell)</p>"
        heads = "".join(f"<th>{escaped(tick_text(texts[at], is_token=True))}</th>" for at in shown)
        yield f"<table>\n<tr><th>layer / position</th>{heads}</tr>"
        for row in reversed(range(len(read.names))):
            readout, label = read.readouts[row], _row(read.names[row], read.layers[row])["label"]
            cells = (self._cell(readout.tokens[at, 0], readout.probabilities[at, 0]) for at in shown)
            yield f"<tr><th>{label}</th>{''.join(cells)}</tr>"
        yield "</table>"

    def _cell(self, token: Any, probability: Any) -> str:
        percent = f"{100 * float(probability):.0f}%"
        shown = {"0%": "&lt;1%", "100%": "&gt;99%"}.get(percent, percent)
        text = tick_text(token_text(self._tokenizer, int(token)), is_token=True)
        return f'<td><code dir="auto">{escaped(text)}</code> {shown}</td>'


def _row(name: str, layer: int | None) -> dict[str, Any]:
    return {"name": name, "layer": layer, "label": "embed" if layer is None else str(layer)}
