"""The state of a model: what a run may change in it, with snapshots and comparisons; and whether processes share it.

The contract (law 5): attributes of modules, with the containers and plain objects among them, buffers, parameters that
the capture saw written, training flags, hooks, and the random generators. What code keeps in globals, closures and
classes belongs to the user: extra runs count there.

Under tensor parallelism each process holds some heads, some neurons, or one term of a sum, so that a slice, a position,
a head or a number means something else there than in the whole value. FSDP is different: its weights are whole while a
module runs.

What joins and splits values is in the room `distributed`, which is loaded where a model needs it: the rest of the
package asks `sharding_of` and `processes_of`.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from operator import is_
from typing import Any, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import handle_torch_function

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.modules import (
    LARGE,
    NOT_STATE,
    PLAIN_VALUES,
    WRITTEN,
    is_offloaded,
    memory_of,
    mutable_containers,
    plain_tensors,
    reachable_modules,
)
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import afterwards, warn_each_time
from graphpatch_notebook.torch_compat import function_mode_depth, is_fully_sharded, version_of, without_torch_functions
from graphpatch_notebook.values import ABSENT, IMMUTABLE, children, is_same_plain, key_text

_P = ParamSpec("_P")
_T = TypeVar("_T")
_DISTRIBUTED = "DTensor"
_MESH = "DeviceMesh"
_MACHINERY = ("torch.distributed.tensor", "transformers.integrations.tensor_parallel", "transformers.distributed")


def communicates(root: Frame) -> bool:
    """Whether copies of the model of a capture exchange weights, values or buffers with other processes."""
    modules = [frame.module for frame in root.walk()]
    return any(isinstance(each, DistributedDataParallel) or is_fully_sharded(each) for each in modules)


def is_distributed(value: object) -> bool:
    """Whether a value is a `DTensor`: each process holds a part of it."""
    return type(value).__name__ == _DISTRIBUTED


def is_parallel_machinery(function: Callable[..., Any] | None) -> bool:
    """Whether a hook, or a forward of an instance, is what splits and joins the values of a sharded model."""
    code = getattr(function, "__code__", None)
    named = str(getattr(function, "__module__", "")).startswith(_MACHINERY)
    return named or (code is not None and call_sites.facts_of(code).is_parallel)


def holds_some_experts(module: Module) -> bool:
    """Whether a process has only some of the experts of a module: the experts of other processes compute other rows."""
    return bool(module.__dict__.get("_is_expert_parallel", False))


def note_whole_tensors(memo: dict[int, Any], module: Module, device: torch.device) -> None:
    """Makes `deepcopy` with this `memo` put empty tensors of the whole shape in place of the `DTensor`s of a module."""
    for held in (module._parameters, module._buffers):
        for tensor in held.values():
            if is_distributed(tensor) and tensor is not None and id(tensor) not in memo:
                whole: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                is_parameter = held is module._parameters
                memo[id(tensor)] = Parameter(whole, requires_grad=tensor.requires_grad) if is_parameter else whole
    for value in vars(module).values():
        if type(value).__name__ == _MESH:
            memo[id(value)] = value  # it holds groups of processes


def drop_machinery(copied: Module) -> None:
    """Removes the hooks that split and join values from a copied module, which holds whole tensors."""
    if is_parallel_machinery(copied.__dict__.get("forward")):
        del copied.__dict__["forward"]
    if holds_some_experts(copied):  # transformers then counts the experts of this process
        copied.__dict__["_is_expert_parallel"] = False
        copied.__dict__["num_experts"] = next(copied.parameters(recurse=False)).shape[0]


def sharding_of(root: Frame) -> Any:
    """Returns the sharding of the model of a capture; `None` if each process runs all of it."""
    return root.capture.findings.get(sharding_of)


def processes_of(root: Frame) -> Any:
    """Returns the processes that run the model of a capture together, under tensor parallelism or FSDP.

    `None` if this one runs it alone.
    """
    findings = root.capture.findings
    if processes_of not in findings:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        from graphpatch_notebook.distributed.processes import processes_over

        findings[processes_of] = processes_over(root.module)
    return findings[processes_of]


def calling(root: Frame, name: str) -> AbstractContextManager[None]:
    """A context manager for a call of the model, or of a method: it names processes that do not make it.

    Methods that all modules have, such as `eval`, do not run the model.
    """
    processes = processes_of(root) if name == "forward" or not hasattr(Module, name) else None
    return nullcontext() if processes is None else processes.calling(name)


def holding_tensors(module: Module, replacements: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Puts tensors into a module itself, for the length of a block: for a forward that would not see a stand-in."""
    from graphpatch_notebook.distributed.sharding import holding_tensors

    return holding_tensors(module, replacements)


