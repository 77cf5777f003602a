"""Finds outputs that a run can skip because the metric does not read them: earlier logits, and the cache.

Language models of transformers have arguments to compute only the logits of the last positions
(`logits_to_keep`), and to return no cache (`use_cache`). A mode observes each read of the logits to check
whether a metric reads the last position only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.execution import leaves_of
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.values import ABSENT, IMMUTABLE, readable_children

_LOGITS, _CACHE = "logits_to_keep", "use_cache"
_LEAVES = (Tensor, *IMMUTABLE)
_KINDS = frozenset(_LEAVES)
_PICKING = (Tensor, list, bool)
_SIMPLE = frozenset({int, slice, type(Ellipsis)})
_EARLY = ("input", "parameter", "buffer", "attribute")


class ReadElsewhereError(Exception):
    """A metric reads logits of other positions than the last one (caught inside the package)."""


class LastPositionOnly(TorchFunctionMode):
    """Raises an error if a metric reads logits at other positions than the last one.

    Args:
        logits: The logits, `(batch, seq, vocabulary)`.
    """

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self._logits = logits

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and args[0] is self._logits:
            is_last = self._is_last(args[1])
        else:
            is_last = not self._is_given((*args, *kwargs.values()) if kwargs else args)
        if not is_last:
            raise ReadElsewhereError
        return func(*args, **kwargs) if kwargs else func(*args)

    def _is_given(self, values: Any) -> bool:
        for value in values:  # this runs for each call of the metric, for each cell
            if value is self._logits:
                return True
            kind = type(value)
            if kind not in _KINDS and not issubclass(kind, _LEAVES) and self._is_given(leaves_of(value)):
                return True
        return False

    def _is_last(self, index: Any) -> bool:
        index = index if isinstance(index, tuple) else (index,)
        if not _SIMPLE.issuperset(map(type, index)):
            for part in index:
                if part is None or isinstance(part, _PICKING):
                    return False
        if Ellipsis in index:
            place = index.index(Ellipsis)
            missing = self._logits.dim() - (len(index) - 1)
            index = (*index[:place], *[slice(None)] * missing, *index[place + 1 :])
        return len(index) > 1 and (
            (type(index[1]) is int and index[1] == -1) or (isinstance(index[1], slice) and index[1] == slice(-1, None))
        )


def logits_in(output: Any) -> Tensor | None:
    """Returns the logits in the output of a language model, if it has them."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) and logits.dim() == 3 else None


def last_position_value(metric: Callable[[Any], Any], output: Any) -> Any:
    """Returns the metric of `output`, if it reads the logits at the last position only; else `None`."""
    try:
        return None if logits_in(output) is None else watched_metric(metric, output)
    except Exception:  # it reads other positions, or a missing output
        return None


def watched_metric(metric: Callable[[Any], Any], output: Any) -> Any:
    """Returns the metric of `output`, which must read logits at the last position only.

    Raises:
        ReadElsewhereError: It reads other positions.
    """
    logits = logits_in(output)
    if logits is None:
        return metric(output)
    with LastPositionOnly(logits):
        value = metric(output)
    if value is logits or (
        not isinstance(value, Tensor) and any(leaf is logits for leaf in leaves_of(value))
    ):  # the metric returned the logits themselves
        raise ReadElsewhereError
    return value


def is_part(part: Any, whole: Any, is_equal: Callable[[Tensor, Tensor], bool], *, is_last: bool = False) -> bool:
    """Whether a trimmed output has what the whole output has, or its last position if `is_last`."""
    return all(
        isinstance(theirs, Tensor) and is_equal(own, theirs) if isinstance(own, Tensor) else bool(own == theirs)
        for own, theirs in paired(part, whole, is_last=is_last)
    )


def paired(part: Any, whole: Any, *, is_last: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yields each leaf of a trimmed output with the same part of the whole output; `ABSENT` where it has none."""
    inside = None if isinstance(part, Tensor) else readable_children(part)
    if inside is None:
        is_cut = is_last and isinstance(part, Tensor) and isinstance(whole, Tensor) and whole.shape != part.shape
        yield part, whole[:, -1:] if is_cut else whole
        return
    among = dict(readable_children(whole) or ())
    for key, child in inside:
        yield from paired(child, among.get(key, ABSENT), is_last=is_last)


def trims(
    root: Frame, inputs: Inputs, targets: Sequence[Target], *, keeps_logits: bool = False
) -> list[dict[str, Any]]:
    """Returns keyword arguments that make a run skip outputs; those that skip most are first.

    Args:
        root: The root frame of the capture.
        inputs: The inputs of the model; arguments that they contain are not replaced.
        targets: The values that are patched.
        keeps_logits: Whether the logits of all positions are needed.
    """
    given = {*inputs.kwargs, *(parameter.name for parameter in root.parameters[: len(inputs.args)])}
    free = {parameter.name for parameter in root.parameters} - given
    without_cache: dict[str, Any] = {}
    if _CACHE in free and not any("past" in name or "cache" in name for name in given):
        without_cache = {_CACHE: False}
    found = []
    if not keeps_logits and _LOGITS in free and "labels" not in given and not any(_is_late(root, t) for t in targets):
        found.append({**without_cache, _LOGITS: 1})
    if without_cache:
        found.append(without_cache)
    return found


def _is_late(root: Frame, target: Target) -> bool:
    """Whether a value may occur after `logits_to_keep` is applied: in the model's own forward, or in its head."""
    if target.frame is root:
        return target.node.kind not in _EARLY
    frame = target.frame
    while frame.parent is not None and frame.parent is not root:
        frame = frame.parent
    first = next(root.calls(), None)
    return first is None or first.frame is not frame
