"""Cells that share forwards: each cell has rows of its own in a batch.

`clean_run` is the run without patches. Cells whose first patched values occur at about the same time run in one forward
(`SharedForwards`): what modules return that end before these values is not computed again, and modules compute only the
positions that patches have changed. Where the rows are in each value is found by the first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.modules import all_modules
from graphpatch_notebook.capture.records import HELD_KINDS, Frame
from graphpatch_notebook.experiments.engine.cells import (
    NEVER,
    ChangedPositions,
    FrameNode,
    FrameRecording,
    FrameReplay,
    is_close,
    least_vectors,
    leaves_of,
    own_tensors,
    wild,
)
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import CustomPatch, Patch
from graphpatch_notebook.patching import FUSED_MODULES, Entry, apply_to_rows, caches_of, frames_seen, innermost
from graphpatch_notebook.patching.model_state import is_inert
from graphpatch_notebook.torch_compat import has_global_hooks, is_any_compiled, may_compile
from graphpatch_notebook.values import (
    ABSENT,
    IMMUTABLE,
    ContainerSpec,
    TensorSpec,
    describe,
    mapped,
    with_own_containers,
)


class CannotShareError(Exception):
    """Cells cannot share forwards, for the reason given (caught inside the package)."""


def check_may_share(pg: PatchableGraph) -> None:
    """Raises a `CannotShareError` if cells may not share forwards at all."""
    graph = captured(pg)
    modules = all_modules(graph.module)
    reasons = {
        "there are hooks on modules, which may keep what they see": has_global_hooks() or any(map(_has_hooks, modules)),
        "graphs of their own run in place of modules": graph.runs_own_graphs,
        "other patches are active": bool(graph.permanent) or innermost(graph) is not None,
        "parts of the model are compiled": may_compile() and is_any_compiled(modules),
        "the model is sharded over processes": graph.sharding is not None,
    }
    if why := next((reason for reason, holds in reasons.items() if holds), None):
        raise CannotShareError(why)


def _has_hooks(module: Module) -> bool:
    before, after = module._forward_pre_hooks, module._forward_hooks
    return bool(before or after) and not all(map(is_inert, (*before.values(), *after.values())))


# -- the run without patches -------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Mark(Patch[Any]):
    """Records the first value of its node, and when it occurs."""

    observes_only: ClassVar[bool] = True
    tick: Callable[[], int]
    any_shape: bool = True
    occurred: float = field(default=NEVER, init=False)
    value: Any = field(default=None, init=False)

    def op(self, original_output: Any) -> Any:
        if self.occurred == NEVER:
            self.occurred = self.tick()
            self.value = own_tensors(original_output)  # the model may write into it later
        return original_output


@dataclass(frozen=True)
class CleanRun:
    """A run without patches.

    Attributes:
        inputs: The inputs of the model.
        output: What the model returned.
        root: The frame above the model, with the results of some of those below.
        marks: The value of each path, and when it occurred.
    """

    inputs: Inputs
    output: Any
    root: FrameNode
    marks: Mapping[str, Mark]

    @property
    def skips_logits(self) -> bool:
        """Whether the run computed the logits of the last position only."""
        return _LOGITS in self.inputs.kwargs


def clean_run(pg: PatchableGraph, inputs: Inputs, targets: Mapping[str, Target], most: int) -> CleanRun:
    """Runs the model in the grad mode of the caller.

    Args:
        pg: The graph.
        inputs: The inputs of the model.
        targets: The values that are patched, by path; if there are none, no frame is recorded.
        most: The number of cells that will share a forward, at most.
    """
    root = FrameNode(None, is_open=True)
    if not targets:
        return CleanRun(inputs, inputs.run(pg), root, {})
    seen: dict[Module, None] = {}  # those that hold patched values, and those that they call
    for target in targets.values():
        node = root
        for frame in reversed([*target.frame.frames_above()]):
            node = node.child(frame.module, 0 if frame.call is None else frame.call.call_index)
            if frame is not target.frame or target.node.kind != "output":
                node.is_open = True
                seen |= dict.fromkeys(call.frame.module for call in frame.calls())
            seen[frame.module] = None
    vectors = most * _size(inputs)[0]
    modules = all_modules(captured(pg).module) if vectors else []
    parts = dict.fromkeys(one for one in modules if least_vectors(one) <= vectors)
    seen |= parts
    recording = FrameRecording(root, parts)
    marks: dict[Any, Mark] = {path: Mark(tick=recording.tick) for path in targets}
    with frames_seen(recording, seen), pg.patch(marks).quiet():
        return CleanRun(inputs, inputs.run(pg), root, marks)


class RunsFrom:
    """Runs of the model that differ from one without patches in a value and what comes after it: the rest is replayed.

    Frames that end before the value occurs return what they returned in that run. All else is computed, also where
    nothing can be replayed: the model has hooks, say.

    Args:
        pg: The graph.
        inputs: The inputs of the model.
        target: The value.

    Attributes:
        inputs: The same inputs, without a cache, which is a state that frames share.
        output: What the run without patches returned.
    """

    def __init__(self, pg: PatchableGraph, inputs: Inputs, target: Target) -> None:
        self._pg, self._target = pg, target
        self._values: dict[FrameNode, Any] = {}
        self._root = FrameNode(None, is_open=True)
        self._is_whole = False
        self.output: Any = None
        self.inputs = next(
            each
            for each in trimmed_inputs(captured(pg).root, inputs, [target])
            if each.kwargs.get(_LOGITS) is inputs.kwargs.get(_LOGITS)  # it may be a tensor
        )
        try:
            check_may_share(pg)
        except CannotShareError:
            self._is_whole, self.inputs = True, inputs

    def first(self, pg: PatchableGraph) -> Any:
        """Returns the output of the run without patches; the caller may observe it by probes."""
        path = self._target.path
        clean = clean_run(pg, self.inputs, {} if self._is_whole else {path: self._target}, 0)
        if not self._is_whole:
            known = {node: () for node in clean.root.walk() if node.value is not ABSENT}
            self._root = clean.root
            self._values = {node: node.value for node in _ended_before(clean.root, clean.marks[path].occurred, known)}
        self.output = clean.output
        return clean.output

    def again(self, patches: Mapping[Any, Any], inputs: Inputs | None = None) -> Any:
        """Returns the output of a run under patches, of the value and later ones."""
        values = {node: own_tensors(value) for node, value in self._values.items()}  # the model may write into them
        replay = FrameReplay(self._root, values, {}, None)
        with self._pg.patch(patches), frames_seen(replay, self._root.modules_around(values)):
            return (inputs or self.inputs).run(self._pg)

    def together(self, path: str, values: Sequence[Tensor], dim: int) -> Any:
        """Returns the output of a run in which the value is several values, one after the other along the batch.

        Whether the model computes each of them as alone is to be checked: what is replayed has the rows of one.

        Raises:
            CannotShareError: The inputs cannot be repeated, or nothing is replayed.
        """
        if not self._values:
            raise CannotShareError
        repeat = partial(repeated, layout=input_rows(self.inputs)[0], count=len(values))
        whole = torch.cat([*values], dim)
        args, kwargs = repeat((self.inputs.args, self.inputs.kwargs))
        return self.again({path: CustomPatch(custom_op=lambda _: whole, any_shape=True)}, Inputs(args, kwargs))


# -- outputs that the metric does not read -----------------------------------------------------------------------------

_LOGITS, _CACHE = "logits_to_keep", "use_cache"
_EARLY = ("input", "parameter", "buffer", "attribute")
_MANY_LOGITS = 10_000
"""With fewer on the example inputs, to skip some saves less than it costs to test whether each metric reads them."""


def trimmed_inputs(root: Frame, inputs: Inputs, targets: Iterable[Target]) -> list[Inputs]:
    """Returns inputs with arguments that make a run skip outputs; those that skip most are first, the same are last.

    Args:
        root: The root frame of the capture.
        inputs: The inputs of the model; arguments that they contain are not replaced.
        targets: The values that are patched.
    """
    given = {*inputs.kwargs, *(parameter.name for parameter in root.parameters[: len(inputs.args)])}
    free = {parameter.name for parameter in root.parameters} - given
    has_cache = any("past" in name or "cache" in name for name in given)
    without_cache: dict[str, Any] = {_CACHE: False} if _CACHE in free and not has_cache else {}
    found: list[dict[str, Any]] = [without_cache, {}] if without_cache else [{}]
    many = any(name == "logits" and spec.shape.numel() >= _MANY_LOGITS for name, spec in _outputs(root))
    if many and _LOGITS in free and "labels" not in given and not any(_is_late(root, target) for target in targets):
        found.insert(0, {**without_cache, _LOGITS: 1})
    return [replace(inputs, kwargs={**inputs.kwargs, **extra}) for extra in found]


def _outputs(root: Frame) -> Iterator[tuple[str, TensorSpec]]:
    """Yields the tensors that the model returns in a container, with their names."""
    spec = root.output_node.spec
    for name, _, inside in spec.children if isinstance(spec, ContainerSpec) else ():
        if isinstance(inside, TensorSpec):
            yield name, inside


def _is_late(root: Frame, target: Target) -> bool:
    """Whether a value may occur after `logits_to_keep` is applied: in the model's own forward, or in its head."""
    above = [*target.frame.frames_above()]
    if target.frame is root:
        return target.node.kind not in _EARLY
    first = next(root.calls(), None)
    return first is None or first.frame is not above[-2]


