"""Runs of a model next to its graphs, on inputs that are made up: whether, and for which sizes, these are equal.

Nothing is kept of the example inputs but what they looked like. So inputs like them are made: floats at random,
integers small enough to be valid as most things that integers are (tokens, positions, classes).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.records import Frame, InputParameter
from graphpatch_notebook.checks.comparison import compared, first_line
from graphpatch_notebook.serialization.values import UnstorableError
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, TensorSpec, ValueSpec, rebuilt

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

    def call(self, shapes: Sequence[Sequence[int]] | None = None, is_strided: bool = False) -> Call:
        """Returns a call, with tensors of these shapes if they are given, else of the example's.

        Raises:
            UnstorableError: One of the inputs cannot be made up.
        """
        generator = torch.Generator().manual_seed(0)
        waiting = iter(shapes) if shapes is not None else None

        def tensor(name: str, spec: TensorSpec) -> Tensor:
            shape = tuple(next(waiting)) if waiting is not None else tuple(spec.shape)
            made = self._tensor(name, spec, shape, generator)
            return _strided(made) if is_strided else made

        values = {str(node.target): _made(str(node.target), node.spec, tensor) for node in self.frame.inputs()}
        specs = {str(node.target): node.spec for node in self.frame.inputs()}
        return _as_call(self.frame.parameters, values, specs)

    def _tensor(self, name: str, spec: TensorSpec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if spec.type_name != "Tensor":
            raise UnstorableError(f"its input {name!r} is a {spec.type_name}, which cannot be made up")
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


def _made(name: str, spec: ValueSpec, tensor: Callable[[str, TensorSpec], Tensor]) -> Any:
    if isinstance(spec, TensorSpec):
        return tensor(name, spec)
    if isinstance(spec, ScalarSpec):
        return spec.value
    if isinstance(spec, ContainerSpec):
        items = [_made(f"{name}|{text}", child, tensor) for text, _, child in spec.children]
        return rebuilt(spec.type, [key for _, key, _ in spec.children], items)
    raise UnstorableError(f"its input {name!r} is an object ({spec}), which cannot be made up")


def _as_call(parameters: Sequence[InputParameter], values: dict[str, Any], specs: Mapping[str, ValueSpec]) -> Call:
    """Returns the call that gives each parameter its value; what is the default anyway is not given."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    is_positional = True
    for parameter in parameters:
        value, spec = values.get(parameter.name), specs.get(parameter.name)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            args.extend(value or ())
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            kwargs.update(value or {})
        elif isinstance(spec, ScalarSpec) and spec.value is parameter.default:
            is_positional = False
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            args.append(value)
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY or not is_positional:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


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
