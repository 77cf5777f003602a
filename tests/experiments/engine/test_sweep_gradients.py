"""`backward=True`: what accumulates in values of patches and in weights is what a loop would leave there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, PatchableGraph, ReplacePatch, ZeroPatch
from tests.experiments.engine.awkward_prefixes import ALIASED, STATEFUL, UNREPEATABLE, InputWrittenInto
from tests.experiments.engine.awkward_rows import ELSEWHERE, INTERACTING, TrainedNorm
from tests.experiments.engine.loops import TOLERANCE, disagreement, looped, swept
from tests.laws.captures import capture_of, some_cases
from tests.zoo import Call, Case, seed_all
from tests.zoo.case import seeded
from tests.zoo.values import copy_call, scalar_loss

pytestmark = [
    pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning"),
]


def loss(output: Any) -> Tensor:
    """The sum of what is in the output; where nothing of it has a gradient, something that has one of zero."""
    found = scalar_loss(output)
    return torch.zeros((), requires_grad=True) * 1 if found is None else found


class Steering:
    """Cells that share a learnt value at each of some nodes: at all positions, in slices, together with others."""

    def __init__(self, pg: PatchableGraph, paths: list[str]) -> None:
        shapes = {path: pg.nodes[path].shape for path in paths}
        self.values = {path: torch.full(shape[-1:], 0.25, requires_grad=True) for path, shape in shapes.items()}
        self.maps: list[dict[str, Any]] = []
        for path, value in self.values.items():
            self.maps.append({path: AddPatch(value=value)})
            if len(shapes[path]) > 1:
                self.maps.append({path: AddPatch(value=value, slice=(slice(None), -1))})
                self.maps.append({path: ReplacePatch(value=value * 2, slice=0)})
            self.maps.append({path: [ZeroPatch(slice=(..., 0)), AddPatch(value=value)]})
        # A graph that two cells share is gone after the first backward: each cell has one of its own, but for this.
        self.maps = [patches for patches in self.maps if _is_leaf_value(patches)]
        self.maps.append({path: AddPatch(value=value) for path, value in self.values.items()})

    def gradients(self, model: nn.Module) -> list[Tensor | None]:
        leaves = [*self.values.values(), *model.parameters()]
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found


def _is_leaf_value(patches: dict[str, Any]) -> bool:
    return all(not isinstance(p, ReplacePatch) or p.value.is_leaf for p in patches.values())


def difference(expected: list[Tensor | None], found: list[Tensor | None]) -> str | None:
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one is None and other is None:
            continue
        # In rows, what one cell does not reach gets a gradient of zero from the others.
        zero = torch.zeros_like(other if one is None else one)
        pair = (zero if tensor is None else tensor for tensor in (one, other))
        a, b = ((tensor.to_dense() if tensor.is_sparse else tensor).double() for tensor in pair)
        scale = max(1.0, a.nan_to_num(0, 0, 0).abs().max().item()) if a.numel() else 1.0
        if not torch.allclose(a, b, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
            return f"gradient {number}: {(a - b).abs().max().item():.3g} of {scale:.3g}"
    return None


def compare(
    capture: Callable[[], tuple[PatchableGraph, nn.Module]],
    call: Callable[[], Call],
    batch: Any,
    count: int,
    metric: Callable[[Any], Tensor] = loss,
) -> None:
    unpatched, _ = capture()
    pg, model = capture()
    model.zero_grad()  # the model of a case of the zoo is shared with other tests
    steering = Steering(pg, paths_of(pg, count))
    seed_all(3)
    expected = looped(pg, steering.maps, call, metric, backward=True, unpatched=unpatched)
    gradients = steering.gradients(model)
    if all(expected.errors):
        return
    pg, model = capture()
    steering = Steering(pg, paths_of(pg, count))
    seed_all(3)
    found = swept(pg, steering.maps, call(), metric, batch=batch, backward=True)
    assert disagreement(expected, found, TOLERANCE) is None, found.remarks
    assert difference(gradients, steering.gradients(model)) is None, found.remarks


def paths_of(pg: PatchableGraph, count: int) -> list[str]:
    paths = [
        path
        for path, meta in pg.nodes.items()
        if meta.kind in ("op", "output", "input") and meta.shape and meta.dtype == torch.float32
        and not meta.is_size and not meta.is_mutated_later and meta.frame_path
    ]  # fmt: skip
    return paths[:: max(1, len(paths) // count)][:count]


def has_gradients(case: Case) -> bool:
    return case.grad and not case.mutates_state and not case.tolerance and "bfloat16" not in case.name


@some_cases(has_gradients, every=3)
def test_gradients_over_the_zoo(case: Case) -> None:
    capture = capture_of(case)
    compare(lambda: (capture.pg, capture.model), case.example, "auto", 2)


MODELS = [*INTERACTING, *ELSEWHERE, *STATEFUL, *ALIASED]
MODELS = [(kind, call) for kind, call in MODELS if kind not in (InputWrittenInto, *UNREPEATABLE)]


@pytest.mark.parametrize("batch", [pytest.param(None, marks=pytest.mark.exhaustive), "auto"])
@pytest.mark.parametrize(
    ("kind", "call"), MODELS, ids=[f"{kind.__name__}-{number}" for number, (kind, call) in enumerate(MODELS)]
)
def test_gradients_of_awkward_models(kind: type[nn.Module], call: Call, batch: Any) -> None:
    def capture() -> tuple[PatchableGraph, nn.Module]:
        model = seeded(kind, training=kind is TrainedNorm)
        example = copy_call(call)
        seed_all(2)
        return PatchableGraph(model, *example.args, **example.kwargs), model

    compare(capture, lambda: copy_call(call), batch, 3)


def test_gradients_add_to_those_that_are_there() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    x = torch.ones(2, 3)
    pg = PatchableGraph(model, x)
    value = torch.zeros(3, requires_grad=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    swept(pg, [{"sub_0.output": AddPatch(value=value)}] * 3, Call.of(x), torch.sum, backward=True)
    expected = model[1].weight.detach().sum(0) * 2 * 3
    assert torch.allclose(value.grad, expected, atol=1e-5)
    assert torch.equal(model[1].bias.grad, torch.full((2,), 1.0 + 2 * 3))


def test_sweeps_without_backward_leave_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    x = torch.ones(2, 3, requires_grad=True)
    pg = PatchableGraph(model, x)
    value = torch.zeros(3, requires_grad=True)
    seen: list[bool] = []

    def metric(output: Tensor) -> Tensor:
        seen.append(output.requires_grad)
        return output.sum()

    swept(pg, [{"sub_0.output": AddPatch(value=value)}] * 3, Call.of(x), metric)
    assert not any(seen)
    assert value.grad is None
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_reach_the_inputs_of_the_user_as_in_a_loop() -> None:
    """A sweep runs on copies of its inputs: gradients belong to the values of patches and to the weights."""
    model = nn.Linear(3, 2)
    x = torch.ones(2, 3, requires_grad=True)
    pg = PatchableGraph(model, x)
    swept(pg, [{"linear": AddPatch(value=1.0)}] * 2, Call.of(x), torch.sum, backward=True)
    assert x.grad is None
    assert model.weight.grad is not None
