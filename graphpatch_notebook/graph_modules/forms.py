"""What inputs and modes of a run looked like: a graph that was recorded with them holds where they look the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.values import ContainerSpec, ObjectSpec, ScalarSpec, TensorSpec, ValueSpec, take


class Form(Module):
    """Raises where inputs do not look like those of a recorded run; else does nothing. Compilers can look into it.

    Tensors must have the recorded shape and dtype, containers the class and keys, and all else the very value: which
    way the model goes may depend on it. Tensors must also lie in memory like those of the run that the graph was
    compared on, and the modules must be in the modes of the recorded run.

    Args:
        frame: The frame of the whole model.
        any_size: Whether tensors may have other sizes (but not another number of dimensions).
    """

    def __init__(self, frame: Frame, *, any_size: bool) -> None:
        super().__init__()
        by_name = {node.target: node.spec for node in frame.inputs()}
        self.inputs = tuple((p.name, by_name.get(p.name, ScalarSpec(None))) for p in frame.parameters)
        self.any_size = any_size
        # Compilers know this module, but not the one whose graph calls it; `train()` and `eval()` reach both.
        self.training = self.was_training = frame.training
        self.modules_below: list[tuple[str, Module, bool]] = []
        self.layouts: dict[str, tuple[int, ...] | None] = {}
        self._is_noting_layouts = False

    def add_module_below(self, path: str, module: Module) -> None:
        """Lets the form hold only while `module` stays in the mode that it is in."""
        self.modules_below.insert(0, (path, module, module.training))  # callers come after what they call

    @contextmanager
    def noting_layouts(self) -> Iterator[None]:
        """Takes how inputs lie in memory in the block for how they must lie afterwards."""
        self._is_noting_layouts = True
        try:
            yield
        finally:
            self._is_noting_layouts = False

    def forward(self, *values: Any) -> None:
        """Checks the inputs, given in the order of the parameters.

        Raises:
            GraphError: One of them does not look like it did, or a module is in another mode.
        """
        self._check_modes()
        for (name, spec), value in zip(self.inputs, values, strict=True):
            if not self._fits(spec, value):
                raise GraphError(self._unlike(name, spec, value))
            self._check_layouts(name, spec, value)

    def _unlike(self, name: str, spec: ValueSpec, value: Any) -> str:
        now = repr(value) if isinstance(value, (bool, int, float, type(None))) else f"of type {type(value).__name__}"
        if isinstance(value, Tensor):
            now = f"Tensor{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
        sizes = ""
        if isinstance(value, Tensor) and isinstance(spec, TensorSpec) and not self.any_size:
            are_alike = value.dtype == spec.dtype and value.dim() == len(spec.shape)
            sizes = "; pg.to_fx(..., any_size=True) makes one for inputs of other sizes" if are_alike else ""
        other = "; make another graph, with pg.to_fx(...) of a PatchableGraph that has such inputs as its example"
        return f"the input {name!r} is {now}, and was {spec} when this graph was made{sizes or other}"

    def _check_modes(self) -> None:
        if self.training is not self.was_training:
            raise GraphError(_other_mode("this graph", self.was_training))
        for path, module, was_training in self.modules_below:
            if module.training is not was_training:
                raise GraphError(_other_mode(f"the graph of {path!r}", was_training))

    def _check_layouts(self, name: str, spec: ValueSpec, value: Any) -> None:
        if isinstance(spec, ContainerSpec):
            for text, key, child in spec.children:
                self._check_layouts(f"{name}.{text}", child, take(value, key))
        elif isinstance(spec, TensorSpec):
            now = _layout(value)
            if self._is_noting_layouts:
                self.layouts[name] = now
            elif name in self.layouts and not self._is_like(self.layouts[name], now):
                raise GraphError(
                    f"the input {name!r} {_told(now)}, and {_told(self.layouts[name])} when this graph was compared "
                    f"with the model, which may ask for that; {_repair(name, self.layouts[name])}"
                )

    def _is_like(self, was: tuple[int, ...] | None, now: tuple[int, ...] | None) -> bool:
        if was is None or now is None or not self.any_size:
            return was == now
        return _order(was) == _order(now)

    def _fits(self, spec: ValueSpec, value: Any) -> bool:
        if isinstance(spec, TensorSpec):
            if not isinstance(value, Tensor) or value.dtype != spec.dtype:
                return False
            return value.dim() == len(spec.shape) if self.any_size else tuple(value.shape) == tuple(spec.shape)
        if isinstance(spec, ContainerSpec):
            if type(value) is not spec.type:
                return False
            if isinstance(value, (tuple, list, Mapping)) and len(value) != len(spec.children):
                return False
            return all(self._fits(child, take(value, key)) for _, key, child in spec.children)
        if isinstance(spec, ObjectSpec):
            return type(value).__name__ == spec.type_name
        if not isinstance(spec, ScalarSpec):  # nothing is known of it
            return True
        return type(value) is type(spec.value) and value == spec.value


def _other_mode(who: str, was_training: bool) -> str:
    was, now = ("train", "eval") if was_training else ("eval", "train")
    return (
        f"{who} was captured in {was} mode, and is in {now} mode now, which changes nothing in it (dropout and the "
        f"like stay as they were); call {was}() on what was in {was} mode, or make another graph, with pg.to_fx(...) "
        f"of a PatchableGraph of the model in {now} mode"
    )


def _layout(tensor: Tensor) -> tuple[int, ...] | None:
    """Returns the strides of a tensor that is not contiguous, but for the dimensions where they make no difference."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return None
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _order(strides: tuple[int, ...]) -> list[int]:
    return sorted(range(len(strides)), key=lambda position: strides[position])


def _told(layout: tuple[int, ...] | None) -> str:
    return "is contiguous in memory" if layout is None else f"has the strides {layout}"


def _repair(name: str, was: tuple[int, ...] | None) -> str:
    other = "make another graph, with pg.to_fx(...) on inputs like this one"
    return f"give {name}.contiguous(), or {other}" if was is None else other
