"""Models that make it hard to skip what ran before the first patched node: state, aliases, and odd values of frames."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import Call
from tests.zoo.case import floats

ROWS = Call.of(floats(3, 4))
ONE = Call.of(floats(1, 4))
SEQUENCES = Call.of(floats(3, 5, 4))


class Layers(nn.Module):
    """A linear map, what a subclass does in between, two more."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x).tanh()))


# -- state -------------------------------------------------------------------------------------------------------------


class Counter(Layers):
    """Counts its runs, and adds the count."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Any:
        self.runs += 1
        return super().forward(x) + self.runs


class CountingBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return self.linear(x - self.mean)


class MovingMean(Layers):
    """A buffer is written in each run, and read."""

    def __init__(self) -> None:
        super().__init__()
        self.b = CountingBuffer()


SEEN: list[Tensor] = []


class CacheObject:
    """Grows by what a run adds."""

    def __init__(self, *values: Tensor) -> None:
        self.values = list(values)

    def update(self, value: Tensor) -> Tensor:
        self.values.append(value)
        return torch.stack(self.values).sum(0)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: CacheObject | None) -> Tensor:
        h = self.linear(x)
        return h if cache is None else cache.update(h)


class GrowingCache(Layers):
    """Each layer adds to a cache that the caller gives, and that comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Caching(), Caching(), Caching()

    def forward(self, x: Tensor, cache: CacheObject) -> Any:
        h = self.c(self.b(self.a(x, cache), cache).tanh(), cache)
        return {"h": h, "cache": cache, "first": cache.values[0]}


class OwnCache(GrowingCache):
    """The cache is made in the run, and comes out."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x, CacheObject())


class Draws(Layers):
    """Draws random numbers in eval mode: torch's, Python's."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x) + torch.rand(4)
        return self.c(F.dropout(self.b(h), 0.3, training=True)) + random.random()


# -- values ------------------------------------------------------------------------------------------------------------


class Pass(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class PassedThrough(Layers):
    """What goes into a part comes out of it, and is written into then."""

    def __init__(self) -> None:
        super().__init__()
        self.same = Pass()

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        same = self.same(h)
        same += 1
        after = self.b(h)
        self.same(after).mul_(0.5)
        return self.c(after) + h, same


class WrittenLater(Layers):
    """What a part gave is written into after others have used it."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        middle = self.b(h)
        h.mul_(2)
        middle[..., 0] = 0.5
        end = self.c(middle + h)
        h.zero_()
        return end, middle, h


class Writer(nn.Module):
    def forward(self, x: Tensor) -> None:
        x.add_(x.sum())


class InPlaceParts(nn.Module):
    """Parts that write into what they get: the residual of the one before is changed by it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.parts = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardtanh(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.parts(h) + h


class InputWrittenInto(Layers):
    """Writes into what the caller gave."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        x += 1
        return self.c(self.b(x)) + h


class SameTwice(Layers):
    """The same tensor comes out twice, and a view of it."""

    def forward(self, x: Tensor) -> Any:
        h = self.c(self.b(self.a(x)))
        return h, h, h[..., :2]


class Repeated(nn.Module):
    """One part is called in a loop, and shares its weight with another."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.block[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.block(x)
        return self.tied(self.block(x))


class CallsItself(nn.Module):
    """A part calls the method of another, and a third is reached only through a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.hidden = [nn.Linear(4, 4)]
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.hidden[0].forward(self.a.forward(x)).tanh()) + self.a(x)


class OutOfOrder(nn.Module):
    """Two branches, of which the one that was written down last runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(4, 4)
        self.late = nn.Linear(4, 4)
        self.join = nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        late = self.late(x)
        early = self.early(x.flip(-1))
        return self.join(early, late)


class BranchOnPatched(Layers):
    """What runs after it depends on a value that may be patched: modules that the recorded run never came to."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        if h.mean() > 0.3:
            return self.b(h)
        return self.c(h) if h.min() < -1 else self.c(self.b(h))


STATEFUL = [
    (Counter, ROWS),
    (MovingMean, ROWS),
    (GrowingCache, Call.of(floats(3, 4), CacheObject(floats(3, 4, seed=1)))),
    (GrowingCache, Call.of(floats(1, 4), CacheObject())),
    (OwnCache, ROWS),
    (OwnCache, ONE),
    (Draws, ROWS),
    (Draws, ONE),
]
"""Models of which a run leaves something behind, or that look at more than their inputs, with inputs."""

ALIASED = [
    (PassedThrough, ROWS),
    (PassedThrough, ONE),
    (WrittenLater, ROWS),
    (WrittenLater, ONE),
    (InPlaceParts, ROWS),
    (InPlaceParts, ONE),
    (InputWrittenInto, ROWS),
    (InputWrittenInto, ONE),
    (SameTwice, ROWS),
    (Repeated, ROWS),
    (Repeated, ONE),
    (CallsItself, ROWS),
    (OutOfOrder, ROWS),
    (BranchOnPatched, ROWS),
    (BranchOnPatched, ONE),
    (Layers, ROWS),
    (Layers, ONE),
    (Layers, SEQUENCES),
]
"""Models whose values share memory, are used up, or depend on what is patched, with inputs."""

UNREPEATABLE = [Counter]
"""What the runs that prepare a sweep leave in these models cannot be taken back, and makes a difference."""
