"""The tokens view: the tokens of the inputs, colored by an activation, without and with the patches.

js/src/views/tokens_view.ts draws them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import traitlets
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.grids import tick_text
from graphpatch_notebook.notebook.display.tables import escaped
from graphpatch_notebook.notebook.runs import RunInputs
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.notebook.views.attention import AxisTokens
from graphpatch_notebook.notebook.views.linked import ComputedView, Patches, inputs_for_view
from graphpatch_notebook.notebook.views.selection import axes_of
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import ProbePatch

_MOST_STATIC = 200
"""How many tokens the page without scripts has."""
Score = Any


def tokens_of(
    graph: PatchableGraph,
    workspace: Workspace,
    path: str,
    inputs: Inputs | None = None,
    *,
    score: Score = None,
    names: Sequence[str] | None = None,
    tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
) -> TokensView:
    """Returns a new tokens view of a graph: `show_tokens`."""
    session, runs, given = inputs_for_view(graph, workspace, inputs)
    texts = AxisTokens.of(graph, given, tokens, runs.tokenizer)
    return TokensView(graph, session, workspace, path, score, names, given, texts)


class TokensView(ComputedView):
    """The tokens of the inputs, colored by an activation. `show_tokens` returns it."""

    coloring = traitlets.Dict(read_only=True).tag(sync=True, echo_update=False)
    numbers = traitlets.Bytes(read_only=True).tag(sync=True, echo_update=False)

    VIEW: ClassVar[str] = "tokens"
    COMPUTED: ClassVar[tuple[str, ...]] = ("coloring", "numbers")

    def __init__(
        self,
        graph: PatchableGraph,
        session: Session,
        workspace: Workspace,
        path: str,
        score: Score,
        names: Sequence[str] | None,
        inputs: RunInputs,
        tokens: AxisTokens,
    ) -> None:
        self._path, self._score, self._names, self._inputs, self._tokens = path, score, names, inputs, tokens
        self._axes = axes_of(session, path)
        super().__init__(graph, session, workspace)

    # -- the numbers ---------------------------------------------------------------------------------------------------

    def _compute(self, graph: PatchableGraph, patches: Patches) -> Any:
        return [self._scores(graph, own) for own in ({}, patches)[: 1 + bool(patches)]]

    def _keep(self, found: list[Tensor]) -> None:
        self._found = found

    def _scores(self, graph: PatchableGraph, patches: Patches) -> Tensor:
        """Returns the scores in a run with patches, of shape (score, batch, position)."""
        probe = ProbePatch(any_shape=True)
        args, kwargs = self._inputs.copy()
        patch_map: dict[Any, Any] = {**patches, self._path: [*patches.get(self._path, ()), probe]}
        with torch.no_grad(), graph.patch(patch_map):
            graph(*args, **kwargs)
            if probe.activation is None:
                raise ExperimentError(f"{self._path!r} was not computed on these inputs")
            found = scores_of(self._path, probe.activation.detach(), self._axes, self._score)
        if self._names is not None and len(self._names) != len(found):
            raise ExperimentError(f"there are {len(self._names)} names= for {len(found)} scores")
        return found

    # -- values of traits ----------------------------------------------------------------------------------------------

    def _makers(self) -> Mapping[str, Callable[[], Any]]:
        return {**super()._makers(), "coloring": self._state, "numbers": self._packed}

    def _labels(self) -> list[list[str]]:
        _, rows, positions = self._found[0].shape
        return [self._tokens.labels(positions, row, is_encoder=False) for row in range(rows)]

    def _state(self) -> dict[str, Any]:
        """Returns the `Coloring` of the front end."""
        count = len(self._found[0])
        names = self._names or ([self._path] if count == 1 else [f"{self._path} {number}" for number in range(count)])
        return {
            "name": self._path,
            "scores": [*map(str, names)],
            "rows": self._labels(),
            "runs": len(self._found),
            "version": self._computed_for,
        }

    def _packed(self) -> bytes:
        """Returns the numbers by run, score, row and position, as `TokensView.show` in tokens_view.ts reads them."""
        return zlib.compress(b"".join(run.contiguous().numpy().astype("<f4").tobytes() for run in self._found), 6)

    # -- display -------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        count, rows, positions = self._found[0].shape
        scores = "" if count == 1 else f"{count} scores of "
        return f"<TokensView of {self._session.origin.graph}: {scores}{self._path}, {rows} x {positions}>"

    def _static_html(self) -> str:
        name = escaped(f"{self._state()['scores'][0]} of {self._session.origin.graph}")
        shown = [f"<p><strong>{name}</strong> (for the live view, run the cell)</p>"]
        for run, what in zip(self._found, ("", " with the patches"), strict=False):
            for row, labels in enumerate(self._labels()):
                texts = [escaped(tick_text(label, is_token=True)) for label in labels[:_MOST_STATIC]]
                pairs = zip(texts, run[0, row].tolist(), strict=False)
                cells = " ".join(f'<code dir="auto">{text}</code>&nbsp;{number:.2f}' for text, number in pairs)
                shown.append(f"<p>Row {row}{what}: {cells}</p>")
        return "\n".join(shown)


def scores_of(path: str, value: Tensor, axes: Sequence[str | None], score: Score) -> Tensor:
    """Returns numbers for tokens, of shape (score, batch, position), on the CPU in float32.

    Args:
        path: The path of the value, for messages.
        value: The value.
        axes: The names of its dimensions; empty if they are not known: then they are batch, position and channel.
        score: As in `show_tokens`.

    Raises:
        ExperimentError: The value has no positions, or the score does not fit it.

    Example:
        >>> import torch
        >>> scores_of("h", torch.ones(1, 4, 3), ("batch", "position", "channel"), torch.ones(3))
        tensor([[[3., 3., 3., 3.]]])
    """
    places = [axes.index(name) for name in ("batch", "position") if name in axes]
    if "position" in axes:
        value = value.movedim(places, [*range(len(places))])
        value = value if "batch" in axes else value[None]
    elif any(axes) or value.dim() < 2:
        raise ExperimentError(f"{path!r} has no positions of tokens: its shape is {[*value.shape]}")
    shape = [*value.shape]
    if callable(score):
        given = torch.as_tensor(score(value))
        found = given[..., None] if given.dim() == 2 else given
        if found.dim() != 3 or [*found.shape[:2]] != shape[:2]:
            wanted = f"it must have {shape[:2]} (batch, position), or these and one for scores"
            raise ExperimentError(f"score= returned a tensor of shape {[*given.shape]} for {path!r}: {wanted}")
    else:
        flat = value.flatten(2) if value.dim() > 2 else value[..., None]
        size = flat.shape[-1]
        if score is None and size > 1:
            raise ExperimentError(
                f"{path!r} has {size} numbers for each token, its shape is {shape}: give score=, the number of a "
                "channel, several of these, a direction, or a function of the value"
            )
        chosen = torch.as_tensor(0 if score is None else score)
        if chosen.is_floating_point():  # directions
            if chosen.dim() not in (1, 2) or chosen.shape[-1] != size:
                raise ExperimentError(
                    f"a direction of shape {[*chosen.shape]} does not fit {path!r}, with {size} channels"
                )
            found = flat @ chosen.to(flat).reshape(-1, size).T
        else:
            numbers = chosen.reshape(-1).tolist()
            if wrong := [number for number in numbers if not -size <= number < size]:
                raise ExperimentError(f"{path!r} has {size} channels, not a channel {wrong[0]}")
            found = flat[..., numbers]
    return found.movedim(-1, 0).detach().float().cpu()
