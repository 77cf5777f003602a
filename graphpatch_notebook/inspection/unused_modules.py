"""Which modules of a model the capture never called."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch.nn import Module, ModuleDict, ModuleList, Sequential

from graphpatch_notebook.capture.records import Frame


def used_modules(root: Frame) -> set[int]:
    """Returns the ids of the modules that were called during the capture whose root frame is `root`."""
    return {id(frame.module) for frame in root.walk()}


def unused_modules(
    module: Module, used: Container[int], names: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Module]]:
    """Yields the submodules that were never called, the outermost of each, with the names that lead to them.

    Those inside of a submodule that was called are its own; empty containers are left out.

    Args:
        module: A module that was called, or one that only holds others.
        used: The ids of the modules that were called.
        names: The names that lead to `module`.

    Example:
        >>> model = ModuleDict({"used": Module(), "unused": Module(), "layers": ModuleList([Module()])})
        >>> [names for names, _ in unused_modules(model, {id(model), id(model["used"])})]
        [('unused',), ('layers',)]
    """
    for name, child in module.named_children():
        if id(child) in used:
            continue
        inside = [id(below) in used for below in child.modules()]
        if any(inside):
            yield from unused_modules(child, used, (*names, name))
        elif not (len(inside) == 1 and isinstance(child, (ModuleDict, ModuleList, Sequential))):
            yield (*names, name), child
