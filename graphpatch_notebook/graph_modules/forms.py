"""Refuses calls that a plain fx module does not hold for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.nn import Module

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.checks.call_signature import CONTIGUOUS, Aspect, CallSignature, Difference
from graphpatch_notebook.errors import GraphError

_IGNORED = frozenset({Aspect.CLASS, Aspect.DEVICE, Aspect.REQUIRES_GRAD, Aspect.LAYOUT})


class Form(Module):
    """Raises where a call does not look like the recorded one; else does nothing. Compilers can look into it.

    The modules must also be in the modes of the recorded run.

    Args:
        frame: The frame of the whole model.
        any_size: Whether tensors may have other sizes (but not another number of dimensions).
    """

    def __init__(self, frame: Frame, *, any_size: bool) -> None:
        super().__init__()
        ignored = _IGNORED | {Aspect.SIZE} if any_size else _IGNORED
        self.signature = replace(CallSignature.of_frame(frame), ignored=ignored)
        # Compilers know this module, but not the one whose graph calls it; `train()` and `eval()` reach both.
        self.training = self.was_training = frame.training
        self.modules_below: list[tuple[str, Module, bool]] = []
        self._is_noting_layouts = False

    def add_module_below(self, path: str, module: Module) -> None:
        """Lets the form hold only while `module` stays in the mode that it is in."""
        self.modules_below.insert(0, (path, module, module.training))  # callers come after what they call

    @contextmanager
    def noting_layouts(self) -> Iterator[None]:
        """Makes the way in which inputs lie in memory in the block the one in which they must lie afterwards."""
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
        differences = self.signature.differences(values)
        if differences:
            raise GraphError(f"{differences[0]}; {self._repair(differences[0])}")
        if self._is_noting_layouts:
            names = [name for name, _ in self.signature.inputs]
            now = CallSignature.of(dict(zip(names, values, strict=True))).tensors
            pairs = zip(self.signature.tensors, now, strict=True)
            tensors = tuple(replace(form, layout=other.layout) for form, other in pairs)
            ignored = self.signature.ignored - {Aspect.LAYOUT}
            self.signature = replace(self.signature, tensors=tensors, ignored=ignored)

    def _check_modes(self) -> None:
        if self.training is not self.was_training:
            raise GraphError(_other_mode("this graph", self.was_training))
        for path, module, was_training in self.modules_below:
            if module.training is not was_training:
                raise GraphError(_other_mode(f"the graph of {path!r}", was_training))

    def _repair(self, difference: Difference) -> str:
        if difference.aspect is Aspect.SIZE:
            return "pg.to_fx(..., any_size=True) makes a graph for inputs of other sizes"
        if difference.aspect is Aspect.LAYOUT:
            contiguous = f"give {difference.name}.contiguous(), or " if difference.was == CONTIGUOUS else ""
            another = "make another graph, with pg.to_fx(...) on inputs like this one"
            return f"the model may ask for that; {contiguous}{another}"
        return "make another graph, with pg.to_fx(...) of a PatchableGraph that has such inputs as its example"


def _other_mode(who: str, was_training: bool) -> str:
    was, now = ("train", "eval") if was_training else ("eval", "train")
    return (
        f"{who} was captured in {was} mode, and is in {now} mode now, which changes nothing in it (dropout and the "
        f"like stay as they were); call {was}() on what was in {was} mode, or make another graph, with pg.to_fx(...) "
        f"of a PatchableGraph of the model in {now} mode"
    )
