"""Direct logit attribution: what each part of a model adds to a logit, through the final norm and the unembedding only.

One run of the model gives the values and their derivatives, with the scales of norms held: these
derivatives are linear maps between a part and the logit, or between heads and what they write to the stream.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from graphpatch_notebook.errors import ExperimentError, extra, warn_each_time
from graphpatch_notebook.experiments.attribution.rules import FrozenDenominators
from graphpatch_notebook.experiments.engine.inputs import (
    Inputs,
    OverExamples,
    as_one,
    check_ends,
    check_graph,
    inputs_of,
)
from graphpatch_notebook.experiments.methods.lens import checked_tokens, component, layer_count, numbers_of, of_rows
from graphpatch_notebook.options import check_input_names
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import CustomPatch, ProbePatch
from graphpatch_notebook.patching.model_state import runs_where_the_model_is

if TYPE_CHECKING:
    from xarray import Dataset

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
_DIVIDED = {"head": ("attn", "attn.z"), "neuron": ("mlp", "mlp.post"), "layer": ("", "")}


@runs_where_the_model_is
def direct_logit_attribution(
    pg: PatchableGraph,
    *inputs: Any,
    target: int | str | Tensor,
    minus: int | str | Tensor | None = None,
    by: Literal["layer", "head", "neuron"] = "layer",
    position: int | Sequence[int] | Tensor | None = -1,
    stack: str = "",
    batch_size: int | None = None,
    keep_examples: bool = False,
    progress: bool = True,
    executor: Any = None,
    recipe: Any = None,
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
        target: The token whose logit is attributed: a number or text, or a tensor with a number for each row.
        minus: A token whose logit is subtracted, likewise; for logit differences.
        by: What layers are divided into: `"head"` for attention, `"neuron"` for MLPs.
        position: The position of the logit; one for all rows, or one for each row; `None` for all positions.
        stack: The stack of layers, if the model has several.
        batch_size: For a dataset in place of the inputs, as for `causal_trace`; then `target` and
            `minus` are numbers, tensors with one for each example, or lists with one for each batch.
        keep_examples: As for `causal_trace`.
        progress: Whether a progress bar is shown for a dataset.
        executor: Runs batches of a dataset elsewhere, as for `map_batches`.
        recipe: As for `map_batches`.
        **input_kwargs: Inputs of the model, by keyword.

    Returns:
        A dataset of arrays: `embed` (batch), `attn` and `mlp` (layer, batch; and others that layers write, such as
        `mixer`), and `bias` (batch), of the final norm and the unembedding. With `by="head"`, `attn` has the dimension
        `head` too, and `attn_bias` (layer, batch) is the rest; with `by="neuron"`, likewise `mlp` and `mlp_bias`. A
        layer without such a part has zeros. With `position=None`, all have the dimension `position`, too. The
        attributes `logit` and `position` have the logits and their positions.

    Raises:
        ExperimentError: The logit is not such a sum in this model; the message says where it is not. Mixtures of
            experts are not divided into neurons.

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
    check_graph(pg, has_gradients=True)
    if examples := OverExamples({"inputs": as_one(inputs, input_kwargs)}, batch_size, keep_examples):
        return examples.run(  # type: ignore[no-any-return]
            pg, direct_logit_attribution, each={"target": target, "minus": minus}, by=by, position=position,
            stack=stack, progress=progress, executor=executor, recipe=recipe,
        )  # fmt: skip
    check_input_names(pg.nodes.root, input_kwargs, direct_logit_attribution)
    if by not in _DIVIDED:
        raise ExperimentError(f"by must be 'layer', 'head' or 'neuron', not {by!r}")
    xarray = extra("xarray", "a dataset of contributions")
    wanted = [numbers_of(pg, token) for token in (target, minus) if token is not None]
    for tokens in wanted:
        checked_tokens(tokens, component(pg, "@logits"))
        if isinstance(tokens, Sequence):  # for other functions, several tokens for all rows
            raise ExperimentError(f"give one token, or a tensor with one for each row, not {tokens!r}")
    with torch.inference_mode(False), torch.enable_grad():
        given = inputs_of(pg, inputs, input_kwargs)
        run = _Run(pg, given, stack, by)
        logit, bias, gradient = run.direction(wanted, position)
        check_ends(pg, given, position, what="position")
        rows = ["batch"] if position is not None else ["batch", "position"]
        found: dict[str, tuple[list[str], Tensor]] = {"embed": (rows, run.share(run.embed, gradient))}
        for kind in dict.fromkeys(kind for kind, _ in run.writes):
            names = [run.writes.get((kind, layer)) for layer in range(run.layers)]
            whole = torch.stack([logit * 0 if name is None else run.share(name, gradient) for name in names])
            found[kind] = (["layer", *rows], whole)
            if kind == _DIVIDED[by][0]:
                shares = [logit[None] * 0 if name is None else run.inner_shares(name, gradient) for name in names]
                divided = pad_sequence(shares, batch_first=True)
                found[kind] = (["layer", by, *rows], divided)
                found[f"{kind}_bias"] = (["layer", *rows], whole - divided.sum(1))
        found["bias"] = (rows, bias)
    if pg.weights[stack].changes_logits:  # a cap
        message = (
            "the model changes its logits after the unembedding: the contributions add up to the logit before that"
        )
        warn_each_time(message, "experiment")
    arrays = {name: xarray.DataArray(values.cpu().numpy(), dims=dims) for name, (dims, values) in found.items()}
    attrs = {"logit": logit.tolist(), "position": run.positions.tolist(), **given.attrs(pg)}
    return xarray.Dataset(arrays, {"layer": list(range(run.layers))}, attrs)  # type: ignore[no-any-return]


class _Run:
    """A run of the model with gradients, in which the scales of norms are constants.

    Attributes:
        layers: The number of layers.
        embed: The name of what the first layer reads.
        writes: The names of what layers add to the stream, by kind and layer.
        positions: The position of each row; all positions, if none was given.
        at: The index of these in a value, `(batch, position, ...)`.
    """

    positions: Tensor
    at: tuple[Any, ...]

    def __init__(self, pg: PatchableGraph, inputs: Inputs, stack: str, by: str) -> None:
        start, self.layers = f"{stack}." if stack else "", layer_count(pg, stack)
        self.embed = component(pg, f"{start}layers[0].resid_pre").name
        end = component(pg, f"{start}layers[{self.layers - 1}].resid_post")
        if end.axes != ("batch", "position", "channel"):
            raise ExperimentError(f"the stream has the dimensions {end.axes}, not batch, position, channel")
        pattern = re.compile(re.escape(start) + r"layers\[(\d+)\]\.(\w+)_out")
        written = {name: match for name in pg.components if (match := pattern.fullmatch(name)) is not None}
        self.writes = {(match[2], int(match[1])): name for name, match in written.items()}
        divided, part = _DIVIDED[by]
        inner = {
            name: component(pg, f"{start}layers[{layer}].{part}")
            for (kind, layer), name in self.writes.items()
            if kind == divided
        }
        self._wanted = ("batch", "position", *(("head", "channel") if by == "head" else ("neuron",)))
        self._inner = {name: (each.name, each.axes) for name, each in inner.items()}
        logits, axes = "@logits", component(pg, "@logits").axes
        unembedding = pg.weights[stack].unembedding
        if pg.weights[stack].changes_logits:
            logits, axes = unembedding, tuple("vocab" if axis == "channel" else axis for axis in end.path_axes)
        if {*axes} != {"batch", "position", "vocab"} and axes not in (("batch", "vocab"), ("token", "vocab")):
            raise ExperimentError(f"the logits have the dimensions {axes}, not batch, position, vocab")
        names = [self.embed, end.name, logits, *self.writes.values(), *(each.name for each in inner.values())]
        self._values = _values(pg, inputs, self.embed, names)
        self._end, self._logits = self._values[end.name], self._values[logits]
        if axes[0] == "position":
            self._logits = self._logits.transpose(0, 1)
        self._tolerance = _TOLERANCE.get(self._end.dtype, 1e-3)
        total = sum(self._in_stream(name).double() for name in (self.embed, *self.writes.values()))
        if not self._is_small(total - self._end.detach(), self._end):
            raise ExperimentError(
                "the residual stream of this model is not the sum of its embeddings and of what its layers write (it "
                "is normalized or scaled on the way), so a logit does not have direct contributions"
            )

    def direction(self, tokens: Sequence[Any], position: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the logit of each row, its bias, and its derivative by the last state, (batch, position, channel)."""
        rows, length = self._end.shape[:2]
        self.positions, self.at = torch.arange(length), (slice(None),)
        if position is not None:
            self.positions = self._for_rows(position, "position", length) % length
            self.at = (torch.arange(rows, device=self.positions.device), self.positions)
        numbers = torch.stack([self._for_rows(each, "the token", self._logits.shape[-1]) for each in tokens], -1)
        logits = self._logits.reshape(rows, -1, self._logits.shape[-1])
        picked = [of_rows(logits, each) for each in numbers.unbind(-1)]
        logit = picked[0] - picked[1] if len(picked) > 1 else picked[0]
        gradient = _gradient(logit.sum(), self._end)
        logit, parts = logit.detach().double(), (self._end.detach().double() * gradient.double()).sum(-1)
        at: tuple[Any, ...] = self.at
        is_linear = True
        if logit.shape[1] != length:  # computed for one position only
            if position is None:
                raise ExperimentError(
                    f"the model computes the logits of {logit.shape[1]} of {length} positions: give one"
                )
            parts, at = parts[at][:, None], (slice(None), 0)
            others = gradient.clone()
            others[self.at] = 0
            is_linear = not others.any()
        bias = logit - parts
        for pair in numbers.unique(dim=0):
            same = bias[(numbers == pair).all(-1)]
            is_linear &= self._is_small(same - same.flatten()[0], logits)
        if not is_linear:
            raise ExperimentError(
                f"the logit is not a linear map of the stream after the final norm at position "
                f"{self.positions.tolist()[0]}: there is something else in between, so the logit is not a sum of "
                "contributions; or it reads another position (position=0 is that of a class token)"
            )
        return logit[at], bias[at], gradient

    def share(self, name: str, gradient: Tensor) -> Tensor:
        """Returns what a value of the stream adds to the logit of each row."""
        return (self._in_stream(name).double() * gradient.double()).sum(-1)[self.at]

    def _in_stream(self, name: str) -> Tensor:
        """Returns a value with the shape of the stream: some MLPs merge batch and positions."""
        value = self._values[name].detach()
        return value.reshape(self._end.shape) if value.numel() == self._end.numel() else value.expand_as(self._end)

    def inner_shares(self, written: str, gradient: Tensor) -> Tensor:
        """Returns what each head or neuron adds, heads or neurons first; checks that what it writes is a sum."""
        name, axes = self._inner[written]
        value, inner = self._values[written].reshape(self._end.shape), self._values[name]
        everywhere = gradient.sum(1, keepdim=True).expand_as(value)
        by_position = self._products(inner, axes, _gradient(value, inner, everywhere))
        terms = value.detach().double() * everywhere
        rest = terms.sum(-1) - by_position.sum(-1)
        if not self._is_small(rest - rest[:, :1], terms.abs().sum(-1)):
            raise ExperimentError(
                f"{written!r} is not the sum over its parts in {name!r}: there is something else in between; use "
                "by='layer'"
            )
        return self._products(inner, axes, _gradient(value, inner, gradient))[self.at].movedim(-1, 0)

    def _products(self, inner: Tensor, axes: tuple[str | None, ...], gradient: Tensor) -> Tensor:
        """Returns value times derivative, summed over channels: (batch, position, heads or neurons)."""
        product = inner.detach().double() * gradient.double()
        if axes[0] == "token":
            product, axes = product.unflatten(0, self._end.shape[:2]), ("batch", "position", *axes[1:])
        if axes != self._wanted:
            raise ExperimentError(f"a value with the dimensions {axes} should have {self._wanted}")
        return product.sum(-1) if product.ndim > 3 else product

    def _for_rows(self, given: Any, what: str, count: int) -> Tensor:
        """Returns a number for each row; a single one is that of all rows."""
        numbers, rows = torch.as_tensor(given, device=self._end.device), len(self._end)
        is_inside = bool(((numbers >= -count) & (numbers < count)).all())
        if numbers.is_floating_point() or numbers.shape not in ((), (rows,)) or not is_inside:
            raise ExperimentError(f"{what} must be one of {count}, or one for each of {rows} rows, not {given!r}")
        return numbers.expand(rows)

    def _is_small(self, difference: Tensor, like: Tensor) -> bool:
        return bool(difference.abs().max() <= self._tolerance * like.abs().max())


def _values(pg: PatchableGraph, inputs: Inputs, first: str, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Returns values of a run, with derivatives by all values after `first`."""
    probes: dict[Any, ProbePatch] = {name: ProbePatch() for name in names}
    leaf = CustomPatch(custom_op=lambda value: value.detach().requires_grad_().clone())
    with FrozenDenominators(), pg.patch({first: leaf}), pg.patch(probes, strict=True):
        inputs.run(pg)
    return {name: probe.activation for name, probe in probes.items()}


def _gradient(result: Tensor, value: Tensor, given: Tensor | None = None) -> Tensor:
    try:
        found: Tensor | None = torch.autograd.grad(result, value, given, retain_graph=True, allow_unused=True)[0]
    except RuntimeError as error:
        raise ExperimentError(f"contributions are computed from gradients, which this model lacks: {error}") from error
    return torch.zeros_like(value) if found is None else found
