"""Path patching: the direct effect of one value on another, without all other components of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.capture.modules import plain_tensors
from graphpatch_notebook.capture.records import Node
from graphpatch_notebook.components import find
from graphpatch_notebook.components.flow import Flow
from graphpatch_notebook.errors import ExperimentError, warn_each_time
from graphpatch_notebook.experiments.engine.cells import PatchMap
from graphpatch_notebook.experiments.engine.inputs import (
    Inputs,
    MetricRange,
    OverExamples,
    Paths,
    check_graph,
    check_metric,
    check_same_shapes,
    inputs_of,
    record,
    several_paths,
    targets,
)
from graphpatch_notebook.experiments.methods.sweeps import run_sweep
from graphpatch_notebook.experiments.results import component_grid
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import Patch, ProbePatch, ReplacePatch
from graphpatch_notebook.patching.model_state import runs_where_the_model_is
from graphpatch_notebook.values import TensorSpec

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
    together: bool = False,
    normalize: bool = False,
    batch_size: int | None = None,
    keep_examples: bool = False,
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
        sender: A path, such as `h_0.attn.output|sub_0`; names of heads (`layers[*].attn.heads[*].z`) or of other parts
            (`layers[0].mlp_out[:, -1]`); or a list of these.
        receiver: In the same form: the output of a component, an input (`h_3.attn.hidden_states`), or a value in it
            (`h_3.attn.query_states`); `None` (also in a list) for the output of the model.
        clean: The inputs that the senders' values are from (`x_new`): a tuple of arguments, a dict of keyword
            arguments, or one value.
        corrupted: The inputs that the model runs on, and is held at (`x_orig`); of the same shapes.
        metric: Maps the output of the model to a number (see `LogitDifference` and others), or to a dict of numbers.
        components: The paths that are held. By default, what attentions, MLPs and other parts of the layers add to the
            residual stream, if this can be found: the values that `pg.components` calls `attn_out`, `mlp_out`, ...
        together: Replaces all receivers at once, such as the queries of all heads of one kind: the edges of a sender
            to each of them are one cell, and the result has no dimension `receiver`.
        normalize: Return (value - corrupted) / (clean - corrupted).
        batch_size: For datasets in place of `clean` and `corrupted`, as for `causal_trace`.
        keep_examples: As for `causal_trace`.
        **options: As for `pg.sweep`: `batch`, `progress`, `checkpoint`, `checkpoint_key`,
            `executor`, `recipe`.

    Returns:
        An array with the dimensions `sender` (for a list) and `receiver` (for a list, unless `together`). Senders that
        are components have the dimensions `layer` and `head` in place of `sender`. Its `attrs` contain the metric
        without patches, `clean` and `corrupted`, and the `components`. If a receiver runs before a sender, there is no
        edge and the metric is the corrupted one. A `GraphPatchWarning` names senders that do not reach any receiver.

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
    if examples := OverExamples({"clean": clean, "corrupted": corrupted}, batch_size, keep_examples):
        return examples.run(  # type: ignore[no-any-return]
            pg, path_patch, each={"metric": metric}, sender=sender, receiver=receiver, components=components,
            together=together, normalize=normalize, **options,
        )  # fmt: skip
    check_metric(metric)
    senders, receivers = edge_ends(pg, sender, "sender"), edge_ends(pg, receiver, "receiver")
    if together and not all(end.path for end in receivers.values()):
        raise ExperimentError("together=True is for receivers in the model, but one of them is its output (None)")
    held = default_components(pg) if components is None else several_paths(pg, components, "components")
    run = record(pg, inputs_of(pg, clean), dict.fromkeys(end.path for end in senders.values()), metric)
    run.warn_if_random()
    edges = _Edges(pg, senders, receivers, held)
    inputs = inputs_of(pg, corrupted)
    ends = [end.path for end in (*senders.values(), *receivers.values()) if end.path]
    other = record(pg, inputs, dict.fromkeys([*ends, *edges.held]), metric)
    check_same_shapes(run.values, other.values)
    comparison = MetricRange(run.measurement.values, other.measurement.values, normalize)
    unreached = edges.record(inputs, run.values, other.values)
    remarks, count = [], len(senders) * len(receivers)
    if missing := count - len(edges.pairs):
        why = "the receiver does not run after the sender, and the metric is the corrupted one"
        remarks.append(f"in {missing} of {count} pairs, {why}")
    if unreached:
        remarks.append(
            f"the senders {unreached} do not reach any receiver directly, so the metric is the corrupted one: a held "
            "component is in between (if it is what the sender itself adds to the model, leave it out of components=), "
            "or the change is lost to rounding"
        )
        warn_each_time(remarks[-1], "experiment")
    grid = component_grid(list(senders))
    of_sender = ["sender"] if grid is None else list(grid.axes)
    single = [] if isinstance(sender, list) or len(senders) > 1 else of_sender
    single += [] if isinstance(receiver, list) or len(receivers) > 1 else ["receiver"]

    def formed(swept: DataArray) -> DataArray:
        result: DataArray = swept.isel({name: 0 for name in single if name in swept.dims})
        result.attrs |= {"components": held, "remarks": [*result.attrs["remarks"], *remarks]}
        return result

    axes = {"sender": list(senders)} | ({} if together else {"receiver": list(receivers)})

    def patches(start: str, *ends: str) -> PatchMap:
        return edges(start, *(ends or receivers))

    return comparison.result_of(lambda: run_sweep(pg, axes, patches, inputs, metric=metric, **options), formed)


class _Edges:
    """The edges between senders and receivers, by label: a callable from the labels to the patches for these edges.

    The values at the paths `components` are held, except those that the sender is a part of.

    Attributes:
        held: The paths of the components, in the package's spelling.
        pairs: The labels of a sender and a receiver that have an edge.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        senders: Mapping[str, EdgeEnd],
        receivers: Mapping[str, EdgeEnd],
        components: Iterable[str],
    ) -> None:
        self._pg, self._senders, self._receivers = pg, senders, receivers
        order = {path: number for number, path in enumerate(pg.nodes)}
        self.pairs = {
            (start, end)
            for start, sender in senders.items()
            for end, receiver in receivers.items()
            if not receiver.path or order[sender.path] < order[receiver.path]
        }
        if not self.pairs:
            raise ExperimentError(
                f"no receiver runs after a sender, so there is no edge from {list(senders)} to {list(receivers)}; are "
                "they swapped?"
            )
        self._components = list(targets(pg, components).values())
        self._flow, self._insides = _insides(pg)
        if parts := [target.text for target in self._components if target.index]:
            raise ExperimentError(f"components are held as a whole, but {parts[0]!r} is a part of a value")
        self.held = [target.path for target in self._components]
        self._through: dict[str, PatchMap] = {}
        self._received: dict[tuple[str, str], Tensor] = {}

    def record(
        self,
        inputs: Inputs,
        clean: Mapping[str, Tensor],
        corrupted: Mapping[str, Tensor],
    ) -> list[str]:
        """Records the values of receivers that each sender's clean value reaches; returns senders that reach none.

        `inputs` are the corrupted ones. The clean values of senders, and the corrupted ones of all ends and components,
        are given by path.
        """
        unreached = []
        with torch.no_grad():
            before = None if all(end.path for end in self._receivers.values()) else inputs.run(self._pg)
        for start, sender in self._senders.items():
            components = [target.path for target in self._components if not self._lies_in(sender, target)]
            value = sender.part(clean[sender.path])
            patches = {path: ReplacePatch(value=corrupted[path]) for path in components}
            self._through[start] = {**patches, sender.label: ReplacePatch(value=value)}
            ends = [receiver for end, receiver in self._receivers.items() if (start, end) in self.pairs]
            probes: dict[Any, ProbePatch] = {end.path: ProbePatch() for end in ends if end.path}
            # Probes come first: they read what a held receiver computes.
            with torch.no_grad(), self._pg.patch(probes), self._pg.patch(self._through[start]):
                output = inputs.run(self._pg)
            is_changed = len(ends) > len(probes) and not all(
                map(torch.equal, plain_tensors(output), plain_tensors(before))
            )
            for end in ends:
                if end.path:
                    part = end.part(probes[end.path].activation.detach())
                    self._received[start, end.label] = part
                    is_changed |= not torch.equal(part, end.part(corrupted[end.path]))
            if ends and not is_changed and not torch.equal(value, sender.part(corrupted[sender.path])):
                unreached.append(start)
        return unreached

    def _lies_in(self, sender: EdgeEnd, component: Target) -> bool:
        """Whether a sender is a component, a value in its module, or one that the component is computed from."""
        start = sender.target
        if start is None or sender.path == component.path:
            return start is not None
        inside = component.frame.path
        if component.node.kind == "output" and start.frame.path[: len(inside)] == inside:
            return True
        value = self._flow.resolve(start.node, start.dig)
        return value is not None and value.node in self._insides.get(component.path, ())

    def __call__(self, start: str, *ends: str) -> PatchMap:
        patches: dict[str, list[Patch[Any]]] = {}
        for end in ends:
            if (start, end) not in self.pairs:
                continue
            receiver = self._receivers[end]
            if not receiver.path:
                return self._through[start]
            patches.setdefault(end, []).append(ReplacePatch(value=self._received[start, end]))
        return patches


