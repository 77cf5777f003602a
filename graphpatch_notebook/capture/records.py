"""What capture keeps: light records of frames, nodes and call sites. No tensors, no fx, no code.

A `Frame` is one invocation of one module's `forward`. It has a `Node` for each value: an `OpNode` for the result of a
torch function, identified by its `Site`; an `ElementNode` for a part of such a result; a `CallNode` for a call of a
submodule, which has the `Frame` of that call. The arguments of a node, and the output of a frame, are kept with a `Ref`
in place of each value that has a node.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import inspect
import linecache
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch
from torch import fx
from torch.nn import Module

from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.values import PLAIN_TENSORS, Key, ScalarSpec, ValueSpec, take

T = TypeVar("T")

Kind: TypeAlias = Literal["input", "parameter", "buffer", "attribute", "constant", "op", "call", "output"]

HELD_KINDS: tuple[Kind, ...] = ("parameter", "buffer", "attribute", "constant")
"""The kinds of nodes whose values the model holds, rather than computes."""


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's code; `stored_text` is that of a line from a file of a graph."""

    file: str
    line: int
    function: str
    stored_text: str | None = None

    @property
    def text(self) -> str:
        """The line itself, without its indentation; empty where the source is not at hand."""
        return linecache.getline(self.file, self.line).strip() if self.stored_text is None else self.stored_text

    def __str__(self) -> str:
        text = self.text
        return f'File "{self.file}", line {self.line}, in {self.function}' + (f"\n    {text}" if text else "")


source_texts: dict[int, list[str]] = {}
"""The lines of the files of code objects that were captured, as they were then, by the ids of these."""


def source_line(code: CodeType, line: int) -> SourceLine:
    """Returns a line of the file of a code object: as it was when the code was captured, if it was."""
    texts = source_texts.get(id(code))
    text = None if texts is None else "".join(texts[line - 1 : line]).strip()
    return SourceLine(code.co_filename, line, code.co_name, text)


def _itself(self: T, _: dict[int, Any]) -> T:
    """Copies of captures share what never changes."""
    return self


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A chain of call sites: code object and instruction offset of each Python frame from `forward` to the op.

    The first is `forward`, or a decorator around it; the last is the innermost frame of the user's code. Sites are
    interned for the length of a capture, so that `is` compares them.
    """

    steps: tuple[tuple[CodeType, int], ...]
    lines: tuple[SourceLine, ...] | None = None  # those of a file or an exported program, in place of those of the code

    @property
    def leaf(self) -> tuple[CodeType, int]:
        """The line of the user's code that calls torch."""
        return self.steps[-1]

    def source_lines(self) -> list[SourceLine]:
        """Returns the user's source lines, outermost first."""
        of_code = (source_line(code, line_at(code, offset)) for code, offset in self.steps)
        return list(of_code if self.lines is None else self.lines)

    __deepcopy__ = _itself


@functools.lru_cache(maxsize=4096)
def line_at(code: CodeType, offset: int) -> int:
    """Returns the line of the instruction at `offset` of `code`."""
    found = code.co_firstlineno
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            found = line
    return found


@dataclass(frozen=True, slots=True, eq=False)
class CompositeCall:
    """A call of a composite function that has its steps as nodes.

    Attributes:
        occurrence: How often the same call site ran before in its frame, or in the call around it.
        outer: The opened call that this one is a step of.
        is_fused: Whether the function itself runs, also in graphs, except where one of the steps is patched.
    """

    name: str
    site: Site
    occurrence: int
    outer: CompositeCall | None
    is_fused: bool = False

    __deepcopy__ = _itself


