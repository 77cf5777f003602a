"""The value of one node for display: read from the model if it is a parameter or buffer, else probed in a run."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphpatch_notebook.errors import ChosenPatchError, SessionError
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.notebook.display.statistics import Readable, readable, statistics_of
from graphpatch_notebook.notebook.display.tokens import TokenInputs, TokenLabels
from graphpatch_notebook.notebook.messages import ActivationView, NoPlot
from graphpatch_notebook.notebook.run.jobs import Job
from graphpatch_notebook.notebook.run.model_calls import ModelCalls
from graphpatch_notebook.notebook.run.run_report import copy_of
from graphpatch_notebook.notebook.run.value_plots import Picture, Plane, picture
from graphpatch_notebook.patches.kinds import Patch, ProbePatch
from graphpatch_notebook.patching import held_value, tensor_at


def is_held(target: Target) -> bool:
    """Whether the value is a parameter or buffer, so that the model need not run."""
    if target.node.kind not in ("parameter", "buffer") or target.dig:
        return False
    try:
        value = tensor_at(target.frame.module, target.node.target)
    except Exception:  # it may exist only while the model runs
        return False
    return isinstance(value, Tensor) and value.device.type != "meta"


def shown_activation(
    job: Job[Any],
    target: Target,
    calls: ModelCalls | None,
    patch_map: dict[str, list[Patch[Any]]],
    plane: Plane,
    tokenizer: Any,
) -> ShownValue:
    """Returns the value of a node in a call with patches, in the thread of the job; without `calls`, as it is now."""
    labels = None
    if calls is None:
        value = held_value(target.frame.module, target.node.target)
    else:
        probe = ProbePatch()
        patch_map.setdefault(target.text, []).append(probe)  # last: sees the patched value
        _, value = calls.call(job, patch_map, lambda: copy_of(probe.activation))
        if value is None:
            raise SessionError("; ".join(calls.warnings) or f"{target.text!r} was not computed in this run")
        tokens = TokenInputs.of(calls.graph, calls.inputs.args, calls.inputs.kwargs)
        labels = tokens.labels(tokenizer, target.frame.root, target.text)
    return job.interruptibly(lambda: ShownValue(target.text, value, plane, labels))


class ShownValue:
    """The display of a value: `view` is for the front end, `buffers` are the values of its heatmap.

    The value is kept for other slices, until `forget_value`.
    """

    def __init__(self, path: str, value: Any, plane: Plane, labels: TokenLabels | None) -> None:
        self._path, self._labels = path, labels
        self._numbers: Readable | None = readable(value)
        self._statistics = statistics_of(value, self._numbers)
        try:
            self.show(plane)
        except ChosenPatchError as error:  # its shape differs from the recorded one
            self._draw(Picture(NoPlot(str(error))))

    def _draw(self, drawn: Picture) -> None:
        self.buffers = [] if drawn.values is None else [drawn.values]
        self.view = ActivationView(self._path, self._statistics, drawn.plot, drawn.row_labels, drawn.column_labels)

    def show(self, plane: Plane) -> bool:
        """Shows a slice of the value, and returns whether that was possible: whether the value is still kept.

        Raises:
            ChosenPatchError: The slice is not valid for the value (`field` is `plane`).
        """
        if self._numbers is not None:
            self._draw(picture(self._numbers, plane, self._labels))
        return self._numbers is not None

    def forget_value(self) -> None:
        """Drops the value; what is displayed stays."""
        self._numbers = None
