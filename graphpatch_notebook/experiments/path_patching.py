"""Path patching: what one value does to another directly, past all other components of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.experiments.call_checks import check_graph, check_metric, check_options
from graphpatch_notebook.experiments.cells import PatchMap
from graphpatch_notebook.experiments.comparisons import Comparison
from graphpatch_notebook.experiments.components import default_components
from graphpatch_notebook.experiments.inputs import Inputs, inputs_of
from graphpatch_notebook.experiments.recordings import Paths, check_same_shapes, record, several_paths, targets
from graphpatch_notebook.experiments.sweep import sweep
from graphpatch_notebook.experiments.tracing import Noise
from graphpatch_notebook.node_path import NodePath
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches import Patch, ProbePatch, ReplacePatch
from graphpatch_notebook.resolution import Target
from graphpatch_notebook.values import TensorSpec, readable_children
from graphpatch_notebook.warning_places import warn_each_time

if TYPE_CHECKING:
    from xarray import DataArray

End: TypeAlias = "str | NodePath | tuple[str | NodePath, Any]"
"""Where an edge begins or ends: a path, or a path and an index into its value (one head, one position)."""

OUTPUT = "output"


def path_patch(
    pg: PatchableGraph,
    sender: End | list[End],
    receiver: End | list[End | None] | None,
    clean: Any,
    corrupted: Any,
    metric: Callable[[Any], Any],
    *,
    components: Paths | None = None,
    normalize: bool = False,
    **options: Any,
) -> DataArray:
    """Returns what the metric gives on the corrupted inputs when a clean value gets through one edge.

    The edge leads from the sender to the receiver directly, past all other components of the model. Exactly:

    1. The sender's value is recorded on the clean inputs, the outputs of all components on the corrupted ones.
    2. The model runs on the corrupted inputs with the clean value at the sender and all components held at their
       corrupted values; what the receiver would be then is recorded. What is no component (the residual stream, norms)
       is computed anew. A component that the sender lies in is not held: it hands on what the sender changes.
    3. The model runs on the corrupted inputs with only the receiver replaced, by that value. Everything after it is
       computed anew. The metric is that of this run; for the receiver `None`, that of the run in step 2.

    Args:
        pg: The graph.
        sender: A path, such as `h_0.attn.output|sub_0`; or a path and an index, for one head
            (`("h_0.attn.c_proj.x", (..., slice(0, 64)))`); or a list of these.
        receiver: Likewise: what a component returns, what it is given (`h_3.attn.hidden_states`), or a value in it
            (`h_3.attn.query_states`); `None` (also in a list) for the output of the model.
        clean: The clean inputs: a tuple of arguments, a dict of keyword arguments, or one value.
        corrupted: Other inputs of the same shapes.
        metric: From the output of the model to a number (see `LogitDifference` and others), or to several by name.
        components: The paths that are held. Where they are not given: the outputs of the submodules with matrices that
            the layers of the model's stacks call, so attentions and MLPs, if that can be told.
        normalize: Return (value - corrupted) / (clean - corrupted).
        **options: As for `pg.sweep`: `batch`, `progress`, `checkpoint`, `executor`, `recipe`.

    Returns:
        An array with dimensions `sender` and `receiver`, each where a list was given. Its `attrs` have the metric on
        the inputs as they are, `clean` and `corrupted`, and the `components`. Where lists have pairs in which the
        receiver runs before the sender, no edge leads there and the metric is the corrupted one. An `ExperimentWarning`
        says so where a sender gets to no receiver, because what it does is held in a component right after it.

    Raises:
        ExperimentError: Before the sweep: components cannot be told, values differ in shape between clean and corrupted
            inputs, or no receiver runs after a sender.
        UnknownPathError: There are no such paths; the message names the nearest.

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
    check_options(options, path_patch, sweep)
    if isinstance(corrupted, (Noise, type)):
        raise ExperimentError(f"corrupted is {corrupted!r}; give inputs as for clean (noise is for causal_trace)")
    senders, receivers = _ends(pg, sender, "sender"), _ends(pg, receiver, "receiver")
    held = default_components(pg) if components is None else several_paths(pg, components, "components")
    edges = _Edges(pg, senders, receivers, held)
    run = record(pg, inputs_of(clean), edges.sending, metric)
    run.warn_if_random(pg)
    inputs = inputs_of(corrupted)
    other = record(pg, inputs, [*edges.sending, *edges.held, *edges.receiving], metric)
    check_same_shapes(run.values, other.values, ("clean", "corrupted"))
    comparison = Comparison(run.measurement.values, other.measurement.values, normalize)
    edges.record(inputs, run.values, other.values)
    edges.warn_of_unreached()
    are_listed = {"sender": isinstance(sender, list), "receiver": isinstance(receiver, list)}

    def formed(swept: DataArray) -> DataArray:
        result: DataArray = swept.isel({name: 0 for name, is_listed in are_listed.items() if not is_listed})
        result.attrs |= {"components": held, "remarks": [*result.attrs["remarks"], *edges.remarks()]}
        return result

    axes = {"sender": list(senders), "receiver": list(receivers)}
    return comparison.result_of(lambda: sweep(pg, axes, edges, inputs, metric=metric, **options), formed)


