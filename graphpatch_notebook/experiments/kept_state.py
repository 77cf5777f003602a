"""What the runs that prepare a sweep must leave as it was."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.graph_modules.equality import difference
from graphpatch_notebook.graph_modules.snapshots import LARGE, SharedRandomState


class KeptState:
    """The buffers of a model and the state of the random generators, to be put back.

    Args:
        model: The model.
    """

    def __init__(self, model: Module) -> None:
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.numel() * buffer.element_size() <= LARGE
        ]
        self._random = SharedRandomState()

    def change(self) -> str | None:
        """Returns what has changed since, in words."""
        if drawn := self._random.differing(SharedRandomState()):
            return f"the model draws random numbers (of {' and '.join(drawn)})"
        for module, name, buffer, copy in self._buffers:
            if module._buffers.get(name) is not buffer or not _is_equal(buffer, copy):
                return f"{type(module).__name__} changes its buffer {name!r}"
        return None

    def restore(self) -> None:
        """Puts all of it back."""
        self._random.restore()
        for module, name, buffer, copy in self._buffers:
            module._buffers[name] = buffer
            if not _is_equal(buffer, copy):
                buffer.data.copy_(copy)


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return difference(a.detach(), b, "") is None
