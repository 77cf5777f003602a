"""The cells of a sweep, one patch map for each combination of the values of the axes; and results that they reuse.

A frame is one call of one module. `FrameRecording` keeps when each frame ended, and what it returned. In a run with
`FrameReplay`, some frames return that, and others compute only what patches have changed (`ChangedPositions`). Frames
are identified during the run, not by the capture: on other inputs a model may call its modules differently.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.modules import all_modules, plain_tensors
from graphpatch_notebook.errors import ExperimentError, add_note
from graphpatch_notebook.patches.kinds import CustomPatch, Patch, declares
from graphpatch_notebook.patching import Entry
from graphpatch_notebook.torch_compat import version_of, without_torch_functions
from graphpatch_notebook.values import ABSENT, IMMUTABLE, children, mapped, with_own_containers

PatchMap: TypeAlias = "Mapping[Any, Patch[Any] | Sequence[Patch[Any]]]"


@dataclass(frozen=True)
class Cell:
    """One combination of the values of the axes, with its patches.

    Attributes:
        number: Its position in the sweep, counted from zero, the last axis fastest.
        labels: The value of each axis.
        patches: Its patch map; empty until it is made.
        entries: What the patch map means on the graph, if it was looked up.
    """

    number: int
    labels: Mapping[str, Any]
    patches: PatchMap
    entries: list[Entry] | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.labels.items()) or "the only cell"


@dataclass(frozen=True)
class CellResult:
    """The result of one cell.

    Attributes:
        number: The number of the cell.
        measurement: The metric; `None` for a cell that failed.
        error: The message of its error, if it failed.
    """

    number: int
    measurement: Measurement | None
    error: str | None = None


def axes_of(axes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the values of each axis, in order.

    Raises:
        ExperimentError: The axes are not a dict, or an axis does not have a list of values.
    """
    if not isinstance(axes, Mapping):
        raise ExperimentError(f'axes are a dict from names to values, {{"layer": paths}}, not {type(axes).__name__}')
    found: dict[str, list[Any]] = {}
    for name, values in axes.items():
        if isinstance(values, (str, bytes)):
            raise ExperimentError(f"the values of axis {name!r} must be several, in a list: [{values!r}]")
        try:
            found[str(name)] = list(values.tolist() if hasattr(values, "tolist") else values)
        except TypeError:
            raise ExperimentError(f"the values of axis {name!r} must be several, not {values!r}") from None
        if not found[str(name)]:
            raise ExperimentError(f"axis {name!r} has no values")
    return found


def _check_order(axes: Mapping[str, Any], make_patches: Callable[..., PatchMap]) -> None:
    """Checks that no axis has the name of another argument than the one that it is given as.

    Raises:
        ExperimentError: The axes are in another order than the arguments.
    """
    try:
        parameters = inspect.signature(make_patches).parameters.values()
    except (TypeError, ValueError):  # not a Python function
        return
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    for axis, name in zip(axes, names, strict=False):
        if axis != name and axis in names:
            raise ExperimentError(
                f"make_patches is given the values of the axes in order, so its argument {name!r} would be a value of "
                f"{axis!r}: the axes are {', '.join(axes)}, and the arguments {', '.join(names)}; put both in one order"
            )


class Cells(Sequence[Cell]):
    """The cells of a sweep. Each time that one is read, its patch map is made.

    Args:
        axes: The values of each axis.
        make_patches: Maps one value of each axis to a patch map.

    Attributes:
        unmade: The cells without their patch maps.
    """

    def __init__(self, axes: Mapping[str, Sequence[Any]], make_patches: Callable[..., PatchMap]) -> None:
        _check_order(axes, make_patches)
        self._make_patches = make_patches
        combinations = enumerate(itertools.product(*axes.values()))
        self.unmade = [Cell(number, dict(zip(axes, values, strict=True)), {}) for number, values in combinations]

    def __len__(self) -> int:
        return len(self.unmade)

    def __iter__(self) -> Iterator[Cell]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: Any) -> Any:
        """Returns the cell of that number.

        Raises:
            ExperimentError: `make_patches` did not return a dict.
            Exception: Raised by `make_patches`; a note that names the cell is added.
        """
        cell = self.unmade[number]
        try:
            patches = self._make_patches(*cell.labels.values())
        except Exception as error:
            add_note(error, f"raised by make_patches for {cell}")
            raise
        if not isinstance(patches, Mapping):
            raise ExperimentError(f"make_patches gave {type(patches).__name__} for {cell}; give a patch map, a dict")
        return replace(cell, patches=patches)


