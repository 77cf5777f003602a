"""Attention: a value that is a pattern by what it does, and the queries, keys and values by what they move.

A pattern has shares of positions: it is not negative, sums to at most one along the keys, depends on the stream, and
moves values between positions, however it is written. Where a fused call cannot be opened, its documentation says what
its arguments are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from graphpatch_notebook.capture.records import Node, Ref
from graphpatch_notebook.components.chain import Region, Trails, region
from graphpatch_notebook.components.flow import Axes, Flow, Value, walk
from graphpatch_notebook.components.operations import (
    ADDITIONS,
    CREATIONS,
    FUSED_ATTENTION,
    MOMENTS,
    NORMS,
    PRODUCTS,
    ROTATIONS,
    SAME_VALUES,
    SCALINGS,
    VIEWS,
)
from graphpatch_notebook.components.roles import PartRoles, Study, joined
from graphpatch_notebook.values import TensorSpec

_FARTHEST = 60
_NAMES = ("q", "k", "v", "q_rot", "k_rot", "scores", "pattern", "z")
_OUTPUT_STEPS = VIEWS | SAME_VALUES | SCALINGS | ADDITIONS | NORMS | PRODUCTS
_UNKNOWN_DIMENSIONS = "no change of its values decides which of its dimensions are which"
_PLAIN = ("Tensor", "Parameter")
_FUSED_REASON = "attention is one fused call that cannot be opened"
_FUSED_CLOSED = "attention is one fused call: leave decompose out of the ExtractionOptions to see the values inside"
_FUSED_GRAPH = (
    "attention is one fused call in this graph; it is opened in a PatchableGraph of the model, and apart in the graphs "
    'of a model with attn_implementation="eager"'
)

Names = dict[int, str]
"""What atoms of a value are, by their number."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A value of an attention, with the meaning of its dimensions."""

    value: Value
    axes: Axes


@dataclass(slots=True, eq=False)
class Attention:
    """One attention of the model.

    Attributes:
        z: What it returns, before the output projection.
        v: The values, as the product with the pattern reads them.
        found: The values that have names: `q`, `k`, `v`, `q_rot`, `k_rot`, `scores`, `pattern`, `z`.
        missing: Why the others were not found.
        output: What the linear map of `z` returns, if there is one.
        tiled: Which of `k` and `v` have heads that the heads of queries read by turns: `0, 1, 0, 1`, not `0, 0, 1, 1`.
    """

    z: Value
    v: Value | None = None
    found: dict[str, Part] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    output: Value | None = None
    tiled: set[str] = field(default_factory=set)


def attentions(trails: Trails, roles: PartRoles, inside: frozenset[Node]) -> list[Attention]:
    """Returns all attentions among the nodes of a part of a layer, in order of execution."""
    finder = _Finder(trails, roles, inside)
    fused = map(finder.fused, (node for node in inside if node.op in FUSED_ATTENTION))
    found = [*finder.written_out(), *(each for each in fused if each is not None)]
    return sorted(found, key=lambda each: trails.flow.order[each.z.node])


