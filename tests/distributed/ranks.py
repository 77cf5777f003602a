"""What each of two processes does to sharded models, and what it finds: run by `test_sharded_models`."""

from __future__ import annotations

import datetime
import faulthandler
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
except ImportError:  # before torch 2.6 these lie elsewhere
    is_possible = False
else:
    is_possible = True

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    GraphPatchError,
    GraphPatchWarning,
    PatchableGraph,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)
from graphpatch_notebook.experiments import ablate, attribute, causal_trace, path_patch

WORLD = 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (layer(x).view(rows, length, -1, 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        pattern = torch.softmax(query @ key.transpose(-1, -2), -1)
        return self.o((pattern @ value).transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        hidden = F.gelu(self.up(x))
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.scale = nn.ModuleList([Block(), Block()]), nn.Parameter(torch.ones(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        turned = self.scale.t()
        return x * turned.squeeze(-1)


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


def whole(value: Tensor) -> Tensor:
    """A plain tensor with all of what the processes have of a value."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def by_hook(path: str, edit: Callable[[Tensor], Tensor]) -> Tensor:
    """What the unsharded model gives where the output of one of its modules is edited."""
    plain = model()
    plain.get_submodule(path).register_forward_hook(lambda module, args, output: edit(output))
    return plain(X).detach()


def refusals(run: Callable[[Any], Any], cases: dict[str, Any]) -> dict[str, str]:
    """What is said of each case before the model runs."""
    return {name: refusal(run, case) for name, case in cases.items()}


def refusal(run: Callable[[Any], Any], case: Any) -> str:
    try:
        run(case)
    except GraphPatchError as error:
        return f"{type(error).__name__}: {error}"
    return "it ran"


def patched(pg: PatchableGraph, patches: dict[str, Any]) -> Tensor:
    with pg.patch(patches):
        return whole(pg(X))


def tensor_parallel(mesh: DeviceMesh) -> dict[str, Any]:
    sharded, plan = model(), {}
    for block in ("blocks.0", "blocks.1"):
        plan |= {f"{block}.{name}": ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "up")}
        plan |= {f"{block}.{name}": RowwiseParallel() for name in ("attention.o", "down")}
    pg = PatchableGraph(parallelize_module(sharded, mesh, plan), X)
    query = "blocks_0.attention.q.linear"

    def enter(patches: dict[str, Any]) -> None:
        with pg.patch(patches):
            raise AssertionError

    ran: list[int] = []
    handle = sharded.register_forward_pre_hook(lambda module, args: ran.append(1))
    found: dict[str, Any] = {
        "refused": refusals(
            enter,
            {
                "slice": {query: ZeroPatch(slice=(..., slice(0, 2)))},
                "positions": {"blocks_0.attention.pattern": ProbePatch(positions=0, position_dim=2)},
                "add": {"blocks_0.up.linear": AddPatch(value=1.0)},
                "replace": {"blocks_0.hidden": [ProbePatch(), ReplacePatch(value=1.0)]},
                "parameter": {"blocks_0.up.weight": ZeroPatch()},
            },
        ),
        "experiments": refusals(
            lambda run: run(),
            {
                "attribute": lambda: attribute(pg, torch.sum, X, X + 1),
                "causal_trace": lambda: causal_trace(pg, X, X + 1, "blocks_0.output", None, torch.sum, progress=False),
                "path_patch": lambda: path_patch(pg, "blocks_0.output", None, X, X + 1, torch.sum, progress=False),
                "heads": lambda: ablate(
                    pg, ["blocks_0.attention.o.input"], X, metric=torch.sum, heads=4, progress=False
                ),
            },
        ),
    }
    found["ran"] = len(ran)
    found["sweep"] = refusal(
        lambda axis: pg.sweep(
            {"unit": axis},
            lambda unit: {query: ZeroPatch(slice=(..., unit))},
            X,
            metric=torch.sum,
            progress=False,
        ),
        range(2),
    )
    handle.remove()

    wrong = []
    paths = {
        "blocks_0.attention.q.output": "blocks.0.attention.q",
        "blocks_0.attention.output": "blocks.0.attention",
        "blocks_0.up.linear": "blocks.0.up",
        "blocks_0.down.output": "blocks.0.down",
        "blocks_1.output": "blocks.1",
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GraphPatchWarning)
        for path, module in paths.items():
            for has_grad in (False, True):
                with torch.set_grad_enabled(has_grad):
                    zeroed = patched(pg, {path: ZeroPatch(any_shape=True)})  # hooks turn a `DTensor` into its part
                if not torch.allclose(zeroed, by_hook(module, torch.zeros_like), atol=1e-5):
                    wrong.append((path, has_grad))
    found["wrong"] = wrong
    found["warned"] = sorted({(type(w.message).__name__, str(w.message)) for w in caught})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        probe, record, weight = ProbePatch(), RecordPatch(), ProbePatch()
        with pg.patch({query: probe, "blocks_0.attention.pattern": record, "blocks_0.up.weight": weight}):
            found["is the model's output"] = torch.allclose(whole(pg(X)), model()(X), atol=1e-5)
        found["probed"] = torch.allclose(whole(probe.activation), model().blocks[0].attention.q(X), atol=1e-6)
        found["pattern"] = tuple(record.activations[0].shape)
        found["weight"] = torch.equal(whole(weight.activation), model().blocks[0].up.weight)
    return found


def fully_sharded(mesh: DeviceMesh) -> dict[str, Any]:
    sharded = model()
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    plain, found = PatchableGraph(model(), X), {}
    for has_grad in (False, True):
        with torch.set_grad_enabled(has_grad), warnings.catch_warnings():
            warnings.simplefilter("error", GraphPatchWarning)
            pg = PatchableGraph(sharded, X)
            names = {path: node.shape for path, node in pg.nodes.items()}
            probes = {path: ProbePatch() for path in pg.nodes}
            with pg.patch(probes):
                output = pg(X)
            if has_grad:
                output.sum().backward()
            plain_probes = {path: ProbePatch() for path in plain.nodes}
            with plain.patch(plain_probes):
                plain(X)
            found[has_grad] = {
                "names": names == {path: node.shape for path, node in plain.nodes.items()},
                "differ": [
                    path
                    for path, probe in plain_probes.items()
                    if isinstance(probe.activation, Tensor)
                    and not torch.equal(whole(probes[path].activation), whole(probe.activation))
                ],
                "weights": sorted(
                    {type(probe.activation).__name__ for path, probe in probes.items() if "weight" in path}
                ),
            }
            head = (..., slice(2, 4))
            edits = {"blocks_0.attention.q.linear": "blocks.0.attention.q", "blocks_1.down.output": "blocks.1.down"}
            found[has_grad]["wrong"] = [
                path
                for path, module in edits.items()
                if not torch.allclose(
                    patched(pg, {path: AddPatch(value=2.0, slice=head)}),
                    by_hook(module, lambda value: value + torch.tensor([0, 0, 2.0, 2, *[0] * (value.shape[-1] - 4)])),
                    atol=1e-5,
                )
            ]
            changed = patched(pg, {"blocks_0.up.weight": ZeroPatch(slice=3)})
            other = model()
            with torch.no_grad():
                other.blocks[0].up.weight[3] = 0
            found[has_grad]["weight patched"] = torch.allclose(changed, other(X), atol=1e-5)
            # What asks which dimension is which, and so must not run a copy of the model.
            scores = [
                attribute(each, torch.sum, X, X + 1, positions=[1], position_dim=1, paths=["blocks_0.output"])
                for each in (pg, plain)
            ]
            found[has_grad]["scores"] = torch.allclose(*(torch.from_numpy(each.values) for each in scores), atol=1e-4)
            found[has_grad]["custom"] = torch.equal(
                patched(pg, {"blocks_0.output": CustomPatch(lambda value: value)}), whole(model()(X))
            )
    return found


def plain_parts(size: int) -> dict[str, str]:
    """Of a model that holds its parts as plain tensors, only `tp_size` tells, as models of transformers have it."""
    sharded = model()
    sharded.tp_size = size  # type: ignore[assignment]
    pg = PatchableGraph(sharded, X)
    return refusals(lambda patches: patched(pg, patches), {"slice": {"blocks_0.output": ZeroPatch(slice=0)}})


def main(rank: int, folder: str) -> None:
    """Writes down what process `rank` finds. It ends by itself, whatever happens."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(90, exit=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=30)
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    found = {
        "tensor parallel": tensor_parallel(mesh),
        "fully sharded": fully_sharded(mesh),
        "by tp_size": plain_parts(WORLD),
        "of one process": plain_parts(1),
    }
    (Path(folder) / f"rank{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
