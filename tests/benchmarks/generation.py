"""What patches cost in `generate`, as multiples of the model alone: `python -m tests.benchmarks.generation`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook import Patch, PatchableGraph, ProbePatch, RecordPatch, ZeroPatch
from tests.benchmarks.models import GPT2_124M, GPT2_SMALL, LLAMA_SMALL, Benchmarked
from tests.benchmarks.ratios import median_times
from tests.benchmarks.report import Row, report, row

NEW_TOKENS = 20
ASKED = {GPT2_124M.name: 1.1, LLAMA_SMALL.name: 1.1, GPT2_SMALL.name: 1.04}
ROUNDS = {GPT2_124M.name: 9, LLAMA_SMALL.name: 31, GPT2_SMALL.name: 101}


def settings(benchmarked: Benchmarked) -> dict[str, Any]:
    return {
        "inputs": benchmarked.inputs(),
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(benchmarked.inputs()),
    }


def generating(benchmarked: Benchmarked, quick: bool) -> Iterator[Row]:
    """A prompt of 32 tokens, 20 new ones, with a cache; the context is entered for each generation."""
    model = benchmarked.build()
    pg = PatchableGraph(model, benchmarked.inputs())
    kwargs = settings(benchmarked)
    layer, op = benchmarked.module_path.rpartition(".")[0], benchmarked.op_path

    def patched(patches: dict[str, Patch[Any]]) -> Tensor:
        with pg.patch(patches):
            return pg.generate(**kwargs)

    actions = {
        "model": lambda: model.generate(**kwargs),
        "without patches": lambda: pg.generate(**kwargs),
        "zero the output of one layer": lambda: patched({f"{layer}.output": ZeroPatch()}),
        "zero an inner op of one layer": lambda: patched({op: ZeroPatch()}),
        "the same at one position": lambda: patched({op: ZeroPatch(positions=40)}),
        "the same in the prefill only": lambda: patched({op: ZeroPatch(steps="prefill")}),
        "record it at each decoding step": lambda: patched({op: RecordPatch(steps="decoding")}),
        "probe it": lambda: patched({op: ProbePatch()}),
    }
    rounds = ROUNDS[benchmarked.name]
    times = median_times(actions, rounds // 5 + 2 if quick else rounds)
    step = times["model"] / NEW_TOKENS * 1000
    yield row(f"{benchmarked.name}: model.generate, a step", f"{step:.2f} ms", "", True)
    for what, seconds in list(times.items())[1:]:
        found, limit = seconds / times["model"], 1.01 if what == "without patches" else ASKED[benchmarked.name]
        yield row(
            f"{benchmarked.name}: {what} / model", f"{found:.3f}x", f"under {limit:.2f}x", round(found, 2) <= limit
        )


if __name__ == "__main__":
    models = (GPT2_124M, LLAMA_SMALL, GPT2_SMALL)
    report(f"generate: {NEW_TOKENS} new tokens", __doc__, lambda quick: [generating(model, quick) for model in models])
