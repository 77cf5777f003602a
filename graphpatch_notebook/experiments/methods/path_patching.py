"""Path patching: the direct effect of one value on another, without all other components of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.capture.records import HELD_KINDS, Node
from graphpatch_notebook.components import Components, find
from graphpatch_notebook.components.flow import Flow
from graphpatch_notebook.components.writes import Write
from graphpatch_notebook.errors import ExperimentError, ExperimentWarning, UnknownPathError
from graphpatch_notebook.experiments.engine.cells import PatchMap
from graphpatch_notebook.experiments.engine.inputs import Inputs, inputs_of
from graphpatch_notebook.experiments.methods.arguments import (
    Paths,
    check_graph,
    check_metric,
    check_options,
    check_same_shapes,
    several_paths,
    targets,
)
from graphpatch_notebook.experiments.methods.causal_tracing import Noise
from graphpatch_notebook.experiments.methods.heads import head_layout
from graphpatch_notebook.experiments.methods.reference_runs import MetricRange, record
from graphpatch_notebook.experiments.methods.sweeps import run_sweep
from graphpatch_notebook.experiments.results.arrays import component_grid
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, runs_where_the_model_is
from graphpatch_notebook.patches.kinds import Patch, ProbePatch, ReplacePatch
from graphpatch_notebook.patches.slices import index_text
from graphpatch_notebook.values import TensorSpec, readable_children
from graphpatch_notebook.warning_places import warn_each_time

if TYPE_CHECKING:
    from xarray import DataArray


@runs_where_the_model_is
def path_patch(
    pg: PatchableGraph,
    sender: Endpoint | list[Endpoint],
    receiver: Endpoint | list[Endpoint | None] | None,
    clean: Any,
    corrupted: Any,
    metric: Callable[[Any], Any],
    *,
    components: Paths | None = None,
    heads: int | None = None,
    together: bool = False,
    normalize: bool = False,
    **options: Any,
) -> DataArray:
    """Returns the metric on the corrupted inputs when a sender's value from the clean inputs passes along one edge.

    The model runs on `corrupted`; only the sender's value is from `clean`, as in `causal_trace`. Other texts put the
    same call the other way round: where they run on the original prompts and take the sender's value from new ones
    (the IOI paper's `x_orig` and `x_new`; ARENA's `orig_dataset` and `new_dataset`), give the new prompts as `clean`
    and the original ones as `corrupted`.

    The edge goes from the sender to the receiver directly, not through other components of the model:

    1. The sender's value is recorded on the clean inputs, the outputs of all components on the corrupted ones.
    2. The model runs on the corrupted inputs with the clean value at the sender and all components held at their
       corrupted values; the value of the receiver is recorded. What is not a component (the residual stream, norms) is
       recomputed. A component that the sender is a part of is not held, as attention is for its heads, also where a
       norm or a scale lies in between: it passes on the change of the sender.
    3. The model runs on the corrupted inputs with only the receiver replaced, by that value. Everything after it is
       recomputed. The metric is that of this run; for the receiver `None`, that of the run in step 2.

    Args:
        pg: The graph.
        sender: A path, such as `h_0.attn.output|sub_0`; or a path and an index, for one head
            (`("h_0.attn.c_proj.x", (..., slice(0, 64)))`); or a list of these.
        receiver: In the same form: the output of a component, an input (`h_3.attn.hidden_states`), or a value in it
            (`h_3.attn.query_states`); `None` (also in a list) for the output of the model.
        clean: The inputs that the senders' values are from (`x_new`): a tuple of arguments, a dict of keyword
            arguments, or one value.
        corrupted: The inputs that the model runs on, and is held at (`x_orig`); of the same shapes.
        metric: Maps the output of the model to a number (see `LogitDifference` and others), or to a dict of numbers.
        components: The paths that are held. By default, what attentions, MLPs and other parts of the layers add to the
            residual stream, if this can be found: the values that `pg.components` calls `attn_out`, `mlp_out`, ...
        heads: The number of attention heads: each head of the senders is a sender of its own. The heads must be
            separate in the values of the senders (`h_0.attn.c_proj.x`, the input of the output projection), as for
            `ablate`.
        together: Replaces all receivers at once, such as the queries of all heads of one kind: the edges of a sender
            to each of them are one cell, and the result has no dimension `receiver`.
        normalize: Return (value - corrupted) / (clean - corrupted).
        **options: As for `pg.sweep`: `batch`, `progress`, `checkpoint`, `checkpoint_key`,
            `executor`, `recipe`.

    Returns:
        An array with the dimensions `sender` (for a list), `head` (with `heads`) and `receiver` (for a list, unless
        `together`). Senders that are components have the dimensions `layer` and `head` in place of `sender`. Its
        `attrs` contain the metric without patches, `clean` and `corrupted`, and the `components`. If a receiver runs
        before a sender, there is no edge and the metric is the corrupted one. An `ExperimentWarning` names senders that
        do not reach any receiver, and the held component that blocks them.

    Raises:
        ExperimentError: Before the sweep: components cannot be found, values differ in shape between clean and
            corrupted inputs, or no receiver runs after a sender.
        UnknownPathError: A path does not exist. The message names the nearest ones.

    Example:
        >>> class Sum(torch.nn.Module):
        ...     def forward(self, x):
        ...         double = x * 2
        ...         triple = x * 3 + double
        ...         return double + triple
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(Sum(), torch.ones(1))
        >>> edges = ["triple", None]
        >>> held = ["triple"]
        >>> path_patch(pg, "double", edges, torch.ones(1), torch.zeros(1), torch.sum, components=held).values
        array([2., 2.])

    Source:
        Wang et al., Interpretability in the Wild, 2022; Goldowsky-Dill et al., Localizing Model Behavior with Path
        Patching, 2023.
    """
    check_graph(pg)
    check_metric(metric)
    check_options(options, path_patch, run_sweep)
    if isinstance(corrupted, (Noise, type)):
        raise ExperimentError(f"corrupted is {corrupted!r}; give inputs as for clean (noise is for causal_trace)")
    senders, receivers = edge_ends(pg, sender, "sender"), edge_ends(pg, receiver, "receiver")
    if together and not all(end.path for end in receivers.values()):
        raise ExperimentError("together=True is for receivers in the model, but one of them is its output (None)")
    held = default_components(pg) if components is None else several_paths(pg, components, "components")
    run = record(pg, inputs_of(clean), dict.fromkeys(end.path for end in senders.values()), metric)
    run.warn_if_random(pg)
    parts = {(start,): end for start, end in senders.items()}
    if heads is not None:
        parts = head_ends(pg, senders, run.values, heads, inputs_of(clean))
    edges = _Edges(pg, {end.label: end for end in parts.values()}, receivers, held)
    inputs = inputs_of(corrupted)
    other = record(pg, inputs, [*edges.sending, *edges.held, *edges.receiving], metric)
    check_same_shapes(run.values, other.values)
    comparison = MetricRange(run.measurement.values, other.measurement.values, normalize)
    edges.record(inputs, run.values, other.values)
    for text in edges.unreached:
        warn_each_time(text, ExperimentWarning)
    grid = component_grid(list(senders))
    of_sender = ["sender"] if grid is None else list(grid.axes)
    single = [] if isinstance(sender, list) or len(senders) > 1 else of_sender
    single += [] if isinstance(receiver, list) or len(receivers) > 1 else ["receiver"]

    def formed(swept: DataArray) -> DataArray:
        result: DataArray = swept.isel({name: 0 for name in single if name in swept.dims})
        result.attrs |= {"components": held, "remarks": [*result.attrs["remarks"], *edges.remarks()]}
        return result

    axes: dict[str, Any] = {"sender": list(senders), **({} if heads is None else {"head": range(heads)})}
    if not together:
        axes["receiver"] = list(receivers)

    def patches(*labels: Any) -> PatchMap:
        if together:
            return edges(parts[labels].label, *receivers)
        return edges(parts[labels[:-1]].label, labels[-1])

    return comparison.result_of(lambda: run_sweep(pg, axes, patches, inputs, metric=metric, **options), formed)


_Reached: TypeAlias = "tuple[Mapping[str, Tensor], Any]"
"""Some values of a run by path, and the output of the model."""


class _Edges:
    """The edges between senders and receivers, by label: a callable from the labels to the patches for these edges.

    The values at the paths `components` are held, except those that the sender is a part of.

    Attributes:
        held: The paths of the components, in the package's spelling.
        sending: The paths of the senders.
        receiving: The paths of the receivers.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        senders: Mapping[str, EdgeEnd],
        receivers: Mapping[str, EdgeEnd],
        components: Iterable[str],
    ) -> None:
        self._pg = pg
        self._senders, self._receivers = senders, receivers
        order = {path: number for number, path in enumerate(pg.nodes)}
        self._pairs = {
            (start, end)
            for start, end in itertools.product(senders, receivers)
            if not receivers[end].path or order[senders[start].path] < order[receivers[end].path]
        }
        if not self._pairs:
            start, end = next(iter(senders)), next(iter(receivers))
            hint = "name two values" if start == end else "are they swapped?"
            raise ExperimentError(
                f"receiver {end!r} does not run after sender {start!r}, so there is no edge between them; {hint}"
            )
        self._components = list(targets(pg, components).values())
        self._insides = _insides(pg)
        if parts := [target.text for target in self._components if target.index]:
            raise ExperimentError(f"components are held as a whole, but {parts[0]!r} is a part of a value")
        self.held = [target.path for target in self._components]
        self.sending = list(dict.fromkeys(end.path for end in senders.values()))
        self.receiving = list(dict.fromkeys(end.path for end in receivers.values() if end.path))
        self._unreached: dict[str, list[tuple[str, str | None]]] = {}
        self._through: dict[str, dict[str, list[Patch[Any]]]] = {}
        self._received: dict[tuple[str, str], Tensor] = {}

    def record(self, inputs: Inputs, clean: Mapping[str, Tensor], corrupted: Mapping[str, Tensor]) -> None:
        """Records the values of receivers that the clean value of each sender reaches directly.

        `inputs` are the corrupted ones; the clean values of senders, and the corrupted ones of all ends and components,
        are given by path.
        """
        has_output = not all(end.path for end in self._receivers.values())
        before = corrupted, self._reach(inputs, {}, [])[1] if has_output else None
        for start, sender in self._senders.items():
            patches: dict[str, list[Patch[Any]]] = {
                target.path: [ReplacePatch(value=corrupted[target.path])]
                for target in self._components
                if not self._lies_in(sender, target)
            }
            value = sender.part(clean[sender.path])
            patches[sender.path] = [sender.replaced(value)]
            self._through[start] = patches
            ends = [receiver for end, receiver in self._receivers.items() if (start, end) in self._pairs]
            if not ends:
                continue
            paths = [end.path for end in ends if end.path]
            run = self._reach(inputs, patches, paths)
            self._received |= {(start, end.label): end.part(run[0][end.path]) for end in ends if end.path}
            own = sender.part(corrupted[sender.path])
            if _is_same(value, own) or _differs_at(ends, run, before):
                continue
            why, component = _LOST, None
            factors = _LARGER if value.is_floating_point() else ()
            larger = ({sender.path: [sender.replaced(own + (value - own) * factor)]} for factor in factors)
            runs = (self._reach(inputs, patches | change, paths) for change in larger)
            if not any(_differs_at(ends, run, before, is_larger=True) for run in runs):
                component = self._blocking_component(inputs, patches, corrupted)
                why = "" if component is None else _BLOCKED
            self._unreached.setdefault(why, []).append((start, component))

    def _lies_in(self, sender: EdgeEnd, component: Target) -> bool:
        """Whether a sender is a component, a value in its module, or one that the component is computed from."""
        start = sender.target
        if start is None or sender.path == component.path:
            return start is not None
        inside = component.frame.path
        if component.node.kind == "output" and start.frame.path[: len(inside)] == inside:
            return True
        flow, insides = self._insides
        nodes = insides.get(component.path, frozenset())
        value = flow.resolve(start.node, start.dig)
        return value is not None and value.node in nodes

    def _blocking_component(
        self, inputs: Inputs, patches: Mapping[str, list[Patch[Any]]], corrupted: Mapping[str, Tensor]
    ) -> str | None:
        """Returns the first held component that a sender reaches, if any."""
        held = [path for path in self.held if path in patches]
        if not held:
            return None
        values, _ = self._reach(inputs, patches, held)
        order = {path: number for number, path in enumerate(self._pg.nodes)}
        reached = [path for path in held if not _is_same(values[path], corrupted[path])]
        return min(reached, key=order.__getitem__, default=None)

    def _reach(self, inputs: Inputs, patches: Mapping[str, list[Patch[Any]]], paths: Iterable[str]) -> _Reached:
        """Returns the values at `paths` in a run under `patches`: those of components before they are held."""
        probes = {path: ProbePatch() for path in paths}
        patch_map: PatchMap = {**patches, **{path: [probe, *patches.get(path, ())] for path, probe in probes.items()}}
        with torch.no_grad(), self._pg.patch(patch_map, strict=True):
            output = inputs.run(self._pg)
        return {path: probe.activation.detach() for path, probe in probes.items()}, output

    def __call__(self, start: str, *ends: str) -> PatchMap:
        patches: dict[str, list[Patch[Any]]] = {}
        for end in ends:
            if (start, end) not in self._pairs:
                continue
            receiver = self._receivers[end]
            if not receiver.path:
                return self._through[start]
            patches.setdefault(receiver.path, []).append(receiver.replaced(self._received[start, end]))
        return patches

    def remarks(self) -> list[str]:
        """Returns remarks about the edges."""
        count = len(self._senders) * len(self._receivers)
        found = []
        if missing := count - len(self._pairs):
            found.append(
                f"in {missing} of {count} pairs, the receiver does not run after the sender, and the metric is the "
                "corrupted one"
            )
        return [*found, *self.unreached]

    @property
    def unreached(self) -> list[str]:
        """Warnings of senders that do not reach any receiver."""
        texts = []
        for why, found in self._unreached.items():
            start, component = found[0]
            more = f" (and {len(found) - 1} others)" if len(found) > 1 else ""
            text = f"sender {start!r}{more} does not reach any receiver directly: the metric is the corrupted one"
            texts.append(text + why.format(component=component))
        return texts


