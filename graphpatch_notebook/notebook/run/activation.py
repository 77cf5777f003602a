"""The value of one node, shown: read off the model where it holds it, else probed in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from graphpatch_notebook.errors import ChosenPatchError, SessionError
from graphpatch_notebook.execution import held_value, tensor_at
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, resolve
from graphpatch_notebook.notebook.display.statistics import Readable, readable, statistics_of
from graphpatch_notebook.notebook.display.tokens import TokenInputs, TokenLabels
from graphpatch_notebook.notebook.run.basis import Basis
from graphpatch_notebook.notebook.run.model_calls import PassCount, Passes, Separate
from graphpatch_notebook.notebook.run.run_inputs import inputs_for_run
from graphpatch_notebook.notebook.run.views_2d import Picture, axis_labels, check_plane, nothing, parse_plane, picture
from graphpatch_notebook.notebook.run.worker import Job, ThreadSettings
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.slices import SliceText
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.patches.kinds import Patch, ProbePatch
from graphpatch_notebook.values import TensorSpec

_MOST_KEPT = 256 * 2**20
"""Values of more bytes are not kept for the next plane."""
_INDICES = (int, bool, slice, range, type(None), type(Ellipsis), Tensor, Parameter)


@dataclass(frozen=True)
class Plane:
    """A plane of a value that somebody wants to see.

    Attributes:
        typed: The slice; `None` for the last two dimensions.
        names: What the names in it mean.
    """

    typed: SliceText | None
    names: dict[str, Any]

    @classmethod
    def of(cls, text: str | None, namespace: dict[str, Any]) -> Plane:
        """Returns the plane that was typed; nothing is the default one.

        Raises:
            ChosenPatchError: It is no slice (`field` is `plane`).
        """
        if text is None or not text.strip():
            return cls(None, {})
        typed = parse_plane(text)
        names = {name: namespace[name] for name in typed.names if name in namespace}
        for name, value in names.items():
            if not _is_index(value):
                message = f"{name} is {type(value).__name__}: write numbers, or variables that hold whole numbers"
                raise ChosenPatchError("plane", f"{message}, slices or tensors of them")
        return cls(typed, names)

    def check(self, shape: tuple[int, ...]) -> None:
        """Makes sure that a value of this shape has such a plane.

        Raises:
            ChosenPatchError: It has not (`field` is `plane`).
        """
        if self.typed is not None:
            check_plane(self.typed, shape, self.names)


def _is_index(value: Any) -> bool:
    """Whether torch can be given a value between brackets: of some that are no such thing it asks too much, and dies.

    By its type itself: `isinstance` believes what a value says of its class.
    """
    if type(value) in (list, tuple):
        return all(map(_is_index, value))
    return type(value) in _INDICES or type(value).__module__ == "numpy"


@dataclass(frozen=True)
class Source:
    """Which value is to be shown.

    Two that are equal mean the same one: of the same node, with the same patches, on the same inputs and weights.

    Attributes:
        path: The node path, as the package writes it.
        version: That of the chosen patches; `None`: without patches.
        inputs: What was typed.
        basis: What the run starts from.
    """

    path: str
    version: int | None
    inputs: str | None
    basis: Basis


def target_of(session: Session, path: str) -> Target:
    """Returns the node at a path.

    Raises:
        ChosenPatchError: There is none whose value can be shown (`field` is `path`).
    """
    try:
        return resolve(captured(session.graph).root, path)
    except Unresolvable as problem:
        raise ChosenPatchError("path", problem.message) from None


def recorded_shape(target: Target) -> tuple[int, ...] | None:
    """Returns the shape that a value had at capture, if it was a tensor."""
    return tuple(target.spec.shape) if isinstance(target.spec, TensorSpec) else None


class Activation:
    """What it takes to get at the value of a node.

    Args:
        session: The session.
        target: The node.
        is_patched: Whether the model runs with the chosen patches.
        typed: Arguments of a call, as Python.
        given: The inputs that the browser was given.
        namespace: The user's variables.
        settings: Those of the user's thread.
        count: Told how many calls of the model are done.

    Raises:
        SessionError: A run is needed, and there is nothing to run on; or a value cannot be evaluated.
    """

    def __init__(
        self,
        session: Session,
        target: Target,
        is_patched: bool,
        typed: str | None,
        given: Any,
        namespace: dict[str, Any],
        settings: ThreadSettings,
        count: PassCount,
    ) -> None:
        self._target = target
        self._probe = ProbePatch()
        self._passes: Passes | None = None
        chosen = session.chosen
        is_changed = is_patched and any(one.path == target.path for one in chosen.enabled)
        if _is_held(target) and not is_changed:
            return
        patch_map: dict[str, list[Patch[Any]]] = session.resolve(namespace, chosen).patch_map if is_patched else {}
        patch_map.setdefault(target.path, []).append(self._probe)  # after all others: it sees what came of them
        inputs = inputs_for_run(session, namespace, typed, given)
        self._passes = Passes(session.graph, inputs, [patch_map], settings, count, self._take)
        self._value: Any = None

    def _take(self, _position: int, separate: Separate) -> None:
        self._value = separate(self._probe.activation)

    def shown(self, job: Job[Shown], plane: Plane, tokenizer: Any) -> Shown:
        """Returns the value, with its statistics and a picture of it.

        Raises:
            SessionError: The node did not come up.
            Exception: Whatever the model raises.
        """
        tokens: TokenInputs | None = None
        if self._passes is None:
            value = held_value(self._target.frame.module, self._target.node.target)
        else:
            outcome = self._passes.run(job)
            value, tokens = self._value, outcome.tokens
            if value is None:
                raise SessionError("; ".join(outcome.warnings) or f"{self._target.path!r} did not come up in this run")

        def make() -> Shown:
            labels = None if tokens is None else tokens.labels(tokenizer)
            return Shown(self._target.path, value, plane, labels, is_kept=self._passes is not None)

        shown = job.interruptibly(make)
        if job.is_interrupted:  # too late: nobody looks at it
            shown.forget_value()
        return shown


def _is_held(target: Target) -> bool:
    """Whether the model itself holds the value, so that nothing has to run."""
    if target.node.kind not in ("parameter", "buffer") or target.dig:
        return False
    try:
        value = tensor_at(target.frame.module, target.node.target)
    except Exception:  # it may be there only while the model runs
        return False
    return isinstance(value, Tensor) and value.device.type != "meta"


class Shown:
    """A value that is shown.

    Args:
        path: The node path.
        value: The value.
        plane: What part of it is drawn.
        labels: The texts of the tokens that the model was run on.
        is_kept: Whether to keep (a copy of) the value for another plane, if it is not too large.

    Attributes:
        view: The `ActivationView` of the front end.
        buffers: The values of the heatmap.
    """

    def __init__(self, path: str, value: Any, plane: Plane, labels: TokenLabels | None, *, is_kept: bool) -> None:
        self._labels = labels
        self._text = _text(plane)
        numbers = readable(value)
        is_large = isinstance(value, Tensor) and value.numel() * value.element_size() > _MOST_KEPT
        statistics = statistics_of(value, numbers)
        self.view: dict[str, Any] = {"path": path, "statistics": statistics}
        self.buffers: list[bytes] = []
        try:
            self._draw(numbers, picture(numbers, plane.typed, plane.names))
        except ChosenPatchError as error:  # on these inputs it has another shape than at capture
            self._draw(numbers, nothing(str(error)))
        if is_large and is_kept and self.view["plot"]["type"] == "heatmap":
            size = f"the value has {value.numel() * value.element_size() / 2**20:.0f} MB and is not kept"
            words = f"{size}: another slice of it runs the model again"
            self.view["plot"]["reduced"] = "; ".join(filter(None, [self.view["plot"]["reduced"], words]))
        self._numbers: Readable | None = None
        if is_kept and not is_large and numbers.tensor is not None:
            # A copy: it may be part of something larger, or be written into.
            copy = torch.empty_like(numbers.tensor, device="cpu", requires_grad=False)
            self._numbers = Readable(copy.copy_(numbers.tensor), numbers.remark)

    def _draw(self, numbers: Readable, found: Picture) -> None:
        rows, columns = axis_labels(numbers.tensor, found, self._labels)
        self.buffers = [] if found.values is None else [found.values]
        self.view = {**self.view, "plot": found.plot, "row_labels": rows, "column_labels": columns}

    def show(self, plane: Plane) -> bool:
        """Shows another plane; returns whether that can be done without a run.

        The same plane again is somebody's wish to see what is there now.

        Raises:
            ChosenPatchError: There is none such (`field` is `plane`).
        """
        if self._numbers is None or _text(plane) == self._text:
            return False
        self._draw(self._numbers, picture(self._numbers, plane.typed, plane.names))
        self._text = _text(plane)
        return True

    def forget_value(self) -> None:
        """Lets go of the value; what is shown stays."""
        self._numbers = None


def _text(plane: Plane) -> str:
    return "" if plane.typed is None else str(plane.typed)