@dataclass(frozen=True, slots=True, eq=False)
class ValueRead:
    """A value that the model read into Python: plain numbers, or `None` for others, and for many."""

    site: Site
    occurrence: int
    composite: CompositeCall | None
    value: bool | int | float | list[Any] | None

    __deepcopy__ = _itself


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the value of a node of the same frame, or to the part at `dig` of that value."""

    node: Node
    dig: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class SizeGuard:
    """What Python found out about sizes and went on with: `func` of `operands`, or the one operand if there is none.

    Among the operands, sizes are `Ref`s.
    """

    func: Callable[..., Any] | None
    operands: tuple[Any, ...]
    result: Any


@dataclass(frozen=True, slots=True)
class Structure:
    """A container of any other class (dataclass, `ModelOutput`, ...) whose children may hold `Ref`s."""

    type: type
    children: tuple[tuple[Key, Any], ...]


_LEAVES: frozenset[type] = frozenset({*PLAIN_TENSORS, Ref, bool, int, float, str, type(None)})
"""Most arguments of calls: none of them is a container."""


def map_leaves(value: Any, leaf: Callable[[Any], Any], *, with_subclasses: bool = False) -> Any:
    """Returns `value` with `leaf` applied to all but tuples, lists, dicts and slices; containers are new.

    Subclasses are leaves, since a named tuple, say, may accept only values of certain types. `with_subclasses` they are
    containers, as in graphs of fx, and become plain ones.
    """
    kind = type(value)
    if kind is torch.Size:  # holds integers only, and a leaf may become something else
        kind = tuple
    elif with_subclasses:
        kind = next((base for base in (tuple, list, dict, slice) if isinstance(value, base)), kind)
    if kind is tuple or kind is list:
        items = [
            leaf(item) if type(item) in _LEAVES else map_leaves(item, leaf, with_subclasses=with_subclasses)
            for item in value
        ]
        return type(value)(*items) if hasattr(value, "_fields") else kind(items)
    if kind is dict:
        return {key: map_leaves(item, leaf, with_subclasses=with_subclasses) for key, item in value.items()}
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return slice(*[map_leaves(part, leaf, with_subclasses=with_subclasses) for part in parts])
    return leaf(value)


def refs_in(value: Any) -> Iterator[Ref]:
    """Yields the `Ref`s in arguments, or in an output, as they are recorded."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, Structure):
        for _, child in value.children:
            yield from refs_in(child)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from refs_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from refs_in(item)
    elif isinstance(value, slice):
        for item in (value.start, value.stop, value.step):
            yield from refs_in(item)


def at_keys(value: Any, keys: tuple[Key, ...]) -> Any:
    """Returns the value at `keys` in recorded arguments, or the innermost known container around it."""
    for position, key in enumerate(keys):
        if isinstance(value, Ref):
            return Ref(value.node, (*value.dig, *keys[position:]))
        try:
            value = dict(value.children)[key] if isinstance(value, Structure) else take(value, key)
        except (LookupError, TypeError, AttributeError):
            return value
    return value


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """One value in a frame: an input, a held tensor, the output. Subclasses are for values that the frame computes.

    Attributes:
        kind: The kind of node.
        op: For people: the name of the torch function (`linear`, `mul`), else of the input, parameter, submodule...
        target: What makes it. op: the function that torch dispatched (as the function mode received it). parameter,
            buffer, attribute: the attribute path from the frame's module (`weight`, `emb.weight`). call: the attribute
            path of the submodule from the frame's module (`h.3`). input: the parameter's name. constant: a weak
            reference to the tensor, or the object itself.
        spec: The description of the value: for a tensor, shape, dtype and device.
        base_name: The name before numbering: the local variable, or else the torch function.
        name: The name in the graph, unique in the frame: fixed when the frame is complete.
        is_size: Whether the value only carries sizes (or is the container that an `ElementNode` came from).
        is_live: Whether a live run sees this value (it does not see arithmetic on sizes).
        is_mutated_later: Whether an op of the model wrote into this tensor later, or its memory was freed.
        is_view_filled_later: Whether that tensor is a view, so that the write was meant for its base.
        is_of_caller: Whether a constant is a value that a calling frame has, which came in a closure.
        args: The positional arguments of the operation that computed the value, with `Ref`s, also in containers.
        kwargs: The keyword arguments, likewise.
        site: The call site of the operation that computed the value.
        occurrence: How often the call site was reached before in this frame; for a step of an opened call, in that
            call.
        composite: The opened or fused call that this is a step of.
        position: The position of the value in the result of the call at `site`; `None` if it is the whole result.
        written_argument: The argument that the op wrote into and that is its value: its position, or its keyword.
        inner: The inner nodes of a fused call, in order; the value of the node is computed from the last of them.
    """

    kind: Kind
    op: str
    target: Any
    spec: ValueSpec = ScalarSpec(None)  # noqa: RUF009
    base_name: str = ""
    name: str = ""
    is_size: bool = False
    is_live: bool = True
    is_mutated_later: bool = False
    is_view_filled_later: bool = False
    is_of_caller: bool = False
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    site: Site | None = None
    occurrence: int = 0
    composite: CompositeCall | None = None
    position: int | None = None
    written_argument: int | str | None = None
    inner: tuple[Node, ...] = ()

    @staticmethod
    def named(kind: Kind, name: str, spec: ValueSpec) -> Node:
        """Returns the node of a value that the model itself has a name for."""
        return Node(kind=kind, op=name, target=name, spec=spec, base_name=name)

    @property
    def is_inner(self) -> bool:
        """Whether this is a step of a fused call: the value exists only in runs that patch such a step of the call.

        Inner nodes are in `Frame.nodes`, in front of the node of their call, which has them in `inner`. They are not
        part of the graph of the frame.
        """
        return self.composite is not None and self.composite.is_fused

    @property
    def sources(self) -> Iterator[Ref]:
        """The values that the value is computed from."""
        yield from refs_in((self.args, self.kwargs))
        yield from map(Ref, self.inner[-1:])

    @property
    def is_in_place(self) -> bool:
        """Whether the value is an argument that the op wrote into."""
        return self.written_argument is not None

    def written_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the argument that an in-place op wrote into, from the arguments of a call of it."""
        where = self.written_argument
        return kwargs[where] if isinstance(where, str) else args[where or 0]

    @property
    def whole(self) -> Node:
        """The node itself; for a part of the result of an op, the node of the op."""
        return self

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name or self.base_name or self.op}: {self.spec}>"


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class OpNode(Node):
    """The result of a torch function.

    The last step of an opened call, whose value the call returns, represents the call in patch maps: it has the site
    and the name of the call, and belongs to the code around the call.
    """

    kind: Kind = "op"


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class ElementNode(Node):
    """A value that the user's code unpacked from the result of an op, `whole`: `q, k = qkv.split(...)`."""

    kind: Kind = "op"
    whole: OpNode = field()


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class CallNode(Node):
    """A call of a submodule.

    Attributes:
        call_index: Which call of this submodule in the calling frame it is, from zero.
        call_count: How often the submodule is called in that frame.
    """

    kind: Kind = "call"
    frame: Frame = field()
    call_index: int = 0
    call_count: int = 1


