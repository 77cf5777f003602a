"""What modules hold, where it is, what their code reads from outside of them, and which tensor is which.

`Walk` finds what is in the attributes of modules, in containers and in plain objects, and in the globals, closures and
classes of their code (`outer_values_of`); `find_source` finds where a tensor that no op made is held; `alias`,
`memory_of` and `still_used` distinguish tensors that share memory.
"""

from __future__ import annotations

import copy
import dis
import enum
import functools
import operator
import random
import sys
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from graphpatch_notebook.capture.observers import original_forward
from graphpatch_notebook.capture.records import Kind
from graphpatch_notebook.torch_compat import is_fully_sharded, without_torch_functions
from graphpatch_notebook.values import ABSENT, PLAIN_TENSORS, readable_children

MANY = 1000
"""Larger containers are data: their items are not searched."""

LARGE = 64 * 2**20
"""Tensors and arrays of more bytes are copied only if the model is known to write into them."""

WRITTEN: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""Tensors that a model is known to write into, by id; weights too, as `torch.nn.Embedding(max_norm=...)` does."""

NOT_STATE = ("forward", "_call_impl", "_old_forward", "_hf_hook")
"""This package swaps forwards and calls; the hook of accelerate records what it loaded."""


class _Contents:  # of plain numbers: Python 3.11 reads members of an enum five times slower
    """How values of one class are searched."""

    NOTHING, MODULE, TENSOR, ARRAY, GENERATOR, CONTAINER, FIXED, PARTIAL, CALLABLE, OBJECT = range(10)


PLAIN_VALUES: frozenset[type] = frozenset({bool, int, float, str, type(None)})
DICTS = frozenset({dict, OrderedDict})
_WITHOUT_ATTRIBUTES = frozenset({dict, list, tuple, set, frozenset, deque, OrderedDict})
_MOST_EMPTY = DICTS | {set, list}
REGISTRIES = ("_parameters", "_buffers", "_modules")
OF_EACH_MODULE = frozenset(Module().__dict__)
"""The registries, those of hooks among them, and the mode."""

_DEEPEST = 6
# Models do not write into these: the whole program shares them, or other libraries keep their records in them.
_CLOSED = (type, types.ModuleType, enum.Enum, bytes, weakref.ProxyType)
_CLOSED_PACKAGES = ("torch.fx", "torch.distributed", "bitsandbytes", "logging", "threading", "asyncio", "concurrent")
_contents_by_class: dict[type, int] = dict.fromkeys(
    [*PLAIN_VALUES, bytes, torch.dtype, torch.device, torch.Size], _Contents.NOTHING
)


def _contents(kind: type) -> int:
    """Returns how values of a class are searched."""
    if kind not in _contents_by_class:
        if issubclass(kind, Tensor):
            contents = _Contents.TENSOR
        elif issubclass(kind, Module):
            contents = _Contents.MODULE
        elif _is_generator(kind):
            contents = _Contents.GENERATOR
        elif issubclass(kind, (list, dict, set, deque)):
            contents = _Contents.CONTAINER
        elif issubclass(kind, (tuple, frozenset)):
            contents = _Contents.FIXED
        elif issubclass(kind, (bytearray, array)) or (
            "numpy" in sys.modules and issubclass(kind, sys.modules["numpy"].ndarray)
        ):
            contents = _Contents.ARRAY
        elif issubclass(kind, functools.partial):
            contents = _Contents.PARTIAL
        elif issubclass(kind, _CLOSED) or str(kind.__module__).startswith(_CLOSED_PACKAGES):
            contents = _Contents.NOTHING
        elif any("__call__" in base.__dict__ for base in kind.__mro__):
            is_written_in_python = type(getattr(kind, "__call__")) is types.FunctionType  # noqa: B004, B009
            is_of_torch = str(kind.__module__).partition(".")[0] == "torch"
            contents = _Contents.CALLABLE if is_written_in_python and not is_of_torch else _Contents.NOTHING
        else:
            contents = _Contents.OBJECT
        _contents_by_class[kind] = contents
    return _contents_by_class[kind]


Holder: TypeAlias = "tuple[Any, Any, Module | None, str]"
"""Something that holds values, a copy of it that holds the same, the module in which it is, and its name there."""


class Walk:
    """Finds what modules, or other values, hold: searches attributes, containers and plain objects.

    Attributes:
        places: All containers that can be written into, attributes of modules and objects among them, but empty ones.
        empty: Those that are empty.
        slotted: Objects with slots, and what these hold.
        arrays: Arrays that torch cannot share memory with, those of Python among them, and copies of them.
        tensors: The tensors, each with its module and name.
        generators: The random generators, but for those that all code shares.
        functions: The functions and methods in attributes and containers.
        spans: For each module, by id, which of the places, the empty containers and the tensors are its own.
        seen: The ids of all that was found.
    """

    def __init__(self, start: Iterable[Any]) -> None:
        self.places: list[Holder] = []
        self.empty: list[Any] = []
        self.slotted: list[Holder] = []
        self.arrays: list[Holder] = []
        self.tensors: list[tuple[Tensor, Module | None, str]] = []
        self.generators: list[Any] = []
        self.functions: list[Any] = []
        self.spans: dict[int, tuple[slice, slice, slice]] = {}
        self.seen: set[int] = set()
        self._modules: list[Module | None] = []
        self._gathered: set[int] = set()
        self._most = MANY
        for value in start:
            self._look("", value, None, 0)
        while self._modules:
            module = self._modules.pop()
            if module is not None and id(module) not in self.seen:
                self.seen.add(id(module))
                self._look_at(module)

    def modules(self) -> Iterator[Module]:
        """Yields the modules that were found."""
        return (module for _, _, module, name in self.places if not name and module is not None)

    def add_outer_values(self) -> list[tuple[OuterValue, Any]]:
        """Searches what the code of the modules reads from outside of them, too; returns these variables and values."""
        outer_values = outer_values_of(self.modules(), self.functions)
        self.add([(outer.name, value) for outer, value in outer_values if outer.is_searched(type(value))])
        return outer_values

    def add(self, named: Iterable[tuple[str, Any]]) -> None:
        """Searches values that no module holds, each with its name; not the modules among them."""
        self._most = len(self.places) + MANY
        for name, value in named:
            self._look(name, value, None, 0)
        self._modules.clear()

    def _look_at(self, module: Module) -> None:
        begin = len(self.places), len(self.empty), len(self.tensors)
        held = state_attributes(module.__dict__)
        self.places.append((module.__dict__, held, module, ""))
        self._most = len(self.places) + MANY
        if is_fully_sharded(module):
            self._gathered.update(map(id, module.modules()))
        skipped: tuple[str, ...] = ("_parameters",) if id(module) in self._gathered else ()
        add_empty = self.empty.append
        if is_offloaded(module):
            skipped = ("_parameters", "_buffers")
        for name, value in held.items():
            kind = type(value)
            if kind in _MOST_EMPTY and not value:  # most are registries of hooks, without any
                add_empty(value)
            elif name == "_modules" and kind is dict:
                self.places.append((value, value.copy(), module, name))
                self._modules += value.values()
            elif kind not in PLAIN_VALUES and name not in skipped:
                self._look(name, value, module, 0)
        if "_c" in held and isinstance(module, torch.jit.ScriptModule):  # not in its `__dict__`
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                registry = "_parameters" if isinstance(tensor, Parameter) else "_buffers"
                self._look(f"{registry}.{name}", tensor, module, 0)
        end = len(self.places), len(self.empty), len(self.tensors)
        places, empty, tensors = map(slice, begin, end)
        self.spans[id(module)] = (places, empty, tensors)

    def _look(self, name: str, value: Any, module: Module | None, depth: int) -> None:
        contents = _contents_by_class.get(type(value))
        contents = _contents(type(value)) if contents is None else contents
        if contents is _Contents.NOTHING or id(value) in self.seen or depth > _DEEPEST:
            if type(value) in FUNCTIONS and "_hooks" not in name:
                self.functions.append(value)
            return
        if contents is _Contents.MODULE:
            self._modules.append(value)
            return
        if contents is _Contents.CALLABLE and (module is None or "_hooks" in name):  # it may watch the model
            return
        self.seen.add(id(value))
        if contents is _Contents.TENSOR:
            self.tensors.append((value, module, name))
            if attributes := _attributes_of(value):
                self._look_into(name, attributes, module, depth)
        elif contents is _Contents.GENERATOR:
            if is_own_generator(value):
                self.generators.append(value)
        elif contents is _Contents.ARRAY:
            self._look_at_array(name, value, module)
        else:
            self._look_inside(contents, name, value, module, depth)

    def _look_inside(self, contents: int, name: str, value: Any, module: Module | None, depth: int) -> None:
        if contents in (_Contents.CONTAINER, _Contents.FIXED):
            self._look_into(name, value, module, depth)
        elif contents is _Contents.PARTIAL:
            self._look_into(name, (value.func, value.args, value.keywords), module, depth)
        elif slots := slots_of(value):
            self.slotted.append((value, slots, module, name))
            self._look_at_items(name, slots.items(), module, depth)
        if type(value) not in _WITHOUT_ATTRIBUTES:
            self._look_into(name, _attributes_of(value), module, depth)

    def _look_at_array(self, name: str, value: Any, module: Module | None) -> None:
        if not hasattr(value, "flags") or value.flags.writeable:
            try:
                self.tensors.append((torch.from_numpy(value), module, name))
            except (TypeError, ValueError):  # of Python, of objects or dates, of negative strides
                if getattr(value, "nbytes", 0) <= LARGE:
                    self.arrays.append((value, copy.copy(value), module, name))

    def _look_into(self, name: str, container: Any, module: Module | None, depth: int) -> None:
        if not container:
            if container is not None and not isinstance(container, (tuple, frozenset)):
                self.empty.append(container)
            return
        items: Any = raw_dict(container) if isinstance(container, dict) else list(container)
        if not isinstance(container, (tuple, frozenset)):
            self.places.append((container, items, module, name))
        if name not in REGISTRIES and (len(items) > MANY or len(self.places) > self._most):
            return
        self._look_at_items(name, items.items() if isinstance(items, dict) else enumerate(items), module, depth)

    def _look_at_items(self, name: str, items: Iterable[tuple[Any, Any]], module: Module | None, depth: int) -> None:
        for key, item in items:
            if type(item) not in PLAIN_VALUES:
                self._look(f"{name}.{key}", item, module, depth + 1)


def state_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    held = attributes.copy()  # at once: another thread may be at work
    if "forward" in held or "_hf_hook" in held:
        for name in NOT_STATE:
            held.pop(name, None)
    return held


def raw_dict(container: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a copy of what a dict holds, whatever its class makes of it: some make modules of classes."""
    return dict((OrderedDict if isinstance(container, OrderedDict) else dict).items(container))


