"""What is known of a model that is sharded over several processes."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Module

from graphpatch_notebook.capture.records import HELD_KINDS, CallNode, Capture, Frame, Node
from graphpatch_notebook.components.dimensions import (
    MetaRunError,
    Variation,
    input_shapes,
    node_key,
    nodes_by_key,
    recorded_on_meta,
)
from graphpatch_notebook.components.operations import UNFILLED
from graphpatch_notebook.distributed.processes import Processes
from graphpatch_notebook.errors import GraphError, PatchValueError
from graphpatch_notebook.inspection.meanings import differing_names, meanings
from graphpatch_notebook.inspection.resolution import NodeMap, Target, kept_for, resolve
from graphpatch_notebook.patches.kinds import Patch, declares
from graphpatch_notebook.patching.model_state import (
    holds_some_experts,
    is_distributed,
    is_parallel_machinery,
    processes_of,
    same_value,
    sharding_of,
)
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import (
    fully_shards_parts,
    is_fully_sharded,
    split_factor,
    strided_shard,
    without_torch_functions,
)
from graphpatch_notebook.values import (
    IMMUTABLE,
    ContainerSpec,
    TensorSpec,
    ValueSpec,
    children,
    describe,
    digest,
    dtype_name,
    key_text,
    tensor_specs,
)

RunWithPatches: TypeAlias = "Callable[[Mapping[str, Patch[Any]]], object]"
_Key: TypeAlias = "tuple[int, tuple[Any, ...]]"
_Statement: TypeAlias = "dict[str, list[tuple[str, Any]]]"
"""Of inputs and patches, by what they are: their kinds and values, to compare them between processes."""
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
        self._root: Frame
        self._own: Collection[str] = ()  # the inputs of which each process has a part

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
            node.spec = _off_meta(node.spec, device)
            if isinstance(node, CallNode):
                self.join(node.frame, other.frame if isinstance(other, CallNode) else None, device)
            elif is_of_experts and (node.kind == "op" or not holds_some_experts(frame.module)):
                self._refused[id(node)] = "each process computes it for experts of its own"
            elif node.kind == "op" and is_leaf:
                self._leaves[id(node)] = frame.output_node
            elif node.kind == "op" and (other is None or other.op != node.op):
                self._refused[id(node)] = "the processes do not compute this value"
            elif node.is_view_filled_later or node.op in UNFILLED:
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

    def placed(self, entry: Any, problems: list[str]) -> Any:
        """Returns an entry of a plan with the placement of its value."""
        target, placement, problem = entry.target, self.placement(entry.target), self.problem(entry.target)
        if problem is None and placement is not None and placement.dim is not None and entry.patches[0].replaces_call:
            problem = f"{type(entry.patches[0]).__name__} cannot replace a call that returns a part of a value"
        if problem is not None:
            problems.append(f"{target.text!r}: the model is sharded over processes, and {problem}")
        return replace(entry, target=self.run_target(target), placement=placement, is_early=self.is_leaf(target))

    def check_call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], entries: Sequence[Any]) -> None:
        """Checks that all processes call the model, or a method of it, with the same inputs and patches.

        Methods that all modules have, such as `eval`, do not run the model.

        Raises:
            GraphError: They do not: on all of them, with what differs.
        """
        if self._is_measured and (name == "forward" or not hasattr(Module, name)):
            with without_torch_functions():  # modes of the caller see the model only
                mine: _Statement = {"the method": [(name, None)]} | self._inputs(name, args, kwargs)
                for entry in entries:
                    where = format_path((*entry.target.frame.path, entry.target.node.name))
                    for patch in entry.patches:
                        kind = type(patch).__name__ + f" for {entry.target.text!r}" * (entry.target.text != where)
                        fields = [(key, _stated(value)) for key, value in vars(patch).items() if key[0] != "_"]
                        mine.setdefault(f"the patches on {where!r}", []).append((kind, fields))
                if differing := self._differing(mine):
                    raise GraphError(_DIFFER.format("; ".join(list(differing.values())[:_MOST])))

    def _inputs(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Statement:
        """Returns what is stated of the inputs of a call: all but those of which each process has a part."""
        names = [node.name for node in self._root.inputs()] if name == "forward" else []
        given = {names[at] if at < len(names) else at: value for at, value in enumerate(args)} | dict(kwargs)
        return {
            what: [(_kind(value), _stated(value, is_input=True))]
            for key, value in given.items()
            if (what := f"the input {key!r}") not in self._own
        }

    def _differing(self, mine: _Statement) -> dict[str, str]:
        """Returns in what the statements of the processes differ, as texts: the same on all processes."""
        ranks, (first, *others) = self.processes.ranks, self.processes.gathered(mine)
        found: dict[str, str] = {}
        for rank, other in zip(ranks[1:], others, strict=True):
            for what in dict.fromkeys((*first, *other)):
                if what not in found and (
                    text := _difference(first.get(what, []), other.get(what, []), ranks[0], rank)
                ):
                    found[what] = f"{what}: another {text}"
        return found

    # -- measure -------------------------------------------------------------------------------------------------------

    def measure(self, run: RunWithPatches, nodes: NodeMap, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Finds out how the values are distributed, by `run` of the model on the example inputs on all processes.

        Raises:
            GraphError: The processes have other inputs, or other names.
        """
        self._root = nodes.root
        differing = self._differing(self._inputs("forward", args, kwargs))
        if differing and not runs_shards(nodes.root.module):  # else it takes parts of them
            raise GraphError(_DIFFER.format("; ".join(differing.values())))
        self._own = frozenset(differing)
        first, *others = self.processes.gathered(kept_for(nodes, meanings))
        if text := next(filter(None, (differing_names(first, each) for each in others)), ""):
            raise GraphError(_OTHER_NAMES + text)
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
            if all(is_similar(seen[0].sketch, one.sketch) for one in seen):
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


