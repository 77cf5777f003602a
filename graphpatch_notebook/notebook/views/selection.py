"""What is selected in the views of a graph, one selection for all of them, and the patches that actions make of it."""

from __future__ import annotations

import ast
import re
import threading
import uuid
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from graphpatch_notebook.components import find
from graphpatch_notebook.errors import ChosenPatchError, SessionError
from graphpatch_notebook.notebook.messages import Act, Item
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import parse_arguments
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.paths import is_component_name

_NUMBERS = ("layer", "head", "position", "key")
_LAYER = re.compile(r"^(?:[^\[\]@]+\.)?layers\[(\d+)\]")
_HEAD = re.compile(r"\.heads\[(\d+)\]")


def item_of(name: str | None = None, **numbers: int | None) -> Item:
    """Returns an item. The layer and the head are those in the name, unless they are given.

    Example:
        >>> item_of("layers[2].attn.heads[1].z", position=5)
        {'name': 'layers[2].attn.heads[1].z', 'layer': 2, 'head': 1, 'position': 5, 'key': None}
    """
    named = {"layer": _LAYER.search(name or ""), "head": _HEAD.search(name or "")}
    found = {word: int(match[1]) for word, match in named.items() if match is not None}
    return cast("Item", {"name": name, **dict.fromkeys(_NUMBERS), **found, **numbers})


class SharedSelection:
    """The items that are selected in the views of one graph.

    Attributes:
        group: Identifies the views that share it, in the page.
        items: What is selected, in the order of the clicks.
        followers: The views that show it. Their `follow_selection` is called after each change.
    """

    def __init__(self) -> None:
        self.group = uuid.uuid4().hex
        self.items: list[Item] = []
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()

    def set(self, items: Iterable[Item]) -> None:
        """Selects these items instead of the ones before, in all views."""
        chosen = [*items]
        if chosen == self.items:
            return
        self.items = chosen
        for follower in tuple(self.followers):
            follower.follow_selection()


_selections: weakref.WeakKeyDictionary[PatchableGraph, SharedSelection] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def selection_of(graph: PatchableGraph) -> SharedSelection:
    """Returns the selection of a graph, always the same one.

    Example:
        >>> import torch
        >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(2))
        >>> selection_of(pg).set([item_of("relu")])
        >>> selection_of(pg).items[0]["name"]
        'relu'
    """
    with _lock:
        return _selections.setdefault(graph, SharedSelection())


# --------------------------------------------------------------------------------------------------------------------
# Actions: what is selected becomes patches, in the form that users type. A position becomes `positions`, which also
# holds in a generation, at the step that computes it; a slice, only if the positions of the value are not known.


_PROMPT = "prefill"
_POSITIONS = ("position", "query", "key", "token")
"""The axes that the position of an item may be on: the first of these that a value has."""


def patches_of(
    session: Session, act: Act, items: list[Item], value: str | None, taken: set[str], steps: str | None = None
) -> list[ChosenPatch]:
    """Returns a patch for each item.

    Args:
        session: The session of the graph.
        act: What to do: `mean` replaces by the mean of the same value over the batch and the positions (of a
            pattern, over the batch), in a generation over the prompt; `other_run` by the value in another run; `steer`
            adds; `probe` keeps the value.
        items: The items.
        value: For `other_run`, the inputs of the other run as Python; for `steer`, what is added; else `None`.
        taken: Names of variables that `probe` must not fill.
        steps: The steps of a generation in which the patches act; `None` for all.

    Raises:
        SessionError: An item does not name a value, or does not have such a position; or `mean` is asked for in a
            step that computes one position only.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from graphpatch_notebook import PatchableGraph
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(5)[None])
        >>> item = item_of("layers[0].attn.heads[1].pattern", position=4, key=0)
        >>> print(*patches_of(Session(pg), "zero", [item], None, set()))
        zero layers[0].attn.heads[1].pattern[:, :, 0] --positions 4
    """
    if not items:
        raise SessionError("nothing is selected")
    if act == "mean" and steps not in (None, "0", _PROMPT):
        raise SessionError(
            f"steps {steps} compute one position each, which is its own mean: patch step 0, or replace by a value"
        )
    found: list[ChosenPatch] = []
    for item in items:
        place = _Place.of(session, item)
        patch = _patch(session, act, place, value, taken | {str(one.name) for one in found})
        patch = patch.with_fields(steps=_PROMPT if act == "mean" else steps, positions=place.positions)
        found += [] if patch in found else [patch]
    return found