def same_value(value: Any, result: Any) -> Any:
    """Returns `result`, which is the same value in another form: all of it, or what this process holds of it.

    Modes that follow values, as derivative rules do, see this call, and none of those that join parts.
    """
    is_same_kind = isinstance(value, Tensor) and isinstance(result, Tensor)
    if value is result or not is_same_kind or not function_mode_depth():
        return result
    return handle_torch_function(same_value, (), value, result)


def runs_where_the_model_is(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes a function of a `PatchableGraph` run in the processes that have the model of a `RemoteGraph`."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        run_there: Any = getattr(type(args[0]), "run_there", None) if args else None
        if run_there is None:
            return function(*args, **kwargs)
        result: _T = run_there(args[0], run, *args[1:], **kwargs)
        return result

    return run


# -- equal values ------------------------------------------------------------------------------------------------------

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class IncomparableError(Exception):
    """Two values are of a kind that cannot be compared (caught inside the package)."""


def difference(a: Any, b: Any, where: str, above: tuple[int, ...] = ()) -> str | None:
    """Returns a description of the first difference between two values, or `None` if they are equal bit for bit.

    Two values are equal if classes of containers, keys and their order match, and for tensors class, dtype, shape,
    strides, device, `requires_grad` and every bit (of two NaNs the payloads may differ). Objects are equal if their
    attributes are. The message calls them `where`; `above` are the ids of the objects that they are in.

    Raises:
        IncomparableError: Before any difference there are two objects without attributes.

    Example:
        >>> difference((torch.zeros(1), None), (-torch.zeros(1), None), "output")
        'output|sub_0: 1 of 1 values differ'
    """
    if a is b or id(a) in above:  # an object may hold itself
        return None
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensor_difference(a, b, where)
    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} is not {type(b).__name__}"
    if type(a) in IMMUTABLE or isinstance(a, (float, complex)):
        return None if is_same_plain(a, b) else f"{where}: {a!r} is not {b!r}"
    inside_a, inside_b = _inside(a), _inside(b)
    if inside_a is None or inside_b is None:
        raise IncomparableError(f"{where}: objects of type {type(a).__name__} cannot be compared")
    if [key for key, _ in inside_a] != [key for key, _ in inside_b]:
        return f"{where}: the keys differ"
    inner = f"{where}." if "|" in where else f"{where}|"
    pairs = zip(inside_a, inside_b, strict=True)
    texts = (difference(x, y, inner + key_text(key), (*above, id(a))) for (key, x), (_, y) in pairs)
    return next((text for text in texts if text is not None), None)


