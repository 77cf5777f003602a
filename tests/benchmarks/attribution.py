"""How close attribution comes to patching, on small models trained on six tasks: `hatch run attribution-benchmark`.

The truth is computed by patching: for each node, pair of inputs, position and head, and for each edge. Models that are
not shipped are trained first, in about twenty minutes; they are kept in build/.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from graphpatch_notebook import PatchableGraph, ReplacePatch
from graphpatch_notebook.experiments import attribute, attribute_edges, faithfulness
from tests.benchmarks.attribution_tasks import EXAMPLES, TASKS, Pairs, load

METHODS = ("gradient", "integrated", "secant")
ONE_SIDED, MEAN = "secant, one-sided", "gradient + secant"
DIRECTIONS = ("clean into corrupted", "mean of both directions")
KINDS = {
    "residual": "layers[*].resid_pre",
    "attention": "layers[*].attn_out",
    "MLP": "layers[*].mlp_out",
    "heads": "layers[*].attn.heads[*].z",
}
FAITHFUL = 0.9
SEED = 77


@torch.no_grad()
def exact_effects(pg: PatchableGraph, pairs: Pairs, source: Tensor, into: Tensor, names: Sequence[str]) -> np.ndarray:
    """Returns what each value of one run does in the other, (name, pair, position); NaN where both runs agree."""
    given, own = (dict(pg.record(list(names), input_ids=tokens)) for tokens in (source, into))
    before = pairs.differences(pg(input_ids=into).logits)
    rows, positions = into.shape
    effects = np.full((len(names), rows, positions), np.nan)
    for number, name in enumerate(names):
        differs = (given[name] != own[name]).reshape(rows, positions, -1).any(-1)
        for position in range(positions):
            if not differs[:, position].any():
                continue
            at = (slice(None), position)
            with pg.patch({name: ReplacePatch(value=given[name][at], slice=at)}):
                after = pairs.differences(pg(input_ids=into).logits)
            found = torch.where(differs[:, position], after - before, torch.nan)
            effects[number, :, position] = found.numpy()
    return effects


def estimated_effects(pg: PatchableGraph, pairs: Pairs, names: Sequence[str], method: str) -> np.ndarray:
    """Returns the scores of a method, for each pair alone, (name, pair, position)."""
    found = []
    options = {"method": "secant", "one_sided": True} if method == ONE_SIDED else {"method": method}
    for row in range(len(pairs.clean)):
        one = pairs[row : row + 1]
        clean, corrupted = {"input_ids": one.clean}, {"input_ids": one.corrupted}
        scores = attribute(pg, one.metric, clean, corrupted, paths=list(names), positions=True, **options)
        found.append(scores.transpose("path", "position").values)
    return np.stack(found, axis=1)


def pearson(estimate: np.ndarray, truth: np.ndarray) -> float:
    known = np.isfinite(truth) & np.isfinite(estimate)
    return float(np.corrcoef(estimate[known], truth[known])[0, 1])


def node_tables(pg: PatchableGraph, pairs: Pairs) -> list[dict[str, list[float]]]:
    """Returns the correlation with patching by method, for each kind of node: a table for each of `DIRECTIONS`."""
    by_kind = {kind: [one.name for one in pg.components.lookup(pattern)] for kind, pattern in KINDS.items()}
    names = [name for kind in by_kind.values() for name in kind]
    there = exact_effects(pg, pairs, pairs.clean, pairs.corrupted, names)
    back = -exact_effects(pg, pairs, pairs.corrupted, pairs.clean, names)
    estimates = {method: estimated_effects(pg, pairs, names, method) for method in (*METHODS, ONE_SIDED)}
    estimates[MEAN] = (estimates["gradient"] + estimates["secant"]) / 2
    places = {kind: [names.index(name) for name in group] for kind, group in by_kind.items()}
    return [
        {
            method: [pearson(estimate[rows], truth[rows]) for rows in places.values()]
            for method, estimate in (*estimates.items(), ("the other direction", back))
        }
        for truth in (there, (there + back) / 2)
    ]


def edge_table(pg: PatchableGraph, pairs: Pairs) -> dict[str, list[float]]:
    """Returns the correlation with patching of edges by method, and how many edges are needed for `FAITHFUL`."""
    clean, corrupted = {"input_ids": pairs.clean}, {"input_ids": pairs.corrupted}
    scores = {method: attribute_edges(pg, pairs.metric, clean, corrupted, method=method) for method in METHODS}
    scores[ONE_SIDED] = attribute_edges(pg, pairs.metric, clean, corrupted, method="secant", one_sided=True)
    scores["exact"] = attribute_edges(pg, pairs.metric, clean, corrupted, method="exact")
    truth = scores["exact"].values
    count = int(np.isfinite(truth).sum())
    sizes = sorted({round(count ** (step / 24)) for step in range(25)})
    curves = faithfulness(pg, scores, pairs.metric, clean, corrupted, sizes=sizes).faithfulness
    table = {}
    for method in (*scores, "random"):
        needed = [size for size in sizes if curves.sel(ranking=method, size=size) >= FAITHFUL]
        fit = pearson(scores[method].values, truth) if method in scores else np.nan
        table[method] = [fit, needed[0] if needed else np.nan, count]
    return table


def printed(title: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[float]]]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    for name, numbers in rows:
        texts = [f"{number:.0f}" if abs(number) > 1.5 else f"{number:.2f}" for number in numbers]
        table.add_row(name, *("" if text == "nan" else text for text in texts))
    return table


def summary(tables: Sequence[dict[str, list[float]]]) -> Iterable[tuple[str, str]]:
    """Yields each method with the mean and the worst correlation over the tasks, for each kind of node."""
    for method in tables[0]:
        numbers = np.array([table[method] for table in tables])
        yield (
            method,
            "  ".join(f"{mean:.2f} [{worst:.2f}]" for mean, worst in zip(numbers.mean(0), numbers.min(0), strict=True)),
        )


def costs(rounds: int = 5) -> dict[str, float]:
    """Returns how many forwards of GPT-2 124M with 64 tokens scores take, in processor time: medians of turns."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval().requires_grad_(False)
    clean, corrupted = torch.randint(0, 50257, (2, 1, 64), generator=torch.Generator().manual_seed(SEED))
    pg = PatchableGraph(model, clean)
    paths = [one.name for pattern in KINDS.values() for one in pg.components.lookup(pattern)]

    def metric(output: Any) -> Tensor:
        return output.logits[0, -1, 3] - output.logits[0, -1, 5]

    runs: dict[str, Callable[[], Any]] = {"forward": torch.no_grad()(lambda: model(clean))}
    for method in METHODS[0], METHODS[2]:
        runs[method] = partial(attribute, pg, metric, clean, corrupted, paths=paths, method=method)
        runs[f"edges, {method}"] = partial(attribute_edges, pg, metric, clean, corrupted, method=method)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):  # the first finds the components
        for name, run in runs.items():
            began = time.process_time()
            run()
            times[name].append(time.process_time() - began)
    forward = np.median(times.pop("forward")[1:])
    return {name: float(np.median(found[1:]) / forward) for name, found in times.items()}