# -- patch maps that may share work ------------------------------------------------------------------------------------


def patches_in(patch_map: PatchMap) -> list[Any]:
    """Returns the patches of a patch map, whatever they are on."""
    given = patch_map.values()
    return [patch for one in given for patch in (one if isinstance(one, (list, tuple)) else [one])]


def is_pure(patch_map: PatchMap) -> bool:
    """Whether all patches declare that their effect depends on the value and their fields alone.

    Example:
        >>> from graphpatch_notebook import ZeroPatch
        >>> is_pure({"output": ZeroPatch(slice=0)}), is_pure({"output": CustomPatch(custom_op=abs)})
        (True, False)
    """
    return all(
        patch.by_row if type(patch) is CustomPatch else declares(patch, "is_pure") and "op" not in vars(patch)
        for patch in patches_in(patch_map)
    )


class PatchCopies:
    """Copies patch maps, since people reuse patches, tensors and masks. Equal large tensors are copied once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Tensor] = {}

    def of(self, cell: Cell) -> Cell:
        """Returns a cell with a copy of its patch map, in which patches that are not pure are the same objects.

        Example:
            >>> from graphpatch_notebook import AddPatch
            >>> value = torch.ones(2)
            >>> cell = PatchCopies().of(Cell(0, {}, {"output": AddPatch(value=value)}))
            >>> _ = value.zero_()
            >>> cell.patches["output"].value
            tensor([1., 1.])
        """
        known: dict[int, Any] = {}  # what is not to be copied, or is copied already, by id
        for patch in patches_in(cell.patches):
            inside = [] if is_pure({"": patch}) else [patch]  # such as a probe, which the user reads
            inside += filter(callable, vars(patch).values())
            known |= {id(each): each for each in inside}
            known |= {id(each): self._tensor(each) for each in plain_tensors(vars(patch))}
        return replace(
            cell, patches={str(path): copy.deepcopy(patches, known) for path, patches in cell.patches.items()}
        )

    def _tensor(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False):
            # The address is only a key: a copy is shared if the contents are equal now.
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            known = self._known.get(key)
            if known is None or not torch.equal(known, tensor.detach()):
                known = self._known[key] = tensor.detach().clone()
            return known


# -- the results of cells ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """The numbers that a metric returned.

    Attributes:
        values: The numbers as float64 (which holds float32 exactly); a 0-dimensional array for a single number, and
            of shape `(names,)` for a dict.
        names: The keys, if the metric returned a dict.
    """

    values: np.ndarray[Any, np.dtype[np.float64]]
    names: tuple[str, ...] | None = None

    @property
    def form(self) -> tuple[Any, ...]:
        """The shape and the names, which are the same for all measurements of a sweep."""
        return (self.values.shape, self.names)

    def is_close(self, other: Measurement | None, relative: float, absolute: float) -> bool:
        """Whether both are equal, but for errors relative to their numbers, or absolute."""
        if other is None or self.form != other.form:
            return False
        if (self.values == other.values).all():  # a faster check for nearly all
            return True
        return bool(np.allclose(self.values, other.values, rtol=relative, atol=absolute, equal_nan=True))

    def to_json(self) -> Any:
        """Returns JSON data from which `from_json` restores the measurement exactly."""
        # As text: JSON has neither NaN nor infinity, and NaN does not equal itself.
        return {"values": json.dumps(self.values.tolist()), "names": None if self.names is None else list(self.names)}

    @classmethod
    def from_json(cls, data: Any) -> Measurement:
        """Returns the measurement that `to_json` wrote."""
        names = None if data["names"] is None else tuple(map(str, data["names"]))
        values = np.array(json.loads(data["values"]), dtype=np.float64)
        if names is not None and values.shape != (len(names),):
            raise ValueError(f"{values.size} numbers have {len(names)} names")
        return cls(values, names)


def measurement(value: Any) -> Measurement:
    """Converts the result of a metric to a `Measurement`.

    Args:
        value: A number, a tensor or an array of any shape, or a dict from names to single numbers.

    Raises:
        ExperimentError: The value has another type.

    Example:
        >>> measurement({"a": 1, "b": 2.5})
        Measurement(values=array([1. , 2.5]), names=('a', 'b'))
    """
    if isinstance(value, Tensor) or not isinstance(value, Mapping):
        return Measurement(_array(value))
    numbers = {str(name): _array(item) for name, item in value.items() if not isinstance(item, Mapping)}
    wrong = [name for name in map(str, value) if name not in numbers or numbers[name].ndim]
    if wrong or not numbers:
        names = ", ".join(map(repr, wrong))
        given = f"a {type(value).__name__} in which {names} is not one number" if wrong else "an empty dict"
        raise ExperimentError(
            f"the metric gave {given}: it must give a number, a tensor, or a dict of numbers by name, made from the "
            "output of the model: lambda output: output.loss"
        )
    return Measurement(np.stack([*numbers.values()]), tuple(numbers))


def baseline_of(metric: Callable[[Any], Any], output: Any) -> Measurement:
    """Returns the metric of the output of a run without patches."""
    with noted_metric(output):
        return measurement(metric(output))


@contextmanager
def noted_metric(output: Any) -> Iterator[None]:
    """Adds a note about `output`, the output without patches, to an error that the metric raises."""
    try:
        yield
    except Exception as error:
        add_note(
            error,
            f"raised by the metric for what the model returned without patches, a {type(output).__name__}: metrics are "
            "given the whole output (the logits of a language model are output.logits)",
        )
        raise


def _array(value: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    if isinstance(value, Tensor):
        if value.is_complex():
            raise ExperimentError("a metric gave complex numbers; take .real, .abs() or .angle() of them")
        return np.array(value.detach().to("cpu").double().numpy())
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        found = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ExperimentError(
            f"a metric must give a number, a tensor or a dict of numbers by name, not {type(value).__name__}"
        ) from None
    if any(each is None for each in np.array(value, dtype=object).flat):  # numpy converts it to NaN
        raise ExperimentError(f"the metric returned {value!r}, which has a None: is a return statement missing?")
    return found


NEVER = math.inf
Forward = Callable[..., Any]


class TensorCall(NamedTuple):
    """A call of a module with one tensor, which returned one."""

    given: Tensor
    returned: Tensor
    keyword: str | None  # the name of the argument, if it was given by keyword


@dataclass(eq=False, slots=True)
class FrameNode:
    """One frame, the same one in all runs: a call of a module, and its number among the calls in the frame above."""

    module: Any  # `None` for the frame above the model
    children: dict[tuple[int, int], FrameNode] = field(default_factory=dict)
    is_open: bool = False  # whether it holds a value that will be patched: the frames that it calls are recorded
    ended: float = NEVER  # when its `forward` returned, by the clock of the recording
    value: Any = ABSENT  # what it returned, if runs may return that instead of computing it
    call: TensorCall | None = None  # for frames that may be computed in parts

    def child(self, module: Module, number: int) -> FrameNode:
        """Returns the frame of the call of `module` with that number in this frame."""
        key = (id(module), number)
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = FrameNode(module)
        return found

    def walk(self) -> list[FrameNode]:
        """Returns this frame and all below it, each before those that it calls."""
        found = [self]
        for node in found:
            found += node.children.values()
        return found

    def modules_around(self, nodes: Iterable[FrameNode]) -> list[Module]:
        """Returns the modules whose calls must be seen to identify some frames below: their own, and all callers."""
        ids = {id(node.module) for node in nodes}
        found: dict[int, Module] = {}
        for node in self.walk()[:0:-1]:  # callees first
            if id(node.module) in ids or any(key[0] in found for key in node.children):
                found[id(node.module)] = node.module
        return list(found.values())


class _FrameRun:
    """Runs the `forward` of each frame of a run, and knows which frame it is."""

    def __init__(self, root: FrameNode) -> None:
        self._running: list[tuple[FrameNode, dict[int, int]]] = [(root, {})]  # innermost last, with calls by module

    def __call__(self, module: Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caller, counts = self._running[-1]
        number = counts[id(module)] = counts.get(id(module), -1) + 1
        node = caller.child(module, number)
        self._running.append((node, {}))
        try:
            return self.run(caller, node, forward, args, kwargs)
        finally:
            self._running.pop()

    def run(
        self, caller: FrameNode, node: FrameNode, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns the result of the frame `node`."""
        raise NotImplementedError


