"""The state of a model and of inputs: takes a snapshot of what a run may change, compares with it, and restores it."""

from __future__ import annotations

import copy
import copyreg
import ctypes
import enum
import itertools
import operator
import random
import sys
import types
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from graphpatch_notebook.capture.held_values import (
    CODE,
    LARGE,
    NOT_STATE,
    OF_EACH_MODULE,
    PLAIN_VALUES,
    REGISTRIES,
    WRITTEN,
    Identities,
    OuterValue,
    Walk,
    is_own_generator,
    memory_of,
    names_of_generate,
    outer_values_of,
    raw_dict,
    registered_modules,
    state_attributes,
)
from graphpatch_notebook.capture.observers import original_forward
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.checks.equality import difference
from graphpatch_notebook.checks.hooks import HookOwner, is_inert, owner_of
from graphpatch_notebook.checks.sharding import is_distributed
from graphpatch_notebook.errors import StateWarning
from graphpatch_notebook.torch_compat import COMPILER_NOTES, copied_with_storage, version_of, without_torch_functions
from graphpatch_notebook.values import ABSENT, children
from graphpatch_notebook.warning_places import warn_each_time

# -- inputs ------------------------------------------------------------------------------------------------------------


def copied(value: Any, shared: Iterable[Tensor] = ()) -> Any:
    """Returns a copy of inputs: tensors keep their strides, their aliases, and whether they are leaves.

    `shared` tensors are not copied, nor are modules, functions, and what has no state, such as `object()`: only its
    identity counts.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    _prepare(value, memo, {})
    return copy.deepcopy(value, memo)


def _prepare(value: Any, memo: dict[int, Any], seen: dict[int, Any]) -> None:
    if isinstance(value, Tensor):
        if id(value) not in memo:
            # `detach` first: torch does not copy tensors that an op made and that require gradients.
            memo[id(value)] = _like(_copied_tensor(value.detach(), memo), value)
    elif isinstance(value, Module) or callable(value) or _is_sentinel(value):
        memo[id(value)] = value
    elif id(value) not in seen:  # a container may hold itself
        seen[id(value)] = value
        for _, child in children(value) or ():
            _prepare(child, memo, seen)


def _is_sentinel(value: Any) -> bool:
    """Whether only the identity of an object counts: it has no contents, and equals only itself."""
    kind = type(value)
    if getattr(kind, "__eq__", None) is not object.__eq__ or hasattr(kind, "__deepcopy__"):
        return False
    try:
        maker, arguments, *state = value.__reduce_ex__(4)
    except Exception:  # it cannot be copied at all, and `deepcopy` will say so
        return False
    return maker is copyreg.__newobj__ and arguments == (kind,) and not any(state)  # type: ignore[attr-defined]


def _copied_tensor(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    try:
        copied = copied_with_storage(tensor, memo)
        return copy.deepcopy(tensor, memo) if copied is None else copied
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
    return copied(value, [tensor for tensor in tensors_in(value) if isinstance(tensor, Parameter)])


# -- random generators -------------------------------------------------------------------------------------------------

SHARED = ("torch", "Python", "numpy")
"""The owners of the random generators that all code shares."""


class SharedRandomState:
    """The state of the global random generators of torch, Python and numpy."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._torch = _states_of_torch()

    def restore(self) -> None:
        """Puts the generators back to this state."""
        torch.set_rng_state(self._torch[0])
        if len(self._torch) > 1:
            torch.cuda.set_rng_state_all(self._torch[1:])
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def changed(self) -> list[str]:
        """Returns the owners of the generators whose state has changed since."""
        is_same = {
            "torch": _are_equal(self._torch, _states_of_torch()),
            "Python": self._python == random.getstate(),
            "numpy": self._numpy is None or _is_state_of_numpy(self._numpy),
        }
        return [owner for owner in is_same if not is_same[owner]]

    def is_same_for_torch(self, other: SharedRandomState) -> bool:
        """Whether the state of torch's generators is the same in `other`."""
        return _are_equal(self._torch, other._torch)


def _states_of_torch() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def _are_equal(states: list[Tensor], others: list[Tensor]) -> bool:
    return len(states) == len(others) and all(map(torch.equal, states, others))