def against_what_was_asked(
    nodes: Sequence[dict[str, list[float]]], edges: Sequence[dict[str, list[float]]]
) -> Iterable[tuple[str, float, str, float]]:
    """Yields what was measured, the number, `>=` or `<=`, and the number that was asked for."""
    kinds = np.array([table["secant"] for table in nodes])
    yield "secant, residual stream, worst task", kinds[:, 0].min(), ">=", 0.98
    yield "secant, attention, mean", kinds[:, 1].mean(), ">=", 0.92
    yield "secant, MLP, mean", kinds[:, 2].mean(), ">=", 0.92
    needed = max(table["secant"][1] / table["integrated"][1] for table in edges)
    yield f"secant, edges for {FAITHFUL}, in those of integrated, worst task", needed, "<=", 1.0
    found = costs()
    yield "secant, cost in that of gradient", found["secant"] / found["gradient"], "<=", 1.3
    yield "edges, gradient, cost in forwards", found["edges, gradient"], "<=", 5
    yield "edges, secant, cost in forwards", found["edges, secant"], "<=", 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--pairs", type=int, default=12, help="pairs of inputs for each task")
    parser.add_argument("--models", type=Path, default=EXAMPLES.parent / "build/attribution_models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=100)
    nodes: list[list[dict[str, list[float]]]] = []
    edges: list[dict[str, list[float]]] = []
    for name in options.tasks:
        began = time.perf_counter()
        task, model = load(name, options.models)
        pairs = task.pairs(options.pairs, torch.Generator().manual_seed(SEED))
        pg = PatchableGraph(model, input_ids=pairs.clean)
        nodes.append(node_tables(pg, pairs))
        for direction, found in zip(DIRECTIONS, nodes[-1], strict=True):
            console.print(printed(f"{name}: Pearson with patching, {direction}", ["method", *KINDS], found.items()))
        columns = ["ranking", "Pearson with patching", f"edges for {FAITHFUL}", "of"]
        edges.append(edge_table(pg, pairs))
        console.print(printed(f"{name}: edges", columns, edges[-1].items()))
        console.print(f"{time.perf_counter() - began:.0f} s\n")
    for direction, tables in zip(DIRECTIONS, zip(*nodes, strict=True), strict=True):
        console.print(f"mean [worst] over {len(nodes)} tasks, {direction}: {', '.join(KINDS)}", markup=False)
        for method, text in summary(tables):
            console.print(f"{method:20}{text}", markup=False)
    there = [tables[0] for tables in nodes]
    for what, number, relation, asked in against_what_was_asked(there, edges):
        holds = number >= asked if relation == ">=" else number <= asked
        mark = "holds" if holds else "does not hold"
        console.print(f"{what}: {number:.2f}, asked {relation} {asked}: {mark}", markup=False)


if __name__ == "__main__":
    main()