def reads_no_more(metric: Callable[[Any], Any], clean: CleanRun, is_same: Callable[[Any, Any], bool]) -> bool:
    """Whether a metric reads none of the outputs that a run on trimmed inputs skipped.

    Args:
        metric: The metric.
        clean: The run.
        is_same: Compares two results of the metric.
    """
    output = clean.output
    logits = getattr(output, "logits", None)
    try:
        value = metric(own_tensors(output))
        if not clean.skips_logits:
            return True
        if not (isinstance(logits, Tensor) and logits.dim() == 3):
            return False
        return is_same(value, metric(with_more_logits(output, wild(logits))))
    except Exception:  # it reads an output that was skipped
        return False


def with_more_logits(output: Any, before: Tensor) -> Any:
    """Returns a copy of an output with the logits of the last position only, with those of a position before it."""
    longer = torch.cat([before, output.logits], 1)
    return mapped(output, lambda leaf: longer if leaf is output.logits else own_tensors(leaf))


# -- where the rows are in a value -------------------------------------------------------------------------------------

Layout: TypeAlias = "tuple[int | None, ...]"
"""The dimension with the rows, for each leaf of a nested container; `None` for what all rows share."""


def row_dim(one: Tensor, many: Any, count: int, batch: int) -> int | None:
    """Returns which dimension holds the rows, given a value in a run, and with that run as the last rows of several.

    Args:
        one: The value in the run.
        many: The value in the forward.
        count: How often the batch of the run is repeated there.
        batch: The size of the batch of the run.

    Raises:
        CannotShareError: The shapes do not tell, or the last rows are not those of the run.
    """
    if isinstance(many, Tensor) and one.dim() == many.dim():
        if one.shape == many.shape:
            return None
        dim, *others = [dim for dim, (a, b) in enumerate(zip(one.shape, many.shape, strict=True)) if a != b]
        is_grown = not others and many.shape[dim] == count * one.shape[dim]
        # A dimension that holds more than the batch, such as heads, may hold it in another order.
        if is_grown and (one.shape[dim] == batch or is_close(many.chunk(count, dim)[-1], one)):
            return dim
    shown = tuple(many.shape) if isinstance(many, Tensor) else type(many).__name__
    raise CannotShareError(
        f"a value of shape {tuple(one.shape)} becomes {shown} where the batch is {count} times as large"
    )


