"""Models whose submodules are declared with their class, and models that are a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

Maker: TypeAlias = "tuple[int, int] | list[Maker] | Callable[[], nn.Module | Tensor]"


def made(maker: Maker) -> Any:
    """Returns a linear map for two sizes, a `Sequential` for a list, and else what the maker returns."""
    if isinstance(maker, list):
        return nn.Sequential(*map(made, maker))
    return nn.Linear(*maker) if isinstance(maker, tuple) else maker()


def copies(maker: Maker, count: int) -> Callable[[], nn.Module]:
    """Makes a `ModuleList` of as many submodules."""
    return lambda: nn.ModuleList(made(maker) for _ in range(count))


class Submodules(nn.Module):
    """Has the submodules that a class declares by name: `class Mlp(Submodules, up=(4, 8), act=nn.GELU, down=(8, 4))`.

    Two sizes are those of a linear map, a list is a `Sequential`; anything else is called and returns the submodule, or
    a parameter, or a tensor that becomes a buffer. With `seed`, the weights are the same each time.
    """

    _makers: ClassVar[dict[str, Maker]] = {}
    _seed: ClassVar[int | None] = None

    def __init_subclass__(cls, seed: int | None = None, **submodules: Maker) -> None:
        super().__init_subclass__()
        cls._makers, cls._seed = {**cls._makers, **submodules}, cls._seed if seed is None else seed

    def __init__(self) -> None:
        super().__init__()
        if self._seed is not None:
            torch.manual_seed(self._seed)
        for name, make in self._makers.items():
            value = made(make)
            if type(value) is Tensor:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)


class Runs(nn.Module):
    """A model whose forward is a function of its input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)
