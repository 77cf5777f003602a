"""What capture takes for larger models, and keeps: `python -m tests.benchmarks.core [--quick]`."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import torch

from graphpatch_notebook import PatchableGraph, ZeroPatch
from graphpatch_notebook.graphs import code_generations
from tests.benchmarks.memory import peak_bytes
from tests.benchmarks.models import GPT2_124M, gpt2, llama
from tests.benchmarks.ratios import median_times
from tests.benchmarks.report import Row, report, row


def construction(quick: bool) -> Iterator[Row]:
    model = GPT2_124M.build()
    inputs = GPT2_124M.inputs()
    for name, build, limit in (
        ("construct GPT-2, 32 layers of 128", lambda: gpt2(32, 128, 4, 4096), 1.0),
        ("construct Llama, 80 layers of 64", lambda: llama(80, 64, 4, 4096), 2.0),
    ):
        small = build()
        with torch.no_grad():
            times = median_times(
                {"construct": lambda small=small: PatchableGraph(small, inputs % 4096)}, 1 if quick else 3
            )
        seconds = times["construct"]
        yield row(name, f"{seconds:.2f} s", f"under {limit:.0f} s", seconds < limit)
    before = code_generations()
    pg = PatchableGraph(model, inputs)
    generated = code_generations() - before
    yield row("code generated at construction", str(generated), "none", generated == 0)
    context = pg.patch({GPT2_124M.op_path: ZeroPatch()})
    for _ in range(3):
        with context, torch.no_grad():
            pg(inputs)
    generated = code_generations() - before
    yield row("code generated on re-entering a context", str(generated), "none", generated == 0)


def memory() -> Iterator[Row]:
    model, inputs = GPT2_124M.build(), GPT2_124M.inputs()
    with torch.no_grad():
        model(inputs)
        PatchableGraph(model, inputs)
        gc.collect()
        tracemalloc.start()
        pg = PatchableGraph(model, inputs)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] / 2**20
        tracemalloc.stop()
        yield row("kept after construction, GPT-2 124M", f"{kept:.1f} MiB", "under 5 MB", kept < 4.77)
        eager = peak_bytes(lambda: model(inputs))
        captured = peak_bytes(lambda: PatchableGraph(model, inputs))
    del pg
    found = captured / eager
    yield row("peak of tensors during construction / eager", f"{found:.2f}x", "at most 1.10x", found <= 1.1)


def sections(quick: bool) -> list[Iterator[Row]]:
    return [construction(quick), memory()]


if __name__ == "__main__":
    report("graphpatch-notebook", __doc__, sections)
