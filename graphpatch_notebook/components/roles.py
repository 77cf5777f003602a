"""What the dimensions of values are, found by running: which indices of other values change if a value is changed.

The recorded operations of a part of the model run again, on random tensors of small sizes in place of what they read
from elsewhere, weights included. So it takes no weights and no inputs, and it does not matter how a model writes down
what it does. Nothing is concluded from the place of a dimension, from equal sizes, or from names: what no change
decides is `None`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from graphpatch_notebook.capture.records import HELD_KINDS, Frame, Node, Ref, map_leaves
from graphpatch_notebook.components.dimensions import Extent, dimensions_of
from graphpatch_notebook.components.flow import Axes, Flow, UnknownValueError, Value
from graphpatch_notebook.components.operations import CREATIONS, LINEAR_MAPS
from graphpatch_notebook.values import ScalarSpec, TensorSpec, take

Reached: TypeAlias = "dict[tuple[int, int, str], list[frozenset[int]]]"
"""The changed indices of each atom of a value: by the atom of the changed value, its index, and how it was changed."""

_MOST_INDICES = 3
_LARGE, _LARGEST = 50_000, 50_000_000
_LENGTH = 5
_ROUNDING = 64 * torch.finfo(torch.float32).eps
_MOST = torch.finfo(torch.float32).max
_CPU = torch.device("cpu")
_CASTS = frozenset("half bfloat16 double cuda cpu".split())


class SmallSizes:
    """Small sizes of the model's inputs, and the shapes that values have then."""

    def __init__(self, root: Frame) -> None:
        self.dimensions = dimensions_of(root)
        self.are_known = self.dimensions.reason is None
        self.now = [self._small(size) for size in self.dimensions.group_sizes()]

    @property
    def first(self) -> int | None:
        """The group of the first dimension of the inputs."""
        groups = enumerate(self.dimensions.groups)
        places = [(number, group) for group, dims in groups for number, dim in dims if dim == 0]
        return min(places)[1] if places else None

    @staticmethod
    def _small(size: int) -> int:
        return size if 1 < size <= _LENGTH + 2 else _LENGTH

    def extents(self, spec: TensorSpec) -> tuple[Extent | None, ...]:
        """Returns how each dimension of a captured value follows the sizes of the inputs; `None` if it is not known."""
        return self.dimensions.extents(spec)

    def shape(self, spec: TensorSpec, *, is_small: bool) -> tuple[int, ...]:
        """Returns the shape of a captured value at the small sizes; a dimension that is not known keeps its size."""
        return self.dimensions.shape_at(spec, self.now if is_small and self.are_known else None)


