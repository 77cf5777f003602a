"""Edited graphs: their records, whether they can run, and the calls that they are valid for.

An edited graph is a snapshot of one run, as those of files and of `to_fx` are: flags, absent inputs, branches, and
sizes that the code took for plain numbers are constants in it. So it refuses other structures, plain values and dtypes
than the example's, and its code checks what Python read of sizes and values (`guards_of`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Module

from graphpatch_notebook.capture import Doubt, Reason, listed_doubts
from graphpatch_notebook.capture.custom_graphs import (
    custom_record,
    map_arguments,
    problems_in,
    record_name,
)
from graphpatch_notebook.capture.frame_recorder import SIZE_READS, VALUE_READS
from graphpatch_notebook.capture.inputs import inputs_of_call, value_like
from graphpatch_notebook.capture.records import RECORD, CallNode, Frame, Node, OpNode, Ref, SizeGuard
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.graphs.build import AUXILIARY, NamedFunction, connect_records
from graphpatch_notebook.patching.comparison import Aspect, CallSignature, Difference
from graphpatch_notebook.paths import format_path, unique_name
from graphpatch_notebook.values import (
    ABSENT,
    ContainerSpec,
    Key,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    describe,
    is_same_plain,
    off_meta,
    take,
)
from graphpatch_notebook.warning_places import warn

_SIZES = frozenset(name.strip("_").split(".")[0] for name in SIZE_READS)
# Values that can be compared with those of the example.
_READS = frozenset(name.strip("_") for name in VALUE_READS - {"tolist", "numpy", "__array__"})
_PARTS = frozenset("unbind split split_with_sizes chunk tensor_split hsplit vsplit dsplit".split())
_CHECKED_DOUBTS = (Reason.READS_VALUE, Reason.COUNTS_PARTS)


def where(frame: Frame) -> str:
    """Returns the path of a frame, and the class of its module, for messages."""
    return f"{format_path(frame.path) or '<root>'!r} ({type(frame.module).__name__})"


# -- the calls that a graph is valid for -------------------------------------------------------------------------------


def guards_of(frame: Frame) -> list[SizeGuard]:
    """Returns what Python found out about sizes and values in a frame: its graph holds where that is the same again."""
    return [*frame.size_guards, *_reads(frame)]


def unguarded_doubts(frame: Frame) -> list[Doubt]:
    """Returns the doubts about the graph of a frame that its guards do not check."""
    return [d for d in frame.doubts if d.reason not in _CHECKED_DOUBTS or d.what not in (_READS | _PARTS)]


def _reads(frame: Frame) -> Iterator[SizeGuard]:
    """Yields the sizes and values that Python may have read unseen: in a loop over a range, or with `len`."""
    has_loop = _has_loop(frame)
    for node in frame.graph_nodes:
        spec = node.spec
        if node.kind == "input" and has_loop and isinstance(spec, ScalarSpec) and type(spec.value) is int:
            yield SizeGuard(None, (Ref(node),), spec.value)
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


class EditedCalls:
    """The calls that an edited graph is valid for. Made anew after each edit."""

    def __init__(self, frame: Frame, graph: fx.Graph) -> None:
        self._frame = frame
        any_size = not frame.capture.has_escaped_sizes
        self._example = replace(CallSignature.of_frame(frame), any_size=any_size)
        # The inputs that the graph does not read, but holds as constants of the example.
        records = [(node, node.meta.get(RECORD)) for node in graph.nodes if node.op == "placeholder"]
        self._unused = {r.target for node, r in records if isinstance(r, Node) and not node.users}
        # Numbers that a submodule returned are constants of the graph, too.
        returned = [(Ref(call, dig), number) for call in frame.calls() for dig, number in _numbers(call.spec)]
        self._guards = [*guards_of(frame), *(SizeGuard(None, (ref,), number) for ref, number in returned)]

    def input_problem(self, node: Node) -> str | None:
        """Returns why a patch on this input would act differently in the graph than in the module; else `None`."""
        if isinstance(node.spec, ScalarSpec) and node.target in self._unused:
            return f"was {node.spec} in the example, and the edited graph always uses that value"
        if node.target in {name for pair in self._frame.conditions.same_inputs for name, _ in pair}:
            return "was the same tensor as another input of the example, and the edited graph cannot distinguish them"
        return None

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises a `GraphError` if a call differs from the example in what the graph holds as constants."""
        frame = self._frame
        if frame.module.training != frame.conditions.training:
            was, now = ("train", "eval") if frame.conditions.training else ("eval", "train")
            raise GraphError(
                f"the edited graph of {where(frame)} was captured in {was} mode, and the module is in {now} mode now; "
                f"call pg.{was}(), or make the PatchableGraph in {now} mode"
            )
        for difference in self._example.differences([*inputs_of_call(frame, args, kwargs).values()]):
            if not self._is_free(difference):
                raise _invalid(frame, str(difference))

    def _is_free(self, difference: Difference) -> bool:
        """Whether the graph does not depend on what differs, or reads it: a size that is an input."""
        both = (difference.was, difference.now)
        if difference.aspect is Aspect.VALUE and all(isinstance(spec, ScalarSpec) for spec in both):
            is_read = difference.name.partition("|")[0] not in self._unused
            return is_read and all(type(spec.value) is int for spec in both)
        return difference.aspect is Aspect.VALUE and {*both} <= {ABSENT, ScalarSpec(None)}

    def guarded(self, graph: fx.Graph) -> fx.Graph:
        """Adds to a copy of the edited graph what checks its guards."""
        order = {node: number for number, node in enumerate(graph.nodes)}
        nodes = {id(node.meta[RECORD]): node for node in graph.nodes if RECORD in node.meta}
        for guard in self._guards:
            refs = [operand for operand in guard.operands if isinstance(operand, Ref)]
            if any(id(ref.node) not in nodes for ref in refs):  # the user erased it
                continue
            last = max((nodes[id(ref.node)] for ref in refs), key=order.__getitem__)
            with graph.inserting_after(last):
                graph.call_function(NamedFunction(self._check_of(guard)), tuple(nodes[id(ref.node)] for ref in refs))
        return graph

    def _check_of(self, guard: SizeGuard) -> Callable[..., None]:
        frame = self._frame

        def unchanged(*values: Any) -> None:
            given = iter(values)
            operands = [_at(next(given), part.dig) if isinstance(part, Ref) else part for part in guard.operands]
            found = operands[0] if guard.func is None else guard.func(*operands)
            if isinstance(found, (tuple, list)):  # of the parts of a tensor, their number counts
                found = len(found)
            if not is_same_plain(guard.result, found):
                raise _invalid(
                    frame,
                    f"its code reads a size or a value, which is {found!r} now and was {guard.result!r} in the example",
                )

        return unchanged