class FrameRecording(_FrameRun):
    """Records when frames end, and what those return that an open frame calls.

    Args:
        root: Receives the records; its open frames must be marked already.
        parts: The modules whose calls with one tensor are kept, too, since they may compute only a part of it.

    Attributes:
        tick: Returns a time that is later than all earlier ones.
    """

    def __init__(self, root: FrameNode, parts: Collection[Module]) -> None:
        super().__init__(root)
        self._parts = parts
        self.tick = itertools.count(1).__next__

    def run(
        self, caller: FrameNode, node: FrameNode, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = given = None
        with without_torch_functions():
            if caller.is_open:
                leaves = leaves_of((args, kwargs))
                # Not with a cache among what it is given, which a call fills.
                before = (
                    _versions(leaves) if all(isinstance(leaf, _LEAVES) or callable(leaf) for leaf in leaves) else None
                )
            if node.module in self._parts and not node.is_open and len(args) + len(kwargs) == 1:
                (value,) = args or kwargs.values()
                is_vectors = type(value) is Tensor and value.dim() > 1 and value.is_floating_point()
                given = value.clone() if is_vectors and value.shape[:-1].numel() >= _FEWEST else None
        output = call_sites.invoke(forward, args, kwargs)
        node.ended = self.tick()
        with without_torch_functions():
            # Copies, since the model may write into these later.
            if before is not None and before == _versions(leaves_of((args, kwargs))):
                returned = leaves_of(output)
                is_plain = all(isinstance(leaf, _LEAVES) for leaf in returned)
                if is_plain and not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in returned):
                    node.value = own_tensors(output)
            if given is not None and type(output) is Tensor and output.shape[:-1] == given.shape[:-1]:
                node.call = TensorCall(given, output.clone(), next(iter(kwargs), None))
        return output


