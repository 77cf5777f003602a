"""Containers that a module holds, of classes that have methods of their own."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, PatchableGraph
from tests.zoo.case import floats, seeded
from tests.zoo.submodules import Submodules


def without_length(base: Any) -> Any:
    """Returns a class of containers that refuses what it gives another meaning, as e3nn's `Irreps` does."""

    def refuse(self: Any) -> int:
        raise NotImplementedError

    return type("Irreps", (base,), {"__len__": refuse})


def refusing(base: Any, but: Sequence[str] = ()) -> Any:
    """Returns a class of containers that refuses whatever it is asked, but by the methods of its base class."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    asked = "len iter getitem eq hash bool repr contains copy deepcopy reduce_ex reversed".split()
    methods = [*(f"__{name}__" for name in asked if name not in but), "items", "keys", "values", "get", "index"]
    return type("Refusing", (base,), dict.fromkeys(methods, refuse))


def refusing_but_sized(base: Any) -> Any:
    return refusing(base, ["len"])


@pytest.mark.parametrize("base", [tuple, list, dict, set, deque, OrderedDict])
@pytest.mark.parametrize("make_class", [without_length, refusing, refusing_but_sized])
def test_containers_that_refuse_to_be_read_go_through_models(base: Any, make_class: Any) -> None:
    """Held, given to a module and returned by one: the run and the patches in the module are those of the model."""
    is_dict = issubclass(base, dict)
    kept = make_class(base)({"a": 1} if is_dict else [1])

    class Inner(Submodules, linear=(2, 2)):
        def forward(self, x: Tensor, given: Any) -> tuple[Tensor, Any]:
            assert given is kept
            return self.linear(x) * 2, given

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.inner = kept, Inner()

        def forward(self, x: Tensor) -> tuple[Tensor, Any]:
            y, given = self.inner(x, self.kept)
            return y + 1, given

    model, x = seeded(Outer), floats(1, 2)
    pg = PatchableGraph(model, x)
    for path, more in ("inner.linear.output", 2.0), ("inner.mul", 1.0), ("inner.output|sub_0", 1.0):
        with pg.patch({path: AddPatch(value=1.0)}):
            value, given = pg(x)
        assert torch.equal(value, (model.inner.linear(x) + (more == 2)) * 2 + (more == 1) + 1)
        assert given is kept


@pytest.mark.parametrize("base", [tuple, list, dict])
def test_modules_in_containers_that_refuse_to_be_read_have_names(base: Any) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            linear = nn.Linear(2, 2)
            self.kept = refusing(base)({"a": linear} if base is dict else [linear])

        def forward(self, x: Tensor) -> Tensor:
            return base.__getitem__(self.kept, "a" if base is dict else 0)(x) + 1

    model, x = seeded(Holds), floats(1, 2)
    pg, path = PatchableGraph(model, x), "kept_a.output" if base is dict else "kept_0.output"
    with pg.patch({path: AddPatch(value=1.0)}):
        assert torch.equal(pg(x), model(x) + 1)