def _is_state_of_numpy(state: Any) -> bool:
    """Whether numpy's generator has this state: by its memory, if possible, since asking takes 50 times longer."""
    kind, words, position, has_gauss, *_ = state
    bits: Any = getattr(sys.modules["numpy"].random, "get_bit_generator", object)()  # since numpy 1.24
    # The second one of two normal numbers is kept elsewhere.
    if type(bits).__name__ == kind == "MT19937" and not has_gauss:
        expected = words.tobytes() + position.to_bytes(4, sys.byteorder)
        if ctypes.string_at(bits.ctypes.state_address, len(expected)) == expected:
            return True
    now = sys.modules["numpy"].random.get_state()
    return bool(now[0] == kind and (now[1] == words).all() and now[2:] == state[2:])


def _state_of(generator: Any) -> Any:
    if isinstance(generator, Iterator):
        return object()  # the state of an iterator cannot be read: treat it as always changed
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else _bits_of(generator).state


def _position_of(generator: Any) -> Any:
    """Returns what shows that values were taken from an iterator, as far as it does; `None` for other generators."""
    if isinstance(generator, types.GeneratorType):
        frame = generator.gi_frame
        return frame and [frame.f_lasti, *(id(value) for value in frame.f_locals.values())]
    is_builtin = isinstance(generator, Iterator) and type(generator).__module__ in ("builtins", "itertools")
    return (repr(generator), operator.length_hint(generator)) if is_builtin else None


def comparable_state(generator: Any) -> Any:
    """Returns the state of a random generator as a value that can be compared with `==`."""
    return _comparable(_state_of(generator))