_BLOCKED = (
    ". The first held component that it reaches is {component!r}; if this is what the sender itself adds to the model, "
    "leave it out of components="
)
_LOST = (
    ". No held component blocks it: a larger change in the same direction would reach a receiver, but this one is lost "
    "to rounding, or in a function that is flat there"
)
_LARGER = tuple(2.0**power for power in (10, 20, 30, 40, 60, 80, 100, 120))


def _differs_at(ends: Collection[EdgeEnd], run: _Reached, before: _Reached, *, is_larger: bool = False) -> bool:
    """Whether two runs differ at any of the given ends.

    In a run with a larger change, values that are not finite do not count, since they also spread through masks.
    """
    pairs = [(end.part(run[0][end.path]), end.part(before[0][end.path])) for end in ends if end.path]
    if len(pairs) < len(ends):
        pairs.append((run[1], before[1]))
    return any(not _is_same(value, other, but_overflow=is_larger) for value, other in pairs)


def _is_same(value: Any, other: Any, *, but_overflow: bool = False) -> bool:
    """Whether the tensors of two values are equal; optionally without the entries of `value` that are not finite."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(torch.where(value.isfinite(), value, other) if but_overflow else value, other)
    parts, others = readable_children(value) or [], readable_children(other) or []
    pairs = zip(parts, others, strict=False)
    return len(parts) == len(others) and all(_is_same(a, b, but_overflow=but_overflow) for (_, a), (_, b) in pairs)


def _insides(pg: PatchableGraph) -> tuple[Flow, dict[str, frozenset[Node]]]:
    """Returns the operations that compute what layers add to the stream from what their norms return, by its path.

    A module that returns it may be a part of them only: the norm behind attention in Gemma 2, for one.
    """
    found = find(pg.nodes.root)
    flow = found.evidence.trails.flow
    insides = {}
    for name, write in _writes(found):
        begin = -1 if write.norm is None else flow.order[write.norm.returned.value.node]
        nodes = [node for node in write.inside if flow.order[node] > begin]
        insides[found[f"{name}_out"].path] = frozenset(step for node in nodes for step in (node, *node.inner))
    return flow, insides


def _writes(found: Components) -> Iterator[tuple[str, Write]]:
    """Yields what layers add to the stream, with names such as `layers[1].mlp`."""
    for _, layers in found.evidence.stacks:
        yield from ((f"{layer.name}{named.kind}", named.write) for layer in layers for named in layer.writes)


def _read_by(pg: PatchableGraph, name: str) -> str | None:
    """Returns the receiver for a whole component, such as `layers[1].mlp`; `None` for other names."""
    found = find(pg.nodes.root)
    write = next((each for whole, each in _writes(found) if whole == name.replace("[*]", "[0]")), None)
    if write is None:
        return None
    # In a parallel or post-norm block, others read what the norm returns, too.
    users = found.evidence.trails.flow.users
    if write.norm is not None and set(users[write.norm.returned.value.node]) <= write.inside:
        return f"{write.norm.returned.path!r}, which it reads"
    return "the path of what it reads, the input of its module"


Endpoint: TypeAlias = "str | NodePath | tuple[str | NodePath, Any]"
"""A sender or receiver: a path, or a path and an index into its value (one head, one position)."""


@dataclass(frozen=True)
class EdgeEnd:
    """A sender or a receiver.

    Attributes:
        target: The node of its path; `None` for the output of the model.
        index: An index into the value; `None` for the whole value.
        name: The name of the component that it is; empty if it was given by its path.
    """

    target: Target | None
    index: Any = None
    name: str = ""

    @property
    def path(self) -> str:
        return "" if self.target is None else self.target.path

    @property
    def label(self) -> str:
        if self.index is None or self.name:
            return self.name or self.path or "output"
        return f"{self.path}[{index_text(self.index)}]"

    def part(self, value: Tensor) -> Tensor:
        """Returns a copy of this part of `value`."""
        shape = tuple(value.shape)
        try:
            part = value.clone() if self.index is None else value[self.index].clone()
            if not part.numel() and value.numel():
                raise IndexError("the index selects nothing")
            return part
        except (IndexError, TypeError) as error:
            raise ExperimentError(f"{self.label!r}: index does not fit the value of shape {shape}: {error}") from error

    def replaced(self, value: Tensor) -> Patch[Any]:
        """Returns a patch that replaces this part with `value`."""
        return ReplacePatch(value=value, slice=self.index)


def edge_ends(pg: PatchableGraph, given: Any, what: str) -> dict[str, EdgeEnd]:
    """Returns the given senders or receivers, by label."""
    found: dict[str, EdgeEnd] = {}
    for item in given if isinstance(given, list) else [given]:
        for end in _ends(pg, item, what):
            if end.label in found:
                raise ExperimentError(f"{what} has {end.label!r} more than once")
            found[end.label] = end
    if not found:
        raise ExperimentError(f"{what} is empty; give a path, or a list of paths")
    return found


def head_ends(
    pg: PatchableGraph, senders: Mapping[str, EdgeEnd], values: Mapping[str, Tensor], heads: int, inputs: Inputs
) -> dict[tuple[Any, ...], EdgeEnd]:
    """Returns the heads of senders, by label and number."""
    indexed = next((end for end in senders.values() if end.index is not None), None)
    if indexed is not None:
        raise ExperimentError(f"heads= splits senders, but {indexed.label!r} has an index; give one of the two")
    layout = head_layout(pg, {path: tuple(value.shape) for path, value in values.items()}, heads, inputs.rows)
    return {
        (start, head): replace(
            end, index=(*(slice(None),) * layout.dims[end.path], layout.part(end.path, head), ...), name=""
        )
        for start, end in senders.items()
        for head in range(heads)
    }


def _ends(pg: PatchableGraph, item: Any, what: str) -> list[EdgeEnd]:
    """Returns what an item of the senders or receivers means: several ends for `layers[*].attn_out`."""
    if item is None and what == "receiver":
        return [EdgeEnd(None)]
    path, index = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    if not isinstance(path, (str, NodePath)) or isinstance(index, (str, NodePath)):
        raise ExperimentError(
            f"a {what} must be a path, or a path and an index such as (path, (..., slice(0, 64))), not {item!r}; give "
            "several in a list"
        )
    ends = []
    if what == "receiver" and (read := _read_by(pg, str(path))) is not None:
        raise UnknownPathError(f"{str(path)!r} is a receiver of attribute_edges: write {read}")
    for target in targets(pg, [str(path)]).values():
        if not isinstance(target.spec, TensorSpec):
            raise ExperimentError(
                f"a {what} must be a tensor, but {target.text!r} was {target.spec} when it was captured"
            )
        if target.index and index is not None:
            raise ExperimentError(
                f"{target.text!r} is a part of a value already; write the index at the end of its name"
            )
        name = "" if target.component is None or index is not None else target.text
        end = EdgeEnd(replace(target, component=None), target.index or index, name)
        _check_rows(end)
        ends.append(end)
    return ends


def _check_rows(end: EdgeEnd) -> None:
    """Rejects integers in the first dimension of an index, which select rows of the batch instead of heads."""
    target, index = end.target, end.index
    if target is None or target.node.kind in HELD_KINDS:
        return
    first = index[0] if isinstance(index, tuple) and index else index
    shape = tuple(getattr(target.spec, "shape", ()))
    are_rows = isinstance(index, list) or (isinstance(index, Tensor) and index.dtype != torch.bool)
    if len(shape) < 2 or not (are_rows or (isinstance(first, int) and not isinstance(first, bool))):
        return
    path = target.path
    rows = f"({path!r}, ({index_text(index)},))"
    head = f"heads=..., or ({path!r}, (..., slice(0, size))) for the first head of that size"
    if isinstance(first, int):
        rest = ", ..." if isinstance(index, tuple) and len(index) > 1 else ","
        rows = f"({path!r}, (slice({first}, {first + 1 or None}){rest}))"
    if len(shape) > 3 and isinstance(first, int):
        head = f"({path!r}, (slice(None), {first})) if dimension 1 of its shape {shape} has them"
    raise ExperimentError(
        f"{end.label!r}: {index_text(first)} selects rows of the batch, the first dimension of the shape {shape}. "
        f"For a head, give {head}; for rows of the batch, give {rows}"
    )


_HOW_TO_GIVE = "give the values to hold, through which all other edges go: components=['h_0.attn.output', ...]"


def default_components(pg: PatchableGraph) -> list[str]:
    """Returns the paths of what the layers add to the residual stream, in order of execution: see `pg.components`."""
    found = find(pg.nodes.root)
    unknown = {name: reason for name, reason in found.missing.items() if name.endswith("]")}
    paths = {component.path for name, component in found.items() if name.endswith("_out")}
    if unknown or not paths:
        where, reason = next(iter(unknown.items()), ("layers[*]", "nothing is added to the residual stream"))
        raise ExperimentError(f"the components of {where} were not found: {reason}; {_HOW_TO_GIVE}")
    return [path for path in pg.nodes if path in paths]
