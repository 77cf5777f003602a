"""Splices: sparse autoencoders and transcoders in place of values, whose parts are nodes like any other.

A splice is a module that the model does not have. It is captured on its own, and its frame is put beside the nodes of
the frame with the value that it reads (`Frame.splices`), so that the records of the model, and all that is found in
these, stay what they are. In a run, it is the last patch on that value, and calls the module: a call like those that
the model makes, in which nodes are patched in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture import call_sites, capture
from graphpatch_notebook.capture.records import CallNode, Frame, Ref
from graphpatch_notebook.errors import PatchMapError, PatchValueError, UnknownPathError
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, component_of_hook, resolve
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patching.plan import Entry, Lookup, Splicing, sources_of
from graphpatch_notebook.torch_compat import without_torch_functions
from graphpatch_notebook.values import TensorSpec

Given: TypeAlias = "Mapping[Any, Any] | Sequence[Any] | Any"
"""An SAE, several, or SAEs by the path of the value that they replace, or of those that they read and replace."""


class Splice(Module):
    """Replaces a value by what an SAE makes of it.

    Args:
        sae: An object with methods `encode` and `decode`.
        sources: The path of the value that is encoded, if that is another one.
        has_error: Whether the error of the reconstruction is added.
    """

    def __init__(self, sae: Any, sources: Sequence[str], *, has_error: bool) -> None:
        super().__init__()
        self.sae, self.sources, self.has_error = sae, sources, has_error

    def forward(self, value: Tensor, source: Tensor | None = None) -> Tensor:
        """Returns what replaces `value`; `source` is what is encoded, if that is another value."""
        given = value if source is None else source
        with without_torch_functions():  # this is no node
            dtypes = [each.dtype for each in self.parameters() if each.is_floating_point()]
        read = given.to(dtypes[0], copy=True) if dtypes else given.clone()  # the SAE may write into it
        skip = getattr(self.sae, "W_skip", None)
        skipped = 0.0 if skip is None else read @ skip.T
        encoded = self.sae.encode(read)
        if not isinstance(encoded, Tensor) or encoded.layout is not torch.strided:
            raise PatchValueError(f"encode of a {_name(self.sae)} must return a dense tensor, not {_shown(encoded)}")
        # An alias: its gradient is that of what is decoded from it, without what the error takes away again.
        latents = encoded.view_as(encoded)
        if not self.has_error:
            reconstruction = self.sae.decode(latents.clone()) + skipped
            return _checked(reconstruction, value, self.sae).to(value.dtype)
        noted = dict(vars(self.sae))  # what `encode` notes, `decode` may use up, as in SAELens with layer_norm
        decoded = self.sae.decode(encoded.clone()) + skipped
        vars(self.sae).update(noted)
        reconstruction = self.sae.decode(latents.clone()) + skipped
        residue: Tensor = value - _checked(decoded, value, self.sae)
        error = residue.view_as(residue)
        # Nothing changed adds exact zeros; `reconstruction + error` would be rounded.
        result: Tensor = value + (reconstruction - decoded) + (error - residue)
        return result.to(value.dtype)


call_sites.count_as_users(Splice.forward.__code__)  # its variables name the nodes


def _checked(found: Any, value: Tensor, sae: Any) -> Tensor:
    """Returns what `decode` returned, if it can stand for the value."""
    if isinstance(found, Tensor) and found.shape == value.shape:
        return found
    shape = tuple(value.shape)
    raise PatchValueError(f"decode of a {_name(sae)} must return a tensor of shape {shape}, not {_shown(found)}")


def _shown(value: Any) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {_name(value)}"


def _name(value: Any) -> str:
    return type(value).__name__


class _Call(Patch[Any]):
    """Calls the module of a splice."""

    any_shape = True

    _read: Any = None

    def __init__(self, splice: Splice) -> None:
        self.splice = splice

    @property
    def sources(self) -> Sequence[str]:
        return self.splice.sources

    def op(self, original_output: Any) -> Any:
        if not isinstance(original_output, Tensor):
            raise PatchValueError(f"a splice reads tensors, and the value here is a {_name(original_output)}")
        return self.splice(original_output, self._read)


# -- the places of SAEs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where an SAE belongs: the value that it replaces, and what it encodes, if that is another one."""

    sae: Any
    replaced: str
    encoded: str | None = None

    @property
    def paths(self) -> list[str]:
        """What the SAE is given, in order."""
        return [self.replaced] if self.encoded is None else [self.replaced, self.encoded]


