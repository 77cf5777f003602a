"""The logit lens: the logits that states of the residual stream would give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.components import Component
from graphpatch_notebook.errors import ExperimentError, collected_warnings, extra
from graphpatch_notebook.experiments.engine import RemoteGraph
from graphpatch_notebook.experiments.engine.cells import PatchMap, is_close, wild
from graphpatch_notebook.experiments.engine.inputs import Inputs, Paths, check_graph, inputs_of, record, several_paths
from graphpatch_notebook.experiments.engine.shared import RunsFrom
from graphpatch_notebook.experiments.metrics import Tokens
from graphpatch_notebook.inspection.resolution import resolve
from graphpatch_notebook.options import check_input_names
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch, ReplacePatch
from graphpatch_notebook.patching.model_state import runs_where_the_model_is
from graphpatch_notebook.values import Key, take

if TYPE_CHECKING:
    from xarray import DataArray


def component(pg: PatchableGraph, name: str) -> Component:
    """Returns a component."""
    found = pg.components.get(name)
    if found is None:
        why = pg.components.why_missing(name)
        raise ExperimentError(f"{name} was not found in this model" + (f": {why}" if why else "; see pg.components"))
    return found


def layer_count(pg: PatchableGraph, stack: str) -> int:
    """Returns the number of layers of a stack."""
    layers = pg.components.layers
    if not layers:
        component(pg, "layers[0].resid_post")  # raises an error with the reason
    if stack not in layers:
        raise ExperimentError(f"unknown stack of layers, stack={stack!r}; this model has {list(layers)}")
    return layers[stack]


@runs_where_the_model_is
def logit_lens(
    pg: PatchableGraph,
    *inputs: Any,
    streams: Paths | None = None,
    target: Tokens | str | Sequence[str] | None = None,
    stack: str = "",
    lens: Callable[[str, Tensor], Tensor] | None = None,
    **input_kwargs: Any,
) -> DataArray:
    """Returns the logits that the model would give if each state of the residual stream were the last one.

    The state is put in place of the last layer's output, and the model's own code does the rest: the final norm, the
    unembedding, and what else there is. Layers run once for all states, unless something sees their calls: hooks, say.

    Args:
        pg: The graph.
        *inputs: Inputs of the model, positional.
        streams: Names, patterns or paths of values of the shape of the stream; by default, the input of each layer and
            the output of the last one.
        target: The tokens: a number or text, a list of these (the dimension `token`), or a tensor with a number for
            each row; `None` for the whole vocabulary, which may be large.
        stack: The stack of layers, if the model has several.
        lens: A `TunedLens`, or another function of the name of a state and the state, which returns what is put in its
            place.
        **input_kwargs: Inputs of the model, by keyword.

    Returns:
        An array with the dimensions `layer` (from 0, the embeddings, to the number of layers; `stream` if `streams` are
        given), `batch`, `position` if the logits have it, and `token` for several tokens.

    Raises:
        ExperimentError: The model has no layers or logits that are known, or a value has another shape than the stream.
        GraphError: A token is a text, and there is no tokenizer.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(6)[None])
        >>> lens = logit_lens(pg, torch.arange(6)[None], target=3)
        >>> lens.dims, lens.shape
        (('layer', 'batch', 'position'), (3, 1, 6))

    Source:
        nostalgebraist, interpreting GPT: the logit lens (2020).
    """
    check_graph(pg)
    check_input_names(pg.nodes.root, input_kwargs, logit_lens)
    xarray = extra("xarray", "an array of logits")
    start, count = f"{stack}." if stack else "", layer_count(pg, stack)
    last = component(pg, f"{start}layers[{count - 1}].resid_post")
    logits = component(pg, "@logits")
    states = [component(pg, name).name for name in stream_states(start, count)]
    names = states if streams is None else several_paths(pg, streams, "streams")
    given = inputs_of(pg, inputs, input_kwargs)
    runs = RunsFrom(pg, given, resolve(captured(pg).root, last.path))
    values = record(pg, given, [*names, last.name], run=runs.first).values
    check_states(values, names, last.name)
    read = _Logits((), checked_tokens(numbers_of(pg, target), logits))
    with torch.no_grad():
        wanted = [values[name] if lens is None else lens(name, values[name]) for name in names]
        for number, found in enumerate(_logits_of(pg, runs, last, logits, wanted, values[last.name])):
            row = read(found)
            if number == 0:
                numbers = torch.empty(len(names), *row.shape, dtype=torch.float64)
            numbers[number] = row
    dims = [
        "layer" if streams is None else "stream",
        *(name or f"dim_{dim}" for dim, name in enumerate(logits.axes) if name != "vocab"),
    ]
    labels: dict[str, Any] = {str(dims[0]): list(range(len(names))) if streams is None else names}
    if target is None or isinstance(target, (list, tuple)):
        dims.append("token")
    if isinstance(target, (list, tuple)):
        labels["token"] = list(target)
    return xarray.DataArray(numbers.numpy(), labels, dims, "logit lens", given.attrs(pg))  # type: ignore[no-any-return]


_AT_ONCE = 2**27
"""How many logits are computed at once."""


def _logits_of(
    pg: PatchableGraph, runs: RunsFrom, last: Component, logits: Component, states: Sequence[Tensor], end: Tensor
) -> Iterator[Tensor]:
    """Yields the logits of each state: of many in one run, if the last state of the model, `end`, has its own there.

    One more row holds wild numbers, larger than those of all states: a tail in which rows meet, or that scales by the
    largest number of all, does not compute `end` as alone then.
    """
    whole = _Logits(keys_of_logits(pg, logits), None, logits)
    own = whole(runs.output)
    most = max(1, _AT_ONCE // own.numel())
    for first in range(0, len(states), most):
        group = states[first : first + most]
        rows = [wild(end), *group] if group[-1] is end else [wild(end), *group, end]
        parts: Sequence[Tensor] = ()
        with suppress(Exception):  # of any kind: the model may read something else that has the rows of one state
            output = runs.together(last.name, rows, last.axes.index("batch"))
            parts = whole(output).chunk(len(rows), logits.axes.index("batch"))
        if len(parts) == len(rows) and is_close(parts[-1], own):
            yield from parts[1 : len(group) + 1]
        else:
            yield from (whole(runs.again({last.name: ReplacePatch(state)})) for state in group)


def check_states(values: Mapping[str, Tensor], names: Iterable[str], last: str) -> None:
    """Raises an `ExperimentError` if a value does not have the shape of the last state of the stream."""
    for name in names:
        if values[name].shape != values[last].shape:
            raise ExperimentError(
                f"{name!r} has shape {tuple(values[name].shape)}, and the residual stream {tuple(values[last].shape)}: "
                "give values that are states of the stream"
            )


def stream_states(start: str, count: int) -> list[str]:
    """Returns the names of the states of the stream: the input of each layer, and the output of the last one."""
    return [*(f"{start}layers[{n}].resid_pre" for n in range(count)), f"{start}layers[{count - 1}].resid_post"]


def keys_of_logits(pg: PatchableGraph, logits: Component) -> tuple[Key, ...]:
    """Returns where the logits are in the output of the model."""
    target = resolve(captured(pg).root, logits.path)
    if target.frame.parent is not None or target.node.kind != "output":
        raise ExperimentError(f"the logits are at {logits.path!r}, which is not a part of the model's output")
    return target.dig


def numbers_of(pg: PatchableGraph, target: Any) -> Any:
    """Returns tokens as numbers, where they are given as texts."""
    if isinstance(target, (list, tuple)):
        return [numbers_of(pg, one) for one in target]
    return pg.to_single_token(target) if isinstance(target, str) else target


def checked_tokens(target: Tokens | None, logits: Component) -> Tokens | None:
    """Checks that tokens are in the vocabulary."""
    if target is None:
        return None
    if "vocab" not in logits.axes:
        raise ExperimentError(
            f"of the dimensions {logits.shape} of the logits, it is not known which is the vocabulary"
        )
    size = logits.shape[logits.axes.index("vocab")]
    if isinstance(target, Tensor) and target.ndim and logits.axes[0] != "batch":
        raise ExperimentError(
            f"tokens for each row need logits with the batch first, not {', '.join(map(str, logits.axes))}"
        )
    try:
        numbers = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError):  # such as a text
        numbers = torch.empty(0)
    is_number = numbers.numel() and not numbers.is_floating_point() and numbers.dtype != torch.bool
    if not is_number or bool(((numbers < 0) | (numbers >= size)).any()):
        raise ExperimentError(
            f"tokens are numbers from 0 to {size - 1}, as pg.to_single_token(text) returns them, not {target!r}"
        )
    return target


@dataclass(frozen=True)
class _Logits:
    """The metric: the logits of some tokens."""

    keys: tuple[Key, ...]
    target: Tokens | None
    component: Component | None = None  # as which they are seen

    def __call__(self, output: Any) -> Tensor:
        for key in self.keys:
            output = take(output, key)
        logits: Tensor = output.detach() if self.component is None else self.component.seen(output.detach())
        if self.target is None:
            return logits
        if not isinstance(self.target, Tensor):
            return logits[..., self.target]
        return of_rows(logits, self.target)


def of_rows(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the logits of one token for each row."""
    tokens = tokens.to(logits.device)
    if tokens.ndim == 0:
        return logits[..., tokens]
    if tokens.shape != logits.shape[:1]:
        raise ExperimentError(
            f"the tokens have shape {tuple(tokens.shape)}, and the batch has {len(logits)} rows: give a tensor with "
            "one token for each row, or a list of tokens for all rows"
        )
    index = tokens.view(-1, *[1] * (logits.ndim - 1)).expand(*logits.shape[:-1], 1)
    return logits.gather(-1, index)[..., 0]


