"""What experiments cost, as multiples of plain torch: `python -m tests.benchmarks.experiments [--quick]`."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, PatchableGraph, ProbePatch, ReplacePatch, ZeroPatch
from graphpatch_notebook.experiments import attribute, attribute_edges, circuit, circuit_patches, record_to
from graphpatch_notebook.experiments.attribution.rules import Method
from graphpatch_notebook.experiments.engine.cells import LEAST_OPERATIONS
from tests.benchmarks.limits import corrupted
from tests.benchmarks.memory import peak_bytes
from tests.benchmarks.models import GPT2_124M, GPT2_SMALL, Benchmarked
from tests.benchmarks.ratios import median_times
from tests.benchmarks.report import Row, report, row
from tests.zoo.transformers_models import with_cache


def logit_difference(output: Any) -> Tensor:
    logits = output.logits[:, -1]
    return (logits[:, 5] - logits[:, 6]).mean()


def circuits(benchmarked: Benchmarked, length: int, quick: bool) -> Iterator[Row]:
    """A run as a circuit of all edges between components, next to a forward without gradients."""
    model: nn.Module = benchmarked.build()
    clean = benchmarked.inputs(length)
    other = corrupted(clean).flip(1)
    pg = PatchableGraph(model, clean)
    scores = attribute_edges(pg, logit_difference, clean, other)
    count = scores.attrs["edges"]
    patches = circuit_patches(pg, circuit(pg, scores, count, prune=False), other)

    @torch.no_grad()
    def forward() -> None:
        model(clean)

    @torch.no_grad()
    def run() -> None:
        with pg.patch(patches):
            pg(clean)

    rounds = benchmarked.rounds // 20 + 2 if quick else benchmarked.rounds // 3
    times = median_times({"once": forward, "run": run}, rounds)
    found = times["run"] / times["once"]
    what = f"{benchmarked.name}, {length} tokens, {count:,} edges: a run as a circuit / one forward"
    yield row(what, f"{found:.2f}x of {1000 * times['once']:.1f} ms", "at most 2.5x", found <= 2.5)


def secant(benchmarked: Benchmarked, length: int, quick: bool) -> Iterator[Row]:
    """The scores of all nodes by the secant, next to those by gradients."""
    model: nn.Module = benchmarked.build()
    clean = benchmarked.inputs(length)
    other = corrupted(clean)
    pg = PatchableGraph(model, clean)

    def scores(method: Method) -> None:
        attribute(pg, logit_difference, clean, other, method=method)

    rounds = 2 if quick else benchmarked.rounds // 20 + 2
    works = {"gradient": lambda: scores("gradient"), "secant": lambda: scores("secant")}
    times = median_times(works, rounds)
    found = times["secant"] / times["gradient"]
    what = f"{benchmarked.name}, {length} tokens: scores of all nodes by the secant / by gradients"
    yield row(what, f"{found:.2f}x of {1000 * times['gradient']:.1f} ms", "at most 1.3x", found <= 1.3)


def difference_of_two(output: Any) -> Tensor:
    logits = output.logits
    return logits[0, -1, 5] - logits[0, -1, 6]


@torch.no_grad()
def swept(benchmarked: Benchmarked, bound: float, quick: bool, positions: int = 16) -> Iterator[Row]:
    """Layers x positions, the MLP's output replaced by that of other tokens, next to a loop with plain hooks."""
    model: Any = benchmarked.build()
    clean = benchmarked.inputs(positions)
    other = corrupted(clean).flip(1)
    blocks = list(model.transformer.h)
    paths = [f"transformer.h_{layer}.mlp.output" for layer in range(len(blocks))]
    pg = PatchableGraph(model, clean)
    probes = {path: ProbePatch() for path in paths}
    with pg.patch(probes):
        pg(other)
    values = {path: probe.activation.clone() for path, probe in probes.items()}

    def loop() -> Tensor:
        found = torch.empty(len(blocks), positions, dtype=torch.float64)
        for layer, block in enumerate(blocks):
            for position in range(positions):

                def replace(
                    _module: Any, _args: Any, output: Tensor, at: int = position, path: str = paths[layer]
                ) -> Tensor:
                    output = output.clone()
                    output[:, at] = values[path][:, at]
                    return output

                handle = block.mlp.register_forward_hook(replace)
                found[layer, position] = difference_of_two(model(clean))
                handle.remove()
        return found

    def patches(path: str, position: int) -> dict[str, ReplacePatch]:
        at = (slice(None), position)
        return {path: ReplacePatch(value=values[path][at], slice=at)}

    def sweep(batch: str | None = "auto") -> Any:
        axes = {"path": paths, "position": range(positions)}
        return pg.sweep(axes, patches, clean, metric=difference_of_two, progress=False, batch=batch)

    def of_all_positions() -> Any:
        with mock.patch.dict(LEAST_OPERATIONS, cpu=math.inf):
            return sweep()

    rounds = 1 if quick else 3 if benchmarked is GPT2_124M else 25
    works = {"loop": loop, "sweep": sweep, "alone": lambda: sweep(None), "all": of_all_positions}
    expected = loop()
    times = median_times(works, rounds, warm_ups=0 if benchmarked is GPT2_124M else 2)  # 192 forwards in each loop
    found = times["loop"] / times["sweep"]
    error = (torch.from_numpy(sweep().values) - expected).abs().max().item()
    exact = (torch.from_numpy(sweep(None).values) - expected).abs().max().item()
    what = f"{benchmarked.name}, {len(blocks)} layers x {positions} positions"
    yield row(f"{what}: a loop with plain hooks / the sweep", f"{found:.2f}x", f"at least {bound}x", found >= bound)
    gained = times["all"] / times["sweep"]
    asked = "at least 1.5x" if benchmarked is GPT2_124M else ""
    all_positions = f"{what}: the sweep in which modules compute all positions / the sweep"
    yield row(all_positions, f"{gained:.2f}x", asked, gained >= 1.5 or not asked)
    yield row(f"{what}: largest difference", f"{error:.1e}", "at most 2e-6", error <= 2e-6)
    yield row(f"{what}: the loop / the sweep with batch=None", f"{times['loop'] / times['alone']:.2f}x", "", True)
    yield row(f"{what}: largest difference with batch=None", f"{exact:.1e}", "0", exact == 0)