def _attributes_of(value: Any) -> Any:
    try:
        found = value.__dict__
    except Exception:  # it has none, or is a proxy of something that is gone
        return None
    return found if type(found) is dict else None


def slots_of(value: Any) -> dict[str, Any]:
    """Returns the values in the slots of an object whose class is written in Python."""
    kind: Any = type(value)
    return {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> list[str]:
    scopes = [base.__dict__ for base in kind.__mro__ if "__slots__" in base.__dict__]
    # As attributes, private ones have the name of the class, too.
    return [name for scope in scopes for name, part in scope.items() if type(part) is types.MemberDescriptorType]


def is_offloaded(module: Module) -> bool:
    """Whether the weights of a module come and go: accelerate puts them in place while its forward runs."""
    return "_hf_hook" in module.__dict__


def is_own_generator(value: Any) -> bool:
    """Whether a value is a random generator or an iterator, and not one of the global generators."""
    return _contents(type(value)) is _Contents.GENERATOR and not any(value is shared for shared in _shared_generators())


def _shared_generators() -> list[Any]:
    numpys = [sys.modules["numpy"].random.mtrand._rand] if "numpy" in sys.modules else []
    return [random._inst, torch.default_generator, *torch.cuda.default_generators, *numpys]


def _is_generator(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    return issubclass(kind, (Iterator, torch.Generator, random.Random, *kinds)) and not issubclass(
        kind, random.SystemRandom
    )


# -- what code reads from outside of it --------------------------------------------------------------------------------

FUNCTIONS = frozenset({types.FunctionType, types.MethodType})
CODE = frozenset({*FUNCTIONS, types.BuiltinFunctionType, types.ModuleType, type, property, staticmethod, classmethod})
"""The classes of most outer values, which hold no data."""


class OuterValue(NamedTuple):
    """A variable that code reads from outside of it, an attribute of a class, or what a function holds.

    Attributes:
        holder: The globals, the cell of a closure, the class, or the function.
        is_written: Whether the code assigns to it.
        home: The name of the Python module of the code.
    """

    name: str
    holder: Any
    key: str = ""
    is_written: bool = False
    home: str = ""

    def is_searched(self, kind: type) -> bool:
        """Whether models may write into values of a class: not into objects of other files, which others share."""
        contents = _contents(kind)
        is_closed = contents in (_Contents.NOTHING, _Contents.CALLABLE)
        return not is_closed and (contents is not _Contents.OBJECT or kind.__module__ == self.home)

    def value(self) -> Any:
        """Returns its current value; `ABSENT` if it has none."""
        holder, key = self.holder, self.key
        if type(holder) is dict:
            return holder.get(key, ABSENT)
        if type(holder) is types.CellType:
            return _content(holder)
        return getattr(holder, key) if type(holder) is types.FunctionType else vars(holder).get(key, ABSENT)

    def reader(self) -> Callable[[], Any]:
        """Returns a function that does the same as `value`, faster: for values that each call of a model asks for."""
        holder: Any = self.holder
        if type(holder) is types.CellType:
            return functools.partial(_content, holder)
        if type(holder) is types.FunctionType:
            return functools.partial(getattr, holder, self.key)
        return functools.partial((holder if type(holder) is dict else vars(holder)).get, self.key, ABSENT)

    def assign(self, value: Any) -> None:
        """Gives the variable a value; `ABSENT` removes it."""
        if type(self.holder) is types.CellType:
            if value is ABSENT:
                del self.holder.cell_contents
            else:
                self.holder.cell_contents = value
        elif type(self.holder) is dict:
            if value is ABSENT:
                self.holder.pop(self.key, None)
            else:
                self.holder[self.key] = value
        elif value is ABSENT:
            delattr(self.holder, self.key)
        else:
            setattr(self.holder, self.key, value)


def outer_objects(module: Module) -> list[Any]:
    """Returns the data in globals and closure variables that the module's own functions use."""
    held = [value for value in module.__dict__.values() if type(value) in FUNCTIONS]
    return [value for _, value in outer_values_of([module], held) if type(value) not in CODE]


_reached: dict[Any, tuple[list[OuterValue], Identities]] = {}


def outer_values_of(modules: Iterable[Module], held: Iterable[Any]) -> list[tuple[OuterValue, Any]]:
    """Returns the globals, closure variables and attributes of classes that the code of modules names, and the values.

    What its functions hold (attributes, and defaults) is among them. `held` are the functions that the modules hold.
    """
    forwards: list[tuple[Any, type]] = []
    kinds: set[type] = set()
    for module in modules:
        if (kind := type(module)) not in kinds or "forward" in module.__dict__:
            kinds.add(kind)
            forwards.append((original_forward(module), kind))
    start = (*((getattr(f, "__func__", f), kind) for f, kind in forwards), *((function, Module) for function in held))
    known, identities = _reached.get(start, ([], None))
    values = [outer.value() for outer in known]
    if identities is None or identities != Identities(values):
        # All that decides on what is found is among it, so the same values lead to the same variables.
        known = _found_from(start)
        values = [outer.value() for outer in known]
        owners = ((kind, kind if getattr(kind, "forward", None) is function else function) for function, kind in start)
        if all(map(_lives_on, chain.from_iterable(owners))):
            while len(_reached) >= _MOST_REACHED:
                _reached.pop(next(iter(_reached)), None)
            _reached[start] = known, Identities(values)
    return list(zip(known, values, strict=True))


_MOST_REACHED = 100


def _lives_on(value: Any) -> bool:
    """Whether a file holds a class or a function. To keep another one may keep a model alive, by its closure."""
    found: Any = sys.modules.get(getattr(value, "__module__", ""))
    for name in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is value


def _found_from(start: Iterable[tuple[Any, type]]) -> list[OuterValue]:
    functions: dict[types.FunctionType, None] = {}
    for function, kind in start:
        _follow([function], kind, functions)
    named = {name for function in functions for name in names_in(function.__code__)}
    written = {name for function in functions for name in names_of(function.__code__).written}
    homes = {function.__module__ for function in functions}
    variables: dict[tuple[int, str], OuterValue] = {}
    for function in functions:
        for key in ("__dict__", "__defaults__", *(["__kwdefaults__"] if function.__kwdefaults__ else [])):
            name = f"{function.__name__} ({'attributes' if key == '__dict__' else 'defaults'})"
            variables[id(function), key] = OuterValue(name, function, key)
        for outer in variables_of(function):
            place = id(outer.holder), outer.key
            if outer.is_written or place not in variables:
                variables[place] = outer
    bases = dict.fromkeys(base for _, kind in start for base in kind.__mro__ if issubclass(base, Module))
    values = [outer.value() for outer in variables.values() if outer.home]
    bases |= dict.fromkeys(value for value in values if isinstance(value, type) and value.__module__ in homes)
    return [outer for outer in variables.values() if "__" not in outer.name] + [
        OuterValue(f"{base.__name__}.{name}", base, name, name in written, base.__module__)
        for base in bases
        if base is not Module
        for name, value in vars(base).items()
        if "__" not in name and (name in named or type(value) not in CODE)
    ]


def variables_of(function: types.FunctionType) -> Iterator[OuterValue]:
    """Yields the globals and the closure variables that a function may read, or one that is defined inside it."""
    code, variables, home = function.__code__, function.__globals__, function.__module__
    names = names_of(code)
    for name in names.variables:
        if name in variables or name in names.written:
            yield OuterValue(name, variables, name, name in names.written, home)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield OuterValue(name, cell, "", name in names.written, home)


def plain_values_read(module: Module) -> dict[str, Any]:
    """Returns the plain values that the code of a module names: of its attributes and variables, and inside of these.

    For functions, it has their names.

    Example:
        >>> plain_values_read(torch.nn.ReLU())
        {'forward': 'ReLU.forward', 'inplace': False, 'forward (defaults)': None}
    """
    walk, functions = Walk([]), dict[types.FunctionType, None]()
    attributes = [(name, value) for name, value in module.__dict__.items() if "_hooks" not in name]
    walk.add([(name, value) for name, value in attributes if name not in (*REGISTRIES, *NOT_STATE)])
    _follow([original_forward(module), *walk.functions], type(module), functions)
    outer_values = outer_values_of([module], walk.functions)
    walk.add([(outer.name, value) for outer, value in outer_values if outer.is_searched(type(value))])
    named = {text for function in functions for text in (*names_in(function.__code__), *function.__code__.co_consts)}
    named -= {"training"}
    found: dict[str, Any] = {"forward": original_forward(module)}
    found |= {name: value for name, value in attributes if name in named}
    found |= {outer.name: value for outer, value in outer_values}
    for _, items, _, name in walk.places + walk.slotted:
        inside = items.items() if type(items) is dict else enumerate(items)
        found |= {f"{name}.{key}": value for key, value in inside if type(items) is not dict or key in named}
    for name, child in module._modules.items():
        if name in named and child is not None:
            found |= {f"{name}.{key}": value for key, value in child.__dict__.items() if key in named}
    tuples = [(name, value) for name, value in found.items() if isinstance(value, tuple)]
    found |= {f"{name}.{number}": item for name, value in tuples for number, item in enumerate(value)}
    found |= {name: _name_of(value) for name, value in found.items() if type(value) in (*FUNCTIONS, type(len))}
    return {name: value for name, value in found.items() if type(value) in PLAIN_VALUES}


def _name_of(function: Any) -> str:
    made_of: Any = getattr(function, "__func__", function)  # of a method of an object, say
    return str(getattr(function, "__qualname__", type(made_of).__qualname__))


def names_of_generate(modules: Iterable[Module]) -> frozenset[str]:
    """Returns the names that the code of methods `generate` uses, and no `forward`: of notes about caches, for one."""
    generating, running = dict[types.FunctionType, None](), dict[types.FunctionType, None]()
    kinds: list[Any] = [*dict.fromkeys(map(type, modules))]
    for kind in kinds:
        _follow([getattr(kind, "generate", None)], kind, generating)
        _follow([kind.forward], kind, running)
    named = {name for function in generating for name in names_in(function.__code__)}
    return frozenset(named - {name for function in running for name in names_in(function.__code__)})


class Identities:
    """Which objects some values are; equal to others if all are the same objects, or plain values of the same type.

    It keeps no tensor alive, and does not look into containers other than tuples.
    """

    __slots__ = ("_kinds", "_plain", "_same")

    def __init__(self, values: Iterable[Any]) -> None:
        values = list(values)
        self._plain = [value for value in values if type(value) in PLAIN_VALUES]
        self._kinds: list[Any] = [*map(type, values)]
        self._same: list[Any] = []
        for value in [value for value in values if type(value) not in _LOOKED_INTO]:
            if issubclass(type(value), (tuple, frozenset)) and len(value) <= MANY:  # of a proxy, `isinstance` may raise
                inside = Identities(value)
                self._plain += inside._plain
                self._kinds += [*inside._kinds, len(value)]
                self._same += inside._same
                continue
            try:
                self._same.append(weakref.ref(value))  # the same one each time
            except TypeError:
                if not issubclass(type(value), (list, dict, set, deque)) and not slots_of(value):
                    self._same.append(value)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Identities)
            and self._kinds == other._kinds
            and self._plain == other._plain
            and len(self._same) == len(other._same)
            and all(map(operator.is_, self._same, other._same))
        )

    __hash__ = None  # type: ignore[assignment]  # it is only compared