def _comparable(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return [(name, _comparable(item)) for name, item in state.items()]
    if isinstance(state, tuple):
        return [*map(_comparable, state)]
    return state.tolist() if hasattr(state, "tolist") else state


def _put_generator_back(generator: Any, state: Any) -> None:
    if isinstance(generator, Iterator):
        return
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        _bits_of(generator).state = state


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "bit_generator", generator)


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in a value: in containers, and in the attributes of plain objects."""
    return [tensor for tensor, _, _ in Walk([value]).tensors]


# -- the state of a model ----------------------------------------------------------------------------------------------


class ChangeKind(enum.Enum):
    """What kind of thing a run has changed."""

    ATTRIBUTE = "attribute"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    SUBMODULE = "submodule"
    HOOK = "hook"
    MODE = "training flag"
    TENSOR = "tensor"
    GLOBAL = "global"
    RANDOM = "random numbers"


_KINDS = {
    "_parameters": ChangeKind.PARAMETER,
    "_buffers": ChangeKind.BUFFER,
    "_modules": ChangeKind.SUBMODULE,
    "training": ChangeKind.MODE,
}


@dataclass(frozen=True, eq=False)
class Change:
    """One thing that differs from a snapshot. Its text is for messages.

    Attributes:
        path: The path of the module that holds it, from the root of the snapshot.
        module_class: The name of the class of that module.
        name: The attribute, and the keys into it after dots; for random numbers, the owner of the generators.
        before: The old value; `ABSENT` if there was none.
        after: The new value; `ABSENT` if it was removed.
    """

    kind: ChangeKind
    path: str
    module_class: str
    name: str
    before: Any = ABSENT
    after: Any = ABSENT

    @property
    def is_inert(self) -> bool:
        """Whether it is an inert hook that is new or gone, or a note that there are some (transformers adds both)."""
        hooks = [hook for hook in (self.before, self.after) if hook is not ABSENT]
        return self.kind is ChangeKind.HOOK and all(
            hook is True or (callable(hook) and is_inert(hook)) for hook in hooks
        )

    def __str__(self) -> str:
        if self.kind is ChangeKind.RANDOM:
            return f"the model draws random numbers (of {self.name})"
        if self.kind is ChangeKind.GLOBAL:
            return f"it changes the global {self.name!r} while it runs"
        if self.before is not self.after:
            return f"{self.module_class} changes its {self.name!r} while it runs"
        thing = {ChangeKind.PARAMETER: "parameter ", ChangeKind.BUFFER: "buffer "}.get(self.kind, "")
        return f"{self.module_class} writes into its {thing}{self.name!r} while it runs"


_EVERYWHERE = (slice(None), slice(None), slice(None))
_NOWHERE = (slice(0), slice(0), slice(0))


class HeldValues:
    """What a model holds at one moment, and what its code reads from outside of it: see `Walk`.

    `start` are other values that are searched, before the model.
    """

    def __init__(self, root: Module, start: Iterable[Any] = ()) -> None:
        self._root = root
        self._walk = Walk([*start, root])
        self._outer: list[tuple[OuterValue, Any]] = []

    def _changed_holders(self, places: slice, empty: slice, *, has_hooks: bool = True) -> Iterator[Change]:
        """Yields what containers, objects and attributes of modules hold otherwise than then."""
        for container, saved, module, name in self._walk.places[places]:
            if not _holds_the_same(container, saved, is_module=not name):
                for key, before, after in _changed_items(container, saved):
                    yield self._change_of(module, f"{name}.{key}" if name else str(key), before, after)
        for owner, saved, module, name in self._walk.slotted:
            for key, before in saved.items():
                if not is_same(before, after := getattr(owner, key, ABSENT)):
                    yield self._change_of(module, f"{name}.{key}", before, after)
        filled = [*filter(None, self._walk.empty[empty])]
        if filled and (has_hooks or not _hook_registries(self._walk.modules()).keys() >= {*map(id, filled)}):
            yield from self._filled()

    def _filled(self) -> Iterator[Change]:
        """Yields what is in containers that were empty, which have no names of their own: a new walk finds them."""
        empty = {id(container) for container in self._walk.empty}
        walk = Walk([self._root])
        walk.add_outer_values()
        for container, saved, module, name in walk.places:
            if id(container) in empty:
                yield from (self._change_of(module, f"{name}.{key}", ABSENT, item) for key, item in _items(saved))

    def _change_of(self, module: Module | None, name: str, before: Any, after: Any) -> Change:
        registry, _, inner = name.partition(".")
        kind = _KINDS.get(registry, ChangeKind.HOOK if "_hooks" in registry else ChangeKind.ATTRIBUTE)
        if kind is ChangeKind.ATTRIBUTE and isinstance(before, Tensor) and before is after:
            kind = ChangeKind.TENSOR
        if module is None:
            kind, inner, name = ChangeKind.GLOBAL, "", name if before is after else name.rpartition(".")[0]
        path = next((path for path, one in registered_modules(self._root) if one is module), "")
        return Change(kind, path, type(module).__name__, inner if registry in REGISTRIES else name, before, after)

    def _outer_changes(self) -> Iterator[Change]:
        for outer, saved in self._outer:
            if not is_same(saved, value := outer.value()):
                yield Change(ChangeKind.GLOBAL, "", "", outer.name, saved, value)


class ModuleState(HeldValues):
    """All that a run may change in a model, at one moment: to see what has changed since, and to put it back.

    It covers all modules that can be reached: attributes, what containers and plain objects among them hold (the
    config, caches), parameters, buffers, hooks, training flags, and random generators; and the globals, closure
    variables and class attributes that their code reads. Buffers and other tensors are copied. Weights are not, except
    for those that the model writes into itself, nor are tensors of more than `LARGE` bytes: a write into these is seen,
    and stays. So is another value of a variable that the code does not assign to: others have assigned it.

    Args:
        root: The model, or a part of it.
        generators: Random generators that the model uses without holding them.
        is_look: Whether it is only for `change_in`, which needs no copies of tensors in eval mode: see `complete`.

    Attributes:
        is_training: Whether a module is in training mode.
    """

    def __init__(self, root: Module, generators: Iterable[Any] = (), *, is_look: bool = False) -> None:
        with without_torch_functions():
            super().__init__(root, filter(is_own_generator, generators))
            self._has_warned = False
            self._versions = [version_of(tensor) for tensor, _, _ in self._walk.tensors]
            self.is_training = any(module.training for module in self._walk.modules())
            # The kernel of a batch norm does not count what it writes.
            needs_copies = is_look and self.is_training
            self._others: list[_Other] = [_Array(*place) for place in self._walk.arrays]
            self._copies = _copies(self._walk) if needs_copies else [None] * len(self._versions)
        if not is_look:
            self.complete()

    def complete(self) -> ModuleState:
        """Makes this a full snapshot, if it is a partial one after which `change_in` found nothing; returns it."""
        with without_torch_functions():
            self._outer = self._walk.add_outer_values()
            self._generators = [_state_of(generator) for generator in self._walk.generators]
            self._positions = [*map(_position_of, self._walk.generators)]
            self._versions = [version_of(tensor) for tensor, _, _ in self._walk.tensors]
            self._copies = _copies(self._walk)
            self._others = [_Array(*place) for place in self._walk.arrays]
            written = set(WRITTEN)
            places = self._walk.tensors if written else []
            self._others += [_Leaf(*place) for place in places if id(place[0]) in written]
        self._random = SharedRandomState()
        return self

    def holds(self, value: Any) -> bool:
        """Whether the model holds this very object: a module, a tensor, a container, a plain object."""
        return id(value) in self._walk.seen

    # -- compare

    def change(self, *, besides: Iterable[str] = ()) -> Change | None:
        """Returns the first change since the snapshot; `None` if nothing changed, besides new hooks that are inert.

        Random generators are ignored if their owner is in `besides`: `"torch"`, `"Python"`, `"numpy"`, `"own"`.
        """
        found = (change for change in self._changes(_EVERYWHERE, has_contents=True) if not change.is_inert)
        changes = itertools.chain(self._random_changes(besides), found, self._outer_changes())
        with without_torch_functions():
            return next(changes, None)

    def change_in(self, module: Module | None) -> Change | None:
        """Returns the first change in one module, or anywhere: a fast check, for every frame of a run.

        To write into a tensor is a change, also if it holds the same afterwards. Hooks are none: contexts of this
        package, and transformers, add some in the middle of a run.
        """
        has_contents = module is not None and module.training
        changes = self._changes(self._span(module), has_versions=True, has_contents=has_contents, has_hooks=False)
        with without_torch_functions():
            return next((change for change in changes if change.kind is not ChangeKind.HOOK), None)

    def _span(self, module: Module | None) -> tuple[slice, slice, slice]:
        return _EVERYWHERE if module is None else self._walk.spans.get(id(module), _NOWHERE)

    def unrepeatable_change(self) -> Change | None:
        """Returns the first change that graphs do not repeat, or that `restore` did not undo.

        Graphs write into tensors as the module does, and draw the same random numbers from torch.
        """
        changes = self._changes(_EVERYWHERE)
        with without_torch_functions():
            return next(itertools.chain(changes, self._outer_changes(), self._random_changes({"torch", "own"})), None)

    def _changes(
        self,
        span: tuple[slice, slice, slice],
        *,
        has_versions: bool = False,
        has_contents: bool = False,
        has_hooks: bool = True,
    ) -> Iterator[Change]:
        places, empty, tensors = span
        yield from self._changed_holders(places, empty, has_hooks=has_hooks)
        for other in (other for other in self._others if other.is_changed()):
            yield self._change_of(other.module, other.name, other.value, other.value)
        held = zip(self._walk.tensors[tensors], self._versions[tensors], self._copies[tensors], strict=True)
        for (tensor, module, name), version, content in held:
            is_written = version_of(tensor) != version
            if (is_written and (has_versions or content is None)) or (
                has_contents and content is not None and not _is_equal(tensor, content)
            ):
                yield self._change_of(module, name, tensor, tensor)

    def _random_changes(self, besides: Iterable[str] = ()) -> Iterator[Change]:
        drawn = [owner for owner in self._random.changed() if owner not in besides]
        if "own" not in besides and any(
            _comparable(state) != comparable_state(generator)
            for generator, state in zip(self._walk.generators, self._generators, strict=True)
        ):
            drawn.append("a generator or iterator of its own")
        if drawn:
            yield Change(ChangeKind.RANDOM, "", type(self._root).__name__, " and ".join(drawn))

    def difference(self, other: ModuleState) -> str | None:
        """Returns how buffers, other tensors and torch's random numbers differ from those of another snapshot."""
        with without_torch_functions():
            what = f"the buffers of {type(self._root).__name__}"
            if (text := difference(self._contents(), other._contents(), what)) is not None:
                return text
        return None if self._random.is_same_for_torch(other._random) else "it ends in another random state"

    def _contents(self) -> dict[str, Tensor]:
        numbers = {module: "" if module == id(self._root) else f"{i}." for i, module in enumerate(self._walk.spans)}
        held = zip(self._walk.tensors, self._copies, strict=True)
        return {
            numbers.get(id(module), f"{number} ") + name.removeprefix("_buffers."): content
            for number, ((_, module, name), content) in enumerate(held)
            if content is not None
        }

    # -- restore

    def restore(self, *, counts_writes: bool = False) -> None:
        """Puts everything back that can be. Call it again where an interrupt came in between.

        If it `counts_writes`, autograd refuses to go backward through a run that used what is written over.
        """
        self._random.restore()
        with without_torch_functions():
            for generator, state in zip(self._walk.generators, self._generators, strict=True):
                _put_generator_back(generator, state)
            _put_containers_back(self._walk)
            for owner, saved, _, _ in self._walk.slotted:
                for key, value in saved.items():
                    if getattr(owner, key, ABSENT) is not value:
                        object.__setattr__(owner, key, value)
            for other in (other for other in self._others if other.is_changed()):
                other.restore()
            for outer, saved in self._outer:
                if outer.is_written and not is_same(saved, outer.value()):
                    outer.assign(saved)
            lost = list(map(str, self._tensors_not_put_back(counts_writes)))
        moved = zip(self._walk.generators, self._positions, strict=True)
        lost += [f"it takes values from a {type(it).__name__}" for it, was in moved if _position_of(it) != was]
        if lost and not self._has_warned:
            self._has_warned = True
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            message = (
                f"a run that should have left no trace in {type(self._root).__name__} left one that cannot be put "
                f"back: {lost[0]}{more}"
            )
            warn_each_time(message, StateWarning)

    def _tensors_not_put_back(self, counts_writes: bool) -> Iterator[Change]:
        """Puts tensors back; yields the changes of those that are not copied, which the next snapshot will copy."""
        held = zip(self._walk.tensors, self._versions, self._copies, strict=True)
        for (tensor, module, name), version, content in held:
            if content is not None:
                if not _is_equal(tensor, content):
                    _write(tensor, content, counts_writes)
            elif version_of(tensor) != version and (id(tensor) not in WRITTEN or _copy_of_state(tensor, True) is None):
                WRITTEN[id(tensor)] = tensor
                yield self._change_of(module, name, tensor, tensor)

    def separated(self, value: Any) -> Any:
        """Returns a value that does not change when this state is restored, or the model runs again.

        Usually this is the value itself; it is a copy if the value shares memory with a tensor of the model.
        """
        held = [*self._walk.tensors, *Walk([self._root]).tensors]
        kept = {memory_of(tensor) for tensor, _, _ in held if not isinstance(tensor, Parameter)} - {None}
        return copied_output(value) if any(memory_of(tensor) in kept for tensor in tensors_in(value)) else value