_DIFFER = "the processes do not make the same call of the model: {}"
_OTHER_NAMES = (
    "the same names mean other values in the processes, since the model does not run alike in all of them (it iterates "
    "over a set, perhaps; then start them with the same PYTHONHASHSEED): "
)
_MOST = 3  # how many differences a message shows
_LAST_DIGITS = 1e-7  # how much numbers differ that mean the same, relatively
_NOT_SEEN = "a run on the example inputs did not show how it is distributed"
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

        node.spec = _mapped_spec(node.spec, placed)


# -- what a process states of its call ---------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    return f"{describe(value)} of {dtype_name(value.dtype)}" if isinstance(value, Tensor) else type(value).__name__


def _stated(value: Any, *, is_input: bool = False) -> Any:
    """Returns what is compared of a value: tensors of an input as sketches, whose last digits may differ."""
    if type(value) in (dict, list, tuple):
        return [
            (key_text(key), _kind(child), _stated(child, is_input=is_input)) for key, child in children(value) or ()
        ]
    if isinstance(value, Tensor) and is_input and value.is_floating_point():
        is_other = value.layout is not torch.strided or value.is_nested or value.is_meta or is_distributed(value)
        return None if is_other else sketch(value).cpu()
    if is_input and not isinstance(value, (Tensor, *IMMUTABLE)):  # such as a cache, which has parts
        return None
    return value if isinstance(value, float) else digest(value)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and is_similar(one, other)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_LAST_DIGITS) or repr(one) == repr(other)
    if isinstance(one, (list, tuple)):
        return isinstance(other, type(one)) and len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _difference(one: Sequence[tuple[str, Any]], other: Sequence[tuple[str, Any]], here: int, there: int) -> str:
    """Returns in what the patches on a value, or an input, differ in two processes; empty if they do not."""
    kinds, others = ([kind for kind, _ in each] for each in (one, other))
    if sorted(kinds) != sorted(others):
        mine, theirs = (", ".join(each) or "none" for each in (kinds, others))
        return f"kind ({mine} on process {here}, {theirs} on process {there})"
    if _is_same(one, other):
        return ""
    return "order" if all(any(_is_same(each, another) for another in other) for each in one) else "value"


