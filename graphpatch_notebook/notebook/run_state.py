"""What a run must leave as it was: the model's buffers, and the user's random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.capture.tensor_sources import reachable_modules
from graphpatch_notebook.graph_modules.snapshots import ModuleState, copied
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.values import readable_children

_DEEPEST = 4
_NOT_BUFFERS = frozenset({"_parameters", "_modules"})
_PLAIN = (bool, int, float, str, set, type(None), Module)

_DRAWING = frozenset(
    "bernoulli bernoulli_ cauchy_ exponential_ geometric_ gumbel_softmax log_normal_ multinomial normal normal_ "
    "poisson rrelu rrelu_ uniform_".split()
)


class RunState:
    """Buffers and random generators at one moment, to start several runs from, and to be put back.

    The generators are those of the process: while a run goes on, a cell of the user's may draw from them, too. To put
    them back would have it draw the same numbers twice. So they are left alone where the model draws none itself, as
    far as its capture and its mode tell.
    """

    def __init__(self, graph: PatchableGraph) -> None:
        self._state = ModuleState(graph._module)
        self._modules = reachable_modules(graph._module)
        self._draws = draws_random_numbers(graph._root_frame)

    def restore(self) -> None:
        """Puts everything back."""
        if self._draws:
            self._state.restore_random()
        self._state.restore_buffers()

    def change_of_model(self) -> str | None:
        """Returns what a run has changed in the model that cannot be put back, in words; asked after `restore`."""
        change = self._state.unrepeatable_change()
        return None if change is None or "random numbers" in change else change

    def separated(self, value: Any) -> Any:
        """Returns a value that stays what it is when buffers are put back, or are written into by another run.

        Usually that is the value itself; a copy where it holds a tensor, or a part of one, that the model keeps.
        """
        kept = {_memory(tensor) for module in self._modules for tensor in _kept_by(module)} - {None}
        return copied(value) if any(_memory(tensor) in kept for tensor in _tensors_in(value)) else value


def _kept_by(module: Module) -> Iterator[Tensor]:
    """Yields the buffers of a module, and other tensors that are attributes of it, but no parameters."""
    for name, value in module.__dict__.items():
        # Most attributes of most modules are numbers, or hooks that nobody has registered.
        is_empty = isinstance(value, (dict, list, tuple)) and not value
        if not is_empty and name not in _NOT_BUFFERS and not isinstance(value, _PLAIN):
            yield from _tensors_in(value)


def _tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < _DEEPEST and not isinstance(value, Module):
        for _, child in readable_children(value) or ():
            yield from _tensors_in(child, depth + 1)


def _memory(tensor: Tensor) -> int | None:
    """Returns where the memory of a tensor begins; `None` for parameters, which no run puts back, and without any."""
    if isinstance(tensor, Parameter):
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except Exception:  # some layouts and subclasses have no memory of their own
        return None


def draws_random_numbers(root: Frame) -> bool:
    """Whether a run may draw random numbers: it did so at capture, or its mode says so, or that cannot be told."""
    if any(module.training for module in root.module.modules()):
        return True
    return any(
        frame.opaque_reason is not None
        or frame.custom_graph is not None
        or any(node.kind == "op" and _may_draw(node) for node in frame.nodes)
        for frame in root.walk()
    )


def _may_draw(node: Node) -> bool:
    if "dropout" in node.op:
        return _argument(node, 2, "training", True) is not False
    if node.op == "scaled_dot_product_attention":
        return bool(_argument(node, 4, "dropout_p", 0.0) != 0.0)
    return node.op in _DRAWING or node.op.startswith(("rand", "fractional_max_pool"))


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
