"""Functions and classes by name: those of torch are known, others are looked up only if the caller allows it."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import importlib
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.errors import SerializationError
from graphpatch_notebook.graphs.build import Container, NamedFunction
from graphpatch_notebook.serialization.codecs.reading import JsonValue
from graphpatch_notebook.serialization.codecs.values import UnstorableError, decoded_key, encoded_key
from graphpatch_notebook.serialization.value_reads import unchanged
from graphpatch_notebook.torch_compat import assert_that, native_namespaces, overload_path, set_grad_enabled
from graphpatch_notebook.values import take


class Allowed:
    """The names that the caller of `load` allows, and those that are missing.

    Args:
        names: Dotted names: of a function or class, or of a package or module with everything in it; `None` for all.

    Example:
        >>> Allowed(["mylib"]).covers("mylib.ops.foo"), Allowed(["mylib.ops.foo"]).covers("mylib.ops.foobar")
        (True, False)
    """

    def __init__(self, names: Iterable[str] | None = ()) -> None:
        if isinstance(names, str):
            raise TypeError(f"allow takes a list of names: allow=[{names!r}]")
        self._names = None if names is None else {str(name).replace("::", ".") for name in names}
        self.missing: dict[str, None] = {}

    def covers(self, name: str) -> bool:
        """Whether `name`, or a module that it is in, is allowed."""
        names = self._names
        return names is None or any(name == allowed or name.startswith(f"{allowed}.") for allowed in names)

    def require(self, name: str) -> bool:
        """Whether `name` is allowed; notes it for `check` if not."""
        if self.covers(name):
            return True
        self.missing[name] = None
        return False

    def check(self, file: str) -> None:
        """Refuses the file if it has asked for anything that is not allowed."""
        if self.missing:
            names = sorted(self.missing)
            raise SerializationError(
                f"{file}: its graphs use {', '.join(names)}, which {'is' if len(names) == 1 else 'are'} not part of "
                f"torch: loading imports and runs that code; if you trust it, allow it: load(file, allow={names!r})"
            )


def name_of_object(value: Any) -> str:
    """Returns the name `module:qualified.name` under which `value` can be imported."""
    module, name = str(getattr(value, "__module__", "") or ""), str(getattr(value, "__qualname__", "") or "")
    if not module or not _are_plain([*module.split("."), *name.split(".")]):
        raise UnstorableError(f"it uses {name or repr(value)[:60]}, which cannot be imported by a name")
    if _found(module, name) != value:
        raise UnstorableError(f"it uses {module}.{name}, but that name now means something else")
    return f"{module}:{name}"


def is_name(text: str) -> bool:
    """Whether `text` has the form of a result of `name_of_object`."""
    module, _, name = text.partition(":")
    return _are_plain([*module.split("."), *name.split(".")])


def dotted(text: str) -> str:
    """Returns a name in the form that users write and `allow` takes."""
    return text.replace(":", ".")


def imported(text: str, where: str) -> Any:
    """Imports the object that `text` (of `name_of_object`) names; only for names that are allowed."""
    module, _, name = text.partition(":")
    try:
        if module not in sys.modules:
            importlib.import_module(module)
    except ImportError as error:
        raise SerializationError(f"{where}: {dotted(text)} cannot be imported here: {error}") from error
    found = _found(module, name)
    if found is None:
        raise SerializationError(f"{where}: there is no {name} in {module} here; has it changed since it was saved?")
    return found


def _found(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _are_plain(parts: list[str]) -> bool:
    return all(part.isidentifier() and (not part.startswith("__") or part == "__main__") for part in parts)


# -- classes -----------------------------------------------------------------------------------------------------------

# Where transformers defines the outputs of its models; what is in these files runs when it is imported, as for any
# transformers model that is used at all.
_TRANSFORMERS = re.compile(r"transformers\.(modeling_outputs|models\.[a-z0-9_]+\.modeling_[a-z0-9_]+):\w+")
_KINDS = {"tuple": tuple, "list": list, "mapping": collections.UserDict, "object": object}


@cache
def _known() -> dict[str, type]:
    found: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict, "torch.Size": torch.Size}
    found["collections.OrderedDict"] = collections.OrderedDict
    found["torch.nn.utils.rnn.PackedSequence"] = torch.nn.utils.rnn.PackedSequence
    values: dict[str, Any] = vars(torch.return_types)
    for name, value in values.items():
        if isinstance(value, type) and issubclass(value, tuple) and not name.startswith("_"):
            found[f"torch.return_types.{name}"] = value
    return found


@cache
def _names_of_known() -> dict[type, str]:
    return {cls: name for name, cls in _known().items()}


def name_of_class(cls: type) -> str:
    """Returns the name of a class of containers that a graph makes."""
    name = _names_of_known().get(cls)
    if name is None and not _is_container(cls):
        raise UnstorableError(f"it makes a {cls.__name__}, which is not a kind of container that can be written")
    return name or name_of_object(cls)


def class_of(item: JsonValue, allowed: Allowed) -> type | None:
    """Returns the class of containers of that name; `None` where it is not allowed, which `allowed` notes."""
    name = item.text()
    if name in _known():
        return _known()[name]
    if not is_name(name):
        raise item.error(f"{name[:60]!r} is not the name of a class")
    is_transformers = _TRANSFORMERS.fullmatch(name) is not None and not allowed.covers(dotted(name))
    if not is_transformers and not allowed.require(dotted(name)):
        return None
    found = imported(name, item.where)
    if not isinstance(found, type) or not _is_container(found) or (is_transformers and not _is_output(found)):
        raise item.error(f"{dotted(name)} is not a class of containers")
    return found


def _is_container(cls: type) -> bool:
    return issubclass(cls, (tuple, list, Mapping)) or dataclasses.is_dataclass(cls)


def _is_output(cls: type) -> bool:
    return any(base.__name__ == "ModelOutput" and base.__module__.startswith("transformers.") for base in cls.__mro__)


# -- classes of recorded values, which are never instantiated ---------------------------------------------------------


def described_class(cls: type) -> list[str]:
    """Returns the description of the class of a recorded container: its name, and the kind of container."""
    if cls in _names_of_known():
        return [_names_of_known()[cls]]
    bases: list[tuple[str, Any]] = [("tuple", tuple), ("list", list), ("mapping", Mapping)]
    kind = next((name for name, base in bases if issubclass(cls, base)), "object")
    return [class_text(cls), kind]


def class_text(cls: type) -> str:
    """Returns the full name of any class."""
    return _names_of_known().get(cls) or f"{cls.__module__}:{cls.__qualname__}"


def class_described(item: JsonValue) -> type:
    """Returns the class of a recorded container: the class itself if it is well known, else a placeholder class."""
    parts = item.items()
    if not 1 <= len(parts) <= 2:
        raise item.error("there should be a name and a kind")
    name = parts[0].text()
    if len(parts) == 1:
        if name not in _known():
            raise parts[0].error(f"{name[:60]!r} is not a known class of containers")
        return _known()[name]
    return _stand_in(name, parts[1].one_of(tuple(_KINDS)))


@cache
def _stand_in(name: str, kind: str) -> type:
    module, _, qualified = name.rpartition(":")
    namespace: dict[str, Any] = {"__module__": module, "__qualname__": qualified}
    return type(qualified.rsplit(".", 1)[-1], (_KINDS[kind],), namespace)


# -- functions ---------------------------------------------------------------------------------------------------------


Function: TypeAlias = Callable[..., Any]

_NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.Tensor": Tensor,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
    "torch.functional": torch.functional,
}
_OPERATORS = (
    "abs add and_ concat contains eq floordiv ge getitem gt iadd iand ifloordiv ilshift imatmul imod imul index invert "
    "ior ipow irshift is_ is_not isub itruediv ixor le lshift lt matmul mod mul ne neg not_ or_ pos pow rshift setitem "
    "sub truediv truth xor"
).split()
_BUILTINS = "abs bool float getattr int len list max min range round setattr slice sum tuple".split()
_MATH = "ceil cos exp floor gcd isqrt log log2 prod sin sqrt tan tanh trunc".split()
# Functions that read files, give access to memory, call back, or change state outside of the graph.
_REFUSED = frozenset(
    "from_file apply_ map_ map2_ register_hook register_post_accumulate_grad_hook share_memory_ storage numpy backward "
    "untyped_storage typed_storage data_ptr const_data_ptr set_ module_load as_subclass to_dlpack from_dlpack "
    "frombuffer from_numpy "
    "_make_subclass _make_wrapper_subclass pin_memory save load _backward _print _set_data reinforce is_shared "
    "__array__ __array_wrap__ __reduce_ex__ __reduce__ __setstate__ __deepcopy__ __dlpack__ __dlpack_device__ __dir__ "
    "__cuda_array_interface__ __torch_dispatch__ __torch_function__ __hash__ __repr__ __format__ __init__ __new__ "
    "__del__ __getattr__ __getattribute__ __setattr__ __delattr__ __class__ __init_subclass__ __subclasshook__".split()
)
# Methods that are not in torch's list of operators, as they only read the dtype and device of a tensor.
_FACTORY_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()
# Operators that trust the indices and addresses that they are given.
_UNCHECKED = ("unsafe_index", "unsafe_masked", "reinterpret_tensor", "from_blob", "_test_")
_OPS = ("aten", "prims")
_OPS_PATH = re.compile(r"[a-z]\w*(\.\w+){1,2}")
_WRITABLE = frozenset({"data", "grad", "imag", "real", "requires_grad"})


def _is_refused(name: str) -> bool:
    return name in _REFUSED or any(part in name for part in _UNCHECKED)


@cache
def functions() -> dict[str, Function]:
    """Returns all functions that a file may call without being allowed, by name."""
    found: dict[str, Function] = {}
    overridable = {id(f) for group in torch.overrides.get_overridable_functions().values() for f in group}
    for space, holder in _NAMESPACES.items():
        for name in dir(holder):
            function = getattr(holder, name, None)
            if id(function) in overridable and callable(function):
                found[f"{space}.{name}"] = function
    for space, holder in native_namespaces().items():
        for name in dir(holder):
            if not name.startswith("__"):
                found.setdefault(f"{space}.{name}", getattr(holder, name))
    found = {name: f for name, f in found.items() if not _is_refused(name.rsplit(".", 1)[1])}
    found |= {f"torch.Tensor.{name}": getattr(Tensor, name) for name in _FACTORY_METHODS}
    found |= {f"operator.{name}": getattr(operator, name) for name in _OPERATORS}
    found |= {f"math.{name}": getattr(math, name) for name in _MATH}
    found |= {f"builtins.{name}": getattr(builtins, name) for name in _BUILTINS}
    found |= {
        "torch.set_grad_enabled": set_grad_enabled,
        "graphpatch.take": take,
        "graphpatch.unchanged": unchanged,
        "torch._assert": assert_that,
        "torch.Size": torch.Size,
    }
    return found


@cache
def _names() -> dict[Function, str]:
    names: dict[Function, str] = {}
    for name, function in functions().items():
        names.setdefault(function, name)
    return names


@cache
def _methods() -> frozenset[str]:
    prefix = "torch.Tensor."
    return frozenset(name.removeprefix(prefix) for name in functions() if name.startswith(prefix))


@cache
def _readable() -> frozenset[str]:
    """The attributes of tensors that are values, not methods."""
    names = (name for name in dir(Tensor) if not name.startswith("_"))
    return frozenset(name for name in names if not callable(getattr(Tensor, name, None))) - {"grad_fn"}


# -- writing -----------------------------------------------------------------------------------------------------------


def encoded_function(function: Any) -> Any:
    """Returns the JSON of a function that a graph calls."""
    if isinstance(function, NamedFunction):
        function = function.function
    if isinstance(function, Container):
        return {"make": name_of_class(function.type), "keys": [encoded_key(key) for key in function.keys]}
    if (path := overload_path(function)) is not None:
        return {"op": path}
    try:
        name = _names().get(function)
    except TypeError:  # cannot be hashed
        name = None
    return name if name is not None else _encoded_other(function)


def _encoded_other(function: Any) -> Any:
    owner = getattr(function, "__self__", None)
    if getattr(function, "__name__", None) == "apply" and isinstance(owner, type):
        return {"apply": name_of_object(owner)}
    module = str(getattr(function, "__module__", "") or "")
    if module.split(".", maxsplit=1)[0] in ("torch", "builtins", "os", "sys", "subprocess", "_operator", ""):
        name = getattr(function, "__qualname__", None) or repr(function)[:60]
        raise UnstorableError(f"it calls {module}.{name}, which is not one of the operators that files may call")
    return {"function": name_of_object(function)}


def check_method(name: str) -> str:
    """Returns the name of a method of tensors that graphs may call."""
    if name not in _methods():
        raise UnstorableError(f"it calls the method {name[:60]!r}, which files may not call")
    return name


def check_attribute(function: Any, args: tuple[Any, ...]) -> None:
    """Checks that a call with these arguments does not read or write attributes that are more than values."""
    if function not in (getattr, setattr, take):
        return
    name = args[1] if len(args) > 1 else None
    if function is take and type(name) is int:
        return
    if type(name) is not str or not _may_access(name, is_write=function is setattr):
        raise UnstorableError(f"it {'sets' if function is setattr else 'reads'} the attribute {name!r}")
    if len(args) != (3 if function is setattr else 2):
        raise UnstorableError(f"it reads the attribute {name!r} with {len(args)} arguments")


def _may_access(name: str, is_write: bool) -> bool:
    if is_write:
        return name in _WRITABLE
    return name in _readable() or (name.isidentifier() and not name.startswith("_") and not hasattr(Tensor, name))


# -- reading -----------------------------------------------------------------------------------------------------------


def decoded_function(item: JsonValue, allowed: Allowed) -> Function:
    """Returns the function of a JSON item; a forbidden function is noted in `allowed`, and must not be called."""
    if type(item.value) is str:
        function = functions().get(item.text())
        if function is None:
            raise item.error(f"{item.text()[:80]!r} is not one of the functions that a file may call")
        return function
    kind = next(iter(item.entries()), "")
    if kind in ("make", "keys"):
        fields = item.fields("make", "keys")
        cls = class_of(fields["make"], allowed)
        keys = tuple(decoded_key(key) for key in fields["keys"].items())
        return Container(cls, keys) if cls is not None else not_allowed
    if kind == "op":
        return _decoded_op(item.fields("op")["op"], allowed)
    return _decoded_other(item, allowed)


def _decoded_op(item: JsonValue, allowed: Allowed) -> Function:
    path = item.text()
    if not _OPS_PATH.fullmatch(path) or "__" in path or any(map(_is_refused, path.split("."))):
        raise item.error(f"{path[:80]!r} is not an operator that a file may call")
    space, name, *overload = path.split(".")
    if space not in _OPS and not allowed.require(f"{space}.{name}"):
        return not_allowed
    found: Any = getattr(getattr(torch.ops, space), name, None)
    if overload and found is not None:
        found = getattr(found, overload[0], None) if overload[0] in found.overloads() else None
    if found is None or overload_path(found) != path:
        raise item.error(f"the operator {path} is not registered here; import the library that defines it first")
    return found  # type: ignore[no-any-return]


def _decoded_other(item: JsonValue, allowed: Allowed) -> Function:
    fields = item.fields(optional=("apply", "function"))
    if len(fields) != 1:
        raise item.error("there should be one function")
    ((kind, inside),) = fields.items()
    name = inside.text()
    if not is_name(name):
        raise inside.error(f"{name[:60]!r} is not the name of a function")
    if not allowed.require(dotted(name)):
        return not_allowed
    found = imported(name, item.where)
    if kind == "apply":
        if not isinstance(found, type) or not issubclass(found, torch.autograd.Function):
            raise inside.error(f"{dotted(name)} is not an autograd.Function")
        return NamedFunction(found.apply)
    if not callable(found):
        raise inside.error(f"{dotted(name)} is not a function")
    return NamedFunction(found)


def not_allowed(*_args: Any, **_kwargs: Any) -> Any:
    """Placeholder for a function that is not allowed, until the whole file is refused."""
    raise AssertionError("a function that is not allowed is never called")
