"""What things cost beside the same by hand in plain torch: `python -m tests.benchmarks.limits [--quick]`.

Each row runs in turn with what it is compared with, in one process, on one thread, by the time of the processor. A
context is made and entered anew in each run, as in a loop over patches.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor

from graphpatch_notebook import Patch, PatchableGraph, ProbePatch, RecordPatch, ReplacePatch, ZeroPatch
from graphpatch_notebook.experiments import attribute, attribute_edges, logit_lens
from tests.benchmarks.by_hand import ByHand, hooks
from tests.benchmarks.models import ALL, GPT2_124M, Benchmarked
from tests.benchmarks.ratios import median_times
from tests.benchmarks.report import Row, report, row

Asked: TypeAlias = "tuple[float | None, float | None, float | None]"
"""What is asked of each of `ALL`; `None` where the row is not measured."""


class Limit(NamedTuple):
    """A row.

    Attributes:
        what: Its text.
        asked: The most that `ours` may take, as a multiple of `base`.
        base: What both are compared with: the model alone, unless the row says another thing.
        ours: With this package.
        by_hand: The same as well as it can be done without it; `None` if that is `base`, or unknown.
        cost: One run in forward passes, for the number of rounds.
    """

    what: str
    asked: Asked
    base: Callable[[], Any]
    ours: Callable[[], Any]
    by_hand: Callable[[], Any] | None = None
    cost: float = 1


def corrupted(tokens: Tensor) -> Tensor:
    """The same tokens, but for one."""
    other = tokens.clone()
    other[:, tokens.shape[1] // 2] += 1
    return other


def logit_difference(output: Any) -> Tensor:
    logits = output.logits
    return logits[0, -1, 5] - logits[0, -1, 6]  # type: ignore[no-any-return]


def runs(benchmarked: Benchmarked) -> Iterator[Limit]:
    """Single runs with patches that are made for them."""
    model: Any = benchmarked.build()
    inputs, hand = benchmarked.inputs(), ByHand(benchmarked, model)
    pg = PatchableGraph(model, inputs)
    tensors = [path for path, node in pg.nodes.items() if node.shape is not None and not node.opens]
    outputs = [path for path in tensors if pg.nodes[path].kind == "output"]
    layer = int(benchmarked.attribute_path.split(".")[2])

    def plain() -> Any:
        return model(inputs)

    def patched(kind: type[Patch[Any]], *paths: str) -> Callable[[], Any]:
        def run() -> Any:
            with pg.patch({path: kind() for path in paths}):
                return pg(inputs)

        return run

    def by_hand(work: Callable[[Tensor], Any]) -> Callable[[], Any]:
        return functools.partial(work, inputs)

    output, pattern, streams = (
        f"{benchmarked.module_path}.output",
        f"layers[{layer}].attn.heads[1].pattern",
        "layers[*].resid_post",
    )
    zero = patched(ZeroPatch, output)
    assert torch.equal(zero().logits, hand.zero(inputs))
    assert all(map(torch.equal, pg.record(streams, inputs).values(), hand.streams(inputs)))
    lens = torch.from_numpy(logit_lens(pg, inputs).values).flatten(0, 1)
    found = pg.record(pattern, inputs)[pattern]
    for one, other in (found.flatten(0, -3)[0], ByHand(benchmarked, model).pattern(inputs)), (lens, hand.lens(inputs)):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-4, atol=1e-4)
    yield Limit("without patches", (1.01, 1.01, 1.01), plain, lambda: pg(inputs))
    yield Limit(
        "record one output / by a hook", (1.0, 1.06, 1.02), by_hand(hand.keep_one), patched(RecordPatch, output)
    )
    yield Limit("zero one output / by a hook", (1.0, 1.06, 1.02), by_hand(hand.zero), zero)
    yield Limit("zero an operation inside", (1.03, 1.08, 1.12), plain, patched(ZeroPatch, benchmarked.op_path))
    yield Limit(
        "zero the queries inside attention", (1.03, 1.1, 1.12), plain, patched(ZeroPatch, benchmarked.query_path)
    )
    yield Limit(
        "zero an operation of a layer", (1.03, 1.15, 1.15), plain, patched(ZeroPatch, benchmarked.block_op_path)
    )
    yield Limit(
        "zero an operation of the model itself", (1.03, 1.15, 1.15), plain, patched(ZeroPatch, benchmarked.root_op_path)
    )
    yield Limit(
        f"record the outputs of all {len(outputs)} modules / by hooks",
        (1.0, 1.15, 1.05),
        by_hand(hand.keep_modules),
        patched(RecordPatch, *outputs),
    )
    yield Limit(
        f"record all {len(tensors)} tensors",
        (1.1, 1.6, 1.4),
        plain,
        patched(ProbePatch, *tensors),
        by_hand(hand.keep_everything),
        2,
    )
    yield Limit(
        "record the stream after each layer / by hooks",
        (1.05, 1.05, 1.05),
        by_hand(hand.streams),
        lambda: pg.record(streams, inputs),
    )
    yield Limit(
        "pattern of one head / by hand", (1.0, 1.15, 1.05), by_hand(hand.pattern), lambda: pg.record(pattern, inputs)
    )
    yield Limit(
        "logit lens of all tokens / by hand",
        (1.15, 1.3, 1.2),
        by_hand(hand.lens),
        lambda: logit_lens(pg, inputs),
        None,
        2,
    )
    yield Limit("construct", (1.3, 3, 2.5), plain, lambda: PatchableGraph(model, inputs), None, 6)


def scores(benchmarked: Benchmarked) -> Iterator[Limit]:
    """Scores of nodes and edges, next to one forward and backward of the model, to all of its weights."""
    model: Any = benchmarked.build()
    clean = benchmarked.inputs()
    other = corrupted(clean)
    pg, hand = PatchableGraph(model, clean), ByHand(benchmarked, model)

    def once() -> None:
        logit_difference(model(other)).backward()

    def edges(method: Any) -> Callable[[], Any]:
        return lambda: attribute_edges(pg, logit_difference, clean, other, method=method)

    count = attribute(pg, logit_difference, clean, other).size
    text = "/ forward and backward"
    yield Limit(
        f"scores of all {count:,} nodes {text}",
        (1.3, 2.5, 2),
        once,
        lambda: attribute(pg, logit_difference, clean, other),
        lambda: hand.scores(clean, other, logit_difference),
        6,
    )
    yield Limit(f"scores of all edges {text}", (1.8, 2.5, 2.5), once, edges("gradient"), None, 8)
    yield Limit(f"scores of all edges by the secant {text}", (2.4, 4, 4), once, edges("secant"), None, 15)


def sweeps(benchmarked: Benchmarked) -> Iterator[Limit]:
    """Small sweeps, next to a loop with plain hooks."""
    if benchmarked is GPT2_124M:  # kernels take nearly all of the time there
        return
    model: Any = benchmarked.build()
    clean = benchmarked.inputs(16)
    hand, pg = ByHand(benchmarked, model), PatchableGraph(model, clean)
    yield _positions(hand, pg, clean)
    yield _heads(hand, pg, clean)


def _positions(hand: ByHand, pg: PatchableGraph, clean: Tensor) -> Limit:
    layers = range(len(hand.blocks))
    positions = list(range(0, 16, len(layers)))
    pattern = "transformer.h_{}.mlp.output" if hand.is_gpt2 else "model.layers_{}.mlp.output"
    paths = [pattern.format(layer) for layer in layers]
    values = list(pg.record(paths, corrupted(clean).flip(1)).values())

    def replaced(layer: int, position: int) -> Tensor:
        def replace(_module: Any, _args: Any, output: Tensor) -> Tensor:
            output = output.clone()
            output[:, position] = values[layer][:, position]
            return output

        with hooks([hand.blocks[layer].mlp.register_forward_hook(replace)]):
            return logit_difference(hand.model(clean))

    def loop() -> Tensor:
        return torch.stack([torch.stack([replaced(layer, position) for position in positions]) for layer in layers])

    def patches(layer: int, position: int) -> dict[str, ReplacePatch]:
        at = (slice(None), position)
        return {paths[layer]: ReplacePatch(value=values[layer][at], slice=at)}

    def sweep() -> Any:
        axes = {"layer": layers, "position": positions}
        return pg.sweep(axes, patches, clean, metric=logit_difference, progress=False)

    text = "sweep of 16 cells / a loop with hooks"
    return _checked(Limit(text, (None, 0.25, 0.38), loop, sweep, lambda: hand.sweep(clean, values, positions), 16))


def _heads(hand: ByHand, pg: PatchableGraph, clean: Tensor) -> Limit:
    layers, heads = range(len(hand.blocks)), range(hand.benchmarked.heads)

    def zeroed(layer: int, head: int) -> Tensor:
        _, projection, _ = hand.parts(hand.blocks[layer])

        def zero(_module: Any, args: Any) -> Any:
            z = args[0].clone()
            z.unflatten(-1, (len(heads), -1))[..., head, :] = 0
            return (z,)

        with hooks([projection.register_forward_pre_hook(zero)]):
            return logit_difference(hand.model(clean))

    def loop() -> Tensor:
        return torch.stack([torch.stack([zeroed(layer, head) for head in heads]) for layer in layers])

    def patches(layer: int, head: int) -> dict[str, ZeroPatch]:
        return {f"layers[{layer}].attn.heads[{head}].z": ZeroPatch()}

    def sweep() -> Any:
        return pg.sweep({"layer": layers, "head": heads}, patches, clean, metric=logit_difference, progress=False)

    text, count = f"zero all {len(layers) * len(heads)} heads / a loop with hooks", len(layers) * len(heads)
    return _checked(Limit(text, (None, 0.4, 0.5), loop, sweep, lambda: hand.heads(clean), count))


def _checked(limit: Limit) -> Limit:
    """Checks that all three have the same numbers."""
    expected, found = limit.base(), torch.from_numpy(limit.ours().values)
    assert limit.by_hand is not None
    for one in found, limit.by_hand():
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=2e-5, check_dtype=False)
    return limit


def rows(benchmarked: Benchmarked, quick: bool) -> Iterator[Row]:
    """The rows of one model."""
    number = ALL.index(benchmarked)
    for part in (runs, sweeps, scores):
        with torch.set_grad_enabled(part is scores):
            for limit in part(benchmarked):
                asked, works = limit.asked[number], {"base": limit.base, "ours": limit.ours}
                if limit.by_hand is not None:
                    works["by hand"] = limit.by_hand
                rounds = max(3, int(benchmarked.rounds / limit.cost)) // (5 if quick else 1) + 1
                times = median_times(works, rounds)
                found = {name: seconds / times["base"] for name, seconds in times.items()}
                text = f"{found['ours']:.2f}" + (f" (by hand {found['by hand']:.2f})" if "by hand" in found else "")
                holds = asked is None or round(found["ours"], 2) <= asked
                yield row(f"{benchmarked.name}: {limit.what}", text, "" if asked is None else f"{asked:g}", holds)


def files(benchmarked: Benchmarked, quick: bool) -> Iterator[Row]:
    """Saving and loading."""
    model: Any = benchmarked.build()
    inputs = benchmarked.inputs()
    pg = PatchableGraph(model, inputs, use_cache=False)  # files have no graphs of code that uses caches
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        file = Path(folder) / "graph"
        pg.save(file)
        loaded = PatchableGraph.load(file)
        works = {
            "save": lambda: pg.save(file), "weights": lambda: save_file(weights, Path(folder) / "weights"),
            "load": lambda: PatchableGraph.load(file),
        }  # fmt: skip
        times = median_times(works, 3 if quick else 15)
        ran = {"plain": lambda: model(inputs, use_cache=False), "loaded": lambda: loaded(inputs, use_cache=False)}
        found = median_times(ran, benchmarked.rounds // (5 if quick else 1))
    shown, ratio = {name: 1000 * seconds for name, seconds in times.items()}, found["loaded"] / found["plain"]
    name = benchmarked.name
    yield row(
        f"{name}: save, ms",
        f"{shown['save']:.0f} (the weights alone {shown['weights']:.0f})",
        "30",
        shown["save"] <= 30,
    )
    yield row(f"{name}: load, ms", f"{shown['load']:.0f}", "10", shown["load"] <= 10)
    yield row(f"{name}: a loaded graph runs", f"{ratio:.2f}", "1.05", round(ratio, 2) <= 1.05)


_FRESH = """
import json, time
import torch
from tests.benchmarks.models import GPT2_SMALL
torch.set_num_threads(1)
def memory():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
def timed(work):
    begin, before = time.process_time(), memory()
    work()
    return 1000 * (time.process_time() - begin), memory() - before
