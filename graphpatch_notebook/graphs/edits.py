"""Graphs that run in place of code, as edited and loaded ones do: which calls they hold for, and records of edits.

Such a graph is a snapshot of one run: flags, absent inputs, branches, and sizes that the code took for plain numbers
are constants in it. So it refuses other modes, structures, plain values and dtypes than the example's
(`SnapshotCalls`), and steps in it check what Python read of sizes and values (`guarded`):

    if x.shape[1] > 512:        ->        gt = operator.gt(size_shape[1], 512)
                                          unchanged(gt, False, 'model.py:7')
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import fx
from torch.nn import Module

from graphpatch_notebook.capture import Doubt, Reason, listed_doubts
from graphpatch_notebook.capture.custom_graphs import (
    check_graph,
    custom_record,
    record_name,
)
from graphpatch_notebook.capture.frame_recorder import SIZE_READS, VALUE_READS
from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import RECORD, CallNode, Frame, Node, OpNode, Ref, SizeGuard
from graphpatch_notebook.errors import GraphError, warn
from graphpatch_notebook.graphs.build import AUXILIARY, connect_records
from graphpatch_notebook.graphs.signatures import Aspect, CallSignature, Difference
from graphpatch_notebook.paths import format_path, unique_name
from graphpatch_notebook.values import (
    ABSENT,
    ContainerSpec,
    Key,
    ScalarSpec,
    UnknownSpec,
    ValueSpec,
    describe,
    is_same_plain,
)

_SIZES = frozenset(name.strip("_").split(".")[0] for name in SIZE_READS)
# Values that can be compared with those of the example.
_READS = frozenset(name.strip("_") for name in VALUE_READS - {"tolist", "numpy", "__array__"})
_PARTS = frozenset("unbind split split_with_sizes chunk tensor_split hsplit vsplit dsplit".split())
_CHECKED_DOUBTS = (Reason.READS_VALUE, Reason.COUNTS_PARTS)


def where(frame: Frame) -> str:
    """Returns the path of a frame, and the class of its module, for messages."""
    return f"{format_path(frame.path) or '<root>'!r} ({type(frame.module).__name__})"


# -- the calls that a graph is valid for -------------------------------------------------------------------------------


def refused_call(problem: str) -> GraphError:
    """Returns the error for a call that a graph does not hold for."""
    return GraphError(
        f"the graph does not hold for this call: {problem}; make the PatchableGraph with inputs like these, or call "
        "the model itself"
    )


class SnapshotCalls:
    """The calls that the graph of a frame holds for. Made anew after each edit.

    Attributes:
        signature: The form of the call of the example; `known` has parts of it that differ from the record.
        modes: The modules, each with whether it was in training mode.
    """

    def __init__(self, frame: Frame, graph: fx.Graph, **known: Any) -> None:
        any_size = {"any_size": not frame.capture.has_escaped_sizes}
        self.signature = replace(CallSignature.of_frame(frame), **(any_size | known))
        self.modes: dict[Module, bool] = {frame.module: frame.conditions.training}
        self._where = where(frame)
        self._parameters = frame.parameters
        self._shared = {name for pair in frame.conditions.same_inputs for name, _ in pair}
        # The inputs that the graph does not read, but holds as constants of the example.
        records = [(node, node.meta.get(RECORD)) for node in graph.nodes if node.op == "placeholder"]
        self._unused = {r.target for node, r in records if isinstance(r, Node) and not node.users}

    def input_problem(self, node: Node) -> str | None:
        """Returns why a patch on this input would act differently in the graph than in the module; else `None`."""
        if isinstance(node.spec, ScalarSpec) and node.target in self._unused:
            return f"was {node.spec} in the example, and the edited graph always uses that value"
        if node.target in self._shared:
            return "was the same tensor as another input of the example, and the edited graph cannot distinguish them"
        return None

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises a `GraphError` if a call differs from the example in what the graph holds as constants."""
        for module, training in self.modes.items():
            if module.training is not training:
                was = "train" if training else "eval"
                raise refused_call(f"{type(module).__name__} was in {was} mode in the example; call pg.{was}()")
        values = [given_input(self._parameters, p.name, args, kwargs) for p in self._parameters]
        for difference in self.signature.differences(values):
            if not self._is_free(difference):
                raise refused_call(f"{self._where}: {difference}")

    def _is_free(self, difference: Difference) -> bool:
        """Whether the graph does not depend on what differs, or reads it: a size that is an input."""
        both = (difference.was, difference.now)
        if difference.aspect is Aspect.VALUE and all(isinstance(spec, ScalarSpec) for spec in both):
            is_read = difference.name.partition("|")[0] not in self._unused
            return is_read and all(type(spec.value) is int for spec in both)
        return difference.aspect is Aspect.VALUE and {*both} <= {ABSENT, ScalarSpec(None)}


