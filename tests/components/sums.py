"""The law of the stream: what a layer returns is what it reads and what its parts add, as these are recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook import PatchableGraph

_TOLERANCE = 1e-4


def wrong_sums(pg: PatchableGraph, *args: Any, **kwargs: Any) -> dict[str, str]:
    """Returns which sums in the layers of a model do not hold in a run, by the name of the layer."""
    components = pg.components
    evidence = components.evidence
    own = {value: components[name].path for name, value in evidence.values.items()}
    sums = [
        (layer.name, step, [own.get(each) or evidence.trails.flow.path(each) for each in values])
        for stack in evidence.stacks
        for layer in stack.layers.values()
        for step in layer.steps
        if step.kind == "add" and step.other is not None
        for values in [(step.result, step.source, step.other)]
    ]
    wanted = sorted({path for _, _, paths in sums for path in paths} & pg.nodes.keys())
    with torch.no_grad():
        kept = pg.record(wanted, *args, **kwargs) if wanted else {}
    found: dict[str, str] = {}
    for name, step, paths in sums:
        values = [kept[path] for path in paths if path in kept]
        if len(values) < 3:
            found[name] = f"one of {paths} cannot be recorded"
            continue
        result, source, other = values
        alpha = step.result.node.kwargs.get("alpha", 1)
        if not any(is_close(each, result) for each in (source + alpha * other, alpha * source + other)):
            found[name] = f"{paths[0]} is not the sum of the stream and what is added"
        elif is_close(source, result) and bool(other.abs().max() > 0):
            found[name] = f"{paths[0]} is the same without what is added"
    return found


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same elements in the same order, in any shape, up to rounding."""
    if one.numel() != other.numel():
        return False
    tolerance = max(_TOLERANCE, 4 * torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0)
    one, other = (each.detach().double().reshape(-1).nan_to_num() for each in (one, other))
    largest = max(float(each.abs().max()) for each in (one, other)) if one.numel() else 0.0
    return bool(((one - other).abs() <= tolerance * largest).all())
