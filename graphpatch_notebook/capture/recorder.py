"""The run that captures: a function mode that sees torch calls, over swapped `forward`s that see module calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.call_sites import Assigned, SiteTable, invoke
from graphpatch_notebook.capture.custom_graphs import CustomRun, extracted_graph
from graphpatch_notebook.capture.decompositions import (
    INNER_NODES,
    Decomposition,
    chosen_decompositions,
    inner_call_sites,
    opened_by_default,
)
from graphpatch_notebook.capture.frame_recorder import (
    FrameRecorder,
    function_name,
    name_nodes,
    raw_name,
    writes_in_place,
)
from graphpatch_notebook.capture.inputs import bind, parameters_of, with_input
from graphpatch_notebook.capture.modules import AttributePaths, declared_forward, looking_at
from graphpatch_notebook.capture.packed_weights import packing_of
from graphpatch_notebook.capture.records import (
    CallNode,
    CompositeCall,
    Conditions,
    Frame,
    Node,
    OpNode,
    Reason,
    Ref,
    Site,
    attention_named_by,
)
from graphpatch_notebook.errors import CaptureError
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.torch_compat import function_mode_depth, is_higher_order, is_overload, version_of
from graphpatch_notebook.values import children, describe, replaced

_AROUND_CALLS = ("torch.nn.modules", "torch.distributed.fsdp")
"""Where torch's machinery around the calls of modules is: their backward hooks."""


class FunctionFacts(NamedTuple):
    """The names of a function that torch dispatched, with its underscores (or of its class) and the usual one."""

    name: str
    short_name: str
    is_overload: bool = False


OpPlace: TypeAlias = "tuple[Site | None, int | None]"
"""The call site of an op, and its occurrence there; `None` for what is not recorded."""