@torch.no_grad()
def swept_heads(benchmarked: Benchmarked, layers: list[int], quick: bool) -> Iterator[Row]:
    """All heads of some layers, zeroed one by one, on 8 prompts of 16 tokens, next to a loop with plain hooks."""
    model: Any = benchmarked.build()
    clean = torch.cat([benchmarked.inputs(16).roll(shift, 1) for shift in range(8)])
    pg = PatchableGraph(model, clean)
    size = model.config.n_embd // model.config.n_head
    axes = {"layer": layers, "head": range(model.config.n_head)}

    def patches(layer: int, head: int) -> dict[str, ZeroPatch]:
        part = slice(head * size, (head + 1) * size)
        return {f"transformer.h_{layer}.attn.c_proj.x": ZeroPatch(slice=(..., part))}

    def loop() -> Tensor:
        found = torch.empty(len(layers), model.config.n_head, dtype=torch.float64)
        for number, layer in enumerate(layers):
            for head in axes["head"]:

                def zero(_module: Any, args: Any, at: int = head) -> Any:
                    heads = args[0].clone()
                    heads[..., at * size : (at + 1) * size] = 0
                    return (heads,)

                handle = model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(zero)
                found[number, head] = logit_difference(model(clean))
                handle.remove()
        return found

    def sweep() -> Any:
        return pg.sweep(axes, patches, clean, metric=logit_difference, progress=False)

    started = time.process_time()
    result = sweep()
    first = time.process_time() - started
    times = median_times({"loop": loop, "sweep": sweep}, 1 if quick else 3, warm_ups=0)
    error = (torch.from_numpy(result.values) - loop()).abs().max().item()
    what = f"{benchmarked.name}, heads of layers {layers}, 8 prompts of 16 tokens"
    found = times["sweep"] / times["loop"]
    for which, ratio, bound in ("the first", first / times["loop"], 0.3), ("a later", found, 0.25):
        text = f"{what}: {which} sweep / a loop with plain hooks"
        yield row(text, f"{ratio:.2f}x", f"at most {bound}x", ratio <= bound)
    yield row(f"{what}: largest difference", f"{error:.1e}", "at most 2e-6", error <= 2e-6)


@torch.no_grad()
def stored(benchmarked: Benchmarked, paths: list[str], quick: bool) -> Iterator[Row]:
    """Values of a dataset, written to files, next to plain forward passes; and the memory that this takes."""
    model: Any = benchmarked.build()
    tokens = torch.cat([benchmarked.inputs(64).roll(shift, 1) for shift in range(8)])
    pg = PatchableGraph(model, tokens[:1])

    def store(batches: int, shard_bytes: int = 2**28) -> None:
        with tempfile.TemporaryDirectory() as folder:
            record_to(pg, folder, paths, (tokens for _ in range(batches)), shard_bytes=shard_bytes)

    count = 2 if quick else 6

    def plain() -> None:
        for _ in range(count):
            model(tokens)

    works = {"plain": plain, "store": partial(store, count)}
    times = median_times(works, 2 if quick else 5, warm_ups=1)
    speed = times["plain"] / times["store"]
    few, many = (peak_bytes(partial(store, batches, 2**20)) for batches in (3, 12))
    what = f"{benchmarked.name}, batches of 8 x 64 tokens: store {len(pg.record(paths, tokens[:1]))} values"
    yield row(f"{what}: speed / that of plain forward passes", f"{speed:.2f}x", "at least 0.8x", speed >= 0.8)
    growth = many / few
    yield row(f"{what}: most memory for 12 batches / for 3", f"{growth:.2f}x", "at most 1.05x", growth <= 1.05)


