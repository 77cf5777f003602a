"""A run that is looked at closely: what its frames return, what they change, and which of them can be left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.execution.frame_effects import (
    GivenValues,
    ModuleLook,
    changed_object,
    has_hooks,
    holds_one_of,
    is_stateless,
    problem_of_result,
)
from graphpatch_notebook.execution.frame_results import (
    FrameNode,
    FrameStack,
    FrameTree,
    RunningFrame,
    own_tensors,
    tensors_in,
)
from graphpatch_notebook.graph_modules.snapshots import version_of
from graphpatch_notebook.torch_compat import without_torch_functions
from graphpatch_notebook.values import with_own_containers


class Recording:
    """Notes when each frame ends, what it changes, and what frames return that are called by an open one.

    Args:
        tree: Where it is written to; the frames that are open must be so already.
        model: The model that runs.
        wants_pair: Whether what the frames of a module are given and return is to be kept, too, wherever they are;
            `None`: it is to be, and so is what frames inside it are given and return.
        looks_at_modules: Whether to look for what modules change in themselves.

    Attributes:
        state_change: What the run changes in the model, in words; `None` for nothing.
    """

    def __init__(
        self,
        tree: FrameTree,
        model: Module,
        wants_pair: Callable[[Module], bool | None] | None = None,
        *,
        looks_at_modules: bool = True,
    ) -> None:
        self._tree = tree
        self._model = model
        self._wants_pair = wants_pair
        self._looks_at_modules = looks_at_modules
        self._stack = FrameStack(tree)
        self._kept: list[tuple[FrameNode, list[tuple[Tensor, int]]]] = []
        self._given: list[tuple[FrameNode, Tensor, int]] = []
        self._objects: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.state_change: str | None = None

    def begin(self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caller = self._stack.running[-1]
        is_kept = caller.node.is_open
        running = self._stack.push(module)
        with without_torch_functions():
            if self._looks_at_modules and not is_stateless(module):
                running.look = ModuleLook(module, self._objects)
            if self._wants_pair is not None and not caller.is_covered and not running.node.is_open:
                wants_pair = len(args) + len(kwargs) == 1 and self._wants_pair(module)
                running.is_paired = wants_pair is not False
                running.is_covered = wants_pair is True
            running.is_covered = running.is_covered or caller.is_covered
            if is_kept or running.is_paired:
                running.given = GivenValues(args, kwargs)
            running.is_kept = is_kept

    def returned(self, output: Any) -> None:
        running = self._stack.running[-1]
        if not running.has_returned:
            running.has_returned = True
            with without_torch_functions():
                self._note(running, output)

    def _note(self, running: RunningFrame, output: Any) -> None:
        node = running.node
        assert node.module is not None
        change = running.change
        if change is None and running.look is not None:
            change = running.change = running.look.change()
        self.state_change = self.state_change or change
        node.ended = self._tree.tick()
        node.problem = change
        node.pair = None
        if running.given is None or change is not None:
            return
        problem = problem_of_result(running.given, output)
        if running.is_kept:
            node.problem = problem
        if problem is not None:
            return
        kept = with_own_containers(own_tensors(output) if node.is_written_later else output)
        if running.is_kept:
            node.value = kept
        if running.is_paired:
            node.pair = self._pair(node, running.given, kept)
        if running.is_kept or node.pair is not None:
            self._kept.append((node, [(tensor, version_of(tensor)) for tensor in tensors_in(output)]))

    def _pair(self, node: FrameNode, given: GivenValues, output: Any) -> tuple[Tensor, Tensor] | None:
        if len(given.tensors) != 1 or not isinstance(output, Tensor):
            return None
        ((tensor, version),) = given.tensors
        if not tensor.is_floating_point() or tensor.dim() < 2 or output.shape[:-1] != tensor.shape[:-1]:
            return None
        self._given.append((node, tensor, version))
        return tensor, output

    def end(self) -> None:
        running = self._stack.running.pop()
        caller = self._stack.running[-1]
        caller.change = caller.change or running.change

    def close(self) -> bool:
        """Ends the recording; says whether somebody wrote into what a frame had returned: then record once more."""
        is_spoilt = False
        hooked = [module for module in self._model.modules() if has_hooks(module)]
        self.state_change = self.state_change or changed_object(self._objects)
        for node, marks in self._kept:
            if not node.is_written_later and any(version_of(tensor) != version for tensor, version in marks):
                node.is_written_later = is_spoilt = True
            if node.module is not None and holds_one_of(node.module, hooked):
                node.problem, node.value, node.pair = "there are hooks on modules inside it", None, None
        for node, tensor, version in self._given:
            if version_of(tensor) != version:
                node.pair = None
        return is_spoilt