class Watch(HeldValues):
    """Finds what a model holds, or its code reads, otherwise than when this was made: fast, for each call of a model.

    Other parameters, buffers and modules, hooks and modes are changes; writes into tensors, and hooks that are inert,
    are not, nor are notes that `generate` of transformers (about its caches) and `torch.compile` leave on a module. It
    keeps all that the model held alive.
    """

    def __init__(self, root: Module) -> None:
        with without_torch_functions():
            super().__init__(root)
            self._outer = self._walk.add_outer_values()
        # Compilers and loaders mark parameters and buffers by attributes of these.
        of_tensors = ("_parameters.", "_buffers.")
        self._walk.places = [place for place in self._walk.places if not place[3].startswith(of_tensors)]
        self._modules = [*self._walk.modules()]
        self._forwards = [*map(_forward_of, self._modules)]
        self._notes: frozenset[str] | None = None
        self._earlier: Change | None = None  # before this was copied
        # Next to a small model, a look at each module takes long: so all are asked at once.
        holders = [holder for holder, _, _, _ in self._walk.places]
        self._views = [dict.values(holder) if isinstance(holder, dict) else holder for holder in holders]
        attributes = [(owner, key) for owner, saved, _, _ in self._walk.slotted for key in saved]
        attributes += [(kind, "forward") for kind in dict.fromkeys(map(type, self._modules))]
        self._reads: list[Callable[[], Any]] = [partial(getattr, owner, key, ABSENT) for owner, key in attributes]
        self._reads += [outer.reader() for outer, _ in self._outer]
        self._last = self._now()

    def change(self) -> Change | None:
        """Returns the first change; `None` if nothing changed."""
        if self._earlier is not None:
            return self._earlier
        now = self._now()
        if len(now) == len(self._last) and all(map(operator.is_, now, self._last)):
            return None
        with without_torch_functions():
            changes = itertools.chain(
                self._changed_holders(slice(None), slice(None)), self._changed_forwards(), self._outer_changes()
            )
            found = next((c for c in changes if not c.is_inert and not self._is_note(c)), None)
        if found is None:  # equal values, or forwards that this package swapped
            self._last = now
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        result = Watch(copy.deepcopy(self._root, memo))
        result._earlier = self.change()
        return result

    def _now(self) -> list[Any]:
        filled = filter(None, self._walk.empty)
        held = itertools.chain(itertools.chain.from_iterable(self._views), itertools.chain.from_iterable(filled))
        return [*held, *map(type, self._modules), *[read() for read in self._reads]]

    def _is_note(self, change: Change) -> bool:
        if self._notes is None:
            self._notes = COMPILER_NOTES | names_of_generate(self._modules)
        return change.kind is ChangeKind.ATTRIBUTE and change.name.partition(".")[0] in self._notes

    def _changed_forwards(self) -> Iterator[Change]:
        for module, before in zip(self._modules, self._forwards, strict=True):
            if (after := _forward_of(module)) != before:
                yield self._change_of(module, "forward", before, after)