class Recorder(TorchFunctionMode):
    """Records one run of a model. Observes `forward` calls and `autograd.Function.apply` in its context.

    Attributes:
        stack: The frames that run at this moment, innermost last.
        owners: For each memory address, the nodes whose values are there at present.
        freed_later: The addresses of weights that are gathered for a call only.
        held: The model's own tensors that it has used, by id.
        unseen: The modules (by id) that ran where calls are not recorded: in other threads, or inside of an operation.
        root_frame: The record, after the run.
        failures: The frames that could not be recorded, each with the error.
        unopened: The composite functions that were not opened, by name and reason, each with a frame that calls it.
    """

    def __init__(self, root: Module, options: ExtractionOptions) -> None:
        super().__init__()
        self.root_module = root
        self.options = options
        self.paths = AttributePaths(root)
        self.sites = SiteTable()
        self.stack: list[FrameRecorder] = []
        self.owners: dict[int, list[Node]] = {}
        self.freed_later: set[int] = set()
        self.root_frame: Frame | None = None
        self.decompositions = chosen_decompositions(options.decompose)
        self.fused = opened_by_default(options.decompose)
        self.has_opened = False
        self.unopened: dict[tuple[str, str], Frame] = {}
        self.failures: list[tuple[Frame, BaseException]] = []
        self.facts: dict[Callable[..., Any], FunctionFacts] = {}
        self.held: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.unseen: set[int] = set()
        self.muted = 0
        self.depth = 0

    def __enter__(self) -> Recorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        self.depth = function_mode_depth()
        return self

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Keeps the engine's own tensor calls out of the record."""
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1

    # -- torch calls -------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.muted or not self.stack or not self.stack[-1].wants_ops:
            return func(*args, **kwargs)
        if (decomposition := self.decompositions.get(id(func))) is not None:
            return self._composite(decomposition, args, kwargs)
        if (facts := self.facts.get(func)) is None:
            facts = self.facts[func] = FunctionFacts(raw_name(func), function_name(func), is_overload(func))
        if facts.is_overload and is_higher_order(func):  # the modules that it calls belong to its one node: branches
            return self._muted_op(func, facts, args, kwargs)
        return self._op(func, facts, args, kwargs)

    def _composite(self, decomposition: Decomposition, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a call of a composite function: its steps, or all of it as one op where it cannot be opened."""
        frame = self.stack[-1]
        python_frame = call_sites.caller(1)
        refusal = decomposition.refusal(args, kwargs)
        site = None if refusal is not None else self.sites.site(python_frame)
        if refusal is not None or site is None:
            function = decomposition.function
            facts = FunctionFacts(decomposition.name, function_name(function), is_overload(function))
            result = self._op(function, facts, args, kwargs)
            self.unopened.setdefault((decomposition.name, str(refusal)), frame.record)
            return result
        call = CompositeCall(decomposition.name, site, frame.count(site), frame.composite)
        self.has_opened = True
        if not decomposition.is_exact:
            frame.doubt(Reason.ROUNDS, decomposition.name)
        with frame.inside(call), self:  # the mode is off in its own handler
            result = decomposition.steps(is_fused=False)(*args, **kwargs)
        try:
            _name_results(frame, call, result, call_sites.result_variable(python_frame, decomposition.name))
        except Exception as failure:
            self._fail(frame, failure)
        return result

    def on_apply(self, cls: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a call of an `autograd.Function` as one op, without the ops inside."""
        is_inside_op = function_mode_depth() < self.depth  # an operator's own autograd function
        if is_inside_op or self.muted or not self.stack or not self.stack[-1].wants_ops:
            return apply(*args, **kwargs)
        if cls.__module__.startswith(_AROUND_CALLS):
            with self.mute():
                results = apply(*args, **kwargs)
            given = [value for value in args if isinstance(value, Tensor)]  # FSDP gives an object of its own first
            for value, result in zip(given, results if isinstance(results, tuple) else (results,), strict=False):
                self.stack[-1].pass_through(value, result)
            return results
        with self.mute():
            return self._muted_op(apply, FunctionFacts(cls.__name__, cls.__name__), args, kwargs)

    def _muted_op(
        self, func: Callable[..., Any], facts: FunctionFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Records a call as one op, without what it calls."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.mute():
                return func(*args, **kwargs)

        return self._op(run, FunctionFacts(facts.name, facts.name), args, kwargs, target=func)

    def _op(
        self,
        func: Callable[..., Any],
        facts: FunctionFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any = None,
    ) -> Any:
        frame, name = self.stack[-1], facts.name
        python_frame = sys._getframe(2)
        occurrence, site = 0, None
        refs: tuple[Any, Any] | None = None
        is_offloading = False
        # Errors in our own code must not reach the user's model: the frame becomes opaque instead.
        try:
            site = self.sites.site(python_frame)
            is_offloading = site is not None and self.sites.is_offloading(site, python_frame)
            if not is_offloading:
                occurrence = frame.count(site) if site is not None else 0
                refs = frame.refs(args), frame.refs(kwargs) if kwargs else {}
        except Exception as failure:
            self._fail(frame, failure)
        if is_offloading:
            result = func(*args, **kwargs)
            frame.pass_through(args[0] if args else None, result)
            return result
        # Custom operators may write into any argument; their names do not show it.
        watched = (*args, *kwargs.values()) if facts.is_overload else args[:1]
        before: list[tuple[Tensor, int | None]] = []
        for value in watched:
            if isinstance(value, Tensor):
                before.append((value, version_of(value)))  # noqa: PERF401  # a comprehension is a call of a function
        result = self.run_op(func, name, args, kwargs, (site, occurrence))
        if refs is None:
            return result
        try:
            node = OpNode(
                op=facts.short_name, target=target or func,
                args=refs[0], kwargs=refs[1], site=site, occurrence=occurrence, composite=frame.composite,
            )  # fmt: skip
            wrote = self._written(name, args, kwargs, result, before)
            if wrote and (result is None or result is wrote[0]):
                named: dict[int | str, Any] = dict(enumerate(args))
                named.update(kwargs)
                node.written_argument = next(key for key, value in named.items() if value is wrote[0])
            if (fused := self.fused.get(id(func))) is not None and site is not None:
                node.inner = self._inner_nodes(fused, node, args, kwargs)
                frame.record.nodes += node.inner
            frame.forget_old_owners((*args, *kwargs.values()), result)
            variable = call_sites.result_variable(python_frame, getattr(func, "__name__", name))
            return frame.add_op(node, name, result, wrote, variable)
        except Exception as failure:
            self._fail(frame, failure)
            return result

    def _inner_nodes(
        self, fused: Decomposition, node: OpNode, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Node, ...]:
        """Returns the inner nodes of a fused call, without computing their values; none if it cannot be opened."""
        if fused.inner is None or node.site is None or fused.refusal(args, kwargs) is not None:
            return ()
        inner, specs = fused.inner, fused.inner.specs(**fused.by_name(args, kwargs))
        call = CompositeCall(fused.name, node.site, node.occurrence, node.composite, is_fused=True)
        given = fused.by_name(node.args, node.kwargs)
        sites = inner_call_sites(inner, *(given[flag] for flag in inner.flags))
        reads = tuple(value for name in inner.reads if (value := given.get(name)) is not None)
        made: list[Node] = []
        for (name, op), spec in zip(INNER_NODES.items(), specs, strict=False):  # there may be no specs
            step = OpNode(
                op=op, target=fused.function, args=reads, spec=spec, base_name=name,
                site=self.sites.site_inside(node.site, sites[name]), composite=call,
            )  # fmt: skip
            made.append(step)
            reads = (Ref(step),)
        return tuple(made)

    def run_op(
        self, func: Callable[..., Any], _name: str, args: tuple[Any, ...], kwargs: dict[str, Any], _place: OpPlace
    ) -> Any:
        """Returns the result of `func`; subclasses may compute it in another way."""
        return func(*args, **kwargs)

    @staticmethod
    def _written(
        name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, before: list[tuple[Tensor, int | None]]
    ) -> list[Tensor]:
        """Returns the tensors that the call wrote into, the main one first."""
        out = kwargs.get("out")
        if isinstance(out, Tensor) and out is result:
            return [out]
        target: object = args[0] if args else None
        if isinstance(target, Tensor) and writes_in_place(name, kwargs):
            return [target]
        return [tensor for tensor, version in before if version is not None and version_of(tensor) != version]

    def _fail(self, frame: FrameRecorder, failure: BaseException) -> None:
        if frame.record.opaque_reason is None:
            frame.record.opaque_reason = f"{type(failure).__name__}: {failure}"
            self.failures.append((frame.record, failure))
        frame.wants_ops = False

    # -- module calls ------------------------------------------------------------------------------------------------

    def on_forward(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs one frame and records it."""
        parent = self.stack[-1] if self.stack else None
        # Modules called inside an `autograd.Function`, where the mode is muted, belong to its one node.
        if self.muted or (parent is None and (self.root_frame is not None or module is not self.root_module)):
            self.unseen.add(id(module))
            return invoke(forward, args, kwargs)
        self.muted += 1
        try:
            with looking_at(args, kwargs):
                frame, args, kwargs = self._enter(parent, module, forward, args, kwargs)
        finally:
            self.muted -= 1
        self.stack.append(frame)
        try:
            output = self._run_custom(frame, module, forward, args, kwargs)
        except BaseException:
            frame.close()
            if parent is not None and frame.record.call is not None:
                parent.forget(frame.record.call)
            raise
        finally:
            self.stack.pop()
        self.muted += 1
        try:
            with nullcontext() if frame.record.opaque_reason else looking_at(output):
                return self._leave(parent, frame, output)
        finally:
            self.muted -= 1

    def _run_custom(
        self,
        frame: FrameRecorder,
        module: Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs the graph of a custom extraction function in place of `forward`, if there is one for this module."""
        extract = self.options.extraction_function(module)
        if extract is None:
            return invoke(forward, args, kwargs)
        record = frame.record
        try:
            with self.mute():  # it may run the module, or parts of it
                graph = extracted_graph(extract, module, record.parameters, record.attribute_path_from_root)
        except CaptureError:
            raise  # a graph that cannot run in place of the module is an error for the user
        except Exception as failure:
            self.failures.append((record, failure))
            record.custom_failure = f"its custom extraction function raised {type(failure).__name__}: {failure}"
            return invoke(forward, args, kwargs)
        bound = bind(parameters_of(forward), args, kwargs)
        if bound is None:
            return invoke(forward, args, kwargs)  # the call itself is wrong: let `forward` say so
        frame.wants_ops = False
        record.opaque_reason = None  # the options may say to skip modules of this class: this one has a graph
        return CustomRun(graph, record, bound).run(enable_io_processing=False)

    def _enter(
        self,
        parent: FrameRecorder | None,
        module: Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[FrameRecorder, tuple[Any, ...], dict[str, Any]]:
        path = ""
        if parent is not None:
            parent.notice_switches()
            path = self.paths.path(parent.record.module, module)
        record = Frame(module, path, conditions=_conditions(module))
        frame = FrameRecorder(record, self)
        if parent is not None:
            call = CallNode(op=type(module).__name__, target=path, base_name=path, frame=record)
            call.site = self.sites.site(call_sites.caller(1))
            try:
                call.args, call.kwargs = parent.refs(args), parent.refs(kwargs)
            except Exception as failure:
                self._fail(parent, failure)
            record.parent, record.call, record.capture = parent.record, call, parent.record.capture
            parent.add_call(call)
        record.parameters = parameters_of(declared_forward(module, forward))
        bound = bind(record.parameters, args, kwargs)
        if bound is not None:
            for name, value in frame.add_inputs(bound).items():
                args, kwargs = with_input(record.parameters, name, value, args, kwargs)
        record.opaque_reason = self._reason_to_skip(module) or record.opaque_reason
        if record.opaque_reason is not None:
            frame.wants_ops = False
        return frame, args, kwargs

    def _reason_to_skip(self, module: Module) -> str | None:
        """Returns the reason why the ops of a module are not recorded; `None` if they are."""
        if self.options.skip_compilation or type(module) in self.options.classes_to_skip_compiling:
            return "the options say to skip it"
        if isinstance(module, torch.jit.ScriptModule):
            return "it is a TorchScript module: its code runs outside Python"
        if packing_of(module) is not None and self.options.extraction_function(module) is None:
            return "its weight is quantized: it runs a kernel of its own on it"
        return None

    def _leave(self, parent: FrameRecorder | None, frame: FrameRecorder, output: Any) -> Any:
        record = frame.record
        try:
            frame.add_output(output)
        except Exception as failure:
            self._fail(frame, failure)
        if record.opaque_reason is not None:
            frame.make_opaque(output)
        frame.close()
        name_nodes(record)
        if parent is None:
            self.root_frame = record
            return output
        assert record.call is not None
        record.call.spec = describe(output)  # one of its own: `Dimensions` distinguishes specs by identity
        output = _distinct(output, parent, set())
        parent.register(output, record.call)
        return output


def _conditions(module: Module) -> Conditions:
    hooks = frozenset((*module._forward_hooks, *module._forward_pre_hooks))
    attention = attention_named_by(module)
    return Conditions(
        getattr(module, "training", False), hooks or _NO_HOOKS, grad_mode=torch.is_grad_enabled(), attention=attention
    )


_NO_HOOKS: frozenset[int] = frozenset()


def _name_results(frame: FrameRecorder, call: CompositeCall, result: Any, variable: Assigned) -> None:
    """Assigns the site and the name of an opened call to the steps whose values it returned."""
    for position, value in enumerate(result) if isinstance(result, tuple) else [(None, result)]:
        node = frame.node_of(value)
        if not isinstance(node, OpNode) or node.composite is not call or node.is_in_place:
            continue
        node.site, node.occurrence, node.composite = call.site, call.occurrence, call.outer
        node.position = position
        if position is None:
            node.base_name = variable if isinstance(variable, str) else call.name
        elif isinstance(variable, tuple) and len(variable) == len(result):
            node.base_name = variable[position] or node.base_name


def _distinct(output: Any, parent: FrameRecorder, seen: set[int]) -> Any:
    """Returns the output of a submodule with an alias for each tensor that the parent already has or that repeats.

    This distinguishes them: the submodule may return its inputs, alone or in a container. Containers are copied
    then, except for lists and dicts of the parent, which the submodule may have written into.
    """
    if isinstance(output, Tensor):
        is_distinct = id(output) not in seen and not parent.has_node_of(output)
        seen.add(id(output))
        return output if is_distinct else parent.alias_of(output)
    is_theirs = isinstance(output, (list, dict)) and parent.has_node_of(output)
    if is_theirs or not isinstance(output, (tuple, list, dict)):
        return output
    for key, child in children(output) or ():
        other = _distinct(child, parent, seen)
        if other is not child:
            output = replaced(output, key, other)
    return output