class Rerun:
    """Operations of a model, run again on random tensors in place of what they read from elsewhere.

    Attributes:
        nodes: The operations, in order.
        base: What they return, where they could run.
        given: What they read from elsewhere.
        is_small: Whether they run at small sizes, and not at those of the capture.
    """

    def __init__(self, flow: Flow, nodes: Iterable[Node], sizes: SmallSizes, *, is_small: bool, masks: bool) -> None:
        self.flow = flow
        self._sizes, self.is_small, self._masks = sizes, is_small, masks
        every = {each for node in nodes for each in (node, node.whole) if node.kind == "op"}
        self.nodes = sorted(every, key=flow.order.__getitem__)
        self._inside = set(self.nodes)
        self.given: dict[Value, Any] = {}
        self._generator = torch.Generator().manual_seed(0)
        self.base: dict[Node, Any] = {}
        self._later: dict[Node, set[Node]] = {}
        self._run(self.base, self.nodes)

    def tensor(self, value: Value, env: Mapping[Node, Any] | None = None) -> Tensor | None:
        """Returns a value in a run; `None` if it is not a tensor there."""
        try:
            found = self._value(dict(self.base) if env is None else dict(env), value)
        except (UnknownValueError, LookupError, AttributeError, TypeError):
            return None
        is_number = isinstance(found, Tensor) and (found.is_floating_point() or found.is_complex())
        return found if is_number else None

    def changed(self, value: Value, change: Callable[[Tensor], Tensor], targets: Iterable[Value]) -> dict[Node, Any]:
        """Returns what the operations that lead to some targets return if one value is changed."""
        later = self.later_than(value.node)
        env = {node: result for node, result in self.base.items() if node not in later}
        needed = later & frozenset().union(*(self._before(target.node) for target in targets))
        is_given = value.node not in self._inside
        old = self.given.get(value)
        if is_given:
            assert old is not None
            self.given[value] = change(old)
        else:
            env[value.node] = _with(env[value.node], value.keys, change)
        try:
            self._run(env, [node for node in self.nodes if node in needed])
        finally:
            if is_given:
                self.given[value] = old
        return env

    def later_than(self, start: Node) -> set[Node]:
        """Returns the operations that depend on a value."""
        if start not in self._later:
            found = {start}
            for node in self.nodes:
                if node is not start and not found.isdisjoint(self._reads(node)):
                    found.add(node)
            self._later[start] = found - {start}
        return self._later[start]

    @functools.cache  # noqa: B019  # a slice lives as long as its question
    def _before(self, end: Node) -> frozenset[Node]:
        """Returns the operations that a result depends on, and its own."""
        found = {end}
        for node in reversed(self.nodes):
            if node in found:
                found |= self._reads(node)
        return frozenset(found)

    @functools.cache  # noqa: B019
    def _reads(self, node: Node) -> frozenset[Node]:
        if node.whole is not node:
            return frozenset([node.whole])
        found = {value.node for value in self.flow.reads(node)}
        return frozenset(found | {value.node.whole for value in self.flow.reads(node)})

    def _run(self, env: dict[Node, Any], nodes: Iterable[Node]) -> None:
        torch.default_generator.manual_seed(0)  # who asks restores its state
        with torch.no_grad():
            for node in nodes:
                try:
                    self._evaluate(env, node)
                except Exception:  # an operation on values of other sizes, or of kinds that are not made here
                    env.pop(node, None)

    def _evaluate(self, env: dict[Node, Any], node: Node) -> Any:
        if node in env:
            return env[node]
        made = node.whole
        if made is not node:
            env[node] = self._evaluate(env, made)[node.position]
            return env[node]
        given = (node.args[:3], {}) if node.op == "flex_attention" else (node.args, node.kwargs)
        args, kwargs = map_leaves(given, functools.partial(self._argument, env))
        if node.op == "flex_attention" and len(args) == 3:  # without its functions of scores, and its blocks
            q, *others = args
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in others)
            env[node] = scaled_dot_product_attention(q, k, v)
            return env[node]
        if "device" in kwargs:
            kwargs["device"] = _CPU
        if "dropout" in node.op or node.op in _CASTS:
            env[node] = args[0] if args else kwargs["input"]
        elif node.is_in_place:
            where = node.written_argument
            if isinstance(where, str):
                written = kwargs[where] = kwargs[where].clone()
            else:
                written = args[where or 0].clone()
                args = (*args[: where or 0], written, *args[(where or 0) + 1 :])
            made.target(*args, **kwargs)
            env[node] = written
        else:
            made_now = self._mapped(node, args, kwargs)
            # What memory happens to hold would be another answer in each run.
            env[node] = torch.zeros_like(made_now) if node.op in CREATIONS else made_now
        return env[node]

    def _mapped(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation; of a linear map with a large matrix, that of one of rank one."""
        if node.op in ("linear", "addmm") and node.op in LINEAR_MAPS:
            given = args[1:3] if node.op == "addmm" else args[:2]
            if len(given) == 2 and not kwargs and all(isinstance(each, Tensor) for each in given):
                x, weight = given
                bias = args[0] if node.op == "addmm" else args[2] if len(args) > 2 else None
                if weight.ndim == 2 and weight.stride() == (0, 0):
                    outs = weight.shape[0] if node.op == "linear" else weight.shape[1]
                    by, to = (self._vector(size) for size in (x.shape[-1], outs))
                    result = (x * by).sum(-1, keepdim=True) / x.shape[-1] ** 0.5 * to
                    return result if bias is None else result + bias
        return node.target(*args, **kwargs)

    @staticmethod
    @functools.cache
    def _vector(size: int) -> Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(size))

    def _argument(self, env: dict[Node, Any], given: Any) -> Any:
        if isinstance(given, torch.dtype) and given.is_floating_point:
            return torch.float32
        if isinstance(given, torch.device):
            return _CPU
        if isinstance(given, float) and abs(given) > _MOST:
            return math.copysign(_MOST, given)
        if not isinstance(given, Ref):
            return given
        value = self.flow.resolve(given.node, given.dig)
        if value is None:
            raise UnknownValueError(f"the value of {given.node.name!r} is not one value")
        return self._value(env, value)

    def _value(self, env: dict[Node, Any], value: Value) -> Any:
        if value.node in env:
            return functools.reduce(take, value.keys, env[value.node])
        if isinstance(value.spec, TensorSpec):
            if value.node in self._inside:
                raise UnknownValueError(f"{self.flow.path(value)} could not be computed")
            if value not in self.given:
                self.given[value] = self._made(value)
            return self.given[value]
        if value.node.kind == "op":  # arithmetic on sizes
            try:
                return functools.reduce(take, value.keys, self._evaluate(env, value.node))
            except Exception:
                if not isinstance(value.spec, ScalarSpec):
                    raise
        if isinstance(value.spec, ScalarSpec):
            return value.spec.value
        raise UnknownValueError(f"{self.flow.path(value)} is no tensor")

    def _made(self, value: Value) -> Tensor:
        """Returns a tensor in place of one from elsewhere: random numbers, or a buffer's own ones."""
        spec = value.spec
        assert isinstance(spec, TensorSpec)
        is_held = value.node.kind in HELD_KINDS and value.node.kind != "parameter" and not value.keys
        if is_held and (held := _held(self.flow.frame_of[value.node], value.node)) is not None:
            return held
        shape = self._sizes.shape(spec, is_small=self.is_small)
        if spec.dtype == torch.bool:
            return torch.full(shape, self._masks)
        if not spec.dtype.is_floating_point:
            return torch.randint(0, 2, shape, generator=self._generator, dtype=spec.dtype)
        users = self.flow.users.get(value.node, ())
        is_mapped = len(shape) == 2 and bool(users) and all(user.op in ("linear", "addmm") for user in users)
        if is_mapped and math.prod(shape) > _LARGE:  # of which only the shape is needed: see `_mapped`
            return torch.zeros(1, 1).expand(shape)
        if math.prod(shape) > _LARGEST:
            raise UnknownValueError(f"{self.flow.path(value)} is too large")
        made = torch.randn(shape, generator=self._generator)
        if value.node.kind == "parameter":
            return 1 + made / 4 if len(shape) < 2 else made / shape[-1] ** 0.5
        return made


def _held(frame: Frame, node: Node) -> Tensor | None:
    """Returns a copy of a buffer, or of another tensor that the model holds; `None` if it has no values."""
    try:
        held = node.target if node.kind == "constant" else functools.reduce(
            getattr, str(node.target).split("."), frame.module
        )  # fmt: skip
        held = held() if node.kind == "constant" and callable(held) else held
    except AttributeError:
        return None
    if not isinstance(held, Tensor) or held.is_meta:
        return None
    held = held.detach().to(_CPU, copy=True)
    return held.float() if held.is_floating_point() else held


def _with(whole: Any, keys: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> Any:
    if not keys:
        return change(whole.clone())
    items = list(whole)
    items[keys[0]] = _with(items[keys[0]], keys[1:], change)
    return tuple(items)


@dataclass(frozen=True, slots=True)
class Atom:
    """A dimension of a value, or a factor of one.

    Attributes:
        dim: The dimension.
        size: Its size.
        group: The sizes of the inputs that it follows; `None` if it does not, or if that is not known.
    """

    dim: int
    size: int
    group: int | None = None


class Study:
    """What changes in the values of a slice if one of them is changed."""

    def __init__(self, flow: Flow, nodes: Collection[Node], sizes: SmallSizes, start: Value | None = None) -> None:
        self.flow, self.sizes, self._start = flow, sizes, start
        self.run = self._runnable(nodes)
        self._tensors: dict[Value, Tensor | None] = {}
        self._atoms: dict[Value, tuple[Atom, ...]] = {}
        self._reached: dict[tuple[Value, Value], Reached] = {}

    def _runnable(self, nodes: Collection[Node]) -> Rerun:
        """Returns the slice of which most could run: at small sizes or as captured, with masks of either kind."""
        best: Rerun | None = None
        for is_small, masks in product((True, False), (True, False)):
            made = Rerun(self.flow, nodes, self.sizes, is_small=is_small, masks=masks)
            if best is None or _count(made) > _count(best):
                best = made
            if _count(best) >= len(best.nodes):
                break
        assert best is not None
        return best

    @functools.cached_property
    def floats(self) -> list[Value]:
        """The tensors of real numbers among the results of operations, in order."""
        found = ((value, self.tensor(value)) for value in map(Value, self.run.nodes))
        return [value for value, tensor in found if tensor is not None and tensor.is_floating_point()]

    def tensor(self, value: Value) -> Tensor | None:
        """Returns a value, without changes; `None` if it could not be computed."""
        if value not in self._tensors:
            self._tensors[value] = self.run.tensor(value)
        return self._tensors[value]

    def size(self, value: Value) -> int:
        """Returns how many real numbers a value has; 0 if it could not be computed."""
        tensor = self.tensor(value)
        return 0 if tensor is None else tensor.numel() * (1 + tensor.is_complex())

    def atoms(self, value: Value) -> tuple[Atom, ...]:
        """Returns the dimensions of a value, those that are products of two divided into these."""
        if value not in self._atoms:
            self._atoms[value] = tuple(self._divided(value))
        return self._atoms[value]

    def _divided(self, value: Value) -> Iterator[Atom]:
        tensor, spec = self.tensor(value), value.spec
        if not isinstance(spec, TensorSpec):
            return
        shape = self.sizes.shape(spec, is_small=self.run.is_small) if tensor is None else tensor.shape
        for dim, (size, extent) in enumerate(zip(shape, self.sizes.extents(spec), strict=True)):
            if extent is None or not extent.groups:
                yield from self._factored(value, dim, size)
                continue
            parts = [Atom(dim, self.sizes.now[group], group) for group in extent.groups]
            parts += [Atom(dim, extent.factor)] * (extent.factor > 1)
            if len(parts) == 1:
                yield Atom(dim, size, parts[0].group)
            elif len(parts) == 2 and parts[0].size * parts[1].size == size:
                yield from self._ordered(value, dim, parts)
            else:
                yield Atom(dim, size)

    def _ordered(self, value: Value, dim: int, parts: list[Atom]) -> list[Atom]:
        """Orders the factors of a dimension, by what the start reaches from one index of one of them."""
        start = self.atoms(self._start) if self._start not in (None, value) else ()
        for part in parts:
            at = [j for j, atom in enumerate(start) if atom.group is not None and atom.group == part.group]
            if len(at) == 1 and (is_outer := self._is_outer(at[0], value, dim, part.size)) is not None:
                return parts if is_outer == (part is parts[0]) else parts[::-1]
        return [Atom(dim, parts[0].size * parts[1].size)]

    def _factored(self, value: Value, dim: int, size: int) -> list[Atom]:
        """Divides a dimension into two of the start, if one of them is its outer factor, and the other its inner."""
        start = self.atoms(self._start) if self._start not in (None, value) else ()
        for (j, one), (k, other) in combinations(enumerate(start), 2):
            if one.size * other.size == size and one.size > 1 < other.size:
                order = self._is_outer(j, value, dim, one.size), self._is_outer(k, value, dim, other.size)
                if order in ((True, False), (False, True)):
                    sizes = (one.size, other.size) if order[0] else (other.size, one.size)
                    return [Atom(dim, each) for each in sizes]
        return [Atom(dim, size)]

    def _is_outer(self, j: int, value: Value, dim: int, size: int) -> bool | None:
        """Whether the start's atom `j` is the outer factor of a dimension: it reaches a block of it, not every n-th."""
        assert self._start is not None
        tensor = self.tensor(value)
        if tensor is None:
            return None
        whole, other = tensor.shape[dim], tensor.shape[dim] // size
        found = [self._indices(self._start, j, index, "noise", value, tensor, dim) for index in range(min(size, 2))]
        is_outer = all(each <= set(range(i * other, (i + 1) * other)) for i, each in enumerate(found))
        is_inner = all(each <= set(range(i, whole, size)) for i, each in enumerate(found))
        return None if is_outer == is_inner or not any(found) else is_outer

    def _indices(self, start: Value, j: int, i: int, how: str, value: Value, old: Any, dim: int) -> set[int]:
        new = self.run.tensor(value, self._changed(start, j, i, how, [value]))
        if new is None or old is None or new.shape != old.shape:
            return set()
        return set(_indices(differs(old, new), dim))

    # -- changes -------------------------------------------------------------------------------------------------------

    def _view(self, tensor: Tensor, atoms: tuple[Atom, ...]) -> Tensor:
        return tensor.reshape([atom.size for atom in atoms])

    def _changed(self, value: Value, j: int, i: int, how: str, targets: Iterable[Value]) -> dict[Node, Any]:
        """Returns a run in which a value is changed at index `i` of its atom `j`."""
        atoms = self.atoms(value)

        def change(tensor: Tensor) -> Tensor:
            seen = self._view(tensor.contiguous(), atoms).clone()
            part = seen.select(j, i)
            if how == "noise":  # as large as its range: a softmax may be saturated
                usual = seen.abs()[seen.abs() < 1e6]
                added = torch.randn(part.shape, generator=torch.Generator().manual_seed(1), dtype=part.dtype)
                part += (added + added.sgn()) * (usual.max() if usual.numel() else 1.0)
            else:  # norms over all of it stay as they are
                part.copy_(part.flatten().roll(1).reshape(part.shape))
            return seen.reshape(tensor.shape)

        return self.run.changed(value, change, targets)

    def reach(self, value: Value, target: Value) -> Reached:
        """Returns what changes in a target if a value is changed at some indices of one of its atoms."""
        if (value, target) not in self._reached:
            self.ask(value, [target])
        return self._reached[value, target]

    def ask(self, value: Value, targets: Iterable[Value]) -> None:
        """Finds what changes in several targets."""
        unknown = [target for target in targets if (value, target) not in self._reached]
        for target in unknown:
            self._reached[value, target] = {}
        old = {target: self.tensor(target) for target in unknown}
        if self.tensor(value) is None:
            return
        atoms = self.atoms(value)
        for j, atom in enumerate(atoms):
            has_others = atom.group is None and any(k != j and other.size > 1 for k, other in enumerate(atoms))
            for i, how in product(_chosen(atom.size), ("noise", "roll")[: 2 if has_others else 1]):
                env = self._changed(value, j, i, how, unknown)
                for target, before in old.items():
                    after = None if before is None else self.run.tensor(target, env)
                    if after is None or before is None or after.shape != before.shape:
                        continue
                    different = differs(*(self._view(each, self.atoms(target)) for each in (before, after)))
                    found = [_indices(different, e) for e in range(different.ndim)]
                    self._reached[value, target][j, i, how] = found

    def depends(self, target: Value, value: Value) -> bool:
        """Whether a change of a value reaches a target."""
        return any(any(sets) for sets in self.reach(value, target).values())

    def is_same(self, value: Value, j: int, target: Value, e: int) -> bool:
        """Whether a change at an index of atom `j` reaches that index of the target's atom `e`, and no other."""
        for how in ("noise", "roll"):
            hits = list(self._hits(value, j, target, e, how))
            if len(hits) > 1 and all(found == {i} for i, found in hits):
                return True
            if len(hits) == 1 and hits[0][0] > 0 and hits[0][1] == {hits[0][0]}:
                return True
        return False

    def is_split(self, value: Value, j: int, target: Value, e: int) -> bool:
        """Whether different indices of atom `j` reach different indices of the target's atom `e`, as heads do."""
        if self.atoms(value)[j].size > self.atoms(target)[e].size:  # a dimension that holds more than that
            return False
        for how in ("noise", "roll"):
            hits = [found for _, found in self._hits(value, j, target, e, how)]
            if len(hits) > 1 and sum(map(len, hits)) == len(frozenset().union(*hits)):
                return True
        return False

    def _hits(self, value: Value, j: int, target: Value, e: int, how: str) -> Iterator[tuple[int, frozenset[int]]]:
        for (atom, i, kind), sets in self.reach(value, target).items():
            if atom == j and kind == how and sets[e]:
                yield i, sets[e]


class PartRoles:
    """What the dimensions of the values of one part of a model are, by what they are at its start and its end.

    Attributes:
        study: What changes in the part.
        start, end: What it reads, and what it makes of it.
        start_axes, end_axes: What the dimensions of these are, where that is known.
        groups: What the dimensions of the inputs are that have one size: batch, or position.
    """

    def __init__(
        self, study: Study, start: Value, end: Value, groups: dict[int, str], start_axes: Axes, end_axes: Axes
    ) -> None:
        self.study, self.start, self.end = study, start, end
        self.groups, self.start_axes, self.end_axes = groups, start_axes, end_axes
        self._known: dict[tuple[Value, str], Axes] = {}

    def group_role(self, atom: Atom) -> str | None:
        """Returns what an atom is that follows the inputs' sizes."""
        return None if atom.group is None else self.groups.get(atom.group)

    def carried(self, value: Value, e: int) -> str | None:
        """Returns which of the outer dimensions of the start or the end an atom of a value is; `None` for others."""
        study = self.study
        atom = study.atoms(value)[e]
        if atom.group is not None:
            return self.group_role(atom)
        for j, role in self._outer(self.start, self.start_axes):
            if value != self.start and study.is_same(self.start, j, value, e):
                return role
        for f, role in self._outer(self.end, self.end_axes):
            if value != self.end and (
                study.is_same(value, e, self.end, f) or (role == "position" and study.is_split(value, e, self.end, f))
            ):
                return role
        return None

    def _outer(self, value: Value, axes: Axes) -> Iterator[tuple[int, str]]:
        atoms = self.study.atoms(value)
        for j, atom in enumerate(atoms):
            role = axes[atom.dim] if len(atoms) == len(axes) else None
            if role in _OUTER and atom.size > 1:
                yield j, role if role in ("batch", "token") else "position"

    def mixes(self, others: Iterable[Value]) -> bool | None:
        """Whether the part moves values between positions, of its start or of others; `None` if that is not known."""
        study, found = self.study, set[bool | None]()
        ends = range(len(study.atoms(self.end)))
        for value in (self.start, *others):
            if value == self.start:
                places = [j for j, role in self._outer(value, self.start_axes) if role != "batch"]
            else:
                atoms = study.atoms(value)
                places = [
                    j for j, each in enumerate(atoms) if each.group is not None and self.group_role(each) != "batch"
                ]
            if study.depends(self.end, value):
                is_apart = all(any(study.is_same(value, j, self.end, e) for e in ends) for j in places)
                found.add(not is_apart if places else None)
        return True if True in found else None if None in found or not found else False

    def axes(self, value: Value, last: str = "channel") -> Axes:
        """Returns what the dimensions of a value are that is laid out like the stream: its features are `last`."""
        for end, axes in ((self.start, self.start_axes), (self.end, self.end_axes)):
            if value == end and axes:
                return axes
        if (value, last) not in self._known:
            atoms = self.study.atoms(value)
            names = list(map(self.group_role, atoms))
            if names.count(None) > 1:  # else that is the one with the features
                names = [self.carried(value, e) for e in range(len(atoms))]
            self._known[value, last] = joined(atoms, named_rest(atoms, names, last))
        return self._known[value, last]


def is_apart(study: Study, start: Value, end: Value) -> list[bool | None]:
    """Returns for each atom of the start whether its indices do not mix on the way to the end; `None` if not known."""
    atoms, ends = study.atoms(start), range(len(study.atoms(end)))
    if not study.depends(end, start):
        return [None] * len(atoms)
    return [
        None if atom.size == 1 else any(study.is_same(start, j, end, e) for e in ends) for j, atom in enumerate(atoms)
    ]


def stream_axes(
    atoms: Sequence[Atom], evidence: Iterable[Sequence[bool | None]], groups: Mapping[int, str], first: int | None
) -> Axes:
    """Returns what the dimensions of a stream are, from what the parts of its layers do with them.

    Rows of the batch never mix, channels always do, and positions in some parts.

    Args:
        atoms: The dimensions.
        evidence: For each part that could run, which of them it keeps apart.
        groups: What is known of dimensions that have the size of an input.
        first: The group of the first dimension of the inputs, which is the batch if no part mixes positions: both are
            treated alike then. `None` if some part could not run.
    """
    names: list[str | None] = [None if atom.group is None else groups.get(atom.group) for atom in atoms]
    apart, mixed = list[int](), list[int]()
    for j, atom in enumerate(atoms):
        found = {each[j] for each in evidence if len(each) == len(atoms)} - {None}
        if names[j] is None and (found == {True, False} or (found == {False} and atom.group is not None)):
            names[j] = "position"
        elif names[j] is None and found == {True}:
            apart.append(j)
        elif found == {False}:
            mixed.append(j)
    if "position" not in names and any(atoms[j].group == first is not None for j in apart):
        for j in apart:
            names[j] = "batch" if atoms[j].group == first else "position"
    elif "position" in names and "batch" not in names and len(apart) == 1:
        names[apart[0]] = "batch"
    elif "batch" in names:
        for j in apart:
            names[j] = "position"
    if len(mixed) == 1:
        names[mixed[0]] = "channel"
    return joined(atoms, named_rest(atoms, names, "channel"))


_OUTER = ("batch", "position", "token", "height", "width")


def named_rest(atoms: Sequence[Atom], names: Sequence[str | None], last: str) -> list[str | None]:
    """Returns the names of atoms, with those that are left: one that has features, and a batch of one."""
    found = list(names)
    rest = [e for e, atom in enumerate(atoms) if found[e] is None and atom.size > 1 and atom.group is None]
    if len(rest) == 1:
        found[rest[0]] = last
    single = [e for e, atom in enumerate(atoms) if found[e] is None and atom.size == 1]
    if len(single) == 1 and "batch" not in found:
        found[single[0]] = "batch"
    places = [e for e, name in enumerate(found) if name == "position"]
    if len(places) == 2:  # without a batch, one of them may be it
        found[places[0]], found[places[1]] = ("height", "width") if "batch" in found else (None, None)
    return found


def joined(atoms: Sequence[Atom], names: Sequence[str | None]) -> Axes:
    """Returns what dimensions are, from what their factors are."""
    by_dim: dict[int, list[str | None]] = {}
    for atom, name in zip(atoms, names, strict=True):
        by_dim.setdefault(atom.dim, []).append(name)
    return tuple(map(_joined, by_dim.values()))


def _joined(names: list[str | None]) -> str | None:
    known = [name for name in names if name is not None]
    if len(known) < len(names):
        return None
    return "token" if known == ["batch", "position"] else "_".join(known)


def _chosen(size: int) -> list[int]:
    return sorted({*range(min(size, _MOST_INDICES - 1)), size - 1})


def _count(one: Rerun) -> int:
    """Returns how many values of a slice are known, and are numbers."""
    found = (one.base.get(node) for node in one.nodes)
    return sum(
        each is not None and not (isinstance(each, Tensor) and each.is_floating_point() and bool(each.isnan().any()))
        for each in found
    )


def differs(one: Tensor, other: Tensor) -> Tensor:
    """Returns where two values differ by more than rounding."""
    size = one.abs()
    usual = size[size < 1e6]
    limit = _ROUNDING * (size.nan_to_num(0.0, 0.0) + (usual.mean() if usual.numel() else 0.0))
    return ((other - one).abs().nan_to_num(0.0, 1.0) > limit) & (one != other)


def _indices(different: Tensor, dim: int) -> frozenset[int]:
    others = [d for d in range(different.ndim) if d != dim]
    return frozenset((different.any(dim=others) if others else different).nonzero().flatten().tolist())
