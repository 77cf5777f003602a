"""How costs grow with the model: `python -m tests.benchmarks.scale [--quick]`; writes `docs/_static/scale.svg`.

Calls of functions (of Python and C) are counted: they are the same on a busy machine, and next to a small model they
are what patching costs.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphpatch_notebook import PatchableGraph, ProbePatch
from tests.benchmarks.report import Row, report, row

SIZES: dict[str, tuple[int, ...]] = {
    "layers": (4, 8, 16, 32, 64, 128),
    "width": (64, 128, 256, 512, 1024),
    "sequence": (16, 64, 256, 1024, 2048),
    "batch": (1, 4, 16, 64, 128),
}
PLOT = Path(__file__).parents[2] / "docs" / "_static" / "scale.svg"


class Cost(NamedTuple):
    """What one model costs.

    Attributes:
        one: Calls to enter a new context with one probe on an operation, run in it and leave it, beyond the forward's.
        further: Calls for each further layer whose operation is probed, in the same way.
        node: Calls to capture the model, by node, beyond the forward's.
        kept: Bytes that the capture keeps, by node.
    """

    one: float
    further: float
    node: float
    kept: float


MOST = Cost(600, 350, 200, 1000)


def calls(work: Callable[[], object]) -> int:
    """Returns how many calls of functions `work` makes, when it runs again."""
    work()
    profile = cProfile.Profile()
    profile.runcall(work)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@torch.no_grad()
def cost(layers: int = 4, width: int = 64, sequence: int = 16, batch: int = 1) -> Cost:
    """Measures a GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_layer": layers, "n_embd": width, "n_head": 4, "n_positions": max(1024, sequence)}
    model = GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=256, bos_token_id=0, eos_token_id=0)).eval()
    inputs = torch.zeros(batch, sequence, dtype=torch.long)
    pg = PatchableGraph(model, inputs)
    count = len(pg.nodes)

    def probed(number: int) -> None:
        with pg.patch({f"transformer.h_{layer}.mlp.act.mul_3": ProbePatch() for layer in range(number)}):
            pg(inputs)

    forward, one, all_layers = calls(lambda: model(inputs)), calls(lambda: probed(1)), calls(lambda: probed(layers))
    captured = calls(lambda: PatchableGraph(model, inputs))
    gc.collect()
    tracemalloc.start()
    pg = PatchableGraph(model, inputs)
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return Cost(one - forward, (all_layers - one) / (layers - 1), (captured - forward) / count, kept / count)


def grown(name: str, sizes: tuple[int, ...], found: dict[str, list[Cost]]) -> Iterator[Row]:
    for size in sizes:
        here = cost(**{name: size})
        found.setdefault(name, []).append(here)
        what = f"{here.one:.0f} for one patch, {here.further:.0f} for each further one, {here.node:.0f} a node"
        holds = all(value <= most for value, most in zip(here, MOST, strict=True))
        yield row(f"{name} {size}: calls; bytes kept a node", f"{what}; {here.kept:.0f}", _limits(), holds)


def _limits() -> str:
    return f"at most {MOST.one:g}, {MOST.further:g}, {MOST.node:g}; {MOST.kept:g}"


def plot(found: dict[str, list[Cost]]) -> None:
    """Draws what was found: one line for each size that grows, from its smallest value on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {"svg.hashsalt": "scale", "svg.fonttype": "none", "font.size": 8}
    titles = "calls for one patch", "calls for a further patch", "calls to capture a node", "bytes kept a node"
    figure, panels = pyplot.subplots(1, 4, figsize=(9.5, 2.3), layout="constrained")
    for panel, title, field in zip(panels, titles, Cost._fields, strict=True):
        for name, costs in found.items():
            growth = [size / SIZES[name][0] for size in SIZES[name][: len(costs)]]
            panel.plot(growth, [getattr(each, field) for each in costs], marker=".", linewidth=1, label=name)
        panel.set(title=title, xlabel="times as large", xscale="log", ylim=(0, getattr(MOST, field)))
        panel.minorticks_off()
    panels[0].legend(frameon=False)
    figure.savefig(PLOT, metadata={"Date": None})


def without_weights() -> Iterator[Row]:
    """The largest open models, captured and browsed on the meta device."""
    from transformers import DeepseekV3Config, LlamaConfig

    llama = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
    configs = {
        "Llama 405B": LlamaConfig(**llama, num_key_value_heads=8, vocab_size=128256),
        "DeepSeek-V3 671B": DeepseekV3Config(),
    }
    for name, config in configs.items():
        begin = time.process_time()
        pg = PatchableGraph.from_config(config, input_ids=torch.arange(8)[None])
        captured = time.process_time() - begin
        begin = time.process_time()
        pg.browse().close()
        browsed = time.process_time() - begin
        what = f"{name} without weights, {config.num_hidden_layers} layers, {len(pg.nodes):,} nodes: seconds to"
        yield row(f"{what} capture", f"{captured:.1f}", "at most 10", captured <= 10)
        yield row(f"{what} browse", f"{browsed:.1f}", "at most 3", browsed <= 3)


def sections(quick: bool) -> Iterator[Iterator[Row]]:
    found: dict[str, list[Cost]] = {}
    yield without_weights()
    for name, sizes in SIZES.items():
        yield grown(name, sizes[:3] if quick else sizes, found)
    if not quick and len(found) == len(SIZES):
        plot(found)


if __name__ == "__main__":
    report("graphpatch-notebook: growth", __doc__, sections)
