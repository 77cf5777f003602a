"""Attention: a value that is a pattern by what it does, and the queries, keys and values by what they move.

A pattern has shares of positions: it is not negative, sums to at most one along the keys, depends on the stream, and
moves values between positions, however it is written. Where a fused call cannot be opened, its documentation says what
its arguments are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import NamedTuple

import torch

from graphpatch_notebook.capture.records import HELD_KINDS, Node, Ref
from graphpatch_notebook.components.flow import Axes, Flow, Trails, Value, walk
from graphpatch_notebook.components.operations import CREATIONS, FUSED_ATTENTION, VIEWS
from graphpatch_notebook.components.roles import PartRoles, Study, differs, joined

_FARTHEST, _LARGEST, _MANY = 60, 300, 50
_SUBTRACTIONS = ("sub", "isub", "sub_", "rsub")
_NAMES = ("q", "k", "v", "q_rot", "k_rot", "scores", "pattern", "z")
_WHOLE_ATTENTION = "multi_head_attention_forward"
_UNKNOWN_DIMENSIONS = "no change of its values decides which of its dimensions are which"
_FILLED = "the model fills in this tensor part by part"
_NOT_ROTATED = "nothing rotates it (as rotary embeddings do) before the product of queries and keys"
_FUSED_REASON = (
    "attention is one fused call here; it is opened in a PatchableGraph of the model, without decompose in the "
    'ExtractionOptions, if its arguments are plain tensors; attn_implementation="eager" has no such call'
)
_FUSED_WHOLE = (
    f"it is inside of one call, {_WHOLE_ATTENTION}, which has scores and a pattern; "
    f"ExtractionOptions(decompose={{{_WHOLE_ATTENTION!r}}}) shows all values inside"
)

Names = dict[int, str]
"""What atoms of a value are, by their number."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A value of an attention, with the meaning of its dimensions."""

    value: Value
    axes: Axes


@dataclass(slots=True, eq=False)
class Parts:
    """The values inside of a part of a layer that have names, and why others do not.

    Attributes:
        found: The values, by their names.
        missing: Why others were not found.
        tiled: Which have heads that the heads of queries read by turns: `0, 1, 0, 1`, not `0, 0, 1, 1`.
    """

    found: dict[str, Part] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    tiled: set[str] = field(default_factory=set)

    def take(self, start: str, other: Parts) -> None:
        """Takes what was found inside of a part, under names that begin with `start`."""
        self.found |= {f"{start}{name}": part for name, part in other.found.items()}
        self.missing |= {f"{start}{name}": why for name, why in other.missing.items()}
        self.tiled |= {f"{start}{name}" for name in other.tiled}


@dataclass(slots=True, eq=False, kw_only=True)
class Attention(Parts):
    """One attention of the model: `q`, `k`, `v`, `q_rot`, `k_rot`, `scores`, `pattern`, `z`.

    Attributes:
        z: What it returns, before the output projection.
        v: The values, as the product with the pattern reads them.
    """

    z: Value
    v: Value | None = None


def attentions(trails: Trails, roles: PartRoles, inside: frozenset[Node]) -> list[Attention]:
    """Returns all attentions among the nodes of a part of a layer, in order of execution."""
    finder = _Finder(trails, roles, inside)
    calls = dict.fromkeys(node.whole for node in inside if node.op in {*FUSED_ATTENTION, _WHOLE_ATTENTION})
    fused = [each for node in calls if (each := finder.fused(node)) is not None]
    return sorted([*finder.written_out(), *fused], key=lambda each: trails.flow.order[each.z.node])


class _Product(NamedTuple):
    """The product of queries and keys, with the names of its atoms, and its factors."""

    result: Value
    names: Names
    factors: tuple[Value, Value]


