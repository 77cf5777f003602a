"""Small models for the tests of graph modules, and how to make a hierarchy of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphpatch_notebook.capture import capture
from graphpatch_notebook.graphs import GraphModule, build_hierarchy
from graphpatch_notebook.options import ExtractionOptions
from tests.zoo.submodules import Submodules


def graph_module(module: nn.Module, *args: Any, options: ExtractionOptions | None = None, **kwargs: Any) -> GraphModule:
    """The hierarchy of graph modules of `module`, captured on these inputs."""
    return build_hierarchy(capture(module, options or ExtractionOptions(), args, kwargs))


def settle(module: GraphModule, *args: Any, **kwargs: Any) -> None:
    """Calls a graph module until what it runs for such inputs is known."""
    for _ in range(3):
        module(*args, **kwargs)


class Layer(Submodules, linear=(4, 4)):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = torch.relu(self.linear(x)) * scale
        return x + hidden


class Layers(nn.Module):
    """Equal layers in a `ModuleList`, a plain list, an attribute that is not called, and one never reached."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Layer() for _ in range(3))
        self.plain = [Layer()]
        self.norms = nn.ModuleDict({"before": nn.LayerNorm(4), "after": nn.LayerNorm(4)})
        self.dropout = nn.Dropout()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms["before"](x)
        for layer in (*self.h, *self.plain):
            x = layer(x)
        return self.norms["after"](x) * self.factor


class Normed(
    Submodules, norm=partial(nn.BatchNorm1d, 4), dropout=partial(nn.Dropout, 0.5), count=lambda: torch.zeros(())
):
    """Buffers that are updated, dropout, and an in-place op."""

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.dropout(self.norm(x)).relu_() * self.count