@dataclass(frozen=True)
class _Place:
    """What an item selects."""

    path: str
    axes: tuple[str | None, ...]  # of the value; empty if not known
    at: dict[int, int]  # the selected index by dimension, but for that of `along`
    along: tuple[int, int] | None = None  # the dimension and index of what can be `positions`

    @classmethod
    def of(cls, session: Session, item: Item) -> _Place:
        """Returns what an item selects."""
        name = item["name"]
        if not name:
            raise SessionError("this selection is not a value that can be patched; select a cell or a head")
        name = session.check(ChosenPatch(name, "zero", any_shape=True)).patch.path  # of a module, its output
        axes = axes_of(session, name)
        wanted = {"head": ("head",), "position": _POSITIONS, "key": ("key",)}
        at: dict[int, int] = {}
        along = None
        numbers: Mapping[str, Any] = item
        for word, among in wanted.items():
            if numbers[word] is None or (word == "head" and ".heads[" in name):
                continue
            dim = next((axes.index(axis) for axis in among if axis in axes), None)
            if dim is None:
                raise SessionError(
                    f"{name!r} does not have a {word} to select: {', '.join(map(str, axes)) or 'unknown axes'}"
                )
            at[dim] = numbers[word]
            if word == "position" and _has_positions(session, name):
                along = dim, at.pop(dim)
        return cls(name, axes, at, along)

    @property
    def slice(self) -> str | None:
        """The slice of the patch as text; `None` for the whole value."""
        return _slice_text(self.at)

    @property
    def slice_in_value(self) -> str | None:
        """The slice that takes what is selected out of a value, with all its dimensions of positions."""
        dim, index = self.along or (0, None)
        return _slice_text(self.at if index is None else {**self.at, dim: f"{index}:{index + 1}"})

    @property
    def positions(self) -> str | None:
        """The positions as text; `None` for all."""
        return None if self.along is None else str(self.along[1])


def _slice_text(at: Mapping[int, int | str]) -> str | None:
    return ", ".join(str(at.get(dim, ":")) for dim in range(max(at) + 1)) if at else None


def _has_positions(session: Session, name: str) -> bool:
    """Whether patches of a value can have `positions`."""
    try:
        session.check(ChosenPatch(name, "zero", positions="0", any_shape=True))
    except ChosenPatchError:
        return False
    return True


def axes_of(session: Session, name: str) -> tuple[str | None, ...]:
    """Returns the names of the dimensions of a value; empty if they are not known.

    Raises:
        ChosenPatchError: There is no such value.
    """
    shape = session.check(ChosenPatch(name, "zero", any_shape=True)).shape
    return _axes_of(session, name, () if shape is None else tuple(shape))


def _axes_of(session: Session, name: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    root = captured(session.graph).root
    if not is_component_name(name):
        return find(root).axes_at(name)
    (component, *others) = find(root).lookup(name)
    axes = tuple(component.axes[dim] for dim in component.kept_dims)
    return axes if not others and len(axes) == len(shape) else ()


def _patch(session: Session, act: Act, place: _Place, value: str | None, taken: set[str]) -> ChosenPatch:
    path, part = place.path, place.slice
    if act in ("steer", "other_run") and (value is None or not value.strip()):
        raise ChosenPatchError("value", "type a value first")
    match act:
        case "zero":
            return ChosenPatch(path, "zero", slice=part)
        case "steer":
            return ChosenPatch(path, "add", slice=part, value=value)
        case "other_run":
            try:
                inputs = ast.unparse(parse_arguments(str(value)))[2:-1]  # between the parentheses of `_(...)`
            except ValueError as error:
                raise ChosenPatchError("value", str(error)) from None
            run = f"{session.origin.graph}.record({path!r}, {inputs})[{path!r}]"
            index = "" if place.slice_in_value is None else f"[{place.slice_in_value}]"
            return ChosenPatch(path, "replace", slice=part, value=run + index)
        case "mean":
            return _mean(place)
        case "probe":
            return ChosenPatch(path, "probe", slice=part, name=session.free_name(path, taken))


def _mean(place: _Place) -> ChosenPatch:
    """Returns a patch that replaces what is selected by its mean: a position by that over all positions."""
    axes = place.axes
    is_pattern = {"query", "key"} <= {*axes}
    over = [dim for dim, axis in enumerate(axes) if axis == "batch" or (axis in _POSITIONS and not is_pattern)]
    is_weight = is_pattern and (place.along is not None or any(axes[dim] != "head" for dim in place.at))
    if not over or is_weight or {*place.at} & {*over}:
        raise SessionError(
            f"{place.path!r} does not have a mean over the batch and the positions"
            + (": select the head instead of one of its weights" if is_weight else f" ({', '.join(map(str, axes))})")
        )
    # A head keeps a mean of its own, and its dimension.
    part = _slice_text({dim: f"{index}:{index + 1}" for dim, index in place.at.items()})
    dims = tuple(over) if len(over) > 1 else over[0]
    value = f"lambda value: value.mean({dims}, keepdim=True).expand_as(value)"
    return ChosenPatch(place.path, "custom", slice=part, value=value)