@dataclass(frozen=True)
class _End:
    """Where an edge begins or ends.

    Attributes:
        target: What its path means; `None` for the output of the model.
        index: What of the value is meant; `None` for all of it.
    """

    target: Target | None
    index: Any = None

    @property
    def path(self) -> str:
        return "" if self.target is None else self.target.path

    @property
    def label(self) -> str:
        if self.index is None:
            return self.path or OUTPUT
        return f"{self.path}[{index_text(self.index)}]"

    def part(self, value: Tensor) -> Tensor:
        """Returns a copy of what of `value` is meant."""
        try:
            return value.clone() if self.index is None else value[self.index].clone()
        except (IndexError, TypeError) as error:
            shape = tuple(value.shape)
            raise ExperimentError(f"{self.label!r}: no such part of the value, of shape {shape}: {error}") from error

    def replaced(self, value: Tensor) -> Patch[Any]:
        """Returns the patch that puts `value` there."""
        return ReplacePatch(value=value, slice=self.index)


@dataclass(frozen=True)
class _Reached:
    """What a run gave.

    Attributes:
        values: Some values, by path.
        has_output: Whether the output of the model was asked for.
        output: That output.
    """

    values: Mapping[str, Tensor]
    has_output: bool = False
    output: Any = None


class _Edges:
    """The edges between some senders and receivers: a callable from the labels of an edge to the patches for it.

    Args:
        pg: The graph.
        senders: Where edges begin, by label.
        receivers: Where they end.
        components: The paths that are held where an edge does not lead through them.

    Attributes:
        held: The paths of the components, as the package writes them.
        sending: The paths of the senders.
        receiving: The paths of the receivers.

    Raises:
        ExperimentError: There is no edge: all receivers run before all senders.
    """

    def __init__(
        self, pg: PatchableGraph, senders: Mapping[str, _End], receivers: Mapping[str, _End], components: Iterable[str]
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
            raise ExperimentError(
                f"receiver {end!r} does not run after sender {start!r}, so no edge leads there; are they swapped?"
            )
        self._components = list(targets(pg, components).values())
        self.held = [target.path for target in self._components]
        self.sending = list(dict.fromkeys(end.path for end in senders.values()))
        self.receiving = list(dict.fromkeys(end.path for end in receivers.values() if end.path))
        self._unreached: dict[str, str | None] = {}
        self._through: dict[str, dict[str, list[Patch[Any]]]] = {}
        self._received: dict[tuple[str, str], Tensor] = {}

    def record(self, inputs: Inputs, clean: Mapping[str, Tensor], corrupted: Mapping[str, Tensor]) -> None:
        """Records what receivers are where a sender's clean value reaches them directly.

        Args:
            inputs: The corrupted inputs.
            clean: The clean values of the senders, by path.
            corrupted: The corrupted values of senders, components and receivers, by path.
        """
        without = self._reach(inputs, {}, [""]).output if "" in {end.path for end in self._receivers.values()} else None
        for start, sender in self._senders.items():
            patches: dict[str, list[Patch[Any]]] = {
                target.path: [ReplacePatch(value=corrupted[target.path])]
                for target in self._components
                if not _lies_in(sender, target)
            }
            value = sender.part(clean[sender.path])
            patches[sender.path] = [sender.replaced(value)]
            self._through[start] = patches
            ends = {end: receiver for end, receiver in self._receivers.items() if (start, end) in self._pairs}
            if not ends:
                continue
            run = self._reach(inputs, patches, [end.path for end in ends.values()])
            received = {
                end: receiver.part(run.values[receiver.path]) for end, receiver in ends.items() if receiver.path
            }
            self._received |= {(start, end): part for end, part in received.items()}
            is_reached = run.has_output and not _is_same(run.output, without)
            for end, part in received.items():
                is_reached = is_reached or not _is_same(part, ends[end].part(corrupted[ends[end].path]))
            if not is_reached and not _is_same(value, sender.part(corrupted[sender.path])):
                self._unreached[start] = self._in_the_way(inputs, patches, corrupted)

    def _in_the_way(
        self, inputs: Inputs, patches: Mapping[str, list[Patch[Any]]], corrupted: Mapping[str, Tensor]
    ) -> str | None:
        """Returns the first held component that a sender reaches, if there is one."""
        held = [path for path in self.held if path in patches]
        values = self._reach(inputs, patches, held).values
        order = {path: number for number, path in enumerate(self._pg.nodes)}
        reached = [path for path in held if not _is_same(values[path], corrupted[path])]
        return min(reached, key=order.__getitem__, default=None)

    def _reach(self, inputs: Inputs, patches: Mapping[str, list[Patch[Any]]], paths: Iterable[str]) -> _Reached:
        """Returns what values are in a run under `patches`, components before they are held."""
        probes = {path: ProbePatch() for path in paths}
        has_output = probes.pop("", None) is not None
        if not probes and not has_output:
            return _Reached({})
        patch_map: dict[str | NodePath, list[Patch[Any]]] = {path: list(listed) for path, listed in patches.items()}
        for path, probe in probes.items():
            patch_map[path] = [probe, *patches.get(path, ())]
        fresh = inputs.fresh()
        with torch.no_grad(), self._pg.patch(patch_map, strict=True):
            output = self._pg(*fresh.args, **fresh.kwargs)
        values = {path: probe.activation.detach() for path, probe in probes.items()}
        return _Reached(values, has_output, output if has_output else None)

    def __call__(self, start: str, end: str) -> PatchMap:
        if (start, end) not in self._pairs:
            return {}
        receiver = self._receivers[end]
        if not receiver.path:
            return self._through[start]
        return {receiver.path: receiver.replaced(self._received[start, end])}

    def remarks(self) -> list[str]:
        """Returns what is to be known of the edges, in words."""
        count = len(self._senders) * len(self._receivers)
        found = []
        if missing := count - len(self._pairs):
            found.append(
                f"in {missing} of {count} pairs the receiver does not run after the sender: the metric is the "
                "corrupted one"
            )
        return [*found, *([self._unreached_text()] if self._unreached else [])]

    def warn_of_unreached(self) -> None:
        """Warns of senders of which nothing gets to any receiver, if there are such."""
        if self._unreached:
            warn_each_time(self._unreached_text(), ExperimentWarning)

    def _unreached_text(self) -> str:
        start, component = next(iter(self._unreached.items()))
        more = f" (and {len(self._unreached) - 1} others)" if len(self._unreached) > 1 else ""
        text = f"nothing of sender {start!r}{more} gets to any receiver directly: the metric is the corrupted one"
        if component is None:
            return text
        return (
            f"{text}. It is component {component!r} that takes it up first and is held; if that is what the sender "
            "itself adds to the model, leave it out of components="
        )


def _is_same(value: Any, other: Any) -> bool:
    """Whether the tensors of two values are the same numbers."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    parts, others = readable_children(value) or [], readable_children(other) or []
    return len(parts) == len(others) and all(_is_same(a, b) for (_, a), (_, b) in zip(parts, others, strict=True))


def _lies_in(sender: _End, component: Target) -> bool:
    """Whether a sender is what a component returns, or a value that it is made of inside the component's module."""
    if sender.target is None or component.node.kind != "output":
        return sender.path == component.path
    inside = component.frame.path
    return sender.target.frame.path[: len(inside)] == inside


def _ends(pg: PatchableGraph, given: Any, what: str) -> dict[str, _End]:
    """Returns the ends of edges that a user gave, by label."""
    found: dict[str, _End] = {}
    for item in given if isinstance(given, list) else [given]:
        end = _end(pg, item, what)
        if end.label in found:
            raise ExperimentError(f"{what} has {end.label!r} more than once")
        found[end.label] = end
    if not found:
        raise ExperimentError(f"{what} is empty: give a path, or a list of some")
    return found


def _end(pg: PatchableGraph, item: Any, what: str) -> _End:
    if item is None and what == "receiver":
        return _End(None)
    path, index = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    if not isinstance(path, (str, NodePath)) or isinstance(index, (str, NodePath)):
        raise ExperimentError(
            f"a {what} is a path, or a path and an index such as (path, (..., slice(0, 64))), not {item!r}; give "
            "several in a list"
        )
    target = targets(pg, [str(path)])[str(path)]
    if not isinstance(target.spec, TensorSpec):
        raise ExperimentError(f"a {what} is a tensor, but {target.path!r} was {target.spec} when it was captured")
    return _End(target, index)


def index_text(index: Any) -> str:
    """Returns an index as it stands between brackets.

    Example:
        >>> index_text((..., 3, slice(0, 64)))
        '..., 3, 0:64'
    """
    if isinstance(index, tuple):
        return ", ".join(map(index_text, index))
    if isinstance(index, slice):
        parts = ["" if part is None else str(part) for part in (index.start, index.stop, index.step)]
        return ":".join(parts if parts[2] else parts[:2])
    return "..." if index is Ellipsis else str(index)