def _forward_of(module: Module) -> tuple[type, Any]:
    forward = original_forward(module)
    return type(module), getattr(forward, "__func__", forward)


class Fingerprint:
    """Equal to another fingerprint of the same model if nothing changed in between that torch counts as a write.

    It takes little time and does not keep tensors alive: for caches of results about a model. It may be made of a
    snapshot that was made just now.
    """

    def __init__(self, model: Module | ModuleState) -> None:
        with without_torch_functions():
            walk = model._walk if isinstance(model, ModuleState) else Walk([model])
            self._versions = [version_of(tensor) for tensor, _, _ in walk.tensors]
        self._names: list[Any] = []
        held: list[Any] = []
        for container, saved, module, name in walk.places:
            if type(saved) is dict:
                self._names += saved
                held += saved.values()
            else:
                held += saved
            if not name:
                held += (module.__class__, *map(container.get, NOT_STATE))
        for _, saved, _, _ in walk.slotted:
            self._names += saved
            held += saved.values()
        self._ids = list(map(id, held))
        # A new object may get the id of a freed one. So small values are kept, and tensors have weak references.
        self._tensors = [weakref.ref(tensor) for tensor, _, _ in walk.tensors if id(tensor) in walk.seen]
        kinds = {kind for kind in set(map(type, held)) if not issubclass(kind, (Module, Tensor))}
        kept = PLAIN_VALUES.union(kind for kind in kinds if any("__call__" in base.__dict__ for base in kind.__mro__))
        self._kept = [value for value in held if type(value) in kept]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Fingerprint)
            and self._ids == other._ids
            and self._versions == other._versions
            and self._names == other._names
            and all(tensor() is not None for tensor in self._tensors)
        )

    __hash__ = None  # type: ignore[assignment]  # it is compared with the last one only


