"""What capture and patching cost, as multiples of the eager forward: `python -m tests.benchmarks.core [--quick]`."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphpatch_notebook import Patch, PatchableGraph, ProbePatch, RecordPatch, ZeroPatch
from graphpatch_notebook.graphs import code_generations
from tests.benchmarks.memory import peak_bytes
from tests.benchmarks.models import ALL, GPT2_124M, Benchmarked, gpt2, llama
from tests.benchmarks.ratios import median_times
from tests.benchmarks.report import Row, report, row


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


def at_a_module(benchmarked: Benchmarked, quick: bool) -> Iterator[Row]:
    """A patch on a module's output next to the same by a hook: the context entered, the hook registered, once."""
    inputs = benchmarked.inputs()
    rounds = benchmarked.rounds // 5 + 3 if quick else benchmarked.rounds
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        seen[:] = [output]

    for what, patch, hook in (("probe", ProbePatch(), keep), ("zero", ZeroPatch(), zeroing_hook)):
        model, hooked = benchmarked.build(), benchmarked.build()
        hooked.get_submodule(benchmarked.attribute_path).register_forward_hook(hook)
        pg = PatchableGraph(model, inputs)
        with torch.no_grad(), pg.patch({f"{benchmarked.module_path}.output": patch}):
            times = median_times(
                {"hook": lambda hooked=hooked: hooked(inputs), "patch": lambda pg=pg: pg(inputs)}, rounds
            )
        found, limit = times["patch"] / times["hook"], benchmarked.asked.module
        yield row(
            f"{benchmarked.name}: {what} a module's output / the same by a hook",
            f"{found:.3f}x",
            f"at most {limit:.2f}x",
            round(found, 2) <= limit,
        )


def recorded(benchmarked: Benchmarked, quick: bool) -> Iterator[Row]:
    """The stream after each layer by `pg.record`, next to hooks that do the same: both stop the run after the last."""
    model, inputs = benchmarked.build(), benchmarked.inputs()
    pg, streams = PatchableGraph(model, inputs), "layers[*].resid_post"
    layers: Any = model.get_submodule(benchmarked.attribute_path.rsplit(".", 2)[0])

    def hooked() -> dict[nn.Module, Tensor]:
        found: dict[nn.Module, Tensor] = {}

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            found[module] = output[0] if isinstance(output, tuple) else output
            if len(found) == len(layers):
                raise InterruptedError

        handles = [layer.register_forward_hook(keep) for layer in layers]
        try:
            model(inputs)
        except InterruptedError:
            return found
        finally:
            for handle in handles:
                handle.remove()
        raise AssertionError("the last layer did not run")

    with torch.no_grad():
        assert all(map(torch.equal, pg.record(streams, inputs).values(), hooked().values()))
        rounds = benchmarked.rounds // 5 + 3 if quick else benchmarked.rounds
        times = median_times({"hooks": hooked, "record": lambda: pg.record(streams, inputs)}, rounds)
    found, limit = times["record"] / times["hooks"], benchmarked.asked.record
    yield row(
        f"{benchmarked.name}: record the stream after each layer / the same by hooks",
        f"{found:.3f}x",
        f"at most {limit:.2f}x",
        round(found, 2) <= limit,
    )


def next_to_eager(benchmarked: Benchmarked, quick: bool) -> Iterator[Row]:
    """Without patches, and with new patches in each forward, so that the context is made and entered each time."""
    model, inputs, asked = benchmarked.build(), benchmarked.inputs(), benchmarked.asked
    pg = PatchableGraph(model, inputs)
    # Values inside fused calls are left out: asking for one runs other kernels.
    tensors = [path for path, node in pg.nodes.items() if node.shape is not None and not node.opens]
    outputs = [path for path in tensors if pg.nodes[path].kind == "output"]

    def patched(kind: type[Patch[Any]], *paths: str) -> Callable[[], Any]:
        def run() -> Any:
            with pg.patch({path: kind() for path in paths}):
                return pg(inputs)

        return run

    known = pg.patch({path: ProbePatch() for path in tensors})

    def probed() -> Any:
        with known:
            return pg(inputs)

    output = f"{benchmarked.module_path}.output"
    light = [
        ("without patches", 1.01, lambda: pg(inputs)),
        ("record a module's output", asked.module, patched(RecordPatch, output)),
        ("zero a module's output", asked.module, patched(ZeroPatch, output)),
        ("zero an inner op", asked.op, patched(ZeroPatch, benchmarked.op_path)),
        ("zero the queries inside attention", asked.queries, patched(ZeroPatch, benchmarked.query_path)),
    ]
    heavy = [  # apart, since they take the caches from what runs after them
        (f"record all {len(outputs)} outputs of modules", asked.modules, patched(RecordPatch, *outputs)),
        (f"probe all {len(tensors)} tensors, in a known context", asked.everything, probed),
        ("construct", asked.construct, lambda: PatchableGraph(model, inputs)),
    ]
    rounds = benchmarked.rounds // 5 + 3 if quick else benchmarked.rounds
    for together, count in (light, rounds), (heavy, rounds // 2):
        measured = [(what, limit, run) for what, limit, run in together if limit is not None]
        with torch.no_grad():
            times = median_times({"eager": lambda: model(inputs)} | {what: run for what, _, run in measured}, count)
        for what, limit, _ in measured:
            found, holds = times[what] / times["eager"], round(times[what] / times["eager"], 2) <= limit
            yield row(f"{benchmarked.name}: {what} / eager", f"{found:.3f}x", f"at most {limit:.2f}x", holds)


def sections(quick: bool) -> list[Iterator[Row]]:
    by_model = [section(model, quick) for model in ALL for section in (next_to_eager, at_a_module, recorded)]
    return [construction(quick), memory(), *by_model]


if __name__ == "__main__":
    report("graphpatch-notebook", __doc__, sections)