@dataclass(slots=True, eq=False)
class InputParameter:
    """A parameter of `forward`, as `inspect` describes it; `kind` is that of `inspect.Parameter`."""

    name: str
    kind: Any
    default: Any

    @property
    def starred_name(self) -> str:
        """The name as signatures have it: `*args`, `**kwargs`."""
        return _STARS.get(self.kind, "") + self.name

    __deepcopy__ = _itself


_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


InputPlace: TypeAlias = "tuple[str, tuple[Key, ...]]"
"""A place in the inputs of a frame: a parameter of `forward`, and the keys into its value."""


@dataclass(slots=True, eq=False)
class Conditions:
    """The state of a module and its inputs when it was called.

    Attributes:
        training: The module's `training` flag.
        hooks: The ids of the forward hooks and pre-hooks that the module had.
        same_inputs: Pairs of places in the inputs, as parameter and dig, that were given one tensor: the records
            refer to it by the second place only.
        grad_mode: Whether gradients were enabled; `None` if it is not known, and for loaded graphs that hold for both.
        attention: Which implementation of attention the module's config named, in transformers; `None` if unknown.
    """

    training: bool = False
    hooks: frozenset[int] = frozenset()
    same_inputs: tuple[tuple[InputPlace, InputPlace], ...] = ()
    grad_mode: bool | None = None
    attention: str | None = None


ATTENTION_IN_CONFIG = "_attn_implementation_internal"
"""Where transformers 5 keeps it: the attribute itself takes ten times as long. Tested by: test_changed_models.py."""


def attention_named_by(module: Module) -> str | None:
    """Returns which implementation of attention the config of a module of transformers names, if it has one."""
    config = module.__dict__.get("config")
    known: dict[str, Any] = getattr(config, "__dict__", {})
    if ATTENTION_IN_CONFIG in known:
        return cast("str | None", known[ATTENTION_IN_CONFIG])
    return getattr(config, "_attn_implementation", None)


class Reason(enum.Enum):
    """A kind of doubt; its value is the text about the module in messages."""

    READS_VALUE = "reads a value into Python ({what}: {line})"
    COUNTS_PARTS = "reads a value into Python ({what}: the number of parts depends on values)"
    USES_OBJECT = "uses an object ({what}) that is not one of its inputs"
    IS_GIVEN_OBJECT = "it is given an object ({what}), whose contents are unknown"
    HOOKS_ARE_LEFT_OUT = "hooks on a {what} that it calls would not run"
    SWITCHES_MODES = "switches autocast or inference mode, which a graph does not record"
    HANDLES_ERROR = "a call of {what!r} raised an error, which was handled"
    WRITES_PARAMETER = "writes into a parameter ({what})"
    ROUNDS = (
        "it holds the steps of {what}, as ExtractionOptions(decompose=...) asks, which equal the function itself only "
        "within rounding"
    )


