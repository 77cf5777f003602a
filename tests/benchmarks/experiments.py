"""What experiments cost, as multiples of plain torch: `python -m tests.benchmarks.experiments [--quick]`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ProbePatch, ReplacePatch
from graphpatch_notebook.experiments import attribute, attribute_edges, circuit, circuit_patches
from graphpatch_notebook.experiments.attribution.rules import Method
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

    rounds = benchmarked.rounds // 20 + 2 if quick else benchmarked.rounds // 3
    times = median_times({"once": forward_and_backward, "attribute": attributed}, rounds)
    found, count = times["attribute"] / times["once"], attribute(pg, logit_difference, clean, other).size
    what = f"{benchmarked.name}, {length} tokens: scores of all {count:,} nodes / one forward and backward"
    yield row(what, f"{found:.2f}x of {1000 * times['once']:.1f} ms", "at most 4x", found <= 4)


def edges(benchmarked: Benchmarked, length: int, quick: bool) -> Iterator[Row]:
    """All edges between components, and a run as a circuit of all of them, next to a forward without gradients."""
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

    works = {
        "gradient": (5.0, lambda: attribute_edges(pg, logit_difference, clean, other)),
        "secant": (7.0, lambda: attribute_edges(pg, logit_difference, clean, other, method="secant")),
        "a run as a circuit": (2.5, run),
    }
    rounds = benchmarked.rounds // 20 + 2 if quick else benchmarked.rounds // 3
    times = median_times({"once": forward, **{name: work for name, (_, work) in works.items()}}, rounds)
    for name, (bound, _) in works.items():
        found = times[name] / times["once"]
        what = f"{benchmarked.name}, {length} tokens, {count:,} edges: {name} / one forward"
        yield row(what, f"{found:.2f}x of {1000 * times['once']:.1f} ms", f"at most {bound:g}x", found <= bound)


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
    times = median_times(works, rounds, clock=time.process_time)
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

    rounds = 1 if quick else 3 if benchmarked is GPT2_124M else 25
    times = median_times({"loop": loop, "sweep": sweep, "alone": lambda: sweep(None)}, rounds)
    found = times["loop"] / times["sweep"]
    expected = loop()
    error = (torch.from_numpy(sweep().values) - expected).abs().max().item()
    exact = (torch.from_numpy(sweep(None).values) - expected).abs().max().item()
    what = f"{benchmarked.name}, {len(blocks)} layers x {positions} positions"
    yield row(f"{what}: a loop with plain hooks / the sweep", f"{found:.2f}x", f"at least {bound}x", found >= bound)
    yield row(f"{what}: largest difference", f"{error:.1e}", "at most 2e-6", error <= 2e-6)
    yield row(f"{what}: the loop / the sweep with batch=None", f"{times['loop'] / times['alone']:.2f}x", "", True)
    yield row(f"{what}: largest difference with batch=None", f"{exact:.1e}", "0", exact == 0)


def sections(quick: bool) -> list[Iterator[Row]]:
    return [
        *(attribution(benchmarked, length, quick) for benchmarked in (GPT2_124M, GPT2_SMALL) for length in (16, 32)),
        edges(GPT2_124M, 64, quick),
        secant(GPT2_124M, 64, quick),
        swept(GPT2_124M, 3.5, quick),
        swept(GPT2_SMALL, 8, quick),
    ]


if __name__ == "__main__":
    torch.manual_seed(0)
    report("graphpatch-notebook", __doc__, sections)