def layout_of(one: Any, many: Any, count: int, batch: int) -> Layout:
    """Returns the same for each leaf of a nested container.

    Raises:
        CannotShareError: The containers differ, or hold something else than tensors and plain values.
    """
    ones, others = leaves_of(one), leaves_of(many)
    if len(ones) != len(others):
        raise CannotShareError("the model returns another structure on a larger batch")
    pairs = list(zip(ones, others, strict=True))
    for a, b in pairs:
        if not isinstance(a, Tensor) and not (isinstance(a, IMMUTABLE) and a == b):
            raise CannotShareError(f"the output holds a {type(a).__name__}, which has no rows")
    return tuple(row_dim(a, b, count, batch) if isinstance(a, Tensor) else None for a, b in pairs)


def repeated(value: Any, layout: Layout, count: int) -> Any:
    """Repeats the tensors in a nested container for `count` cells."""
    dims = iter(layout)

    def repeat(leaf: Any) -> Any:
        dim = next(dims)
        return leaf if dim is None else torch.cat([leaf] * count, dim)

    return mapped(value, repeat)


def parted(value: Any, layout: Layout, count: int) -> list[Any]:
    """Returns the part of each cell in a nested container, with separate containers for each; tensors are views.

    Example:
        >>> parted({"a": torch.arange(2)}, (0,), 2)
        [{'a': tensor([0])}, {'a': tensor([1])}]
    """
    leaves = leaves_of(value)
    if len(leaves) != len(layout):
        raise CannotShareError("the model returned a value of another structure")
    pairs = zip(leaves, layout, strict=True)
    cells = zip(*([leaf] * count if dim is None else leaf.chunk(count, dim) for leaf, dim in pairs), strict=True)
    return [with_own_containers(value, partial(_next, iter(cell))) for cell in cells]


