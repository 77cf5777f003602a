"""A model whose names and keys mean something to paths, Python, rich, HTML and terminals."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from graphpatch_notebook import ExtractionOptions, PatchableGraph
from tests.zoo.submodules import Submodules, copies

KEYS = [
    "plain",
    "a.b",
    'quo"te',
    "it's",
    "two words",
    "bar|bar",
    "[red]rich[/red]",
    "<img src=x onerror=alert(1)>",
    "line\nbreak",
    "\x1b[31mansi\x1b[0m",
    "back\\slash",
    "größe",
    "lambda",
    "名前",
]


class Hostile(
    Submodules, blocks=copies((2, 2), 3), norm=partial(nn.BatchNorm1d, 2), skipped=[(2, 3), nn.ReLU], never=(2, 2)
):
    def forward(self, x: Tensor, scale: float = 2.0, mask: Tensor | None = None) -> dict[str, object]:
        for block in self.blocks:
            x = torch.relu(block(x)) * scale
        x = self.norm(x)
        rows, size = x.shape
        largest = self.skipped(x.view(rows, size))
        return {key: x + number for number, key in enumerate(KEYS)} | {"inner": ({"deep.est": largest}, 5)}


def hostile_graph() -> PatchableGraph:
    options = ExtractionOptions(classes_to_skip_compiling={nn.Sequential})
    return PatchableGraph(Hostile().eval(), options, torch.ones(4, 2))
