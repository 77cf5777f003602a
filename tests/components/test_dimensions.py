"""What is said of the batch agrees with runs of the plain model on doubled inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ZeroPatch
from graphpatch_notebook.components.dimensions import NoBatchError, batch_inputs, dimensions_of
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.values import TensorSpec
from tests.hooks import registered
from tests.laws.captures import capture_of, leaves_its_state_alone, some_cases
from tests.zoo import Call, Case, seed_all
from tests.zoo.case import floats

MOST_KNOWN = 0.9


def doubled(call: Call) -> Call:
    values = [*call.args, *call.kwargs.values()]
    batched = batch_inputs([value.shape if isinstance(value, Tensor) else () for value in values])
    args = [torch.cat([value, value]) if number in batched else value for number, value in enumerate(values)]
    return Call(tuple(args[: len(call.args)]), dict(zip(call.kwargs, args[len(call.args) :], strict=True)))


@contextmanager
def shapes_of_outputs(modules: list[nn.Module]) -> Iterator[dict[nn.Module, tuple[int, ...]]]:
    found: dict[nn.Module, tuple[int, ...]] = {}

    def note(module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            found[module] = tuple(output.shape)

    handles = [module.register_forward_hook(note) for module in modules]
    with registered(handles):
        yield found


def is_batch_of_tensors(case: Case) -> bool:
    call = case.example()
    is_plain = all(isinstance(value, Tensor) for value in (*call.args, *call.kwargs.values()))
    return is_plain and not case.training and not case.tolerance and leaves_its_state_alone(case)


@some_cases(is_batch_of_tensors, every=3)
def test_the_batch_is_what_doubles_with_the_inputs(case: Case) -> None:
    capture = capture_of(case)
    known = dimensions_of(captured(capture.pg).root)
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
        growing = [dim for dim, (a, b) in enumerate(zip(single[module], double[module], strict=True)) if a != b]
        is_twice = len(growing) == 1 and double[module][growing[0]] == 2 * single[module][growing[0]]
        try:
            dim = known.batch_dim(modules[module].output_node.spec)
        except NoBatchError:
            unknown += is_twice or not growing
        else:
            assert [dim] * (dim is not None) == growing, modules[module].path
            assert is_twice or dim is None, modules[module].path
    if "awkward" not in case.name:
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
    assert dimensions_of(root).batch_dim(spec) == 0


def test_a_model_for_one_batch_has_none_that_is_known() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(3, 4) + 1

    root = captured(PatchableGraph(Fixed(), floats(3, 4))).root
    with pytest.raises(NoBatchError, match="it is not known which dimension"):
        dimensions_of(root).batch_dim(root.output_node.spec)  # type: ignore[arg-type]


def test_a_batch_of_two_is_not_one_that_is_broadcast() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * mask

    x, mask = torch.ones(2, 3), torch.ones(2, 3)
    pg = PatchableGraph(Masked(), x, mask)
    with pg.patch({"mul": ZeroPatch()}):
        assert pg(torch.ones(5, 3), torch.ones(5, 3)).shape == (5, 3)
