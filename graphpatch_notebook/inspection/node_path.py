"""Locations in a capture, and `pg.graph`: a `NodePath`, which leads from one to the next, and shows them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch
from torch.nn import Module

from graphpatch_notebook.capture.inputs import inputs_of_call, passed_on
from graphpatch_notebook.capture.records import (
    CallNode,
    ElementNode,
    Frame,
    Node,
    Ref,
    SourceLine,
    at_keys,
    refs_in,
    source_line,
)
from graphpatch_notebook.components import find
from graphpatch_notebook.errors import UnknownChildError
from graphpatch_notebook.inspection import tree
from graphpatch_notebook.inspection.resolution import Unresolvable, graph_class, hint_on, parse, resolve
from graphpatch_notebook.inspection.tree import TreeEntry, frame_entry, is_shown, spec_entry
from graphpatch_notebook.paths import ParsedPath, format_path, format_segment, is_component_name, python_path
from graphpatch_notebook.values import ContainerSpec, Key, TensorSpec, ValueSpec


class CodeText(str):
    """Text whose repr is the text itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def code_text(location: Location, code_of: Callable[[Frame], str]) -> CodeText:
    """Returns the code of the graph at `location`, or the user's lines that computed the value there."""
    if location.graph is None:
        assert location.node is not None  # only the root has no node, and it is a graph
        return CodeText(_value_text(location.node, location.frame))
    if location.graph.opaque_reason is None:
        title, code = "Compiled code:", code_of(location.graph).strip("\n")
    else:
        title, code = "No compiled code:", f"{graph_class(location.graph)}, because {location.graph.opaque_reason}"
    if location.graph.custom_failure is not None:
        title = f"{title.removesuffix(':')} ({location.graph.custom_failure}):"
    if location.node is None:
        return CodeText(code if location.graph.opaque_reason is None else f"{title}\n{code}")
    return CodeText(f"Calling context:\n{_lines(location.node) or '(not known)'}\n{title}\n{code}")


def _value_text(node: Node, frame: Frame) -> str:
    if lines := _lines(node):
        return lines
    has_target = node.kind in ("input", "parameter", "buffer", "attribute")
    name = "" if node.kind == "output" else f" {(str(node.target) if has_target else node.op)!r}"
    title = f"{node.kind.capitalize()}{name} of {type(frame.module).__name__}"
    line = signature_line(frame.module) if node.kind in ("input", "output") else None
    return f"{title}\n{line}" if line else title


def _lines(node: Node) -> str:
    return "\n".join(map(str, node.site.source_lines())) if node.site is not None else ""


def signature_line(module: Module) -> SourceLine | None:
    """Returns the line of the user's code that defines the module's `forward`, below its decorators."""
    forward: Any = getattr(type(module), "forward", None)  # the class of scripted modules has none
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return None
    lines = itertools.count(code.co_firstlineno)
    found = (source_line(code, number) for number in lines)
    return next(line for line in found if line.text.startswith(("def ", "async def ")) or not line.text)


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
            return [node.name for node in self.graph.nodes_and_splices if is_child(node)]
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

    def entry(self, *, show_all: bool = False) -> TreeEntry:
        """Returns the entry of this location in the tree."""
        if self.graph is not None:
            return frame_entry(self.graph, self.last_name, show_all=show_all)
        assert self.spec is not None  # anything but a graph has a value
        return spec_entry(self.spec, self.last_name, show_all=show_all)


class CodeSource(Protocol):
    """Where the code of a graph comes from."""

    def __call__(self, frame: Frame, /) -> str:
        """Returns the Python code of the graph of `frame`, which is not opaque."""


