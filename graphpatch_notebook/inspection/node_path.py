"""`pg.graph`: a `NodePath`, which navigates a capture, shows it, and names values to patch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

import torch

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import UnknownChildError
from graphpatch_notebook.inspection import tree
from graphpatch_notebook.inspection.locations import Location
from graphpatch_notebook.inspection.source_text import CodeText, code_text
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, TensorSpec, ValueSpec

if TYPE_CHECKING:
    from rich.text import Text

ValueShapes: TypeAlias = "torch.Size | tuple[Any, ...] | dict[str, Any] | GraphShapes | None"


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
    def _shape(self) -> ValueShapes:
        """The recorded `torch.Size`; for a container a tuple or dict of these; `None` if it is not a tensor.

        Of a graph a `GraphShapes`, which has the same children as the graph.
        """
        return _shapes(self.__location)

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

    def __rich__(self) -> Text:
        return tree.rich_text(self.__lines(False, tree.MAX_LINES, None))

    def _repr_html_(self) -> str:
        return tree.html(self.__lines(False, tree.MAX_LINES, None))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        if len(printer.stack) > 1:  # inside a list or dict, where a tree would be unreadable
            printer.text(f"NodePath({str(self)!r})")
            return
        lines = self.__lines(False, tree.MAX_LINES, None)
        printer.text(tree.colored(lines) if tree.is_color_terminal() else tree.plain(lines))


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


class GraphShapes:
    """The shapes in a graph: it has the same children as the graph, and in the end they are a `torch.Size`."""

    __slots__ = ("__location",)
    __location: Location

    def __init__(self, location: Location) -> None:
        self.__location = location

    def __getattr__(self, name: str) -> ValueShapes:
        return _shapes(_attribute(self.__location, name))

    def __getitem__(self, key: str) -> ValueShapes:
        return _shapes(self.__location.at(key))

    def __dir__(self) -> list[str]:
        return self.__location.children()

    def __reduce__(self) -> NoReturn:
        raise TypeError("the shapes of a graph cannot be copied or pickled; store those of single nodes")

    def _ipython_key_completions_(self) -> list[str]:
        return self.__location.children()

    def __repr__(self) -> str:
        entry = self.__location.entry(label_of=_shape_label)
        return tree.plain(tree.tree_lines(entry, path=python_shape(self.__location)))


def python_shape(location: Location) -> str:
    """Returns the Python expression for the shapes at `location`."""
    return location.python().replace("pg.graph", "pg.graph._shape", 1)


def _shapes(location: Location) -> ValueShapes:
    return GraphShapes(location) if location.graph is not None else _value_shapes(location.spec)


def _value_shapes(spec: ValueSpec | None) -> torch.Size | tuple[Any, ...] | dict[str, Any] | None:
    if isinstance(spec, TensorSpec):
        return spec.shape
    if not isinstance(spec, ContainerSpec):
        return None
    if all(type(key) is int for _, key, _ in spec.children) and issubclass(spec.type, (tuple, list)):
        return tuple(_value_shapes(child) for _, _, child in spec.children)
    return {text: _value_shapes(child) for text, _, child in spec.children}


def _shape_label(spec: ValueSpec) -> str:
    if isinstance(spec, TensorSpec):
        return str(tuple(spec.shape))
    return "" if isinstance(spec, ContainerSpec) else ("number" if isinstance(spec, ScalarSpec) else str(spec))
