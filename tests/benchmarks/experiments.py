"""What experiments cost, as multiples of plain torch: `python -m tests.benchmarks.experiments [--quick]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import attribute
from tests.benchmarks.models import GPT2_124M, GPT2_SMALL, Benchmarked
from tests.benchmarks.ratios import median_times
from tests.benchmarks.report import Row, report, row


def corrupted(tokens: Tensor) -> Tensor:
    """The same tokens, but for one."""
    other = tokens.clone()
    other[:, tokens.shape[1] // 2] += 1
    return other


def logit_difference(output: Any) -> Tensor:
    logits = output.logits[:, -1]
    return (logits[:, 5] - logits[:, 6]).mean()


def attribution(benchmarked: Benchmarked, length: int, quick: bool) -> Iterator[Row]:
    """All nodes, next to one forward and backward of the same model on the same inputs, to all of its weights."""
    model: nn.Module = benchmarked.build()
    clean = benchmarked.inputs(length)
    other = corrupted(clean)
    pg = PatchableGraph(model, clean)

    def forward_and_backward() -> None:
        logit_difference(model(other)).backward()

    def attributed() -> None:
        attribute(pg, logit_difference, clean, other)

    rounds = 3 if quick else benchmarked.rounds // 3
    times = median_times({"once": forward_and_backward, "attribute": attributed}, rounds)
    found, count = times["attribute"] / times["once"], attribute(pg, logit_difference, clean, other).size
    what = f"{benchmarked.name}, {length} tokens: scores of all {count:,} nodes / one forward and backward"
    yield row(what, f"{found:.2f}x of {1000 * times['once']:.1f} ms", "at most 4x", found <= 4)


def sections(quick: bool) -> list[Iterator[Row]]:
    return [attribution(benchmarked, length, quick) for benchmarked in (GPT2_124M, GPT2_SMALL) for length in (16, 32)]


if __name__ == "__main__":
    torch.manual_seed(0)
    report("graphpatch-notebook", __doc__, sections)
