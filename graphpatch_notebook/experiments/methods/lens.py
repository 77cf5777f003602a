"""The logit lens: the logits that states of the residual stream would give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphpatch_notebook.components import Component
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.methods.arguments import Paths, check_graph, several_paths
from graphpatch_notebook.experiments.methods.reference_runs import record
from graphpatch_notebook.experiments.methods.sweeps import run_sweep
from graphpatch_notebook.experiments.metrics import Tokens
from graphpatch_notebook.inspection.resolution import resolve
from graphpatch_notebook.options import check_input_names
from graphpatch_notebook.patchable_graph import PatchableGraph, captured, runs_where_the_model_is
from graphpatch_notebook.patches.kinds import Patch, ReplacePatch
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


def arranged(value: Tensor, axes: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """Returns a value with its dimensions in another order; `position` is also called `query`."""
    named = ["position" if axis == "query" else axis for axis in axes]
    if sorted(named) != sorted(wanted):
        raise ExperimentError(f"a value with the dimensions {', '.join(axes)} should have {', '.join(wanted)}")
    return value.permute([named.index(axis) for axis in wanted])


@runs_where_the_model_is
def logit_lens(
    pg: PatchableGraph,
    *inputs: Any,
    streams: Paths | None = None,
    target: Tokens | None = None,
    stack: str = "",
    **input_kwargs: Any,
) -> DataArray:
    """Returns the logits that the model would give if each state of the residual stream were the last one.

    The state is put in place of the last layer's output, and the model's own code does the rest: the final norm, the
    unembedding, and what else there is. Layers are not run again for it.

    Args:
        pg: The graph.
        *inputs: Inputs of the model, positional.
        streams: Names, patterns or paths of values of the shape of the stream; by default, the input of each layer and
            the output of the last one.
        target: The tokens: a number, a list (the dimension `token`), or a tensor with one for each row; `None` for the
            whole vocabulary, which may be large.
        stack: The stack of layers, if the model has several.
        **input_kwargs: Inputs of the model, by keyword.

    Returns:
        An array with the dimensions `layer` (from 0, the embeddings, to the number of layers; `stream` if `streams` are
        given), `batch`, `position` if the logits have it, and `token` for several tokens.

    Raises:
        ExperimentError: The model has no layers or logits that are known, or a value has another shape than the stream.

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
    start, count = f"{stack}." if stack else "", layer_count(pg, stack)
    last = component(pg, f"{start}layers[{count - 1}].resid_post")
    logits = component(pg, "@logits")
    states = [component(pg, name).name for name in stream_states(start, count)]
    names = states if streams is None else several_paths(pg, streams, "streams")
    given = Inputs(inputs, input_kwargs)
    values = record(pg, given, [*names, last.name]).values
    check_states(values, names, last.name)
    axes: dict[str, list[Any]] = {"layer": list(range(len(names)))} if streams is None else {"stream": names}
    (labels,) = axes.values()

    def patches(label: Any) -> dict[str, Patch[Any]]:
        return {last.path: ReplacePatch(values[names[labels.index(label)]])}

    metric = _Logits(keys_of_logits(pg, logits), checked_tokens(target, logits))
    result = run_sweep(pg, axes, patches, given, metric=metric, batch=None, progress=False)
    dims = [name for name in logits.axes if name != "vocab"]
    if target is None or isinstance(target, (list, tuple)):
        dims.append("token")
    result = result.rename({f"metric_{number}": dim for number, dim in enumerate(dims)})
    result.name = "logit lens"
    if isinstance(target, (list, tuple)):
        result = result.assign_coords(token=list(target))
    result.attrs = {"remarks": result.attrs["remarks"]}
    return result  # type: ignore[no-any-return]


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


def checked_tokens(target: Tokens | None, logits: Component) -> Tokens | None:
    """Checks that tokens are in the vocabulary."""
    size = logits.shape[logits.axes.index("vocab")]
    if target is None:
        return None
    if isinstance(target, Tensor) and target.ndim and logits.axes[0] != "batch":
        raise ExperimentError(f"tokens for each row need logits with the batch first, not {', '.join(logits.axes)}")
    try:
        numbers = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError):  # such as a text
        numbers = torch.empty(0)
    is_number = numbers.numel() and not numbers.is_floating_point() and numbers.dtype != torch.bool
    if not is_number or bool(((numbers < 0) | (numbers >= size)).any()):
        raise ExperimentError(
            f"tokens are numbers from 0 to {size - 1}, as tokenizer.encode gives them, not {target!r}"
        )
    return target


@dataclass(frozen=True)
class _Logits:
    """The metric: the logits of some tokens."""

    keys: tuple[Key, ...]
    target: Tokens | None

    def __call__(self, output: Any) -> Tensor:
        for key in self.keys:
            output = take(output, key)
        logits: Tensor = output.detach()
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
