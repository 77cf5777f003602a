"""`pg.nodes`: every path that can be patched, with what is known of the value there.

A node whose value is a container has no entry of its own: it has one for each tensor and number in it
(`output|sub_0.logits`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

import torch

from graphpatch_notebook.capture.records import Frame, Node, Site, SourceLine
from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.paths import format_path, format_segment, parse_path
from graphpatch_notebook.resolution import Unresolvable, is_patchable, resolve
from graphpatch_notebook.values import ValueSpec, leaves

NodeKind: TypeAlias = Literal["input", "parameter", "buffer", "attribute", "op", "output"]


@dataclass(frozen=True, slots=True)
class NodeMeta:
    """What is known of a value that can be patched, from the run on the example inputs.

    Attributes:
        path: The node path, as `pg.patch` takes it.
        name: The name of the node: the last one in the path before `|`.
        kind: What it is: `input`, `parameter`, `buffer`, `attribute` (another tensor of the module), `op`, `output`.
        op: The name of the torch function (`linear`, `mul`); for other kinds that of the input, parameter, ...
        shape: The recorded shape; `None` for numbers. So are `dtype` and `device`.
        dtype: The recorded dtype.
        device: The recorded device.
        value: The value in words, as in the tree: `Tensor(3, 2)`, `int(5)`.
        frame_path: The path of the graph that the node is in; empty for the root.
        module_class: The name of the class of the user's module that this is the graph of.
        is_plumbing: Whether the value only carries sizes; the tree hides it.
        is_mutated_later: Whether the model writes into this very tensor after the node.
        is_view_filled_later: Whether that tensor is a view, so that a patch of it is cut off from its base.
    """

    path: str
    name: str
    kind: NodeKind
    op: str
    shape: torch.Size | None
    dtype: torch.dtype | None
    device: torch.device | None
    value: str
    frame_path: str
    module_class: str
    is_plumbing: bool
    is_mutated_later: bool
    is_view_filled_later: bool
    _site: Site | None = field(repr=False, compare=False)

    @property
    def source_lines(self) -> tuple[SourceLine, ...]:
        """The lines of the user's code that made the value, outermost first; empty where no line did (inputs, ...)."""
        return () if self._site is None else tuple(self._site.source_lines())


class NodeMap(Mapping[str, NodeMeta]):
    """Every path of a capture that can be patched, with its `NodeMeta`, in order of execution. Read-only.

    The nodes of a submodule stand where it was called. Looking a path up takes the same time in any model.

    Args:
        root: The frame of the whole model.

    Raises:
        UnknownPathError: (on look-up) There is no such path, or it leads to no single value; a `KeyError`.

    Example:
        >>> from graphpatch_notebook.values import TensorSpec
        >>> node = Node("input", "x", "x", spec=TensorSpec(torch.Size([3, 2]), torch.float32, torch.device("cpu")))
        >>> node.name = "x"
        >>> nodes = NodeMap(Frame(torch.nn.Identity(), "", None, nodes=[node], names={"x": node}))
        >>> list(nodes), nodes["x"].value
        (['x'], 'Tensor(3, 2)')
    """

    def __init__(self, root: Frame) -> None:
        self._root = root
        self._entries: dict[str, _Entry] | None = None
        self._metas: dict[str, NodeMeta] = {}

    def __getitem__(self, path: object) -> NodeMeta:
        text = str(path)
        meta = self._metas.get(text)
        if meta is None:
            entry = self._entries.get(text) if self._entries is not None else None
            meta = self._found(text) if entry is None else _meta(text, *entry)
            meta = self._metas[text] = self._metas.setdefault(meta.path, meta)
        return meta

    def __iter__(self) -> Iterator[str]:
        return iter(self._built())

    def __len__(self) -> int:
        return len(self._built())

    def __contains__(self, path: object) -> bool:
        return str(path) in self._built()

    def __repr__(self) -> str:
        few = list(self)[:3]
        shown = ", ".join(f"{path!r}: {self[path].value}" for path in few) + (", ..." if len(self) > len(few) else "")
        return f"<{type(self).__name__} of {type(self._root.module).__name__}, {len(self):,} nodes: {{{shown}}}>"

    def _built(self) -> dict[str, _Entry]:
        if self._entries is None:
            entries: dict[str, _Entry] = {}
            _add_entries(self._root, "", entries)
            self._entries = entries
        return self._entries

    def _found(self, text: str) -> NodeMeta:
        # By walking down: whoever looks one path up does not wait for a list of all.
        try:
            target = resolve(self._root, text)
        except Unresolvable as problem:
            raise UnknownPathError(problem.message) from None
        parsed = parse_path(text)
        path = format_path(parsed.names, parsed.dig)
        if all(dig for dig, _ in leaves(target.spec)):
            raise UnknownPathError(f"the value recorded at {path!r} is neither a tensor nor a number: it has no entry")
        return _meta(path, target.frame, target.node, format_path(parsed.names[:-1]), target.spec)


_Entry: TypeAlias = "tuple[Frame, Node, str, ValueSpec]"
"""What a `NodeMeta` is made from when somebody asks for it: frame, node, path of the frame, spec of the leaf."""


def _add_entries(frame: Frame, frame_path: str, entries: dict[str, _Entry]) -> None:
    prefix = f"{frame_path}." if frame_path else ""
    for node in frame.nodes:
        if node.kind == "call":
            if node.frame is not None:
                _add_entries(node.frame, prefix + format_segment(node.name), entries)
        elif is_patchable(node):
            path = prefix + format_segment(node.name)
            for dig, spec in leaves(node.spec):
                full = f"{path}|{'.'.join(map(format_segment, dig))}" if dig else path
                # Of two keys that read the same (1 and "1"), a path means the first.
                entries.setdefault(full, (frame, node, frame_path, spec))


def _meta(path: str, frame: Frame, node: Node, frame_path: str, spec: ValueSpec) -> NodeMeta:
    return NodeMeta(
        path=path,
        name=node.name,
        kind=cast(NodeKind, node.kind),
        op=node.op,
        shape=getattr(spec, "shape", None),
        dtype=getattr(spec, "dtype", None),
        device=getattr(spec, "device", None),
        value=str(spec),
        frame_path=frame_path,
        module_class=type(frame.module).__name__,
        is_plumbing=node.is_plumbing,
        is_mutated_later=node.is_mutated_later,
        is_view_filled_later=node.is_view_filled_later,
        _site=node.site,
    )