_MARKED = PLAIN_VALUES | CODE
_HOOKS = tuple(name for name in OF_EACH_MODULE if "_hooks" in name)


class Holdings:
    """What the code of modules may read besides its inputs: what modules, objects, containers and variables hold.

    To tell whether a record of the code still is one. It does not notice writes into tensors, other parameters and
    buffers, and new hooks, and keeps no tensor alive. Of modules in modules it notices whether they are the same ones.
    """

    def __init__(self, modules: Iterable[Module]) -> None:
        self._modules = list(modules)
        # By id: another container or object at its place is noticed where it is held.
        self._held: dict[Any, Any] = {}
        self._hooks: dict[tuple[int, str], set[Any]] = {}
        walk, inside = Walk([]), []
        for module in self._modules:
            held = module.__dict__ if "forward" not in module.__dict__ else state_attributes(module.__dict__)
            parts = dict(module._modules.items())
            own = [(name, held[name]) for name in held.keys() - OF_EACH_MODULE]
            for name in filter(held.get, _HOOKS):
                self._hooks[id(module), name] = {key for key, hook in list(held[name].items()) if not is_inert(hook)}
            inside += own
            forward = original_forward(module)
            values = [getattr(forward, "__func__", forward), module.training, *(v for _, v in own), *parts.values()]
            self._held[id(module)] = list(held), list(parts), Identities(values)
        walk.add(inside)
        outer_values = outer_values_of(self._modules, walk.functions)
        others = [(outer, value) for outer, value in outer_values if type(value) not in _MARKED]
        walk.add([(outer.name, value) for outer, value in others if outer.is_searched(type(value))])
        # Alive, so that their ids stay their own.
        self._code = [value for _, value in outer_values if type(value) in CODE]
        self._holders = [outer.holder for outer, _ in outer_values]
        for outer, value in outer_values:
            kind = type(value)
            mark = (kind, value if kind in PLAIN_VALUES else id(value)) if kind in _MARKED else Identities((value,))
            self._held[id(outer.holder), outer.key] = mark
        for container, items, _, _ in walk.places + walk.slotted:
            self._held[id(container)] = Identities((*items, *items.values()) if type(items) is dict else items)
        self._empty = {id(container) for container in walk.empty if container is not None}

    @classmethod
    def read_by(cls, *frames: Frame) -> Holdings:
        """Returns what the code of frames may read: what modules hold, those in them, and those that they call."""
        return cls.read_within([*frames, *(node.frame for frame in frames for node in frame.calls())])

    @classmethod
    def read_within(cls, frames: Iterable[Frame]) -> Holdings:
        """Returns the same for all frames of a run: those that they call are among them."""
        modules = dict.fromkeys(frame.module for frame in frames)
        inside = (part for module in [*modules] for part in module._modules.values() if part is not None)
        return cls(modules | dict.fromkeys(inside))

    def is_as_now(self) -> bool:
        """Whether all of it is still the same."""
        return Holdings(self._modules).is_in(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Holdings:
        result = Holdings(copy.deepcopy(self._modules, memo))
        if not self.is_as_now():
            result._held.clear()
        return result

    def is_in(self, earlier: Holdings) -> bool:
        """Whether all of it is as in `earlier`, which is of the same modules or of more."""
        hooks = {place: hooks for place, hooks in earlier._hooks.items() if place[0] in self._held}
        return (
            self._empty.isdisjoint(earlier._held)
            and all(before <= self._hooks.get(place, set()) for place, before in hooks.items())
            and all(earlier._held.get(key) == now for key, now in self._held.items())
        )


def _hook_registries(modules: Iterable[Module]) -> dict[int, tuple[Module, str]]:
    """Returns the module and the name of each registry of hooks, by its id."""
    return {
        id(module.__dict__[name]): (module, name) for module in modules for name in _HOOKS if name in module.__dict__
    }


def is_same(a: Any, b: Any) -> bool:
    """Whether an attribute is unchanged: the same object, or an equal plain value."""
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str, bytes)) and a == b)


