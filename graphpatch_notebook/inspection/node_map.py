"""`pg.nodes`: every path that can be patched, with the recorded facts about its value.

A node whose value is a container has an entry for each tensor and number in it, but not for the container
(`output|sub_0.logits`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch

from graphpatch_notebook.capture.records import CallNode, Frame, Node, Site, SourceLine
from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.inspection.resolution import Unresolvable, is_patchable, resolve
from graphpatch_notebook.paths import format_path, format_segment, path_pattern
from graphpatch_notebook.values import ValueSpec, leaves

T = TypeVar("T")
NodeKind: TypeAlias = Literal["input", "parameter", "buffer", "attribute", "op", "output"]


@dataclass(frozen=True, slots=True)
class NodeMeta:
    """Facts about a value that can be patched, from the run on the example inputs.

    Attributes:
        path: The node path, as `pg.patch` takes it.
        name: The name of the node: the last one in the path before `|`.
        kind: The kind: `input`, `parameter`, `buffer`, `attribute` (another tensor of the module), `op`, `output`.
        op: The name of the torch function (`linear`, `mul`); for other kinds that of the input, parameter, ...
        shape: The recorded shape; `None` for numbers. So are `dtype` and `device`.
        dtype: The recorded dtype.
        device: The recorded device.
        value: The value, as the tree shows it: `Tensor(3, 2)`, `int(5)`.
        frame_path: The path of the graph that the node is in; empty for the root.
        module_class: The name of the class of the user's module that this is the graph of.
        is_size: Whether the value only carries sizes; the tree hides it.
        is_mutated_later: Whether the model writes into this tensor after the node.
        is_view_filled_later: Whether that tensor is a view, so that a patch of it is cut off from its base.
        opens: The function that runs step by step in calls in which this value is patched or probed, as it is one of
            its steps: the result then equals that of the function within rounding. `None` for all other values.
        placement: Of a model that is sharded over processes: `replicated`, `split along dimension 2`, or `refused:`
            with the reason why the value cannot be patched. Empty for all other models.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> node = PatchableGraph(torch.nn.Linear(2, 3), torch.ones(1, 2)).nodes["linear"]
        >>> node.op, node.kind, tuple(node.shape)
        ('linear', 'op', (1, 3))
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
    is_size: bool
    is_mutated_later: bool
    is_view_filled_later: bool
    opens: str | None
    placement: str
    _site: Site | None = field(repr=False, compare=False)

    @property
    def source_lines(self) -> tuple[SourceLine, ...]:
        """The lines of the user's code that made the value, outermost first; empty where no line did (inputs, ...)."""
        return () if self._site is None else tuple(self._site.source_lines())


class NodeMap(Mapping[str, NodeMeta]):
    """Every path of a capture that can be patched, with its `NodeMeta`, in order of execution. Read-only.

    The nodes of a submodule follow at the place of its call. A look-up takes the same time in any model.

    Args:
        root: The frame of the whole model.

    Raises:
        UnknownPathError: (on look-up) The path does not exist, or does not lead to a single value; a `KeyError`.

    Example:
        >>> from graphpatch_notebook.values import TensorSpec
        >>> spec = TensorSpec(torch.Size([3, 2]), torch.float32, torch.device("cpu"))
        >>> node = Node(kind="input", op="x", target="x", spec=spec, name="x")
        >>> nodes = NodeMap(Frame(torch.nn.Identity(), "", None, nodes=[node], names={"x": node}))
        >>> list(nodes), nodes["x"].value
        (['x'], 'Tensor(3, 2)')
    """

    def __init__(self, root: Frame) -> None:
        self._root = root
        self._metas: dict[str, NodeMeta] = {}
        self._built: tuple[NodeRows, dict[str, int]] | None = None
        self._kept: dict[Callable[[NodeMap], Any], Any] = {}

    @property
    def root(self) -> Frame:
        """The frame of the whole model."""
        return self._root

    def __getitem__(self, path: object) -> NodeMeta:
        text = str(path)
        meta = self._metas.get(text)
        if meta is None:
            row = self._built[1].get(text) if self._built is not None else None
            meta = self._found(text) if self._built is None or row is None else self._built[0].meta(row)
            meta = self._metas[text] = self._metas.setdefault(meta.path, meta)
        return meta

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows()[1])

    def __len__(self) -> int:
        return len(self._rows()[1])

    def __contains__(self, path: object) -> bool:
        return str(path) in self._rows()[1]

    def matching(self, pattern: str) -> list[str]:
        """Returns the paths that match a pattern, in order of execution; empty if none does.

        Args:
            pattern: A path in which `*` is any text within a name, and `**` any text: `h_*.mlp.output`, `**.attn.*`.

        Example:
            >>> from graphpatch_notebook import PatchableGraph
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
            >>> PatchableGraph(model, torch.ones(1, 2)).nodes.matching("sub_*.output")
            ['sub_0.output', 'sub_1.output']
        """
        wanted = path_pattern(pattern)
        return [path for path in self if wanted.fullmatch(path)]

    def __repr__(self) -> str:
        few = list(self)[:3]
        shown = ", ".join(f"{path!r}: {self[path].value}" for path in few) + (", ..." if len(self) > len(few) else "")
        return f"<{type(self).__name__} of {type(self._root.module).__name__}, {len(self):,} nodes: {{{shown}}}>"

    def _rows(self) -> tuple[NodeRows, dict[str, int]]:
        if self._built is None:
            rows = NodeRows(self._root)
            self._built = (rows, {path: row for row, path in enumerate(rows.paths)})
        return self._built

    def _found(self, text: str) -> NodeMeta:
        # By walking down: a look-up of one path does not wait for a list of all.
        try:
            target = resolve(self._root, text)
        except Unresolvable as problem:
            raise UnknownPathError(problem.message) from None
        if all(dig for dig, _ in leaves(target.spec)):
            raise UnknownPathError(
                f"the value recorded at {target.path!r} is neither a tensor nor a number: it has no entry"
            )
        return _meta(target.path, target.frame, target.node, target.spec)


