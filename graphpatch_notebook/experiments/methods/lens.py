"""What the residual stream says about the logits: the logit lens, and direct logit attribution."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture.functions import raw_name
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components import Component
from graphpatch_notebook.components.chain import Norm
from graphpatch_notebook.components.flow import called
from graphpatch_notebook.components.mlp import members_like
from graphpatch_notebook.components.operations import SAME_VALUES, SCALINGS, VIEWS
from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.methods.arguments import Paths, check_graph, check_input_names, several_paths
from graphpatch_notebook.experiments.methods.reference_runs import record
from graphpatch_notebook.experiments.methods.sweeps import run_sweep
from graphpatch_notebook.experiments.metrics import Tokens
from graphpatch_notebook.inspection.resolution import Target, resolve
from graphpatch_notebook.patchable_graph import PatchableGraph, captured, runs_where_the_model_is
from graphpatch_notebook.patches.kinds import Patch, ReplacePatch
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import ContainerSpec, Key, ScalarSpec, TensorSpec, take
from graphpatch_notebook.warning_places import warn_each_time

if TYPE_CHECKING:
    from xarray import DataArray, Dataset

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}


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
    if stack in layers:
        return layers[stack]
    if not layers:
        component(pg, "layers[0].resid_post")  # raises an error with the reason
    choices = " or ".join(f"stack={known!r}" if known else "no stack=" for known in layers)
    if stack:
        raise ExperimentError(f"unknown stack of layers {stack!r} in this model; give {choices}")
    raise ExperimentError(f"this model has {len(layers)} stacks of layers, and no stack= was given: give {choices}")


def arranged(value: Tensor, axes: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """Returns a value with its dimensions in another order; `position` is also called `query`."""
    named = ["position" if axis == "query" else axis for axis in axes]
    if sorted(named) != sorted(wanted):
        raise ExperimentError(f"a value with the dimensions {', '.join(axes)} should have {', '.join(wanted)}")
    return value.permute([named.index(axis) for axis in wanted])


# -- the logit lens ----------------------------------------------------------------------------------------------------


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
    check_input_names(pg, input_kwargs, logit_lens)
    start, count = f"{stack}." if stack else "", layer_count(pg, stack)
    last = component(pg, f"{start}layers[{count - 1}].resid_post")
    logits = component(pg, "@logits")
    if streams is None:
        names = [component(pg, name).name for name in stream_states(start, count)]
    else:
        names = several_paths(pg, streams, "streams")
    given = Inputs(inputs, input_kwargs)
    values = record(pg, given, [*names, last.name]).values
    for name in names:
        if values[name].shape != values[last.name].shape:
            raise ExperimentError(
                f"{name!r} has shape {tuple(values[name].shape)}, and the residual stream "
                f"{tuple(values[last.name].shape)}: give values that are states of the stream"
            )
    labels = list(range(len(names))) if streams is None else names
    axis = "layer" if streams is None else "stream"

    def patches(label: Any) -> dict[str, Patch[Any]]:
        return {last.path: ReplacePatch(values[names[labels.index(label)]])}

    metric = _Logits(keys_of_logits(pg, logits), checked_tokens(target, logits))
    result = run_sweep(pg, {axis: labels}, patches, given, metric=metric, batch=None, progress=False)
    dims = [axis for axis in logits.axes if axis != "vocab"]
    if target is None or isinstance(target, (list, tuple)):
        dims.append("token")
    result = result.rename({f"metric_{number}": dim for number, dim in enumerate(dims)})
    result.name = "logit lens"
    if isinstance(target, (list, tuple)):
        result = result.assign_coords(token=list(target))
    result.attrs = {"remarks": result.attrs["remarks"]}
    return result  # type: ignore[no-any-return]


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
    if numbers.is_floating_point() or numbers.dtype == torch.bool or not numbers.numel():
        raise ExperimentError(
            f"tokens are numbers from 0 to {size - 1}, as tokenizer.encode(...) gives them, not {target!r}"
        )
    wrong = numbers[(numbers < 0) | (numbers >= size)].tolist()
    if wrong:
        raise ExperimentError(f"token {wrong[0]} is not one of the {size} tokens of the vocabulary")
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


# -- direct logit attribution ------------------------------------------------------------------------------------------


@runs_where_the_model_is
def direct_logit_attribution(
    pg: PatchableGraph,
    *inputs: Any,
    target: int | Tensor,
    minus: int | Tensor | None = None,
    by: Literal["layer", "head", "neuron"] = "layer",
    position: int | Sequence[int] | Tensor = -1,
    stack: str = "",
    **input_kwargs: Any,
) -> Dataset:
    """Returns what each part of the model adds to a logit directly: through the final norm and the unembedding only.

    The residual stream is the sum of what the embeddings and layers write to it. With the scale of the final norm held
    at its value in this run, the logit is linear in the stream, and so a sum over these parts. A norm between heads or
    neurons and the stream (Gemma 2) is held likewise. All numbers of the result add up to the logit; this is checked,
    and so are the norms, the sum and the unembedding.

    Args:
        pg: The graph.
        *inputs: Inputs of the model, positional.
        target: The token whose logit is attributed: a number, or a tensor with one for each row.
        minus: A token whose logit is subtracted, likewise; for logit differences.
        by: What layers are divided into: `"head"` for attention, `"neuron"` for MLPs.
        position: The position of the logit; one for all rows, or one for each row.
        stack: The stack of layers, if the model has several.
        **input_kwargs: Inputs of the model, by keyword.

    Returns:
        A dataset of arrays: `embed` (batch), `attn` and `mlp` (layer, batch; and others that layers write, such as
        `mixer`), and `bias` (batch), of the final norm and the unembedding. With `by="head"`, `attn` has the dimension
        `head` too, and `attn_bias` (layer, batch) is the rest; with `by="neuron"`, likewise `mlp` and `mlp_bias`. In
        a mixture of experts, `mlp` has the dimension `expert` before `neuron`: what neurons add as the router weights
        their expert. Shared experts are in the rest then, and layers without experts have their neurons at expert 0.
        A layer without such a part has zeros. Its attribute `logit` has the logits.

    Raises:
        ExperimentError: The logit is not such a sum in this model; the message says where it is not.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> ids = torch.arange(6)[None]
        >>> parts = direct_logit_attribution(PatchableGraph(model, ids), ids, target=3, by="head")
        >>> parts["attn"].dims, parts["attn"].shape
        (('layer', 'head', 'batch'), (2, 2, 1))
        >>> total = sum(float(part.sum()) for part in parts.values())
        >>> abs(total - model(ids).logits[0, -1, 3].item()) < 1e-4
        True

    Source:
        Elhage et al., A mathematical framework for transformer circuits (2021); Wang et al., Interpretability in the
        wild (2022).
    """
    check_graph(pg)
    check_input_names(pg, input_kwargs, direct_logit_attribution)
    if by not in ("layer", "head", "neuron"):
        raise ExperimentError(f"by must be 'layer', 'head' or 'neuron', not {by!r}")
    extra("xarray", "a dataset of contributions")
    has_gradients = torch.is_grad_enabled()
    for tokens in (target, minus):
        checked_tokens(tokens, component(pg, "@logits"))
        if tokens is not None and not isinstance(tokens, Tensor) and type(tokens) is not int:
            raise ExperimentError(f"give one token, or a tensor with one for each row, not {tokens!r}")
    parts = _Parts(pg, stack, by)
    with torch.inference_mode(False), torch.set_grad_enabled(has_gradients):
        values = record(pg, Inputs(inputs, input_kwargs), parts.names).values
        return _Attribution(pg, parts, values, target, minus, position).dataset()


class _Parts:
    """The components that add up to the stream, by kind and layer; and what they are divided into."""

    def __init__(self, pg: PatchableGraph, stack: str, by: str) -> None:
        self.start, self.count = f"{stack}." if stack else "", layer_count(pg, stack)
        self.stack, self.by = stack, by
        self.embed = component(pg, f"{self.start}layers[0].resid_pre").name
        self.end = component(pg, f"{self.start}layers[{self.count - 1}].resid_post").name
        self.norm = next((n for n in (f"{self.start}@final_norm", "@final_norm") if n in pg.components), None)
        self.unembedding = pg.weights[stack].unembedding
        self.scale = _scale_before(pg, self.unembedding, self.end if self.norm is None else self.norm)
        self.writes: dict[tuple[str, int], str] = {}
        pattern = re.compile(re.escape(self.start) + r"layers\[(\d+)\]\.(\w+)_out")
        for name in pg.components:
            if (found := pattern.fullmatch(name)) is not None:
                self.writes[found[2], int(found[1])] = name
        divided, part = {"head": ("attn", "attn.z"), "neuron": ("mlp", "mlp.post")}.get(by, ("", ""))
        self.inner: dict[tuple[str, int], str] = {}
        self.mixtures: dict[tuple[str, int], _Mixture] = {}
        for (kind, layer), written in self.writes.items():
            if kind != divided:
                continue
            start = f"{self.start}layers[{layer}]."
            name = start + part
            if by == "neuron" and name not in pg.components and f"{start}router" in pg.components:
                name = written
                self.mixtures[kind, layer] = _Mixture.of(pg, start, name)
            self.inner[kind, layer] = component(pg, name).name
        self.norms = {place: norm for place in self.inner if (norm := _norm_before(pg, self.writes[place])) is not None}

    @property
    def names(self) -> list[str]:
        """All values that are needed."""
        norm = [self.norm] if self.norm is not None else []
        before = [norm.given.path for norm in self.norms.values()]
        before += [path for mixture in self.mixtures.values() for path in mixture.inputs.values()]
        return [self.embed, *self.writes.values(), *self.inner.values(), *before, self.end, *norm, self.unembedding]


def _scale_before(pg: PatchableGraph, unembedding: str, name: str) -> float:
    """Returns the number that a component is multiplied with before the unembedding, as in T5; 1.0 if with none."""
    evidence, scale = pg.components.evidence, 1.0
    flow, end = evidence.trails.flow, evidence.values[name]
    linear = next((each.unembedding for _, each in evidence.ends if each.unembedding is not None), None)
    value = flow.moving(linear.node)[0] if linear is not None and flow.path(linear) == unembedding else end
    while value != end:
        moving = flow.moving(value.node)
        if value.op not in SAME_VALUES | VIEWS | SCALINGS or len(moving) != 1:
            return 1.0  # another operation, which the check of the result finds
        if value.op in SCALINGS:
            numbers = [given for given in value.node.args[1:] if isinstance(given, (int, float))]
            if len(value.node.args) != 2 or len(numbers) != 1 or value.node.kwargs:
                return 1.0
            scale *= float(value.node.target(torch.ones((), dtype=torch.float64), *numbers))
        value = moving[0]
    return scale


def _norm_before(pg: PatchableGraph, name: str) -> Norm | None:
    """Returns the norm whose result a component is; `None` if it is not that of a norm."""
    trails, value = pg.components.evidence.trails, pg.components.evidence.values[name]
    while (norm := trails.norms.get(value)) is None:
        moving = trails.flow.moving(value.node) if value.op in SAME_VALUES else []
        if len(moving) != 1 or moving[0].shape != value.shape:
            return None
        value = moving[0]
    return norm if norm.given.value.shape == value.shape else None


class _Attribution:
    """The contributions of parts to a logit, in double precision."""

    def __init__(
        self, pg: PatchableGraph, parts: _Parts, values: Mapping[str, Tensor], target: Any, minus: Any, position: Any
    ) -> None:
        self._pg, self._parts = pg, parts
        self._recorded = values
        self._dtype = values[parts.end].dtype
        self._tolerance = _TOLERANCE.get(self._dtype, 1e-3)
        self._end = values[parts.end].double()
        self._values = {name: self._with_batch(name, value.double()) for name, value in values.items()}
        axes = pg.components[parts.end].axes
        if axes != ("batch", "position", "channel"):
            raise ExperimentError(f"the dimensions of the stream are {', '.join(axes)}, not batch, position, channel")
        self._positions = self._chosen(position)
        self._check_sum()
        norm = self._final_norm(values)
        normed = self._end if parts.norm is None else self._values[parts.norm]
        direction, (self._logit, bias) = self._direction(target), self._linear_logit(normed, target)
        if minus is not None:
            other_logit, other_bias = self._linear_logit(normed, minus)
            direction = direction - self._direction(minus)
            self._logit, bias = self._logit - other_logit, bias - other_bias
        self._gradient = norm.gradient(self._at(self._end), self._at(normed), direction)
        self._constant = (norm.bias * direction).sum(-1) + bias

    def _final_norm(self, values: Mapping[str, Tensor]) -> _LinearNorm:
        name = self._parts.norm
        if name is None:
            return _LinearNorm("", None, torch.zeros(()), subtracts_mean=False)
        target = resolve(captured(self._pg).root, name)
        if target.node.kind != "output":
            raise ExperimentError(f"the final norm, {target.path!r}, is not a module of its own")
        return _LinearNorm.of(target.frame, values[name], self._tolerance)

    def _with_batch(self, name: str, value: Tensor) -> Tensor:
        """Returns a value with separate dimensions for batch and positions, which some MLPs merge."""
        found = self._pg.components.get(name)
        is_merged = found is not None and found.axes[0] == "token" and self._end.ndim == 3
        return value.unflatten(0, self._end.shape[:2]) if is_merged else value

    def _chosen(self, position: Any) -> Tensor:
        rows, length = self._end.shape[:2]
        chosen = torch.as_tensor(position).to(self._end.device)
        if chosen.is_floating_point() or chosen.shape not in ((), (rows,)):
            raise ExperimentError(f"position must be a number, or one for each of the {rows} rows, not {position!r}")
        if bool(((chosen < -length) | (chosen >= length)).any()):
            raise ExperimentError(f"position {position!r} is out of range for {length} positions")
        return (chosen % length).expand(rows)

    def _at(self, value: Tensor) -> Tensor:
        """Returns a value, batch and position first, at the chosen position of each row."""
        return value.expand(len(self._positions), *value.shape[1:])[
            torch.arange(len(self._positions), device=value.device), self._positions
        ]

    def _check_sum(self) -> None:
        names = [self._parts.embed, *self._parts.writes.values()]
        total = sum(self._values[name].expand_as(self._end) for name in names)
        if not self._is_small(total - self._end, self._end):
            raise ExperimentError(
                "the residual stream of this model is not the sum of its embeddings and of what its layers write (it "
                "is normalized or scaled on the way), so a logit does not have direct contributions"
            )

    def _is_small(self, difference: Any, like: Tensor) -> bool:
        return bool(difference.abs().max() <= self._tolerance * like.abs().max())

    def _direction(self, tokens: Any) -> Tensor:
        """Returns the columns of the unembedding of the tokens of each row."""
        matrix: Tensor = self._pg.weights[self._parts.stack].W_U.detach()
        return matrix[:, self._of_rows(tokens).to(matrix.device)].T.double() * self._parts.scale

    def _of_rows(self, tokens: Any) -> Tensor:
        numbers = torch.as_tensor(tokens, device=self._end.device)
        rows = len(self._positions)
        if numbers.shape not in ((), (rows,)):
            raise ExperimentError(
                f"there are {rows} rows, and tokens of shape {tuple(numbers.shape)}: give one for each"
            )
        return numbers.expand(rows)

    def _linear_logit(self, normed: Tensor, tokens: Any) -> tuple[Tensor, Tensor]:
        """Returns the results of the unembedding for the tokens of each row, and their biases; checks it is linear."""
        numbers = self._of_rows(tokens)
        logits = self._values[self._parts.unembedding]
        logits = of_rows(logits.reshape(len(numbers), -1, logits.shape[-1]), numbers)
        expected = torch.einsum("bpd,bd->bp", normed, self._direction(tokens))
        at_position = self._at(expected)
        if logits.shape[1] == 1 and expected.shape[1] > 1:  # computed for one position only
            expected, found = at_position[:, None], logits[:, 0]
        else:
            found = self._at(logits)
        bias = logits - expected
        for token in numbers.unique():
            of_token = bias[numbers == token]
            if not self._is_small(of_token - of_token.flatten()[0], logits):
                raise ExperimentError(
                    f"{self._parts.unembedding!r} is not a linear map of the stream after the final norm at position "
                    f"{self._positions.tolist()[0]}: there is something else in between, so the logit is not a sum of "
                    "contributions; or it reads another position (position=0 is that of a class token)"
                )
        return found, found - at_position

    def dataset(self) -> Dataset:
        """Returns the contributions."""
        from xarray import DataArray, Dataset

        found: dict[str, Any] = {"embed": (["batch"], self._share(self._parts.embed))}
        for kind in dict.fromkeys(kind for kind, _ in self._parts.writes):
            found |= self._of_kind(kind)
        found["bias"] = (["batch"], self._constant)
        self._check_total([values for _, values in found.values()])
        arrays = {name: DataArray(values.cpu().numpy(), dims=dims) for name, (dims, values) in found.items()}
        attrs = {"logit": self._logit.tolist(), "position": self._positions.tolist()}
        # The operations after the unembedding may be a cap or a scale: the sum is that before these.
        if self._pg.weights[self._parts.stack].changes_logits:
            logits, linear = (resolve(captured(self._pg).root, name) for name in ("@logits", self._parts.unembedding))
            warn_each_time(
                f"the model changes its logits after the unembedding ({logits.path!r} is not {linear.path!r}): the "
                "contributions add up to the logit before that",
                ExperimentWarning,
            )
        return Dataset(arrays, {"layer": list(range(self._parts.count))}, attrs)

    def _check_total(self, contributions: Sequence[Tensor]) -> None:
        """Checks that all contributions, whose last dimension is the batch, add up to the logit."""
        by_row = torch.cat([values.reshape(-1, len(self._positions)) for values in contributions])
        if bool(((by_row.sum(0) - self._logit).abs() > self._tolerance * by_row.abs().sum(0)).any()):
            raise ExperimentError(
                f"the contributions do not add up to the logit: {self._parts.norm!r} is not the norm that it was when "
                "its weights were measured"
            )

    def _share(self, name: str) -> Tensor:
        value = self._values[name]
        return (self._at(value.expand_as(self._end)) * self._gradient).sum(-1)

    def _of_kind(self, kind: str) -> dict[str, Any]:
        """Returns the contributions of what layers write, of one kind."""
        rows, layers = len(self._positions), range(self._parts.count)
        names = [self._parts.writes.get((kind, layer)) for layer in layers]
        zeros = torch.zeros(rows, dtype=torch.float64, device=self._end.device)
        whole = torch.stack([zeros if name is None else self._share(name) for name in names])
        if not any(kind == other for other, _ in self._parts.inner):
            return {kind: (["layer", "batch"], whole)}
        shares = [None if name is None else self._inner_shares(kind, layer) for layer, name in enumerate(names)]
        dims = ["expert"] * any(kind == other for other, _ in self._parts.mixtures) + [self._parts.by]
        known = [share if share is None or share.ndim > len(dims) else share[None] for share in shares]
        sizes = torch.tensor([share.shape[:-1] for share in known if share is not None]).amax(0).tolist()
        divided = torch.zeros(len(shares), *sizes, rows, dtype=torch.float64, device=self._end.device)
        for layer, share in enumerate(known):
            if share is not None:
                divided[layer][tuple(map(slice, share.shape[:-1]))] = share
        return {
            kind: (["layer", *dims, "batch"], divided),
            f"{kind}_bias": (["layer", "batch"], whole - divided.flatten(1, -2).sum(1)),
        }

    def _inner_shares(self, kind: str, layer: int) -> Tensor:
        """Returns the contributions of the heads or neurons of a layer, and checks that they add up to its output."""
        weights, name = self._pg.weights[self._parts.stack], self._parts.inner[kind, layer]
        axes = self._pg.components[name].axes
        written = self._values[self._parts.writes[kind, layer]]
        out, gradient = written, self._gradient
        if (norm := self._parts.norms.get((kind, layer))) is not None:
            out = self._values[norm.given.path]
            linear = _LinearNorm.of(norm.frame, out.to(self._dtype), self._tolerance)
            gradient = linear.gradient(self._at(out), self._at(written), gradient)
        if (mixture := self._parts.mixtures.get((kind, layer))) is not None:
            return self._expert_shares(mixture, (self._at(out) * gradient).sum(-1), gradient)
        if self._parts.by == "head":
            own = arranged(self._values[name], axes, ["batch", "position", "head", "channel"])
            matrix = weights.W_O[layer].detach().double()
            total = torch.einsum("bphc,hcd->bpd", own, matrix)
            shares = torch.einsum("bhc,hcd,bd->hb", self._at(own), matrix, gradient)
        else:
            axes = ("batch", "position", *axes[1:]) if axes[0] == "token" else axes
            own = arranged(self._values[name], axes, ["batch", "position", "neuron"])
            matrix = weights.W_out[layer].detach().double()
            total = own @ matrix
            shares = self._at(own).T * (matrix @ gradient.T)
        rest = out - total
        if not self._is_small(rest - rest[:1, :1], out):
            raise ExperimentError(
                f"{self._parts.writes[kind, layer]!r} is not the sum over its {self._parts.by}s: there is something "
                "else in between; use by='layer'"
            )
        return shares

    @torch.enable_grad()
    def _expert_shares(self, mixture: _Mixture, whole: Tensor, gradient: Tensor) -> Tensor:
        """Returns the contributions of the neurons of experts, and checks that they add up to those of the mixture."""
        rerun, silent = (mixture.rerun(self._recorded, factor) for factor in (1.0, 0.0))
        own, rest = (
            (self._at(self._with_batch(mixture.name, run.output.double())) * gradient).sum(-1)
            for run in (rerun, silent)
        )
        shares = rerun.shares(own, mixture.count)
        size = self._tolerance * (shares.abs().sum((0, 1)) + own.abs())
        if bool((((own - whole).abs() > size) | ((own - rest - shares.sum((0, 1))).abs() > size)).any()):
            raise ExperimentError(
                f"{mixture.name!r} is not the sum over the neurons of its experts: there is something else in between, "
                "or a patch changed it; use by='layer'"
            )
        return shares.detach()


@dataclass(frozen=True)
class _LinearNorm:
    """A norm as a linear map: `scale * weight * (value - mean) + bias`, with the scale of the run.

    Attributes:
        path: The path of the module.
        weight: The weight, up to a factor; `None` if there is no norm.
        subtracts_mean: Whether the mean over channels is subtracted.
    """

    path: str
    weight: Tensor | None
    bias: Tensor
    subtracts_mean: bool

    @classmethod
    def of(cls, frame: Frame, like: Tensor, tolerance: float) -> _LinearNorm:
        """Finds weight and bias from what the norm returns for some vectors of the size and dtype of `like`."""
        size = like.shape[-1]
        signs = torch.ones(size, dtype=like.dtype, device=like.device)
        signs[1::2] = -1
        if size % 2:
            signs[-3:] = torch.tensor([1, 1, -2])
        asked = torch.stack([torch.zeros_like(signs), signs, signs + 3])[None]
        with torch.no_grad():
            zero, plain, shifted = called(frame, frame.module, (asked,), {})[0].double()
        path = format_path(frame.path)
        return cls(path, (plain - zero) / signs.double(), zero, bool((plain - shifted).abs().max() < tolerance))

    def gradient(self, value: Tensor, normed: Tensor, direction: Tensor) -> Tensor:
        """Returns what to multiply parts of `value` with, for their contributions to `normed * direction`."""
        if self.weight is None:
            return direction
        centered = value - value.mean(-1, keepdim=True) if self.subtracts_mean else value
        unscaled = centered * self.weight
        scale = ((normed - self.bias) * unscaled).sum(-1, keepdim=True) / unscaled.square().sum(-1, keepdim=True)
        if bool((normed - self.bias - scale * unscaled).abs().max() > 1e-2 * normed.abs().max()):
            raise ExperimentError(f"the norm {self.path!r} is neither a layer norm nor an RMS norm")
        found = direction * self.weight * scale
        return found - found.mean(-1, keepdim=True) if self.subtracts_mean else found


# -- mixtures of experts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mixture:
    """A module that mixes experts, to be run again.

    Attributes:
        name: The name of what it writes.
        target: Its output.
        inputs: The paths of its inputs, by name.
        experts: By the address of a parameter, the expert that it belongs to; `None` if it holds those of all.
    """

    name: str
    target: Target
    inputs: dict[str, str]
    count: int
    experts: dict[int, tuple[Tensor, int | None]]

    @classmethod
    def of(cls, pg: PatchableGraph, start: str, name: str) -> _Mixture:
        root = captured(pg).root
        norm = _norm_before(pg, name)
        target = resolve(root, name if norm is None else norm.given.path)
        frame = target.frame
        given = {node.base_name: node for node in frame.nodes if node.kind == "input"}
        used = {key: node for key, node in given.items() if node.spec != ScalarSpec(None)}
        are_tensors = all(isinstance(node.spec, TensorSpec) for node in used.values() if not _is_empty(node.spec))
        if target.node.kind != "output" or not are_tensors:
            raise ExperimentError(
                f"{name!r}: the experts are not in a module that takes tensors and returns this, so that it could be "
                "run again for their neurons; use by='layer'"
            )
        inputs = {
            key: format_path((*frame.path, key)) for key, node in used.items() if isinstance(node.spec, TensorSpec)
        }
        count, components = component(pg, f"{start}router").shape[-1], pg.components
        experts: dict[int, tuple[Tensor, int | None]] = {}
        names = [f"{start}experts[{number}].out" for number in range(count)]
        ran = next((name for name in names if name in components), None)
        if ran is not None:  # the others may run on these inputs
            for number, module in enumerate(members_like(resolve(root, ran).frame).values()):
                experts |= {each.data_ptr(): (each, number) for each in module.parameters()}
        if not experts:
            whole = (each for each in frame.module.parameters() if each.ndim == 3 and len(each) == count)
            experts = {each.untyped_storage().data_ptr(): (each, None) for each in whole}
        return cls(name, target, inputs, count, experts)

    def rerun(self, recorded: Mapping[str, Tensor], factor: float) -> _NeuronRun:
        """Runs it on its recorded inputs, with all neurons times a factor."""
        run = _NeuronRun(self, factor)
        with run:
            run.output = self.target.frame.module(**{key: recorded[path] for key, path in self.inputs.items()})
        for key in self.target.dig:
            run.output = take(run.output, key)
        return run


class _NeuronRun(TorchFunctionMode):
    """A run of a mixture of experts, cut where linear maps of experts read something.

    So its output depends on what the last linear maps of experts read only: the neurons.

    Attributes:
        output: What the module returned.
    """

    output: Any

    def __init__(self, mixture: _Mixture, factor: float) -> None:
        super().__init__()
        self._mixture, self._factor = mixture, factor
        self._chosen: dict[int, tuple[Tensor, Tensor]] = {}
        self._read: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if raw_name(func) == "__getitem__" and self._expert_of(args[0]) is not None and isinstance(args[1], Tensor):
            result = func(*args, **kwargs)
            if args[1].ndim == 1:  # a weight for each row
                self._chosen[id(result)] = result, args[1]
            return result
        if raw_name(func) not in _LINEAR_MAPS:
            return func(*args, **kwargs)
        given = dict(enumerate(args)) | kwargs
        weights = [key for key, each in given.items() if isinstance(each, Tensor) and self._expert_of(each) is not None]
        factors = [key for key, each in given.items() if isinstance(each, Tensor) and each.is_floating_point()]
        if not weights:
            return func(*args, **kwargs)
        key = next(key for key in factors if key not in weights)
        read = given[key].detach() * self._factor
        read.requires_grad_()
        self._read.append((read, self._experts_of_rows(given[weights[0]], read, given)))
        given[key] = read
        return func(*(given[n] for n in range(len(args))), **{name: given[name] for name in kwargs})

    def _expert_of(self, weight: Any) -> tuple[Tensor, int | None] | None:
        if not isinstance(weight, Tensor) or weight.ndim < 2:
            return None
        if id(weight) in self._chosen:
            return self._chosen[id(weight)][0], None
        return self._mixture.experts.get(weight.untyped_storage().data_ptr())

    def _experts_of_rows(self, weight: Tensor, read: Tensor, given: Mapping[Any, Any]) -> Tensor:
        """Returns the expert that each row goes to."""
        if id(weight) in self._chosen:
            return self._chosen[id(weight)][1].expand(len(read))
        found = self._expert_of(weight)
        assert found is not None
        parameter, number = found
        rows = read.shape[:-1].numel()
        if number is None and weight.ndim == 3:
            offsets = given.get("offs", given.get(2))
            if not isinstance(offsets, Tensor):
                raise ExperimentError(
                    f"{self._mixture.name!r}: it is not known which rows go to which expert; use by='layer'"
                )
            return torch.searchsorted(offsets.long(), torch.arange(rows, device=offsets.device), right=True)
        if number is None:
            number = (weight.storage_offset() - parameter.storage_offset()) // parameter.stride(0)
        return torch.full((rows,), number, device=read.device)

    def shares(self, values: Tensor, count: int) -> Tensor:
        """Returns what each neuron adds to a value of each row of the batch: (experts, neurons, batch)."""
        leaves = [read for read, _ in self._read]
        found: list[Tensor] = []
        for value in values:
            gradients: Sequence[Tensor | None] = (
                torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True) if value.requires_grad else ()
            )
            own = [
                ((read * gradient).double().reshape(len(experts), -1), experts)
                for (read, experts), gradient in zip(self._read, gradients, strict=False)
                if gradient is not None
            ]
            if not own:
                raise ExperimentError(
                    f"{self._mixture.name!r}: no linear map with the weights of an expert was seen; use by='layer'"
                )
            total = values.new_zeros(count, max(each.shape[-1] for each, _ in own))
            for each, experts in own:
                total.index_add_(0, experts.long(), each.to(total.dtype))
            found.append(total)
        return torch.stack(found, -1)


_LINEAR_MAPS = frozenset("linear matmul mm bmm addmm baddbmm grouped_mm _grouped_mm grouped_mm_fallback".split())


def _is_empty(spec: Any) -> bool:
    return isinstance(spec, ContainerSpec) and not spec.children
