"""Repeated calls: each is patched for itself, as if by a plain hook that counts the calls of its module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExtractionOptions,
    GraphPatchWarning,
    PatchableGraph,
    ZeroPatch,
)
from graphpatch_notebook.patchable_graph import captured as captured_model
from tests.zoo.submodules import Submodules

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Twice(Submodules, linear=(3, 3)):
    """The module of the documentation: one call after the other, on one line."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.linear(x), self.linear(x + 1))


class Cell(Submodules, linear=(3, 3)):
    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x) + state)
        return hidden * 2


class Loop(Submodules, cell=Cell):
    """An RNN, as people write it by hand."""

    def forward(self, x: Tensor, steps: int = 4) -> Tensor:
        state = torch.zeros(2, 3)
        for _ in range(steps):
            state = self.cell(x, state)
        return state


class Recursive(Submodules, linear=(3, 3)):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.linear(x)
        return x if depth == 0 else self(x, depth - 1) - self(x + 1, depth - 1)


class Within(nn.Module):
    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = inner()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Part(Submodules, once=(3, 3), others=(3, 3)):
    """Calls other modules in its first call than in those after it."""

    def forward(self, x: Tensor, is_first: bool = False) -> Tensor:
        return self.once(x) if is_first else self.others(x)


class Whole(Submodules, part=Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.part(x, True) + self.part(x) + self.part(x)


class Shared(nn.Module):
    """One module that several modules call, each several times, and their parent too."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(3, 3)
        self.first, self.second = Twice(), Twice()
        self.first.linear = self.second.linear = self.own = shared

    def forward(self, x: Tensor) -> Tensor:
        first, x = self.first(self.own(x))
        second, x = self.second(self.own(x) + first)
        return self.own(x) - second


MODELS: dict[str, Callable[[], nn.Module]] = {
    "twice": Twice,
    "loop": Loop,
    "recursive": Recursive,
    "recursive-within": lambda: Within(Recursive),
    "shared": Shared,
    "one-after-the-other": lambda: nn.Sequential(*[nn.Linear(3, 3)] * 3),
    "other-parts": Whole,
    "within-within": lambda: Within(lambda: Within(Twice)),
}


def options(name: str, model: nn.Module) -> ExtractionOptions:
    if name == "graphs":
        return ExtractionOptions()
    if name == "opaque":
        return ExtractionOptions(skip_compilation=True)
    return ExtractionOptions(classes_to_skip_compiling={type(m) for m in model.modules()} - {nn.Linear})


def captured(name: str, option: str) -> PatchableGraph:
    torch.manual_seed(0)
    model = MODELS[name]()
    return PatchableGraph(model, options(option, model), X)


Edit = Callable[[Any], Any]


@contextmanager
def by_hand(edits: dict[tuple[int, int], tuple[Edit | None, Edit | None]], root: nn.Module) -> Iterator[None]:
    """Edits the input and the output of calls, by the id of the module and the number of the call.

    `forward` is wrapped, which is also seen where nobody calls the module by `__call__`.
    """
    counts: dict[int, int] = {}
    modules = {id(module): module for module in root.modules()}

    def wrap(module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            number = counts.get(id(module), 0)
            counts[id(module)] = number + 1
            on_input, on_output = edits.get((id(module), number), (None, None))
            result = forward(x if on_input is None else on_input(x), *args, **kwargs)
            return result if on_output is None else on_output(result)

        return wrapped

    for module in modules.values():
        module.__dict__["forward"] = wrap(module)
    try:
        yield
    finally:
        for module in modules.values():
            del module.__dict__["forward"]


def numbered(pg: PatchableGraph) -> list[tuple[str, tuple[int, int]]]:
    """The paths of all calls below the root, each with its module and which call of this module it is."""
    counts: dict[int, int] = {}
    found = []
    for frame in captured_model(pg).root.walk():
        module = id(frame.module)
        number = counts.get(module, 0)
        counts[module] = number + 1
        if frame.call is not None:
            found.append((".".join(frame.path), (module, number)))
    return found


def scaled(value: Any, factor: float) -> Any:
    return tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor


def paths_of_output(pg: PatchableGraph, path: str) -> list[str]:
    return [p for p in pg.nodes if p == f"{path}.output" or p.startswith(f"{path}.output|")]


def first_input(pg: PatchableGraph, path: str) -> str:
    return next(p for p in pg.nodes if p in (f"{path}.x", f"{path}.input"))


def same(a: Any, b: Any) -> bool:
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("option", ["graphs", "opaque", "opaque-parents"])
@pytest.mark.parametrize("name", MODELS)
def test_each_call_is_patched_for_itself(name: str, option: str) -> None:
    pg = captured(name, option)
    model = pg._module
    plain, modules = model(X), {id(module): module for module in model.modules()}
    for path, call in numbered(pg):
        edit = lambda value: scaled(value, 3.0)  # noqa: E731
        with by_hand({call: (None, edit)}, model):
            expected = model(X)
        assert not same(expected, plain), path
        patch = {p: CustomPatch(edit) for p in paths_of_output(pg, path)}
        with pg.patch(patch, strict=True):
            assert same(pg(X), expected), path
            assert same(pg(X), expected), path  # each forward counts from zero
        with by_hand({call: (edit, None)}, model):
            expected = model(X)
        with pg.patch({first_input(pg, path): CustomPatch(edit)}, strict=True):
            assert same(pg(X), expected), path
        if f"{path}.bias" in pg.nodes and option == "graphs":
            bias = modules[call[0]].bias
            for inside, change in ("linear", edit), ("bias", lambda value, bias=bias: value - bias):
                with by_hand({call: (None, change)}, model):
                    expected = model(X)
                with pg.patch(
                    {f"{path}.{inside}": ZeroPatch() if inside == "bias" else CustomPatch(edit)}, strict=True
                ):
                    torch.testing.assert_close(pg(X), expected, atol=1e-5, rtol=1e-5)
    assert same(pg(X), plain)


# -- loops -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def loop() -> PatchableGraph:
    torch.manual_seed(0)
    return PatchableGraph(Loop(), X, steps=3)


def edited(loop: PatchableGraph, calls: set[int], steps: int) -> Tensor:
    cell = loop._module.cell
    with by_hand({(id(cell), call): (None, lambda value: value + 1) for call in calls}, loop._module):
        return loop._module(X, steps=steps)


@pytest.mark.parametrize("steps", [4, 7])
def test_more_calls_than_the_example_had(loop: PatchableGraph, steps: int) -> None:
    some = {"cell_0.output": AddPatch(1.0), "cell_2.linear.linear": AddPatch(0.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with loop.patch(some):  # these calls were meant, and no others
            assert torch.equal(loop(X, steps=steps), edited(loop, {0}, steps))
    every = {f"cell_{i}.output": AddPatch(1.0) for i in range(3)}
    with (
        loop.patch(every),
        pytest.warns(GraphPatchWarning, match=r"\] 'cell_0', 'cell_1', 'cell_2': this Cell was called 3 times") as told,
    ):
        assert torch.equal(loop(X, steps=steps), edited(loop, {0, 1, 2}, steps))
    assert len(told) == 1
    assert told[0].filename == __file__  # the line of the loop


def test_a_module_called_once_and_now_again(loop: PatchableGraph) -> None:
    once = PatchableGraph(loop._module, X, steps=1)
    with once.patch({"cell.output": AddPatch(1.0)}), pytest.warns(GraphPatchWarning, match="'cell': this Cell .* once"):
        assert torch.equal(once(X, steps=2), edited(loop, {0}, 2))
