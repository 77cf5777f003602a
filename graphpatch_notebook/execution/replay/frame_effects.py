"""Side effects of frames: a run can only skip frames without side effects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Module

from graphpatch_notebook.capture.held_values import memory_of
from graphpatch_notebook.capture.observers import original_forward
from graphpatch_notebook.checks.hooks import is_inert
from graphpatch_notebook.torch_compat import version_of
from graphpatch_notebook.values import IMMUTABLE, readable_children

_STATELESS = (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Softmax)


def is_stateless(module: Module) -> bool:
    """Whether a module is one of torch's own that never changes when it runs."""
    if type(module) not in _STATELESS:
        return False
    return getattr(original_forward(module), "__func__", None) is type(module).forward  # not replaced


class GivenValues:
    """The inputs of a frame, and the state that they were in."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[tuple[Tensor, int | None]] = []
        self._containers: list[tuple[Any, list[tuple[Any, Any]]]] = []
        self.unknown: str | None = None
        for value in (*args, *kwargs.values()):  # the tuple and the dict are new in each call
            self._look(value)

    def _look(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors.append((value, version_of(value)))
            if value.is_inference():
                self.unknown = "a tensor of inference mode, for which torch does not count writes"
        elif not isinstance(value, IMMUTABLE):
            inside = readable_children(value)
            if inside is None:
                if not callable(value):
                    self.unknown = f"an object of type {type(value).__name__}, which it may change"
                return
            self._containers.append((value, inside))
            for _, child in inside:
                self._look(child)

    def change(self) -> str | None:
        """Returns the reason why the frame may have changed its inputs; `None` if it did not."""
        if self.unknown is not None:
            return f"it is given {self.unknown}"
        if any(version_of(tensor) != version for tensor, version in self.tensors):
            return "it writes into a tensor that it is given"
        for container, before in self._containers:
            now = readable_children(container)
            if now is None or len(now) != len(before):
                return "it changes a container that it is given"
            if any(a[0] != b[0] or a[1] is not b[1] for a, b in zip(before, now, strict=True)):
                return "it changes a container that it is given"
        return None


def problem_of_result(given: GivenValues, output: Any) -> str | None:
    """Returns why a run cannot skip a frame whose result is recorded; `None` if it can.

    Hooks of modules inside it are another reason: see `holds_one_of`.

    Args:
        given: The inputs of the frame.
        output: What it returned.
    """
    if (change := given.change()) is not None:
        return change
    storages = {storage_of(tensor) for tensor, _ in given.tensors}
    for leaf in leaves_of(output):
        if isinstance(leaf, Tensor):
            # If the sweep needs no gradients, the model itself uses them.
            if leaf.requires_grad:
                return "gradients flow through it"
            if leaf.is_inference() or storage_of(leaf) in storages:
                return "it returns what it is given"
        elif not isinstance(leaf, IMMUTABLE):
            return f"it returns an object of type {type(leaf).__name__}"
    return None


_LEAVES = (Tensor, *IMMUTABLE)


def leaves_of(value: Any) -> Iterator[Any]:
    """Yields what a value made of containers holds: tensors, and everything else that is not a container."""
    inside = None if isinstance(value, _LEAVES) else readable_children(value)
    if inside is None:
        yield value
        return
    for _, child in inside:
        yield from leaves_of(child)


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors among values, also in containers. Fast, since it runs for each call of torch."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif not isinstance(value, IMMUTABLE):
            found += [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
    return found


def storage_of(tensor: Tensor) -> Any:
    """Returns a key that identifies the memory of a tensor."""
    return memory_of(tensor) or id(tensor)


def holds_one_of(module: Module, hooked: Sequence[Module]) -> bool:
    """Whether `module` holds one of the modules with hooks: these would not run if it is left out."""
    return bool(hooked) and any(inner is not module and inner in hooked for inner in all_modules(module))


def all_modules(model: Module) -> list[Module]:
    """Returns what `model.modules()` yields, in less time."""
    found: dict[int, Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            if module._modules:
                waiting += [child for child in [*module._modules.values()][::-1] if child is not None]
    return list(found.values())


def has_hooks(module: Module) -> bool:
    """Whether a module has forward hooks that may have an effect."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    return bool(before or after) and not all(map(is_inert, (*before.values(), *after.values())))
