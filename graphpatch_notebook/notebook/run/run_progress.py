"""How far a run is: told from its Python stack, by somebody who looks now and then. The run pays nothing for it.

No hooks, no profiler, no function mode: these switch fast paths of torch off, and with them change numbers.
"""

from __future__ import annotations

import weakref
from types import FrameType

from torch.nn import Module

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import is_module_call


class RunProgress:
    """How far the passes of a run through the model are.

    Args:
        graph: The graph. It is not kept alive: nobody may ask any more when it is to go.
        passes: How often the model runs.

    Attributes:
        done: How many of these runs are over.
    """

    def __init__(self, graph: PatchableGraph, passes: int) -> None:
        self._graph = weakref.ref(graph)
        self._passes = passes
        self._positions = {id(frame): position for position, frame in enumerate(captured(graph).root.walk())}
        self._fraction = 0.0
        self._last = 0
        self._pass = 0
        self.done = 0

    def look(self, python_frame: FrameType | None) -> tuple[str | None, float]:
        """Returns the path of the module that runs (`None`: the model itself, or none), and the fraction that is done.

        Args:
            python_frame: The innermost Python frame of the run.
        """
        if self._pass != self.done:
            self._pass, self._last = self.done, 0
        graph = self._graph()
        if graph is None:
            return None, self._fraction
        root = captured(graph).root
        found = self._frame_of(root, _modules_called(python_frame)) if python_frame is not None else root
        self._last = max(self._last, self._positions[id(found)])
        fraction = min(1.0, (self._pass + self._last / len(self._positions)) / self._passes)
        self._fraction = max(self._fraction, fraction)
        return format_path(found.path) or None, self._fraction

    def _frame_of(self, root: Frame, modules: list[Module]) -> Frame:
        """Returns the captured frame that the calls of these modules, outermost first, lead down to."""
        found = root
        for module in modules:
            below = [node.frame for node in found.calls() if node.frame.module is module]
            if below:  # of several calls of one module, the first that the run is not past
                later = (frame for frame in below if self._end(frame) >= self._last)
                found = next(later, below[-1])
        return found

    def _end(self, frame: Frame) -> int:
        return self._positions[id(frame)] + sum(1 for _ in frame.walk()) - 1


def _modules_called(python_frame: FrameType | None) -> list[Module]:
    found = []
    while python_frame is not None:
        if is_module_call(python_frame.f_code):
            found.append(python_frame.f_locals.get("self"))
        python_frame = python_frame.f_back
    return [module for module in reversed(found) if isinstance(module, Module)]
