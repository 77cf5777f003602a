"""The value of one node for display: read from the model if it is a parameter or buffer, else probed in a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.errors import ChosenPatchError, SessionError
from graphpatch_notebook.execution import held_value, tensor_at
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.notebook.display.statistics import Readable, readable, statistics_of
from graphpatch_notebook.notebook.display.tokens import TokenInputs, TokenLabels
from graphpatch_notebook.notebook.run.jobs import Job, ThreadSettings
from graphpatch_notebook.notebook.run.model_calls import CallCount, ModelCalls, Separate, inputs_for_run
from graphpatch_notebook.notebook.run.value_plots import Picture, Plane, nothing, picture
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.patches.kinds import Patch, ProbePatch

_MOST_KEPT = 256 * 2**20
"""Values with more bytes are not kept for other slices."""


class Activation:
    """Gets the value of a node."""

    def __init__(
        self,
        session: Session,
        target: Target,
        is_patched: bool,
        typed: str | None,
        given: Any,
        namespace: dict[str, Any],
        settings: ThreadSettings,
        count: CallCount,
    ) -> None:
        self._target = target
        self._probe = ProbePatch()
        self._calls: ModelCalls | None = None
        chosen = session.chosen
        is_changed = is_patched and any(one.path == target.text for one in chosen.enabled)
        if _is_held(target) and not is_changed:
            return
        patch_map: dict[str, list[Patch[Any]]] = session.resolve(namespace, chosen).patch_map if is_patched else {}
        patch_map.setdefault(target.text, []).append(self._probe)  # last: sees the patched value
        inputs = inputs_for_run(session, namespace, typed, given)
        self._calls = ModelCalls(session.graph, inputs, [patch_map], settings, count, self._take)
        self._value: Any = None

    def _take(self, _position: int, separate: Separate) -> None:
        self._value = separate(self._probe.activation)

    def shown(self, job: Job[ShownValue], plane: Plane, tokenizer: Any) -> ShownValue:
        """Returns the value with its statistics and plot."""
        tokens: TokenInputs | None = None
        if self._calls is None:
            value = held_value(self._target.frame.module, self._target.node.target)
        else:
            results = self._calls.run(job)
            value, tokens = self._value, results.tokens
            if value is None:
                raise SessionError("; ".join(results.warnings) or f"{self._target.text!r} was not computed in this run")

        def make() -> ShownValue:
            root, path = self._target.frame.root, self._target.text
            labels = None if tokens is None else tokens.labels(tokenizer, root, path)
            return ShownValue(self._target.text, value, plane, labels, is_kept=self._calls is not None)

        shown = job.interruptibly(make)
        if job.is_interrupted:  # too late to stop, and not needed any more
            shown.forget_value()
        return shown


def _is_held(target: Target) -> bool:
    """Whether the value is a parameter or buffer, so that the model need not run."""
    if target.node.kind not in ("parameter", "buffer") or target.dig:
        return False
    try:
        value = tensor_at(target.frame.module, target.node.target)
    except Exception:  # it may exist only while the model runs
        return False
    return isinstance(value, Tensor) and value.device.type != "meta"


class ShownValue:
    """The display of a value: `view` is the `ActivationView` of the front end, `buffers` the values of the heatmap."""

    def __init__(self, path: str, value: Any, plane: Plane, labels: TokenLabels | None, *, is_kept: bool) -> None:
        self._labels = labels
        self._plane = plane
        numbers = readable(value)
        is_large = isinstance(value, Tensor) and value.numel() * value.element_size() > _MOST_KEPT
        self.view: dict[str, Any] = {"path": path, "statistics": statistics_of(value, numbers)}
        self.buffers: list[bytes] = []
        try:
            self._draw(picture(numbers, plane, labels))
        except ChosenPatchError as error:  # its shape differs from the recorded one
            self._draw(nothing(str(error)))
        if is_large and is_kept and self.view["plot"]["type"] == "heatmap":
            size = f"the value has {value.numel() * value.element_size() / 2**20:.0f} MB and is not kept"
            words = f"{size}: to show another slice, the model runs again"
            self.view["plot"]["reduced"] = "; ".join(filter(None, [self.view["plot"]["reduced"], words]))
        self._numbers: Readable | None = None
        if is_kept and not is_large and numbers.tensor is not None:
            # A copy: the tensor may be a view of a larger one, or be written into.
            copy = torch.empty_like(numbers.tensor, device="cpu", requires_grad=False)
            self._numbers = Readable(copy.copy_(numbers.tensor), numbers.remark)

    def _draw(self, found: Picture) -> None:
        self.buffers = [] if found.values is None else [found.values]
        self.view |= {"plot": found.plot, "row_labels": found.row_labels, "column_labels": found.column_labels}

    def show(self, plane: Plane) -> bool:
        """Shows another slice of the value, and returns whether that was possible without a run.

        Returns `False` for the same slice: the user asks for the current value.

        Raises:
            ChosenPatchError: The slice is not valid for the value (`field` is `plane`).
        """
        if self._numbers is None or plane.typed == self._plane.typed:
            return False
        self._draw(picture(self._numbers, plane, self._labels))
        self._plane = plane
        return True

    def forget_value(self) -> None:
        """Drops the value; what is displayed stays."""
        self._numbers = None