# -- what states say ---------------------------------------------------------------------------------------------------

_PARTS = {"attention": "attn_out", "mlp": "mlp_out"}
STREAMS = ("residual", *_PARTS)
"""The values that are read: the states of the stream, and what attention and MLPs write to it."""

_AXES = ("batch", "position", "vocab")


@dataclass(frozen=True)
class Readout:
    """What one state says at each position.

    Attributes:
        tokens: The most probable tokens, the first first, of shape (position, top).
        probabilities: Their probabilities.
        target: The probability of the target token, of shape (position,).
        rank: How many tokens are more probable than the target.
    """

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    probabilities: np.ndarray[Any, np.dtype[np.float64]]
    target: np.ndarray[Any, np.dtype[np.float64]]
    rank: np.ndarray[Any, np.dtype[np.int64]]

    @classmethod
    def of(cls, values: np.ndarray[Any, np.dtype[np.float64]]) -> Readout:
        """Returns the readout in the numbers of `_ReadLogits`."""
        top = (values.shape[1] - 2) // 2
        return cls(values[:, :top].astype(np.int64), values[:, top:-2], values[:, -2], values[:, -1].astype(np.int64))


@dataclass(frozen=True)
class ReadStates:
    """The states of a stream in one run, and what they say.

    Attributes:
        names: The component of each state, the first layer first.
        layers: The layer that computes each state; `None` for the embeddings.
        states: The states.
        readouts: What each state says.
        remarks: Warnings of the run.
    """

    names: Sequence[str]
    layers: Sequence[int | None]
    states: Sequence[Tensor]
    readouts: Sequence[Readout]
    remarks: Sequence[str] = ()


