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
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from graphpatch_notebook.capture.records import HELD_KINDS, Frame, Node, Ref, map_leaves
from graphpatch_notebook.components.dimensions import Dimensions
from graphpatch_notebook.components.flow import Axes, Flow, UnknownValueError, Value
from graphpatch_notebook.components.operations import UNFILLED
from graphpatch_notebook.values import ScalarSpec, TensorSpec, take

Reached: TypeAlias = "dict[tuple[int, int], list[frozenset[int]]]"
"""The changed indices of each atom of a value: by the atom of the changed value, and its index."""

RunValues: TypeAlias = "dict[Node | Value, Any]"
"""What operations return in a run, and what a run has in place of values from elsewhere."""

_MOST_INDICES = 3
_LARGE, _LARGEST = 50_000, 50_000_000
_ROUNDING = 64 * torch.finfo(torch.float32).eps
_MOST = torch.finfo(torch.float32).max
_CPU = torch.device("cpu")
_CASTS = frozenset("half bfloat16 double cuda cpu".split())


class Rerun:
    """Operations of a model, run again on random tensors in place of what they read from elsewhere.

    Attributes:
        nodes: The operations, in order.
        base: What they return, where they could run; and what they read from elsewhere.
        sizes: The sizes of the groups of dimensions of the inputs at which they run.
        later_than: The operations that depend on a value.
    """

    def __init__(self, flow: Flow, nodes: Iterable[Node], dimensions: Dimensions, sizes: Sequence[int]) -> None:
        self.flow, self._dimensions, self.sizes = flow, dimensions, sizes
        every = {each for node in nodes for each in (node, node.whole) if node.kind == "op"}
        self.nodes = sorted(every, key=flow.order.__getitem__)
        self._inside = frozenset(self.nodes)
        self._writes = any(node.is_in_place for node in self.nodes)
        self._given: dict[Value, Tensor] = {}
        self._reads = functools.cache(self._nodes_read)
        self.later_than = functools.cache(self._nodes_after)
        self._generator = torch.Generator().manual_seed(0)
        self.base = self._run({}, self.nodes)

    @property
    def is_whole(self) -> bool:
        """Whether all operations could run."""
        return all(self.base.get(node) is not None for node in self.nodes)

    def tensor(self, value: Value, env: RunValues | None = None) -> Tensor | None:
        """Returns a value in a run; `None` if it is not a tensor there."""
        try:
            found = self._value(self.base if env is None else env, value)
        except (UnknownValueError, LookupError, AttributeError, TypeError):
            return None
        is_number = isinstance(found, Tensor) and (found.is_floating_point() or found.is_complex())
        return found if is_number else None

    def changed(self, value: Value, change: Callable[[Tensor], Tensor], targets: Iterable[Value]) -> RunValues:
        """Returns what the operations that lead to some targets return if one value is changed."""

        def apply(env: RunValues) -> None:
            if value.node in self._inside:
                env[value.node] = _with(env[value.node], value.keys, change)
            else:
                env[value] = change(self._value(env, value))

        last = max(self.flow.order[target.node] for target in targets)
        # Memory that is written into is made again.
        later = self._inside if self._writes else self.later_than(value.node)
        env = {} if self._writes else {key: result for key, result in self.base.items() if key not in later}
        nodes = [node for node in self.nodes if node in later and self.flow.order[node] <= last]
        return self._run(env, nodes, value.node, apply)

    def _nodes_after(self, start: Node) -> frozenset[Node]:
        """Returns the operations that depend on a value."""
        found = {start}
        for node in self.nodes:
            if self.flow.order[node] > self.flow.order[start] and not found.isdisjoint(self._reads(node)):
                found.add(node)
        return frozenset(found - {start})

    def _nodes_read(self, node: Node) -> frozenset[Node]:
        if node.whole is not node:
            return frozenset([node.whole])
        reads = [*self.flow.reads(node)]
        reads += [part for read in reads for part in self.flow.filled.get(read.node, ())]
        return frozenset(each for read in reads for each in (read.node, read.node.whole))

    def _run(
        self,
        env: RunValues,
        nodes: Collection[Node],
        at: Node | None = None,
        change: Callable[[RunValues], None] = lambda _: None,
    ) -> RunValues:
        """Returns the results of operations, besides those in `env`; after one of them, a value is changed."""
        torch.default_generator.manual_seed(0)  # who asks restores its state
        found: RunValues = {}
        if at is not None and at not in nodes:
            change(env)
        with torch.no_grad():
            for node in nodes:
                try:
                    self._evaluate(env, node)
                    if node is at:
                        change(env)
                except Exception:  # an operation on values of other sizes, or of kinds that are not made here
                    env.pop(node, None)
                if self._writes:
                    found[node] = _copied(env.get(node))
        return env | found

    def _evaluate(self, env: RunValues, node: Node) -> Any:
        if node in env:
            return env[node]
        if node.whole is not node:
            env[node] = self._evaluate(env, node.whole)[node.position]
            return env[node]
        given = (node.args[:3], {}) if node.op == "flex_attention" else (node.args, node.kwargs)
        args, kwargs = map_leaves(given, functools.partial(self._argument, env))
        if "device" in kwargs:
            kwargs["device"] = _CPU
        if node.op == "flex_attention" and len(args) == 3:  # without its functions of scores, and its blocks
            q, *others = args
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in others)
            result: Any = scaled_dot_product_attention(q, k, v)
        elif "dropout" in node.op or node.op in _CASTS:
            result = args[0] if args else kwargs["input"]
        else:
            result = self._mapped(node, args, kwargs)
        if node.is_in_place:
            result = node.written_of(args, kwargs)
        # What memory happens to hold would be another answer in each run.
        env[node] = torch.zeros_like(result) if node.op in UNFILLED else result
        return env[node]

    def _mapped(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation; of a linear map with a large matrix, that of one of rank one."""
        if node.op in ("linear", "addmm") and len(args) > 1 and not kwargs:
            x, weight, bias = (*args, None)[:3] if node.op == "linear" else (*args[1:], args[0])
            if isinstance(weight, Tensor) and weight.ndim == 2 and weight.stride() == (0, 0):
                outs = weight.shape[0] if node.op == "linear" else weight.shape[1]
                result = (x * _vector(x.shape[-1])).sum(-1, keepdim=True) / x.shape[-1] ** 0.5 * _vector(outs)
                return result if bias is None else result + bias
        return node.target(*args, **kwargs)

    def _argument(self, env: RunValues, given: Any) -> Any:
        if isinstance(given, torch.dtype) and given.is_floating_point:
            return torch.float32
        if isinstance(given, torch.device):
            return _CPU
        if isinstance(given, float) and abs(given) > _MOST:
            return math.copysign(_MOST, given)
        return self._value(env, self.flow.read(given)) if isinstance(given, Ref) else given

    def _value(self, env: RunValues, value: Value) -> Any:
        if value in env:
            return env[value]
        if value.node in env:
            return functools.reduce(take, value.keys, env[value.node])
        if isinstance(value.spec, TensorSpec):
            if value.node in self._inside:
                raise UnknownValueError(f"{self.flow.path(value)} could not be computed")
            if value not in self._given:
                self._given[value] = self._made(value)
            if self._writes and value.node.kind != "parameter":
                env[value] = self._given[value].clone()
            return env.get(value, self._given[value])
        if value.node.kind == "op":  # arithmetic on sizes
            with suppress(Exception):
                return functools.reduce(take, value.keys, self._evaluate(env, value.node))
        if isinstance(value.spec, ScalarSpec):
            return value.spec.value
        raise UnknownValueError(f"{self.flow.path(value)} is not a tensor")

    def _made(self, value: Value) -> Tensor:
        """Returns a tensor in place of one from elsewhere: random numbers, or a buffer's own ones."""
        spec = value.spec
        assert isinstance(spec, TensorSpec)
        is_held = value.node.kind in HELD_KINDS and value.node.kind != "parameter" and not value.keys
        if is_held and (held := _held(self.flow.frame_of[value.node], value.node)) is not None:
            return held
        shape = self._dimensions.shape_at(spec, self.sizes)
        if spec.dtype == torch.bool:  # whether true hides or shows, each row of a mask has both
            return torch.ones(shape).nonzero().sum(-1).view(shape) % 2 == 0
        if not spec.dtype.is_floating_point:
            numbers = torch.randint(0, 2, shape, generator=self._generator, dtype=spec.dtype)
            numbers.view(-1)[-1:] = 1 - numbers.view(-1)[:1]  # positions, say, are not all the same
            return numbers
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
        held = node.target if node.kind == "constant" else attrgetter(str(node.target))(frame.module)
    except AttributeError:
        return None
    held = held() if node.kind == "constant" and callable(held) else held
    if not isinstance(held, Tensor) or held.is_meta:
        return None
    held = held.detach().to(_CPU, copy=True)
    return held.float() if held.is_floating_point() else held


@functools.cache
def _vector(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def _copied(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.clone()
    return type(result)(map(_copied, result)) if type(result) in (tuple, list) else result


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
    """What changes in the values of a slice if one of them is changed.

    Attributes:
        run: The slice, run again.
        tensor: A value in it, without changes; `None` if it could not be computed.
        atoms: The dimensions of a value, those that are products of two divided into these.
    """

    def __init__(self, flow: Flow, nodes: Collection[Node], dimensions: Dimensions, start: Value) -> None:
        self.flow, self.dimensions, self.start = flow, dimensions, start
        self.run = self._runnable(nodes)
        self.tensor = functools.cache(self.run.tensor)
        self.atoms = functools.cache(self._divided)
        self._reached: dict[Value, dict[Value, Reached]] = {}

    def _runnable(self, nodes: Collection[Node]) -> Rerun:
        """Returns the run at small sizes; or as captured, if more operations can run there."""
        known = self.dimensions
        small = Rerun(self.flow, nodes, known, known.small_sizes)
        whole = small if small.is_whole else Rerun(self.flow, nodes, known, known.group_sizes())
        return max(small, whole, key=lambda each: sum(each.base.get(node) is not None for node in each.nodes))

    @functools.cached_property
    def floats(self) -> list[Value]:
        """The tensors of real numbers among the results of operations, in order."""
        found = ((value, self.tensor(value)) for value in map(Value, self.run.nodes))
        return [value for value, tensor in found if tensor is not None and tensor.is_floating_point()]

    def size(self, value: Value) -> int:
        """Returns how many real numbers a value has; 0 if it could not be computed."""
        tensor = self.tensor(value)
        return 0 if tensor is None else tensor.numel() * (1 + tensor.is_complex())

    def _divided(self, value: Value) -> tuple[Atom, ...]:
        tensor, spec, known, found = self.tensor(value), value.spec, self.dimensions, list[Atom]()
        if not isinstance(spec, TensorSpec):
            return ()
        shape = known.shape_at(spec, self.run.sizes) if tensor is None else tensor.shape
        outer = () if value == self.start else (atom.size for atom in self.atoms(self.start) if atom.size > 1)
        pairs = list(combinations(outer, 2))  # of which one may be a dimension of unknown sizes
        for dim, (size, extent) in enumerate(zip(shape, known.extents(spec), strict=True)):
            options = [[Atom(dim, one), Atom(dim, other)] for one, other in pairs]
            if extent is not None:
                factors = [Atom(dim, extent.factor)] if extent.factor > 1 or not extent.groups else []
                options = [[*(Atom(dim, self.run.sizes[group], group) for group in extent.groups), *factors]]
            if len(options[0] if options else ()) == 1:
                found.append(Atom(dim, size, options[0][0].group))
            else:
                fitting = (each for each in options if len(each) == 2 and each[0].size * each[1].size == size)
                found += next(filter(None, (self._ordered(value, each) for each in fitting)), [Atom(dim, size)])
        return tuple(found)

    def _ordered(self, value: Value, parts: list[Atom]) -> list[Atom]:
        """Returns two factors of a dimension in order, by what the start reaches from one index; `[]` if unknown."""
        is_first = set[bool]()
        for part in parts if value != self.start else ():
            same = [
                j for j, atom in enumerate(self.atoms(self.start)) if (atom.group, atom.size) == (part.group, part.size)
            ]
            if len(same) == 1 and (is_outer := self._is_outer(same[0], value, part)) is not None:
                is_first.add(is_outer == (part is parts[0]))
        return [] if len(is_first) != 1 else parts if True in is_first else parts[::-1]

    def _is_outer(self, j: int, value: Value, part: Atom) -> bool | None:
        """Whether the start's atom `j` is the outer factor of a dimension: it reaches a block of it, not every n-th."""
        tensor, found, dim, size = self.tensor(value), list[frozenset[int]](), part.dim, part.size
        if tensor is None:
            return None
        for index in range(min(size, 2)):
            new = self.run.tensor(value, self._changed(self.start, j, index, [value]))
            is_like = new is not None and new.shape == tensor.shape  # choices may select other numbers of rows
            found.append(_indices(differs(tensor, new), dim) if is_like and new is not None else frozenset())
        other = tensor.shape[dim] // size
        is_outer = all(each <= {*range(i * other, (i + 1) * other)} for i, each in enumerate(found))
        is_inner = all(each <= {*range(i, tensor.shape[dim], size)} for i, each in enumerate(found))
        return None if is_outer == is_inner or not any(found) else is_outer

    # -- changes -------------------------------------------------------------------------------------------------------

    def _view(self, tensor: Tensor, atoms: tuple[Atom, ...]) -> Tensor:
        return tensor.reshape([atom.size for atom in atoms])

    def _changed(self, value: Value, j: int, i: int, targets: Iterable[Value]) -> RunValues:
        """Returns a run in which a value is changed at index `i` of its atom `j`.

        What is at an index of a feature is exchanged there, which leaves norms over all features alone; or else it gets
        noise as large as the range of the value: a softmax may be saturated.
        """
        atoms = self.atoms(value)
        others = enumerate(atom for k, atom in enumerate(atoms) if k != j)
        features = [(atom.size, k) for k, atom in others if atom.group is None and atom.size > 1]

        def change(tensor: Tensor) -> Tensor:
            seen = self._view(tensor.contiguous(), atoms).clone()
            part = seen.select(j, i)
            exchanged = part.roll(1, max(features)[1]) if features and atoms[j].group is None else part
            if torch.equal(exchanged, part):
                added = torch.randn(part.shape, generator=torch.Generator().manual_seed(1), dtype=part.dtype)
                exchanged = part + (added + added.sgn()) * (_usual(seen).max() or 1.0)
            part.copy_(exchanged)
            return seen.reshape(tensor.shape)

        return self.run.changed(value, change, targets)

    def with_equal(self, value: Value, j: int, target: Value) -> Tensor | None:
        """Returns the target if all indices of atom `j` of a value have what the first has."""
        atoms = self.atoms(value)

        def change(tensor: Tensor) -> Tensor:
            seen = self._view(tensor.contiguous(), atoms)
            return seen.narrow(j, 0, 1).expand_as(seen).reshape(tensor.shape)

        found, old = self.run.tensor(target, self.run.changed(value, change, [target])), self.tensor(target)
        is_alike = found is not None and old is not None and found.shape == old.shape
        return self._view(found, self.atoms(target)) if found is not None and is_alike else None

    def ask(self, value: Value, targets: Iterable[Value]) -> None:
        """Finds what changes in targets if a value is changed at some indices of each of its atoms."""
        known = self._reached.setdefault(value, {})
        new = [target for target in targets if target not in known]
        known |= {target: {} for target in new}
        old = {target: tensor for target in new if (tensor := self.tensor(target)) is not None}
        if self.tensor(value) is None or not old:
            return
        for j, atom in enumerate(self.atoms(value)):
            for i in _chosen(atom.size):
                env = self._changed(value, j, i, old)
                for target, before in old.items():
                    after = self.run.tensor(target, env)
                    if after is not None and after.shape == before.shape:
                        different = differs(*(self._view(each, self.atoms(target)) for each in (before, after)))
                        known[target][j, i] = [_indices(different, e) for e in range(different.ndim)]

    def reach(self, value: Value, target: Value) -> Reached:
        """Returns what changes in a target if a value is changed at some indices of each of its atoms."""
        self.ask(value, [target])
        return self._reached[value][target]

    def depends(self, target: Value, value: Value) -> bool:
        """Whether a change of a value reaches a target."""
        return any(map(any, self.reach(value, target).values()))

    def is_same(self, value: Value, j: int, target: Value, e: int) -> bool:
        """Whether a change at an index of atom `j` reaches that index of the target's atom `e`, and no other."""
        hits = self.hits(value, j, target, e)
        return (len(hits) > 1 or any(hits)) and all(found == {i} for i, found in hits.items())

    def is_split(self, value: Value, j: int, target: Value, e: int) -> bool:
        """Whether different indices of atom `j` reach different indices of the target's atom `e`, as heads do."""
        if self.atoms(value)[j].size > self.atoms(target)[e].size:  # a dimension that holds more than that
            return False
        hits = self.hits(value, j, target, e).values()
        return len(hits) > 1 and sum(map(len, hits)) == len(frozenset().union(*hits))

    def hits(self, value: Value, j: int, target: Value, e: int) -> dict[int, frozenset[int]]:
        """Returns which indices of the target's atom `e` each index of atom `j` reaches, if any."""
        return {i: sets[e] for (atom, i), sets in self.reach(value, target).items() if atom == j and sets[e]}

    def pairs(self, value: Value, target: Value, among: Iterable[int] | None = None) -> dict[int, int]:
        """Returns which atom of a target each atom of a value is: the same one, or else one that it splits."""
        found: dict[int, int] = {}
        among = range(len(self.atoms(value))) if among is None else list(among)
        for test in (self.is_same, self.is_split):
            for j in (each for each in among if each not in found):
                others = (e for e in range(len(self.atoms(target))) if e not in found.values())
                fitting = [e for e in others if test(value, j, target, e)]
                if len(fitting) == 1:
                    found[j] = fitting[0]
        return found


class PartRoles:
    """What the dimensions of the values of one part of a model are, by what they are at its start and its end.

    Attributes:
        study: What changes in the part.
        start, end: What it reads, and what it makes of it.
        start_axes, end_axes: What the dimensions of these are, where that is known.
        groups: What the dimensions of the inputs are that have one size: batch, or position.
    """

    def __init__(
        self, study: Study, end: Value, groups: dict[int, str], start_axes: Axes = (), end_axes: Axes = ()
    ) -> None:
        self.study, self.start, self.end, self.groups = study, study.start, end, groups
        self.start_axes, self.end_axes = start_axes, end_axes

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
            if value != self.end and study.is_same(value, e, self.end, f):
                return role
            if value != self.end and role == "position" and study.is_split(value, e, self.end, f):
                return "window" if self._is_of_rows(value, e) else role
        return None

    def _is_of_rows(self, value: Value, e: int) -> bool:
        """Whether different indices of an atom reach different rows of the batch."""
        rows = [f for f, role in self._outer(self.end, self.end_axes) if role == "batch"]
        return any(len({*self.study.hits(value, e, self.end, f).values()}) > 1 for f in rows)

    def _outer(self, value: Value, axes: Axes) -> Iterator[tuple[int, str]]:
        atoms = self.study.atoms(value)
        for j, atom in enumerate(atoms):
            role = axes[atom.dim] if len(atoms) == len(axes) else None
            if role in _OUTER and atom.size > 1:
                yield j, role if role in ("batch", "token") else "position"

    def mixes(self, others: Iterable[Value]) -> bool | None:
        """Whether the part moves values between positions, of its start or of others; `None` if that is not known."""
        found = set[bool | None]()
        for value in (self.start, *others):
            roles = dict(self._outer(value, self.start_axes)) if value == self.start else {}
            for j, atom in enumerate(self.study.atoms(value)):
                if atom.group is not None and atom.size > 1:
                    roles.setdefault(j, self.group_role(atom) or "position")
            places = [j for j, role in roles.items() if role != "batch"]
            if self.study.depends(self.end, value):
                apart, is_whole = is_apart(self.study, value, self.end), self.study.run.is_whole
                found.add(not all(apart[j] for j in places) or (False if places and is_whole else None))
        return True if True in found else None if None in found or not found else False

    def axes(self, value: Value, last: str = "channel") -> Axes:
        """Returns what the dimensions of a value are that is laid out like the stream: its features are `last`."""
        for end, axes in ((self.start, self.start_axes), (self.end, self.end_axes)):
            if value == end and axes:
                return axes
        atoms = self.study.atoms(value)
        names = list(map(self.group_role, atoms))
        if names.count(None) > 1:  # else that is the one with the features
            names = [self.carried(value, e) for e in range(len(atoms))]
        return joined(atoms, named_rest(atoms, names, last))


def is_apart(study: Study, start: Value, end: Value) -> list[bool | None]:
    """Returns for each atom of the start whether its indices do not mix on the way to the end; `None` if not known."""
    atoms, ends = study.atoms(start), study.atoms(end)
    if not study.depends(end, start):
        return [None] * len(atoms)

    def is_kept(j: int, atom: Atom) -> bool:
        # A larger dimension may hold more than that: the windows of all rows of the batch.
        return any(
            study.is_same(start, j, end, e) or (other.size > atom.size and study.is_split(start, j, end, e))
            for e, other in enumerate(ends)
        )

    return [None if atom.size == 1 else is_kept(j, atom) for j, atom in enumerate(atoms)]


def stream_axes(atoms: Sequence[Atom], evidence: Iterable[Sequence[bool | None]], groups: Mapping[int, str]) -> Axes:
    """Returns what the dimensions of a stream are, from what the parts of its layers do with them.

    Rows of the batch never mix, channels always do, and positions in some parts. Of several dimensions that no part
    mixes, the batch is the one that the inputs have, too; of several of these, nothing says which is the batch.

    Args:
        atoms: The dimensions.
        evidence: For each part that could run, which of them it keeps apart.
        groups: What is known of dimensions that have the size of an input.
    """
    found = [{each[j] for each in evidence if len(each) == len(atoms)} - {None} for j in range(len(atoms))]
    mixed = [j for j, atom in enumerate(atoms) if found[j] == {False} and atom.group is None]
    names: list[str | None] = [None if atom.group is None else groups.get(atom.group) for atom in atoms]
    for j, atom in enumerate(atoms):
        if names[j] is None and False in found[j] and (atom.group is not None or (True in found[j] and mixed)):
            names[j] = "position"
    apart = [
        j
        for j, name in enumerate(names)
        if name is None and found[j] == {True} and (mixed or atoms[j].group is not None)
    ]
    rows = [j for j in apart if atoms[j].group is not None] or apart
    if "batch" not in names and len(rows) == 1:
        names[rows[0]] = "batch"
    for j in apart if "batch" in names else ():
        names[j] = names[j] or "position"
    if len(mixed) == 1:
        names[mixed[0]] = "channel"
    return joined(atoms, named_rest(atoms, names, "channel"))


_OUTER = ("batch", "position", "token", "height", "width")


def named_rest(atoms: Sequence[Atom], names: Sequence[str | None], last: str) -> list[str | None]:
    """Returns the names of atoms, with those that are left: one that has features, and a batch of one."""
    found = list(names)
    rest = [e for e, atom in enumerate(atoms) if found[e] is None and atom.size > 1 and atom.group is None]
    if len(rest) == 1 and last not in found:
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
    texts = (None if None in own else "_".join(map(str, own)) for own in by_dim.values())
    return tuple("token" if text == "batch_position" else text for text in texts)


def _chosen(size: int) -> list[int]:
    return sorted({*range(min(size, _MOST_INDICES - 1)), size - 1})


def differs(one: Tensor, other: Tensor) -> Tensor:
    """Returns where two values differ by more than rounding."""
    return (other - one).abs() > _ROUNDING * (one.abs().nan_to_num(0.0, 0.0) + _usual(one).mean())


def _usual(tensor: Tensor) -> Tensor:
    """Returns the sizes of numbers, without those of masks."""
    size = tensor.abs()
    return torch.where(size < 1e6, size, 0.0)


def _indices(different: Tensor, dim: int) -> frozenset[int]:
    others = [d for d in range(different.ndim) if d != dim]
    return frozenset((different.any(dim=others) if others else different).nonzero().flatten().tolist())
