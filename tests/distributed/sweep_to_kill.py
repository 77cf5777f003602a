"""A sweep in a process of its own, which kills itself, or is killed, in its midst: `KILL_AT=8 python FILE FOLDER`.

In FOLDER it keeps its checkpoint, a line for each run of a cell, and at last the result.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from graphpatch_notebook import CustomPatch, PatchableGraph

LAYERS, UNITS = 3, 5


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(UNITS, UNITS) for _ in range(LAYERS)))
    x = torch.randn(2, UNITS)
    pg = PatchableGraph(model, x)
    log = folder / "runs.txt"

    def patches(layer: int, unit: int) -> dict[str, CustomPatch]:
        def halve(value: torch.Tensor) -> torch.Tensor:
            with log.open("a") as stream:
                stream.write(f"{layer},{unit}\n")
            if os.environ.get("KILL_AT") == str(layer * UNITS + unit):
                os.kill(os.getpid(), signal.SIGKILL)
            return value / 2

        return {f"sub_{layer}.output": CustomPatch(custom_op=halve, slice=(slice(None), unit))}

    result = pg.sweep(
        {"layer": range(LAYERS), "unit": range(UNITS)},
        patches,
        x,
        metric=lambda output: output.exp().sum(),
        batch=None,
        progress=False,
        checkpoint=folder / "sweep",
        checkpoint_key="halved",
    )
    (folder / "result.bin").write_bytes(result.values.tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
