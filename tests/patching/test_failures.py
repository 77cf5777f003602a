"""Errors inside patched runs name the node, its operation, the shapes, the user's line, and what was patched before."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpatch_notebook
from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    Patch,
    PatchableGraph,
    PatchValueError,
    ZeroPatch,
)
from tests.zoo.submodules import Submodules

X = torch.ones(2, 3)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2, grads[0]


def join(x: Tensor, y: Tensor) -> Tensor:
    return x + y


class Inner(Submodules, linear=(3, 3)):
    def forward(self, x: Tensor, limit: int = 9) -> Tensor:
        hidden = torch.relu(x)
        if hidden.dim() > limit:
            raise ValueError("too deep")
        return self.linear(hidden) + 1


class Outer(Submodules, inner=Inner, cell=(3, 3)):
    """Every place where something can go wrong, below a value (`start`) that a patch can break."""

    def forward(self, x: Tensor, way: str = "all", other: Tensor = X) -> Tensor:
        start = x * 1
        if way == "uncaptured":
            return start.matmul(other).view(-1)
        if way == "user":
            return self.inner(start, limit=0)
        if way in ("direct", "all"):
            start = self.inner.forward(start)
        if way in ("inner", "all"):
            start = self.inner(start)
        if way in ("loop", "all"):
            for _ in range(3):
                start = self.cell(start)
        if way in ("apply", "all"):
            start = Double.apply(start, other)
        return join(start, other)


BROKEN = torch.ones(4, 5)


def breaks(value: Tensor) -> Tensor:
    return BROKEN


@pytest.fixture
def pg() -> PatchableGraph:
    return PatchableGraph(Outer(), X)


def failure(run: Callable[[], Any], kind: type[BaseException] = RuntimeError) -> str:
    """The one note on the error that `run` ends in."""
    with pytest.raises(kind) as caught:
        run()
    (note,) = caught.value.__notes__
    assert note.startswith("graphpatch: raised by ")
    return str(note)


def run_broken(pg: PatchableGraph, patches: Any, *args: Any, kind: type[BaseException] = RuntimeError) -> str:
    with pg.patch(patches):
        return failure(lambda: pg(*args), kind)


BREAK_OP = {"start": CustomPatch(breaks, any_shape=True)}
BREAK_INPUT = {"x": CustomPatch(breaks, any_shape=True)}


def test_under_the_mode_the_arguments_are_known(pg: PatchableGraph) -> None:
    lines = run_broken(pg, BREAK_OP, X, "join").splitlines()
    assert lines[0] == "graphpatch: raised by 'add' (add)"
    assert lines[1].endswith(", in join")
    assert lines[2:] == [
        "    return x + y",
        "  arguments: Tensor(4, 5), Tensor(2, 3)",
        "  patched before: 'start' (CustomPatch)",
    ]


@pytest.mark.parametrize("patches", [BREAK_OP, BREAK_INPUT], ids=["mode", "boundary"])
@pytest.mark.parametrize(
    ("way", "node"),
    [
        ("inner", "'inner_0.linear.linear' or 'inner_1.linear.linear' (linear)"),
        ("direct", "'inner_0.linear.linear' or 'inner_1.linear.linear' (linear)"),
        ("loop", "'cell_0.linear' or 'cell_1.linear' or 'cell_2.linear' (linear)"),  # a call that nobody watches
        ("uncaptured", "code of 'the model' (Outer)"),
    ],
)
def test_the_node_is_found_in_frames_without_patches(pg: PatchableGraph, patches: Any, way: str, node: str) -> None:
    note = run_broken(pg, patches, X, way)
    assert note.splitlines()[0] == f"graphpatch: raised by {node}"
    assert note.endswith(f"patched before: {next(iter(patches))!r} (CustomPatch)")


def test_errors_of_the_users_own(pg: PatchableGraph) -> None:
    with pg.patch({"start": ZeroPatch()}), pytest.raises(ValueError, match="too deep") as caught:
        pg(X, "user")
    assert "code of 'inner_0', 'inner_1' (Inner)" in caught.value.__notes__[0]
    assert 'raise ValueError("too deep")' in caught.value.__notes__[0]


def test_errors_of_patches_name_the_value() -> None:
    pg = PatchableGraph(Inner(), X)
    note = run_broken(pg, {"hidden": CustomPatch(lambda value: value @ value)}, X)
    assert note == (
        "graphpatch: raised by CustomPatch on 'hidden' (relu): the value here is of shape (2, 3) (float32, cpu)"
    )
    with pg.patch({"hidden": CustomPatch(lambda value: value[..., :2], any_shape=True)}):
        assert "raised by 'linear.linear' (linear)" in failure(lambda: pg(X))
    with pg.patch({"hidden": ZeroPatch(slice=(7,))}), pytest.raises(PatchValueError, match="'hidden'") as caught:
        pg(X)
    assert not hasattr(caught.value, "__notes__")


class Forgetful(Patch[Tensor]):
    def op(self, original_output: Tensor) -> Tensor:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize("patch", [CustomPatch(lambda value: None), Forgetful()])
def test_a_function_that_returns_nothing(patch: Patch[Tensor]) -> None:
    """As hooks of torch may, which then keep the value."""
    pg = PatchableGraph(Inner(), X)
    for path in ("hidden", "linear.output", "output"):
        message = rf"'{path}': {type(patch).__name__} returned None for a value of shape .* return statement missing"
        with pytest.raises(PatchValueError, match=message), pg.patch({path: patch}):
            pg(X)
    meant = CustomPatch(lambda value: None, any_shape=True)
    with pg.patch({"output": meant}):
        assert pg(X) is None


@pytest.mark.parametrize("path", ["sub_0.linear", "sub_0.output", "output", "input", "sub_1.input", "sub_0.weight"])
def test_frames_of_the_engine_are_hidden_from_tracebacks(path: str) -> None:
    """What stands between the user's code and the model's says nothing to a user, and most would be of it."""
    pg = PatchableGraph(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(1, 2))
    patches = {
        "sub_0.linear": AddPatch(value=1.0, slice=(0, 7), any_shape=True),
        "sub_1.output": ZeroPatch(),
        "sub_0.bias": ZeroPatch(),
    }
    with pg.patch(patches), pytest.raises(PatchValueError) as caught:
        pg(torch.ones(1, 2))
    own = str(Path(graphpatch_notebook.__file__).parent)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    ours = [frame for frame in frames if frame.f_code.co_filename.startswith(own)]
    assert len(ours) > 3
    assert [f.f_code.co_name for f in ours if not f.f_locals.get("__tracebackhide__")] == []


class Scaled(Submodules, scale=lambda: nn.Parameter(torch.ones(3))):
    """Operators between tensors of one class, and of two, where Python tries both operands' operators."""

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        return scaled + x


@pytest.mark.parametrize("path", ["scaled", "add"])
@pytest.mark.parametrize("times", [1, 9])
def test_a_type_error_of_a_patch_on_an_operator_is_raised(path: str, times: int) -> None:
    """Torch takes it for an unknown operand: the model went on by the reflected operator, without the patch."""
    left, cause = [None] * times, KeyError("cause")

    def failing(value: Tensor) -> Tensor:
        if left:
            left.pop()
            raise TypeError("of the user's") from cause
        return value

    pg = PatchableGraph(Scaled(), X)
    with pytest.raises(TypeError, match="of the user's") as caught, pg.patch({path: CustomPatch(failing)}):
        pg(X)
    assert caught.value.__cause__ is cause
    assert path in "".join(caught.value.__notes__)