model, inputs = GPT2_SMALL.build(), GPT2_SMALL.inputs(16)
found = {}
def patch():
    global pg
    from graphpatch_notebook import PatchableGraph, ZeroPatch
    pg = PatchableGraph(model, inputs)
    with pg.patch({"transformer.h_1.mlp.output": ZeroPatch()}):
        pg(inputs)
def sweep():
    from graphpatch_notebook import ZeroPatch
    pg.sweep({"layer": range(4), "position": range(16)},
             lambda layer, position: {f"transformer.h_{layer}.mlp.output": ZeroPatch(slice=(0, position))}, inputs,
             metric=lambda output: output.logits[0, -1, 5] - output.logits[0, -1, 6], progress=False)
with torch.no_grad():
    model(inputs), model(inputs)
    forward, _ = timed(lambda: model(inputs))
    first_patch, _ = timed(patch)
    first, most = timed(sweep)
    later, _ = timed(sweep)
print(json.dumps([first_patch - forward, first - later, most]))
"""


def fresh(quick: bool) -> Iterator[Row]:
    """The first patch and the first sweep of a process, in new ones, from bytecode that is compiled."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "HF_HUB_OFFLINE": "1"}

    def measured() -> list[float]:
        command = [sys.executable, "-c", _FRESH]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    measured()  # compiles the bytecode
    each = zip(*(measured() for _ in range(1 if quick else 5)), strict=True)
    patch, first, memory = map(statistics.median, each)
    yield row("first patch of a process, beyond torch and the model, ms", f"{patch:.0f}", "80", patch <= 80)
    yield row("first sweep of a process, beyond a later one, ms", f"{first:.0f}", "80", first <= 80)
    yield row("memory of a first sweep, MiB", f"{memory:.0f}", "10", memory <= 10)


def sections(quick: bool) -> list[Iterator[Row]]:
    by_model = [rows(benchmarked, quick) for benchmarked in ALL]
    return [fresh(quick), *by_model, *(files(benchmarked, quick) for benchmarked in ALL[1:])]


if __name__ == "__main__":
    report("graphpatch-notebook beside plain torch", __doc__, sections)
