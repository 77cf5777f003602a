"""What capture and patching cost, as multiples of the eager forward: `python -m tests.benchmarks.core [--quick]`."""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ProbePatch, ZeroPatch
from graphpatch_notebook.graph_modules import code_generations
from tests.benchmarks.memory import peak_bytes
from tests.benchmarks.models import ALL, GPT2_124M, GPT2_SMALL, Benchmarked, gpt2, llama
from tests.benchmarks.ratios import median_times

Row = tuple[str, str, str, bool]


def row(what: str, measured: str, must: str, holds: bool) -> Row:
    return what, measured, must, holds


def construction(quick: bool) -> Iterator[Row]:
    model = GPT2_124M.build()
    inputs = GPT2_124M.inputs()
    with torch.no_grad():
        times = median_times(
            {"eager": lambda: model(inputs), "construct": lambda: PatchableGraph(model, inputs)}, 3 if quick else 9
        )
    found = times["construct"] / times["eager"]
    yield row("construct GPT-2 124M / one eager forward", f"{found:.2f}x", "at most 2x", found <= 2)
    for name, build, limit in (
        ("construct GPT-2, 32 layers of 128", lambda: gpt2(32, 128, 4, 4096), 1.0),
        ("construct Llama, 80 layers of 64", lambda: llama(80, 64, 4, 4096), 2.0),
    ):
        small = build()
        with torch.no_grad():
            times = median_times({"construct": lambda small=small: PatchableGraph(small, inputs % 4096)}, 3)
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


def zeroing_hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    output = output.clone()
    output[...] = 0
    return output


def patching(benchmarked: Benchmarked, quick: bool) -> Iterator[Row]:
    model, inputs = benchmarked.build(), benchmarked.inputs()
    pg = PatchableGraph(model, inputs)
    target = model.get_submodule(benchmarked.attribute_path)
    seen: list[Tensor] = []

    def hooked(hook: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> Any:
            handle = target.register_forward_hook(hook)
            try:
                return model(inputs)
            finally:
                handle.remove()

        return run

    def patched(path: str, patch: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with pg.patch({path: patch()}):
                return pg(inputs)

        return run

    output = f"{benchmarked.module_path}.output"
    rounds = benchmarked.rounds // 5 + 3 if quick else benchmarked.rounds
    with torch.no_grad():
        times = median_times(
            {
                "eager": lambda: model(inputs),
                "idle": lambda: pg(inputs),
                "probe hook": hooked(lambda module, args, output: seen.append(output) or seen.clear()),
                "probe": patched(output, ProbePatch),
                "zero hook": hooked(zeroing_hook),
                "zero": patched(output, ZeroPatch),
                "zero op": patched(benchmarked.op_path, ZeroPatch),
            },
            rounds,
        )
    at_module, at_op = benchmarked.bounds
    for what, of, to, limit in (
        ("without patches / eager", "idle", "eager", 1.01),
        ("probe a module's output / the same by a hook", "probe", "probe hook", at_module),
        ("zero a module's output / the same by a hook", "zero", "zero hook", at_module),
        ("zero an inner op / eager", "zero op", "eager", at_op),
    ):
        found = times[of] / times[to]
        yield row(f"{benchmarked.name}: {what}", f"{found:.3f}x", f"at most {limit:.2f}x", round(found, 2) <= limit)


def probing_everything(quick: bool) -> Iterator[Row]:
    model, inputs = GPT2_SMALL.build(), GPT2_SMALL.inputs()
    pg = PatchableGraph(model, inputs)
    probes = {path: ProbePatch() for path, node in pg.nodes.items() if node.shape is not None}
    context = pg.patch(probes)

    def probed() -> None:
        with context:
            pg(inputs)

    with torch.no_grad():
        times = median_times({"eager": lambda: model(inputs), "probe": probed}, 30 if quick else 300)
    found = times["probe"] / times["eager"]
    yield row(
        f"{GPT2_SMALL.name}: probe all {len(probes)} tensors / eager", f"{found:.2f}x", "at most 1.60x", found <= 1.6
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    started = time.perf_counter()
    table = Table(title=f"graphpatch-notebook, torch {torch.__version__}, one thread, medians of alternating runs")
    for column in ("what", "measured", "must", ""):
        table.add_column(column)
    sections = [construction(quick), memory(), *(patching(b, quick) for b in ALL), probing_everything(quick)]
    for section in sections:
        for what, measured, must, holds in section:
            table.add_row(what, measured, must, "ok" if holds else "MISSED")
    console = Console(width=120)
    console.print(table)
    console.print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