_LOOKED_INTO = frozenset({*PLAIN_VALUES, *DICTS, list, set, deque})


class CodeNames(NamedTuple):
    """The names in a code object: of globals, and of globals, closure variables and attributes that are assigned."""

    variables: tuple[str, ...]
    written: frozenset[str]


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> CodeNames:
    """Returns the names of outer variables in a code object, and in the functions defined inside it."""
    variables: dict[str, None] = {}
    written: set[str] = set()
    for instruction in dis.get_instructions(code):
        action, _, where = instruction.opname.partition("_")
        if where in ("GLOBAL", "NAME", "FROM_DICT_OR_GLOBALS"):
            variables[instruction.argval] = None
        if action in ("STORE", "DELETE") and where in ("GLOBAL", "DEREF", "ATTR"):
            written.add(instruction.argval)
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            variables |= dict.fromkeys(names_of(part).variables)
            written |= names_of(part).written
    return CodeNames(tuple(variables), frozenset(written))


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals and attributes in a code object, and in the functions defined inside it."""
    inner = (name for part in code.co_consts if isinstance(part, types.CodeType) for name in names_in(part))
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def _follow(waiting: list[Any], kind: type, found: dict[types.FunctionType, None]) -> None:
    while waiting:
        function, owner = waiting.pop(), kind
        if isinstance(function, types.MethodType):
            function, owner = function.__func__, type(getattr(function, "__self__"))  # noqa: B009
        if isinstance(function, types.FunctionType) and function not in found:
            found[function] = None
            waiting.append(getattr(function, "__wrapped__", None))
            waiting += [_content(cell) for cell in function.__closure__ or ()]
            waiting += _helpers(function, owner)


def _helpers(function: types.FunctionType, kind: type) -> Iterator[types.FunctionType]:
    """Yields the functions of the same file that a function names: globals, and methods of a class."""
    variables = function.__globals__
    for name in names_in(function.__code__):
        value = variables[name] if name in variables else getattr(kind, name, None)
        value = value.fget if type(value) is property else value
        if type(value) is types.FunctionType and value.__module__ == function.__module__:
            yield value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return ABSENT


# -- modules, and the tensors in them ----------------------------------------------------------------------------------


class TensorSource(NamedTuple):
    """A tensor that a module holds: its kind, and its attribute path from the frame's module."""

    kind: Kind
    attribute_path: str