# -- containers


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(raw_dict(container).items() if isinstance(container, dict) else enumerate(container))


def _holds_the_same(container: Any, saved: Any, *, is_module: bool) -> bool:
    """Whether a container holds the very objects that it held, in the same order."""
    if len(container) != len(saved) and not is_module:
        return False
    if type(saved) is not dict:
        return all(map(operator.is_, container, saved))
    now = container if type(container) is dict else raw_dict(container)
    now = state_attributes(now) if is_module and len(now) != len(saved) else now
    # Lists of keys are compared several times faster than the keys one by one.
    return len(now) == len(saved) and all(map(operator.is_, now.values(), saved.values())) and [*now] == [*saved]


def _changed_items(container: Any, saved: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the changed items of a container: key, old value, new value."""
    if isinstance(container, set):
        before, after = set(saved), container
        yield from ((item, item, ABSENT) for item in before - after)
        yield from ((item, ABSENT, item) for item in after - before)
        return
    was, now = dict(_items(saved)), dict(_items(container))
    for key in (*was, *(key for key in now if key not in was and key not in NOT_STATE)):
        before, after = was.get(key, ABSENT), now.get(key, ABSENT)
        if not is_same(before, after):
            yield key, before, after


def _are_shards(saved: Any, name: str) -> bool:
    """Whether these are parameters that FSDP manages: FSDP replaces shards by whole tensors, and records that."""
    return name == "_parameters" and any(map(is_distributed, saved.values()))


def _put_containers_back(walk: Walk) -> None:
    for container, saved, module, name in walk.places:
        if _holds_the_same(container, saved, is_module=not name) or _are_shards(saved, name):
            continue
        if name in _HOOKS and module is not None:
            _put_hooks_back(module, name, saved)
        else:
            _put_back(container, saved, is_module=not name)
    if filled := [*filter(None, walk.empty)]:
        registries = _hook_registries(walk.modules())
        for container in filled:
            if id(container) in registries:
                _put_hooks_back(*registries[id(container)], {})
            else:
                container.clear()


def _put_back(container: Any, saved: Any, *, is_module: bool) -> None:
    """Has a container hold what it held. Of a module's attributes only those are touched that differ."""
    if isinstance(container, (list, deque, set)):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(saved)
        return
    base: Any = OrderedDict if isinstance(container, OrderedDict) else dict  # subclasses may refuse some of these
    for key in [key for key in container if key not in saved and not (is_module and key in NOT_STATE)]:
        base.__delitem__(container, key)
    for key, value in saved.items():
        if container.get(key, ABSENT) is not value:
            base.__setitem__(container, key, value)
    if not is_module and list(container) != list(saved):
        base.clear(container)
        base.update(container, saved)


def _put_hooks_back(module: Module, name: str, saved: dict[Any, Any]) -> None:
    """Has a registry of hooks hold what it held, besides those of this package.

    Patch contexts of other threads add and remove these at any time: they stay as they are.
    """
    container = module.__dict__[name]
    kind = name.removesuffix("_with_kwargs").removesuffix("_always_called")
    if kind != name:  # which of the hooks in another registry, which is put back before, are called in which way
        hooks = module.__dict__[kind]
        for key in [key for key in list(container) if key not in hooks]:
            container.pop(key, None)
        container.update((key, value) for key, value in saved.items() if key in hooks)
        return
    wanted = {key: hook for key, hook in saved.items() if owner_of(hook) is not HookOwner.OWN}
    others = [key for key, hook in list(container.items()) if owner_of(hook) is not HookOwner.OWN]
    if others != [*wanted]:
        for key in others:
            container.pop(key, None)
    container.update(wanted)


# -- tensors


def _copies(walk: Walk) -> list[Tensor | None]:
    """Returns a copy of each tensor, to restore it; `None` for weights, and where a whole write is not possible."""
    written = set(WRITTEN)
    state = [
        not (name.startswith("_parameters.") or isinstance(tensor, Parameter)) or id(tensor) in written
        for tensor, _, name in walk.tensors
    ]
    pairs = list(zip(walk.tensors, state, strict=True))
    others = [tensor for (tensor, _, _), is_state in pairs if not is_state] if any(state) else []
    weights = {memory_of(tensor) for tensor in others} - {None}
    return [
        _copy_of_state(tensor, id(tensor) in written) if is_state and memory_of(tensor) not in weights else None
        for (tensor, _, _), is_state in pairs
    ]


class _Other(ABC):
    """Something else that a run may change: of which value, and where this is."""

    def __init__(self, value: Any, module: Module | None, name: str) -> None:
        self.value, self.module, self.name = value, module, name

    @abstractmethod
    def is_changed(self) -> bool:
        """Whether it has changed since."""

    @abstractmethod
    def restore(self) -> None:
        """Puts it back."""


class _Array(_Other):
    """The contents of an array that torch cannot share memory with."""

    def __init__(self, value: Any, content: Any, module: Module | None, name: str) -> None:
        super().__init__(value, module, name)
        self._content = content

    def is_changed(self) -> bool:
        if isinstance(self.value, bytearray):
            return bool(self.value != self._content)
        return bool(self.value.tobytes() != self._content.tobytes())

    def restore(self) -> None:
        self.value[... if hasattr(self.value, "shape") else slice(None)] = self._content


class _Leaf(_Other):
    """What autograd keeps of a tensor that the model writes into."""

    def __init__(self, value: Tensor, module: Module | None, name: str) -> None:
        super().__init__(value, module, name)
        self._requires_grad, self._gradient = value.requires_grad, value.grad if value.is_leaf else None
        self._content = None if self._gradient is None else self._gradient.detach().clone()

    def is_changed(self) -> bool:
        if not self.value.is_leaf:
            return False
        is_other = self.value.requires_grad is not self._requires_grad or self.value.grad is not self._gradient
        return is_other or (self._content is not None and not _is_equal(self.value.grad, self._content))

    def restore(self) -> None:
        self.value.requires_grad_(self._requires_grad)
        self.value.grad = self._gradient
        if self._content is not None:
            self.value.grad.data.copy_(self._content)


def _copy_of_state(tensor: Tensor, is_written: bool) -> Tensor | None:
    try:
        is_large = tensor.numel() * tensor.element_size() > LARGE and not is_written
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        has_own_elements = all(stride > 0 for size, stride in sizes if size > 1)
        return None if is_large or not has_own_elements else tensor.detach().clone()
    except Exception:  # lazy buffers, some layouts and subclasses have no strides, or no copies
        return None


def _is_equal(tensor: Tensor, content: Tensor) -> bool:
    return difference(tensor.detach(), content, "") is None


def _write(tensor: Tensor, content: Tensor, counts_writes: bool) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape == content.shape and tensor.dtype == content.dtype and tensor.device == content.device:
            # Through `data`: autograd may have saved this tensor for the backward of the run that counts.
            (tensor if counts_writes else tensor.data).copy_(content)
        else:
            tensor.data = content.clone()