class NodePath:
    """A location in the hierarchy of graphs: a graph, a node, or a value inside the container that a node holds.

    `pg.graph` is the root. Children are attributes and items: `pg.graph.h_0.mlp`, `pg.graph["h_0.mlp.act.mul_3"]`,
    `pg.graph.output.sub_0` (in text `output|sub_0`; `pg.graph.output[0]` is the same). Tab completes them. At a prompt
    a path shows the tree below it; `str(path)` is its text, and `pg.patch({...})` takes a path in place of its text.

    Its own attributes begin with an underscore. A node that has the same name as one of them, like a Python
    keyword, or with two underscores in front and behind is reached as an item: `pg.graph["_code"]`,
    `pg.graph["lambda"]`. Keys of dicts that hold dots or other characters with a meaning in paths are items as they
    are (`pg.graph.output["a.b"]`); the text of paths has them in double quotes (`output|"a.b"`).

    Two paths are equal if they have the same text and belong to the same capture. Immutable.

    Args:
        root: The root frame of the capture.
        code_of: Gives the code of a frame's graph.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.ones(1, 2))
        >>> path = pg.graph.sub_0.linear
        >>> str(path), path._shape
        ('sub_0.linear', torch.Size([1, 3]))
    """

    __slots__ = ("__code_of", "__location")

    __location: Location
    __code_of: CodeSource

    def __init__(self, root: Frame, code_of: CodeSource) -> None:
        self.__set(Location.of_root(root), code_of)

    def __set(self, location: Location, code_of: CodeSource) -> None:
        object.__setattr__(self, "_NodePath__location", location)
        object.__setattr__(self, "_NodePath__code_of", code_of)

    def __to(self, location: Location) -> NodePath:
        path = object.__new__(NodePath)
        path.__set(location, self.__code_of)
        return path

    # --- children ---------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> NodePath:
        __tracebackhide__ = True
        return self.__to(_attribute(self.__location, name))

    def __getitem__(self, key: str | int) -> NodePath:
        __tracebackhide__ = True
        return self.__to(self.__location.at(key))

    def __iter__(self) -> Iterator[NodePath]:
        """Yields the children, as `dir` lists them."""
        return (self.__to(self.__location.below(name)) for name in self.__location.children())

    def __contains__(self, key: str | int) -> bool:
        try:
            self.__location.at(key)
        except UnknownChildError:
            return False
        return True

    def __dir__(self) -> list[str]:
        return [*self.__location.children(), "_code", "_shape"]

    def _ipython_key_completions_(self) -> list[str]:
        return self.__location.keys()

    # --- identity ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.__location.path or "<root>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NodePath):
            return NotImplemented
        mine, theirs = self.__location, other.__location
        return mine.root is theirs.root and (mine.path, mine.names) == (theirs.path, theirs.names)

    def __hash__(self) -> int:
        return hash((id(self.__location.root), self.__location.path))

    def __copy__(self) -> NodePath:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NodePath:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a NodePath belongs to the PatchableGraph it came from and cannot be pickled; keep str(path)")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"a NodePath cannot be assigned to; to change a value, use pg.patch({{{str(self)!r}: ...}})"
        )

    # --- what it shows ----------------------------------------------------------------------------------------------

    @property
    def _code(self) -> CodeText:
        """The Python code of a graph, with the lines that call it; of a node, the user's lines that made it."""
        return code_text(self.__location, self.__code_of)

    @property
    def _shape(self) -> torch.Size | tuple[Any, ...] | dict[str, Any] | None:
        """The recorded `torch.Size`; for a container a tuple or dict of these; `None` if it is not a tensor.

        For a graph, a dict of the shapes of its children, which are also attributes.
        """
        shapes: torch.Size | tuple[Any, ...] | dict[str, Any] | None = _shapes(self.__location)
        return shapes

    def _tree(
        self, *, show_all: bool = False, max_lines: int | None = tree.MAX_LINES, depth: int | None = None
    ) -> CodeText:
        """Returns the tree below this location.

        Args:
            show_all: Show also what only carries sizes, constants, and inputs that the example did not have.
            max_lines: The most lines; in a larger tree, graphs that look the same are folded into one line, then the
                deepest graphs are closed. `None` for all lines.
            depth: How many levels to open; `None` for all.
        """
        return CodeText(tree.plain(self.__lines(show_all, max_lines, depth)))

    def __lines(self, show_all: bool, max_lines: int | None, depth: int | None) -> list[tree.Line]:
        entry = self.__location.entry(show_all=show_all)
        return tree.tree_lines(entry, path=self.__location.python(), max_lines=max_lines, depth=depth)

    def __repr__(self) -> str:
        return tree.plain(self.__lines(False, tree.MAX_LINES, None))

    def _repr_html_(self) -> str:
        return tree.html(self.__lines(False, tree.MAX_LINES, None))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        if len(printer.stack) > 1:  # inside a list or dict, where a tree would be unreadable
            printer.text(f"NodePath({str(self)!r})")
            return
        lines = self.__lines(False, tree.MAX_LINES, None)
        printer.text(tree.colored(line.parts() for line in lines) if tree.is_color_terminal() else tree.plain(lines))


def location_of(path: NodePath) -> Location:
    """Returns the location of `path`."""
    location: Location = object.__getattribute__(path, "_NodePath__location")  # other attributes are nodes
    return location


def _attribute(location: Location, name: str) -> Location:
    __tracebackhide__ = True
    # Python, copy, pickle and IPython ask every object for names like these: they get a quick answer.
    is_dunder = name.startswith("__") and name.endswith("__")
    if not is_dunder and (child := location.child(name)) is not None:
        return child
    if name.startswith("_"):
        raise UnknownChildError(f"{location.title} has no child {name!r}")
    return location.below(name)  # which raises