def _next(own: Iterator[Any], _: Any) -> Any:
    return next(own)


def input_rows(inputs: Inputs) -> tuple[Layout, int]:
    """Returns where the rows are in the inputs, and how many: in dimension 0 of what is as large as the first tensor.

    Raises:
        CannotShareError: No input has rows, or one is an object (such as a cache) that cannot be repeated.
    """
    leaves = leaves_of((inputs.args, inputs.kwargs))
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *IMMUTABLE)) or (isinstance(leaf, Tensor) and leaf.is_nested):
            raise CannotShareError(f"an input is a {describe(leaf)}, which cannot be repeated")
    sizes = [len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else 0 for leaf in leaves]
    batch = next(filter(None, sizes), 0)
    if not batch:
        raise CannotShareError("no input has a batch dimension")
    return tuple(0 if size == batch else None for size in sizes), batch


class RowsPatch(Patch[Any]):
    """Applies the patches of each cell to its rows.

    In the first forward, it finds the rows. The last two blocks of rows are then for checks: wild numbers, which must
    change nothing in the others, and the run without patches.

    Args:
        entries: For each cell, its entries on this value.
        value: The value in the run without patches.
        dim: The dimension with the rows; `None` in the first forward.
        batch: The size of the batch for one cell.

    Attributes:
        dim: The dimension with the rows; `None` if that is not known, or if they are shared.
    """

    def __init__(self, entries: Sequence[Sequence[Entry]], value: Any, dim: int | None, batch: int) -> None:
        super().__init__(any_shape=True)  # each entry checks the shape of its rows
        self.dim, self._is_first = dim, dim is None
        self._entries, self._value, self._batch = entries, value, batch

    def op(self, original_output: Any) -> Any:
        value, one, count = original_output, self._value, len(self._entries) + 2 * self._is_first
        if self._is_first and isinstance(one, Tensor):
            with suppress(CannotShareError):
                self.dim = row_dim(one, value, count, self._batch)
        if self.dim is None and not any(self._entries):
            return value
        is_like = self.dim is not None and isinstance(value, Tensor) and value.dim() == one.dim()
        if not is_like or value.shape[self.dim] != count * one.shape[self.dim]:
            raise CannotShareError(f"a patched value of type {type(value).__name__} has no rows where others had them")
        result = value.clone()
        blocks = result.chunk(count, self.dim)
        for entries, block in zip(self._entries, blocks, strict=False):
            patched = block
            for entry in entries:
                patched = apply_to_rows(entry, patched, is_own=True)
            if patched is not block:
                block.copy_(patched)
        if self._is_first:
            blocks[-2].copy_(wild(blocks[-2]))
        return result


