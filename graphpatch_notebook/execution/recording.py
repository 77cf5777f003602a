"""Values of a run by path: what `pg.record` and `pg.run_until` return."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from graphpatch_notebook.capture.held_values import memory_of
from graphpatch_notebook.components import Weights
from graphpatch_notebook.components.names import is_component_name, parse_name
from graphpatch_notebook.errors import ExperimentError, GraphError, PatchValueError, UnknownPathError
from graphpatch_notebook.execution.captured_model import CapturedModel
from graphpatch_notebook.execution.context import PatchContext, innermost
from graphpatch_notebook.execution.splices import is_part_of_splice
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patches.kinds import ProbePatch, RunStopped
from graphpatch_notebook.patches.selections import PositionSelection
from graphpatch_notebook.patches.slices import index_problem, selection_problem
from graphpatch_notebook.paths import nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from xarray import DataArray


@dataclass(eq=False)
class _Keeping(ProbePatch):
    """A probe that converts the value, and ends the run when it is the last of several.

    Attributes:
        waiting: The probes of the run that have not fired.
        convert: Converts the value.
        is_stopping: Whether the run ends when none is waiting.
    """

    only_keeps: ClassVar[bool] = True
    waiting: set[_Keeping] = field(kw_only=True)
    convert: Callable[[Any], Any] | None = field(kw_only=True)
    is_stopping: bool = field(kw_only=True)

    def op(self, original_output: Any) -> Any:
        super().op(original_output if self.convert is None else self.convert(original_output))
        self.waiting.discard(self)
        if self.is_stopping and not self.waiting:
            raise RunStopped(original_output, self)
        return original_output


_Keeping.__name__ = "pg.record"  # what messages say of a patch, and what the user called


class Recording(Mapping[str, Any]):
    """Values of one run by path, in the order of the patterns that asked for them. Read-only.

    A value is found by all of its names: its path, the name of a component, or of a part of one (a view).
    The tensors are the model's own, as in `ProbePatch.activation`: with gradients on, gradients reach them.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> recording = PatchableGraph(model, torch.ones(1, 2)).record("sub_*.output", torch.ones(3, 2))
        >>> recording
        <Recording of 2 values>
        sub_0.output: Tensor(3, 2)
        sub_1.output: Tensor(3, 2)
        >>> tuple(torch.stack(list(recording.values())).shape)
        (2, 3, 2)
    """

    def __init__(self, probes: Mapping[str, ProbePatch], captured: CapturedModel, *, is_whole: bool) -> None:
        self._probes = dict(probes)
        self._captured = weakref.ref(captured)  # a recording does not keep the model
        self._is_whole = is_whole

    def __getitem__(self, path: object) -> Any:
        text = str(path)
        probe = self._probes.get(text)
        return self._by_other_name(text) if probe is None else probe.activation

    def _by_other_name(self, text: str) -> Any:
        if (results := self._results_named(text)) and len(results) == 1 and results[0] in self._probes:
            return self._probes[results[0]].activation
        targets = self._targets_of(text)
        if len(targets) > 1:
            names = ", ".join(repr(target.text) for target in targets[:3])
            raise UnknownPathError(f"{text!r} means {len(targets)} values ({names}, ...): ask for one at a time")
        for target in targets:
            for name, recorded in self._names_by_path.get(target.path, ()):
                if recorded.index == target.index:
                    return self._probes[name].activation
                if not recorded.index and self._is_whole:
                    return _part(self._probes[name].activation, target)
        close = ", ".join(map(repr, nearest(text, list(self._probes))))
        raise UnknownPathError(f"{text!r} was not recorded" + (f"; nearest: {close}" if close else ""))

    @functools.cached_property
    def _names_by_path(self) -> dict[str, list[tuple[str, Target]]]:
        found: dict[str, list[tuple[str, Target]]] = {}
        for name in self._probes:
            for target in self._targets_of(name):
                found.setdefault(target.path, []).append((name, target))
        return found

    def _results_named(self, text: str) -> list[str]:
        captured = self._captured()
        try:
            return [] if captured is None else list(results_of(captured, text))
        except (UnknownPathError, GraphError):
            return []

    def _targets_of(self, text: str) -> list[Target]:
        captured = self._captured()
        try:
            return [] if captured is None else captured.targets_of(text)
        except UnknownPathError:
            return []

    def __iter__(self) -> Iterator[str]:
        return iter(self._probes)

    def __len__(self) -> int:
        return len(self._probes)

    def __repr__(self) -> str:
        lines = [f"{path}: {_shown(value)}" for path, value in self.items()]
        shown = lines if len(lines) <= _MOST else [*lines[: _MOST // 2], "...", *lines[-_MOST // 2 :]]
        return "\n".join([f"<Recording of {len(self)} value{'s' * (len(self) != 1)}>", *shown])

    def to_dataarray(self) -> DataArray:
        """Returns a copy of the values as one `xarray.DataArray`, with the paths along its first dimension, `path`.

        The other dimensions are `dim_0`, `dim_1`, ... as in the tensors. This needs xarray.

        Raises:
            ExperimentError: The values are not tensors of one shape, or xarray is not installed.

        Example:
            >>> from graphpatch_notebook import PatchableGraph
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
            >>> recording = PatchableGraph(model, torch.ones(1, 2)).record("sub_*.output", torch.ones(3, 2))
            >>> recording.to_dataarray().sel(path="sub_1.output").dims
            ('dim_0', 'dim_1')
        """
        try:
            from xarray import DataArray
        except ImportError as error:
            raise ExperimentError(
                "to_dataarray needs xarray: pip install 'graphpatch-notebook[experiments]'"
            ) from error
        values = dict(self)
        shapes = {path: tuple(value.shape) if isinstance(value, Tensor) else None for path, value in values.items()}
        first = next(iter(shapes), None)
        if first is None:
            raise ExperimentError("nothing was recorded")
        other = next((path for path, shape in shapes.items() if shape is None or shape != shapes[first]), None)
        if other is not None:
            raise ExperimentError(
                f"only tensors of one shape make one array, but {first!r} is {_shown(values[first])} and {other!r} is "
                f"{_shown(values[other])}: record them separately"
            )
        stacked = torch.stack([value.detach().cpu() for value in values.values()])
        if stacked.dtype == torch.bfloat16:  # which numpy does not have
            stacked = stacked.float()
        dims = ["path", *(f"dim_{dim}" for dim in range(stacked.dim() - 1))]
        return DataArray(stacked.numpy(), {"path": list(values)}, dims)


def _part(value: Tensor, target: Target) -> Tensor:
    """Returns the part of a recorded value that a component is."""
    shown = f"the value recorded, of shape {tuple(value.shape)},"
    problem = index_problem(target.index, value.shape) or selection_problem(target.index, value.shape, shown)
    if problem is not None:
        raise PatchValueError(f"{target.text!r}: {problem}")
    return value[target.index]


_MOST = 40


def _shown(value: Any) -> str:
    return f"Tensor({', '.join(map(str, value.shape))})" if isinstance(value, Tensor) else repr(value)


@dataclass(frozen=True)
class _Result:
    """What a head writes to the stream, as it is computed: `z` of the head, times its part of `W_O`."""

    z: str
    weight: Tensor


def results_of(captured: CapturedModel, text: str) -> dict[str, _Result]:
    """Returns the results of heads that a name means (`layers[*].attn.heads[*].result`) by name; none for other texts.

    Raises:
        UnknownPathError: There are no such heads.
        GraphError: Their output projection was not found.
    """
    if not text.endswith(".result") or not is_component_name(text):
        return {}
    found: dict[str, _Result] = {}
    for z in captured.paths_of(text.removesuffix("result") + "z"):
        name = parse_name(z)
        if name.words[0] != "attn" or not isinstance(name.members, int):
            return {}
        weight = Weights(captured.root, name.stack).W_O[name.layers, name.members]
        found[z.removesuffix("z") + "result"] = _Result(z, weight)
    return found


def _recorded_paths(captured: CapturedModel, pattern: str) -> Mapping[str, _Result | None]:
    try:
        return results_of(captured, pattern) or dict.fromkeys(captured.paths_of(pattern))
    except UnknownPathError:
        if not is_part_of_splice(captured.root, pattern):
            raise
        return {pattern: None}


def _check_weights(captured: CapturedModel, paths: Mapping[str, _Result | None]) -> None:
    """Raises an error if the weight that a result is computed with is patched."""
    weights = {memory_of(result.weight): name for name, result in paths.items() if result is not None}
    context = innermost(captured)
    for entry in context.plan.entries if weights and context is not None else ():
        node = entry.target.node
        if node.kind != "parameter" or all(patch.observes_only for patch in entry.patches):
            continue
        held = functools.reduce(getattr, str(node.target).split("."), entry.target.frame.module)
        if (name := weights.get(memory_of(held))) is not None:
            raise GraphError(
                f"{name} is computed with the weight {entry.target.text}, which is patched: record "
                f"{name.removesuffix('result')}z, and multiply it with the patched weight"
            )


def record(
    captured: CapturedModel,
    run: Callable[[], Any],
    patterns: str | NodePath | Iterable[str | NodePath],
    *,
    positions: PositionSelection | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    stop_at_last: bool,
) -> Recording:
    """Returns the values that `run`, a call of the `PatchableGraph`, computes at some paths: see `pg.record`."""
    __tracebackhide__ = True
    listed = [patterns] if isinstance(patterns, (str, NodePath)) else patterns
    paths: dict[str, _Result | None] = {}
    for pattern in map(str, listed):
        paths |= _recorded_paths(captured, pattern)
    if not paths:
        raise UnknownPathError("there is nothing to record: give a path, or a pattern such as 'h_*.output'")
    waiting: set[_Keeping] = set()

    def convert(value: Any, result: _Result | None) -> Any:
        value = value if result is None else value @ result.weight.to(value.device)
        return value.to(device=device, dtype=dtype) if isinstance(value, Tensor) else value

    probes: dict[str, _Keeping] = {}
    patches: dict[str, list[_Keeping]] = {}
    for path, result in paths.items():
        is_as_it_is = dtype is None and device is None and result is None
        converting = None if is_as_it_is else functools.partial(convert, result=result)
        probe = _Keeping(positions=positions, waiting=waiting, convert=converting, is_stopping=stop_at_last)
        probes[path] = probe
        patches.setdefault(path if result is None else result.z, []).append(probe)
    waiting.update(probes.values())
    with PatchContext(captured, patches):
        _check_weights(captured, paths)
        run()
    fired = {path: probe for path, probe in probes.items() if probe not in waiting}
    return Recording(fired, captured, is_whole=positions is None)