def _versions(leaves: Iterable[Any]) -> list[tuple[int, int | None]]:
    """Returns which tensors and other leaves these are, and how often each was written into."""
    return [(id(leaf), version_of(leaf) if isinstance(leaf, Tensor) else None) for leaf in leaves]


class FrameReplay(_FrameRun):
    """Skips frames of a run, which return known values, or computes parts of frames.

    Args:
        root: The frame above the model.
        values: What some frames return.
        parts: How others are computed.
        on_return: Is given what the other frames return.
    """

    def __init__(
        self,
        root: FrameNode,
        values: Mapping[FrameNode, Any],
        parts: Mapping[FrameNode, ChangedPositions],
        on_return: Callable[[FrameNode, Any], None] | None,
    ) -> None:
        super().__init__(root)
        self._values, self._parts, self._on_return = values, parts, on_return
        self._is_apart = False  # whether other values than those of a frame are computed: no frame is in that

    def __call__(self, module: Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (
            call_sites.invoke(forward, args, kwargs)
            if self._is_apart
            else super().__call__(module, forward, args, kwargs)
        )

    def run(
        self, caller: FrameNode, node: FrameNode, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if node in self._values:
            return with_own_containers(self._values[node])  # the caller may write into a list or a dict
        if (part := self._parts.get(node)) is None:
            output = call_sites.invoke(forward, args, kwargs)
        else:
            output = part(forward, lambda *args, **kwargs: self._apart(forward, args, kwargs), *args, **kwargs)
        if self._on_return is not None:
            self._on_return(node, output)
        return output

    def _apart(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._is_apart = True
        try:
            return call_sites.invoke(forward, args, kwargs)
        finally:
            self._is_apart = False


# -- modules that compute only the positions that patches have changed ------------------------------------------------

LEAST_OPERATIONS = {"cpu": 5e7, "other": 4e9}
"""A module that needs fewer operations for a forward computes all positions: to find those that changed costs more."""
_WHOLE = 0.8
"""If a larger fraction of positions has changed, all are computed: selecting them would cost more."""
_FEWEST = 4
"""With fewer vectors, whether they meet in a module is not tested."""


def least_vectors(module: Module) -> float:
    """Returns for how many vectors, at least, it is worth the effort to select those that changed."""
    weights = {id(w): w for inner in all_modules(module) for w in inner._parameters.values() if w is not None}
    operations = 2 * sum(weight.numel() for weight in weights.values())
    on_cpu = all(weight.device.type == "cpu" for weight in weights.values())
    return LEAST_OPERATIONS["cpu" if on_cpu else "other"] / operations if operations else math.inf


class ChangedPositions:
    """Computes one frame at the positions that patches have changed.

    In a causal model, patches do not change the positions before them. A *position-wise* frame (an MLP, a projection)
    computes the vector at each position from the input vector at that position only. Where its input is the same as in
    the run without patches, its result is the recorded one. Whether a frame is position-wise is found in its first call
    with changed positions: known vectors are among these, in another order, and must have their known results.

    Args:
        module: Its module.
        call: Its input and result in the run without patches.

    Attributes:
        is_position_wise: Whether vectors do not meet in it; `None` before that is known. If they do, it runs as it is.
    """

    def __init__(self, module: Module, call: TensorCall) -> None:
        self._given, self._returned, self._keyword = call
        self._least = least_vectors(module)
        self.is_position_wise: bool | None = None

    def __call__(self, forward: Forward, apart: Forward, *args: Any, **kwargs: Any) -> Any:
        """Returns the result; `apart` calls the `forward` on other vectors than those of the frame."""
        __tracebackhide__ = True
        (value,) = (*args, *kwargs.values())
        if self.is_position_wise is False or not self._is_like_given(value):
            return call_sites.invoke(forward, args, kwargs)
        given, returned = self._given, self._returned
        count = value.shape[0] // given.shape[0]
        places = differing(value.view(count, *given.shape), given).flatten().nonzero().squeeze(1)
        if len(places) > _WHOLE * value.shape[:-1].numel():
            return call_sites.invoke(forward, args, kwargs)
        result = returned.repeat(count, *[1] * (returned.dim() - 1))
        if len(places):
            compute = self._computed if self.is_position_wise else self._tested
            computed = compute(apart, value.flatten(0, -2).index_select(0, places))
            if computed is None or computed.dtype != result.dtype:  # under another autocast
                return call_sites.invoke(forward, args, kwargs)
            result.flatten(0, -2).index_copy_(0, places, computed)
        return result

    def _is_like_given(self, value: Any) -> bool:
        given = self._given
        return (
            type(value) is Tensor
            and value.shape[1:] == given.shape[1:]
            and (value.dtype, value.device) == (given.dtype, given.device)
            and value.shape[0] % given.shape[0] == 0
            and value.shape[:-1].numel() > self._least
        )

    def _computed(self, forward: Forward, vectors: Tensor) -> Tensor:
        """Returns what the module computes from some vectors, in sequences of the usual length."""
        lead, count = self._given.shape[1:-1], len(vectors)
        missing = -count % lead.numel()
        padded = torch.cat([vectors, vectors[-1:].expand(missing, -1)]) if missing else vectors
        shaped = padded.view(-1, *lead, vectors.shape[-1])
        output: Tensor = forward(shaped) if self._keyword is None else forward(**{self._keyword: shaped})
        return output.flatten(0, -2)[:count]

    def _tested(self, forward: Forward, vectors: Tensor) -> Tensor | None:
        """Returns the same, with a wild vector and known ones among the others; `None` if the known ones change."""
        known, expected = self._given.flatten(0, -2), self._returned.flatten(0, -2)
        length, changed = self._given.shape[1:-1].numel(), len(vectors)
        # Some known vectors for each sequence, and other sequences than in the run without patches.
        least = 1 + changed + _FEWEST + (changed // length if length > 1 else 0)
        sequences = max(-(-least // length), len(self._given) + 1)
        count = sequences * length - 1 - changed
        turns = -(-count // len(known))
        mixed = torch.cat([wild(known[:1]), vectors, torch.cat([known.flip(0)] * turns)[:count]])
        # Each sequence has every n-th of them, so that all have known ones among others.
        mixed = mixed.view(length, sequences, -1).transpose(0, 1).flatten(0, 1)
        self.is_position_wise = False
        try:
            found = self._computed(forward, mixed)
        except Exception:  # whatever the module raises for such values
            return None
        found = found.view(sequences, length, -1).transpose(0, 1).flatten(0, 1)[1:]
        self.is_position_wise = is_close(found[changed:], torch.cat([expected.flip(0)] * turns)[:count])
        return found[:changed] if self.is_position_wise else None


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(value: Tensor, reference: Tensor) -> Tensor:
    """Returns a mask of positions with vectors that differ in any bit (-0.0 differs from 0.0)."""
    word = _WORDS[value.element_size()]
    if value.is_contiguous() and reference.is_contiguous() and value.shape[-1] * value.element_size() % 64 == 0:
        # Compare eight bytes at a time, then reduce eight booleans at a time.
        return (value.view(torch.int64) != reference.view(torch.int64)).view(torch.int64).any(-1)
    return (value.view(word) != reference.view(word)).any(-1)


# -- values of frames --------------------------------------------------------------------------------------------------

_LEAVES = (Tensor, *IMMUTABLE)
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4, torch.complex128: 1e-9}
_COARSE = 3e-2


def leaves_of(value: Any) -> list[Any]:
    """Returns what a value made of containers holds: tensors, and everything else that is not a container."""
    inside: Any = value if type(value) in (tuple, list) else value.values() if type(value) is dict else None
    if inside is None:  # not the usual containers, which this reads faster
        parts = None if isinstance(value, _LEAVES) else children(value)
        if parts is None:
            return [value]
        inside = [child for _, child in parts]
    return [leaf for child in inside for leaf in leaves_of(child)]


def own_tensors(value: Any) -> Any:
    """Returns a value made of containers, with copies of its tensors."""
    return mapped(value, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def is_close(value: Tensor, reference: Tensor) -> bool:
    """Whether two values are equal up to the rounding errors of kernels for other batch sizes."""
    if value.shape != reference.shape or value.dtype != reference.dtype:
        return False
    if not (value.is_floating_point() or value.is_complex()):
        return torch.equal(value, reference)
    tolerance = _TOLERANCES.get(value.dtype, _COARSE)
    # A faster check for finite values: this function runs for many values.
    if not value.numel() or (value - reference).abs().max() <= tolerance * reference.abs().max():
        return True
    scale = reference[reference.isfinite()].abs().amax().item() if reference.isfinite().any() else 0.0
    return torch.allclose(value, reference, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def wild(value: Tensor) -> Tensor:
    """Returns other numbers, larger than those of a value; integers and booleans in another order."""
    if not (value.is_floating_point() or value.is_complex()):
        return value.roll(1, -1)
    steps = torch.arange(1, value.numel() + 1, device=value.device, dtype=torch.float32).view(value.shape)
    return (steps.cos() * 100 * value.abs().max().clamp(min=1)).to(value.dtype)
