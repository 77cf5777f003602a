"""Law 3 for positions: all public calls that take them agree with slicing by hand, in models whose sizes coincide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ProbePatch, ReplacePatch, ZeroPatch
from graphpatch_notebook.experiments import Noise, ablate, attribute, causal_trace, record_to

SIZE = 4  # the batch, the sequence, the width and the number of heads


class Heads(nn.Module):
    """A layer with attention. `edits` are functions of values, by name, for edits by hand."""

    def __init__(self, *, takes_tokens: bool, is_sequence_first: bool = False, has_context: bool = False) -> None:
        super().__init__()
        self.edits: dict[str, Callable[[Tensor], Tensor]] = {}
        self.first = nn.Embedding(11, SIZE) if takes_tokens else nn.Linear(SIZE, SIZE)
        self.query, self.key, self.value = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.last = nn.Linear(SIZE, 3)
        self.is_sequence_first, self.has_context = is_sequence_first, has_context

    def edited(self, name: str, value: Tensor) -> Tensor:
        return self.edits[name](value) if name in self.edits else value

    def run(self, given: Tensor, context: Tensor | None) -> Tensor:
        x = self.first(given)
        other = x if context is None else context
        if self.is_sequence_first:
            x = x.transpose(0, 1)
        stream = self.edited("stream", x.tanh())
        rows = stream.transpose(0, 1) if self.is_sequence_first else stream
        read = rows if context is None else other
        heads = [each.unflatten(-1, (SIZE, 1)).transpose(1, 2) for each in (self.query(rows), self.key(read))]
        pattern = (heads[0] @ heads[1].mT).softmax(-1)
        pattern = self.edited("pattern", pattern)
        z = pattern @ self.value(read).unflatten(-1, (SIZE, 1)).transpose(1, 2)
        z = self.edited("z", z)
        return self.last(rows + z.transpose(1, 2).flatten(2))


class OfTokens(Heads):
    def forward(self, input_ids: Tensor, context: Tensor | None = None) -> Tensor:
        return self.run(input_ids, context)


class OfVectors(Heads):
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.run(x, context)


@dataclass(frozen=True)
class Subject:
    """A model, two calls of it, and the dimensions of the batch and the sequence in each value."""

    model: Heads
    clean: tuple[Tensor, ...]
    corrupted: tuple[Tensor, ...]
    dims: dict[str, tuple[int, int]]

    def by_hand(self, name: str, edit: Callable[[Tensor], Tensor], inputs: tuple[Tensor, ...]) -> float:
        self.model.edits = {name: edit}
        try:
            return metric(self.model(*inputs)).item()
        finally:
            self.model.edits = {}

    def value(self, name: str, inputs: tuple[Tensor, ...]) -> Tensor:
        found: list[Tensor] = []
        self.by_hand(name, lambda value: found.append(value.detach()) or value, inputs)  # type: ignore[func-returns-value]
        return found[0]


def metric(output: Tensor) -> Tensor:
    return (output * torch.arange(output.numel(), dtype=output.dtype).sin().view(output.shape)).sum()


def subject(name: str) -> Subject:
    torch.manual_seed(0)
    takes_tokens, is_first, has_context = "tokens" in name, "first" in name, "context" in name
    kind = OfTokens if takes_tokens else OfVectors
    model = kind(takes_tokens=takes_tokens, is_sequence_first=is_first, has_context=has_context).double()
    calls = []
    for _ in range(2):
        given = torch.randint(11, (SIZE, SIZE)) if takes_tokens else torch.randn(SIZE, SIZE, SIZE).double()
        calls.append((given, torch.randn(SIZE, SIZE, SIZE).double()) if has_context else (given,))
    dims = {"stream": (1, 0) if is_first else (0, 1), "z": (0, 2), "pattern": (0, 2)}
    return Subject(model, calls[0], calls[1], dims)


NAMES = ["tokens", "tokens, first", "tokens, context", "vectors", "vectors, first"]
PATHS = {"stream": "tanh", "z": "z", "pattern": "pattern"}


def at(value: Tensor, dim: int, position: int) -> tuple[Any, ...]:
    return (*[slice(None)] * (dim % value.ndim), position)


def zeroed(dim: int, position: int) -> Callable[[Tensor], Tensor]:
    def edit(value: Tensor) -> Tensor:
        value = value.clone()
        value[at(value, dim, position)] = 0
        return value

    return edit


@pytest.mark.parametrize("value", PATHS)
@pytest.mark.parametrize("model", NAMES)
def test_all_calls_agree_with_slicing_by_hand(model: str, value: str, tmp_path: Path) -> None:
    subj = subject(model)
    pg, path = PatchableGraph(subj.model, *subj.clean), PATHS[value]
    row, dim = subj.dims[value]
    is_clear = value != "pattern" or "context" in model  # else keys are positions, too
    clean, corrupted = subj.value(value, subj.clean), subj.value(value, subj.corrupted)
    options: dict[str, Any] = {"progress": False, "positions": True}
    without = [subj.by_hand(value, zeroed(dim, position), subj.clean) for position in range(SIZE)]

    def restored(position: int) -> Callable[[Tensor], Tensor]:
        def edit(now: Tensor) -> Tensor:
            now = now.clone()
            now[at(now, dim, position)] = clean[at(now, dim, position)]
            return now

        return edit

    with_clean = [subj.by_hand(value, restored(position), subj.corrupted) for position in range(SIZE)]
    leaf = corrupted.clone().requires_grad_()
    subj.model.edits = {value: lambda _: leaf}
    metric(subj.model(*subj.corrupted)).backward()
    subj.model.edits = {}
    assert leaf.grad is not None
    scores = ((clean - corrupted) * leaf.grad).movedim(dim, 0).flatten(1).sum(1)
    for given in (*([None] if is_clear else []), dim, dim - clean.ndim):
        for position_dim in (given, {path: given}) if given is not None else (None,):
            chosen: dict[str, Any] = {"position_dim": position_dim}
            found = ablate(pg, [path], *subj.clean, metric=metric, **options, **chosen)
            np.testing.assert_allclose(found.values[0], without)
            found = causal_trace(pg, subj.clean, subj.corrupted, [path], None, metric, progress=False, **chosen)
            np.testing.assert_allclose(found.values[0], with_clean)
            found = attribute(pg, metric, subj.clean, subj.corrupted, paths=[path], positions=True, **chosen)
            np.testing.assert_allclose(found.values[0], scores, atol=1e-12)
            for over, dims in (("batch", (row,)), ("batch and positions", (row, dim))):
                mean = corrupted.mean(dims, keepdim=True).expand_as(corrupted)
                expected = subj.by_hand(value, lambda _, mean=mean: mean, subj.clean)  # type: ignore[misc]
                found = ablate(
                    pg, [path], *subj.clean, metric=metric, method="mean", reference=subj.corrupted, progress=False,
                    mean_over=over, **(chosen if over != "batch" else {}),
                )  # fmt: skip
                np.testing.assert_allclose(found.item(), expected)
        for position, expected in enumerate(without):
            probe = ProbePatch(positions=position, position_dim=given)
            with pg.patch({path: [probe, ZeroPatch(positions=position, position_dim=given)]}):
                np.testing.assert_allclose(metric(pg(*subj.clean)).item(), expected)
            torch.testing.assert_close(probe.activation, clean.narrow(dim, position, 1))
        swept = pg.sweep(
            {"position": range(SIZE)}, lambda at, given=given: {path: ZeroPatch(positions=at, position_dim=given)},
            *subj.clean, metric=metric, progress=False,
        )  # fmt: skip
        np.testing.assert_allclose(swept.values, without)
    found = ablate(pg, [path], *subj.clean, metric=metric, method="resample", reference=subj.corrupted, progress=False)
    np.testing.assert_allclose(found.item(), subj.by_hand(value, lambda _: corrupted, subj.clean))
    if len(subj.clean) == 1 and is_clear:
        stored = record_to(pg, tmp_path, [path], subj.clean[0], batch_size=SIZE)[path][:]
        rows = clean.movedim((row, dim), (0, 1)).flatten(0, 1)
        torch.testing.assert_close(stored, rows, check_dtype=False)


@pytest.mark.parametrize(
    ("model", "given"),
    [("tokens", "1"), ("vectors", True), ("tokens", -4), ("tokens", 0), ("vectors", 2), ("vectors", -3)],
)
def test_a_dimension_that_cannot_be_is_an_error_before_anything_runs(model: str, given: Any) -> None:
    subj = subject(model)
    pg, path = PatchableGraph(subj.model, *subj.clean), PATHS["stream"]
    subj.model.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    runs = (subj.clean, subj.corrupted)
    chosen: dict[str, Any] = {"position_dim": given}
    calls: list[Callable[[], Any]] = [
        lambda: ablate(pg, [path], *subj.clean, metric=metric, positions=True, progress=False, **chosen),
        lambda: ablate(
            pg, [path], *subj.clean, metric=metric, method="mean", reference=subj.clean, progress=False,
            mean_over="batch and positions", **chosen,
        ),
        lambda: causal_trace(pg, *runs, [path], None, metric, progress=False, **chosen),
        lambda: causal_trace(pg, *runs, [path], None, metric, progress=False, position_dim={path: given}),
        lambda: causal_trace(pg, runs[0], Noise(path), [path], False, metric, progress=False, **chosen),
        lambda: attribute(pg, metric, *runs, paths=[path], positions=True, **chosen),
        lambda: attribute(pg, metric, *runs, paths=[path], positions=[1], position_dim={path: given}),
    ]  # fmt: skip
    calls.append(lambda: pg.patch({path: ZeroPatch(positions=1, **chosen)}).__enter__())
    calls.append(lambda: pg.patch({path: ReplacePatch(1.0, positions=[[1]] * SIZE, **chosen)}).__enter__())
    for call in calls:
        with pytest.raises(ValueError, match="position_dim|'tanh'"):
            call()
