"""Modules whose `forward` writes attributes: what one run leaves is what the next one finds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .case import Call, Case, floats, simple_case
from .submodules import Submodules


class _Settings:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class LowersItsWindow(nn.Module):
    """As Swin does, it lowers an attribute for small inputs, and then fits no other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.window, self.shift = 4, 2
        self.table = nn.Parameter(torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] <= self.window:
            self.shift, self.window = 0, x.shape[1]
        windows = self.linear(x).reshape(x.shape[0], -1, self.window, 6).roll(self.shift, 2)
        return (windows + self.table).reshape(x.shape)


class KeepsAList(nn.Module):
    """It appends to lists: of numbers and shapes, and to one inside of a dict, which is there after the first run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norms: list[float] = []
        self.seen: dict[str, list[tuple[int, ...]]] = {}

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.norms.append(out.norm().item())
        self.seen.setdefault("shapes", []).append((x.shape[0], x.shape[1]))
        return out + len(self.norms)


class FillsACache(nn.Module):
    """A cache by length, the most recently used last, and a plain object that holds tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.tables: OrderedDict[int, Tensor] = OrderedDict()
        self.memory = _Settings(last=None, total=torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        self.tables[length] = torch.arange(length, dtype=x.dtype)[:, None] / 10
        self.tables.move_to_end(length)
        out = self.linear(x) + self.tables[length]
        self.memory.last = out.detach()
        self.memory.total += out.detach().mean((0, 1))
        return out + self.memory.total


class ChangesItsConfig(nn.Module):
    """A config that parent and child share, and that a run writes sizes into."""

    def __init__(self) -> None:
        super().__init__()
        self.config = _Settings(length=0, lengths={"longest": 0}, runs=[0])
        self.child = _Configured(self.config)

    def forward(self, x: Tensor) -> Tensor:
        self.config.length = x.shape[1]
        self.config.lengths["longest"] = max(self.config.lengths["longest"], x.shape[1])
        return self.child(x) * self.config.length


class _Configured(nn.Module):
    def __init__(self, config: _Settings) -> None:
        super().__init__()
        self.config, self.linear = config, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.config.runs[0] += 1
        return self.linear(x) + self.config.runs[0]


@dataclass
class _Refusing:
    """As configs of transformers whose layers differ: what is not the same for all of them cannot be read."""

    width: int
    scale: Tensor

    def __getattribute__(self, name: str) -> Any:
        if name == "width":
            raise RuntimeError("width may vary across layers")
        return super().__getattribute__(name)


class RefusingConfig(Submodules, config=lambda: _Refusing(6, torch.arange(6.0)), linear=(6, 6)):
    """A config with a field that cannot be read, and a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.config.scale


def _example() -> Call:
    return Call.of(floats(2, 8, 6))


def _longer() -> Call:
    return Call.of(floats(3, 16, 6))


AWKWARD_STATE: list[Case] = [
    simple_case("awkward-window", LowersItsWindow, _example, {"longer": _longer}),
    simple_case("awkward-refusing-config", RefusingConfig, _example, {"longer": _longer}),
    *[
        simple_case(name, build, _example, {"longer": _longer}, mutates_state=True)
        for name, build in {
            "awkward-list": KeepsAList,
            "awkward-cache-attribute": FillsACache,
            "awkward-config": ChangesItsConfig,
        }.items()
    ],
]
