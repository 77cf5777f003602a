"""Splices: sparse autoencoders and transcoders in place of values, whose parts are nodes like any other.

A splice is a module that the model does not have. It is captured on its own, and its frame is put beside the nodes of
the frame with the value that it reads (`Frame.splices`), so that the records of the model, and all that is found in
these, stay what they are. In a run, it is the last patch on that value, and calls the module: a call like those that
the model makes, in which nodes are patched in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture import call_sites, capture
from graphpatch_notebook.capture.records import CallNode, Frame, Ref, spliced_calls
from graphpatch_notebook.components import find
from graphpatch_notebook.errors import PatchMapError, PatchValueError, UnknownPathError
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, component_of_hook, resolve
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patching.plan import Entry, Lookup, Splicing, sources_of
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import without_torch_functions
from graphpatch_notebook.values import TensorSpec

Given: TypeAlias = "Mapping[Any, Any] | Sequence[Any] | Any"
"""An SAE, several, or SAEs by the path of the value that they replace, or of those that they read and replace."""


class Splice(Module):
    """A module that is called with a value, and returns what replaces it.

    Args:
        sae: An object with methods `encode` and `decode`.
        sources: The paths of other values that it is given.
        has_error: Whether the error of the reconstruction is added.
    """

    def __init__(self, sae: Any, sources: Sequence[str] = (), *, has_error: bool = True) -> None:
        super().__init__()
        self.sae, self.sources, self.has_error = sae, sources, has_error

    def as_read(self, value: Tensor) -> Tensor:
        """Returns a copy of a value for the SAE, which may write into it, in the dtype of its parameters."""
        with without_torch_functions():  # this is not a node
            dtypes = [each.dtype for each in self.parameters() if each.is_floating_point()]
        return value.to(dtypes[0], copy=True) if dtypes else value.clone()

    def replaced(self, value: Tensor, reconstruction: Tensor, decoded: Tensor) -> Tensor:
        """Returns what replaces a value: `decoded` is what the reconstruction is without patches."""
        residue = value - decoded
        error = residue.view_as(residue)
        # If nothing changed, these are exact zeros; `reconstruction + error` would be rounded.
        result = value - (decoded - reconstruction) - (residue - error)
        return result.to(value.dtype)


class SaeSplice(Splice):
    """An SAE, or a transcoder, which encodes another value: the source."""

    is_stacked = False  # whether it encodes the sources and the value, as one tensor

    def forward(self, value: Tensor, *sources: Tensor) -> Tensor:
        """Returns what replaces `value`."""
        given = torch.stack([*sources, value]) if self.is_stacked else (*sources, value)[0]
        read = self.as_read(given)
        # SAEs of SAELens for `hook_z` take the heads apart, which are together here: as one head, of all channels.
        read = read.unsqueeze(-2) if getattr(self.sae, "hook_z_reshaping_mode", False) else read
        skip = getattr(self.sae, "W_skip", None)
        skipped = None if skip is None else read @ skip.T
        encoded = _dense(self.sae.encode(read), self.sae)
        # An alias: its gradient is that of what is decoded from it, without what the error takes away again.
        latents = encoded.view_as(encoded)
        decoded = None
        if self.has_error:
            state = getattr(self.sae, "__dict__", {})
            noted = dict(state)  # what `encode` notes, `decode` may use up, as in SAELens with layer_norm
            decoded = self.decoded(encoded, value, skipped)
            state.update(noted)
        written = self.decoded(latents, value, skipped)
        reconstruction = written.view_as(written)
        return reconstruction.to(value.dtype) if decoded is None else self.replaced(value, reconstruction, decoded)

    def decoded(self, latents: Tensor, value: Tensor, skipped: Tensor | None) -> Tensor:
        """Returns what latents are decoded to, checked against the value that it replaces."""
        found = self.sae.decode(latents.clone())
        found = found.flatten(-2) if getattr(self.sae, "hook_z_reshaping_mode", False) else found
        if not isinstance(found, Tensor) or found.shape != value.shape:
            wanted = f"a tensor of shape {tuple(value.shape)}"
            raise PatchValueError(f"decode of a {_name(self.sae)} must return {wanted}, not {_shown(found)}")
        return found if skipped is None else found + skipped


class CrossLayerEncoder(Splice):
    """One of the places that a cross-layer transcoder reads."""

    number = count = 0  # which place it is, and of how many

    def forward(self, value: Tensor) -> Tensor:
        """Returns `value`: what is decoded from its latents is added elsewhere."""
        read = self.as_read(value).flatten(0, -2)
        stacked = read.new_zeros(self.count, *read.shape)
        stacked[self.number] = read
        encoded = _dense(self.sae.encode(stacked), self.sae)[self.number].unflatten(0, value.shape[:-1])
        latents = encoded.view_as(encoded)  # noqa: F841  # it is a node, which decoders read
        return value


class CrossLayerDecoder(Splice):
    """One of the places that a cross-layer transcoder writes."""

    number = count = 0

    def forward(self, value: Tensor, *read: Tensor) -> Tensor:
        """Returns what replaces `value`, given the latents at places until here, and what they are without patches."""
        half = len(read) // 2
        reconstruction = self.decoded(read[:half]).view(value.shape)
        if not self.has_error:
            return reconstruction.to(value.dtype)
        decoded = self.decoded(read[half:]).view(value.shape)
        return self.replaced(value, reconstruction, decoded)

    def decoded(self, latents: Sequence[Tensor]) -> Tensor:
        """Returns what the latents at places until here write."""
        first = latents[0].flatten(0, -2)
        stacked = first.new_zeros(self.count, *first.shape)
        for number, each in enumerate(latents):
            stacked[number] = each.flatten(0, -2)
        found: Tensor = self.sae.decode(stacked)[self.number]
        return found


class Crosscoder(Module):
    """A crosscoder as an SAE of the last value that it reads: latents are known there, and it writes there."""

    def __init__(self, sae: Any) -> None:
        super().__init__()
        self.sae = sae

    def encode(self, values: Tensor) -> Any:
        """Returns the latents of values, `(places, ..., size)`."""
        return self.sae.encode(values.flatten(1, -2)).unflatten(0, values.shape[1:-1])

    def decode(self, latents: Tensor) -> Any:
        """Returns the last of the values that are decoded from latents."""
        return self.sae.decode(latents.flatten(0, -2))[-1].unflatten(0, latents.shape[:-1])


_OWN = {
    vars(kind)[name].__code__
    for kind in (Splice, SaeSplice, CrossLayerEncoder, CrossLayerDecoder)
    for name in ("forward", "decoded", "replaced")
    if name in vars(kind)
}
"""The code whose variables name the parts of a splice."""
for _code in _OWN:
    call_sites.count_as_users(_code)


def _name_parts(frame: Frame) -> None:
    """Gives the parts of a splice their names where variables in the code of the SAE, which ran before, have them."""

    def is_own(node: Any) -> bool:
        return node.site is not None and node.site.leaf[0] in _OWN

    for node in filter(is_own, frame.nodes):
        other = frame.names.get(node.base_name)
        if other is not None and other.kind == "op" and not is_own(other):
            node.name, other.name = other.name, node.name
            frame.names |= {node.name: node, other.name: other}


def _dense(found: Any, sae: Any) -> Tensor:
    """Returns what `encode` returned, if it can be latents."""
    if isinstance(found, Tensor) and found.layout is torch.strided:
        return found
    raise PatchValueError(f"encode of a {_name(sae)} must return a dense tensor, not {_shown(found)}")


def _shown(value: Any) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {_name(value)}"


def _name(value: Any) -> str:
    return type(value).__name__


class _Call(Patch[Any]):
    """Calls the module of a splice."""

    any_shape = True

    def __init__(self, splice: Splice, read: Sequence[Any] = ()) -> None:
        self.splice, self.read = splice, read

    @property
    def sources(self) -> Sequence[str]:
        return self.splice.sources

    def reading(self, values: Sequence[Any]) -> Patch[Any]:
        return _Call(self.splice, values)

    def op(self, original_output: Any) -> Any:
        if not isinstance(original_output, Tensor):
            raise PatchValueError(f"a splice reads tensors, and the value here is a {_name(original_output)}")
        return self.splice(original_output, *self.read)


# -- the places of SAEs ------------------------------------------------------------------------------------------------


class SaePlace(NamedTuple):
    """Where an SAE belongs: the values that it replaces, and those that it encodes; of across SAEs, several of each."""

    sae: Any
    encoded: Sequence[str]
    replaced: Sequence[str]


def places_of(paths: Lookup, given: Given, *, across: bool) -> list[SaePlace]:
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
        ends = [[target.path for target in _targets(paths, str(each))] for each in key]
        encoded, replaced = ends[0], ends[-1]
        if len(encoded) != len(replaced):
            raise PatchMapError(f"{key} means {len(encoded)} values to encode, and {len(replaced)} to replace")
        if across:
            found.append(SaePlace(sae, encoded, replaced))
        else:
            found += [SaePlace(sae, [one], [other]) for one, other in zip(encoded, replaced, strict=True)]
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


def _path_of_hook(root: Frame, text: str) -> str | None:
    """Returns what is at a hook of TransformerLens: a component, or what only a part of the model reads."""
    name = component_of_hook(root, text)
    if name is None:
        return None
    evidence = find(root).evidence
    if name.endswith(".attn.z"):
        from graphpatch_notebook.components import projection  # not before it is needed: it imports much

        # What the output projection reads: all heads together.
        linear, flow = projection(root, name).map, evidence.trails.flow
        inputs = flow.inputs(flow.frame_of[linear.result.node])
        return inputs[0].path if len(inputs) == 1 else flow.path(linear.given)
    normed = evidence.values.get(f"{name.rpartition('.')[0]}.ln2")
    if text.endswith(".hook_mlp_in") and normed in evidence.trails.norms:  # a copy of the stream, for the MLP alone
        return evidence.trails.norms[normed].given.path
    return name


def _targets(paths: Lookup, text: str) -> list[Target]:
    name = _path_of_hook(paths.root, text)
    try:
        found = paths.targets(name or text)
    except Unresolvable as error:
        raise UnknownPathError(error.message) from None
    for target in found:
        if target.index or not isinstance(target.whole, TensorSpec) or not target.whole.dtype.is_floating_point:
            raise PatchMapError(f"{target.text!r}: SAEs are for whole tensors of floating-point numbers")
    return found


# -- records -----------------------------------------------------------------------------------------------------------


def spliced(
    root: Frame,
    places: Sequence[SaePlace],
    values: Mapping[str, Tensor],
    *,
    name: str,
    has_error: bool,
    across: bool,
) -> Frame:
    """Returns a copy of the records with splices, each captured on values by their paths; modules are shared.

    Raises:
        PatchMapError: A value has a splice of this name.
        PatchValueError: What an SAE returns is not of the right shape.
    """
    if not name.isidentifier():
        raise PatchMapError(f"name must be an identifier, not {name!r}")
    splicer = _Splicer(root, values, name)
    with torch.no_grad():
        for place in places:
            if across:
                splicer.add_across(place, has_error=has_error)
            else:
                sources = [path for path in place.encoded if path not in place.replaced]
                splicer.add(place.replaced[0], SaeSplice(place.sae, sources, has_error=has_error))
    return splicer.root


class _Splicer:
    """Adds splices to a copy of records, each captured on values by their paths."""

    def __init__(self, root: Frame, values: Mapping[str, Tensor], name: str) -> None:
        memo: dict[int, Any] = {id(frame.module): frame.module for frame in root.walk(with_splices=True)}
        memo[id(root.capture.options)] = root.capture.options
        self.root: Frame = copy.deepcopy(root, memo)
        self._values, self._name = dict(values), name

    def add(self, path: str, splice: Splice) -> str:
        """Adds a splice that replaces the value at a path, and returns its own path."""
        name, read = self._name, [path, *splice.sources]
        host, *others = [resolve(self.root, each) for each in read]
        if any(call.target == host.path and call.op == name for _, call in host.frame.splices):
            raise PatchMapError(f"{host.path!r} has a splice {name!r} already: give name=")
        frame = capture(splice, ExtractionOptions(), tuple(self._values[each] for each in read), {})
        _name_parts(frame)
        own = name if host.node.kind == "output" else f"{host.node.name}_{name}"
        tries = (own if not number else f"{own}_{number}" for number in range(len(host.frame.names) + 2))
        frame.attribute_path = next(
            each for each in tries if each not in host.frame.names and not hasattr(host.frame.module, each)
        )
        call = CallNode(
            op=name, target=host.path, spec=frame.output_node.spec, frame=frame,
            occurrence=len(spliced_calls(self.root)), base_name=frame.attribute_path, name=frame.attribute_path,
            args=tuple(Ref(each.node, each.dig) for each in (host, *others)),
        )  # fmt: skip
        frame.parent, frame.call = host.frame, call
        host.frame.splices.append((host.node, call))
        host.frame.names[call.name] = call
        return format_path(frame.path)

    def add_across(self, place: SaePlace, *, has_error: bool) -> None:
        """Adds the splices of a crosscoder, or of a cross-layer transcoder: its latents have a dimension of places."""
        sae, count = place.sae, len(place.encoded)
        shapes = {tuple(self._values[path].shape) for path in (*place.encoded, *place.replaced)}
        if len(shapes) > 1:
            raise PatchMapError(
                f"the values across which an SAE works are of shapes {sorted(shapes)}: give those of one"
            )
        read = torch.stack([self._values[path] for path in place.encoded])
        latents = _dense(sae.encode(Splice(sae).as_read(read.flatten(1, -2))), sae)
        if latents.dim() == 2:
            if place.replaced != place.encoded:
                raise PatchMapError("a crosscoder writes where it reads: give one key, not a pair")
            last = SaeSplice(Crosscoder(sae), place.encoded[:-1], has_error=has_error)
            last.is_stacked = True
            self.add(place.encoded[-1], last)
            return
        paths = []
        for number, path in enumerate(place.encoded):
            encoder = CrossLayerEncoder(sae)
            encoder.number, encoder.count = number, count
            paths.append(self.add(path, encoder))
            known = latents[number].unflatten(0, read.shape[1:-1])
            self._values |= {f"{paths[-1]}.{part}": known for part in ("latents", "encoded")}
        for number, path in enumerate(place.replaced):
            sources = [f"{each}.{part}" for part in ("latents", "encoded") for each in paths[: number + 1]]
            decoder = CrossLayerDecoder(sae, sources, has_error=has_error)
            decoder.number, decoder.count = number, count
            self.add(path, decoder)


def splicings(paths: Lookup) -> list[Splicing]:
    """Returns what a plan needs of the splices of a capture, in order."""
    found = []
    for call in spliced_calls(paths.root):
        (target,), module = paths.targets(call.target), call.frame.module
        assert isinstance(module, Splice)
        entry = Entry(target, (_Call(module),), splice=call.frame)
        entry.rank = 3  # it reads the value as patched
        problems: list[str] = []
        sources = sources_of(paths, [entry], problems)
        if problems:
            raise PatchMapError(problems[0])
        read = [each.target.frame for each in sources if each.target.frame.is_spliced]
        found.append(Splicing([call.frame, *read], (entry, *sources), is_idle=module.has_error))
    return found
