"""Locations in a capture, and how to get from one to the next: what a `NodePath` refers to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphpatch_notebook.capture.records import CallNode, Frame, Node
from graphpatch_notebook.components import find
from graphpatch_notebook.components.names import is_component_name
from graphpatch_notebook.errors import UnknownChildError
from graphpatch_notebook.inspection.resolution import Unresolvable, hint_on, parse, resolve
from graphpatch_notebook.inspection.tree import LabelOf, TreeEntry, frame_entry, is_shown, spec_entry
from graphpatch_notebook.paths import ParsedPath, format_path, format_segment, python_path
from graphpatch_notebook.values import ContainerSpec, ValueSpec


def is_child(node: Node) -> bool:
    """Whether a node is listed as a child of its graph: it is not a size and not a constant."""
    return is_shown(node) or (node.kind == "input" and not node.is_size)


@dataclass(frozen=True, slots=True)
class Location:
    """A graph, a node, or a value inside the container that a node holds.

    Attributes:
        names: The names that lead to the node.
        dig: The keys, as paths write them, that lead into the node's value.
        frame: The frame that the node is in; the root frame for the root.
        node: The node; `None` for the root.
        graph: The frame at this location, if the location is a graph.
        spec: The recorded spec of the value, if the location is not a graph.
        component: The name of the component that was asked for, in place of a path; empty for paths.
    """

    root: Frame
    names: tuple[str, ...]
    dig: tuple[str, ...]
    frame: Frame
    node: Node | None
    graph: Frame | None
    spec: ValueSpec | None
    component: str = ""

    @classmethod
    def of_root(cls, root: Frame) -> Location:
        """Returns the location of the root graph."""
        return cls(root, (), (), root, None, root, None)

    @property
    def path(self) -> str:
        """The text of the path that leads here, or the name of the component; empty for the root."""
        return self.component or format_path(self.names, self.dig)

    @property
    def last_name(self) -> str:
        """The end of the path, as a path writes it."""
        if self.component:
            return self.component
        return format_segment((*self.names, *self.dig)[-1]) if self.names else "<root>"

    @property
    def title(self) -> str:
        """What a message calls it."""
        return repr(self.path) if self.names else "the root graph"

    def child(self, name: str) -> Location | None:
        """Returns the child called `name`, if there is one."""
        if self.graph is not None:
            if (node := self.graph.names.get(name)) is None:
                return None
            graph = node.frame if isinstance(node, CallNode) else None
            spec = node.spec if graph is None else None
            return Location(self.root, (*self.names, name), (), self.graph, node, graph, spec)
        if isinstance(self.spec, ContainerSpec) and (found := self.spec.child(name)):
            return Location(self.root, self.names, (*self.dig, name), self.frame, self.node, None, found[1])
        return None

    def children(self) -> list[str]:
        """Returns the names of the children, without sizes and constants.

        Inputs that the example did not have are there, though the tree leaves them out: they can be patched.
        """
        if self.graph is not None:
            return [node.name for node in self.graph.nodes if is_child(node)]
        return [text for text, _, _ in self.spec.children] if isinstance(self.spec, ContainerSpec) else []

    def keys(self) -> list[str]:
        """Returns the keys that `at` accepts: the names of the children, and at the root those of components."""
        return [*self.children(), *([] if self.names else find(self.root))]

    def below(self, *names: str) -> Location:
        """Returns the location to which `names` lead from here; the message of an error names the nearest paths."""
        __tracebackhide__ = True
        here = self
        for position, name in enumerate(names):
            if (child := here.child(name)) is None:
                raise here._unknown(names[position:])
            here = child
        return here

    def at(self, key: str | int) -> Location:
        """Returns the location that `key` names: a child, a path from here on, or a position in a sequence.

        At the root, it may be the name of a component.
        """
        __tracebackhide__ = True
        if isinstance(key, int):
            return self._at_position(key)
        if not isinstance(key, str):
            raise TypeError(f"a child is named by a text or a position, not by {key!r}")
        if (child := self.child(key)) is not None:
            return child
        try:
            if not self.names and is_component_name(key):
                target = resolve(self.root, key)
                here = self.below(*parse(target.path).names).below(*target.dig_text)
                return replace(here, spec=target.spec, component=target.text if target.component else "")
            parsed = parse(key)
        except Unresolvable as problem:
            raise UnknownChildError(problem.message) from None
        here = self.below(*parsed.names)
        if parsed.dig and here.graph is not None:
            raise UnknownChildError(f"{here.title} is a graph, not a container: its children follow a dot, not '|'")
        return here.below(*parsed.dig)

    def _at_position(self, position: int) -> Location:
        if not isinstance(self.spec, ContainerSpec):
            raise UnknownChildError(f"{self.title} is not a container: it has no position {position}")
        wanted = position + len(self.spec.children) if position < 0 else position
        found = (text for text, key, _ in self.spec.children if type(key) is int and key == wanted)
        return self.below(next(found, f"sub_{position}"))

    def _unknown(self, names: tuple[str, ...]) -> UnknownChildError:
        message = f"{self.title} has no child {names[0]!r}"
        if isinstance(self.spec, ContainerSpec):
            return UnknownChildError(f"{message}; it has {', '.join(map(repr, self.children())) or 'none'}")
        if self.graph is None:
            return UnknownChildError(f"{message}: it is a value, {self.spec}")
        path = ParsedPath((*self.names, *names))
        return UnknownChildError(message + hint_on(self.root, self.graph, path, len(self.names)))

    def python(self) -> str:
        """Returns the Python expression that leads here from a `PatchableGraph` called `pg`."""
        if self.component:
            return f"pg.graph[{self.component!r}]"
        return python_path("pg.graph", (*self.names, *self.dig))

    def entry(self, *, show_all: bool = False, label_of: LabelOf | None = None) -> TreeEntry:
        """Returns the entry of this location in the tree."""
        if self.graph is not None:
            return frame_entry(self.graph, self.last_name, show_all=show_all, label_of=label_of)
        assert self.spec is not None  # anything but a graph has a value
        return spec_entry(self.spec, self.last_name, show_all=show_all, label_of=label_of)