def unguarded_doubts(frame: Frame) -> list[Doubt]:
    """Returns the doubts about the graph of a frame that its guards do not check."""
    return [d for d in frame.doubts if d.reason not in _CHECKED_DOUBTS or d.what not in (_READS | _PARTS)]


def guarded(graph: fx.Graph, frame: Frame) -> fx.Graph:
    """Adds to the graph of a frame, behind what they are about, steps that check what Python read; returns it.

    A guard is left out if the user erased a value that it is about.
    """
    if not (guards := list(_guards_of(frame))):
        return graph
    nodes = {id(node.meta[RECORD]): node for node in graph.nodes if RECORD in node.meta}
    order = {node: number for number, node in enumerate(graph.nodes)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for guard in guards:
        refs = [operand for operand in guard.operands if isinstance(operand, Ref)]
        if any(id(ref.node) not in nodes for ref in refs):
            continue
        last = max((nodes[id(ref.node)] for ref in refs), key=order.__getitem__)
        with graph.inserting_before((inputs[-1] if last in inputs else last).next):
            operands = [_dug(graph, nodes[id(o.node)], o.dig) if isinstance(o, Ref) else o for o in guard.operands]
            found = operands[0] if guard.func is None else graph.call_function(guard.func, tuple(operands))
            graph.call_function(unchanged, (found, guard.result, _line_of(last)))
    return graph


def unchanged(value: Any, expected: Any, line: str) -> None:
    """Raises an error if what the model's code read into Python at `line` is not what it was in the example.

    Of the parts of a tensor, their number counts.
    """
    if isinstance(value, (tuple, list)) and isinstance(expected, int):
        value = len(value)
    if not is_same_plain(expected, value):
        raise refused_call(
            f"the code of the model reads a size or a value at {line}, which is {value!r} now and was {expected!r} in "
            "the example, so it might do something else now"
        )


def _dug(graph: fx.Graph, node: fx.Node, keys: tuple[Key, ...]) -> fx.Node:
    for key in keys:
        node = graph.call_function(operator.getitem, (node, key))
    return node


def _line_of(node: fx.Node) -> str:
    """Returns the line of the user's code that computed a value; for arithmetic on sizes, that of an op before."""
    while node.op != "root":
        record = node.meta.get(RECORD)
        if record is not None and record.site is not None:
            line = record.site.source_lines()[-1]
            return f"{Path(line.file).name}:{line.line}"
        node = node.prev
    return "its start"


def _guards_of(frame: Frame) -> Iterator[SizeGuard]:
    """Yields what Python found out about sizes and values, or may have read unseen: its graph holds for the same."""
    yield from frame.size_guards
    has_loop = _has_loop(frame)
    for node in frame.graph_nodes:
        spec = node.spec
        if node.kind == "input" and has_loop and isinstance(spec, ScalarSpec) and type(spec.value) is int:
            yield SizeGuard(None, (Ref(node),), spec.value)
        elif isinstance(node, CallNode) and frame.is_edited:  # numbers that it returned are constants
            yield from (SizeGuard(None, (Ref(node, dig),), number) for dig, number in _numbers(spec))
        elif not isinstance(node, OpNode):
            continue
        elif node.op in _PARTS and isinstance(spec, ContainerSpec):
            yield SizeGuard(None, (Ref(node),), len(spec.children))
        elif node.op in _READS and isinstance(spec, ScalarSpec) and spec.is_number:
            yield SizeGuard(None, (Ref(node),), spec.value)
        elif node.op in _SIZES:
            for dig, size in _numbers(spec):
                if has_loop or size <= 1 or node.op == "len":  # a loop of one turn cannot be told from none
                    yield SizeGuard(None, (Ref(node, dig),), size)


def _numbers(spec: ValueSpec, dig: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], Any]]:
    """Yields the numbers in a value, each with the keys that lead to it."""
    if isinstance(spec, ContainerSpec):
        for _, key, child in spec.children:
            yield from _numbers(child, (*dig, key))
    elif isinstance(spec, ScalarSpec) and spec.is_number:
        yield dig, spec.value


