"""Law 18: a name means the same value in every process, whatever order Python iterates over sets in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ProbePatch

KINDS = {"full", "local", "sliding", "chunk8", "all"}


class Rotary(nn.Module):
    def forward(self, x: Tensor, scale: float, kind: str) -> Tensor:
        return x * len(kind) * scale


class Turn(nn.Module):
    def forward(self, x: Tensor, table: Tensor | float) -> Tensor:
        return x * table


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.linear, self.turn = Rotary(), nn.Linear(3, 3), Turn()
        for number, kind in enumerate(sorted(KINDS)):
            self.register_buffer(f"of_{kind}", torch.full((3,), number + 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.rotary(x, 2.0, "dense-in-all")
        by_kind = {kind: self.rotary(x, 1.0, kind=kind) for kind in set(KINDS)}
        by_table = {kind: self.turn(x, table=getattr(self, f"of_{kind}")) for kind in set(KINDS)}
        by_number = {kind: self.turn(x, len(kind) * ord(kind[0])) for kind in set(KINDS)}
        last = self.rotary(x, 0.5, "no")
        return last + sum(by_kind[kind] + by_table[kind] + by_number[kind] for kind in sorted(KINDS))


torch.manual_seed(0)
pg, x = PatchableGraph(Model(), torch.ones(2, 3)), torch.ones(2, 3)
probes = {path: ProbePatch() for path in pg.nodes if path.startswith(("rotary_", "turn_")) and path.endswith(".output")}
with torch.no_grad(), pg.patch(probes):
    pg(x)
print("order:", list(KINDS))
for path in sorted(probes):
    print(path, probes[path].activation.sum().item())
"""


def test_names_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    outputs = [
        subprocess.run(
            [sys.executable, str(tmp_path / "script.py")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in "01"
    ]
    orders, values = {lines[0] for lines in outputs}, {tuple(lines[1:]) for lines in outputs}
    assert len(orders) > 1, "the set has one order"
    assert len(values) == 1
    (found,) = values
    for name, count in ("rotary", 7), ("turn", 10):
        values = {line.split(".")[0]: line.split()[1] for line in found if line.startswith(name)}
        assert values.keys() == {f"{name}_{number}" for number in range(count)}
        assert len(set(values.values())) == count
