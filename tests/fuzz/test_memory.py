"""Law 13 at length: hundreds of patched runs, and many graphs, keep no more than plain hooks do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import gc, json, pathlib
import torch
from torch import nn
from graphpatch_notebook import AddPatch, PatchableGraph, ProbePatch, ZeroPatch

torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        return x + self.down(hidden)

model = nn.Sequential(*(Block() for _ in range(4)))
x = torch.ones(16, 32)
pg = PatchableGraph(model, x)
probe = ProbePatch()
PATCHES = {
    "sub_0.hidden": ZeroPatch(slice=0),
    "sub_1.output": [AddPatch(value=1.0), probe],
    "sub_2.up.weight": AddPatch(value=0.1),
}

def patched():
    with pg.patch(PATCHES):
        pg(x)

def hooked():
    kept = []
    def zero(module, args, output):
        output = output.clone()
        output[0] = 0
        return output
    def add(module, args, output):
        kept.append(output + 1)
        return kept[-1]
    handles = [model[0].up.register_forward_hook(zero), model[1].register_forward_hook(add)]
    model(x)
    for handle in handles:
        handle.remove()

def resident():
    told = pathlib.Path("/proc/self/statm")  # Linux has it; elsewhere objects and tensors are counted only
    return int(told.read_text().split()[1]) * 4096 if told.exists() else 0

def counts():
    gc.collect()
    objects = gc.get_objects()
    return [len(objects), sum(isinstance(o, torch.Tensor) for o in objects), resident()]

def in_one_context(n):
    with pg.patch(PATCHES):
        for _ in range(n):
            pg(x)

def repeated(action):
    def run(n):
        for _ in range(n):
            action()

    return run

ACTIONS = {
    "forwards by hooks": (repeated(hooked), 250),
    "forwards by patches": (repeated(patched), 250),
    "forwards in one context": (in_one_context, 250),
    "constructions": (repeated(lambda: PatchableGraph(model, x)), 60),
}
growth = {}
for name, (action, n) in ACTIONS.items():
    action(n // 5)
    before = counts()
    action(n)
    growth[name] = [after - b for after, b in zip(counts(), before)]
print(json.dumps(growth))
"""


@pytest.fixture(scope="module")
def growth() -> dict[str, list[int]]:
    """By how many objects, tensors and bytes a process of its own grows in many runs of each kind."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    found: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("what", ["forwards by patches", "forwards in one context", "constructions"])
def test_no_more_than_hooks(growth: dict[str, list[int]], what: str) -> None:
    objects, tensors, size = growth[what]
    plain = growth["forwards by hooks"]
    assert tensors <= max(plain[1], 0)
    assert objects <= max(plain[0], 0) + 50  # nothing that grows with the runs
    assert size <= max(plain[2], 0) + 2**20
