"""Records values of a run by path, for `pg.record` and `pg.run_until`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

from graphpatch_notebook.components.names import parse_name
from graphpatch_notebook.errors import ExperimentError, UnknownPathError, extra
from graphpatch_notebook.inspection.resolution import METHODS, NodeMap, Target, answer_to_alias, kept_for
from graphpatch_notebook.patches.kinds import ProbePatch, RunStopped, check_unchanged
from graphpatch_notebook.patches.slices import PositionSelection
from graphpatch_notebook.patching.context import CapturedModel, PatchContext
from graphpatch_notebook.patching.plan import part_of
from graphpatch_notebook.paths import nearest
from graphpatch_notebook.torch_compat import version_of
from graphpatch_notebook.values import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from xarray import DataArray

    from graphpatch_notebook.inspection.node_path import NodePath


_T = TypeVar("_T")
_Kept: TypeAlias = "tuple[Any, int | None]"
"""A value, and how often it had been written into when it was kept."""


@dataclass(eq=False)
class _Keeping(ProbePatch):
    """Keeps the value in a recording that is being made, and ends the run after the last one."""

    only_keeps: ClassVar[bool] = True
    is_for_one_run: ClassVar[bool] = True
    recorder: _Recorder = field(kw_only=True, repr=False)
    path: str = field(kw_only=True)  # the path of the value there
    convert: Callable[[Any], Any] | None = field(kw_only=True)

    def op(self, original_output: Any) -> Any:
        value = original_output if self.convert is None else self.convert(original_output)
        kept = self.recorder.kept
        kept[self.path] = value, version_of(value)
        if len(kept) == self.recorder.last:
            raise RunStopped(original_output, self)
        return original_output


_Keeping.__name__ = "pg.record"  # the words for a patch in messages, and those for the user's call


class Recording(Mapping[str, Any]):
    """Values of one run by path, in the order of the patterns that asked for them. Read-only.

    A value is found by all of its names: its path, the name of a component, or of a part of one (a view). Components of
    a model with one stack of layers also have short names: `recording["resid_post", 3]` is `layers[3].resid_post`,
    `recording["z", 3]` (or `["z", 3, "attn"]`) is `layers[3].attn.z`, and `recording["z", 3, 5]` that of head 5.

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

    def __init__(self, kept: Mapping[str, _Kept], captured: CapturedModel, *, is_whole: bool) -> None:
        self._kept = kept
        self._captured = weakref.ref(captured)  # a recording does not keep the model
        self._is_whole = is_whole

    def __getitem__(self, path: object) -> Any:
        text = self._long_name(*path) if isinstance(path, tuple) else str(path)
        return self._value(text) if text in self._kept else self._by_other_name(text)

    def _long_name(self, kind: str, layer: int | str, head: int | str | None = None) -> str:
        part = f"{head}." if isinstance(head, str) else f"attn.heads[{head}]."
        places = ["", "attn.", "mlp."] if head is None else [part]
        names = [f"layers[{layer}].{place}{kind}" for place in places]
        return next(filter(self._found, names), names[0])

    def _value(self, name: str) -> Any:
        value, version = self._kept[name]
        check_unchanged(value, version)
        return value

    def _by_other_name(self, text: str) -> Any:
        targets = self._found(text)
        if len(targets) > 1:
            names = ", ".join(repr(target.text) for target in targets[:3])
            raise UnknownPathError(f"{text!r} means {len(targets)} values ({names}, ...): ask for one at a time")
        for target in targets:
            for name, recorded in self._targets.get(target.path, ()):
                if recorded.seen_as == target.seen_as:
                    return self._value(name)
                if not recorded.index and (self._is_whole or not target.index):
                    value = self._value(name)
                    if recorded.component is not None and isinstance(value, Tensor):
                        value = recorded.component.at_path(value)
                    return part_of(target, value)
        close = ", ".join(map(repr, nearest(text, list(self._kept))))
        captured = self._captured()
        answer = None if captured is None or targets else answer_to_alias(captured.root, text)
        hint = answer or (f"nearest: {close}" if close else "")
        raise UnknownPathError(f"{text!r} was not recorded" + (f"; {hint}" if hint else ""))

    def __getattr__(self, name: str) -> Any:
        hint = f"; for {name!r} of another tool, write {METHODS[name]}" if name in METHODS else ""
        raise AttributeError(f"'Recording' object has no attribute {name!r}{hint}")

    @functools.cached_property
    def _targets(self) -> dict[str, list[tuple[str, Target]]]:
        found: dict[str, list[tuple[str, Target]]] = {}
        for name in self._kept:
            for target in self._found(name):
                found.setdefault(target.path, []).append((name, target))
        return found

    def _found(self, text: str) -> list[Target]:
        captured = self._captured()
        try:
            return [] if captured is None else captured.targets_of(text)
        except UnknownPathError:
            return []

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        lines = [f"{path}: {_tensor_text(value)}" for path, value in self.items()]
        shown = lines if len(lines) <= _MOST_LINES else [*lines[: _MOST_LINES // 2], "...", *lines[-_MOST_LINES // 2 :]]
        return "\n".join([f"<Recording of {len(self)} value{'s' * (len(self) != 1)}>", *shown])

    def stack(self, kind: str) -> Tensor:
        """Returns the values of a component in all layers in which it was recorded, of shape (layers, ...).

        Args:
            kind: The short name of the component: `"resid_post"`, `"z"`, `"pattern"`.

        Raises:
            UnknownPathError: It was not recorded in any layer.

        Example:
            >>> from graphpatch_notebook import PatchableGraph
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
            >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
            >>> pg, x = PatchableGraph(model, torch.randn(1, 5, 8)), torch.randn(1, 5, 8)
            >>> recording = pg.record("layers[*].resid_post", x)
            >>> recording.stack("resid_post").shape, recording["resid_post", -1].shape
            (torch.Size([3, 1, 5, 8]), torch.Size([1, 5, 8]))
        """
        kept = [self[target.text] for target in self._in_layers(kind)]
        return torch.stack(kept) if kept else self[kind, 0]

    def accumulated_resid(self, *, incl_mid: bool = False, return_labels: bool = False) -> Any:
        """Returns the residual stream before each layer and after the last one, of shape (states, batch, ...).

        Args:
            incl_mid: Whether the states between attention and MLP are among them.
            return_labels: Whether to return the names of the states, too: `(states, ["0_pre", "0_mid", ...])`.

        Raises:
            UnknownPathError: A state was not recorded: record `"layers[*].resid_*"`.

        Example:
            >>> from graphpatch_notebook import PatchableGraph
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
            >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
            >>> pg, x = PatchableGraph(model, torch.randn(1, 5, 8)), torch.randn(1, 5, 8)
            >>> recording = pg.record("layers[*].resid_*", x)
            >>> states, labels = recording.accumulated_resid(incl_mid=True, return_labels=True)
            >>> states.shape, labels
            (torch.Size([5, 1, 5, 8]), ['0_pre', '0_mid', '1_pre', '1_mid', 'final_post'])

        Source:
            ``ActivationCache.accumulated_resid`` of TransformerLens.
        """
        kinds = ("pre", "mid") if incl_mid else ("pre",)
        count = len(self._found(self._long_name("resid_pre", "*")))
        names = {f"{layer}_{kind}": (f"resid_{kind}", layer) for layer in range(count) for kind in kinds}
        names["final_post"] = "resid_post", count - 1
        states = torch.stack([self[name] for name in names.values()])
        return (states, list(names)) if return_labels else states

    def stack_head_results(self, *, return_labels: bool = False) -> Any:
        """Returns what each attention head adds to the residual stream, of shape (heads, batch, position, channel).

        It is `z @ pg.weights.W_O[layer, head]`, of all heads of the first layer, then of the next. Biases, and what a
        model does with the sum of the heads (a norm in Gemma 2), are left out. Weights are those of now.

        Args:
            return_labels: Whether to return the names of the heads, too: `(results, ["L0H0", "L0H1", ...])`.

        Raises:
            UnknownPathError: `z` was not recorded in a layer: record `"layers[*].attn.z"`.
            GraphError: The output projection of a layer is not known.

        Example:
            >>> from graphpatch_notebook import PatchableGraph
            >>> from transformers import GPT2Config, GPT2LMHeadModel
            >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
            >>> ids = torch.arange(5)[None]
            >>> pg = PatchableGraph(model, ids)
            >>> results, labels = pg.record("layers[*].attn.z", ids).stack_head_results(return_labels=True)
            >>> results.shape, labels
            (torch.Size([4, 1, 5, 8]), ['L0H0', 'L0H1', 'L1H0', 'L1H1'])

        Source:
            ``ActivationCache.stack_head_results`` of TransformerLens.
        """
        from graphpatch_notebook.components import Weights

        captured = self._captured()
        if captured is None:
            raise UnknownPathError("the graph is gone, and its weights with it: keep the PatchableGraph")
        captured.check_weights()
        results: dict[str, Tensor] = {}
        for target in self._found(self._long_name("z", "*")):
            layer, axes = parse_name(target.text).layers, () if target.component is None else target.component.axes
            if axes != ("batch", "position", "head", "channel"):
                raise ExperimentError(f"{target.text!r} has the dimensions {', '.join(map(str, axes))}")
            written = self[target.text].movedim(2, 0) @ Weights(captured.root).W_O[layer][:, None]
            results |= {f"L{layer}H{head}": each for head, each in enumerate(written)}
        if not results:
            self["z", 0]  # raises the error
        stacked = torch.stack([*results.values()])
        return (stacked, list(results)) if return_labels else stacked

    def to_dataarray(self, kind: str) -> DataArray:
        """Returns a copy of the values of a component in all layers as one `xarray.DataArray` with named dimensions.

        They are `layer` and then the axes of the component. One of which it is not known what it is has the name
        `dim_2`, after its number. This needs xarray.

        Args:
            kind: The short name of the component, as for `stack`.

        Raises:
            UnknownPathError: It was not recorded in any layer.
            ExperimentError: The layers have different sizes, or xarray is not installed.

        Example:
            >>> from graphpatch_notebook import PatchableGraph
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
            >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
            >>> pg, x = PatchableGraph(model, torch.randn(1, 5, 8)), torch.randn(1, 5, 8)
            >>> recording = pg.record("layers[*].resid_post", x)
            >>> dict(recording.to_dataarray("resid_post").sizes)
            {'layer': 3, 'batch': 1, 'position': 5, 'channel': 8}
        """
        xarray = extra("xarray", "an array with named dimensions")
        arrays = []
        for target in self._in_layers(kind):
            value, component = self[target.text].detach().cpu(), target.component
            assert component is not None  # it was found by its short name
            value = value.float() if value.dtype == torch.bfloat16 else value
            axes = [component.axes[dim] or f"dim_{dim}" for dim in component.kept_dims]
            layer = parse_name(target.text).layers
            arrays.append(xarray.DataArray(value.numpy(), dims=axes).assign_coords(layer=layer))
        if not arrays:
            self[kind, 0]  # raises the error
        try:
            return xarray.concat(arrays, "layer")  # type: ignore[no-any-return]
        except ValueError as error:
            raise ExperimentError(f"{kind!r} has other sizes in other layers: {error}") from error

    def _in_layers(self, kind: str) -> list[Target]:
        """Returns a component in the layers in which it was recorded."""
        recorded = {target.path for name in self._kept for target in self._found(name)}
        return [target for target in self._found(self._long_name(kind, "*")) if target.path in recorded]


_MOST_LINES = 40


def _tensor_text(value: Any) -> str:
    return str(describe(value)) if isinstance(value, Tensor) else repr(value)


class _Recorder:
    """Makes recordings of the same values, one at a time."""

    def __init__(
        self,
        captured: CapturedModel,
        paths: Sequence[str],
        positions: PositionSelection | None,
        convert: Callable[[Any], Any] | None,
        *,
        stop_at_last: bool,
    ) -> None:
        self.kept: dict[str, _Kept] = {}  # the values of the recording that is being made, by path
        self.last = len(paths) if stop_at_last else 0  # the number of values after which the run ends; 0 if it does not
        self._captured, self._paths, self.is_whole = captured, paths, positions is None
        patches = {path: _Keeping(positions=positions, recorder=self, path=path, convert=convert) for path in paths}
        entries = captured.entries_of(patches)
        self._context = PatchContext(captured, patches, entries=entries)

    def recording(self, run: Callable[[], Any]) -> Recording:
        """Returns the recording of a run."""
        with self._context:
            run()
        kept, self.kept = self.kept, {}
        in_order = {path: kept[path] for path in self._paths if path in kept}
        return Recording(in_order, self._captured, is_whole=self.is_whole)


def _converted(value: Any, dtype: torch.dtype | None, device: torch.device | str | None) -> Any:
    return value.to(device=device, dtype=dtype) if isinstance(value, Tensor) else value


def _idle_recorders(_: NodeMap) -> dict[Any, _Recorder]:
    """Returns a cache of recorders that no call uses at the moment: a new call can use their patches and plan again."""
    return {}


_MOST_IDLE = 16


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
    from graphpatch_notebook.inspection.node_path import NodePath

    listed = tuple(map(str, [patterns] if isinstance(patterns, (str, NodePath)) else patterns))
    idle, key = kept_for(captured.nodes, _idle_recorders), (listed, dtype, device, stop_at_last)
    recorder = idle.pop(key, None) if positions is None else None
    if recorder is None:
        paths = list(dict.fromkeys(path for pattern in listed for path in captured.paths_of(pattern)))
        if not paths:
            raise UnknownPathError("there is nothing to record: give a path, or a pattern such as 'h_*.output'")
        is_converted = dtype is not None or device is not None
        convert = functools.partial(_converted, dtype=dtype, device=device) if is_converted else None
        recorder = _Recorder(captured, paths, positions, convert, stop_at_last=stop_at_last)
    recording = recorder.recording(run)
    if recorder.is_whole:
        if len(idle) >= _MOST_IDLE:
            idle.clear()
        idle[key] = recorder
    return recording
