"""Random numbers of a run: which generators a model draws from, and where these stood before."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from graphpatch_notebook.capture.forward_swap import original_forward
from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.checks.model_state import SharedRandomState
from graphpatch_notebook.checks.outer_values import outer_objects

_DRAWING = frozenset(
    "_Dirichlet _sample_dirichlet _standard_gamma bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ "
    "gumbel_softmax kaiming_uniform_ log_normal_ multinomial normal normal_ pca_lowrank poisson rrelu rrelu_ "
    "svd_lowrank uniform_".split()
)
_DEEPEST = 3


class RandomNumbers:
    """The generators that a run of a graph may draw from, at one moment.

    The generators of torch, Python and numpy are those of the process: while a run goes on, a cell of the user's may
    draw from them, too. To put them back would have it draw the same numbers twice. So they are left alone where the
    model draws none itself, as far as its capture, its mode and its code tell; `remark` tells if they moved all the
    same. Generators that the model has for itself (`torch.rand(..., generator=g)`, numpy's `default_rng()`) are always
    put back: those that its calls, its code or its attributes name.
    """

    def __init__(self, graph_root: Frame, modules: list[Module]) -> None:
        named = [value for module in modules for value in _named_objects(module)]
        self._draws = draws_random_numbers(graph_root) or any(_is_shared_source(value) for value in named)
        own = {id(one): one for one in (*named, *_generators_of_nodes(graph_root)) if _is_own_generator(one)}
        self._own = [restoring for one in own.values() if (restoring := _restoring(one)) is not None]
        self._begin = SharedRandomState()
        self._end: SharedRandomState | None = None

    def restore(self) -> None:
        """Puts the generators back that the model draws from."""
        if self._draws:
            self._begin.restore()
        for restore in self._own:
            restore()

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


def draws_random_numbers(root: Frame) -> bool:
    """Whether a run may draw from torch's generators: it did at capture, its mode says so, or that cannot be told."""
    if any(module.training for module in root.module.modules()):
        return True
    return any(
        frame.opaque_reason is not None
        or frame.custom_graph is not None
        or any(node.kind == "op" and _may_draw(node) for node in frame.nodes)
        for frame in root.walk()
    )


def _may_draw(node: Node) -> bool:
    if _is_own_generator(node.kwargs.get("generator")):
        return False
    if "dropout" in node.op:
        return _argument(node, 2, "training", True) is not False
    if node.op == "scaled_dot_product_attention":
        return bool(_argument(node, 4, "dropout_p", 0.0) != 0.0)
    return node.op in _DRAWING or node.op.startswith(("rand", "fractional_max_pool"))


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


# -- generators --------------------------------------------------------------------------------------------------------


def _generators_of_nodes(root: Frame) -> Iterator[Any]:
    for frame in root.walk():
        for node in frame.nodes:
            yield from (*node.args, *node.kwargs.values())


def _named_objects(module: Module) -> Iterator[Any]:
    """Yields the attributes of a module, and what its code names: globals, closures, what its methods use."""
    yield from module.__dict__.values()
    for value in outer_objects(module, original_forward(module), _DEEPEST):
        # A method of a generator, such as `random.random`, stands for it.
        yield value if isinstance(value, types.ModuleType) else getattr(value, "__self__", value)


def _is_shared_source(value: Any) -> bool:
    """Whether numbers of Python's or numpy's generators are drawn by this."""
    numpy = sys.modules.get("numpy")
    sources = [random, random._inst]
    sources += [] if numpy is None else [numpy.random, numpy.random.mtrand._rand]
    return any(value is source for source in sources)


def _is_own_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random)
    kinds += () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    torchs = (torch.default_generator, *torch.cuda.default_generators)
    return isinstance(value, kinds) and not _is_shared_source(value) and not any(value is one for one in torchs)


def _restoring(generator: Any) -> Callable[[], Any] | None:
    """Returns what puts a generator back to where it is now; `None` for one that has no state."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if hasattr(generator, "set_state"):
        return partial(generator.set_state, generator.get_state())
    bits = generator.bit_generator
    return partial(setattr, bits, "state", bits.state)