def places_of(paths: Lookup, given: Given) -> list[Place]:
    """Returns where SAEs belong, as their keys say, or their configs.

    Raises:
        PatchMapError: Something is not an SAE, or does not know its place.
        UnknownPathError: There is no such value.
    """
    if not isinstance(given, Mapping):
        several = [given] if _is_sae(given) or not isinstance(given, Sequence) else given
        pairs = [(_hooks_of(sae), sae) for sae in several]
    else:
        pairs = [(key if isinstance(key, tuple) else (key,), sae) for key, sae in given.items()]
    found = []
    for key, sae in pairs:
        if not _is_sae(sae):
            raise PatchMapError(f"{_name(sae)} is not an SAE: it needs methods encode and decode")
        if len(key) > 2:
            raise PatchMapError(f"{key}: give the value to replace, or a pair of those to encode and to replace")
        *encoded, replaced = [[target.path for target in _targets(paths, str(each))] for each in key]
        for number, text in enumerate(replaced):
            if encoded and len(encoded[0]) != len(replaced):
                raise PatchMapError(f"{key} means {len(encoded[0])} values to encode, and {len(replaced)} to replace")
            source = encoded[0][number] if encoded and encoded[0][number] != text else None
            found.append(Place(sae, text, source))
    return found


def _is_sae(given: Any) -> bool:
    return all(callable(getattr(given, method, None)) for method in ("encode", "decode"))


def _hooks_of(sae: Any) -> tuple[str, ...]:
    """Returns the names of the hooks that an SAE was trained on, from its config, as SAELens has it."""
    config = getattr(sae, "cfg", None)
    noted = getattr(config, "metadata", config)
    names = [getattr(noted, name, None) for name in ("hook_name", "hook_name_out")]
    if _is_sae(sae) and not isinstance(names[0], str):
        raise PatchMapError(f"this {_name(sae)} has no cfg.metadata.hook_name: say where, pg.splice({{path: sae}})")
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str) and name))


def _targets(paths: Lookup, text: str) -> list[Target]:
    try:
        found = paths.targets(component_of_hook(paths.root, text) or text)
    except Unresolvable as error:
        raise UnknownPathError(error.message) from None
    for target in found:
        if target.index or not isinstance(target.whole, TensorSpec) or not target.whole.dtype.is_floating_point:
            raise PatchMapError(f"{target.text!r}: SAEs are for whole tensors of floating-point numbers")
    return found


# -- records -----------------------------------------------------------------------------------------------------------


def spliced(root: Frame, places: Sequence[Place], values: Mapping[str, Tensor], *, name: str, has_error: bool) -> Frame:
    """Returns a copy of the records with splices, each captured on values by their paths; modules are shared.

    Raises:
        PatchMapError: A value has a splice of this name.
        PatchValueError: What an SAE returns is not of the right shape.
    """
    if not name.isidentifier():
        raise PatchMapError(f"name must be an identifier, not {name!r}")
    memo: dict[int, Any] = {id(frame.module): frame.module for frame in root.walk(with_splices=True)}
    memo[id(root.capture.options)] = root.capture.options
    result = copy.deepcopy(root, memo)
    for place in places:
        host, *others = [resolve(result, path) for path in place.paths]
        if any(call.target == host.path and call.op == name for _, call in host.frame.splices):
            raise PatchMapError(f"{host.path!r} has a splice {name!r} already: give name=")
        splice = Splice(place.sae, [each.path for each in others], has_error=has_error)
        with torch.no_grad():
            frame = capture(splice, ExtractionOptions(), tuple(values[path] for path in place.paths), {})
        own = name if host.node.kind == "output" else f"{host.node.name}_{name}"
        tries = (own if not number else f"{own}_{number}" for number in range(len(host.frame.names) + 2))
        frame.attribute_path = next(
            each for each in tries if each not in host.frame.names and not hasattr(host.frame.module, each)
        )
        call = CallNode(
            op=name, target=host.path, spec=frame.output_node.spec, frame=frame,
            base_name=frame.attribute_path, name=frame.attribute_path,
            args=tuple(Ref(each.node, each.dig) for each in (host, *others)),
        )  # fmt: skip
        frame.parent, frame.call = host.frame, call
        host.frame.splices.append((host.node, call))
        host.frame.names[call.name] = call
    return result


def splicings(paths: Lookup) -> list[Splicing]:
    """Returns what a plan needs of the splices of a capture, in order."""
    found = []
    for frame in paths.root.walk(with_splices=True):
        for _, call in frame.splices:
            (target,) = paths.targets(call.target)
            module = call.frame.module
            assert isinstance(module, Splice)
            entry = Entry(target, (_Call(module),), splice=call.frame)
            entry.rank = 3  # it reads the value as patched
            problems: list[str] = []
            sources = sources_of(paths, [entry], problems)
            if problems:
                raise PatchMapError(problems[0])
            found.append(Splicing(call.frame, (entry, *sources), is_idle=module.has_error))
    return found
