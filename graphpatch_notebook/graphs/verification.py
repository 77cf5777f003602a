"""`verify`: compares every graph of a model with the module that it is a record of, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch.nn import Module

from graphpatch_notebook.capture import Doubt, Reason, call_sites, listed_doubts
from graphpatch_notebook.capture.inputs import inputs_of_call
from graphpatch_notebook.capture.modules import Swaps, observer, reachable_modules
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import afterwards, holding
from graphpatch_notebook.graphs.compiled_module import CompiledGraphModule
from graphpatch_notebook.graphs.modules import GraphModule, unobserved
from graphpatch_notebook.graphs.signatures import object_classes
from graphpatch_notebook.patching.model_state import RunComparison, copied, owner_of, preserved, run_and_compare
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import describe

Status: TypeAlias = Literal["equal", "differing", "not comparable", "opaque", "own graph", "not reached"]
_IN_WORDS: dict[Status, str] = {
    "equal": "equal their modules, bit for bit",
    "differing": "differ from their modules",
    "not comparable": "cannot be compared with their modules",
    "opaque": "have no graph",
    "own graph": "replace their module (edited or custom), so that there is nothing to compare",
    "not reached": "were not reached by these inputs",
}


@dataclass(frozen=True)
class FrameReport:
    """How the graph of one frame compares with its module.

    Attributes:
        path: The path of the frame; empty for the root.
        module_class: The class of the module.
        status: `equal`, bit for bit; `differing`, both ran and their results differ, or the graph raises; `not
            comparable`, running the graph would not prove anything; `opaque`, there is no graph; `own graph`, the graph
            replaces the module (edited, or custom); `not reached` by these inputs.
        reason: How they differ, why they cannot be compared, or why there is no graph.
    """

    path: str
    module_class: str
    status: Status
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.path or '<root>'} ({self.module_class}): {self.status}{f': {self.reason}' * bool(self.reason)}"


@dataclass(frozen=True)
class VerificationReport:
    """How all graphs of a model compare with their modules on the same inputs. Print it for a summary.

    Attributes:
        frames: A report for each frame, in order of execution.
        permanent: The paths with permanent patches (`PatchableGraph.edit`), without which both were run.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> print(PatchableGraph(torch.nn.ReLU(), torch.ones(2)).verify(torch.ones(2)))
        1 frame: 1 equal
    """

    frames: tuple[FrameReport, ...]
    permanent: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether no graph that these inputs reach differs or cannot be compared; opaque frames do not count."""
        return not (self.of("differing") or self.of("not comparable"))

    def of(self, status: Status) -> tuple[FrameReport, ...]:
        """Returns the reports with this status, in order of execution."""
        return tuple(frame for frame in self.frames if frame.status == status)

    def counts(self) -> dict[Status, int]:
        """Returns the number of frames of each status that occurs."""
        found = {status: len(self.of(status)) for status in _IN_WORDS}
        return {status: count for status, count in found.items() if count}

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {status}" for status, count in self.counts().items())
        lines = [f"{len(self.frames)} frame{'s' * (len(self.frames) != 1)}: {counted}"]
        if self.permanent:
            lines.append(f"compared without the permanent patches: {', '.join(self.permanent)}")
        for status, meaning in _IN_WORDS.items():
            if status != "equal" and (found := self.of(status)):
                lines.append(f"{status}: {meaning}")
                lines += _rows(found)
        return "\n".join(lines)

    def __iter__(self) -> Iterator[FrameReport]:
        return iter(self.frames)


def _rows(reports: Sequence[FrameReport]) -> list[str]:
    """Returns a line for each report; reports of one class with the same reason (the layers of a model) share one."""
    together: dict[tuple[str, str | None], list[str]] = {}
    for report in reports:
        together.setdefault((report.module_class, report.reason), []).append(report.path or "<root>")
    rows = []
    for (module_class, reason), paths in together.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        rows.append(f"  {paths[0]}{more} ({module_class}){f': {reason}' if reason else ''}")
    return rows