class _Finder:
    def __init__(self, trails: Trails, roles: PartRoles, inside: frozenset[Node]) -> None:
        self._trails, self._roles, self._inside = trails, roles, inside
        self._flow: Flow = trails.flow
        self._study: Study = roles.study

    # -- the pattern and z ---------------------------------------------------------------------------------------------

    def written_out(self) -> list[Attention]:
        """Returns the attentions whose patterns are values of the code."""
        by_z: dict[Value, list[tuple[Value, int]]] = {}
        for pattern in filter(self._is_pattern, self._study.floats):
            if (found := self._z(pattern)) is not None:
                by_z.setdefault(found[0], []).append((pattern, found[1]))
        # Dimensions that are merged for the product, or added for it, are separate before.
        chosen = {z: min(reversed(found), key=lambda each: self._layout_cost(each[0])) for z, found in by_z.items()}
        made = (self._attention(*found, z) for z, found in chosen.items())
        return [each for each in made if each is not None]

    def _layout_cost(self, value: Value) -> tuple[int, int]:
        atoms = self._study.atoms(value)
        return len(atoms) - len({atom.dim for atom in atoms}), len(value.shape)

    def _is_pattern(self, value: Value) -> bool:
        tensor = self._study.tensor(value)
        assert tensor is not None
        if tensor.ndim < 2 or bool((tensor < -1e-6).any()) or not bool((tensor <= 1 + 1e-3).all()):
            return False
        return any(True for _ in self._keys_of(value)) and self._study.depends(value, self._roles.start)

    def _keys_of(self, value: Value) -> Iterator[int]:
        """Yields the atoms along which a value sums to at most one, and nearly always to something."""
        tensor, atoms = self._study.tensor(value), self._study.atoms(value)
        assert tensor is not None
        seen = tensor.reshape([atom.size for atom in atoms])
        places = [e for e, atom in enumerate(atoms) if self._roles.group_role(atom) == "position"]
        # Keys of a length that the inputs do not change (Whisper's encoder) are not known as positions.
        for e in places if len(places) > 1 else [e for e in range(len(atoms)) if e not in places]:
            sums = seen.sum(e)
            if atoms[e].size > 1 and bool((sums <= 1 + 1e-3).all()) and (sums > 1e-3).float().mean() > 0.5:
                yield e

    def _z(self, pattern: Value) -> tuple[Value, int] | None:
        """Returns the first product of a pattern with values, and the keys of the pattern."""
        study, order = self._study, self._flow.order
        later = study.run.later_than(pattern.node)
        targets = sorted((value for value in study.floats if value.node in later), key=lambda each: order[each.node])
        study.ask(pattern, targets)
        pairs = product(self._keys_of(pattern), (each for each in targets if study.depends(each, pattern)))
        return next(((z, key) for key, z in pairs if self._is_product(pattern, key, z)), None)

    def _is_product(self, pattern: Value, key: int, target: Value) -> bool:
        """Whether a value has no keys any more, and channels instead."""
        study, ends = self._study, range(len(self._study.atoms(target)))
        others = {j for j in range(len(study.atoms(pattern))) if j != key}
        pairs = study.pairs(pattern, target, others)
        channels = [e for e in ends if e not in pairs.values() and study.atoms(target)[e].size > 1]
        has_keys = any(test(pattern, key, target, e) for test in (study.is_same, study.is_split) for e in ends)
        return len(channels) == 1 and not has_keys and all(study.atoms(pattern)[j].size == 1 for j in others - {*pairs})

    # -- what its dimensions are ---------------------------------------------------------------------------------------

    def _attention(self, pattern: Value, key: int, z: Value) -> Attention | None:
        """Returns an attention; `None` if its keys are not positions: experts of a token, or states of other layers."""
        study, one = self._study, Attention(z=z)
        pairs = study.pairs(pattern, z, [j for j in range(len(study.atoms(pattern))) if j != key])
        of_z: Names = {e: self._outer(z, e) for e in pairs.values()}
        is_position = self._roles.group_role(study.atoms(pattern)[key]) == "position"
        if (group := study.atoms(pattern)[key].group) is not None:
            self._roles.groups.setdefault(group, "position")
        outer = list(of_z.values())
        if outer.count("query") != 1 or outer.count("head") > 1:  # the latter: heads of keys, and of queries for each
            one.missing = dict.fromkeys(_NAMES, _UNKNOWN_DIMENSIONS)
            return one
        channel = next(e for e, atom in enumerate(study.atoms(z)) if e not in of_z and atom.size > 1)
        v, query = self._values(pattern, z, channel), next(e for e, name in of_z.items() if name == "query")
        of_v = {} if v is None else self._by_target(v, z, of_z | {channel: "channel"}, "key")
        if not is_position:  # experts of a token, and states of other layers, are read at one position
            keys = [] if v is None or v.node.kind in HELD_KINDS else [j for j, name in of_v.items() if name == "key"]
            read = [each for j in keys if v is not None for each in study.hits(v, j, z, query).values()]
            if "query" in of_v.values() or all(len(each) == 1 for each in read):
                return None
        of_pattern = {j: of_z[e] for j, e in pairs.items()} | {key: "key"}
        found, before = self._scores_before(pattern, of_pattern)
        of_z[channel] = "channel"
        operands: dict[str, tuple[Value, Names]] = {}
        for letter, factor in zip("qk", found.factors if found is not None else (), strict=False):
            assert found is not None
            operands[letter] = factor, self._by_target(factor, found.result, found.names, "channel")
        if v is not None:
            one.v, operands["v"] = v, (v, of_v)
        for name, value, names in (("pattern", pattern, of_pattern), ("z", z, of_z)):
            self._add(one, name, value, names)
        if (scores := self._scores(pattern, of_pattern, before)) is not None:
            self._add(one, "scores", *scores)
        else:
            one.missing["scores"] = "no softmax of a value is the pattern"
        return self._completed(one, operands)

    def _outer(self, z: Value, e: int) -> str:
        """Returns what an atom of `z` is that the pattern has, too: batch, query, or head."""
        role = self._roles.carried(z, e) or ("head" if self._study.atoms(z)[e].group is None else "unknown")
        return "query" if role == "position" else role

    def _by_target(self, value: Value, target: Value, of_target: Names, last: str) -> Names:
        """Returns what the atoms of a value are, by what they are in a target; the one that is left is `last`."""
        atoms = self._study.atoms(value)
        names = {j: of_target[e] for j, e in self._study.pairs(value, target).items() if e in of_target}
        rest = [j for j, atom in enumerate(atoms) if j not in names and atom.size > 1]
        return names | ({rest[0]: last} if len(rest) == 1 and last else {})

    def _add(self, one: Attention, name: str, value: Value, names: Names) -> None:
        axes = self._axes(value, names)
        if not _is_decided(axes) or len(axes) != len(value.shape):
            one.missing[name] = _UNKNOWN_DIMENSIONS
        else:
            one.found[name] = Part(value, axes)

    def _axes(self, value: Value, names: Names) -> Axes:
        """Returns the axes of a value; one that has one element is the batch, or else the heads, if no other is."""
        atoms, names = self._study.atoms(value), dict(names)
        single = [j for j, atom in enumerate(atoms) if atom.size == 1 and j not in names]
        if len(single) == 1:
            known = set(names.values())
            is_grouped = any("head" in name for name in known)
            names[single[0]] = "batch" if "batch" not in known else "group" if is_grouped else "head"
        found = joined(atoms, [names.get(j) for j in range(len(atoms))])
        is_unsized = self._study.dimensions.reason is not None
        if is_unsized and "batch" in self._roles.start_axes and "batch" not in found:
            return (None,) * len(found)  # a dimension may hold the heads of all rows
        return found

    # -- queries, keys, scores and values ------------------------------------------------------------------------------

    def _scores_before(self, pattern: Value, of_pattern: Names) -> tuple[_Product | None, dict[Value, Names]]:
        """Returns the product of queries and keys, and all values between that have both, the nearest first."""
        names, study = {pattern: of_pattern}, self._study
        for value in (waiting := [pattern]):
            if value.node not in self._inside or len(names) > _FARTHEST:
                continue
            reads = self._flow.reads(value.node)[value.op == "baddbmm" :]  # the first is added
            moving = [read for read in dict.fromkeys(reads) if study.depends(value, read)]
            of_reads = {read: self._by_target(read, value, names[value], "") for read in moving}
            q, k = (
                [read for read in moving if {"query", "key"} & {*of_reads[read].values()} == {side}]
                for side in ("query", "key")
            )
            if q and k:
                return _Product(value, names[value], (q[0], k[0])), names
            for read in moving:
                each = of_reads[read]
                if "key" not in each.values() and study.size(read) == study.size(value):  # of a softmax, all change
                    each = self._by_target(read, value, names[value], "key")
                if {"query", "key"} <= {*each.values()} and read not in names:
                    names[read] = each
                    waiting.append(read)
        return None, names

    def _scores(self, pattern: Value, of_pattern: Names, before: Mapping[Value, Names]) -> tuple[Value, Names] | None:
        """Returns what the softmax reads that gives the pattern, or that and a share that goes to no position."""
        study, result = self._study, self._study.tensor(pattern)
        assert result is not None
        dim = next(study.atoms(pattern)[j].dim for j, name in of_pattern.items() if name == "key")
        fitting: dict[Value, Names] = {}
        for value, names in before.items():
            tensor = study.tensor(value)
            if value == pattern or tensor is None or tensor.numel() != result.numel():
                continue
            at = [study.atoms(value)[j].dim for j, name in names.items() if name == "key"]
            is_alike = tensor.shape == result.shape or (at and at[0] - tensor.ndim == dim - result.ndim)
            if not at or tensor.ndim < 2 or not is_alike:
                continue
            like, shares = result.reshape(tensor.shape), torch.softmax(tensor, at[0]).nan_to_num()
            if torch.allclose(shares * like.sum(at[0], keepdim=True), like, 1e-3, 1e-5):
                fitting[value] = names
        # Exact exponentials are those of differences from the maximum.
        shifted = {
            value
            for value in fitting
            if value.op in _SUBTRACTIONS and any(read in fitting for read in self._flow.reads(value.node))
        }
        return next(((value, names) for value, names in fitting.items() if value not in shifted), None)

    def _values(self, pattern: Value, z: Value, channel: int) -> Value | None:
        """Returns what is multiplied with the pattern: its channels are those of `z`."""
        study, order = self._study, self._flow.order
        later = study.run.later_than(pattern.node) | {pattern.node}
        nodes = [node for node in study.run.nodes if node in later and order[node] <= order[z.node]]
        for reads in (self._flow.reads(node) for node in nodes if node is not pattern.node):
            others = [read for read in reads if read.node not in later and study.tensor(read) is not None]
            for read in others if len(others) < len(reads) else ():
                places = range(len(study.atoms(read)) if study.depends(z, read) else 0)
                if any(study.is_same(read, j, z, channel) for j in places):
                    return read
        return None

    def fused(self, node: Node) -> Attention | None:
        """Returns a fused call: its documentation says what the last two dimensions of what it reads are."""
        given = [self._argument(node, place, name) for place, name in enumerate(("query", "key", "value"))]
        inner = {step.base_name: Value(step) for step in node.inner}
        one = Attention(z=Value(node), v=given[2])
        if node.op == _WHOLE_ATTENTION:
            one.missing = dict.fromkeys((name for name in _NAMES if name not in inner), _FUSED_WHOLE)
            one.found = {name: Part(value, ("batch", "head", "query", "key")) for name, value in inner.items()}
            return one
        operands: dict[str, tuple[Value, Names]] = {}
        self._study.ask(self._roles.start, [value for value in (*given, one.z) if value is not None])  # at once
        for letter, value in zip("qkvz", (*given, one.z), strict=True):
            if value is None:
                return None
            operands[letter] = value, self._of_fused(value, "key" if letter in "kv" else "query")
        self._add(one, "z", *operands.pop("z"))
        axes = self._axes(*operands["q"])
        for name, value in inner.items():
            if name in _NAMES and len(value.shape) == len(axes) and _is_decided(axes):
                one.found[name] = Part(value, (*axes[:-1], "key"))
        return self._completed(one, operands)

    def _of_fused(self, value: Value, side: str) -> Names:
        names, rank = Names(), len(value.shape)
        for j, atom in enumerate(self._study.atoms(value)):
            if atom.dim >= rank - 2:
                names[j] = side if atom.dim == rank - 2 else "channel"
            elif (role := self._roles.carried(value, j)) is not None:
                names[j] = role
            elif atom.size > 1 and atom.group is None:
                names[j] = "head"
        return names

    def _argument(self, node: Node, place: int, name: str) -> Value | None:
        given = node.args[place] if place < len(node.args) else node.kwargs.get(name)
        return self._flow.resolve(given.node, given.dig) if isinstance(given, Ref) else None

    # -- what has a name -----------------------------------------------------------------------------------------------

    def _completed(self, one: Attention, operands: Mapping[str, tuple[Value, Names]]) -> Attention:
        for letter, (operand, names) in operands.items():
            self._follow(letter, operand, names, one)
        for name in _NAMES:
            if name not in one.found:
                is_fused = name in ("scores", "pattern") and one.z.node.op in FUSED_ATTENTION
                one.missing.setdefault(name, _FUSED_REASON if is_fused else _UNKNOWN_DIMENSIONS)
        one.found = {name: one.found[name] for name in _NAMES if name in one.found}
        return one

    def _follow(self, name: str, operand: Value, names: Names, one: Attention) -> None:
        """Follows an operand of the products back to the linear map that it comes from."""
        waists = self._waists(operand)
        if any(waist.op in CREATIONS for waist in waists):
            one.missing |= dict.fromkeys([name] if name == "v" else [name, f"{name}_rot"], _FILLED)
            return
        known, steps = self._known(waists, operand, names), list(pairwise(waists))
        # A cache, or repeated heads, add to these: `k` and `v` have the positions and heads of the call.
        stops = [after for before, after in steps if self._is_extended(before, after)]
        is_plain = name == "v"  # values are what the pattern is multiplied with: neither rotated nor scaled
        changed = [] if is_plain else [(before, after) for before, after in steps if not self._is_view(before, after)]
        scaled = [after for before, after in changed if self._is_scaling(before, after)]
        place = next((j for j, each in names.items() if each in ("query", "key")), 0)
        turned = {
            after: self._is_rotation(before, after, operand, place)
            for before, after in changed
            if after not in scaled and after not in stops
        }
        if None in turned.values():
            one.missing[name] = one.missing[f"{name}_rot"] = _UNKNOWN_DIMENSIONS
            return
        rotated = [after for after, is_rotated in turned.items() if is_rotated]
        if rotated:
            later = waists[waists.index(rotated[-1]) :]
            ends = [each for each in (*stops, *scaled, *turned) if each in later[1:]]
            self._add(one, f"{name}_rot", *(self._best(_before(later, ends), known) or (operand, names)))
            stops = rotated[:1]
        elif not is_plain:
            one.missing[f"{name}_rot"] = _NOT_ROTATED
        part = self._best(_before(waists, [*stops, *scaled]), known) or self._best(_before(waists, stops), known)
        if part is not None:
            self._add(one, name, *part)
            if name != "q" and self._is_tiled(part, operand, names):
                one.tiled.add(name)
        else:
            one.missing[name] = "no value has heads as a dimension that is read whole, and not rotated yet"

    def _waists(self, operand: Value) -> list[Value]:
        """Returns the values that all of an operand passes through on the way from linear maps."""

        def before(value: Value) -> list[Value]:
            is_end = value.node not in self._inside or self._flow.is_linear_map(value)
            return [] if is_end else self._flow.moving(value.node)

        values = sorted(walk([operand], before, _LARGEST), key=lambda value: self._flow.order[value.node])

        def is_waist(waist: Value) -> bool:
            around = walk([operand], lambda value: [] if value == waist else before(value))
            return waist == operand or all(value == waist or before(value) for value in around)

        return list(filter(is_waist, values))

    def _known(self, waists: list[Value], operand: Value, names: Names) -> dict[Value, Names]:
        """Returns the atoms of the waists, from the operand back to where it is a part of something larger."""
        study, found = self._study, {operand: names}
        for source, waist in reversed(list(pairwise(waists))):
            size = study.size(source)
            if size > study.size(waist) or not size:
                break
            of_source = self._by_target(source, operand, names, "channel")
            if self._channels(source, of_source) > self._channels(operand, names):
                break  # those of all heads
            found[source] = of_source
        return found

    def _is_extended(self, before: Value, after: Value) -> bool:
        """Whether others are put beside a value, or copies of it; the others may be an empty cache."""
        reads = self._flow.reads(after.node)
        is_joined = before in reads and len(reads) > 1 and self._is_view(before, after)
        return is_joined or self._study.size(after) > self._study.size(before)

    def _is_view(self, before: Value, after: Value) -> bool:
        """Whether a value has only numbers that another one has, too."""
        one, other = self._study.tensor(before), self._study.tensor(after)
        if one is None or other is None:
            return after.op in VIEWS
        one, other = (
            torch.view_as_real(each).flatten() if each.is_complex() else each.flatten() for each in (one, other)
        )
        some = other[:: other.numel() // _MANY + 1, None]
        return bool((some == one).any(1).all())

    def _channels(self, value: Value, names: Names) -> int:
        return max((self._study.atoms(value)[j].size for j, name in names.items() if name == "channel"), default=0)

    def _is_rotation(self, before: Value, after: Value, operand: Value, place: int) -> bool | None:
        """Whether a step treats each position in another way, and mixes channels; `None` if there is one position."""
        study, found = self._study, list[int]()
        for value in (before, after):
            same = (j for j in range(len(study.atoms(value))) if study.is_same(value, j, operand, place))
            found.append(next(same, -1))
        if -1 in found:
            return None
        result = study.with_equal(before, found[0], after)
        if result is None or not differs(result.narrow(found[1], 0, 1).expand_as(result), result).any():
            return False
        is_apart = [
            any(study.is_same(before, j, after, e) for e in range(result.ndim))
            for j, atom in enumerate(study.atoms(before))
            if atom.size > 1
        ]
        return not all(is_apart) or result.is_complex()

    def _is_scaling(self, before: Value, after: Value) -> bool:
        one, other = self._study.tensor(before), self._study.tensor(after)
        if one is None or other is None or one.shape != other.shape:
            return False
        factor = (one * other).sum() / (one * one).sum()
        return bool(factor != 1) and torch.allclose(one * factor, other, 1e-4, 1e-6)

    def _best(self, waists: Sequence[Value], known: Mapping[Value, Names]) -> tuple[Value, Names] | None:
        """Returns the value among waists whose axes are all known: with heads as one of them, the last one."""
        chosen = [waist for waist in reversed(waists) if waist in known and waist.is_float]
        axes = {waist: self._axes(waist, known[waist]) for waist in chosen}
        whole = [waist for waist, each in axes.items() if _is_decided(each) and "group" not in each]
        found = min(whole, key=lambda each: ("head" not in axes[each], axes[each][-1] != "channel"), default=None)
        return None if found is None else (found, known[found])

    def _is_tiled(self, part: tuple[Value, Names], operand: Value, of_operand: Names) -> bool:
        """Whether the heads of queries read the heads of a part by turns."""
        value, names = part
        own, other = ([j for j, name in each.items() if name == "head"] for each in (names, of_operand))
        if len(own) != 1 or len(other) != 1 or value == operand:
            return False
        reached = [
            s for (j, _), sets in self._study.reach(value, operand).items() if j == own[0] and (s := sets[other[0]])
        ]
        return any(max(each) - min(each) >= len(each) > 1 for each in reached)


def _before(waists: Sequence[Value], ends: Iterable[Value]) -> Sequence[Value]:
    """Returns the waists before the first of `ends`."""
    return waists[: min(map(waists.index, ends), default=len(waists))]


def _is_decided(axes: Axes) -> bool:
    return not {None, "unknown"} & {*axes} and len(set(axes)) == len(axes)
