"""The law of sharded models: every value is right, as in one process, or refused by name.

Each rank compares a sharded model with the same model in one process: names and shapes, and then, for each value, what
a probe sees, what a patch on a slice makes of the output, and the gradient of what a patch adds.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from graphpatch_notebook import AddPatch, Patch, PatchableGraph, PatchValueError
from graphpatch_notebook.patching.model_state import sharding_of

RTOL, ATOL = 1e-3, 2e-5


@dataclass
class Comparison:
    """What was found of a sharded model.

    Attributes:
        count: How many values there are.
        right: How many values are right.
        refused: Why values are refused, by path.
        wrong: What is wrong with the others, by path.
        names: The names or shapes that differ from those in one process.
        kinds: How many of the values are distributed in which way.
    """

    count: int = 0
    right: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def whole(value: Any) -> Tensor:
    """A plain tensor with all of what the processes have of a value."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def compare(
    plain: PatchableGraph,
    sharded: PatchableGraph,
    run: Callable[[PatchableGraph], Tensor],
    *,
    most: int | None = None,
    most_gradients: int | None = None,
) -> Comparison:
    """Compares a sharded model with one in one process. All ranks call it.

    Args:
        plain: The model in one process.
        sharded: The sharded one.
        run: Calls a graph, and returns its main output.
        most: How many values to patch; they are drawn at random.
        most_gradients: How many of these to compare the gradients of.
    """
    found, sharding = Comparison(), sharding_of(sharded.nodes.root)
    assert sharding is not None
    here, there = dict(sharded.nodes.items()), dict(plain.nodes.items())
    found.names = [path for path in {**here, **there} if _form(here.get(path)) != _form(there.get(path))]
    refused = sharding.refusals(sharded.nodes)
    floats = [path for path, node in there.items() if path in here and _is_float(node)]
    found.count = len(floats)
    found.refused = {path: refused[path] for path in floats if path in refused}
    patchable = [path for path in floats if path not in refused]
    rng = random.Random(0)
    chosen = set(patchable if most is None else rng.sample(patchable, min(most, len(patchable))))
    chosen = [path for path in patchable if path in chosen]
    held = [path for path in chosen if there[path].kind in ("parameter", "buffer")]
    computed = [path for path in chosen if path not in held]
    count = len(computed) if most_gradients is None else most_gradients
    differentiated = set(rng.sample(computed, min(count, len(computed)))) if _has_gradients(sharded, run) else set()
    for path in chosen:
        problem = _values_problem(plain, sharded, path, run)
        if problem is None and path in differentiated:
            problem = _gradient_problem(plain, sharded, path, run)
        problem = next((one for one in gathered(problem) if one is not None), None)
        if problem is None:
            found.right += 1
        else:
            found.wrong[path] = problem
        (target,) = sharded._captured.targets_of(path)
        kind = re.sub(r"\d+", "_", str(sharding.placement(target)))
        found.kinds[kind] = found.kinds.get(kind, 0) + 1
    return found


def gathered(value: Any) -> list[Any]:
    """What all ranks give."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _form(node: Any) -> Any:
    return None if node is None else (node.kind, node.op, node.shape, node.dtype)


def _is_float(node: Any) -> bool:
    return node.shape is not None and node.dtype.is_floating_point and 0 not in node.shape


def _values_problem(
    plain: PatchableGraph, sharded: PatchableGraph, path: str, run: Callable[[PatchableGraph], Tensor]
) -> str | None:
    seen, outputs = [], []
    shape = plain.nodes[path].shape
    assert shape is not None
    # Across the parts of two ranks.
    part = tuple(slice(size // 4, size // 2 + 1) for size in shape)
    for pg in (plain, sharded):
        kept: list[Tensor] = []
        try:
            with torch.no_grad(), pg.patch({path: [_Keep(kept=kept), AddPatch(value=0.5, slice=part)]}):
                outputs.append(whole(run(pg)))
            seen.append(kept[0])
        except Exception as error:
            return None if pg is plain else f"{type(error).__name__}: {error}"
    if seen[0].shape != seen[1].shape or not _is_close(*seen):
        return "the probe sees another value"
    return None if _is_close(*outputs) else f"the output differs by {(outputs[0] - outputs[1]).abs().max():.1e}"


def _has_gradients(sharded: PatchableGraph, run: Callable[[PatchableGraph], Tensor]) -> bool:
    """Whether the model has gradients when it is sharded, without patches: some are not made for it."""
    try:
        with torch.enable_grad():
            whole(run(sharded)).pow(2).sum().backward()
    except RuntimeError:
        return False
    finally:
        sharded.zero_grad(set_to_none=True)
    return True


@dataclass(kw_only=True, eq=False)
class _Keep(Patch[Tensor]):
    """Keeps a copy of the value: the model may write into the value itself."""

    observes_only: ClassVar[bool] = True
    kept: list[Tensor]

    def op(self, original_output: Tensor) -> Tensor:
        self.kept.append(original_output.detach().clone())
        return original_output


def _gradient_problem(
    plain: PatchableGraph, sharded: PatchableGraph, path: str, run: Callable[[PatchableGraph], Tensor]
) -> str | None:
    gradients = []
    for pg in (plain, sharded):
        added = torch.zeros(plain.nodes[path].shape, requires_grad=True)  # type: ignore[arg-type]
        try:
            with torch.enable_grad(), pg.patch({path: AddPatch(value=added)}):
                whole(run(pg)).pow(2).sum().backward()
        except PatchValueError:  # it says that the gradient is not known
            return None
        except Exception as error:
            return None if pg is plain else f"gradient: {type(error).__name__}: {error}"
        gradients.append(added.grad)
        if added.grad is None and pg is plain:
            return None
    mine, other = gradients
    assert mine is not None
    if other is None:
        return "there is no gradient"
    return None if _is_close(mine, other) else f"the gradient is {other.norm() / mine.norm():.3f} times as large"


def _is_close(one: Tensor, other: Tensor) -> bool:
    # Masks hold the least number of the dtype: what they are added to must not set the tolerance.
    usual = one[one.abs() < 1e6]
    largest = usual.abs().max().item() if usual.numel() else 1.0
    return torch.allclose(one, other, rtol=RTOL, atol=ATOL * max(1.0, largest), equal_nan=True)
