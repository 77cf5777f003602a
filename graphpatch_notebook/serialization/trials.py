"""Runs of a model next to its graphs, on inputs that are made up: whether, and for which sizes, these are equal.

Nothing is kept of the example inputs but what they looked like. So inputs like them are made: floats at random,
integers small enough to be valid as most things that integers are (tokens, positions, classes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.inputs import UnknownInputError, call_like
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.checks.comparison import compared, first_line
from graphpatch_notebook.serialization.codecs.values import UnstorableError
from graphpatch_notebook.values import TensorSpec

Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"

BOUNDS = ((0, 50), (0, 3), (0, 2), (1, 2), (0, 1))
"""Between what the integers of made-up inputs lie: the first of these that the model can work with."""


class ModelRaisesError(Exception):
    """The model itself cannot run on inputs that were made up (caught inside the package)."""


# -- inputs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Maker:
    """Makes inputs like those of the example.

    Attributes:
        frame: The root frame.
        bounds: The least integer, and the one after the greatest.
    """

    frame: Frame
    bounds: tuple[int, int]

    def call(self, is_strided: bool = False) -> Call:
        """Returns a call, with tensors that are not contiguous if asked for.

        Raises:
            UnstorableError: One of the inputs cannot be made up.
        """
        generator = torch.Generator().manual_seed(0)

        def tensor(name: str, spec: TensorSpec) -> Tensor:
            made = self._tensor(name, spec, generator)
            return _strided(made) if is_strided else made

        try:
            return call_like(self.frame, tensor)
        except UnknownInputError as error:
            raise UnstorableError(str(error)) from error

    def _tensor(self, name: str, spec: TensorSpec, generator: torch.Generator) -> Tensor:
        if spec.type_name != "Tensor":
            raise UnstorableError(f"its input {name!r} is a {spec.type_name}, which cannot be made up")
        shape = tuple(spec.shape)
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            wide = torch.complex64 if spec.dtype.is_complex else torch.float32
            return torch.randn(shape, generator=generator, dtype=wide).to(spec.device, spec.dtype)
        is_mask = spec.dtype is torch.bool or "mask" in name
        made = torch.randint(*((0, 2) if is_mask else self.bounds), shape, generator=generator)
        if is_mask and made.dim() and made.numel():
            made[..., 0] = 1  # a row of which nothing is left to look at holds no numbers
        return made.to(spec.device, spec.dtype)


def _strided(tensor: Tensor) -> Tensor:
    """Returns the same values, with the first dimension innermost in memory."""
    if tensor.dim() < 2:
        return tensor
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def makers(frame: Frame) -> Iterator[Maker]:
    """Yields makers of inputs, of higher integers first. On other devices than the CPU a wrong index is fatal."""
    devices = {spec.device.type for node in frame.inputs() if isinstance(spec := node.spec, TensorSpec)}
    for bounds in BOUNDS if devices <= {"cpu"} else BOUNDS[2:]:
        yield Maker(frame, bounds)


# -- runs --------------------------------------------------------------------------------------------------------------


def difference_of(model: Module, run: Callable[..., Any], graph: Callable[..., Any], call: Call) -> str | None:
    """Runs a model and its graph on copies of the same inputs, and returns in what they differ, if they do.

    Args:
        model: What holds the state that both may change: it is put back, and so is the random state.
        run: Runs the model.
        graph: Runs the graph.
        call: The inputs.

    Raises:
        ModelRaisesError: The model raises.
    """

    def expected(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception as error:
            raise ModelRaisesError(first_line(error)) from error

    comparison = compared(model, expected, graph, *call)
    return None if comparison.is_equal else str(comparison)
