"""Random edits of values: each as a patch of the package, and as what a person would write in the source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook import AddPatch, CustomPatch, Patch, ProbePatch, RecordPatch, ReplacePatch, ZeroPatch


def _doubled_in_place(t: Any) -> Any:
    return t.mul_(2.0)


def _flipped(t: Any) -> Any:
    return t.flip(-1)


def _bent(t: Any) -> Any:
    return torch.tanh(t) * 1.5


def _same(t: Any) -> Any:
    return t


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "doubled": _doubled_in_place,
    "flipped": _flipped,
    "bent": _bent,
    "same": _same,
}


@dataclass
class Edit:
    """What is done to one value. `seen` is what a probe or record should have kept.

    Attributes:
        kind: Of the patch: `zero`, `add`, `replace`, `custom`, `probe`, `record`.
        value: For `add` and `replace`; a name of `FUNCTIONS` for `custom`.
        slice: Of the value.
        clones: Whether a custom function is given a clone.
    """

    kind: str
    value: Any = 0.0
    slice: Any = None
    clones: bool = True
    seen: list[Any] = field(default_factory=list, repr=False)

    def patch(self, value: Any = None) -> Patch[Any]:
        """Returns it as a patch, of another value if one is given."""
        value = self.value if value is None else value
        if self.kind == "zero":
            return ZeroPatch(slice=self.slice)
        if self.kind == "add":
            return AddPatch(value=value, slice=self.slice)
        if self.kind == "replace":
            return ReplacePatch(value=value, slice=self.slice)
        if self.kind == "custom":
            return CustomPatch(custom_op=FUNCTIONS[value], slice=self.slice, requires_clone=self.clones)
        return ProbePatch() if self.kind == "probe" else RecordPatch()

    def own_value(self) -> Any:
        """Returns the value, as a tensor of its own that wants a gradient if it is one."""
        if isinstance(self.value, Tensor):
            return self.value.detach().clone().requires_grad_(self.value.is_floating_point())
        return self.value

    def apply(self, value: Any, new: Any) -> Any:
        """Returns what stands in for `value`.

        Args:
            value: What came up: a tensor or a number.
            new: The value of this edit, as `own_value` returned it.
        """
        if self.kind in ("probe", "record"):
            self.seen.append(value.detach().clone() if isinstance(value, Tensor) else value)
            return value
        if value is None and (new != "same" or self.slice is not None):
            raise RuntimeError("there is no value to edit in this call")
        if self.kind == "custom" and not isinstance(value, Tensor):
            return FUNCTIONS[new](value)
        if not isinstance(value, Tensor):
            changed = {"zero": 0, "add": value + new if self.kind == "add" else 0, "replace": new}[self.kind]
            return type(value)(changed)
        index = ... if self.slice is None else self.slice
        if self.kind == "custom":
            function = FUNCTIONS[new]
            if self.slice is None:
                return function(value.clone() if self.clones else value)
            result = value.clone()
            result[index] = function(value[index].clone())
            return result
        result = value.clone()
        if self.kind == "zero":
            result[index] = 0
        elif self.kind == "add":
            result[index] += new
        else:
            result[index] = new
        return result