def _mapped_spec(
    spec: ValueSpec, function: Callable[[TensorSpec, tuple[Any, ...]], ValueSpec], keys: tuple[Any, ...] = ()
) -> ValueSpec:
    """Returns `spec` with `function(spec of the tensor, keys that lead to it)` for each tensor in it."""
    if isinstance(spec, TensorSpec):
        return function(spec, keys)
    if isinstance(spec, ContainerSpec):
        inside = ((text, key, _mapped_spec(child, function, (*keys, key))) for text, key, child in spec.children)
        return replace(spec, children=tuple(inside))
    return spec


def _off_meta(spec: ValueSpec, device: torch.device) -> ValueSpec:
    """Returns `spec` with `device` in place of the meta device."""
    return _mapped_spec(spec, lambda s, _: replace(s, device=device) if s.device.type == "meta" else s)


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
    if "torch.distributed.tensor" not in sys.modules:
        return False
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return False
    size = getattr(model, "tp_size", None)
    return (type(size) is int and size > 1) or next(iter(distributed_tensors(model)), None) is not None


@contextmanager
def holding_tensors(module: Module, replacements: dict[str, Tensor]) -> Iterator[None]:
    """Puts tensors into a module itself, for the length of the block.

    Nobody else runs the module meanwhile, since all processes run it together.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, new in replacements.items():
            if new.requires_grad and not is_distributed(new):
                raise PatchValueError(
                    f"{path!r} of this {type(module).__name__} cannot be patched with gradients: those of the "
                    "weight itself are summed over the processes; patch it under torch.no_grad(), or patch the "
                    "output"
                )
            above, _, name = path.rpartition(".")
            holder = module.get_submodule(above)
            places: tuple[dict[str, Any], ...] = (holder._parameters, holder._buffers, holder.__dict__)
            held = next((held for held in places if held.get(name) is not None), None)
            if held is not None:
                before.append((held, name, held[name]))
                held[name] = new
        yield
    finally:
        for held, name, value in reversed(before):
            held[name] = value


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


# -- values that are distributed over the processes: joined before their patches, and split again after them -----------
# Gradients go the other way. That of a part is a part of the gradient. A value that all processes hold may have the
# whole gradient on each of them, or one term of it (what only the heads of a process read): backward finds that out.

_SAME = 1e-5
_FEW = 4  # this many terms are not equal on all processes by chance


@dataclass(frozen=True)
class Placement:
    """How a value is distributed."""

    path: str  # the path of the value
    mesh: Any  # the processes, as a `DeviceMesh` of one dimension
    dim: int | None = None  # the dimension along which each process holds a part; `None` if each holds the whole value
    sizes: tuple[int, ...] = ()  # the sizes of the parts along it, by rank
    factor: int = 1  # how many weights are packed along `dim` (2 for gate and up): each is split separately
    own_dim: int | None = None  # the split dimension of a `DTensor`, which gathers itself; `None` for all others

    def __str__(self) -> str:
        dim = self.own_dim if self.dim is None else self.dim
        return "replicated" if dim is None else f"split along dimension {dim}"

    def size_here(self, dim: int) -> int | None:
        """Returns the number of entries of a dimension on this process; `None` if it has all of them."""
        return self.sizes[self.mesh.get_local_rank()] if dim == self.dim else None

    def whole(self, value: Tensor) -> Tensor:
        """Returns the whole value, given this process's part of it; the same object if the part is the whole.

        One that is not distributed as in the capture is a `PatchValueError`.
        """
        if is_distributed(value):
            return value.full_tensor()  # type: ignore[attr-defined, no-any-return]
        if self.dim is None:
            return value
        rank = self.mesh.get_local_rank()
        if value.dim() <= self.dim or value.shape[self.dim] != self.sizes[rank]:
            raise PatchValueError(
                f"{self.path!r}: process {rank} held {self.sizes[rank]} entries of dimension {self.dim} when the model "
                f"was captured, and holds a value of shape {tuple(value.shape)} now: how it is distributed over the "
                "processes is not known; make the PatchableGraph with such inputs"
            )
        shape = (*value.shape[: self.dim], sum(self.sizes), *value.shape[self.dim + 1 :])
        stride = torch.empty(shape, device="meta").stride()
        joined = _distributed_tensors().DTensor.from_local(
            value.contiguous(), self.mesh, [self._shard()], run_check=False, shape=torch.Size(shape), stride=stride
        )
        return joined.full_tensor()  # type: ignore[no-any-return]

    def local(self, whole: Any, value: Tensor) -> Any:
        """Returns this process's part of a patched value, in the form of `value`, its part of the unpatched one."""
        kinds = _distributed_tensors()
        if not isinstance(whole, Tensor) and (self.dim is not None or is_distributed(value)):
            raise PatchValueError(f"{self.path!r} is distributed over processes: a patch must return a tensor for it")
        if is_distributed(value):
            distributed: Any = value
            mesh, placements = distributed.device_mesh, distributed.placements
            again = kinds.DTensor.from_local(whole, mesh, [kinds.Replicate()] * len(placements), run_check=False)
            return again if any(each.is_partial() for each in placements) else again.redistribute(placements=placements)
        if self.dim is None:
            return whole
        if whole.dim() <= self.dim or whole.shape[self.dim] != sum(self.sizes):
            raise PatchValueError(
                f"{self.path!r} has {sum(self.sizes)} entries in dimension {self.dim}, distributed over processes; a "
                f"patch must keep them, not make a value of shape {tuple(whole.shape)}"
            )
        again = kinds.DTensor.from_local(whole.contiguous(), self.mesh, [kinds.Replicate()], run_check=False)
        return again.redistribute(placements=[self._shard()]).to_local().clone(memory_format=torch.contiguous_format)

    def applied(self, value: Tensor, apply: Callable[[Any], Any], entry: Any) -> Any:
        """Returns this process's part of a value after patches: `apply` does those of `entry` on the whole value."""
        with without_torch_functions():  # modes see one call, `same_value`
            whole = self.whole(value)
            is_held = entry.target.node.kind in HELD_KINDS
            needs_gradient = torch.is_grad_enabled() and whole is value and not (is_held and entry.observes_only)
            given, gradient = self.opened(whole) if needs_gradient else (whole, None)
        patched = apply(same_value(value, given))
        # A value that a patch keeps only has a gradient if the model continues with it.
        has_uses = torch.is_grad_enabled() and not is_held and given.requires_grad
        keeps = any(patch.only_keeps or not patch.observes_only for patch in entry.patches)
        if patched is given and not (has_uses and keeps):
            return value
        with without_torch_functions():
            first = self.of_first(patched, entry.patches)
            local = self.local(first if gradient is None else self.closed(first, gradient), value)
        return same_value(patched, local)

    def _shard(self) -> Any:
        assert self.dim is not None
        return _distributed_tensors().Shard(self.dim) if self.factor == 1 else strided_shard(self.dim, self.factor)

    def of_first(self, whole: Any, patches: Sequence[Patch[Any]]) -> Any:
        """Returns what functions in patches made of a value on the first process: of random numbers, say."""
        is_known = all(patch.observes_only or declares(patch, "is_pure") for patch in patches)
        if is_known or not isinstance(whole, Tensor) or is_distributed(whole):
            return whole
        of_first = whole.detach().clone(memory_format=torch.contiguous_format)
        group = self.mesh.get_group()
        dist.broadcast(of_first, dist.get_global_rank(group, 0), group)
        return whole + (of_first - whole).detach() if whole.requires_grad else of_first

    def opened(self, value: Tensor) -> tuple[Tensor, _Gradient]:
        """Returns a value that all processes have, whose patches see all of its gradient, and a state for `closed`.

        Downstream of the patches each process may have one term of the gradient: the patches are given the sum, and
        upstream goes the sum on the first process, and zero on the others.
        """
        gradient = _Gradient(self.path, self.mesh)
        return (_Open.apply(value, gradient) if value.requires_grad else value), gradient  # type: ignore[no-untyped-call]

    @staticmethod
    def closed(whole: Any, gradient: _Gradient) -> Any:
        """Returns the patched value for a value that was `opened`."""
        needs_gradient = isinstance(whole, Tensor) and whole.requires_grad
        return _Close.apply(whole, gradient) if needs_gradient else whole  # type: ignore[no-untyped-call]


