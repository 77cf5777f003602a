"""What is said of the batch agrees with runs of the plain model on doubled inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components.dimensions import Extent, dimensions_of
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.values import TensorSpec, tensor_specs
from tests.hooks import registered
from tests.laws.captures import capture_of, leaves_its_state_alone, some_cases
from tests.zoo import Call, Case, seed_all
from tests.zoo.case import floats

MOST_KNOWN = 0.9


def doubled(call: Call) -> Call:
    values = [*call.args, *call.kwargs.values()]
    shapes = [value.shape if isinstance(value, Tensor) else () for value in values]
    first = next(shape for shape in shapes if shape)
    batched = [number for number, shape in enumerate(shapes) if shape and shape[0] == first[0]]
    args = [torch.cat([value, value]) if number in batched else value for number, value in enumerate(values)]
    return Call(tuple(args[: len(call.args)]), dict(zip(call.kwargs, args[len(call.args) :], strict=True)))


@contextmanager
def shapes_of_outputs(modules: list[nn.Module]) -> Iterator[dict[nn.Module, tuple[int, ...]]]:
    found: dict[nn.Module, tuple[int, ...]] = {}

    def note(module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            found[module] = tuple(output.shape)

    # Torch hooks up no functions to scripted modules.
    hooked = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    handles = [module.register_forward_hook(note) for module in hooked]
    with registered(handles):
        yield found


def is_batch_of_tensors(case: Case) -> bool:
    call = case.example()
    is_plain = all(isinstance(value, Tensor) for value in (*call.args, *call.kwargs.values()))
    return is_plain and not case.training and not case.tolerance and leaves_its_state_alone(case)


@some_cases(is_batch_of_tensors, every=3)
def test_the_batch_is_what_doubles_with_the_inputs(case: Case) -> None:
    capture = capture_of(case)
    root = captured(capture.pg).root
    known = dimensions_of(root)
    first = next(spec for node in root.inputs() for spec in tensor_specs(node.spec) if spec.shape)
    # Inputs that never meet, or whose batches torch lets differ, as those of Whisper, have groups of their own.
    inputs = [spec for node in root.inputs() for spec in tensor_specs(node.spec) if spec.shape[:1] == first.shape[:1]]
    batches = {group for spec in inputs if (group := known.group_of(spec, 0)) is not None}
    frames = [frame for frame in capture.frames_called_once() if isinstance(frame.output_node.spec, TensorSpec)]
    modules = {capture.counterpart(frame.module): frame for frame in frames}
    call = case.example()
    with torch.no_grad(), shapes_of_outputs(list(modules)) as single:
        seed_all(3)
        call.run(capture.reference)
    try:
        with torch.no_grad(), shapes_of_outputs(list(modules)) as double:
            doubled(case.example()).run(capture.reference)
    except Exception:  # it takes no other batch
        return
    both = [module for module in modules if module in single and module in double]
    unknown = 0
    for module in both:
        extents = known.extents(modules[module].output_node.spec)  # type: ignore[arg-type]
        for dim, (extent, size, twice) in enumerate(zip(extents, single[module], double[module], strict=True)):
            if extent is None or not batches:
                unknown += twice != size
                continue
            sizes = [size * 2 if group in batches else size for group, size in enumerate(known.group_sizes())]
            assert twice == size * extent.at(sizes) // extent.at(known.group_sizes()), (modules[module].path, dim)
    # Swin pads images to whole windows: the rows of windows follow no line.
    if not case.name.startswith(("awkward-", "swin-")):
        assert unknown <= (1 - MOST_KNOWN) * len(both)


class Folded(nn.Module):
    """Batch and heads in one dimension; the other dimension of the output is as long as the batch is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (3, 2)).flatten(0, 1) @ torch.ones(2, 4)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_dimension_may_hold_more_than_the_batch(batch: int) -> None:
    root = captured(PatchableGraph(Folded(), floats(batch, 6))).root
    spec = root.output_node.spec
    assert isinstance(spec, TensorSpec)
    assert spec.shape == (3 * batch, 4)
    assert dimensions_of(root).extents(spec) == (Extent((0,), 3), Extent((), 4))


def test_what_cannot_run_at_other_sizes_is_not_known() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(3, 4) + 1

    root = captured(PatchableGraph(Fixed(), floats(3, 4))).root
    assert dimensions_of(root).extents(root.output_node.spec) == (None, None)  # type: ignore[arg-type]


def test_inputs_with_one_row_have_one_batch() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * mask

    for batch in (1, 2):
        root = captured(PatchableGraph(Masked(), floats(batch, 3), floats(batch, 3))).root
        assert dimensions_of(root).groups == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]


class Block(nn.Module):
    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        self.linear, self.kind, self.number = nn.Linear(4, 4), kind, number
        linear = self.linear
        self.function = lambda x: linear(x).tanh()  # as minGPT's MLP is one

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        y = self.function(x)
        seen.append(y)
        if self.kind == "window" and self.number:
            y = y[:, : 3 * self.number].mean(1, keepdim=True) + y
        return x + y


class Layered(nn.Module):
    """Layers of one class, some of which work on windows of the sequence, or keep values elsewhere."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList(Block(kind, number) for number in range(3)), kind

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, seen)
        return torch.cat([x, *seen]) if self.kind == "elsewhere" else x


@pytest.mark.parametrize("kind", ["same", "window", "elsewhere"])
def test_layers_that_share_a_run_have_the_sizes_of_their_own(kind: str) -> None:
    model = Layered(kind)
    root = captured(PatchableGraph(model, floats(2, 3, 4))).root
    known = dimensions_of(root)
    assert known.groups == [[(0, 0)], [(0, 1)]]
    other = captured(PatchableGraph(model, floats(5, 9, 4))).root
    for frame, again in zip(root.walk(), other.walk(), strict=True):
        for one, now in zip(captured_tensors_of(frame), captured_tensors_of(again), strict=True):
            extents = known.extents(one)
            assert all(each is None or each.at([5, 9]) == size for each, size in zip(extents, now.shape, strict=True))
            assert kind == "window" or None not in extents


def captured_tensors_of(frame: Frame) -> list[TensorSpec]:
    return [spec for node in frame.nodes if node.kind != "constant" for spec in tensor_specs(node.spec)]
