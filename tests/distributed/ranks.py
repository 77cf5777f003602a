"""What each of two processes finds of models of plain torch: run by `test_sharded_models`."""

from __future__ import annotations

import copy
import datetime
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )
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
    ZeroPatch,
)
from graphpatch_notebook.distributed import processes
from graphpatch_notebook.experiments import attribute, attribute_edges, record_to
from graphpatch_notebook.torch_compat import default_store
from tests.distributed.law import compare, whole
from tests.zoo.submodules import Submodules

WORLD = 2


class Attention(Submodules, q=(8, 8), k=(8, 8), v=(8, 8), o=(8, 8)):
    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (layer(x).view(rows, length, -1, 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        pattern = torch.softmax(query @ key.transpose(-1, -2), -1)
        return self.o((pattern @ value).transpose(1, 2).reshape(rows, length, -1))


class Block(Submodules, attention=Attention, up=(8, 16), down=(16, 8)):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        hidden = F.gelu(self.up(x))
        return x + self.down(hidden)


class Normed(Block):
    """A block with norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


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
        return whole(pg(X)).detach()


def split(sharded: Model, mesh: DeviceMesh, *, use_local_output: bool = True) -> nn.Module:
    plan: dict[str, Any] = {}
    for block in ("blocks.0", "blocks.1"):
        plan |= {f"{block}.{name}": ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "up")}
        plan |= {f"{block}.{name}": RowwiseParallel() for name in ("attention.o", "down")}
    if not use_local_output:
        plan["blocks.1.up"] = ColwiseParallel(use_local_output=False)
    return parallelize_module(sharded, mesh, plan)


def tensor_parallel(mesh: DeviceMesh) -> dict[str, Any]:
    plain = PatchableGraph(model(), X)
    pg = PatchableGraph(split(model(), mesh), X)
    found = {
        "law": compare(plain, pg, lambda graph: graph(X)),
        "placements": [
            pg.nodes[path].placement for path in ("blocks_0.hidden", "blocks_0.output", "blocks_0.up.weight")
        ],
        "gradients of weights": gradients_of_weights(plain, pg),
        "collectives": collectives(pg),
        "refused": refusals(
            lambda run: run(),
            {
                "verify": lambda: pg.verify(X),
                "copy": lambda: copy.deepcopy(pg),
                "executor": lambda: pg.sweep(
                    {"unit": range(2)},
                    lambda unit: {"blocks_0.up.linear": ZeroPatch(slice=(..., unit))},
                    X,
                    metric=torch.sum,
                    progress=False,
                    executor=ThreadPoolExecutor(1),
                ),
                "rules": lambda: attribute(
                    PatchableGraph(split(model(), mesh, use_local_output=False), X),
                    torch.sum,
                    X,
                    X + 1,
                    method="secant",
                ),
                "metric": lambda: attribute(pg, lambda output: output[..., dist.get_rank()].sum(), X, X + 1),
                "longer": lambda: patched(pg, {"blocks_0.hidden": CustomPatch(lambda value: value[..., :-1])}),
                "other sizes": lambda: by_position(mesh),
            },
        ),
        "other": different_patches(plain, pg, mesh),
    }
    found["is the model's output"] = torch.allclose(whole(pg(X)), model()(X), atol=1e-5)
    return found


def by_position(mesh: DeviceMesh) -> None:
    """Captures a model whose positions are split at four of them, and runs it on six."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Shard(1)), "3": PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate())}  # fmt: skip
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Identity())
    pg = PatchableGraph(parallelize_module(layers, mesh, plan), torch.ones(2, 4, 8))
    with pg.patch({"sub_2.output": AddPatch(value=1.0)}):
        assert pg(torch.ones(2, 4, 8)).shape == (2, 4, 8)
        pg(torch.ones(2, 6, 8))


def gradients_of_weights(plain: PatchableGraph, pg: PatchableGraph) -> list[str]:
    """The weights whose gradients are wrong while values before and behind them are patched."""
    gradients = []
    for graph in (plain, pg):
        graph.zero_grad()
        head, all_rows = (..., slice(3, 6)), AddPatch(value=1.0)
        patches = {"blocks_0.attention.q.linear": AddPatch(value=0.5, slice=head), "blocks_0.output": all_rows}
        with graph.patch({**patches, "blocks_1.up.output": CustomPatch(lambda value: value * 2)}):
            whole(graph(X)).pow(2).sum().backward()
        gradients.append({name: whole(weight.grad) for name, weight in graph.named_parameters()})
    plain_gradients, own = gradients
    return [name for name in own if not torch.allclose(own[name], plain_gradients[name], atol=1e-4, rtol=1e-4)]


def collectives(pg: PatchableGraph) -> list[int]:
    """How many more collectives run with a patch on a part, and with one on a whole value."""
    counts = []
    patch = ZeroPatch(slice=(..., slice(3, 6)))
    for patches in ({}, {"blocks_0.hidden": patch}, {"blocks_0.output": patch}):
        with torch.no_grad(), pg.patch(patches), CommDebugMode() as counted:
            pg(X)
        counts.append(counted.get_total_counts())
    return [count - counts[0] for count in counts[1:]]


class Turning(Model):
    """Iterates in an order of its own in each process, as models do that iterate over sets."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.names, self.tables = names, nn.ParameterDict({name: torch.ones(8) for name in "ab"})

    def forward(self, x: Tensor) -> Tensor:
        scaled = {name: x * self.tables[name] for name in self.names}
        return super().forward(scaled["a"] + scaled["b"])


def different_patches(plain: PatchableGraph, pg: PatchableGraph, mesh: DeviceMesh) -> dict[str, Any]:
    """What is said where the ranks do not make the same call."""
    rank, path = dist.get_rank(), "blocks_0.up.linear"
    said: dict[str, Any] = {
        "none": refusal(lambda patches: patched(pg, patches), {path: ZeroPatch()} if rank else {}),
        "slice": refusal(lambda patches: patched(pg, patches), {path: ZeroPatch(slice=(..., rank))}),
        "edited": refusal(lambda patches: pg.edit(patches)(X), {path: ZeroPatch(slice=(..., rank))}),
        "contents": refusal(
            lambda patches: patched(pg, patches), {path: AddPatch(value=torch.full((16,), 1 + rank * 1e-6))}
        ),
        "same": refusal(lambda patches: patched(pg, patches), {path: AddPatch(value=torch.ones(16))}),
        "function": refusal(lambda patches: patched(pg, patches), {path: CustomPatch(lambda value: value * 2)}),
        "inputs": refusal(pg, torch.tensor([rank])),
        "kind": refusal(lambda patches: patched(pg, patches), {path: (ZeroPatch() if rank else AddPatch(value=0.0))}),
        "order": refusal(
            lambda patches: patched(pg, patches), {path: [ZeroPatch(), AddPatch(value=1.0)][:: -1 if rank else 1]}
        ),
        "number": refusal(lambda patches: patched(pg, patches), {path: AddPatch(value=1 + rank * 1e-6)}),
        "last digits": refusal(lambda patches: patched(pg, patches), {path: AddPatch(value=1 + rank * 1e-9)}),
        "input": refusal(lambda x: patched_on(pg, {path: ZeroPatch(slice=0)}, x), X + rank * 1e-3),
        "input's last digits": refusal(pg, X * (1 + rank * 2e-7)),
        "input's kind": refusal(pg, X[: 1 + rank]),
        "example": refusal(lambda x: PatchableGraph(split(model(), mesh), x), X + rank),
        "names": refusal(lambda names: PatchableGraph(split(Turning(names).eval(), mesh), X), "ba" if rank else "ab"),
    }
    many = {
        "blocks_0.up.weight": AddPatch(value=0.5), "blocks_0.up.bias": AddPatch(value=0.25),
        "blocks_1.x": ZeroPatch(slice=0),
        "blocks_0.attention.q.bias": ZeroPatch(slice=5), "blocks_0.attention.q.weight": ZeroPatch(slice=3),
        "blocks_1.hidden": AddPatch(value=1.0, slice=(..., slice(5, 10))), path: ZeroPatch(slice=(..., 3)),
    }  # fmt: skip
    said["dict order"] = torch.allclose(
        patched(pg, dict([*many.items()][:: -1 if rank else 1])), patched(plain, many), atol=1e-5
    )
    # What functions make is that of the first process, where these add nothing.
    noise = [{each: CustomPatch(lambda value: value + rank)} for each in (path, "blocks_0.output")]
    said["noise"] = [torch.allclose(patched(pg, patches), patched(pg, {}), atol=1e-6) for patches in noise]
    return said


def in_full_shards(mesh: DeviceMesh) -> Model:
    sharded = model()
    for part in (*sharded.blocks, sharded):
        fully_shard(part, mesh=mesh)
    return sharded


def fully_sharded(mesh: DeviceMesh) -> dict[str, Any]:
    sharded = in_full_shards(mesh)
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
                "components": list(pg.components) == list(plain.components) and len(pg.components.layers) > 0,
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
    normed = Model()
    normed.blocks = nn.ModuleList([Normed(), Normed()])
    for part in (*normed.blocks, normed):
        fully_shard(part, mesh=mesh)
    edges = refusal(lambda x: attribute_edges(PatchableGraph(normed, X), torch.sum, X, x), X + 1)
    return found | {"files": files(pg), "edges": edges}


def files(pg: PatchableGraph) -> dict[str, Any]:
    """What files have that one of the processes writes, and what is said where the processes differ."""
    rank, folder = dist.get_rank(), Path(given([tempfile.mkdtemp()])[0])
    cells, rows = folder / "sweep", folder / "store"

    def sweep(name: Path, x: Tensor = X) -> Any:
        return pg.sweep(
            {"unit": range(4)},
            lambda unit: {"blocks_0.hidden": ZeroPatch(slice=(..., unit))},
            x,
            metric=torch.sum,
            progress=False,
            checkpoint=name,
        )

    def stored(rows: Path, x: Tensor) -> Any:
        return record_to(pg, rows, "blocks_0.hidden", x, batch_size=1)["blocks_0.hidden"].shape

    first = sweep(cells)
    dist.barrier()
    complete = sorted(file.name for file in cells.iterdir())
    dist.barrier()
    if not rank:
        (cells / complete[1]).unlink()
    dist.barrier()
    continued = sweep(cells)
    dist.barrier()
    return {
        "sweep": first.equals(continued),
        "files": [len(complete), len([*cells.iterdir()])],
        "rows": stored(rows, X),
        "own rows": stored(folder / str(rank), X + rank),
        "inputs": refusal(lambda x: sweep(cells, x), X + rank),
        "batches": refusal(lambda x: stored(folder / "other", x), X + rank),
    }


def given(value: Any) -> Any:
    """What the first rank gives."""
    dist.broadcast_object_list(value)
    return value


def replicated() -> bool:
    """Whether a patch on one of the replicas of a model (`DistributedDataParallel`) is as on the model."""
    pg = PatchableGraph(DistributedDataParallel(model()), X)
    changed = patched(pg, {"module.blocks_0.up.linear": AddPatch(value=2.0, slice=(..., slice(2, 4)))})
    return torch.allclose(
        changed, by_hook("blocks.0.up", lambda value: value + torch.tensor([0, 0, 2.0, 2, *[0] * 12])), atol=1e-5
    )


class Stage(nn.Module):
    def __init__(self, own: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = {name: Block() for name in "0123"}
        self.blocks = nn.ModuleDict({name: blocks[name] for name in own})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def pipeline() -> dict[str, Any]:
    """Each rank patches its own stage, in two micro-batches."""
    rank, x = dist.get_rank(), torch.cat([X, X + 1])
    pg = PatchableGraph(Stage(("01", "23")[rank]).eval(), X)
    schedule = ScheduleGPipe(PipelineStage(pg, rank, WORLD, torch.device("cpu")), 2)
    patches = [
        {"blocks_1.hidden": ZeroPatch(slice=(..., 3))},
        {"blocks_3.hidden": AddPatch(value=1.0, slice=(..., slice(4)))},
    ]
    with torch.no_grad(), pg.patch(patches[rank]):
        output = schedule.step() if rank else schedule.step(x)
    expected = patched_on(PatchableGraph(Stage("0123").eval(), X), patches[0] | patches[1], x)
    return {
        "is right": output is None or torch.allclose(output, expected, atol=1e-5),
        "other": refusal(lambda path: pg.edit({path: ZeroPatch()}), "blocks_2.hidden"),
    }


def patched_on(pg: PatchableGraph, patches: dict[str, Any], x: Tensor) -> Tensor:
    with torch.no_grad(), pg.patch(patches):
        return pg(x)


def find_on_mesh() -> dict[str, Any]:
    """What one of four ranks finds that form a mesh of two dimensions."""
    warnings.simplefilter("error", GraphPatchWarning)
    mesh, replica = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), dist.get_rank() // 2
    plain, pg = PatchableGraph(model(), X), PatchableGraph(split(model(), mesh["tp"]), X)
    x, patches = X + replica, {"blocks_0.up.linear": ZeroPatch(slice=(..., slice(3 + replica, 9)))}
    law = compare(plain, pg, lambda graph: graph(X), most=8, most_gradients=4)
    found = {
        "law": law,
        "replicas": torch.allclose(patched_on(pg, patches, x), patched_on(plain, patches, x), atol=1e-5),
    }
    within = split(model(), mesh["tp"])
    fully_shard(within, mesh=mesh["dp"])
    return found | {"within": refusal(lambda given: PatchableGraph(given, X), within)}


def wait_for_others(kind: str, what: str) -> tuple[str, list[str], float]:
    """The error and the warnings of a rank, of which the second does something else than the first, and how long."""
    processes._PATIENCE, processes._LIMIT = 0.5, datetime.timedelta(seconds=3)
    is_second, mesh, error = dist.get_rank() == 1, init_device_mesh("cpu", (WORLD,)), None
    pg = PatchableGraph(split(model(), mesh) if kind == "tensor parallel" else in_full_shards(mesh), X)

    def op(value: Tensor) -> Tensor:
        if is_second and what == "raises":
            raise ValueError("on one rank")
        time.sleep(1.5 if what == "is slow" and not is_second else 0)
        return value * 2

    before = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            path = "output" if what == "is slow" else "blocks_0.output"
            with torch.no_grad(), pg.patch({path: CustomPatch(op)}):
                pg(X)
                if is_second and what == "leaves":
                    raise ValueError("between the calls")
                time.sleep(1.5 if is_second and what == "is late" else 0)
                pg(X)
        except Exception as raised:
            error = raised
        found = f"{type(error).__name__}: {error}", [str(each.message) for each in caught], time.monotonic() - before
        if is_second and not what.startswith(
            "is "
        ):  # alive, as a notebook is: a connection that is closed ends the wait
            default_store().wait(["done"], datetime.timedelta(seconds=20))
        default_store().set("done", "")
    return found


def find() -> dict[str, Any]:
    """What one rank finds."""
    warnings.simplefilter("error", GraphPatchWarning)
    mesh = init_device_mesh("cpu", (WORLD,))
    return {
        "tensor parallel": tensor_parallel(mesh),
        "fully sharded": fully_sharded(mesh),
        "replicated": replicated(),
        "pipeline": pipeline(),
    }