def verify(root: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> VerificationReport:
    """Compares every graph with its module on the inputs that it gets when the model runs on `args`, `kwargs`.

    The model runs on copies of the inputs. Its buffers, and the random generators of torch, Python and numpy, are
    restored afterwards. If the graph of the root replaces the model, nothing runs, and nothing is compared.
    """
    if root.has_own_graph:
        return VerificationReport(tuple(_report(g, {}) for g in root.walk()))
    verifier, own = _Verifier(root), copied((args, kwargs))
    swaps = Swaps()
    with preserved(root.frame.module), afterwards(swaps.release), holding(observer, verifier):
        swaps.hold(reachable_modules(root.frame.module))
        copy_context().run(root.frame.module, *own[0], **own[1])
    return VerificationReport(tuple(_report(g, verifier.found) for g in root.walk()))


class _Verifier:
    """Compares each graph with its module at the start of the module call that it records."""

    def __init__(self, root: GraphModule) -> None:
        self._root: GraphModule | None = root
        self._stack: list[tuple[GraphModule | None, dict[int, int]]] = []
        self.found: dict[GraphModule, RunComparison] = {}

    def on_forward(self, module: Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graph_module = self._graph_module(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._stack.append((graph_module, {}))
            try:
                with holding(observer, self):
                    return call_sites.invoke(forward, args, kwargs)
            finally:
                self._stack.pop()

        if graph_module is not None and graph_module.has_own_graph:
            return graph_module.run_frame(args, kwargs)
        if graph_module is None or graph_module.frame.opaque_reason is not None:
            return run(*args, **kwargs)
        assert isinstance(graph_module, CompiledGraphModule)
        frame = graph_module.frame
        objects = object_classes(map(describe, inputs_of_call(frame, args, kwargs).values()))
        doubts = frame.doubts or [Doubt(Reason.IS_GIVEN_OBJECT, name) for name in objects[:1]]
        if doubts := doubts or [*_hooks_left_out(frame)][:1]:
            result = run(*args, **kwargs)
            comparison = RunComparison("not comparable", listed_doubts(doubts))
        else:
            result, comparison = run_and_compare(module, run, _graph_of(graph_module), args, kwargs)
        self.found[graph_module] = comparison
        return result

    def _graph_module(self, module: Module) -> GraphModule | None:
        """Returns the graph module of the frame that begins, if it was called during capture."""
        if not self._stack:
            root, self._root = self._root, None
            return root if root is not None and root.frame.module is module else None
        caller, counts = self._stack[-1]
        call_index = counts.get(id(module), 0)
        counts[id(module)] = call_index + 1
        return caller.callee(module, call_index) if caller is not None else None


def _graph_of(graph_module: CompiledGraphModule) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with unobserved():
            return graph_module.run_graph(args, kwargs)

    return run


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooks_left_out(frame: Frame) -> Iterator[Doubt]:
    """Yields doubts if a run of the graph would not run hooks of the modules that it calls."""
    for module in (node.frame.module for node in frame.calls()):
        if type(hook := module.__dict__.get("_hf_hook")).__module__.split(".")[0] not in ("builtins", "accelerate"):
            yield Doubt(Reason.HOOKS_ARE_LEFT_OUT, f"{type(module).__name__} ({type(hook).__name__})")
        hooks = [hook for name in _HOOKS for hook in module.__dict__.get(name, {}).values()]
        # Other hooks change tensors, which is part of the graph, or only concern the module's own run.
        if "user" in map(owner_of, hooks):
            yield Doubt(Reason.HOOKS_ARE_LEFT_OUT, type(module).__name__)


def _report(graph_module: GraphModule, found: dict[GraphModule, RunComparison]) -> FrameReport:
    frame = graph_module.frame
    comparison = found.get(graph_module)
    status: Status = "equal"
    reason = None
    if graph_module.has_own_graph:
        status = "own graph"
    elif frame.opaque_reason is not None:
        status, reason = "opaque", frame.opaque_reason
    elif comparison is None:
        status = "not reached"
        if any(above.has_own_graph for above in frame.frames_above()):
            reason = "a graph that replaces its module calls it"
    else:
        status, reason = comparison.status, comparison.reason or None
    return FrameReport(format_path(frame.path), type(frame.module).__name__, status, reason)
