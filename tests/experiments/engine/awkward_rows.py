"""Models that make it hard to run several cells as rows of one forward: rows that are no batch, or not independent."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import Call
from tests.zoo.case import floats, tokens

ROWS = Call.of(floats(3, 4))
SEQUENCES = Call.of(floats(3, 5, 4))
SINGLE = Call.of(floats(1, 5, 4))
SQUARE = Call.of(floats(5, 5, 4))


class Ends(nn.Module):
    """A linear map before and after what a subclass does in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

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


class BatchMean(Ends):
    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(0, keepdim=True)


class WholeNorm(Ends):
    """All numbers in a tensor have a norm in common."""

    def between(self, h: Tensor) -> Tensor:
        return h / h.norm() + h.amax()


class RowByRow(nn.Module):
    """Each sequence goes as deep as its own values say; there is one list entry for each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.first(x)
        results = []
        for row in h.unbind(0):
            state = row
            for _ in range(5):
                if state.abs().max() < 1.0:
                    state = self.layer(state) * 2
            results.append(state)
        return results


class SelectedRows(nn.Module):
    """The shape of the output depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        return {"positive": h[h > 0], "where": (h > 0).nonzero(), "unique": h.round().unique()}


# -- rows that are not where one looks for them ------------------------------------------------------------------------


class TimeMajor(nn.Module):
    """Sequences run along the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class TimeMajorInside(nn.Module):
    """Sequences run along the first dimension inside, and in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rnn = nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Any:
        turned = self.first(x).transpose(0, 1)
        states, last = self.rnn(turned)
        return states, last


class HeadsSlowest(nn.Module):
    """Heads and sequences share a dimension: first all sequences of the first head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.mix = nn.Linear(4, 4)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.cat(self.first(x).chunk(2, dim=-1), dim=0)
        heads = self.mix(torch.softmax(heads @ heads.transpose(1, 2), -1) @ heads)
        return self.last(torch.cat(heads.chunk(2, dim=0), dim=-1))


class HeadsFastest(nn.Module):
    """Heads and sequences share a dimension: first all heads of the first sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.first(x).repeat_interleave(2, dim=0)
        heads = self.mix(torch.softmax(heads @ heads.transpose(1, 2), -1) @ heads)
        return heads.view(x.shape[0], 2, *x.shape[1:]).sum(1)


class FlatTokens(nn.Module):
    """All tokens of all sequences in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return self.last(torch.relu(self.first(flat))).view(*x.shape)


class Unbatched(nn.Module):
    """A mask and positions without a batch, that may be as long as there are sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.positions = nn.Embedding(9, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        h = self.first(x) + self.positions(positions)
        weights = (h @ h.transpose(1, 2) + mask).softmax(-1)
        return self.last(weights @ h)


class ScalarLoss(nn.Module):
    """Nothing but the mean over the batch comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.first(x).tanh()).flatten(0, -2), labels.flatten(), ignore_index=-100)


class LossAndLogits(ScalarLoss):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.first(x).tanh())
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits, "count": int((labels != -100).sum())}


class Lists(nn.Module):
    """Gives one entry for each sequence, in lists and in objects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        return {"rows": list(h.unbind(0)), "numbers": h.sum(-1).tolist(), "turned": h.transpose(0, -1)}


class SilentlyFixed(nn.Module):
    """Looks at the first three rows, however many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        return self.last(h) + h[:3].mean(), h[0], h[-1]


class Folded(nn.Module):
    """The batch is folded into another dimension, and the convolution runs across it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        line = self.first(x).flatten(0, 1).T[None]
        return self.convolution(line)[0].T.view(*x.shape)


class Grouped(nn.Module):
    """The batch becomes groups of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(floats(4, 1, 3, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        channels = h.transpose(1, 2).reshape(1, -1, h.shape[1])
        weight = self.weight.repeat(h.shape[0], 1, 1)
        result = F.conv1d(channels, weight, padding=1, groups=channels.shape[1])
        return result.view(h.shape[0], 4, -1).transpose(1, 2)


LABELS = tokens(3, 5, low=0, high=5)
LABELS[0, :3] = -100

INTERACTING = [
    (TrainedNorm, ROWS),
    (AttentionOverBatch, ROWS),
    (BatchMean, ROWS),
    (BatchMean, SEQUENCES),
    (WholeNorm, ROWS),
    (WholeNorm, SINGLE),
    (RowByRow, ROWS),
    (SelectedRows, ROWS),
    (SelectedRows, Call.of(floats(1, 4))),
]
"""Models whose rows are not independent, with inputs."""

ELSEWHERE = [
    (TimeMajor, SEQUENCES),
    (TimeMajor, SQUARE),
    (TimeMajor, Call.of(floats(5, 1, 4))),
    (TimeMajor, Call.of(floats(5, 4))),
    (TimeMajorInside, SEQUENCES),
    (TimeMajorInside, SQUARE),
    (TimeMajorInside, SINGLE),
    (HeadsSlowest, SEQUENCES),
    (HeadsSlowest, SINGLE),
    (HeadsFastest, SEQUENCES),
    (HeadsFastest, SINGLE),
    (FlatTokens, SEQUENCES),
    (FlatTokens, SINGLE),
    (Unbatched, Call.of(floats(5, 5, 4), floats(5, 5, seed=2), torch.arange(5))),
    (Unbatched, Call.of(floats(3, 5, 4), floats(5, 5, seed=2), torch.arange(5))),
    (Unbatched, Call.of(floats(1, 5, 4), floats(5, 5, seed=2), torch.arange(5))),
    (Unbatched, Call.of(floats(1, 1, 4), floats(1, 1, seed=2), torch.arange(1))),
    (ScalarLoss, Call.of(floats(3, 5, 4), LABELS)),
    (ScalarLoss, Call.of(floats(1, 5, 4), LABELS[:1])),
    (LossAndLogits, Call.of(floats(3, 5, 4), LABELS)),
    (LossAndLogits, Call.of(floats(1, 5, 4), labels=LABELS[:1])),
    (Lists, ROWS),
    (Lists, Call.of(floats(1, 4))),
    (SilentlyFixed, ROWS),
    (SilentlyFixed, Call.of(floats(1, 4))),
    (Folded, SEQUENCES),
    (Folded, SINGLE),
    (Grouped, SEQUENCES),
    (Grouped, SINGLE),
    (WholeNorm, Call.of(floats(4))),
]
"""Models whose rows are not, or not only, along the first dimension, with inputs."""


class WholeMaximum(Ends):
    """The largest number scales all of them: a patch that makes values smaller does not show in other rows."""

    def between(self, h: Tensor) -> Tensor:
        return h / h.abs().max()


INTERACTING += [(WholeMaximum, Call.of(floats(*shape))) for shape in ((3, 4), (1, 4), (1, 5, 4))]