class _Gradient:
    """Whether each process has one term of a gradient: known once backward has reached the result of the patches."""

    def __init__(self, path: str, mesh: Any) -> None:
        self.path = path
        self.mesh = mesh
        self.is_sum = False

    def total(self, terms: Tensor) -> Tensor:
        """Returns the sum of the terms of all processes; raises an error if some entries are whole on each of them."""
        group = self.mesh.get_group()
        least, most, total = (terms.contiguous().clone() for _ in range(3))
        for reduced, kind in ((least, dist.ReduceOp.MIN), (most, dist.ReduceOp.MAX), (total, dist.ReduceOp.SUM)):
            dist.all_reduce(reduced, op=kind, group=group)
        is_same, is_there = least == most, (least != 0) | (most != 0)
        for dim in range(terms.dim()):
            others = [other for other in range(terms.dim()) if other != dim]
            slices_same = is_same.movedim(dim, 0).flatten(1).all(1) if others else is_same
            slices_there = is_there.movedim(dim, 0).flatten(1).sum(1) if others else is_there.long()
            if bool((slices_same & (slices_there >= _FEW)).any()):
                raise PatchValueError(
                    f"the gradient of {self.path!r} cannot be determined: some entries are complete on every process, "
                    "others are terms of a sum; patch it without gradients, or patch what is computed from it"
                )
        return total


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        is_elsewhere = ctx.gradient.is_sum and ctx.gradient.mesh.get_local_rank() > 0
        return torch.zeros_like(grad) if is_elsewhere else grad, None