def _has_loop(frame: Frame) -> bool:
    """Whether the code ran some line more often than a loop over its submodules would.

    Such a loop may go over a range of sizes, which it reads unseen.
    """
    operations: Counter[int] = Counter()
    calls: dict[int, list[int]] = {}
    for node in frame.nodes:
        if isinstance(node, CallNode) and node.site is not None:
            calls.setdefault(id(node.site), []).append(id(node.frame.module))
        elif isinstance(node, OpNode) and node.site is not None and node.composite is None:
            operations[id(node.site)] += 1
    explained = max((len(set(modules)) for modules in calls.values()), default=1)
    return max([*operations.values(), *map(len, calls.values())], default=0) > explained


def check_doubts(frame: Frame) -> None:
    """Raises a `GraphError` if the graph of `frame` may differ from its module out of sight of the guards."""
    doubts = [doubt for doubt in unguarded_doubts(frame) if doubt.reason not in _OF_SNAPSHOTS]
    if doubts:
        raise GraphError(f"the graph of {where(frame)} cannot replace its module: it {listed_doubts(doubts)}")
    objects = CallSignature.of_frame(frame).objects
    if objects and not frame.is_edited:
        warn(
            f"the edited graph of {where(frame)} is given an object ({objects[0]}), of which it has only what its "
            "module's code read in the example",
            "edited graph",
            stacklevel=3,
        )


_OF_SNAPSHOTS = (Reason.ROUNDS, Reason.WRITES_PARAMETER)


# -- whether it can run -----------------------------------------------------------------------------------------------


def check_edited(graph: fx.Graph, frame: Frame, owner: Module, original_path: Callable[[str], str]) -> None:
    """Raises a `GraphError` if an edited graph cannot be written as code, or refers to something that does not exist.

    `owner` is its graph module, and `original_path` returns the path in the user's module for one in the graph.
    """

    def is_known(node: fx.Node) -> bool:
        record = node.meta.get(RECORD)
        return node.op == "get_attr" and isinstance(record, Node) and original_path(str(node.target)) == record.target

    # Custom graphs run with the user's module, which must have the attributes that they refer to.
    is_custom = frame.custom_graph is not None
    owner = frame.module if is_custom else owner
    try:
        check_graph(graph, owner, frame.module, is_wrapped=is_custom, is_known=is_known)
    except GraphError as error:
        raise GraphError(f"the graph of {where(frame)} cannot run: {error}") from None


# -- records of edited graphs ------------------------------------------------------------------------------------------


def fingerprint(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Returns a value that differs after any edit of the graph."""
    return [(node, node.op, node.target, node.args, node.kwargs) for node in graph.nodes]


def update_records(frame: Frame, graph: fx.Graph, attribute: Callable[[str], Any]) -> None:
    """Updates the records of `frame` to those of its edited graph: each node has one, under a unique name.

    The values of new nodes are unknown; others are described as they were. `attribute` returns what `get_attr` nodes
    read, by its path.
    """
    output = frame.output_node
    kept = {id(node) for node in frame.nodes}
    nodes: list[Node] = []
    taken = {record.name for node in graph.nodes if (record := _record_of(node, kept)) is not None}
    for node in graph.nodes:
        record = _record_of(node, kept)
        if node.op == "output":
            record = output
        elif record is not None:
            kept.discard(id(record))  # a copied node has the record of its original
            if isinstance(record, OpNode):
                record.inner = ()
        elif not node.meta.get(AUXILIARY):
            record = custom_record(node, frame.module)
            record.name = unique_name(record_name(node), taken)
            record.spec = describe(attribute(str(node.target))) if node.op == "get_attr" else UnknownSpec()
            taken.add(record.name)
        if record is not None:
            node.meta[RECORD] = record
            nodes.append(record)
    frame.nodes = nodes
    frame.names = {record.name: record for record in nodes}
    connect_records(frame, graph, attribute)
    frame.capture.findings.clear()


def _record_of(node: fx.Node, kept: set[int]) -> Node | None:
    record = node.meta.get(RECORD)
    return record if isinstance(record, Node) and id(record) in kept else None
