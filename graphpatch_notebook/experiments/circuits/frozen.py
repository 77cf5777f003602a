"""Runs of the model in which all that is not linear in the stream is frozen, and the features that stand for MLPs.

With attention patterns and the denominators of norms held at what they were, and what MLPs write taken as given, each
state of the stream is linear in the embeddings and in what MLPs wrote. The derivatives of such a run are these linear
maps, which hold for values of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphpatch_notebook.experiments.attribution.rules import FrozenDenominators
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import CustomPatch
from graphpatch_notebook.patching.model_state import preserved
from graphpatch_notebook.torch_compat import ProductsWithoutZeros

if TYPE_CHECKING:
    from graphpatch_notebook.experiments.circuits.features import Linearized


class FrozenRun:
    """A run of the model with gradients, in which patterns and denominators are constants, and some values are leaves.

    Attributes:
        values: What was computed at paths, with gradients to the leaves before.
        leaves: What took the place of some of these.
    """

    def __init__(self, pg: PatchableGraph, inputs: Inputs, plan: Linearized, read: Collection[str]) -> None:
        self.values: dict[str, Tensor] = {}
        self.leaves: dict[str, Tensor] = {}
        self._pg, self._inputs, self._plan, self._denominators = pg, inputs, plan, FrozenDenominators()
        self._constants: dict[str, Tensor] = {}
        every = (*plan.leaves, *plan.constants, *plan.slim, *plan.read, *(each.read for each in plan.features), *read)
        self._paths, leaves = dict.fromkeys(every), {*plan.leaves}

        def note(path: str, value: Tensor) -> Tensor:
            self.values[path] = value = value.clone()  # the model may write into its own
            if path in plan.constants:
                self._constants[path] = value.detach()
                return value.detach().clone()
            if path in plan.slim:
                return value.detach() + plan.slim[path](self.values)
            if path not in leaves:
                return value.clone()
            rest = self._rest(path, self.values)
            self.leaves[path] = (value - rest).detach().requires_grad_()
            result: Tensor = (self.leaves[path] + rest).to(value.dtype)
            return result

        with torch.inference_mode(False), torch.enable_grad(), self._denominators:
            self._run(note)

    def _run(self, note: Callable[[str, Tensor], Tensor]) -> None:
        patches: dict[Any, CustomPatch] = {
            path: CustomPatch(custom_op=partial(note, path), requires_clone=False) for path in self._paths
        }
        with preserved(captured(self._pg).module), self._pg.patch(patches, strict=True):
            self._inputs.run(self._pg)

    def _rest(self, path: str, values: Mapping[str, Tensor]) -> Any:
        """Returns the part of a value that stays attached to what it is made of."""
        return self._plan.kept[path](values) if path in self._plan.kept else 0.0

    def with_leaves(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the values of the same run with other leaves, and the same patterns and denominators."""
        found: dict[str, Tensor] = {}

        def note(path: str, value: Tensor) -> Tensor:
            found[path] = value.clone()
            if path in self._constants:
                return self._constants[path].clone()
            return (
                (leaves[path].expand_as(value) + self._rest(path, found)).to(value.dtype) if path in leaves else value
            )

        with torch.no_grad(), self._denominators.again():
            self._run(note)
        return found

    def derivatives(self, path: str, directions: Tensor, at: Tensor, by: Sequence[Tensor]) -> list[Tensor | None]:
        """Returns the derivatives of linear functions of a value, each (functions, positions, channels).

        Args:
            path: The path of the value, whose rows are the positions.
            directions: The coefficients of each function, (functions, channels).
            at: The position of each function.
            by: By what: values of the run that come before; `None` is returned for others.
        """
        value = self.values[path]
        given = directions.new_zeros(len(at), value.numel() // value.shape[-1], value.shape[-1])
        given[torch.arange(len(at)), at] = directions
        with ProductsWithoutZeros():  # a function of one position has no derivative at those that it does not read
            found: Any = torch.autograd.grad(
                value, by, given.view(-1, *value.shape).to(value.dtype),
                retain_graph=True, allow_unused=True, is_grads_batched=True,
            )  # fmt: skip
        return [None if each is None else each.reshape(len(at), -1, each.shape[-1]) for each in found]


def rows_of(value: Tensor) -> Tensor:
    """Returns a value of one prompt as (positions, channels)."""
    return value.detach().reshape(-1, value.shape[-1])