def find_source(module: Module, tensor: Tensor) -> TensorSource | None:
    """Returns where `module`, or a module inside it, holds this tensor object."""
    own = _held_by(module, tensor)
    if own is not None:
        return own
    for path, submodule in registered_modules(module):
        if submodule is not module and (found := _held_by(submodule, tensor)) is not None:
            return TensorSource(found.kind, f"{path}.{found.attribute_path}")
    return None


def _held_by(module: Module, tensor: Tensor) -> TensorSource | None:
    for name, parameter in module._parameters.items():
        if parameter is tensor:
            return TensorSource("parameter", name)
    for name, buffer in module._buffers.items():
        if buffer is tensor:
            return TensorSource("buffer", name)
    for name, value in module.__dict__.items():
        if value is tensor:
            return TensorSource("attribute", name)
    return None


def held_tensors(module: Module) -> Iterator[tuple[TensorSource, Tensor]]:
    """Yields all tensors that `module` itself holds, and can be run with others: parameters, buffers, attributes."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield TensorSource("parameter", name), parameter
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield TensorSource("buffer", name), buffer
    for name, value in module.__dict__.items():
        if isinstance(value, Tensor):
            yield TensorSource("attribute", name), value


def reachable_modules(root: Module) -> list[Module]:
    """Returns all modules that can be reached from `root`: registered ones, and those in plain lists and dicts."""
    found: dict[int, Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) in found:
            continue
        found[id(module)] = module
        waiting.extend(child for child in module._modules.values() if child is not None)
        waiting.extend(child for _, child in unregistered_modules(module))
    return list(found.values())


def registered_modules(module: Module) -> Iterator[tuple[str, Module]]:
    """Yields `module` and all modules in it, each with its shortest attribute path: that is what code writes."""
    waiting = deque([("", module)])
    seen: set[int] = set()
    while waiting:
        path, current = waiting.popleft()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield path, current
        waiting.extend((f"{path}.{n}" if path else n, m) for n, m in current._modules.items() if m is not None)


def all_modules(module: Module) -> list[Module]:
    """Returns `module` and all modules in it, each once: faster than `module.modules()`, which makes their names."""
    found = [module]
    seen = {id(module)}
    for current in found:
        for inside in current._modules.values() if current._modules else ():
            if inside is not None and id(inside) not in seen:
                seen.add(id(inside))
                found.append(inside)
    return found


def module_at(module: Module, path: str) -> Module | None:
    """Returns the submodule at an attribute path; `None` where there is none."""
    found: Module | None = module
    for name in path.split(".") if path else ():
        found = found._modules.get(name) if found is not None else None
    return found


def unregistered_modules(module: Module) -> Iterator[tuple[str, Module]]:
    """Yields the modules that `module` holds in plain attributes, and lists, tuples and dicts of these."""
    for name, value in module.__dict__.items():
        if name in OF_EACH_MODULE or type(value) in PLAIN_VALUES:
            continue
        if isinstance(value, Module):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Module))
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items() if isinstance(item, Module))


def mutable_containers(module: Module) -> Iterator[tuple[str, Any]]:
    """Yields what `module` itself holds values in, each with its name: its `__dict__` (""), and the containers in it.

    These are dicts, lists, sets, deques and the attributes of plain objects (a cache, the config), also inside of each
    other. Large ones are data: they are not searched.
    """
    waiting: list[tuple[str, Any]] = [("", module.__dict__)]
    seen: set[int] = set()
    for name, container in waiting:
        if id(container) in seen:
            continue
        seen.add(id(container))
        if not isinstance(container, tuple):
            yield name, container
        if name != "_modules" and (len(container) <= MANY or name in REGISTRIES):
            prefix = f"{name}." if name else ""
            for key, item in list(container.items() if isinstance(container, dict) else enumerate(container)):
                if type(item) not in PLAIN_VALUES and (inside := _inside(item)) is not None:
                    waiting.append((f"{prefix}{key}", inside))


def _inside(value: Any) -> Any:
    """Returns the container in which a value holds others; `None` for modules, tensors, functions and the like."""
    if isinstance(value, (dict, list, set, deque, tuple)):
        return value
    is_plain = not (callable(value) or isinstance(value, (Tensor, enum.Enum)))
    if not is_plain or type(value).__module__.partition(".")[0] in _SHARED_BY_PROGRAM:
        return None
    try:
        attributes = value.__dict__
    except Exception:  # it has none, or is a proxy of something that is gone
        return None
    return attributes if type(attributes) is dict else None


_SHARED_BY_PROGRAM = ("torch", "logging", "threading", "asyncio", "concurrent", "builtins", "bitsandbytes")
"""Packages whose objects belong to the whole program, or keep records of their own."""


class AttributePaths:
    """Attribute paths between modules, for naming calls."""

    def __init__(self, root: Module) -> None:
        self._root = root
        self._registered: dict[int, dict[int, str]] = {}
        self._unregistered: dict[int, dict[int, str]] = {}

    def path(self, module: Module, child: Module) -> str:
        """Returns how `module`'s code would write `child`; from the root if `child` is elsewhere."""
        if child is not module:
            for name, held in module._modules.items():  # most calls are of these
                if held is child:
                    return name
            if path := self._inside(module, child):
                return path
        from_root = self._inside(self._root, child)
        if child is module:  # recursion: it is known by its own name
            from_root = from_root.rsplit(".", 1)[-1]
        return from_root or type(child).__name__.lower()

    def _inside(self, module: Module, child: Module) -> str:
        """Returns the path of `child` in `module`, through plain attributes if it is not registered; "" if outside."""
        known = self._registered.get(id(module))
        if known is None:
            known = self._registered[id(module)] = {id(inner): path for path, inner in registered_modules(module)}
        if id(child) in known:
            return known[id(child)]
        others = self._unregistered.get(id(module))
        if others is None:
            others = self._unregistered[id(module)] = {}
            for prefix, holder in registered_modules(module):
                for name, inner in unregistered_modules(holder):
                    others.setdefault(id(inner), f"{prefix}.{name}" if prefix else name)
        return others.get(id(child), "")


