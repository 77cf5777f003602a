"""Edited graphs: their records, whether they can run, and the calls that they are valid for.

A graph is a record of one run: flags, absent inputs, branches, and sizes that the code took for plain numbers
(`range(n)`, a table cut to a length, `is_causal`) are constants in it. So an edited graph refuses other structures and
plain values than the example's. In calls of other sizes, dtypes, layouts or settings of torch the graph before the edit
is compared with the module first: what Python computes from a size is not visible in the graph. If a signature does not
describe the call completely (an object such as a cache is given, or the module branches on values), every call is
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import Context
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.nn import Module

from graphpatch_notebook.capture import Reason
from graphpatch_notebook.capture.custom_graphs import (
    MODULE_GETS_TENSOR,
    RECORD,
    custom_record,
    map_arguments,
    output_problem,
    record_name,
    reference_problem,
)
from graphpatch_notebook.capture.inputs import inputs_of_call, value_like
from graphpatch_notebook.capture.observers import invoke, original_forward
from graphpatch_notebook.capture.records import Frame, Node, OpNode
from graphpatch_notebook.checks.call_signature import (
    Aspect,
    CallSignature,
    Difference,
    current_settings,
)
from graphpatch_notebook.checks.comparison import ComparisonOutcome, RunComparison, compared
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.graphs.build import AUXILIARY, connect_records
from graphpatch_notebook.graphs.running import unobserved
from graphpatch_notebook.paths import format_path, unique_name
from graphpatch_notebook.values import (
    ABSENT,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    describe,
    leaves,
    off_meta,
)
from graphpatch_notebook.warning_places import warn

RecordedCall: TypeAlias = Callable[["tuple[Any, ...]", "dict[str, Any]"], Any]
_MOST_SIGNATURES = 1000


class EditedCalls:
    """The calls that an edited graph is valid for.

    `recorded` runs the original graph on the arguments of a call; a copy does not have it.
    """

    def __init__(self, frame: Frame, recorded: RecordedCall | None) -> None:
        self._frame = frame
        self._recorded = recorded
        self._example = replace(CallSignature.of_frame(frame), settings=current_settings())
        self._unused: set[Any] = set()
        doubts = {doubt.reason for doubt in frame.doubts}
        # Numbers that a submodule returned are constants of the graph, too.
        self._goes_by_values = (
            bool(doubts - {Reason.ROUNDS}) or bool(self._example.objects) or any(map(_returns_numbers, frame.calls()))
        )
        self._is_rounded = Reason.ROUNDS in doubts
        self._held: set[Hashable] = set()  # the signatures of calls that it was compared in, and held for
        self._has_warned = False

    def note_unused_inputs(self, graph: fx.Graph) -> None:
        """Notes which inputs the graph does not read, but holds as constants of the example."""
        records = [(node, node.meta.get(RECORD)) for node in graph.nodes if node.op == "placeholder"]
        self._unused = {r.target for node, r in records if isinstance(r, Node) and not node.users}

    def input_problem(self, node: Node) -> str | None:
        """Returns why a patch on this input would act differently in the graph than in the module; else `None`."""
        if isinstance(node.spec, ScalarSpec) and node.target in self._unused:
            return f"was {node.spec} in the example, and the edited graph always uses that value"
        if node.target in {name for pair in self._frame.conditions.same_inputs for name, _ in pair}:
            return "was the same tensor as another input of the example, and the edited graph cannot distinguish them"
        return None

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises a `GraphError` if the graph is not valid for this call; warns if that cannot be found out."""
        frame = self._frame
        if frame.module.training != frame.conditions.training:
            was, now = ("train", "eval") if frame.conditions.training else ("eval", "train")
            raise GraphError(
                f"the edited graph of {self._who()} was captured in {was} mode, and the module is in {now} mode now; "
                f"call pg.{was}(), or make the PatchableGraph in {now} mode"
            )
        values = inputs_of_call(frame, args, kwargs)
        differences = self._example.differences(list(values.values()))
        refused = next(filter(self._is_left_out, differences), None)
        if refused is not None:
            raise self._error(str(refused))
        if differences or self._goes_by_values:
            key = CallSignature.of(values)
            if self._goes_by_values or key not in self._held:
                self._compare(key, args, kwargs)

    def _is_left_out(self, difference: Difference) -> bool:
        """Whether the graph holds the differing value as a constant, so that equal results would not prove anything."""
        if difference.aspect is Aspect.SPLIT:
            return True
        if difference.aspect is not Aspect.VALUE or {difference.was, difference.now} <= {ABSENT, ScalarSpec(None)}:
            return False
        is_used = difference.name.partition("|")[0] not in self._unused
        return not (is_used and _is_size(difference.was) and _is_size(difference.now))

    def _compare(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares the original graph with the module in this call, which then stands for all with its signature."""
        if self._recorded is None:
            why = "a copy does not have the graph as it was before the edit"
            found = RunComparison(ComparisonOutcome.NOT_COMPARABLE, why)
        else:
            # Without context variables: libraries collect hidden states in some, and these runs must not add to them.
            found = Context().run(self._run_both, self._recorded, args, kwargs)
        if found.is_difference:
            raise self._error(
                f"before it was edited, it differed from the module ({found}), as it holds sizes, flags or "
                "branches of the example"
            )
        if found.outcome is ComparisonOutcome.UNREPEATABLE:
            raise self._error(f"it is unlike the example's, and cannot be compared with the module ({found})")
        if not found.is_equal and not self._has_warned:
            self._has_warned = True
            warn(
                f"the edited graph of {self._who()} cannot be compared with the module on inputs unlike the example's: "
                f"{found}; it holds sizes, flags and branches of the example",
                "edited graph",
                stacklevel=2,
            )
        if len(self._held) >= _MOST_SIGNATURES:
            self._held.clear()
        self._held.add(key)

    def _run_both(self, recorded: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunComparison:
        module = self._frame.module

        def run(*args: Any, **kwargs: Any) -> Any:
            return invoke(original_forward(module), args, kwargs)

        def graph(*args: Any, **kwargs: Any) -> Any:
            return recorded(args, kwargs)

        with unobserved():
            return compared(module, run, graph, args, kwargs, within_rounding=self._is_rounded)

    def _error(self, why: str) -> GraphError:
        return GraphError(
            f"the edited graph of {self._who()} is not valid for this call: {why}; make the PatchableGraph with "
            "inputs like these, or edit the graph of a module below it that does not depend on them"
        )

    def _who(self) -> str:
        return f"{format_path(self._frame.path) or '<root>'!r} ({type(self._frame.module).__name__})"


def _is_size(spec: Any) -> bool:
    return isinstance(spec, ScalarSpec) and type(spec.value) is int


def _returns_numbers(call: Node) -> bool:
    return any(isinstance(leaf, ScalarSpec) for _, leaf in leaves(call.spec))


# -- whether it can run -----------------------------------------------------------------------------------------------

_GRAPH_MODULE_GETS_TENSOR = "the graph module: graph_module.{} = tensor"


def check_edited(graph: fx.Graph, frame: Frame, owner: Module, original_path: Callable[[str], str]) -> None:
    """Raises a `GraphError` if an edited graph cannot be written as code, or refers to something that does not exist.

    `owner` is its graph module, and `original_path` returns the path in the user's module for one in the graph.
    """
    # Custom graphs run with the user's module, which must have the attributes that they refer to.
    is_custom = frame.custom_graph is not None
    owner, put = (frame.module, MODULE_GETS_TENSOR) if is_custom else (owner, _GRAPH_MODULE_GETS_TENSOR)
    nodes = [node for node in graph.nodes if not _reads_as_recorded(node, original_path)]
    problems = [output_problem(graph, is_wrapped=is_custom)]
    problems += [reference_problem(node, owner, frame.module, put) for node in nodes]
    for problem in filter(None, problems):
        where = format_path(frame.path) or "<root>"
        raise GraphError(f"the graph of {where!r} ({type(frame.module).__name__}) {problem}")


def _reads_as_recorded(node: fx.Node, original_path: Callable[[str], str]) -> bool:
    """Whether a node reads what the module read, which may exist only during calls."""
    record = node.meta.get(RECORD)
    return node.op == "get_attr" and isinstance(record, Node) and original_path(str(node.target)) == record.target


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
        is_changed = is_new or record is None or not self._changed.isdisjoint(node.all_input_nodes)
        spec = self._computed(node) if is_changed else None
        if spec is None:
            spec = UnknownSpec() if record is None or is_new else record.spec
        self._specs[node] = spec
        if record is None:
            if not self._changed.isdisjoint(node.all_input_nodes):
                self._changed.add(node)
        elif is_new or spec != record.spec:
            record.spec = spec
            self._changed.add(node)

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