_lock = threading.RLock()  # the browser computes values in another thread than the cells


def kept_for(nodes: NodeMap, make: Callable[[NodeMap], T]) -> T:
    """Returns `make(nodes)`, computed at first use. After an edit of the graphs, there is a new `NodeMap`."""
    with _lock:
        if make not in nodes._kept:
            nodes._kept[make] = make(nodes)
        return cast(T, nodes._kept[make])


class NodeRows:
    """The paths of a capture that can be patched, with their nodes, their frames, and the specs of the values.

    Attributes:
        paths: The paths.
        nodes: The node of each.
        frames: The frame of each.
        specs: The spec of each value.
    """

    def __init__(self, root: Frame, *, with_sizes: bool = True) -> None:
        rows = [row for row in _rows(root, "") if with_sizes or not row[1].is_size]
        self.paths: list[str] = [path for path, _, _, _ in rows]
        self.nodes: list[Node] = [node for _, node, _, _ in rows]
        self.frames: list[Frame] = [frame for _, _, frame, _ in rows]
        self.specs: list[ValueSpec] = [spec for _, _, _, spec in rows]

    def meta(self, row: int) -> NodeMeta:
        """Returns the facts about the node in a row."""
        return _meta(self.paths[row], self.frames[row], self.nodes[row], self.specs[row])


def _rows(frame: Frame, prefix: str) -> Iterator[tuple[str, Node, Frame, ValueSpec]]:
    for node in frame.nodes_and_splices:
        if isinstance(node, CallNode):
            yield from _rows(node.frame, f"{prefix}{format_segment(node.name)}.")
        elif is_patchable(node):
            for path, leaf in _leaves(prefix + format_segment(node.name), node.spec).items():
                yield path, node, frame, leaf


def _leaves(path: str, spec: ValueSpec) -> dict[str, ValueSpec]:
    """Returns the leaves of the value at `path`, by their own paths."""
    inside: dict[str, ValueSpec] = {}
    for dig, leaf in leaves(spec):
        # If two keys have the same text (1 and "1"), a path refers to the first.
        inside.setdefault(f"{path}|{'.'.join(map(format_segment, dig))}" if dig else path, leaf)
    return inside


def _meta(path: str, frame: Frame, node: Node, spec: ValueSpec) -> NodeMeta:
    return NodeMeta(
        path=path,
        name=node.name,
        kind=cast(NodeKind, node.kind),
        op=node.op,
        shape=getattr(spec, "shape", None),
        dtype=getattr(spec, "dtype", None),
        device=getattr(spec, "device", None),
        value=str(spec),
        frame_path=format_path(frame.path),
        module_class=type(frame.module).__name__,
        is_size=node.is_size,
        is_mutated_later=node.is_mutated_later,
        is_view_filled_later=node.is_view_filled_later,
        opens=None if node.composite is None else node.composite.name,
        placement=getattr(spec, "placement", ""),
        _site=node.site,
    )
