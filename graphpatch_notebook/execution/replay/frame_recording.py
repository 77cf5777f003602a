"""Records a run: the results of its frames, their side effects, and which of them later runs can skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.checks.model_state import ModuleState
from graphpatch_notebook.execution.replay.frame_effects import (
    GivenValues,
    all_modules,
    has_hooks,
    holds_one_of,
    is_stateless,
    problem_of_result,
)
from graphpatch_notebook.execution.replay.frame_results import (
    FrameNode,
    FrameTree,
    RunningFrame,
    SeenFrames,
    own_tensors,
    tensors_in,
)
from graphpatch_notebook.torch_compat import version_of, without_torch_functions
from graphpatch_notebook.values import with_own_containers


class FrameFlow(Protocol):
    """Observes frames with one tensor as input, and decides for which of them input and output are kept."""

    def begins(self, node: FrameNode, value: Tensor) -> bool:
        """Called when a frame with one tensor as input begins; returns whether to call `returns` or `fails`, too."""

    def returns(self, node: FrameNode, given: Tensor, output: Any) -> bool:
        """Called when such a frame returns; returns whether to keep its input and output."""

    def fails(self, node: FrameNode) -> None:
        """Called when such a frame ends in another way."""


class FrameRecording:
    """Records when each frame ends, what it changes, and the results of frames that a running frame calls.

    Args:
        tree: Where results are written to; its open frames must be marked already.
        model: The model that runs.
        flow: Decides for which frames, of those with one input tensor and one output tensor, both are kept.
        state: A snapshot of the model before, to detect changes by modules; `None` if that is not needed.

    Attributes:
        state_change: What the run changes in the model; `None` for nothing.
    """

    def __init__(
        self,
        tree: FrameTree,
        model: Module,
        flow: FrameFlow | None = None,
        state: ModuleState | None = None,
    ) -> None:
        self._tree = tree
        self._model = model
        self._flow = flow
        self._state = state
        self._stack = SeenFrames(tree)
        self._kept: list[tuple[FrameNode, list[tuple[Tensor, int | None]]]] = []
        self._given: list[tuple[FrameNode, Tensor, int | None]] = []
        self.state_change: str | None = None

    def begin(self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caller = self._stack.running[-1]
        is_kept = caller.node.is_open
        running = self._stack.push(module)
        running.node.began = self._tree.tick()
        with without_torch_functions():
            value = self._only_tensor(module, args, kwargs)
            if self._flow is not None and value is not None and not running.node.is_open:
                running.is_paired = True  # also if an interrupt arrives now
                running.is_paired = self._flow.begins(running.node, value)
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
        if change is None and self._state is not None and not is_stateless(node.module):
            found = self._state.change_in(node.module)
            change = running.change = None if found is None else str(found)
        self.state_change = self.state_change or change
        node.ended = self._tree.tick()
        node.problem = change
        node.pair = None
        is_paired = self._is_paired(running, output)
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
        if is_paired:
            ((tensor, version),) = running.given.tensors
            node.pair = (tensor, kept)
            self._given.append((node, tensor, version))
            for inner in node.walk():
                inner.pair = inner.pair if inner is node else None
        if running.is_kept or is_paired:
            self._kept.append((node, [(tensor, version_of(tensor)) for tensor in tensors_in(output)]))

    def _only_tensor(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Returns the input of a module with weights, if that is one tensor of floats."""
        if self._flow is None or len(args) + len(kwargs) != 1:
            return None
        (value,) = args or kwargs.values()
        if type(value) is not Tensor or value.dim() < 2 or not value.is_floating_point():
            return None
        return value if _holds_weights(module) else None

    def _is_paired(self, running: RunningFrame, output: Any) -> bool:
        if not running.is_paired:
            return False
        assert self._flow is not None
        assert running.given is not None
        running.is_paired = False
        return self._flow.returns(running.node, running.given.tensors[0][0], output)

    def end(self) -> None:
        running = self._stack.running.pop()
        if running.is_paired and self._flow is not None:
            self._flow.fails(running.node)
        caller = self._stack.running[-1]
        caller.change = caller.change or running.change

    def close(self) -> bool:
        """Ends the recording; returns whether the model wrote into the result of a frame: if so, record again."""
        is_spoilt = False
        hooked = [module for module in all_modules(self._model) if has_hooks(module)]
        if self.state_change is None and self._state is not None:
            found = self._state.change_in(None)
            self.state_change = None if found is None else str(found)
        for node, marks in self._kept:
            if not node.is_written_later and any(version_of(tensor) != version for tensor, version in marks):
                node.is_written_later = is_spoilt = True
            if node.module is not None and holds_one_of(node.module, hooked):
                node.problem, node.value, node.pair = "there are hooks on modules inside it", None, None
        for node, tensor, version in self._given:
            if version_of(tensor) != version:
                node.pair = None
        return is_spoilt


def _holds_weights(module: Module) -> bool:
    if any(weight is not None for weight in module._parameters.values()):
        return True
    return any(_holds_weights(child) for child in module._modules.values() if child is not None)