def _insides(pg: PatchableGraph) -> tuple[Flow, dict[str, frozenset[Node]]]:
    """Returns the operations that compute what layers add to the stream from what their norms return, by its path.

    A module that returns it may be a part of them only: the norm behind attention in Gemma 2, for one.
    """
    found = find(pg.nodes.root)
    flow = found.evidence.trails.flow
    insides = {}
    for layer in (layer for stack in found.evidence.stacks for layer in stack.layers.values()):
        for kind, write in layer.writes.items():
            begin = -1 if write.norm is None else flow.order[write.norm.returned.value.node]
            nodes = [node for node in write.inside if flow.order[node] > begin]
            steps = frozenset(step for node in nodes for step in (node, *node.inner))
            insides[found[f"{layer.name}{kind}_out"].path] = steps
    return flow, insides


Endpoint: TypeAlias = "str | NodePath"
"""A sender or receiver: a path, or the name of components."""


@dataclass(frozen=True)
class EdgeEnd:
    """A sender or a receiver: a value, or `None` for the output of the model."""

    target: Target | None

    @property
    def path(self) -> str:
        return "" if self.target is None else self.target.path

    @property
    def label(self) -> str:
        return "output" if self.target is None else self.target.text

    def part(self, value: Tensor) -> Tensor:
        """Returns a copy of this part of the value at the path."""
        component = None if self.target is None else self.target.component
        return (value if component is None else component.seen(value)[component.index]).clone()