# -- cells in one forward ----------------------------------------------------------------------------------------------

_TOKENS = {"cpu": 512, "other": 8192}
_MOST_ROWS = 64
# Rough costs: only the order of magnitude of their ratio matters. Nothing is timed, so that the groups of a sweep, and
# its rounding errors, are the same in each run.
_WORK_OF_A_CALL = 20_000
_OPERATIONS_PER_CALL_TIME = {"cpu": 5e6, "other": 5e8}


def most_rows(inputs: Inputs, batch: int | str) -> int:
    """Returns the number of cells in one forward, at most: `batch`, unless this is `"auto"`.

    Raises:
        CannotShareError: The inputs have no rows.
    """
    input_rows(inputs)
    tokens, device = _size(inputs)
    return int(batch) if batch != "auto" else max(1, min(_MOST_ROWS, _TOKENS[device] // max(1, tokens)))


def _size(inputs: Inputs) -> tuple[int, str]:
    """Returns the number of tokens (or similar units) in the inputs, and the kind of the device."""
    first = next(leaf for leaf in leaves_of((inputs.args, inputs.kwargs)) if isinstance(leaf, Tensor) and leaf.dim())
    is_vectors = first.is_floating_point() and first.dim() > 1
    return (first.shape[:-1] if is_vectors else first.shape).numel(), "cpu" if first.device.type == "cpu" else "other"


class SharedForwards:
    """Forwards that cells share. The first one finds where the rows are; the caller restores the model.

    Args:
        pg: The graph.
        clean: The run without patches.
        targets: The values that cells patch, by path.
        batch: The number of cells in one forward, at most, or `"auto"`.

    Raises:
        CannotShareError: Cells cannot share forwards.
    """

    def __init__(self, pg: PatchableGraph, clean: CleanRun, targets: Mapping[str, Target], batch: int | str) -> None:
        modules = all_modules(captured(pg).module)
        if any(t.node.kind == "op" for t in targets.values()) and any(isinstance(m, FUSED_MODULES) for m in modules):
            raise CannotShareError("torch computes the model by other kernels where operations are patched")
        self._pg, self._clean = pg, clean
        self._input_rows, self._batch = input_rows(clean.inputs)
        # Modules that compute only the positions that patches have changed.
        calls = {node: node.call for node in clean.root.walk() if node.call is not None}
        self._parts = {node: ChangedPositions(node.module, call) for node, call in calls.items()}
        self._wild = wild(clean.output.logits) if clean.skips_logits else None
        self._most = most_rows(clean.inputs, batch)
        if self._parts and batch == "auto":
            self._most = min(2 * self._most, _MOST_ROWS)
        # What the first forward finds: where the rows are in the output, in patched values (without those that have
        # none), and in what frames return that need not be computed again.
        self._is_first = True
        self._output_rows: Layout = ()
        self._rows: dict[str, int] = {}
        self._frames: dict[FrameNode, Layout] = {}

    def first(self, cells: Sequence[Sequence[Entry]]) -> list[int]:
        """Returns the numbers of the cells, given by their entries, for the first forward; there may be none.

        It is for cells that are patched early: those that are patched late use what it finds.
        """
        plain = [n for n, own in enumerate(cells) if self._may_fit(own) and not any(e.restriction for e in own)]
        return [plain[number] for number in self.groups([cells[number] for number in plain], is_first=True)[0]]

    def groups(self, cells: Sequence[Sequence[Entry]], *, is_first: bool = False) -> list[list[int]]:
        """Returns the numbers of cells, given by their entries, in groups that each run in one forward.

        If it `is_first`, the first group may be empty: it is for a forward that there is anyway.
        """
        tokens, device = _size(self._clean.inputs)
        # For each frame: when it ended, its work for a row, and that for a row that no patch has changed.
        in_parts = {inner for node in self._parts for inner in node.walk()}
        frames = [(node, _work_of(node)) for node in self._clean.root.walk() if node.ended < NEVER]
        ends = [(node.ended, work, 0 if node in in_parts else work) for node, work in frames]
        of_calls = len(ends) * _OPERATIONS_PER_CALL_TIME[device] / (2 * max(1, tokens) * sum(end[1] for end in ends))
        by_cut: dict[float, list[int]] = {}
        for number, entries in enumerate(cells):
            by_cut.setdefault(self._occurred(entries), []).append(number)
        groups: list[list[int]] = [[]] if is_first else []
        since = 0.0
        for cut in sorted(by_cut):
            own = by_cut[cut]
            run = (1 + of_calls) * sum(work for ended, work, _ in ends if ended >= cut)
            # Joining an earlier group saves a run, but these cells then compute frames that they could have replayed.
            in_vain = len(own) * sum(idle for ended, _, idle in ends if since <= ended < cut)
            if groups and len(groups[-1]) + len(own) <= self._most and in_vain <= run:
                groups[-1] += own
                continue
            groups += [own[start : start + self._most] for start in range(0, len(own), self._most)]
            since = cut
        return groups

    def _may_fit(self, entries: Sequence[Entry]) -> bool:
        nodes: dict[int, str] = {}  # by the path of a cell's only value of it
        return all(
            entry.target.node.kind not in HELD_KINDS
            and entry.target.path in self._clean.marks
            and self._clean.marks[entry.target.path].occurred < NEVER
            and nodes.setdefault(id(entry.target.node), entry.target.path) == entry.target.path
            for entry in entries
        )

    def fits(self, entries: Sequence[Entry]) -> bool:
        """Whether a cell can share a forward: each of its values has rows, and is patched as a whole, or in them."""
        clean = self._clean
        if not self._may_fit(entries) or any(entry.target.path not in self._rows for entry in entries):
            return False
        restricted = [(entry.target.path, entry.restriction) for entry in entries if entry.restriction is not None]
        if restricted and caches_of(captured(self._pg).root, clean.inputs.args, clean.inputs.kwargs):
            return False
        return all(
            where.is_whole_in(clean.marks[path].value.shape)
            and where.row_dim in (None, self._rows[path])
            and (where.positions is None or where.dim != self._rows[path])
            for path, where in restricted
        )

    @contextmanager
    def run(self, cells: Sequence[Sequence[Entry]]) -> Iterator[tuple[list[Any], list[Any] | None]]:
        """Runs cells, given by their entries, in one forward; yields their outputs. In the block, patches are active.

        If the run skips logits, it yields the outputs also with wild logits at a position before: a metric may choose
        by the values which positions it reads.

        In the first forward, the run without patches, and wild numbers at all paths, have rows of their own: the former
        must come out as it did.

        Raises:
            CannotShareError: It did not, or outputs have no rows.
        """
        count, is_first = len(cells) + 2 * self._is_first, self._is_first
        marks = self._clean.marks
        paths = dict.fromkeys(entry.target.path for entries in cells for entry in entries)
        if is_first:
            paths = dict.fromkeys(path for path, mark in marks.items() if mark.occurred < NEVER)
        patches: dict[Any, RowsPatch] = {
            path: RowsPatch(
                [[entry for entry in entries if entry.target.path == path] for entries in cells],
                marks[path].value,
                None if is_first else self._rows[path],
                self._batch,
            )
            for path in paths
        }
        with self._pg.patch(patches).quiet() if is_first else self._pg.patch(patches):
            output = self._forward(cells, count)
            if is_first:
                self._learn(output, count, patches)
            more = None
            if self._wild is not None:
                longer = with_more_logits(output, self._wild.repeat(count, 1, 1))
                more = parted(longer, self._output_rows, count)[: len(cells)]
            yield parted(output, self._output_rows, count)[: len(cells)], more

    def _forward(self, cells: Sequence[Sequence[Entry]], count: int) -> Any:
        root, fresh = self._clean.root, self._clean.inputs.fresh()
        args, kwargs = repeated((fresh.args, fresh.kwargs), self._input_rows, count)
        values: dict[FrameNode, Any] = {}
        if self._is_first:
            seen = [node for node in root.walk() if node.value is not ABSENT or node in self._parts]
        else:
            known = _ended_before(root, min(map(self._occurred, cells)), self._frames)
            values = {frame: repeated(frame.value, self._frames[frame], count) for frame in known}
            seen = [*values, *self._parts]

        def find_rows(node: FrameNode, output: Any) -> None:
            if node.value is not ABSENT:
                with suppress(CannotShareError):  # else it is computed in each run
                    self._frames[node] = layout_of(node.value, output, count, self._batch)

        replay = FrameReplay(root, values, self._parts, find_rows if self._is_first else None)
        with frames_seen(replay, root.modules_around(seen)):
            return self._pg(*args, **kwargs)

    def _learn(self, output: Any, count: int, patches: Mapping[str, RowsPatch]) -> None:
        """Finds the rows in what the first forward returned, in which those without patches must be as they were.

        Raises:
            CannotShareError: They are not, or there are none.
        """
        one = self._clean.output
        self._output_rows = layout_of(one, output, count, self._batch)
        for dim, a, b in zip(self._output_rows, leaves_of(one), leaves_of(output), strict=True):
            if isinstance(a, Tensor) and dim is None:
                raise CannotShareError("the output has a tensor that is one for all rows")
            if dim is not None and not is_close(b.chunk(count, dim)[-1], a):
                raise CannotShareError("in one forward, patches of one cell reach the rows of another")
        self._is_first = False
        self._rows = {path: patch.dim for path, patch in patches.items() if patch.dim is not None}
        found: dict[FrameNode, ChangedPositions] = {}
        frames = list(self._clean.root.children.values())
        while frames:  # the outermost position-wise frames, and those of which this is not known yet
            node = frames.pop()
            known = self._parts.get(node)
            if known is not None and known.is_position_wise is not False:
                found[node] = known
            if known is None or not known.is_position_wise:
                frames += node.children.values()
        self._parts = found

    def _occurred(self, entries: Sequence[Entry]) -> float:
        return min((self._clean.marks[entry.target.path].occurred for entry in entries), default=NEVER)


def _ended_before(root: FrameNode, until: float, among: Mapping[FrameNode, Layout]) -> list[FrameNode]:
    """Returns the outermost frames of those `among` that ended before a time."""
    found: list[FrameNode] = []
    frames = list(root.children.values())
    while frames:
        frame = frames.pop()
        if frame.ended < until and frame in among:
            found.append(frame)
        elif frame.is_open:
            frames += frame.children.values()
    return found


def _work_of(node: FrameNode) -> int:
    """Returns the work of a frame, without the frames in it, for one token."""
    weights = [] if node.children else all_modules(node.module)
    of_weights = (p.numel() for one in weights for p in one._parameters.values() if p is not None)
    return _WORK_OF_A_CALL + (0 if isinstance(node.module, torch.nn.Embedding) else sum(of_weights))
