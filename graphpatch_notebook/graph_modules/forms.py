"""What the inputs of a run looked like: a graph that was recorded with them holds for others that look the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.values import ContainerSpec, ObjectSpec, ScalarSpec, TensorSpec, ValueSpec, take


class Form(Module):
    """Raises where inputs do not look like those of a recorded run; else does nothing. Compilers can look into it.

    Tensors must have the recorded shape and dtype, containers the class and keys, and all else the very value: which
    way the model goes may depend on it.

    Args:
        frame: The frame of the whole model.
        any_size: Whether tensors may have other sizes (but not another number of dimensions).
    """

    def __init__(self, frame: Frame, *, any_size: bool) -> None:
        super().__init__()
        by_name = {node.target: node.spec for node in frame.inputs()}
        self.inputs = tuple((p.name, by_name.get(p.name, ScalarSpec(None))) for p in frame.parameters)
        self.any_size = any_size

    def forward(self, *values: Any) -> None:
        """Checks the inputs, given in the order of the parameters.

        Raises:
            GraphError: One of them does not look like it did.
        """
        for (name, spec), value in zip(self.inputs, values, strict=True):
            if not self._fits(spec, value):
                raise GraphError(
                    f"the input {name!r} does not look like the one that this graph was made with ({spec}); make "
                    "another graph for such inputs, with pg.to_fx(...) of a PatchableGraph that has them as its example"
                )

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
