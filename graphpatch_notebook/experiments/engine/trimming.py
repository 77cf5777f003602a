"""Finds outputs that runs can skip because the metric does not read them: earlier logits, and the cache.

Language models of transformers have arguments to compute only the logits of the last positions
(`logits_to_keep`), and to return no cache (`use_cache`). Whether a metric reads the last position only is found by
running it on an output with other logits at all earlier positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.execution import own_tensors
from graphpatch_notebook.experiments.engine.clean_run import CleanRun
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.rows import wild
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.values import mapped

_LOGITS, _CACHE = "logits_to_keep", "use_cache"
_EARLY = ("input", "parameter", "buffer", "attribute")


def trimmed_inputs(root: Frame, inputs: Inputs, targets: Iterable[Target]) -> list[Inputs]:
    """Returns inputs with arguments that make a run skip outputs; those that skip most are first, the same are last.

    Args:
        root: The root frame of the capture.
        inputs: The inputs of the model; arguments that they contain are not replaced.
        targets: The values that are patched.
    """
    given = {*inputs.kwargs, *(parameter.name for parameter in root.parameters[: len(inputs.args)])}
    free = {parameter.name for parameter in root.parameters} - given
    has_cache = any("past" in name or "cache" in name for name in given)
    without_cache: dict[str, Any] = {_CACHE: False} if _CACHE in free and not has_cache else {}
    found: list[dict[str, Any]] = [without_cache, {}] if without_cache else [{}]
    if _LOGITS in free and "labels" not in given and not any(_is_late(root, target) for target in targets):
        found.insert(0, {**without_cache, _LOGITS: 1})
    return [replace(inputs, kwargs={**inputs.kwargs, **extra}) for extra in found]


def _is_late(root: Frame, target: Target) -> bool:
    """Whether a value may occur after `logits_to_keep` is applied: in the model's own forward, or in its head."""
    if target.frame is root:
        return target.node.kind not in _EARLY
    frame = target.frame
    while frame.parent is not None and frame.parent is not root:
        frame = frame.parent
    first = next(root.calls(), None)
    return first is None or first.frame is not frame


def reads_no_more(metric: Callable[[Any], Any], clean: CleanRun, is_same: Callable[[Any, Any], bool]) -> bool:
    """Whether a metric reads none of the outputs that a run skipped.

    Args:
        metric: The metric.
        clean: A run on trimmed inputs.
        is_same: Compares two results of the metric.
    """
    output = clean.output
    logits = getattr(output, "logits", None)
    try:
        value = metric(own_tensors(output))
        if _LOGITS not in clean.inputs.kwargs:
            return True
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            return False
        longer = torch.cat([wild(logits), logits], 1)
        return is_same(value, metric(mapped(output, lambda leaf: longer if leaf is logits else own_tensors(leaf))))
    except Exception:  # it reads an output that was skipped
        return False