def _at(value: Any, dig: tuple[Any, ...]) -> Any:
    for key in dig:
        value = take(value, key)
    return value


def _invalid(frame: Frame, why: str) -> GraphError:
    return GraphError(
        f"the edited graph of {where(frame)} is not valid for this call: {why}; make the PatchableGraph with inputs "
        "like these, or edit the graph of a module below it that does not depend on them"
    )


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
    for problem in problems_in(graph, owner, frame.module, is_wrapped=is_custom, is_known=is_known):
        raise GraphError(f"the graph of {where(frame)} {problem}")


# -- records of edited graphs ------------------------------------------------------------------------------------------


def fingerprint(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Returns a value that differs after any edit of the graph."""
    return [(node, node.op, node.target, node.args, node.kwargs) for node in graph.nodes]


def update_records(frame: Frame, graph: fx.Graph, attribute: Callable[[str], Any]) -> None:
    """Updates the records of `frame` to those of its edited graph: each node has one, under a unique name.

    The values of new nodes, and of those that depend on them, are computed on the meta device. They are unknown if that
    fails. `attribute` returns what `get_attr` nodes read, by its path.
    """
    output = frame.output_node
    kept = {id(node) for node in frame.nodes}
    specs = _Specs(attribute, is_wrapped=frame.custom_graph is not None)
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
            taken.add(record.name)
        specs.infer(node, record, is_new=node.op != "output" and node.meta.get(RECORD) is not record)
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


class _Specs:
    """Infers the specs of the values of a graph, node by node. The output of custom graphs is wrapped in a tuple."""

    def __init__(self, attribute: Callable[[str], Any], *, is_wrapped: bool) -> None:
        self._attribute = attribute
        self._is_wrapped = is_wrapped
        self._specs: dict[fx.Node, ValueSpec] = {}
        self._changed: set[fx.Node] = set()

    def infer(self, node: fx.Node, record: Node | None, *, is_new: bool) -> None:
        """Stores the spec of `node`, also in its record; for a node that is not new, only where it has changed."""
        known = None if record is None or is_new else record.spec
        is_same = known is not None and self._changed.isdisjoint(node.all_input_nodes)
        spec = (None if is_same else self._computed(node)) or known or UnknownSpec()
        self._specs[node] = spec
        if spec != known:
            self._changed.add(node)
        if record is not None:
            record.spec = spec

    def _computed(self, node: fx.Node) -> ValueSpec | None:
        devices: list[torch.device] = []

        def empty(_: str, spec: TensorSpec) -> Tensor:
            devices.append(spec.device)
            return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

        def value(leaf: Any) -> Any:
            return value_like(self._specs[leaf], empty) if isinstance(leaf, fx.Node) else leaf

        try:
            args, kwargs = map_arguments(node.args, value), map_arguments(node.kwargs, value)
            if node.op == "output":
                result = args[0][0] if self._is_wrapped else args[0]
            elif node.op == "get_attr":
                return describe(self._attribute(str(node.target)))
            elif node.op == "call_method":
                result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            elif node.op == "call_function" and callable(node.target):
                result = node.target(*args, **kwargs)
            else:
                return None
        except Exception:  # raised by the user's function on meta tensors, or a value is not known
            return None
        return off_meta(describe(result), devices[0]) if devices else describe(result)