@torch.no_grad()
def compiled(benchmarked: Benchmarked, quick: bool) -> Iterator[Row]:
    """A model with patches, compiled by `pg.compile`, next to `torch.compile` of the model without patches."""
    model: Any = benchmarked.build()
    ids = benchmarked.inputs()
    pg = PatchableGraph(model, ids, use_cache=False)
    width = model.config.n_embd
    steer = AddPatch(value=torch.zeros(width), slice=(slice(None), 3))
    patches = {"layers[1].resid_post": steer, "layers[2].mlp.post": ZeroPatch(slice=(..., slice(0, 8)))}
    patched = pg.compile(patches, ids, use_cache=False, allow_doubts=True)
    plain = torch.compile(model)
    works = {name: partial(work, ids, use_cache=False) for name, work in {"plain": plain, "patched": patched}.items()}
    times = median_times(works, benchmarked.rounds // 20 + 2 if quick else benchmarked.rounds)
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    error = 0.0
    for _ in range(100):
        steer.value = torch.randn(width)
        found = patched(ids, use_cache=False).logits
        with pg.patch(patches):
            error = max(error, (found - pg(ids, use_cache=False).logits).abs().max().item())
    again, speed = stats["unique_graphs"] - before, times["plain"] / times["patched"]
    what = f"{benchmarked.name}, compiled by inductor"
    yield row(f"{what}: without patches / with two", f"{speed:.2f}x", "at least 0.97x", speed >= 0.97)
    yield row(f"{what}: graphs compiled for 100 values", f"{again}", "0", again == 0)
    yield row(f"{what}: largest difference from pg.patch", f"{error:.1e}", "at most 1e-5", error <= 1e-5)


@torch.no_grad()
def compiled_step(benchmarked: Benchmarked, quick: bool) -> Iterator[Row]:
    """One step of a generation with a static cache, with patches, next to `torch.compile` of the model without."""
    from transformers import StaticCache

    model: Any = benchmarked.build()
    ids = benchmarked.inputs()
    token, length = ids[:, :1], ids.shape[1]
    caches = {name: StaticCache(config=model.config, max_cache_len=2 * length) for name in ("plain", "patched")}
    for cache in caches.values():
        model(ids, **with_cache(model, cache))
    pg = PatchableGraph(model, token, **with_cache(model, caches["patched"]))
    steer = AddPatch(value=torch.zeros(model.config.n_embd), slice=(slice(None), -1))
    patches = {"layers[1].resid_post": steer, "layers[2].mlp.post": ZeroPatch(slice=(..., slice(0, 8)))}
    calls = {
        "plain": torch.compile(model),
        "patched": pg.compile(patches, token, **with_cache(model, caches["patched"]), allow_doubts=True),
    }

    def step(name: str) -> Tensor:
        for layer in caches[name].layers:
            layer.cumulative_length.fill_(length)
        return calls[name](token, **with_cache(model, caches[name])).logits  # type: ignore[no-any-return]

    works = {name: partial(step, name) for name in calls}
    times = median_times(works, benchmarked.rounds // 20 + 2 if quick else benchmarked.rounds)
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    for _ in range(100):
        steer.value = torch.randn(model.config.n_embd)
        step("patched")
    again, speed = stats["unique_graphs"] - before, times["plain"] / times["patched"]
    what = f"{benchmarked.name}, a step with a static cache, compiled by inductor"
    yield row(f"{what}: without patches / with two", f"{speed:.2f}x", "at least 0.97x", speed >= 0.97)
    yield row(f"{what}: graphs compiled for 100 values", f"{again}", "0", again == 0)


def sections(quick: bool) -> list[Iterator[Row]]:
    return [
        circuits(GPT2_124M, 64, quick),
        secant(GPT2_124M, 64, quick),
        swept(GPT2_124M, 3.5, quick),
        swept(GPT2_SMALL, 8.3, quick),
        swept_heads(GPT2_124M, [0, 3, 6, 9], quick),
        stored(GPT2_124M, ["layers[*].resid_pre", "layers[*].resid_mid", "layers[*].resid_post"], quick),
        compiled(GPT2_SMALL, quick),
        compiled_step(GPT2_SMALL, quick),
    ]


if __name__ == "__main__":
    torch.manual_seed(0)
    report("graphpatch-notebook", __doc__, sections)