@dataclass(frozen=True, slots=True)
class Doubt:
    """One reason why the graph of a frame may not do what its module does.

    `what` is the name of the operation, class, module or function that it is about; `line` the user's line of source.
    """

    reason: Reason
    what: str = ""
    line: str = ""

    def __str__(self) -> str:
        return self.reason.value.format(what=self.what, line=self.line)


def listed_doubts(doubts: list[Doubt]) -> str:
    """Returns doubts as one text."""
    return "; ".join(map(str, doubts))


@dataclass(slots=True, eq=False)
class Capture:
    """What all frames of a capture share: how it was captured, and the results of analyses by their function.

    Attributes:
        has_escaped_sizes: Whether the model used a size as a plain number outside of the module call that read it.
        edits: How often graphs were edited.
        is_program: Whether the model is an exported program, which checks sizes itself: names mean one value at all.
        unseen: The modules (by id) that ran where calls are not recorded: in other threads, or inside of an operation.
    """

    options: ExtractionOptions | None = None
    findings: dict[Callable[..., Any], Any] = field(default_factory=dict)
    has_escaped_sizes: bool = False
    edits: int = 0
    is_program: bool = False
    unseen: set[int] = field(default_factory=set)

    def __deepcopy__(self, memo: dict[int, Any]) -> Capture:
        result = memo[id(self)] = dataclasses.replace(self, findings={})
        return result


_analyzing = threading.RLock()


def once_a_capture(analysis: Callable[[Frame], T]) -> Callable[[Frame], T]:
    """Makes an analysis of a root frame run once for each capture, which keeps the result in its `findings`."""

    @functools.wraps(analysis)
    def known(root: Frame) -> T:
        findings = root.capture.findings
        with _analyzing:
            if known not in findings:
                findings[known] = analysis(root)
            return cast(T, findings[known])

    return known


