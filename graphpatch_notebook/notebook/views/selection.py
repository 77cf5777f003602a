"""What is selected in the views of a graph: one selection for all of them."""

from __future__ import annotations

import re
import threading
import uuid
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from graphpatch_notebook.patchable_graph import PatchableGraph

Item: TypeAlias = "dict[str, Any]"
"""One selected thing: `name`, of a component or the path of a node, `layer`, `head`, `position` and `key`; all but one
may be `None`. `position` is the one of the query, where there are queries and keys."""

_NUMBERS = ("layer", "head", "position", "key")
_MOST_ITEMS = 1000
_LONGEST_NAME = 1000
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
    return {"name": name, **dict.fromkeys(_NUMBERS), **found, **numbers}


def problem_of(items: Any) -> str | None:
    """Returns a message if something is not a list of items; else `None`."""
    if not isinstance(items, list) or len(items) > _MOST_ITEMS:
        return f"the selection must be a list of at most {_MOST_ITEMS:,} items"
    for item in items:
        if not isinstance(item, dict) or item.keys() != {"name", *_NUMBERS}:
            return f"an item has the keys name, {', '.join(_NUMBERS)}; make it with item_of, not {item!r:.80}"
        if not (item["name"] is None or isinstance(item["name"], str)) or len(item["name"] or "") > _LONGEST_NAME:
            return f"the name of an item must be a text, or None, not {item['name']!r:.80}"
        for word in _NUMBERS:
            if item[word] is not None and (type(item[word]) is not int or item[word] < 0):
                return f"the {word} of an item must be a number from 0 on, or None, not {item[word]!r:.80}"
    return None


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

    def set(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Selects these items instead of the ones before, in all views."""
        chosen = [dict(item) for item in items]
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
