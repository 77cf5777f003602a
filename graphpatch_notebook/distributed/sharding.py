"""What is known of a model that is sharded over several processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Module

from graphpatch_notebook.capture.records import HELD_KINDS, CallNode, Capture, Frame, Node
from graphpatch_notebook.components.meta_runs import (
    MetaRunError,
    Variation,
    input_shapes,
    node_key,
    nodes_by_key,
    recorded_on_meta,
)
from graphpatch_notebook.distributed.placements import Placement, is_same_sketch, sketch
from graphpatch_notebook.distributed.processes import Processes
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.inspection.node_map import NodeMap
from graphpatch_notebook.inspection.resolution import Target, resolve
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patching.sharding import (
    holds_some_experts,
    is_distributed,
    is_parallel_machinery,
    processes_of,
    sharding_of,
)
from graphpatch_notebook.torch_compat import fully_shards_parts, is_fully_sharded, split_factor, without_torch_functions
from graphpatch_notebook.values import TensorSpec, mapped_spec, off_meta, tensor_specs

RunWithPatches: TypeAlias = "Callable[[Mapping[str, Patch[Any]]], object]"
_Key: TypeAlias = "tuple[int, tuple[Any, ...]]"
_LEAVES = (nn.Linear.forward, nn.Embedding.forward)


def with_whole_records(local: Frame) -> Frame:
    """Returns the records of a capture as in a single process: with names and shapes of whole values.

    The model of `local` may be sharded or not; where it is, `sharding_of` finds what is known of that. One that is
    sharded in two ways at once is a `GraphError`.
    """
    if any(fully_shards_parts(module) for module in local.module.modules()):
        raise GraphError(
            "the model is under FSDP and under tensor parallelism at once (a mesh of several dimensions): what is "
            "whole in its values is not known. Use one of the two, or tensor parallelism with replicas"
        )
    if not is_sharded(local.module):
        return local
    sharding = Sharding(local.module)
    try:
        root = recorded_on_meta(local, Variation(input_shapes(local)))
    except MetaRunError as error:
        root, sharding.reason = local, f"no copy of the model can run in one process ({error})"
    else:
        capture = Capture(local.capture.options)
        device = next((spec.device for node in local.nodes for spec in tensor_specs(node.spec)), torch.device("cpu"))
        for frame in root.walk():
            frame.capture = capture
        sharding.join(root, local, device)
        sharding.refuse_divided(root)
    root.capture.findings |= {sharding_of: sharding, processes_of: sharding.processes}
    return root


class Sharding:
    """How the values of a model are distributed over the processes that run it."""

    def __init__(self, model: Module) -> None:
        self.mesh = _mesh_of(model)
        self.reason: str | None = None  # why no value can be patched; `None` if some can
        self.processes = Processes(self.mesh.mesh.flatten().tolist())  # the processes
        self._model = model
        self._refused: dict[int, str] = {}
        self._leaves: dict[int, Node] = {}
        self._placements: dict[_Key, Placement | str] = {}
        self._is_measured = False

    # -- records -------------------------------------------------------------------------------------------------------

    def join(self, frame: Frame, local: Frame | None, device: torch.device) -> None:
        """Replaces the records of the model, which differ by process, with those of a copy in one process.

        `frame` is the record of the copy, `local` that of the same call in this process, if it made one.
        """
        path = frame.attribute_path_from_root
        frame.module = self._model.get_submodule(path) if local is None else local.module
        if local is not None:
            frame.conditions, frame.doubts, frame.value_reads = local.conditions, local.doubts, local.value_reads
            frame.opaque_reason = frame.opaque_reason or local.opaque_reason
        is_leaf = type(frame.module).forward in _LEAVES and runs_shards(frame.module)
        is_of_experts = any(holds_some_experts(above.module) for above in frame.frames_above())
        known = {} if local is None else nodes_by_key(local)
        for node in frame.nodes:
            other = known.get(node_key(node))
            node.spec = off_meta(node.spec, device)
            if isinstance(node, CallNode):
                self.join(node.frame, other.frame if isinstance(other, CallNode) else None, device)
            elif is_of_experts and (node.kind == "op" or not holds_some_experts(frame.module)):
                self._refused[id(node)] = "each process computes it for experts of its own"
            elif node.kind == "op" and is_leaf:
                self._leaves[id(node)] = frame.output_node
            elif node.kind == "op" and (other is None or other.op != node.op):
                self._refused[id(node)] = "the processes do not compute this value"
            elif node.is_view_filled_later or node.op in _UNFILLED:
                self._refused[id(node)] = "this is memory that the model fills in later"
            elif other is not None:
                node.is_mutated_later |= other.is_mutated_later

    def refuse_divided(self, root: Frame) -> None:
        """Refuses what is divided by the number of processes, so that their sum is right, and what is made of it.

        The terms are equal on all processes, so a run does not show that they are terms.
        """
        for frame in root.walk():
            if type(frame.module).forward is not nn.Identity.forward or not runs_shards(frame.module):
                continue
            own = [node for node in frame.nodes if node.kind != "input"]
            around = [] if frame.parent is None else [node for node in frame.parent.nodes if node.kind == "op"]
            self._refused |= {id(node): "each process holds one term of a sum" for node in (*own, *around)}

    # -- questions -----------------------------------------------------------------------------------------------------

    def problem(self, target: Target) -> str | None:
        """Returns why a value cannot be patched; `None` if it can."""
        node = self._leaves.get(id(target.node), target.node)
        if self.reason is not None or id(node) in self._refused:
            return self.reason or self._refused[id(node)]
        if not self._is_measured or node.kind in HELD_KINDS:
            return None
        found = self._placements.get((id(node), target.dig), _NOT_SEEN)
        return found if isinstance(found, str) else None

    def run_target(self, target: Target) -> Target:
        """Returns where a value is patched in runs: the value of a sharded `Linear` is what its call returns."""
        node = self._leaves.get(id(target.node))
        return target if node is None else replace(target, node=node)

    def is_leaf(self, target: Target) -> bool:
        """Whether a value belongs to a sharded `Linear` or `Embedding`, whose op has parts only."""
        return id(target.node) in self._leaves

    def placement(self, target: Target) -> Placement | None:
        """Returns the placement of a value; `None` before it was measured."""
        if not self._is_measured:
            return None
        node = self._leaves.get(id(target.node), target.node)
        found = self._placements.get((id(node), target.dig))
        if isinstance(found, Placement):
            return found
        held = getattr(target.frame.module, str(node.target), None) if node.kind in HELD_KINDS else None
        return self._as_held(target, own_dim=_split_dim(held))

    def check_call(self, function: Callable[..., Any], inputs: Sequence[Any], entries: Sequence[Any]) -> None:
        """Checks that all processes call the model, or a method of it, with the same tokens and patches.

        Methods that all modules have, such as `eval`, do not run the model.
        """
        name = "forward" if isinstance(function, Module) else getattr(function, "__name__", "")
        if self._is_measured and (name == "forward" or not hasattr(Module, name)):
            # Caches, and what is computed from other values, may have parts or other last digits.
            tokens = [each for each in inputs if isinstance(each, Tensor) and not each.is_floating_point()]
            given = [(entry.target.text, patch) for entry in entries for patch in entry.patches]
            with without_torch_functions():  # modes of the caller see the model only
                self.processes.check_call(name, tokens, given)

    # -- measure -------------------------------------------------------------------------------------------------------

    def measure(self, run: RunWithPatches, nodes: NodeMap) -> None:
        """Finds out how the values are distributed, by `run` of the model on the example inputs on all processes."""
        targets = {path: resolve(nodes.root, path) for path in nodes}
        looked = {
            path: target
            for path, target in targets.items()
            if self.problem(target) is None and not self.is_leaf(target) and target.node.kind not in HELD_KINDS
        }
        looks = {path: _Look() for path in looked}
        if looks:
            run(looks)
        mine = {path: look.seen for path, look in looks.items()}
        everywhere = self.processes.gathered(mine)
        for path, target in looked.items():
            seen = [each.get(path) for each in everywhere]
            self._placements[id(target.node), target.dig] = self._placed(target, seen)
        self._refuse_packed(nodes.root)
        self._is_measured = True
        note_placements(nodes.root, {path: self._text(target) for path, target in targets.items()})

    def _text(self, target: Target) -> str:
        """Returns the placement of a value, or why it is refused."""
        problem = self.problem(target)
        return str(self.placement(target)) if problem is None else f"refused: {problem}"

    def _as_held(self, target: Target, own_dim: int | None = None) -> Placement:
        """Returns the placement of a value that each process has as a whole, or as a `DTensor`."""
        return Placement(target.path, self.mesh, own_dim=own_dim)

    def _placed(self, target: Target, seen: list[Any]) -> Placement | str:
        if any(one is None for one in seen):
            return _NOT_SEEN
        if all(isinstance(one, _Distributed) for one in seen):
            is_known, dim = seen[0].is_known, seen[0].dim
            return self._as_held(target, own_dim=dim) if is_known else f"it is distributed as {seen[0].text}"
        if any(not isinstance(one, _Seen) for one in seen):
            return self._as_held(target) if all(one == seen[0] for one in seen) else "it differs between the processes"
        whole = target.whole.shape if isinstance(target.whole, TensorSpec) else seen[0].shape
        if any(len(one.shape) != len(whole) for one in seen):
            return f"the processes hold values of shape {seen[0].shape}, for one of shape {tuple(whole)}"
        differing = [dim for dim, size in enumerate(whole) if any(one.shape[dim] != size for one in seen)]
        if not differing:
            is_of_shards = any(runs_shards(above.module) for above in target.frame.frames_above())
            if is_of_shards and target.node.kind == "op" and all(one.is_zero for one in seen):
                return "it is zero on all processes, and may be a buffer into which each process adds its term of a sum"
            if all(is_same_sketch(seen[0].sketch, one.sketch) for one in seen):
                return self._as_held(target)
            return "each process holds one term of a sum, or a value of its own"
        sizes = tuple(one.shape[differing[0]] for one in seen)
        if len(differing) > 1 or sum(sizes) != whole[differing[0]]:
            shapes = ", ".join(str(one.shape) for one in seen)
            return f"the processes hold values of shape {shapes}, which do not add up to {tuple(whole)}"
        return Placement(target.path, self.mesh, differing[0], sizes)

    def _refuse_packed(self, root: Frame) -> None:
        """Finds the values in which the parts of packed weights lie, and refuses those made of them.

        A weight that holds two (gate and up) is split in each of them: the parts that processes hold are not in order.
        """
        for frame in root.walk():
            packed = _packed_sizes(frame.module)
            if not packed:
                continue
            is_leaf = type(frame.module).forward in _LEAVES
            inside = [*frame.nodes, *(() if frame.parent is None else frame.parent.nodes)]
            for node in inside:
                is_direct = node is frame.output_node if is_leaf else node in frame.nodes and _reads_weight(node)
                for key, placement in self._placements.items():
                    if key[0] != id(node) or not isinstance(placement, Placement) or placement.dim is None:
                        continue
                    factor = packed.get(sum(placement.sizes))
                    if factor is not None:
                        self._placements[key] = replace(placement, factor=factor) if is_direct else _PACKED

    def refusals(self, nodes: NodeMap) -> dict[str, str]:
        """Returns the paths of the values that cannot be patched, with the reasons."""
        found = ((path, self.problem(resolve(nodes.root, path))) for path in nodes)
        return {path: problem for path, problem in found if problem is not None}


_NOT_SEEN = "a run on the example inputs did not show how it is distributed"
_UNFILLED = ("empty", "new_empty", "empty_like")
_PACKED = "it is made of weights that are packed into one, whose parts are not in order"


def _mesh_of(model: Module) -> Any:
    """Returns the processes over which values are distributed, a mesh of one dimension; others run replicas."""
    mesh = next((tensor.device_mesh for tensor in distributed_tensors(model)), getattr(model, "_device_mesh", None))
    if mesh is None:
        from torch.distributed.device_mesh import init_device_mesh

        device = next((tensor.device.type for tensor in model.parameters()), "cpu")
        return init_device_mesh(device, (dist.get_world_size(),))
    if mesh.ndim > 1 and "tp" in (mesh.mesh_dim_names or ()):
        mesh = mesh["tp"]
    if mesh.ndim > 1:
        raise GraphError(
            f"the weights of the model are distributed over a mesh of {mesh.ndim} dimensions ({mesh}): use one "
            'dimension of it, as in parallelize_module(model, mesh["tp"], plan)'
        )
    return mesh


def _reads_weight(node: Node) -> bool:
    """Whether a value is computed from a tensor of the module, as it is or transposed."""
    made = [each for ref in node.sources for each in (ref.node, *(inner.node for inner in ref.node.sources))]
    return any(each.kind in HELD_KINDS for each in made)


def _packed_sizes(module: Module) -> dict[int, int]:
    """Returns the sizes of the packed dimensions of the weights of a module, with the factors."""
    held: list[Any] = [tensor for tensor in module._parameters.values() if is_distributed(tensor)]
    return {
        tensor.shape[placement.dim]: factor
        for tensor in held
        for placement in tensor.placements
        if (factor := split_factor(placement)) > 1
    }


def note_placements(root: Frame, placements: Mapping[str, str]) -> None:
    """Writes down in the records of a capture how values are distributed, given by path."""
    by_node: dict[Node, dict[tuple[Any, ...], str]] = {}
    for path, text in placements.items():
        target = resolve(root, path)
        by_node.setdefault(target.node, {})[target.dig] = text
    for node, texts in by_node.items():

        def placed(spec: TensorSpec, keys: tuple[Any, ...], texts: dict[tuple[Any, ...], str] = texts) -> TensorSpec:
            return replace(spec, placement=texts.get(keys, ""))

        node.spec = mapped_spec(node.spec, placed)


# -- what a process saw ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """A tensor that a process held."""

    shape: tuple[int, ...]
    sketch: Tensor

    @property
    def is_zero(self) -> bool:
        """Whether all its entries are zero."""
        return self.sketch[-1].item() == 0


@dataclass(frozen=True)
class _Distributed:
    """A `DTensor`."""

    text: str
    is_known: bool
    dim: int | None


@dataclass(kw_only=True, eq=False)
class _Look(Patch[Any]):
    """Keeps the placement of a value, or else a sketch to compare it between processes."""

    observes_only: ClassVar[bool] = True
    any_shape: bool = True
    seen: Any = field(default=None)

    def op(self, original_output: Any) -> Any:
        if is_distributed(original_output):
            placements = original_output.placements
            kinds = {type(each).__name__ for each in placements}
            is_known = kinds <= {"Shard", "Replicate", "_StridedShard"}
            self.seen = _Distributed(str(placements), is_known, _split_dim(original_output))
        elif isinstance(original_output, Tensor):
            self.seen = _Seen(tuple(original_output.shape), sketch(original_output).cpu())
        else:
            self.seen = repr(original_output)
        return original_output


def _split_dim(value: Any) -> int | None:
    """Returns the dimension along which a `DTensor` is split, if there is one."""
    placements = value.placements if is_distributed(value) else ()
    return next((each.dim for each in placements if "Shard" in type(each).__name__), None)


def is_sharded(model: Module) -> bool:
    """Whether a model computes with parts of values: some of its tensors are `DTensor`s that do not belong to FSDP.

    Also with `tp_size`, which transformers sets: its tensors may be plain parts.
    """
    if "torch.distributed.tensor" not in sys.modules and "torch.distributed._tensor" not in sys.modules:
        return False
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return False
    size = getattr(model, "tp_size", None)
    return (type(size) is int and size > 1) or next(iter(distributed_tensors(model)), None) is not None


def distributed_tensors(model: Module) -> Iterable[Any]:
    """Yields the `DTensor`s among the parameters and buffers of a model, without those of FSDP."""
    gathered: set[int] = set()
    for module in model.modules():
        if is_fully_sharded(module):
            gathered.update(map(id, module.modules()))
        if id(module) not in gathered:
            held = (*module._parameters.values(), *module._buffers.values())
            yield from (tensor for tensor in held if is_distributed(tensor))


def runs_shards(module: Module) -> bool:
    """Whether a module runs on its part of a weight, with code around it that splits or joins values."""
    around = (module.__dict__.get("forward"), *module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(map(is_parallel_machinery, around))
