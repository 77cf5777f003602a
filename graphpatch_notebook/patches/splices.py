"""Splices: a sparse autoencoder (SAE) in place of a value, whose latents can be patched and probed by path.

A splice makes a value a container with one more key, the name of the splice, so that the parts of what it computes have
paths in the grammar of all paths: `transformer.h_2.output|sae.latents`, `h_2.output|sub_0.sae.error`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.errors import PatchValueError
from graphpatch_notebook.patches.kinds import Patch

PARTS = ("latents", "reconstruction", "error")
"""What a splice computes, in order."""


@dataclass(eq=False)
class SplicePatch(Patch[Any]):
    """Replaces the value by its reconstruction by a sparse autoencoder (SAE), whose parts get paths of their own.

    At `PATH|sae.latents` (`PATH.sae.latents`, if `PATH` has a bar already) are the latents, and so are
    `reconstruction` and `error`: patch and probe them in the same patch map, or in contexts inside of this one. With
    the error term, the model computes the same numbers and has the same gradients until one of the parts is patched;
    then the change of the reconstruction is added to the value.

    The fields `any_shape`, `allow_empty`, `steps`, `positions` and `position_dim` are those of `Patch`.

    Args:
        sae: Any object with methods `encode`, from a value of shape `(..., size)` to latents, and `decode`, from
            latents to a value of that shape: an SAE of SAELens, or a module of your own.
        error: Whether to add the error term, `value - decode(encode(value))`.
        name: What the parts are called in paths.
        source: For a transcoder, the path of the value that it encodes (the input of the MLP whose output this is),
            which must come earlier in the forward; `None` for the value itself.

    Example:
        >>> from graphpatch_notebook import PatchableGraph, ProbePatch, ZeroPatch
        >>> class Sae(torch.nn.Linear):
        ...     def encode(self, value):
        ...         return torch.relu(self(value))
        ...     def decode(self, latents):
        ...         return latents @ self.weight
        >>> pg, sae = PatchableGraph(torch.nn.Tanh(), torch.ones(1, 2)), Sae(2, 8)
        >>> spliced, probe = pg.edit({"output": SplicePatch(sae)}), ProbePatch()
        >>> with spliced.patch({"output|sae.latents": [ZeroPatch(slice=(..., 3)), probe]}):
        ...     _ = spliced(torch.ones(1, 2))
        >>> probe.activation.shape
        torch.Size([1, 8])

    Source:
        Marks et al., Sparse feature circuits (2024), for the error term.
    """

    sae: Any
    _: KW_ONLY
    error: bool = True
    name: str = "sae"
    source: Any = None
    _inside: Mapping[str, Sequence[Patch[Any]]] = field(default_factory=dict, init=False, repr=False)
    _read: Any = field(default=None, init=False, repr=False)

    @property
    def sources(self) -> Sequence[str]:
        """The path of the encoded value, if it is not the patched one."""
        return () if self.source is None else (str(self.source),)

    def reading(self, values: Sequence[Any]) -> SplicePatch:
        """Returns a copy with an `op` that encodes this value of its source."""
        result = copy.copy(self)
        (result._read,) = values
        return result

    def op(self, original_output: Any) -> Any:
        value = original_output
        if not isinstance(value, Tensor):
            raise PatchValueError(f"a splice needs a tensor, but the value here is of type {type(value).__name__}")
        encoded = self.sae.encode((value if self._read is None else self._read).clone())  # it may write into it
        if not isinstance(encoded, Tensor):
            raise PatchValueError(
                f"encode must return a tensor of latents, not a value of type {type(encoded).__name__}"
            )
        state = getattr(self.sae, "__dict__", {})
        kept = dict(state)  # what `encode` notes of its input, `decode` may use up, as in SAELens with layer_norm
        decoded = self.sae.decode(encoded.clone())
        state.update(kept)
        if not isinstance(decoded, Tensor) or decoded.shape != value.shape:
            shown = f"shape {tuple(decoded.shape)}" if isinstance(decoded, Tensor) else f"type {type(decoded).__name__}"
            raise PatchValueError(f"decode must return a tensor of shape {tuple(value.shape)}, not one of {shown}")
        # The alias has the gradient of what is decoded from the latents, without that of the error term.
        latents = self._at("latents", encoded.view_as(encoded))
        reconstruction = self._at("reconstruction", self.sae.decode(latents))
        if "error" in self._inside:
            residue = value - decoded
            patched = self._at("error", residue)
            if patched is not residue:  # else the value itself is used: the sum would be rounded
                return (reconstruction + patched).to(value.dtype)
        if not self.error:
            return reconstruction.to(value.dtype)
        return value + (reconstruction - decoded).to(value.dtype)

    def _at(self, part: str, value: Tensor) -> Tensor:
        for patch in self._inside.get(part, ()):
            try:
                given = value.clone() if patch.requires_clone else value
                patched = patch.op(given)
            except (IndexError, RuntimeError, TypeError, ValueError) as error:
                where = f"{type(patch).__name__} on {self.name}.{part}, of shape {tuple(value.shape)}"
                raise PatchValueError(f"{where}: {error}") from error
            value = value if patch.observes_only else patched
        return value

    def problem(self, shape: torch.Size | None) -> str | None:
        for method in ("encode", "decode"):
            if not callable(getattr(self.sae, method, None)):
                return f"an SAE has methods encode and decode, but a {type(self.sae).__name__} has no {method}"
        error: Any = self.error
        name: Any = self.name
        if not isinstance(error, bool):
            return f"error must be True or False, not {error!r}"
        if not isinstance(name, str) or not name.isidentifier():
            return f"name must be an identifier, not {name!r}"
        if not error and hasattr(self.sae, "W_skip"):
            return "a skip transcoder adds more than decode(encode(value)): use error=True"
        return super().problem(shape)

    def with_inside(self, part: str, patches: Sequence[Patch[Any]]) -> SplicePatch:
        """Returns a copy that also applies these patches to one of its parts."""
        result = copy.copy(self)
        together = [*self._inside.get(part, ()), *patches]
        result._inside = {**self._inside, part: sorted(together, key=lambda patch: patch.stops_run)}
        return result


def inside_of(path: str) -> tuple[str, str, str] | None:
    """Splits the path of a part of a splice into the path of the value, the name of the splice, and the part.

    Example:
        >>> inside_of("h_2.output|sub_0.sae.latents"), inside_of("output|sae.latents"), inside_of("h_2.output")
        (('h_2.output|sub_0', 'sae', 'latents'), ('output', 'sae', 'latents'), None)
    """
    found = may_be_inside(path)
    return found if found is not None and found[2] in PARTS else None


def may_be_inside(path: str) -> tuple[str, str, str] | None:
    """Returns the same for a path whose part may be misspelled."""
    start, _, part = path.rpartition(".")
    bar, dot = start.rfind("|"), start.rfind(".")
    cut = max(bar, dot)
    if bar < 0 or cut < 1 or not start[cut + 1 :].isidentifier():
        return None
    return start[:cut], start[cut + 1 :], part