@dataclass(slots=True, eq=False)
class Frame:
    """One invocation of one module.

    Attributes:
        module: The user's module.
        attribute_path: Its attribute path from the module of the calling frame (`h.3`); empty for the root.
        call: The node of this call in the calling frame; `None` for the root.
        parameters: The parameters of `forward`, each with an `input` node, in order.
        nodes: All nodes in order of execution, inputs first, the output last. Inner nodes (`Node.is_inner`) are in
            front of the node of their call.
        output: What `forward` returned, with a `Ref` for each value that has a node.
        opaque_reason: Why this frame has no graph; `None` if it has one. An opaque frame has nodes for
            its boundary only: inputs, parameters, buffers, attributes, submodule calls, output.
        doubts: Why its graph may differ from the module on other inputs (it reads a value into Python, ...), or at
            all (a value from outside of the inputs and the module).
        custom_graph: The graph that a custom extraction function returned.
        is_edited: Whether the user edited the graph of this frame, which then runs in place of the module.
        runs_own_graphs: Whether such a graph, or a custom one, is that of this frame or of one below it.
        custom_failure: Why the custom extraction function did not return a graph.
        value_reads: The values that were read into Python, and where.
        size_guards: What Python found out about sizes: branches, for example, depend on it.
        example_values: The values that an exported program describes its nodes by (`meta["val"]`), by their names.
        splices: Modules that patched runs call with the value of a node of this frame, whose result replaces it: each
            with that node. The graph of the frame does not have these calls.
    """

    module: Module
    attribute_path: str
    parent: Frame | None = None
    call: CallNode | None = None
    parameters: list[InputParameter] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    output: Any = None
    conditions: Conditions = field(default_factory=Conditions)
    capture: Capture = field(default_factory=Capture)
    opaque_reason: str | None = None
    doubts: list[Doubt] = field(default_factory=list)
    custom_graph: Any = None
    custom_failure: str | None = None
    is_edited: bool = False
    runs_own_graphs: bool = False
    names: dict[str, Node] = field(default_factory=dict)
    value_reads: list[ValueRead] = field(default_factory=list)
    size_guards: list[SizeGuard] = field(default_factory=list)
    example_values: dict[str, Any] = field(default_factory=dict)
    splices: list[tuple[Node, CallNode]] = field(default_factory=list)

    @property
    def path(self) -> tuple[str, ...]:
        """The names of the calls that lead here from the root."""
        return () if self.call is None or self.parent is None else (*self.parent.path, self.call.name)

    @property
    def root(self) -> Frame:
        """The frame of the model."""
        return list(self.frames_above())[-1]

    def frames_above(self) -> Iterator[Frame]:
        """Yields this frame and those that lead to it, innermost first."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    @property
    def has_own_graph(self) -> bool:
        """Whether a graph (edited, or custom) replaces the module, rather than records it."""
        return self.is_edited or self.custom_graph is not None

    def note_own_graph(self) -> None:
        """Notes that a graph replaces the module of this frame."""
        for frame in self.frames_above():
            frame.runs_own_graphs = True

    @property
    def attribute_path_from_root(self) -> str:
        """How the root's code would write the module, also before the names of the calls are fixed."""
        above = "" if self.parent is None else self.parent.attribute_path_from_root
        return f"{above}.{self.attribute_path}" if above else self.attribute_path

    @property
    def output_node(self) -> Node:
        """The node of the value that `forward` returned."""
        return self.nodes[-1]

    @property
    def is_changed_by_hooks(self) -> bool:
        """Whether forward hooks returned another value than `forward`: their operations are nodes of the caller."""
        if self.call is None or self.parent is None or not self.conditions.hooks:
            return False
        call, site = self.call, () if self.call.site is None else self.call.site.steps
        after = self.parent.nodes[self.parent.nodes.index(call) + 1 :]
        read = [*refs_in(self.parent.output), *(ref for node in after for ref in node.sources)]
        # What runs inside of the instruction that calls a module, but in the caller's frame, is code of its hooks.
        inside = (
            node.site.steps[: len(site)]
            for node in after
            if node.site is not None and node.kind == "op" and len(node.site.steps) > len(site)
        )
        return site in inside or not any(ref.node is call for ref in read)

    @property
    def graph_nodes(self) -> list[Node]:
        """The nodes that the graph of the frame has: all but inner nodes."""
        return [node for node in self.nodes if not node.is_inner]

    def calls(self) -> Iterator[CallNode]:
        """Yields the nodes that call submodules, in order."""
        return (node for node in self.nodes if isinstance(node, CallNode))

    @property
    def is_spliced(self) -> bool:
        """Whether this is the frame of a splice."""
        return self.parent is not None and any(call is self.call for _, call in self.parent.splices)

    @property
    def nodes_and_splices(self) -> list[Node]:
        """The nodes, each followed by the calls that are spliced in after it."""
        if not self.splices:
            return self.nodes
        return [each for node in self.nodes for each in (node, *(call for host, call in self.splices if host is node))]

    def walk(self, *, with_splices: bool = False) -> Iterator[Frame]:
        """Yields this frame and all below it, in order of execution."""
        yield self
        for node in self.nodes_and_splices if with_splices else self.nodes:
            if isinstance(node, CallNode):
                yield from node.frame.walk(with_splices=with_splices)

    def inputs(self) -> Iterator[Node]:
        """Yields the input nodes, in the order of `forward`'s parameters."""
        return (node for node in self.nodes if node.kind == "input")

    def __deepcopy__(self, memo: dict[int, Any]) -> Frame:
        """Copies the frame with all below it, over copies of their modules; a frame above may stay shared."""
        if self.parent is not None:
            memo.setdefault(id(self.parent), self.parent)
            memo.setdefault(id(self.call), self.call)
        memo[id(self.example_values)] = self.example_values
        # In order of execution, so that what a node refers to is known by then.
        for node in self.nodes:
            memo.update((id(shared), shared) for shared in (node.spec, node.target))
        result = memo[id(self)] = object.__new__(Frame)
        for each in dataclasses.fields(self):
            setattr(result, each.name, copy.deepcopy(getattr(self, each.name), memo))
        if result.custom_graph is not None:
            refer_to_copies(result.custom_graph, memo)
        return result


def spliced_calls(root: Frame) -> list[CallNode]:
    """Returns the splices of a capture, in the order in which they were made: their `occurrence`."""
    found = [call for frame in root.walk(with_splices=True) for _, call in frame.splices]
    return sorted(found, key=lambda call: call.occurrence)


RECORD = "graphpatch_node"
"""The key in `fx.Node.meta` of the record of the node."""


def refer_to_copies(graph: fx.Graph, memo: dict[int, Any]) -> None:
    """Makes a copied graph refer to the copies of its records, which `memo` has by the ids of the originals."""
    for fx_node in graph.nodes:
        if (record := fx_node.meta.get(RECORD)) is not None:
            fx_node.meta[RECORD] = memo.get(id(record), record)
