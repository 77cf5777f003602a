"""Interventions with parameters: modules that compute a new value from the value of a run, and those of other runs.

Vectors are along the last dimension. Parameters may have another dtype than the value: results have that of the value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

_STRETCH = (-0.1, 1.1)
"""The ends of the interval that the hard concrete distribution is cut from."""
_SHARPNESS = 2 / 3
_OPEN = 3.0
"""The logit of gates before training: without noise they are 1."""


class Intervention(nn.Module):
    """Base class of interventions that are trained by `fit`.

    Define `forward(base, *sources)`, which takes the value of the run, and the same value of each source run, and
    returns a new value of the shape of `base`. Any `nn.Module` with such a `forward` will do; this class adds what
    `fit` sets and asks for.

    Attributes:
        progress: How much of the training is done, a buffer: from 0 to 1, set by `fit`.

    Example:
        >>> class Scale(Intervention):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.factor = nn.Parameter(torch.ones(()))
        ...     def forward(self, base):
        ...         return self.factor * base
        ...     def penalty(self):
        ...         return 0.1 * self.factor.abs()
        >>> Scale()(torch.ones(2)).tolist(), round(Scale().penalty().item(), 3)
        ([1.0, 1.0], 0.1)
    """

    progress: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("progress", torch.zeros(()))

    def penalty(self) -> Tensor:
        """Returns what `fit` adds to the loss, a scalar."""
        return torch.zeros(())


def _rotation(size: int, dimensions: int) -> nn.Linear:
    """Returns a linear map whose weight has orthonormal rows, always."""
    if not 0 < dimensions <= size:
        raise ValueError(f"a value with {size} channels has 1 to {size} rotated dimensions, not {dimensions}")
    rotation = nn.Linear(size, dimensions, bias=False)
    orthogonal(rotation)
    return rotation


def _checked(module: Intervention, size: int, base: Tensor, sources: Sequence[Tensor], count: int) -> list[Tensor]:
    """Returns the value and those of the sources in the dtype of the parameters, if they are what the module takes."""
    what = type(module).__name__
    if len(sources) != count:
        raise ValueError(f"this {what} takes {count} source(s), not {len(sources)}: intervene(pg, ..., base, *sources)")
    if base.shape[-1:] != (size,):
        raise ValueError(f"this {what} is for {size} channels, and the value has the shape {tuple(base.shape)}")
    dtype = next(module.parameters()).dtype
    return [value.to(dtype) for value in (base, *sources)]


class DAS(Intervention):
    """Distributed alignment search: takes some dimensions of a value, after a learned rotation, from source runs.

    Args:
        size: The number of channels of the value.
        dimensions: How many rotated dimensions come from the source; for several sources, a number for each, 0 for
            none. Sources have dimensions of their own, orthogonal to those of the others.

    Raises:
        ValueError: There are more dimensions than channels, or none.

    Example:
        >>> das = DAS(4, dimensions=4)
        >>> base, source = torch.zeros(2, 4), torch.ones(2, 4)
        >>> torch.allclose(das(base, source), source, atol=1e-5)
        True

    Source:
        Geiger et al., "Finding alignments between interpretable causal variables and distributed neural
        representations" (2023).
    """

    def __init__(self, size: int, dimensions: int | Sequence[int]) -> None:
        super().__init__()
        self.size = size
        self.dimensions = (dimensions,) if isinstance(dimensions, int) else tuple(dimensions)
        self.rotation = _rotation(size, sum(self.dimensions))

    def forward(self, base: Tensor, *sources: Tensor) -> Tensor:
        start, *others = _checked(self, self.size, base, sources, len(self.dimensions))
        axes = self.rotation.weight
        changes = (
            (other - start) @ own.T @ own for other, own in zip(others, axes.split(self.dimensions), strict=True)
        )
        return sum(changes, start).to(base.dtype)


class BoundlessDAS(Intervention):
    """DAS that learns how many dimensions to take: those before a boundary, which is soft at first.

    The rotation is of all dimensions. The temperature of the boundaries falls with the progress of the training, and
    the penalty is the share of the dimensions that are taken.

    Args:
        size: The number of channels of the value.
        sources: The number of source runs. Each has the dimensions between two boundaries.
        temperature: The temperature at the start and at the end, in dimensions; `None` for (size / 8, 0.1). The paper
            has (50, 0.1) for 4,096 dimensions.
        penalty: The factor of the penalty.

    Example:
        >>> boundless = BoundlessDAS(8, temperature=(1.0, 0.01))
        >>> boundless.progress.fill_(1.0)
        tensor(1.)
        >>> boundless.shares.tolist(), boundless.masks().round().tolist()
        ([0.5], [[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])

    Source:
        Wu et al., "Interpretability at scale: identifying causal mechanisms in Alpaca" (2023).
    """

    def __init__(
        self, size: int, sources: int = 1, *, temperature: tuple[float, float] | None = None, penalty: float = 0.1
    ) -> None:
        super().__init__()
        self.size, self.temperature, self.weight = size, temperature or (size / 8, 0.1), penalty
        self.rotation = _rotation(size, size)
        self.widths = nn.Parameter(torch.full((sources,), 1 / (sources + 1)))

    @property
    def shares(self) -> Tensor:
        """The share of the dimensions that each source has, of shape (sources)."""
        return self.widths.clamp(0, 1)

    def masks(self) -> Tensor:
        """Returns how much of each rotated dimension comes from each source, from 0 to 1, of shape (sources, size)."""
        start, end = self.temperature
        ends = self.size * self.shares.cumsum(0)[:, None] - torch.arange(self.size, device=self.widths.device) - 0.5
        before = torch.sigmoid(ends / (start + (end - start) * self.progress))
        return before.diff(dim=0, prepend=torch.zeros_like(before[:1]))

    def penalty(self) -> Tensor:
        return self.weight * self.shares.sum()

    def forward(self, base: Tensor, *sources: Tensor) -> Tensor:
        start, *others = _checked(self, self.size, base, sources, len(self.widths))
        axes = self.rotation.weight
        changes = (((other - start) @ axes.T * mask) @ axes for other, mask in zip(others, self.masks(), strict=True))
        return sum(changes, start).to(base.dtype)


class LoReFT(Intervention):
    """Low-rank linear subspace finetuning: edits a value in a learned subspace, `h + R.T (W h + b - R h)`.

    Sources are not used.

    Args:
        size: The number of channels of the value.
        rank: The number of dimensions of the subspace.

    Raises:
        ValueError: There are more dimensions than channels, or none.

    Example:
        >>> LoReFT(8, rank=2)(torch.ones(1, 3, 8)).shape
        torch.Size([1, 3, 8])

    Source:
        Wu et al., "ReFT: representation finetuning for language models" (2024).
    """

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.size = size
        self.rotation, self.target = _rotation(size, rank), nn.Linear(size, rank)

    def forward(self, base: Tensor, *_: Tensor) -> Tensor:
        (start,) = _checked(self, self.size, base, (), 0)
        axes = self.rotation.weight
        target: Tensor = self.target(start)
        return (start + (target - start @ axes.T) @ axes).to(base.dtype)


class LowRankSteering(Intervention):
    """Adds a learned function of low rank to a value, `h + U (V h + b)`, which is nothing before training.

    Sources are not used. To train a single vector, make it a parameter: `AddPatch(value=vector)`.

    Args:
        size: The number of channels of the value.
        rank: The rank.

    Example:
        >>> LowRankSteering(8, rank=2)(torch.ones(1, 8)).tolist()
        [[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]

    Source:
        DiReFT, in Wu et al., "ReFT: representation finetuning for language models" (2024).
    """

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.size = size
        self.down, self.up = nn.Linear(size, rank), nn.Linear(rank, size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, base: Tensor, *_: Tensor) -> Tensor:
        (start,) = _checked(self, self.size, base, (), 0)
        added: Tensor = self.up(self.down(start))
        return (start + added).to(base.dtype)


class L0Mask(Intervention):
    """A mask with few open gates: a value where gates are open, and the source, or zero, where they are closed.

    In training, gates are drawn from the hard concrete distribution; in eval mode they are fixed. The penalty is the
    expected number of open gates.

    Args:
        *shape: The shape of the gates, which the last dimensions of the value have, such as the channels. By default,
            one gate for all of the value: give each head, or each part that writes to the stream, its own mask.
        penalty: The factor of the penalty.

    Example:
        >>> mask = L0Mask(3).eval()
        >>> mask.gates.shape, mask(torch.ones(2, 3)).tolist()
        (torch.Size([3]), [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])

    Source:
        Louizos et al., "Learning sparse neural networks through L0 regularization" (2018); for circuits, Cao et al.,
        "Low-complexity probing via finding subnetworks" (2021).
    """

    def __init__(self, *shape: int, penalty: float = 0.01) -> None:
        super().__init__()
        self.logits, self.weight = nn.Parameter(torch.full(shape, _OPEN)), penalty

    @property
    def gates(self) -> Tensor:
        """The gates without noise, from 0 (closed) to 1 (open)."""
        return _stretched(self.logits.sigmoid())

    def penalty(self) -> Tensor:
        low, high = _STRETCH
        return self.weight * (self.logits - _SHARPNESS * math.log(-low / high)).sigmoid().sum()

    def forward(self, base: Tensor, source: Tensor | None = None) -> Tensor:
        shape = self.logits.shape
        if base.shape[base.dim() - len(shape) :] != shape:
            raise ValueError(f"gates of shape {tuple(shape)} do not fit a value of shape {tuple(base.shape)}")
        gates = self.gates
        if self.training:
            noise = torch.rand_like(self.logits).clamp(1e-6, 1 - 1e-6).logit()
            gates = _stretched(((noise + self.logits) / _SHARPNESS).sigmoid())
        closed = torch.zeros_like(base) if source is None else source
        return (closed + gates * (base - closed)).to(base.dtype)


def _stretched(gates: Tensor) -> Tensor:
    low, high = _STRETCH
    return (gates * (high - low) + low).clamp(0, 1)