class _Close(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return value.clone()  # the model may write into it, which autograd refuses for views

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gradient = ctx.gradient
        mine = sketch(grad).to(grad.device)
        sketches = [torch.empty_like(mine) for _ in range(gradient.mesh.size())]
        dist.all_gather(sketches, mine, group=gradient.mesh.get_group())
        gradient.is_sum = not all(is_similar(sketches[0], each) for each in sketches)  # the same on all processes
        return gradient.total(grad) if gradient.is_sum else grad, None


def sketch(value: Tensor) -> Tensor:
    """Returns a few numbers that differ if values differ: random sums of the entries, and their norm."""
    real = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
    rows = real.reshape(-1, real.shape[-1] if real.dim() and real.numel() else 1).to(torch.float64, copy=True)
    rows.nan_to_num_(0.5, 2.0, -2.0).clamp_(-1e30, 1e30)
    by_row, by_column = (_weights(size, str(value.device)) for size in rows.shape)
    return torch.cat([((rows @ by_column) * by_row).sum(0), rows.norm()[None]])


@functools.lru_cache(64)
def _weights(size: int, device: str) -> Tensor:
    """Returns random weights, of shape (size, 2): the same on all processes."""
    generator = torch.Generator().manual_seed(size % 1009)
    return torch.randn(size, 2, generator=generator, dtype=torch.float64).to(device)


def is_similar(one: Tensor, other: Tensor) -> bool:
    """Whether two sketches are of the same value, up to rounding."""
    return bool(((one - other).abs() <= _SAME * max(one[-1].item(), other[-1].item())).all())


def _distributed_tensors() -> Any:
    """Returns the module with `DTensor` and its placements: not every torch has `torch.distributed`."""
    import torch.distributed.tensor

    return torch.distributed.tensor
