"""What a run must leave as it was: all that the model holds, and the user's random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphpatch_notebook.capture.observers import original_forward
from graphpatch_notebook.checks.model_state import Change, ModuleState, SharedRandomState
from graphpatch_notebook.checks.outer_values import outer_objects
from graphpatch_notebook.patchable_graph import PatchableGraph, captured

_RANDOM = ("torch", "Python", "numpy", "own")


class RunState:
    """The state of a model at one moment, to start runs from, and to be put back.

    The generators of torch, Python and numpy are those of the process: while a run goes on, a cell of the user's may
    draw from them, too. To put them back would have it draw the same numbers twice. So they are left alone where the
    model is in eval mode and drew none when it was captured; `remark` tells if they moved all the same.

    Args:
        graph: The graph of the model.
    """

    def __init__(self, graph: PatchableGraph) -> None:
        self._state = ModuleState(captured(graph).module, _generators(graph))
        model = captured(graph)
        is_training = any(module.training for module in model.module.modules())
        self._draws = model.drawn is None or bool(model.drawn) or is_training
        self._begin = SharedRandomState()
        self._end: SharedRandomState | None = None

    def restore(self) -> None:
        """Puts everything back, but for the generators of the process where the model draws nothing."""
        self._state.restore(has_random=self._draws)

    def change_of_model(self) -> Change | None:
        """Returns what a run has changed in the model that cannot be put back; asked after `restore`."""
        return self._state.change(besides=_RANDOM)

    def separated(self, value: Any) -> Any:
        """Returns a value that stays what it is when the state is put back, or in another run."""
        return self._state.separated(value)

    def remark(self, is_last: bool) -> str | None:
        """Returns why two calls may not have had the same numbers, in words; asked after each, before `restore`.

        Args:
            is_last: Whether no other call follows.
        """
        now, before = SharedRandomState(), self._end
        self._end = now
        if not self._draws:
            moved = [] if is_last else now.differing(self._begin)
            return (
                f"random numbers of {' and '.join(moved)} were drawn during the run without the patches: if it was the "
                "model that drew them (and no cell), some of the differences may come from that"
                if moved
                else None
            )
        moved = [] if before is None else now.differing(before)
        return (
            f"the run with the patches drew another amount of random numbers (of {' and '.join(moved)}) than the one "
            "without, or a cell drew some meanwhile: some of the differences may come from that"
            if moved
            else None
        )


def _generators(graph: PatchableGraph) -> Iterator[Any]:
    """Yields what the calls and the code of the model name outside of it, some of it random generators of its own."""
    for frame in captured(graph).root.walk():
        yield from outer_objects(frame.module, original_forward(frame.module)).values()
        for node in frame.nodes:
            yield from (*node.args, *node.kwargs.values())
