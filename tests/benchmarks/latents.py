"""How scores of SAE latents agree with patching, on the two shipped models: `python -m tests.benchmarks.latents`.

For the stream after each layer but the last, two small SAEs are trained, in a minute. The effect of a latent is that of
its clean value in the corrupted run, at all positions. It takes seven minutes on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ReplacePatch
from graphpatch_notebook.experiments import attribute
from tests.benchmarks.attribution import SEED, pearson, printed
from tests.benchmarks.attribution_tasks import EXAMPLES, Pairs, load

TASKS = ("induction", "indirect_objects")
METHODS: dict[str, dict[str, Any]] = {
    "gradient": {"method": "gradient"},
    "integrated": {"method": "integrated"},
    "secant": {"method": "secant"},
    "secant, one-sided": {"method": "secant", "one_sided": True},
}
LATENTS, ACTIVE, STEPS, L1 = 256, 16, 3000, 0.015
SIZES = (10, 20)
"""How many latents, the best first, are restored together."""


class SparseAutoencoder(nn.Module):
    """An SAE that keeps the `active` largest latents, or all positive ones."""

    def __init__(self, size: int, scale: Tensor, active: int | None) -> None:
        super().__init__()
        self.up, self.down, self.scale, self.active = nn.Linear(size, LATENTS), nn.Linear(LATENTS, size), scale, active
        with torch.no_grad():
            self.up.weight.copy_(self.down.weight.T)

    def encode(self, value: Tensor) -> Tensor:
        latents = torch.relu(self.up(value / self.scale - self.down.bias))
        if self.active is None:
            return latents
        values, at = latents.topk(self.active, -1)
        return torch.zeros_like(latents).scatter(-1, at, values)

    def decode(self, latents: Tensor) -> Tensor:
        return self.down(latents) * self.scale


def trained(values: Tensor, active: int | None) -> SparseAutoencoder:
    torch.manual_seed(0)
    sae = SparseAutoencoder(values.shape[1], values.square().mean().sqrt(), active)
    optimizer = torch.optim.Adam(sae.parameters(), 1e-3)
    for _ in range(STEPS):
        drawn = values[torch.randint(0, len(values), (512,))]
        latents = sae.encode(drawn)
        error = ((drawn - sae.decode(latents)) / sae.scale).square().sum(-1).mean()
        loss = error + (L1 * latents.sum(-1).mean() if active is None else 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            sae.down.weight.div_(sae.down.weight.norm(dim=0, keepdim=True))
    return sae.requires_grad_(False)


def restored(pg: PatchableGraph, name: str, pair: Pairs, clean: Tensor, numbers: Any) -> float:
    """Returns how much clean values of latents in the corrupted run change the metric."""
    given = {"input_ids": pair.corrupted}
    with torch.no_grad(), pg.patch({name: ReplacePatch(value=clean[..., numbers], slice=(..., numbers))}):
        return (pair.metric(pg(**given)) - pair.metric(pg._module(**given))).item()


def table(pg: PatchableGraph, pairs: Pairs, name: str) -> dict[str, list[float]]:
    """Returns by method: Pearson with patching, the sum of the scores, and the effect of the best latents together.

    The last are in parts of the change of the metric. The row of patching itself is the last one.
    """
    scores: dict[str, list[np.ndarray]] = {method: [] for method in (*METHODS, "patching each")}
    best: dict[str, list[list[float]]] = {method: [] for method in scores}
    changes = []
    for row in range(len(pairs.clean)):
        pair = pairs[row : row + 1]
        clean, corrupted = {"input_ids": pair.clean}, {"input_ids": pair.corrupted}
        with torch.no_grad():
            own, other = (pg.record(name, **given)[name] for given in (clean, corrupted))
            changes.append((pair.metric(pg(**clean)) - pair.metric(pg(**corrupted))).item())
        differing = (own != other).any(1)[0].nonzero().flatten().tolist()
        found = {
            method: np.ravel(attribute(pg, pair.metric, clean, corrupted, paths=f"{name}[*]", **options))[differing]
            for method, options in METHODS.items()
        }
        found["patching each"] = np.array([restored(pg, name, pair, own, [number]) for number in differing])
        for method, each in found.items():
            order = [differing[number] for number in np.argsort(-each)]
            scores[method].append(each)
            best[method].append([restored(pg, name, pair, own, order[:size]) / changes[-1] for size in SIZES])
    truth = np.concatenate(scores["patching each"])
    return {
        method: [
            pearson(np.concatenate(found), truth),
            sum(each.sum() for each in found) / sum(changes),
            *np.mean(best[method], axis=0),
        ]
        for method, found in scores.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of inputs for each task")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, found = Console(width=100), []
    for name in TASKS:
        task, model = load(name, Path(EXAMPLES))
        pairs = task.pairs(options.pairs, torch.Generator().manual_seed(SEED))
        pg = PatchableGraph(model.eval(), input_ids=pairs.clean)
        inputs = task.examples(600, torch.Generator().manual_seed(1))[0]
        for layer in range(pg.components.layers[""] - 1):
            place = f"layers[{layer}].resid_post"
            with torch.no_grad():
                values = torch.cat([pg.record(place, input_ids=ids)[place].flatten(0, 1) for ids in inputs.split(100)])
            for active in (None, ACTIVE):
                sae = trained(values, active)
                found.append(table(pg.splice({place: sae}), pairs, f"{place}.sae.latents"))
                kind = f"{(sae.encode(values) > 0).float().sum(-1).mean():.0f} of {LATENTS} latents active"
                columns = ["method", "Pearson", "sum", *(f"best {size}" for size in SIZES)]
                console.print(printed(f"{name}, {place}, {kind}", columns, found[-1].items()))
    for method in found[0]:
        numbers = np.array([each[method] for each in found])
        mean, worst = numbers.mean(0), numbers.min(0)
        text = "  ".join(f"{one:.2f} [{other:.2f}]" for one, other in zip(mean, worst, strict=True))
        console.print(f"{method:20}{text}", markup=False)


if __name__ == "__main__":
    main()
