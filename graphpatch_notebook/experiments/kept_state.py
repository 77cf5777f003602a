"""What the runs that prepare a sweep must leave as it was."""

from __future__ import annotations

from torch.nn import Module

from graphpatch_notebook.checks.model_state import BufferState, SharedRandomState
from graphpatch_notebook.execution.frame_effects import all_modules


class KeptState:
    """The buffers of a model and the state of the random generators, to be put back.

    Args:
        model: The model.
    """

    def __init__(self, model: Module) -> None:
        self._buffers = BufferState(all_modules(model))
        self._random = SharedRandomState()

    def change(self) -> str | None:
        """Returns what has changed since, in words."""
        if drawn := self._random.differing(SharedRandomState()):
            return f"the model draws random numbers (of {' and '.join(drawn)})"
        return self._buffers.change()

    def restore(self) -> None:
        """Puts all of it back."""
        self._random.restore()
        self._buffers.restore()
