"""Path patching: what one value does to another directly, past all other components of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.experiments.engine.cells import PatchMap
from graphpatch_notebook.experiments.engine.inputs import Inputs, inputs_of
from graphpatch_notebook.experiments.methods.call_checks import (
    check_graph,
    check_metric,
    check_options,
    check_unsharded,
)
from graphpatch_notebook.experiments.methods.causal_tracing import Noise
from graphpatch_notebook.experiments.methods.comparisons import Comparison
from graphpatch_notebook.experiments.methods.components import default_components
from graphpatch_notebook.experiments.methods.edge_ends import EdgeEnd, End, edge_ends, head_ends
from graphpatch_notebook.experiments.methods.recordings import Paths, check_same_shapes, record, several_paths, targets
from graphpatch_notebook.experiments.methods.sweeps import sweep
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import Patch, ProbePatch, ReplacePatch
from graphpatch_notebook.values import readable_children
from graphpatch_notebook.warning_places import warn_each_time

if TYPE_CHECKING:
    from xarray import DataArray


def path_patch(
    pg: PatchableGraph,
    sender: End | list[End],
    receiver: End | list[End | None] | None,
    clean: Any,
    corrupted: Any,
    metric: Callable[[Any], Any],
    *,
    components: Paths | None = None,
    heads: int | None = None,
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
        heads: Let each of so many heads of the senders through by itself; these are then values in which heads are
            apart (`h_0.attn.c_proj.x`, the input of the output projection), as for `ablate`.
        normalize: Return (value - corrupted) / (clean - corrupted).
        **options: As for `pg.sweep`: `batch`, `progress`, `checkpoint`, `checkpoint_key`,
            `executor`, `recipe`.

    Returns:
        An array with dimensions `sender`, `head` (with `heads`) and `receiver`; of senders and receivers there is one
        where a list was given. Its `attrs` have the metric on
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
    check_unsharded(pg, "path_patch")
    check_metric(metric)
    check_options(options, path_patch, sweep)
    if isinstance(corrupted, (Noise, type)):
        raise ExperimentError(f"corrupted is {corrupted!r}; give inputs as for clean (noise is for causal_trace)")
    senders, receivers = edge_ends(pg, sender, "sender"), edge_ends(pg, receiver, "receiver")
    held = default_components(pg) if components is None else several_paths(pg, components, "components")
    run = record(pg, inputs_of(clean), dict.fromkeys(end.path for end in senders.values()), metric)
    run.warn_if_random(pg)
    parts = {(start,): end for start, end in senders.items()}
    if heads is not None:
        parts = head_ends(pg, senders, run.values, heads, inputs_of(clean))
    edges = _Edges(pg, {end.label: end for end in parts.values()}, receivers, held)
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

    axes = {"sender": list(senders), **({} if heads is None else {"head": range(heads)}), "receiver": list(receivers)}

    def patches(*labels: Any) -> PatchMap:
        return edges(parts[labels[:-1]].label, labels[-1])

    return comparison.result_of(lambda: sweep(pg, axes, patches, inputs, metric=metric, **options), formed)


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
    """The edges between some senders and receivers: a callable from the labels of these to the patches for the edge.

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
                f"receiver {end!r} does not run after sender {start!r}, so no edge leads there; {hint}"
            )
        self._components = list(targets(pg, components).values())
        self.held = [target.path for target in self._components]
        self.sending = list(dict.fromkeys(end.path for end in senders.values()))
        self.receiving = list(dict.fromkeys(end.path for end in receivers.values() if end.path))
        self._unreached: dict[str, list[tuple[str, str | None]]] = {}
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
            paths = [end.path for end in ends.values()]
            run = self._reach(inputs, patches, paths)
            self._received |= {
                (start, end): receiver.part(run.values[receiver.path])
                for end, receiver in ends.items()
                if receiver.path
            }
            before, own = _Reached(corrupted, run.has_output, without), sender.part(corrupted[sender.path])
            if _is_same(value, own) or _gets_to(ends.values(), run, before):
                continue
            why, component = _TOO_SMALL, None
            if not any(
                _gets_to(
                    ends.values(), self._reach(inputs, patches | {sender.path: [larger]}, paths), before, is_larger=True
                )
                for larger in _larger_changes(sender, own, value)
            ):
                component = self._in_the_way(inputs, patches, corrupted)
                why = "" if component is None else _IN_THE_WAY
            self._unreached.setdefault(why, []).append((start, component))

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
        return [*found, *self._unreached_texts()]

    def warn_of_unreached(self) -> None:
        """Warns of senders of which nothing gets to any receiver, if there are such."""
        for text in self._unreached_texts():
            warn_each_time(text, ExperimentWarning)

    def _unreached_texts(self) -> list[str]:
        texts = []
        for why, found in self._unreached.items():
            start, component = found[0]
            more = f" (and {len(found) - 1} others)" if len(found) > 1 else ""
            text = f"nothing of sender {start!r}{more} gets to any receiver directly: the metric is the corrupted one"
            texts.append(text + why.format(component=component))
        return texts


_IN_THE_WAY = (
    ". It is component {component!r} that takes it up first and is held; if that is what the sender itself adds to the "
    "model, leave it out of components="
)
_TOO_SMALL = (
    ". No held component is in its way: a larger change in the same direction would get there, but this one is lost "
    "to the rounding of what it is added to or in a function that is flat there"
)
_LARGER = (2.0**10, 2.0**20, 2.0**30, 2.0**40)


def _larger_changes(sender: EdgeEnd, own: Tensor, value: Tensor) -> Iterator[Patch[Any]]:
    """Yields patches that change a sender like its clean value does, but by more."""
    if value.is_floating_point():
        yield from (sender.replaced(own + (value - own) * factor) for factor in _LARGER)


def _gets_to(ends: Iterable[EdgeEnd], run: _Reached, before: _Reached, *, is_larger: bool = False) -> bool:
    """Whether a run gave anything else than another one at any of some ends.

    In a run with a larger change, what overflowed does not count: masked values that are not finite get everywhere.
    """
    if run.has_output and not _is_same(run.output, before.output, but_overflow=is_larger):
        return True
    pairs = ((end.part(run.values[end.path]), end.part(before.values[end.path])) for end in ends if end.path)
    return any(not _is_same(value, other, but_overflow=is_larger) for value, other in pairs)


def _is_same(value: Any, other: Any, *, but_overflow: bool = False) -> bool:
    """Whether the tensors of two values are the same numbers; those that overflowed in `value` may be left out."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(torch.where(value.isfinite(), value, other) if but_overflow else value, other)
    parts, others = readable_children(value) or [], readable_children(other) or []
    pairs = zip(parts, others, strict=False)
    return len(parts) == len(others) and all(_is_same(a, b, but_overflow=but_overflow) for (_, a), (_, b) in pairs)


def _lies_in(sender: EdgeEnd, component: Target) -> bool:
    """Whether a sender is what a component returns, or a value that it is made of inside the component's module."""
    if sender.target is None or component.node.kind != "output":
        return sender.path == component.path
    inside = component.frame.path
    return sender.target.frame.path[: len(inside)] == inside