def _inside(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the contents of a container or a plain object, by key or attribute."""
    if isinstance(value, (Module, type)) or callable(value):
        return None
    if (inside := children(value)) is not None:
        return inside
    attributes = getattr(value, "__dict__", None)
    return None if attributes is None else list(attributes.items())


def _tensor_difference(a: Tensor, b: Tensor, where: str) -> str | None:
    for name, one, other in zip(_FACTS, _facts(a), _facts(b), strict=True):
        if one != other:
            return f"{where}: {name}{one} is not {other}"
    if a.device.type == "meta":
        return None
    with torch.no_grad():
        x, y = _plain(a), _plain(b)
        # One answer, not two, has to come back from the device where all is well.
        if torch.equal(_bits(x), _bits(y)):
            return None
        different = _bits(x) != _bits(y)
        if x.is_floating_point():
            different &= ~(x.isnan() & y.isnan())
        wrong = int(different.sum())
        return f"{where}: {wrong} of {a.numel()} values differ" if wrong else None


_FACTS = ("", "dtype ", "shape ", "device ", "layout ", "requires_grad ", "strides ")


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    kind = Tensor if type(tensor) is torch.nn.Parameter else type(tensor)
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    facts = (tensor.dtype, tuple(tensor.shape), tensor.device, tensor.layout, tensor.requires_grad)
    return kind.__name__, *facts, strides


def _plain(tensor: Tensor) -> Tensor:
    """Returns a plain, real tensor with the same bits."""
    tensor = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    tensor = tensor.as_subclass(Tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])


# -- whose hook is it? Those of this package and of libraries do other things to a run than those of users -------------

_OWN_PACKAGE = __name__.partition(".")[0]
_LIBRARIES = ("torch", "transformers", "accelerate")
_COLLECTING = "transformers.utils.output_capturing"


HookOwner: TypeAlias = Literal["own", "collecting", "library", "user"]
"""What a hook on a module belongs to.

own: A patch context. Without patches it does nothing.
collecting: How transformers collects hidden states: it is on all layers, and does nothing unless these are requested.
library: How a model works: it moves weights, or splits and joins values.
"""


def owner_of(hook: Callable[..., Any]) -> HookOwner:
    """Returns what a hook on a module belongs to.

    Example:
        >>> import torch
        >>> owner_of(print), owner_of(torch.nn.ReLU())
        ('user', 'library')
    """
    module = str(getattr(hook, "__module__", ""))
    package = module.partition(".")[0]
    if package == _OWN_PACKAGE:
        return "own"
    if module.startswith(_COLLECTING):
        return "collecting"
    return "library" if package in _LIBRARIES else "user"


def is_inert(hook: Callable[..., Any]) -> bool:
    """Whether a hook neither changes nor keeps anything by itself."""
    return owner_of(hook) in ("own", "collecting")


# -- inputs and outputs ------------------------------------------------------------------------------------------------


def copied(value: Any, shared: Iterable[Tensor] = ()) -> Any:
    """Returns a copy of inputs: tensors keep their strides, their aliases, and whether they are leaves.

    `shared` tensors are not copied, nor are modules and functions.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    _prepare(value, memo, {})
    return copy.deepcopy(value, memo)


def _prepare(value: Any, memo: dict[int, Any], seen: dict[int, Any]) -> None:
    if isinstance(value, Tensor):
        if id(value) not in memo:
            # `detach` first: torch does not copy tensors that an op made and that require gradients.
            memo[id(value)] = _like(_copied_tensor(value.detach(), memo), value)
    elif isinstance(value, Module) or callable(value):
        memo[id(value)] = value
    elif id(value) not in seen:  # a container may hold itself
        seen[id(value)] = value
        for _, child in children(value) or ():
            _prepare(child, memo, seen)


def _copied_tensor(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    try:
        return copy.deepcopy(tensor, memo)
    except (RuntimeError, NotImplementedError):  # some subclasses, and the tensors of `torch.func`
        return tensor.clone()


def _like(alias: Tensor, original: Tensor) -> Tensor:
    """Returns `alias`, as a leaf of autograd if `original` is one: in-place ops check that."""
    if not original.requires_grad:
        return alias
    leaf = alias.requires_grad_()
    if original.is_leaf or not torch.is_grad_enabled():
        return leaf
    inner = leaf.clone()
    return inner if inner.stride() == leaf.stride() else leaf.view_as(leaf)


def copied_output(value: Any) -> Any:
    """Returns a copy of an output. Parameters of the model are not copied, since no run writes into them."""
    return copied(value, [tensor for tensor in plain_tensors(value) if isinstance(tensor, Parameter)])


# -- random generators -------------------------------------------------------------------------------------------------


class RandomState:
    """The state of the random generators of torch, Python and numpy, and of some others."""

    def __init__(self, others: Iterable[Any] = ()) -> None:
        cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        owned: dict[str, list[Any]] = {"torch": [torch.default_generator, *cuda], "Python": [random]}
        if "numpy" in sys.modules:
            owned["numpy"] = [sys.modules["numpy"].random]
        owned["a generator of its own"] = list(others)
        self._states = [(owner, each, _state_of(each)) for owner, generators in owned.items() for each in generators]

    def changed(self) -> list[str]:
        """Returns the owners of the generators whose state has changed since."""
        changed = (owner for owner, each, state in self._states if not _is_same_state(state, _state_of(each)))
        return list(dict.fromkeys(changed))

    def restore(self) -> None:
        """Puts the generators back to this state."""
        for _, generator, state in self._states:
            _set_state(generator, state)


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator with a state that can be read and set."""
    kind = type(value)
    if kind not in _GENERATORS:  # a look at numpy, and at classes of torch, for each attribute of a model takes long
        numpy = sys.modules.get("numpy")
        of_numpy = (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator) if numpy else ()
        known = (torch.Generator, random.Random, *of_numpy)
        _GENERATORS[kind] = issubclass(kind, known) and not issubclass(kind, random.SystemRandom)
    return _GENERATORS[kind]


_GENERATORS: dict[type, bool] = {}


def _state_of(generator: Any) -> Any:
    """Returns the state of a generator, or of the one of a module (`random`, `numpy.random`)."""
    get = getattr(generator, "get_state", None) or getattr(generator, "getstate", None)
    return getattr(generator, "bit_generator", generator).state if get is None else get()


def _set_state(generator: Any, state: Any) -> None:
    put = getattr(generator, "set_state", None) or getattr(generator, "setstate", None)
    if put is None:
        getattr(generator, "bit_generator", generator).state = state
    else:
        put(state)


def _is_same_state(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(_is_same_state(a[name], b[name]) for name in a)
    if type(a) is tuple and any(hasattr(each, "tobytes") for each in a):  # of numpy
        return all(map(_is_same_state, a, b))
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else bool(a == b)


# -- the state of a model ----------------------------------------------------------------------------------------------


_Held: TypeAlias = "tuple[Module, str, Any, Any]"
"""A container that a module holds, with its name (none for the attributes), and a copy of what it held."""

_REGISTRIES = dict.fromkeys(name for name, value in Module().__dict__.items() if isinstance(value, (dict, set)))
_HOOKS = dict.fromkeys(name for name in _REGISTRIES if "_hooks" in name)
_WITHOUT_TENSORS = PLAIN_VALUES | {dict, OrderedDict, set, list, tuple}
"""What is inside of a container is kept with that."""


@dataclass(frozen=True, eq=False)
class Change:
    """One thing in which a model differs from a snapshot. Its text is for messages.

    Attributes:
        module_class: The name of the class of the module that holds it.
        name: The attribute, parameter or buffer, and the keys into it after dots.
        is_write: Whether a tensor has other contents; else something else is there.
        is_restorable: Whether `ModelSnapshot.restore` undoes it.
    """

    module_class: str
    name: str
    is_write: bool = False
    is_restorable: bool = True

    def __str__(self) -> str:
        verb = "writes into" if self.is_write else "changes"
        return f"{self.module_class} {verb} its {self.name!r} while it runs"


@contextmanager
def preserved(model: Module) -> Iterator[ModelSnapshot]:
    """Restores the state of a model, and the random generators, when the block ends or raises."""
    snapshot = ModelSnapshot(model)
    with afterwards(snapshot.restore):
        yield snapshot


class ModelSnapshot:
    """The state of a model, and of the random generators, at one moment.

    Buffers and other tensors are copied. Weights are not, except for those that the capture saw written, and neither
    are tensors of more than `LARGE` bytes: a write into these stays, with a `GraphPatchWarning` (`state`).

    Args:
        root: The model, or a part of it.
    """

    def __init__(self, root: Module) -> None:
        self.root = root
        self._has_warned = False
        self._empty: list[_Held] = []  # most registries
        self._held: list[_Held] = []
        self._tensors: dict[int, _TensorSnapshot] = {}
        self._generators: dict[int, Any] = {}
        sharded: set[int] = set()
        seen: set[int] = set()
        with without_torch_functions():
            modules = reachable_modules(root)
            for module in filter(is_fully_sharded, modules):
                sharded.update(map(id, module.modules()))
            for module in modules:
                # accelerate and FSDP put weights in place while a module runs.
                moving = ("_parameters", "_buffers") if is_offloaded(module) else ("_parameters",)
                self._keep(module, moving if is_offloaded(module) or id(module) in sharded else (), seen)
            self.random = RandomState(self._generators.values())

    def _keep(self, module: Module, moving: Sequence[str], seen: set[int]) -> None:
        own = module.__dict__
        for name in _REGISTRIES:
            registry = own.get(name)
            if not isinstance(registry, (dict, set)) or name in moving:  # those of a `ScriptModule` are neither
                continue
            if registry:
                self._keep_container(module, name, registry)
            else:
                self._empty.append((module, name, registry, type(registry)()))
        for name, container in mutable_containers(module, _REGISTRIES, seen):
            self._keep_container(module, name, container)
        if isinstance(module, torch.jit.ScriptModule):  # its tensors are not in its `__dict__`
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                self._tensors.setdefault(id(tensor), _TensorSnapshot(module, name, tensor))

    def _keep_container(self, module: Module, name: str, container: Any) -> None:
        saved = _saved(name, container)
        self._held.append((module, name, container, saved))
        for key, value in _items(saved):
            if type(value) in _WITHOUT_TENSORS:
                continue
            if isinstance(value, Tensor):
                if id(value) not in self._tensors:
                    self._tensors[id(value)] = _TensorSnapshot(module, f"{name}.{key}" if name else key, value)
            elif is_generator(value):
                self._generators[id(value)] = value

    def changes(self) -> Iterator[Change]:
        """Yields what has changed since; hooks that are inert do not count."""
        with without_torch_functions():
            for module, name, container, saved in self._containers():
                for key in _changed_keys(name, container, saved):
                    yield Change(type(module).__name__, _shown(f"{name}.{key}" if name else str(key)))
            for tensor in self._tensors.values():
                if tensor.is_written(tensor.module.training):
                    yield tensor.change

    def _containers(self) -> list[_Held]:
        return [*(held for held in self._empty if held[2]), *self._held]

    def restore(self, *, counts_writes: bool = False) -> None:
        """Puts everything back that can be. Call it again where an interrupt came in between.

        If it `counts_writes`, autograd refuses to go backward through a run that used what is written over.
        """
        self.random.restore()
        with without_torch_functions():
            for module, name, container, saved in self._containers():
                if name in _HOOKS:
                    _restore_hooks(module, name, saved)
                elif next(_changed_keys(name, container, saved, is_exact=True), ABSENT) is not ABSENT:
                    _restore_container(container, saved, is_module=not name)
            for tensor in self._tensors.values():
                if tensor.is_written(True):
                    tensor.restore(counts_writes)
            lost = [
                str(each.change) for each in self._tensors.values() if each.content is None and each.is_written(True)
            ]
        if lost and not self._has_warned:
            self._has_warned = True
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            warn_each_time(
                f"a run that should have left no trace in {type(self.root).__name__} left one that cannot be put "
                f"back: {lost[0]}{more}",
                "state",
            )

    def separated(self, value: Any) -> Any:
        """Returns a value that does not change when this is restored, or the model runs again.

        Usually this is the value itself; it is a copy if the value shares memory with a tensor of the model.
        """
        held = (tensor.value for tensor in self._tensors.values())
        kept = {memory_of(tensor) for tensor in held if not isinstance(tensor, Parameter)} - {None}
        return copied_output(value) if any(memory_of(tensor) in kept for tensor in plain_tensors(value)) else value


class _TensorSnapshot:
    """A tensor that a module holds, and a copy of its contents; `None` for weights, and what cannot be copied."""

    def __init__(self, module: Module, name: str, value: Tensor) -> None:
        self.module, self.name, self.value, self._version = module, name, value, version_of(value)
        is_known = id(value) in WRITTEN
        self.content = _copy_of(value, is_known) if is_known or not isinstance(value, Parameter) else None

    def is_written(self, is_training: bool) -> bool:
        """Whether it has other contents. Kernels of batch norms, in training mode, do not count what they write."""
        if version_of(self.value) == self._version and (self.content is None or not is_training):
            return False
        return self.content is None or difference(self.value.detach(), self.content, "") is not None

    @property
    def change(self) -> Change:
        """That it was written."""
        return Change(type(self.module).__name__, _shown(self.name), True, self.content is not None)

    def restore(self, counts_writes: bool) -> None:
        value, content = self.value, self.content
        if content is None:
            WRITTEN[id(value)] = value  # the next snapshot copies it
        elif (value.shape, value.dtype, value.device) == (content.shape, content.dtype, content.device):
            with torch.inference_mode(value.is_inference()), torch.no_grad():
                # Through `data`: autograd may have saved this tensor for the backward of the run that counts.
                (value if counts_writes else value.data).copy_(content)
        else:
            value.data = content.clone()


def _copy_of(tensor: Tensor, is_written: bool) -> Tensor | None:
    try:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        has_own_elements = all(stride > 0 for size, stride in sizes if size > 1)
        is_large = tensor.numel() * tensor.element_size() > LARGE and not is_written
        return tensor.detach().clone() if has_own_elements and not is_large else None
    except Exception:  # lazy buffers, some layouts and subclasses have no strides, or no copies
        return None


# -- containers


def _shown(name: str) -> str:
    return name.removeprefix("_parameters.").removeprefix("_buffers.").removeprefix("_modules.")


def _saved(name: str, container: Any) -> Any:
    """Returns a copy of what a container holds: without what comes and goes in attributes, and without own hooks."""
    if isinstance(container, dict):
        # At once, as another thread may be at work; and whatever the class makes of it.
        items = dict(container if type(container) is dict else _dict_class(container).items(container))
        for key in () if name else NOT_STATE:
            items.pop(key, None)
        return {key: hook for key, hook in items.items() if not _is_own(hook)} if name in _HOOKS else items
    return set(container) if isinstance(container, set) else list(container)


def _dict_class(container: dict[Any, Any]) -> Any:
    return OrderedDict if isinstance(container, OrderedDict) else dict


def _is_own(hook: Any) -> bool:
    return callable(hook) and owner_of(hook) == "own"


def _items(saved: Any) -> Iterable[tuple[Any, Any]]:
    return saved.items() if isinstance(saved, dict) else enumerate(saved)


def _changed_keys(name: str, container: Any, saved: Any, *, is_exact: bool = False) -> Iterator[Any]:
    """Yields the keys of a container with other values; if it `is_exact`, also where an equal value is another object.

    Inert hooks, and the flags of hooks, do not count.
    """
    if len(container) == len(saved) == 0:
        return
    if isinstance(saved, dict) and len(container) == len(saved):  # the usual case, without copies
        values = [*container.values()]
        if len(values) == len(saved) and all(map(is_, values, saved.values())) and [*container] == [*saved]:
            return
    now = _saved(name, container)
    if isinstance(saved, set):
        yield from saved ^ now
        return
    was, now = dict(_items(saved)), dict(_items(now))
    for key in dict.fromkeys([*was, *now]):
        before, after = was.get(key, ABSENT), now.get(key, ABSENT)
        if before is after or (not is_exact and _is_same_plain(before, after)):
            continue
        if name not in _HOOKS or any(callable(hook) and not is_inert(hook) for hook in (before, after)):
            yield key
    if is_exact and list(was) != list(now):
        yield "order"


def _is_same_plain(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (bool, int, float, str, bytes)) and a == b


def _restore_container(container: Any, saved: Any, *, is_module: bool) -> None:
    """Has a container hold what it held. Of a module's attributes only those are touched that differ."""
    if isinstance(container, (list, deque, set)):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(saved)
        return
    base = _dict_class(container)  # subclasses may refuse some of these
    if not is_module:
        base.clear(container)
        base.update(container, saved)
        return
    for key in [key for key in container if key not in saved and key not in NOT_STATE]:
        del container[key]
    for key, value in saved.items():
        if container.get(key, ABSENT) is not value:
            container[key] = value


def _restore_hooks(module: Module, name: str, saved: dict[Any, Any]) -> None:
    """Has a registry of hooks hold what it held, besides those of this package.

    Patch contexts of other threads add and remove these at any time: they stay as they are.
    """
    container = module.__dict__[name]
    kind = name.removesuffix("_with_kwargs").removesuffix("_always_called")
    if kind != name:  # which of the hooks in another registry, which is put back before, are called in which way
        hooks: Callable[[Any], bool] = module.__dict__[kind].__contains__
        for key in [key for key in list(container) if not hooks(key)]:
            container.pop(key, None)
        container.update((key, value) for key, value in saved.items() if hooks(key))
        return
    others = [key for key, hook in list(container.items()) if not _is_own(hook)]
    if others != [*saved]:
        for key in others:
            container.pop(key, None)
    container.update(saved)


# -- two runs: do they do the same, from the same state of a model, on the same inputs? --------------------------------
# They are equal if they return the same, write the same into their inputs, and leave the model, the random generators
# and the gradient mode in the same state.


class RunComparison(NamedTuple):
    """How two runs compare: equal bit for bit; both ran, or only the second one raised; or nothing would be proved.

    `reason` is where they differ, the error, or why they cannot be compared.
    """

    status: Literal["equal", "differing", "not comparable"]
    reason: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether both do the same, bit for bit."""
        return self.status == "equal"


# A comparison puts buffers and random generators back, which two at a time must not do.
_lock = threading.RLock()


def compared(
    model: Module,
    expected: Callable[..., Any],
    found: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RunComparison:
    """Compares two runs on copies of the same inputs; the model and the inputs do not change.

    Args:
        model: Holds all state that the runs may change.
        expected: Runs what is right. Its errors are raised.
        found: Runs what may do the same.
        args: The positional inputs.
        kwargs: The inputs by keyword.
    """
    try:
        own = copied((args, kwargs))
    except Exception as error:  # of the user's own objects
        return _not_copied(error)
    with _lock, preserved(model), torch.set_grad_enabled(torch.is_grad_enabled()):
        return copy_context().run(run_and_compare, model, expected, found, *own)[1]


def run_and_compare(
    model: Module,
    expected: Callable[..., Any],
    found: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, RunComparison]:
    """Returns the result of `expected` on the inputs themselves, and its comparison with `found`, as `compared` does.

    The effects of `expected` stay. `found` runs on copies, and its effects are undone.
    """
    with _lock:
        try:
            before, copies = ModelSnapshot(model), copied((args, kwargs))
        except Exception as error:
            return expected(*args, **kwargs), _not_copied(error)
        had_gradients = torch.is_grad_enabled()
        context = copy_context()  # `expected` and `found` must not see the context variables that the other one sets
        result = expected(*args, **kwargs)
        # Graphs write, and draw from torch, as the module does, and repeat nothing else.
        changes = [str(one) for one in before.changes() if not (one.is_write and one.is_restorable)]
        if drawn := [owner for owner in before.random.changed() if owner in ("Python", "numpy")]:
            changes = [f"the model draws random numbers (of {' and '.join(drawn)})"]
        if changes:
            return result, RunComparison("not comparable", changes[0])
        has_gradients = torch.is_grad_enabled()
        with preserved(model) as after, torch.set_grad_enabled(has_gradients):
            before.restore()
            torch.set_grad_enabled(had_gradients)
            try:
                value = context.run(found, *copies[0], **copies[1])
            except Exception as error:
                return result, RunComparison("differing", f"its graph raises {_first_line(error)}")
            try:
                text = _difference_of_runs(after, (value, copies), (result, (args, kwargs)), has_gradients)
            except (IncomparableError, RuntimeError, NotImplementedError) as error:  # the tensors of `torch.func`
                return result, RunComparison("not comparable", str(error))
            return result, RunComparison("equal" if text is None else "differing", text or "")


def _difference_of_runs(after: ModelSnapshot, found: Any, expected: Any, has_gradients: bool) -> str | None:
    if torch.is_grad_enabled() != has_gradients:
        return "it ends in another gradient mode"
    for one, other, where in zip(found, expected, ("output", "inputs"), strict=True):
        if (text := difference(one, other, where)) is not None:
            return text
    if after.random.changed():
        return "it ends in another random state"
    changes = (f"it leaves another {change.name!r} in {change.module_class}" for change in after.changes())
    return next(changes, None)


def _not_copied(error: Exception) -> RunComparison:
    return RunComparison("not comparable", f"its inputs cannot be copied ({_first_line(error)})")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
