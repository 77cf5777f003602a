"""Files of saved graphs: written, read back, and rewritten by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from tests.zoo.submodules import Submodules

KEY = "graphpatch_notebook"


def reloaded(pg: PatchableGraph, folder: Path, *, allow: Iterable[str] = (), **save: Any) -> PatchableGraph:
    """Returns what comes back of `pg` from a file."""
    pg.save(folder / "graph.safetensors", **save)
    return PatchableGraph.load(folder / "graph.safetensors", allow=allow)


def read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the document and the tensors of a file, without the package."""
    with safe_open(file, framework="pt") as opened:
        names = opened.keys()
        return json.loads(opened.metadata()[KEY]), {name: opened.get_tensor(name) for name in names}


def write(file: Path, document: Any, tensors: dict[str, Tensor]) -> Path:
    """Writes a document, or any text in its place."""
    text = document if isinstance(document, str) else json.dumps(document)
    save_file(tensors, file, metadata={KEY: text})
    return file


def rewritten(file: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Returns another file, whose document was changed in place, or is what `change` returns."""
    document, tensors = read(file)
    changed = change(document)
    return write(file.with_name("changed.safetensors"), document if changed is None else changed, tensors)


class Mlp(nn.Module):
    """A small model with a submodule, a buffer, and an optional input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("scale", torch.linspace(1, 2, 8))

    def forward(self, x: Tensor, shift: float = 0.0, mask: Tensor | None = None) -> Tensor:
        hidden = torch.relu(self.up(x)) * self.scale
        if mask is not None:
            hidden = hidden * mask[:, None]
        return self.down(hidden) + shift


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)), generator=torch.Generator().manual_seed(0))


class Numpy(Submodules, inner=(4, 4)):
    """Goes through numpy, which no graph sees, and calls a module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.from_numpy(x.detach().numpy() * 2))


class Outer(nn.Module):
    """Has a submodule that can be stored, and one that is given."""

    def __init__(self, opaque: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.opaque = nn.Linear(4, 4), nn.Linear(4, 2), opaque

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.opaque(torch.tanh(self.first(x)))
        return self.second(hidden)