class _Finder:
    def __init__(self, trails: Trails, roles: PartRoles, inside: frozenset[Node]) -> None:
        self._trails, self._roles, self._inside = trails, roles, inside
        self._flow: Flow = trails.flow
        self._study: Study = roles.study

    # -- the pattern and z ---------------------------------------------------------------------------------------------

    def written_out(self) -> list[Attention]:
        """Returns the attentions whose patterns are values of the code."""
        patterns = [value for value in self._study.floats if self._is_pattern(value)]
        by_z: dict[Value, list[tuple[Value, int]]] = {}
        for pattern in patterns:
            if (found := self._z(pattern)) is not None:
                z, key = found
                by_z.setdefault(z, []).append((pattern, key))
        every = []
        for z, candidates in by_z.items():
            # Dimensions that are merged for the product, or added for it, are separate before.
            pattern, key = min(reversed(candidates), key=lambda each: self._layout_cost(each[0]))
            every.append(self._attention(pattern, key, z))
        return every

    def _layout_cost(self, value: Value) -> tuple[int, int]:
        atoms = self._study.atoms(value)
        return len(atoms) - len({atom.dim for atom in atoms}), len(value.shape)

    def _is_pattern(self, value: Value) -> bool:
        tensor = self._study.tensor(value)
        assert tensor is not None
        if tensor.ndim < 2 or bool((tensor < -1e-6).any()) or not bool((tensor <= 1 + 1e-3).all()):
            return False
        return any(self._keys_of(value)) and self._study.depends(value, self._roles.start)

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
        """Returns the first value that has no keys any more, and channels instead."""
        study, order = self._study, self._flow.order
        later = study.run.later_than(pattern.node)
        targets = [value for value in study.floats if value.node in later]
        study.ask(pattern, targets)
        atoms = study.atoms(pattern)
        for target in sorted(targets, key=lambda each: order[each.node]):
            if not study.depends(target, pattern):
                continue
            for key in self._keys_of(pattern):
                pairs = self._pairs(pattern, target, [j for j in range(len(atoms)) if j != key])
                rest = [e for e, atom in enumerate(study.atoms(target)) if e not in pairs.values() and atom.size > 1]
                is_kept = any(self._moves(pattern, key, target, e) for e in range(len(study.atoms(target))))
                if (
                    len(rest) == 1
                    and not is_kept
                    and all(atoms[j].size == 1 or j in pairs for j in range(len(atoms)) if j != key)
                ):
                    return target, key
        return None

    def _moves(self, value: Value, j: int, target: Value, e: int) -> bool:
        """Whether atom `j` of a value is atom `e` of the target, or is split along it."""
        return self._study.is_same(value, j, target, e) or self._study.is_split(value, j, target, e)

    def _pairs(self, value: Value, target: Value, among: Sequence[int]) -> dict[int, int]:
        """Returns which atom of a target each atom of a value is: the same one, or else one that it splits."""
        found: dict[int, int] = {}
        for test in (self._study.is_same, self._study.is_split):
            for j in among:
                if j not in found:
                    fitting = [
                        e
                        for e in range(len(self._study.atoms(target)))
                        if e not in found.values() and test(value, j, target, e)
                    ]
                    if len(fitting) == 1:
                        found[j] = fitting[0]
        return found

    # -- what its dimensions are ---------------------------------------------------------------------------------------

    def _attention(self, pattern: Value, key: int, z: Value) -> Attention:
        study = self._study
        pairs = self._pairs(pattern, z, [j for j in range(len(study.atoms(pattern))) if j != key])
        of_z: Names = {e: self._outer(z, e) for e in pairs.values()}
        one = Attention(z)
        if (group := study.atoms(pattern)[key].group) is not None:
            self._roles.groups.setdefault(group, "position")
        if list(of_z.values()).count("query") != 1:
            one.missing = dict.fromkeys(_NAMES, _UNKNOWN_DIMENSIONS)
            return one
        channel = next(e for e, atom in enumerate(study.atoms(z)) if e not in of_z and atom.size > 1)
        of_pattern = {j: of_z[e] for j, e in pairs.items()} | {key: "key"}
        product, before = self._scores_before(pattern, of_pattern)
        if product is not None and list(of_z.values()).count("head") == 2:
            # Two dimensions of heads: those of the keys, and those of the queries that share each.
            of_product = self._paired(product.k, product.result, product.names)
            keys = [e for e in of_product.values() if product.names.get(e) == "head"]
            if len(keys) == 1:
                back = self._pairs(product.result, pattern, range(len(study.atoms(product.result))))
                of_pattern = {j: _of_group(name, j == back.get(keys[0])) for j, name in of_pattern.items()}
                of_z = {e: of_pattern[j] for j, e in pairs.items()}
                product, before = self._scores_before(pattern, of_pattern)
        of_z[channel] = "channel"
        operands: dict[str, tuple[Value, Names]] = {}
        if product is not None:
            for letter, operand in (("q", product.q), ("k", product.k)):
                operands[letter] = operand, self._by_target(operand, product.result, product.names, "channel")
        if (v := self._values(pattern, z, channel)) is not None:
            one.v, operands["v"] = v, (v, self._by_target(v, z, of_z, "key"))
        for name, value, names in (("pattern", pattern, of_pattern), ("z", z, of_z)):
            self._add(one, name, *self._separated(value, names))
        if (scores := self._scores(pattern, key, before)) is not None:
            self._add(one, "scores", *self._separated(*scores))
        else:
            one.missing["scores"] = "no softmax of a value is the pattern"
        return self._completed(one, operands)

    def _outer(self, z: Value, e: int) -> str:
        """Returns what an atom of `z` is that the pattern has, too: batch, query, or head."""
        role = self._roles.carried(z, e)
        return "head" if role is None else "query" if role == "position" else role

    def _by_target(self, value: Value, target: Value, of_target: Names, last: str) -> Names:
        """Returns what the atoms of a value are, by what they are in a target; the one that is left is `last`."""
        atoms = self._study.atoms(value)
        names = {j: of_target[e] for j, e in self._paired(value, target, of_target).items()}
        rest = [j for j, atom in enumerate(atoms) if j not in names and atom.size > 1]
        return names | ({rest[0]: last} if len(rest) == 1 and last else {})

    def _paired(self, value: Value, target: Value, of_target: Names) -> dict[int, int]:
        pairs = self._pairs(value, target, range(len(self._study.atoms(value))))
        return {j: e for j, e in pairs.items() if e in of_target}

    def _add(self, one: Attention, name: str, value: Value, names: Names) -> None:
        axes = self._axes(value, names)
        if value.op in CREATIONS:
            one.missing[name] = "the model fills in this tensor part by part"
        elif not _is_decided(axes) or len(axes) != len(value.shape):
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
        return joined(atoms, [names.get(j) for j in range(len(atoms))])

    def _separated(self, value: Value, names: Names) -> tuple[Value, Names]:
        """Returns a view with batch and heads in two dimensions of a value that has them in one."""
        users, study = self._flow.users.get(value.node, ()), self._study
        if self._layout_cost(value)[0] == 0:
            return value, names
        before = self._flow.reads(value.node)[:1] if value.op in VIEWS else []
        for view in [*(Value(user) for user in users if user.op in VIEWS and len(users) == 1), *before]:
            is_alike = study.size(view) == study.size(value) and self._layout_cost(view)[0] == 0
            if is_alike and view in before:
                return view, self._by_target(view, value, names, "")
            if is_alike:
                return view, {
                    e: names[j]
                    for j, e in self._pairs(value, view, range(len(study.atoms(value)))).items()
                    if j in names
                }
        return value, names

    # -- queries, keys, scores and values ------------------------------------------------------------------------------

    def _scores_before(self, pattern: Value, of_pattern: Names) -> tuple[_Product | None, dict[Value, Names]]:
        """Returns the product of queries and keys, and all values between that have both, the nearest first."""
        names: dict[Value, Names] = {pattern: of_pattern}
        waiting, study = [pattern], self._study
        while waiting and len(names) < _FARTHEST:
            value = waiting.pop(0)
            reads = self._flow.reads(value.node)[value.op == "baddbmm" :]  # the first is added
            reads = [read for read in reads if study.tensor(read) is not None]
            if value.node not in self._inside:
                continue
            moving = [read for read in dict.fromkeys(reads) if study.depends(value, read)]
            of_reads = {read: self._by_target(read, value, names[value], "") for read in moving}
            found: dict[str, list[Value]] = {"query": [], "key": []}
            for read, each in of_reads.items():
                if len(side := {"query", "key"} & set(each.values())) == 1:
                    found[next(iter(side))].append(read)
            if all(found.values()):
                q, k = (
                    min(each, key=lambda read: not self._has_channels(read, of_reads[read])) for each in found.values()
                )
                return _Product(value, names[value], q, k), names
            for read in moving:
                if "key" not in of_reads[read].values() and study.size(read) == study.size(value):
                    of_reads[read] = self._by_target(read, value, names[value], "key")  # of a softmax, all change
                if {"query", "key"} <= set(of_reads[read].values()) and read not in names:
                    names[read] = of_reads[read]
                    waiting.append(read)
        return None, names

    def _has_channels(self, value: Value, names: Names) -> bool:
        """Whether an atom of a value is none of those that scores have, as a bias has none."""
        return any(atom.size > 1 and j not in names for j, atom in enumerate(self._study.atoms(value)))

    def _scores(self, pattern: Value, key: int, before: Mapping[Value, Names]) -> tuple[Value, Names] | None:
        """Returns what the softmax reads that gives the pattern, or that and a share that goes to no position."""
        study, result = self._study, self._study.tensor(pattern)
        assert result is not None
        dim = study.atoms(pattern)[key].dim
        fitting: dict[Value, Names] = {}
        for value, names in before.items():
            tensor = study.tensor(value)
            if value == pattern or tensor is None or tensor.numel() != result.numel():
                continue
            at = [study.atoms(value)[j].dim for j, name in names.items() if name == "key"]
            if not at or tensor.ndim < 2:
                continue
            shares = torch.softmax(tensor, at[0]).nan_to_num()
            like = (
                result
                if tensor.shape == result.shape
                else result.reshape(tensor.shape)
                if at[0] - tensor.ndim == dim - result.ndim
                else None
            )
            if like is not None and torch.allclose(shares * like.sum(at[0], keepdim=True), like, 1e-3, 1e-5):
                fitting[value] = names
        found = next(iter(fitting), None)
        while found is not None and found.op in ("sub", "isub", "sub_", "rsub"):  # the maximum, for exact exponentials
            before_it = next((read for read in self._flow.reads(found.node) if read in fitting), None)
            if before_it is None:
                break
            found = before_it
        return None if found is None else (found, fitting[found])

    def _values(self, pattern: Value, z: Value, channel: int) -> Value | None:
        """Returns what is multiplied with the pattern: its channels are those of `z`."""
        study, order = self._study, self._flow.order
        later = study.run.later_than(pattern.node) | {pattern.node}
        for node in study.run.nodes:
            if node not in later or node is pattern.node or order[node] > order[z.node]:
                continue
            reads = self._flow.reads(node)
            if not any(read.node in later for read in reads):
                continue
            for read in reads:
                if read.node in later or study.tensor(read) is None or not study.depends(z, read):
                    continue
                if any(study.is_same(read, j, z, channel) for j in range(len(study.atoms(read)))):
                    return read
        return None

    def fused(self, node: Node) -> Attention | None:
        """Returns a fused call: its documentation says what the last two dimensions of what it reads are."""
        given = [self._argument(node, place, name) for place, name in enumerate(("query", "key", "value"))]
        z = Value(node)
        one = Attention(z, given[2])
        operands: dict[str, tuple[Value, Names]] = {}
        for letter, value in zip("qkvz", (*given, z), strict=True):
            if value is None:
                return None
            names = self._of_fused(value, "key" if letter in "kv" else "query")
            if letter == "z":
                self._add(one, letter, *self._separated(value, names))
            else:
                operands[letter] = value, names
        inner = {step.base_name: Value(step) for step in node.inner}
        axes = self._axes(*operands["q"])
        for name in ("scores", "pattern"):
            if name in inner and len(inner[name].shape) == len(axes) and None not in axes:
                one.found[name] = Part(inner[name], (*axes[:-1], "key"))
        return self._completed(one, operands)

    def _of_fused(self, value: Value, side: str) -> Names:
        atoms, names = self._study.atoms(value), Names()
        rank = len(value.shape)
        for j, atom in enumerate(atoms):
            if atom.dim >= rank - 2:
                names[j] = side if atom.dim == rank - 2 else "channel"
            elif (role := self._roles.carried(value, j)) is not None:
                names[j] = role
            elif atom.size > 1:
                names[j] = "head"
        return names

    def _argument(self, node: Node, place: int, name: str) -> Value | None:
        given = node.args[place] if place < len(node.args) else node.kwargs.get(name)
        return self._flow.resolve(given.node, given.dig) if isinstance(given, Ref) else None

    # -- what has a name -----------------------------------------------------------------------------------------------

    def _completed(self, one: Attention, operands: Mapping[str, tuple[Value, Names]]) -> Attention:
        for letter, (operand, names) in operands.items():
            between = region(self._trails, operand, self._inside)
            known = self._known(between, operand, names)
            self._follow(letter, operand, between, known, one)
        one.output = self._output_map(one.z)
        for name in ("scores", "pattern"):
            if name not in one.found:
                one.missing.setdefault(name, self._why_fused(one))
        for name in ("q", "k", "v", "z"):
            if name not in one.found:
                one.missing.setdefault(name, _UNKNOWN_DIMENSIONS)
        return one

    def _known(self, between: Region, operand: Value, names: Names) -> dict[Value, Names]:
        """Returns the atoms of the waists, from the operand back to where it is a part of something larger."""
        study, found = self._study, {operand: names}
        for source, waist in reversed(list(pairwise(between.waists))):
            size = study.size(source)
            if size > study.size(waist) or not size:
                break
            of_source = self._by_target(source, operand, names, "channel")
            if self._channels(source, of_source) > self._channels(operand, names):
                break  # those of all heads
            found[source] = of_source
        return found

    def _channels(self, value: Value, names: Names) -> int:
        return max((self._study.atoms(value)[j].size for j, name in names.items() if name == "channel"), default=0)

    def _follow(self, name: str, operand: Value, between: Region, known: Mapping[Value, Names], one: Attention) -> None:
        """Follows an operand of the products back to the linear map that it comes from."""
        place_of, size = between.waists.index, self._study.size
        rotated = [waist for waist in between.waists if _is_rotation(between, waist)]
        # A cache, or repeated heads, add to these: `k` and `v` have the positions and heads of the call.
        stops = [w for before, w in pairwise(between.waists) if size(w) > size(before) or between.ops[w] == ("cat",)]
        # Queries and keys are often scaled before the product; values are what the pattern is multiplied with.
        scaled = [w for w in between.waists if between.ops[w] and set(between.ops[w]) <= SCALINGS and name != "v"]
        if rotated:
            last = place_of(rotated[-1])
            stops = [waist for waist in stops if place_of(waist) > last]
            after = [w for w in between.waists if place_of(w) > last and (between.is_norm(w) or w in scaled)]
            ends = {waist: names for waist, names in known.items() if place_of(waist) >= last}
            part = next(self._before(ends, between, [*stops, *after]), None)
            self._add(one, f"{name}_rot", *(part or (operand, known[operand])))
            stops = [rotated[0]]
        elif name != "v":
            one.missing[f"{name}_rot"] = (
                "nothing rotates it (as rotary embeddings do) before the product of queries and keys"
            )
        part = next(self._before(known, between, [*stops, *scaled]), None) or next(
            self._before(known, between, stops), None
        )
        if part is not None:
            self._add(one, name, *part)
            if name != "q" and self._is_tiled(part, operand, known[operand]):
                one.tiled.add(name)
        elif len(between.sources) > 1:
            one.missing[name] = "it is made of the results of several linear maps, or of their parts"
        else:
            one.missing[name] = "no value has heads as a dimension that is read whole, and not rotated yet"

    def _before(
        self, known: Mapping[Value, Names], between: Region, stops: Sequence[Value]
    ) -> Iterator[tuple[Value, Names]]:
        """Yields the waists with all axes before the first of `stops`, last ones first, best axes first."""
        waists = list(between.waists)
        end = min((waists.index(stop) for stop in stops), default=len(waists))
        chosen = [waist for waist in reversed(waists[:end]) if waist in known and waist.is_float]
        axes = {waist: self._axes(waist, known[waist]) for waist in chosen}
        whole = [waist for waist, each in axes.items() if _is_decided(each) and "group" not in each]
        for waist in sorted(whole, key=lambda each: ("head" not in axes[each], axes[each][-1] != "channel")):
            yield waist, known[waist]

    def _is_tiled(self, part: tuple[Value, Names], operand: Value, of_operand: Names) -> bool:
        """Whether the heads of queries read the heads of a part by turns."""
        value, names = part
        own, other = ([j for j, name in each.items() if name == "head"] for each in (names, of_operand))
        if len(own) != 1 or len(other) != 1 or value == operand:
            return False
        reached = [
            s for (j, _, _), sets in self._study.reach(value, operand).items() if j == own[0] and (s := sets[other[0]])
        ]
        return any(max(each) - min(each) >= len(each) > 1 for each in reached)

    def _output_map(self, z: Value) -> Value | None:
        """Returns the result of the linear map of `z`."""
        users = self._flow.users
        after = walk(
            users.get(z.node, ()), lambda node: users.get(node, ()) if node.op in _OUTPUT_STEPS else (), _FARTHEST
        )
        return next(filter(self._flow.is_linear_map, map(Value, after)), None)

    def _why_fused(self, one: Attention) -> str:
        """Returns why there are no scores and no pattern: mostly because they are inside a fused call of attention."""
        node = one.z.node
        if node.op not in FUSED_ATTENTION:
            return _UNKNOWN_DIMENSIONS
        frame = self._flow.frame_of[node]
        if frame.has_own_graph:
            return _FUSED_GRAPH
        if (options := frame.capture.options) is not None and options.decompose is not None:
            return _FUSED_CLOSED
        specs = [read.spec for read in self._flow.reads(node)]
        kind = next((s.type_name for s in specs if isinstance(s, TensorSpec) and s.type_name not in _PLAIN), None)
        return _FUSED_REASON + ("" if kind is None else f": its arguments are {kind}s, and only plain tensors can be")


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """The product of queries and keys, with the names of its atoms, and its factors."""

    result: Value
    names: Names
    q: Value
    k: Value


def _is_decided(axes: Axes) -> bool:
    return None not in axes and len(set(axes)) == len(axes)


def _of_group(name: str, is_key: bool) -> str:
    return name if name != "head" else "key_head" if is_key else "query_head"


def _is_rotation(between: Region, waist: Value) -> bool:
    """Whether a waist is a rotation of the one before: parts of it, times constants, put together again."""
    ops = set(between.ops[waist])
    return bool(ops & ROTATIONS) or (bool(ops & SCALINGS) and len(ops) > 1 and not ops & MOMENTS)