def tensor_flags(values: list[Any]) -> tuple[tuple[bool, bool], ...]:
    """Returns for each tensor in some values whether it requires gradients, and whether it is contiguous."""
    tensors = plain_tensors(values)
    with without_torch_functions():  # a tensor's own class may refuse to answer
        return tuple((t.requires_grad, t.layout is torch.strided and t.is_contiguous()) for t in tensors)


def looking_at(*values: Any) -> AbstractContextManager[None]:
    """Returns a context for looks at the tensors in `values` that function modes do not see.

    A class of tensors with functions of its own still answers itself.
    """
    are_plain = all(type(tensor) in PLAIN_TENSORS for tensor in plain_tensors(values))
    return without_torch_functions() if are_plain else nullcontext()


def plain_tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in a value, also in containers. Fast, since it runs for each call of torch."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for child in value if type(value) in (tuple, list) else [child for _, child in readable_children(value) or ()]:
        if isinstance(child, Tensor):
            found.append(child)
        elif type(child) not in PLAIN_VALUES:
            found += plain_tensors(child)
    return found


# -- which tensor is which ---------------------------------------------------------------------------------------------


T = TypeVar("T")


def alias(tensor: Tensor) -> Tensor:
    """Returns another tensor object over the same memory, or the same one where torch cannot make one."""
    if type(tensor) is not Tensor:  # a parameter must stay one: code may put it back into its module
        return tensor
    try:
        return tensor.view_as(tensor)
    except RuntimeError:
        return tensor


def memory_of(value: Any) -> int | None:
    """Returns the address of the memory of a tensor; `None` if it does not have memory."""
    if not isinstance(value, Tensor):
        return None
    try:
        return value.untyped_storage().data_ptr() or None
    except Exception:  # sparse, not initialised yet, some subclasses
        return None


def weak(value: Any) -> Callable[[], Any]:
    """Returns a function that returns `value`: by a weak reference, if its type allows one."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def still_used(values: list[T], holders: int = 1) -> list[T]:
    """Returns the values of a list that something other than the `holders` references of the caller refers to."""
    counts = [sys.getrefcount(value) for value in values]
    own = next(sys.getrefcount(value) for value in [object()]) + holders - 1
    return [value for value, count in zip(values, counts, strict=True) if count > own]