class Readouts:
    """Reads the states of a model on some inputs, without and with patches.

    The target is the token whose probability is read: one for all positions, or one for each; `None` for the most
    probable next token of each position in the model's output. `top` is how many probable tokens are read.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        inputs: Inputs,
        *,
        target: int | Sequence[int] | None = None,
        top: int = 10,
        row: int = 0,
        stack: str = "",
    ) -> None:
        check_graph(pg)
        self._pg, self._inputs = pg, inputs
        self._options = {"top": top, "row": row, "stack": stack}
        self._start, self._count = f"{stack}." if stack else "", layer_count(pg, stack)
        self._last = component(pg, f"{self._start}layers[{self._count - 1}].resid_post")
        logits = component(pg, "@logits")
        crossing = {name.partition("layers[")[0] for name in pg.components if ".cross_attn." in name}
        if crossing and self._start not in crossing:
            raise ExperimentError(
                f"the logits are for the positions of other stacks, {sorted(crossing)}, than {stack!r}"
            )
        if logits.axes != _AXES:
            given = ", ".join(map(str, logits.axes))
            raise ExperimentError(f"a lens view needs logits of {', '.join(_AXES)}, not of {given}")
        if inputs.rows is not None and not 0 <= row < inputs.rows:
            raise ExperimentError(f"row {row} is not one of the {inputs.rows} rows of the batch")
        self.row, self.rows = row, inputs.rows or 1
        logits_of = _LogitsOfRow(keys_of_logits(pg, logits), logits, row)
        self._runs = RunsFrom(pg, inputs, resolve(captured(pg).root, self._last.path))
        run = record(pg, inputs, [self._last.name], logits_of, self._runs.first)
        found = run.measurement.values
        if len(found) != run.values[self._last.name].shape[self._last.axes.index("position")]:
            raise ExperimentError(
                f"the model returned logits for {len(found)} positions, which are not those of the states: give inputs "
                "for which it returns all, or another stack="
            )
        wanted = checked_tokens(getattr(target, "tolist", lambda: target)(), logits)
        tokens = found.argmax(-1).tolist() if wanted is None else wanted
        self.target: list[int] = [tokens] * len(found) if isinstance(tokens, int) else list(tokens)
        if len(self.target) != len(found):
            raise ExperimentError(f"give one target token, or one for each of {len(found)} positions, not {target!r}")
        self._metric = _ReadLogits(logits_of, tuple(self.target), min(top, found.shape[-1]))

    def names(self, stream: str) -> tuple[list[str], list[int | None]]:
        """Returns the components of a stream, and the layer that computes each of them; `None` for the embeddings."""
        layers = range(self._count)
        if stream == "residual":
            after = [f"{self._start}layers[{layer}].resid_post" for layer in (-1, *layers)]
            states = zip(after, stream_states(self._start, self._count), strict=True)
            return [one if one in self._pg.components else other for one, other in states], [None, *layers]
        if stream not in _PARTS:
            raise ExperimentError(f"stream must be one of {', '.join(map(repr, STREAMS))}, not {stream!r}")
        names = {layer: f"{self._start}layers[{layer}].{_PARTS[stream]}" for layer in layers}
        found = {layer: name for layer, name in names.items() if name in self._pg.components}
        if not found:
            component(self._pg, names[0])  # raises an error with the reason
        return list(found.values()), list(found)

    def has(self, stream: str) -> bool:
        """Whether the model has a stream: some layers may lack it."""
        with suppress(ExperimentError):
            return bool(self.names(stream)[0])
        return False

    def read(self, stream: str, patches: Mapping[str, Sequence[Patch[Any]]] | None = None) -> ReadStates:
        """Returns what the states of a stream say, without or with patches, which act on each readout.

        The states of a model in other processes stay there.

        Raises:
            ExperimentError: A state has another shape than the residual stream, or its logits cannot be computed.
        """
        if isinstance(self._pg, RemoteGraph):
            return _read_there(self._pg, self._inputs, self._options | {"target": self.target}, stream, patches)
        names, layers = self.names(stream)
        with collected_warnings() as remarks:
            given: PatchMap = patches or {}
            with self._pg.patch(given):
                states = record(self._pg, self._inputs, dict.fromkeys([*names, self._last.name])).values
            check_states(states, names, self._last.name)
            found = self._read([states[name] for name in names], patches or {})
        return ReadStates(names, layers, [states[name] for name in names], found, list(remarks))

    def _read(self, states: Sequence[Tensor], patches: Mapping[str, Sequence[Patch[Any]]]) -> list[Readout]:
        """Returns what states say, if they are the last state of the stream: patches behind it act on each of them."""
        order = {path: number for number, path in enumerate(self._pg.nodes)}
        places = {
            entry.target.path: path for entry, path in zip(captured(self._pg).entries_of(patches), patches, strict=True)
        }
        later = {path: patches[path] for place, path in places.items() if order[place] > order[self._last.path]}
        with torch.no_grad():
            found = [self._runs.again({**later, self._last.name: ReplacePatch(state)}) for state in states]
            return [Readout.of(self._metric(output).cpu().numpy()) for output in found]


@runs_where_the_model_is
def _read_there(
    pg: PatchableGraph,
    inputs: Inputs,
    options: Mapping[str, Any],
    stream: str,
    patches: Mapping[str, Sequence[Patch[Any]]] | None,
) -> ReadStates:
    return replace(Readouts(pg, inputs, **options).read(stream, patches), states=())


@dataclass(frozen=True)
class _LogitsOfRow:
    """The metric: the logits of one row of the batch, of shape (position, vocab)."""

    keys: tuple[Key, ...]
    component: Component
    row: int

    def __call__(self, output: Any) -> Tensor:
        for key in self.keys:
            output = take(output, key)
        return self.component.seen(output.detach())[self.row]


@dataclass(frozen=True)
class _ReadLogits:
    """The metric: the numbers of a `Readout`, for each position."""

    logits_of: _LogitsOfRow
    target: tuple[int, ...]
    top: int

    def __call__(self, output: Any) -> Tensor:
        logits = self.logits_of(output).float()
        probabilities = logits.softmax(-1)
        found = probabilities.topk(self.top)
        target = torch.tensor(self.target, device=logits.device)[:, None]
        rank = (logits > logits.gather(-1, target)).sum(-1, keepdim=True)
        parts = [found.indices, found.values, probabilities.gather(-1, target), rank]
        return torch.cat([part.double() for part in parts], -1)
