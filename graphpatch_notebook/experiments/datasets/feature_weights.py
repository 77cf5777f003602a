"""What features add to logits, and which heads and features write to them, as weights say: without any data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.capture.records import spliced_calls
from graphpatch_notebook.components.flow import Value
from graphpatch_notebook.components.weights import FactoredMatrix
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.attribution.rules import FrozenDenominators
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patching import SaeSplice
from graphpatch_notebook.paths import format_path

_NAME = re.compile(r"((.*?)\.?layers\[(\d+)\]\.)(.+)")
_WRITTEN = {"resid_pre": 0.2, "attn.z": 1.0, "attn_out": 1.0, "resid_mid": 2.2, "mlp.post": 3.0, "mlp_out": 3.0}
_WRITTEN |= {"resid_post": 4.2}
_READ = {"resid_pre": 0.0, "ln1": 0.5, "resid_mid": 2.0, "ln2": 2.5, "resid_post": 4.0}
"""In which order parts of a layer write into the stream, and read it; an SAE reads a state before it writes there."""


@dataclass(frozen=True)
class FeaturePlace:
    """Where features are.

    Attributes:
        name: The name of their value; of latents, of what they are decoded to.
        start: What the names of the parts of its layer begin with.
        stack: The stack of layers.
        layer: The number of the layer.
        part: The name of the value in its layer, such as `mlp.post`.
        call: The call of the SAE whose latents they are.
    """

    name: str
    start: str
    stack: str
    layer: int
    part: str
    call: Any = None

    @classmethod
    def of_features(cls, pg: PatchableGraph, base: str) -> FeaturePlace:
        """Returns the place of features, by the name of their value."""
        path = pg.components[base].path if base in pg.components else base
        every = {f"{format_path(each.frame.path)}.latents": each for each in spliced_calls(pg.nodes.root)}
        return cls.of(pg, every[path].target, every[path]) if path in every else cls.of(pg, base)

    @classmethod
    def of(cls, pg: PatchableGraph, path: str, call: Any = None) -> FeaturePlace:
        """Returns the place of a value, by its path or name.

        Raises:
            ExperimentError: It is not in a layer, or belongs to a cross-layer transcoder.
        """
        names = (each.name for each in pg.components.values() if each.path == path and not each.index)
        name = path if path in pg.components else next(names, path)
        found = _NAME.fullmatch(name)
        if found is None or not (call is None or isinstance(call.frame.module, SaeSplice)):
            raise ExperimentError(f"which weights write and read for {name!r} is not known")
        return cls(name, found[1], found[2], int(found[3]), found[4], call)

    @property
    def form(self) -> str:
        """The name of one of the features, with a gap for its number."""
        if self.part == "attn.z":
            return f"{self.start}attn.heads[{{}}].z"
        return f"{self.name}[..., {{}}]" if self.call is None else f"{self.name}.{self.call.op}.latents[{{}}]"

    def _size(self, pg: PatchableGraph) -> int:
        """Returns how many channels, or latents, there are."""
        return pg.components[self.name if self.call is None else f"{self.name}.{self.call.op}.latents"].shape[-1]

    def output_norm(self, pg: PatchableGraph) -> Value | None:
        """Returns what the norm returns that is between what heads or neurons write and the stream, if there is one."""
        inner, evidence = self.part.partition("."), pg.components.evidence
        found = evidence.values.get(f"{self.start}{inner[0]}_out") if inner[2] else None
        return found if found in evidence.trails.norms else None

    def written(self, pg: PatchableGraph) -> Tensor:
        """Returns what each feature adds to the stream, or to a norm before that, (features, channels).

        Raises:
            ExperimentError: It is not known.
        """
        if self.part.startswith("resid_") or self.part.endswith("_out"):
            return torch.eye(self._size(pg)) if self.call is None else _decoder(self.call.frame.module, self._size(pg))
        if self.part in ("mlp.post", "attn.z") and self.call is None:
            weights = pg.weights[self.stack]
            matrix: Tensor = (weights.W_out if self.part == "mlp.post" else weights.W_O)[self.layer]
            return matrix.reshape(-1, matrix.shape[-1])
        raise ExperimentError(f"what {self.name!r} adds to the residual stream is not known")

    def read(self, pg: PatchableGraph) -> tuple[FeaturePlace, Tensor]:
        """Returns what is read for the features, and their coefficients in it, (features, channels).

        Raises:
            ExperimentError: It is not known.
        """
        if self.call is not None:
            splice, count = self.call.frame.module, self._size(pg)
            matrix = getattr(splice.sae, "W_enc", getattr(getattr(splice.sae, "encoder", None), "weight", None))
            if not isinstance(matrix, Tensor) or matrix.ndim != 2:
                raise ExperimentError("the SAE has neither W_enc nor encoder.weight")
            return FeaturePlace.of(pg, (*splice.sources, self.call.target)[0]), matrix if len(
                matrix
            ) == count else matrix.mT
        if self.part == "mlp.post":
            name = next(name for name in ("ln2", "resid_mid", "resid_pre") if f"{self.start}{name}" in pg.components)
            return FeaturePlace.of(pg, f"{self.start}{name}"), pg.weights[self.stack].W_in[self.layer].mT
        if self.part.startswith("resid_"):
            return self, torch.eye(self._size(pg))
        raise ExperimentError(f"{self.name!r} is not known to be a linear map of the residual stream")


def _decoder(splice: SaeSplice, count: int) -> Tensor:
    """Returns what each latent adds to the reconstruction, (latents, channels).

    Raises:
        ExperimentError: It is not known.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad():
            none = splice.as_read(torch.zeros(1, count)).requires_grad_()
            nothing = splice.sae.decode(none)
            each = torch.eye(nothing.shape[-1]).to(nothing)
            found: Tensor = torch.autograd.grad(nothing, none, each[:, None], is_grads_batched=True)[0][:, 0].mT
            some = torch.linspace(0, 1, len(found)).to(none)
            total = splice.sae.decode(some[None])[0] - nothing[0]
    except Exception as error:  # of any kind: it may need what `encode` notes
        raise ExperimentError(f"decode of latents alone raises {type(error).__name__}: {error}") from error
    if not torch.allclose(some @ found, total, rtol=1e-3, atol=1e-4 * float(total.abs().max())):
        raise ExperimentError("latents are not decoded by a linear map")
    return found.detach()