# --------------------------------------------------------------------------------------------------------------------
# Shapes


class GraphShapes(dict[str, Any]):
    """The shapes of the children of a graph, by their names; also as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"no {name!r}; there are {', '.join(self) or 'none'}")


def _shapes(location: Location) -> Any:
    if location.graph is None:
        return _value_shapes(location.spec)
    return GraphShapes({name: _shapes(location.below(name)) for name in location.children()})


def _value_shapes(spec: ValueSpec | None) -> torch.Size | tuple[Any, ...] | dict[str, Any] | None:
    if isinstance(spec, TensorSpec):
        return spec.shape
    if not isinstance(spec, ContainerSpec):
        return None
    if all(type(key) is int for _, key, _ in spec.children) and issubclass(spec.type, (tuple, list)):
        return tuple(_value_shapes(child) for _, _, child in spec.children)
    return {text: _value_shapes(child) for text, _, child in spec.children}


# --------------------------------------------------------------------------------------------------------------------
# Where a value comes from, and where it is used. A value is a node and the keys that lead into it (a `Ref`). The flow
# continues inside a call: the input of a frame is the argument that its caller gave, and the value of a call is the
# output of its frame.


def sources(location: Location) -> list[Ref]:
    """Returns the values that the value at `location` is computed from; for a graph, the arguments of its call.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2))
        >>> root = Location.of_root(pg.nodes.root)
        >>> [source.node.name for source in sources(root.below("sub_0", "input"))]
        ['input']
    """
    node = location.node
    if node is None:
        return []
    keys = keys_of(location)
    if location.graph is None and node.kind in ("input", "output"):
        given = passed_on(node, location.frame)
        return _unique(refs_in(None if given is None else at_keys(given[0], keys)))
    return _unique(sources_in(location.frame, node))


def sources_in(frame: Frame, node: Node) -> Iterable[Ref]:
    """Returns the values of a frame that the value of a node there is computed from, in the order of the arguments."""
    if node.kind == "output":
        return refs_in(frame.output)
    if isinstance(node, ElementNode):
        return [Ref(node.whole, (node.position,))]
    return node.sources


def users(location: Location) -> list[Ref]:
    """Returns the values that are computed from the value at `location`; for a graph, from the result of its call."""
    node, frame = location.node, location.frame
    if node is None:
        return []
    keys = keys_of(location)
    if location.graph is None and node.kind == "output":
        if frame.call is None or frame.parent is None:
            return []
        node, frame = frame.call, frame.parent
    return _unique(user for other in frame.nodes for user in _uses(other, frame, node, keys))


def keys_of(location: Location) -> tuple[Key, ...]:
    """Returns the keys that lead from the value of the node of `location` to the value there."""
    keys: list[Key] = []
    spec = location.node.spec if location.node is not None else None
    for text in location.dig:
        found = spec.child(text) if isinstance(spec, ContainerSpec) else None
        if found is None:
            break
        keys.append(found[0])
        spec = found[1]
    return tuple(keys)


def _uses(other: Node, frame: Frame, node: Node, keys: tuple[Key, ...]) -> Iterator[Ref]:
    """Yields what `other` makes of the value, if it uses it."""
    if other.kind == "output":
        if any(_is_in(ref, node, keys) for ref in refs_in(frame.output)):
            yield Ref(other)
    elif isinstance(other, ElementNode):
        base, position = other.whole, other.position
        if base is node and (not keys or keys[0] == position):
            yield Ref(other)
    elif any(_is_in(ref, node, keys) for ref in other.sources):
        inputs = _inputs_given(other, node, keys) if isinstance(other, CallNode) else []
        yield from inputs or [Ref(other)]


def _inputs_given(call: CallNode, node: Node, keys: tuple[Key, ...]) -> list[Ref]:
    """Returns the inputs of the called frame that receive the value."""
    bound = inputs_of_call(call.frame, call.args, call.kwargs)
    return [
        Ref(given)
        for given in call.frame.inputs()
        if any(_is_in(ref, node, keys) for ref in refs_in(bound.get(str(given.target))))
    ]


def _is_in(ref: Ref, node: Node, keys: tuple[Key, ...]) -> bool:
    """Whether `ref` refers to the value, to a part of it, or to a container of it."""
    shared = min(len(ref.dig), len(keys))
    return ref.node is node and ref.dig[:shared] == keys[:shared]


def _unique(refs: Iterable[Ref]) -> list[Ref]:
    """Returns each value once, in order."""
    found: dict[tuple[int, str], Ref] = {}
    for ref in refs:
        found.setdefault((id(ref.node), repr(ref.dig)), ref)
    return list(found.values())
