"""Checks a patch map, all of it, before anything runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor

from graphpatch_notebook.capture.records import HELD_KINDS, Frame
from graphpatch_notebook.components import find
from graphpatch_notebook.components.dimensions import dimensions_of, shape_problem
from graphpatch_notebook.components.names import is_component_name, parse_name
from graphpatch_notebook.errors import GraphPatchError, PatchMapError, UnknownPathError
from graphpatch_notebook.inspection.node_map import NodeMap
from graphpatch_notebook.inspection.resolution import (
    Target,
    Unresolvable,
    answer_to_alias,
    fixed_sizes_of,
    resolve,
    resolve_all,
)
from graphpatch_notebook.patches.kinds import Patch, ProbePatch, declares, has_plain_fields
from graphpatch_notebook.patching.plan import Entry, Plan, inside_splice
from graphpatch_notebook.patching.positions import CACHES, caches_of, restriction_of
from graphpatch_notebook.paths import format_path, is_pattern, nearest
from graphpatch_notebook.values import ScalarSpec, TensorSpec, all_leaves, leaves
from graphpatch_notebook.warning_places import level_of_caller, warn

_Meant: TypeAlias = "list[tuple[str, Sequence[Any], list[Target]]]"
"""The keys of a patch map, with the patches and what the key means."""


def entries_of(nodes: NodeMap, patch_map: Any, known: dict[str, list[Target]], sharding: Any) -> list[Entry]:
    """Returns the entries of a patch map, from paths, `NodePath`s or patterns to patches, or raises all that is wrong.

    `known` are targets that were resolved before, by path: read and filled. `sharding` is `sharding_of` the model.
    """
    if type(patch_map) is not dict and not isinstance(patch_map, Mapping):
        raise PatchMapError(f"a patch map is a dict from paths to patches, not {type(patch_map).__name__}")
    root = nodes.root
    problems: list[str] = []
    kind = PatchMapError
    meant: _Meant = []
    entries: list[Entry] = []
    for path, patches in patch_map.items():
        text = path if type(path) is str else str(path)
        listed = [patches] if isinstance(patches, Patch) else patches
        try:
            targets = known.get(text)
            meant.append((text, listed, _resolved(nodes, text, listed, known) if targets is None else targets))
        except Unresolvable as error:
            inside = inside_splice(root, text, listed, error.message)
            if inside is not None:
                problems += _problems_of(text, listed, _check_inside)
                entries.append(Entry(inside[0], (inside[1],)))
            else:
                problems.append(error.message)
                kind = UnknownPathError
    for _, patches, targets in _without_replaced(meant, problems):
        for target in targets:
            entries += _entries(root, target, patches, problems)
    entries += _sources_of(nodes, entries, problems)
    if sharding is not None:
        entries = [_placed(sharding, entry, problems) for entry in entries]
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise kind(f"{len(problems)} problems in this patch map:{listed}" if len(problems) > 1 else problems[0])
    for component in [entry.target.component for entry in entries]:
        if component is not None and component.doubt:  # it may not be what its name says
            warn(f"{component.name!r} is in doubt: {component.doubt}", "component", stacklevel=level_of_caller())
    return entries


def _resolved(nodes: NodeMap, text: str, patches: Any, known: dict[str, list[Target]]) -> list[Target]:
    targets = targets_of(nodes, text, patches)
    if not _are_for_calls(patches):
        known[text] = targets
    return targets


def refuse_unjoined(plan: Plan) -> None:
    """Raises an `UnknownPathError` for the patches on parts of splices that are not among the patches."""
    raise UnknownPathError("\n".join(patch.problem_without for patch in plan.unjoined))


def targets_of(nodes: NodeMap, text: str, patches: Any = None) -> list[Target]:
    """Returns the targets of a path, a component name, or a pattern of paths, in order; raises an `Unresolvable`.

    If `patches` are given for it that replace calls, it may be the path of a module.
    """
    if not is_pattern(text) or is_component_name(text) or text in nodes:  # keys of containers may hold any text
        try:
            return resolve_all(nodes.root, text)
        except Unresolvable:
            call = target_of_call(nodes.root, text) if _are_for_calls(patches) else None
            if call is not None:
                return [call]
            bare = text.rpartition("[")[0]
            if is_pattern(bare) and nodes.matching(bare):
                raise Unresolvable(f"{text!r}: for a part of the values at {bare!r}, give patches slice=") from None
            raise
    if found := nodes.matching(text):
        return [resolve(nodes.root, path) for path in found]
    with suppress(UnknownPathError):  # names of components, such as `**.attn.pattern`, if no path is like this
        return [resolve(nodes.root, component.name) for component in find(nodes.root).lookup(text)]
    answer = answer_to_alias(nodes.root, text)
    if answer is None:
        deeper = nodes.matching(f"{text}|**") or nodes.matching(f"**.{text}")
        answer = f"nearest: {', '.join(map(repr, deeper[:3] or nearest(text, list(nodes))))}"
    raise Unresolvable(f"the pattern {text!r} matches no value; {answer}", is_unknown=True)


# -- keys that mean several values -------------------------------------------------------------------------------------


def _without_replaced(meant: _Meant, problems: list[str]) -> _Meant:
    """Returns the keys; those that may mean several values, without values that another key changes by a path."""
    several = [_may_mean_several(text) and [target.path for target in targets] != [text] for text, _, targets in meant]
    if not any(several):
        return meant
    own = {
        _identity(target)
        for (_, patches, targets), may in zip(meant, several, strict=True)
        if not may and not (len(patches) and all(isinstance(patch, Patch) and patch.observes_only for patch in patches))
        for target in targets
    }
    found: _Meant = []
    for (text, patches, targets), may in zip(meant, several, strict=True):
        left = [target for target in targets if _identity(target) not in own] if may else targets
        keeping = next((patch for patch in patches if isinstance(patch, Patch) and patch.only_keeps), None)
        if keeping is not None and len(left) > 1:
            name = type(keeping).__name__
            problems.append(
                f"{text!r} means {len(left)} values, which one {name} would keep in one place: use pg.record({text!r}, "
                f"*inputs), or give each path a {name} of its own"
            )
            left = []
        found.append((text, patches, left))
    return found


def _identity(target: Target) -> tuple[str, str]:
    return target.path, repr(target.index)  # slices have no hash before Python 3.12


@functools.lru_cache(maxsize=4096)
def _may_mean_several(text: str) -> bool:
    """Whether a text is a pattern, or the name of components with lists or slices of layers, heads or experts."""
    if is_pattern(text) or not is_component_name(text):
        return is_pattern(text)
    try:
        name = parse_name(text)
    except ValueError:  # a path that has an @
        return False
    return not all(numbers is None or isinstance(numbers, int) for numbers in (name.layers, name.members))


# -- values that other patches read ------------------------------------------------------------------------------------


def _sources_of(nodes: NodeMap, entries: Sequence[Entry], problems: list[str]) -> list[Entry]:
    """Records in entries which values their patches read, and returns entries that keep these values."""
    found: dict[str, Entry] = {}
    for entry in [one for one in entries if type(one.patches[0]).sources is not Patch.sources]:
        own, entry.plain_shape = entry.target, None
        for text in entry.patches[0].sources:
            try:
                source, *more = targets_of(nodes, text)
                if more:
                    raise ValueError(f"the source {text!r} means several values: name one")
                if (source.node, source.dig, source.index) == (own.node, own.dig, own.index):
                    continue  # it reads the value that it is given
                if not _order_in_forward(source) < _order_in_forward(own):
                    raise ValueError(f"it reads {text!r}, which does not come before {own.text!r} in the forward")
                entry.sources = (*entry.sources, source.text)
                found[source.text] = Entry(source, (ProbePatch(),), is_source=True)
            except (Unresolvable, ValueError) as error:
                problems.append(f"{own.text!r}: {type(entry.patches[0]).__name__}: {error}")
    return list(found.values())


def _order_in_forward(target: Target) -> tuple[int, ...]:
    """Returns the position of a value in the forward pass, for comparison: its place in each frame around it."""
    frames = list(target.frame.frames_above())[::-1]
    calls = [frame.parent.nodes.index(frame.call) for frame in frames if frame.parent is not None and frame.call]
    node = target.node
    if node.kind == "input":
        return (*calls, -2)
    return (*calls, -1 if node.kind in HELD_KINDS else target.frame.nodes.index(node.whole))


def _placed(sharding: Any, entry: Entry, problems: list[str]) -> Entry:
    """Returns an entry of a model that is sharded over processes, with the placement of its value."""
    target, placement = entry.target, sharding.placement(entry.target)
    problem = sharding.problem(target)
    if problem is None and placement is not None and placement.dim is not None and entry.patches[0].replaces_call:
        problem = f"{type(entry.patches[0]).__name__} cannot replace a call that returns a part of a value"
    if problem is not None:
        problems.append(f"{target.text!r}: the model is sharded over processes, and {problem}")
    return replace(entry, target=sharding.run_target(target), placement=placement, is_early=sharding.is_leaf(target))


# -- the patches on one value ------------------------------------------------------------------------------------------


def _entries(root: Frame, target: Target, patches: Sequence[Patch[Any]], problems: list[str]) -> list[Entry]:
    """Returns one entry for all the patches on a value, or one for each if some are restricted, or end the run."""
    one = patches[0] if type(patches) is list and len(patches) == 1 else None
    if isinstance(one, Patch) and declares(one, "only_keeps") and has_plain_fields(one):
        return [Entry(target, (one,))]
    if found := problems_of(target, patches):
        problems += found
        return []
    if not any(map(_stands_alone, patches)):
        return [Entry(target, tuple(patches))] if patches else []
    entries = []
    for patch in patches:
        try:
            _check_fields(type(patch))
            restriction = restriction_of(root, target, patch)
            if restriction is None or not restriction.is_empty:
                entries.append(Entry(target, (patch,), restriction))
        except ValueError as problem:
            problems.append(f"{target.text!r}: {type(patch).__name__}: {problem}")
    return entries


def _stands_alone(patch: Patch[Any]) -> bool:
    """Whether a patch has an entry of its own."""
    is_restricted = patch.__dict__.get("steps") is not None or patch.__dict__.get("positions") is not None
    return is_restricted or patch.stops_run or patch.replaces_call or bool(patch.sources)


def _check_fields(kind: type[Patch[Any]]) -> None:
    """Raises a `ValueError` if a class of patches redefines a field of `Patch`."""
    for name in ("steps", "positions", "position_dim"):
        if inspect.getattr_static(kind, name) is not inspect.getattr_static(Patch, name) or (
            kind.__dataclass_fields__[name] is not Patch.__dataclass_fields__[name]
        ):
            raise ValueError(f"every patch has a field {name!r}, which this class redefines: rename that of the class")


def problems_of(target: Target, patches: Any) -> list[str]:
    """Returns messages about a list of patches on a value, each with its path."""
    spec = target.whole if target.component is None else target.spec
    shape = spec.shape if isinstance(spec, TensorSpec) else None

    def check(patch: Patch[Any]) -> None:
        sizes = None if patch.any_shape else shape
        if (problem := patch.problem(sizes)) is not None:
            raise ValueError(problem)
        if patch.replaces_call:
            check_call(target, patch)
            return
        problem = patch.selection_problem(sizes, "")
        if problem is not None and sizes is not None:
            # Runs of the model find out which sizes depend on the inputs: only if the answer depends on it.
            shown = f"the value recorded here, of shape {tuple(sizes)},"
            problem = patch.selection_problem(fixed_sizes_of(target), shown)
        if problem is not None:
            raise ValueError(problem)

    return _problems_of(target.text, patches, check)


def _check_inside(patch: Patch[Any]) -> None:
    """Raises a `ValueError` for a patch on a part of a splice, whose shape is not known."""
    problem = patch.problem(None)
    if problem is not None or _stands_alone(patch):
        raise ValueError(
            problem
            or "a part of a splice is not a node of the model: steps= and positions= are for the SplicePatch; "
            "use slice= for patches on parts, which cannot read other values or replace calls"
        )


def _problems_of(path: str, patches: Any, check: Callable[[Patch[Any]], None]) -> list[str]:
    if isinstance(patches, type) and issubclass(patches, Patch):
        patches = [patches]
    if not isinstance(patches, Sequence) or isinstance(patches, (str, bytes)):
        return [f"{path!r}: give a patch or a list of patches, not {type(patches).__name__}{_repair(patches)}"]
    found = []
    for patch in patches:
        if isinstance(patch, Patch):
            try:
                check(patch)
            except ValueError as problem:
                found.append(f"{path!r}: {type(patch).__name__}: {problem}")
        elif isinstance(patch, type):
            found.append(f"{path!r}: {patch.__name__} is a class; write {patch.__name__}(...)")
        else:
            shown = f"a Tensor of shape {tuple(patch.shape)}" if isinstance(patch, Tensor) else repr(patch)
            found.append(f"{path!r}: {shown} is not a Patch{_repair(patch)}")
    return found


def _repair(given: Any) -> str:
    """Returns how to write a patch with the object that was given instead of one."""
    if isinstance(given, (Tensor, bool, int, float, complex)):
        return "; write ReplacePatch(value) to put it there"
    if hasattr(given, "encode") and hasattr(given, "decode"):
        return "; write SplicePatch(it) to put its reconstruction there"
    return "; write CustomPatch(function) to apply it" if callable(given) else ""


# -- calls of modules that a patch replaces ----------------------------------------------------------------------------


def _are_for_calls(patches: Any) -> bool:
    """Whether all patches replace calls: then a path may be that of a module."""
    is_list = isinstance(patches, (list, tuple)) and len(patches) > 0
    return is_list and all(isinstance(patch, Patch) and patch.replaces_call for patch in patches)


def target_of_call(root: Frame, text: str) -> Target | None:
    """Returns the output of the call that `text` names: the path of a module, or of an output that is a container.

    A module that returns several tensors, or none, is `Unresolvable`.
    """
    for frame in root.walk():
        output = (*frame.path, frame.output_node.name)
        if text in (format_path(frame.path), format_path(output)):
            break
    else:
        return None
    spec = frame.output_node.spec
    digs = [dig for dig, leaf in leaves(spec) if isinstance(leaf, TensorSpec)]
    if len(digs) != 1:
        raise Unresolvable(
            f"{text!r} returns {len(digs)} tensors ({spec}), and a patch that replaces its call makes one: patch the "
            "modules in it, or what follows"
        )
    return resolve(root, format_path(output, digs[0]))


def check_call(target: Target, patch: Patch[Any]) -> None:
    """Raises a `ValueError` if a patch cannot replace the call that returns a value."""
    frame, whole = target.frame, target.frame.output_node.spec
    if target.node.kind != "output" or target.index:
        raise ValueError("it replaces a call of a module: give the path of the module, or of its output")
    if frame.parent is None:
        raise ValueError("the model itself cannot be skipped")
    others = [spec for _, spec in all_leaves(whole) if spec is not target.whole]
    if not isinstance(target.whole, TensorSpec) or any(
        not isinstance(spec, ScalarSpec) or spec.value is not None for spec in others
    ):
        raise ValueError(
            f"the module returns {whole}, of which more than one tensor would be needed: patch the modules in it"
        )
    value = getattr(patch, "value", None)
    if not isinstance(value, Tensor):
        if passing_input(target) is None:
            raise ValueError(
                "its first input does not have the shape and dtype of its output at all sizes, so it cannot pass "
                "through: give value="
            )
    elif value.dtype != target.whole.dtype:
        raise ValueError(f"the module returns {target.whole.dtype}, and value is {value.dtype}: use value.to(...)")
    elif not patch.any_shape and (problem := shape_problem(frame, target.whole, value.shape)) is not None:
        raise ValueError(f"value, of shape {tuple(value.shape)}, cannot be its output: {problem}")


def passing_input(target: Target) -> str | None:
    """Returns the first tensor among the inputs of the frame, if it has the form of the value at all sizes."""
    first = next((node for node in target.frame.inputs() if isinstance(node.spec, TensorSpec)), None)
    if first is None or not isinstance(first.spec, TensorSpec) or not isinstance(target.whole, TensorSpec):
        return None
    known = dimensions_of(target.frame.root)
    is_alike = first.spec.dtype == target.whole.dtype and known.profiles(first.spec) == known.profiles(target.whole)
    return first.target if is_alike else None


def refuse_with_cache(plan: Plan, function: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises a `GraphPatchError` if a call is to be skipped that fills the cache of a generation."""
    if function is plan.root.frame.module and not caches_of(plan.root.frame, args, kwargs):
        return
    for entry in plan.skips:
        if any(parameter.name in CACHES for frame in entry.target.frame.walk() for parameter in frame.parameters):
            raise GraphPatchError(
                f"{format_path(entry.target.frame.path)!r} fills a cache, which would lack its keys if skipped in a "
                "generation: say use_cache=False, or skip modules that take no cache"
            )