def through_norm(pg: PatchableGraph, value: Value | None, rows: Tensor, *, backwards: bool = False) -> Tensor:
    """Returns what the norm that returns a value makes of rows, without what it adds; of a state whose scale is 1.

    Args:
        pg: The graph.
        value: The value.
        rows: The rows, (rows, channels), returned as they are if the value is not that of a norm.
        backwards: Whether rows are coefficients in the value; those in what the norm reads are returned.
    """
    norm = None if value is None else pg.components.evidence.trails.norms.get(value)
    if norm is None:
        return rows
    module, size = norm.frame.module, rows.shape[-1]
    like = next(module.parameters(), rows)
    state = torch.ones(size, dtype=like.dtype, device=like.device)
    state[1::2] = -1
    with torch.inference_mode(False), torch.enable_grad():
        states = (state - state.mean()).expand(size, -1).clone().requires_grad_()
        with FrozenDenominators():
            normed = module(states)
        jacobian = torch.autograd.grad(normed, states, torch.eye(size).to(states))[0].to(rows)
    return rows @ (jacobian if backwards else jacobian.mT)


def writers_before(pg: PatchableGraph, read: FeaturePlace) -> list[FeaturePlace]:
    """Returns the heads and features that write into a state of the stream, or into what a norm reads.

    Features are the latents of the SAEs of the graph, or else the neurons.

    Raises:
        ExperimentError: The value is neither.
    """
    values, norms = pg.components.evidence.values, pg.components.evidence.trails.norms
    is_after_norm = any("resid_" in name and value in norms for name, value in values.items())
    if read.part not in _READ or is_after_norm:
        raise ExperimentError(f"{read.name!r} is not known to be a sum of what components write, or a norm of that")
    is_parallel = read.part == "ln2" and f"{read.start}resid_mid" not in pg.components
    end = read.layer, 0.5 if is_parallel else _READ[read.part]
    calls = [each for each in spliced_calls(pg.nodes.root) if isinstance(each.frame.module, SaeSplice)]
    found = [FeaturePlace.of(pg, each.target, each) for each in calls]
    parts = (".attn.z",) if calls else (".attn.z", ".mlp.post")
    found += [FeaturePlace.of(pg, name) for name in pg.components if name.endswith(parts)]
    return [each for each in found if each.stack == read.stack and (each.layer, _WRITTEN.get(each.part, 9.0)) < end]


def sources(pg: PatchableGraph, read: FeaturePlace, rows: Tensor) -> list[tuple[list[str], Tensor]]:
    """Returns heads, and features, that write into what rows read, and how strongly each does, (rows, sources).

    Args:
        pg: The graph.
        read: What the rows are coefficients in.
        rows: The rows, (rows, channels).
    """
    values = pg.components.evidence.values
    rows = through_norm(pg, values.get(read.name), rows.float(), backwards=True)
    rows = rows / rows.norm(dim=1, keepdim=True)
    heads: tuple[list[str], list[Tensor]] = [], [rows[:, :0]]
    features: tuple[list[str], list[Tensor]] = [], [rows[:, :0]]
    for place in writers_before(pg, read):
        norm = place.output_norm(pg)
        if place.part == "attn.z":
            weights = pg.weights[place.stack]
            every = [weights.W_OV[place.layer, head] for head in range(weights.W_O.heads(place.layer))]
            maps = [FactoredMatrix(each.left.float(), through_norm(pg, norm, each.right.float())) for each in every]
            scores = torch.stack([(rows @ ov.right.mT @ ov.left.mT).norm(dim=1) / ov.norm() for ov in maps], 1)
        else:
            vectors = through_norm(pg, norm, place.written(pg).float())
            scores = rows @ (vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-30)).mT
        names, found = heads if place.part == "attn.z" else features
        names += [place.form.format(number) for number in range(scores.shape[1])]
        found.append(scores)
    return [(names, torch.cat(found, 1)) for names, found in (heads, features)]
