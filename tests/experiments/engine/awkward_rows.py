"""Models that make it hard to run several cells as rows of one forward: rows that are no batch, or not independent."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import Call
from tests.zoo.case import floats, tokens
from tests.zoo.submodules import Submodules

ROWS = Call.of(floats(3, 4))
SEQUENCES = Call.of(floats(3, 5, 4))
SINGLE = Call.of(floats(1, 5, 4))
SQUARE = Call.of(floats(5, 5, 4))


class Ends(Submodules, first=(4, 4), last=(4, 4)):
    """A linear map before and after what a subclass does in between."""

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(torch.tanh(self.first(x))))

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError


# -- rows that have to do with each other ------------------------------------------------------------------------------


class TrainedNorm(Ends):
    """Batch norm in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)


class AttentionOverBatch(Ends):
    def between(self, h: Tensor) -> Tensor:
        return torch.softmax(h @ h.transpose(0, -1), -1) @ h


class WholeMaximum(Ends):
    """The largest number scales all of them: a patch that makes values smaller does not show in other rows."""

    def between(self, h: Tensor) -> Tensor:
        return h / h.abs().max()


class BatchMean(Ends):
    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(0, keepdim=True)


class SelectedRows(Submodules, linear=(4, 4)):
    """The shape of the output depends on values."""

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        return {"positive": h[h > 0], "where": (h > 0).nonzero(), "unique": h.round().unique()}


# -- rows that are not where one looks for them ------------------------------------------------------------------------


class TimeMajor(Submodules, rnn=partial(nn.GRU, 4, 4), head=(4, 4)):
    """Sequences run along the first dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class HeadsSlowest(Submodules, first=(4, 8), mix=(4, 4), last=(8, 4)):
    """Heads and sequences share a dimension: first all sequences of the first head."""

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.cat(self.first(x).chunk(2, dim=-1), dim=0)
        heads = self.mix(torch.softmax(heads @ heads.transpose(1, 2), -1) @ heads)
        return self.last(torch.cat(heads.chunk(2, dim=0), dim=-1))


class FlatTokens(Submodules, first=(4, 6), last=(6, 4)):
    """All tokens of all sequences in one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return self.last(torch.relu(self.first(flat))).view(*x.shape)


class Unbatched(Submodules, first=(4, 4), positions=partial(nn.Embedding, 9, 4), last=(4, 4)):
    """A mask and positions without a batch, that may be as long as there are sequences."""

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        h = self.first(x) + self.positions(positions)
        weights = (h @ h.transpose(1, 2) + mask).softmax(-1)
        return self.last(weights @ h)


class ScalarLoss(Submodules, first=(4, 4), head=(4, 5)):
    """Nothing but the mean over the batch comes out."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.first(x).tanh()).flatten(0, -2), labels.flatten(), ignore_index=-100)


class SilentlyFixed(Submodules, linear=(4, 4), last=(4, 4)):
    """Looks at the first three rows, however many there are."""

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        return self.last(h) + h[:3].mean(), h[0], h[-1]


class Folded(Submodules, first=(4, 4), convolution=partial(nn.Conv1d, 4, 4, 3, padding=1)):
    """The batch is folded into another dimension, and the convolution runs across it."""

    def forward(self, x: Tensor) -> Tensor:
        line = self.first(x).flatten(0, 1).T[None]
        return self.convolution(line)[0].T.view(*x.shape)


LABELS = tokens(3, 5, low=0, high=5)
LABELS[0, :3] = -100

INTERACTING = [
    (TrainedNorm, ROWS),
    (AttentionOverBatch, ROWS),
    (BatchMean, ROWS),
    (BatchMean, SEQUENCES),
    *[(WholeMaximum, Call.of(floats(*shape))) for shape in ((3, 4), (1, 4), (1, 5, 4))],
    (SelectedRows, ROWS),
    (SelectedRows, Call.of(floats(1, 4))),
]
"""Models whose rows are not independent, with inputs."""

ELSEWHERE = [
    (TimeMajor, SEQUENCES),
    (TimeMajor, SQUARE),
    (TimeMajor, Call.of(floats(5, 1, 4))),
    (TimeMajor, Call.of(floats(5, 4))),
    (HeadsSlowest, SEQUENCES),
    (HeadsSlowest, SINGLE),
    (FlatTokens, SEQUENCES),
    (FlatTokens, SINGLE),
    (Unbatched, Call.of(floats(5, 5, 4), floats(5, 5, seed=2), torch.arange(5))),
    (Unbatched, Call.of(floats(3, 5, 4), floats(5, 5, seed=2), torch.arange(5))),
    (Unbatched, Call.of(floats(1, 5, 4), floats(5, 5, seed=2), torch.arange(5))),
    (Unbatched, Call.of(floats(1, 1, 4), floats(1, 1, seed=2), torch.arange(1))),
    (ScalarLoss, Call.of(floats(3, 5, 4), LABELS)),
    (ScalarLoss, Call.of(floats(1, 5, 4), LABELS[:1])),
    (SilentlyFixed, ROWS),
    (SilentlyFixed, Call.of(floats(1, 4))),
    (Folded, SEQUENCES),
    (Folded, SINGLE),
]
"""Models whose rows are not, or not only, along the first dimension, with inputs."""