def edge_ends(pg: PatchableGraph, given: Any, what: str) -> dict[str, EdgeEnd]:
    """Returns the given senders or receivers, by label: several for `layers[*].attn_out`."""
    found: dict[str, EdgeEnd] = {}
    for item in given if isinstance(given, list) else [given]:
        is_output = item is None and what == "receiver"
        if not is_output and not isinstance(item, (str, NodePath)):
            raise ExperimentError(f"a {what} must be a path, not {item!r}; give several in a list")
        for target in [None] if is_output else targets(pg, [str(item)]).values():
            end = EdgeEnd(target)
            if target is not None and not isinstance(target.spec, TensorSpec):
                raise ExperimentError(f"{target.text!r} must be a tensor, but was {target.spec} when it was captured")
            if end.label in found:
                raise ExperimentError(f"{what} has {end.label!r} more than once")
            found[end.label] = end
    if not found:
        raise ExperimentError(f"{what} is empty; give a path, or a list of paths")
    return found


def default_components(pg: PatchableGraph) -> list[str]:
    """Returns the paths of what the layers add to the residual stream, in order of execution: see `pg.components`."""
    found = find(pg.nodes.root)
    unknown = {name: reason for name, reason in found.missing.items() if name.endswith("]")}
    paths = {component.path for name, component in found.items() if name.endswith("_out")}
    if unknown or not paths:
        where, reason = next(iter(unknown.items()), ("layers[*]", "nothing is added to the residual stream"))
        raise ExperimentError(
            f"the components of {where} were not found: {reason}; give the values to hold: components=[...]"
        )
    return [path for path in pg.nodes if path in paths]
