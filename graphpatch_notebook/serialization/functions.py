"""Functions and classes by name: those of torch are known, others are imported only if the caller allows it."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import importlib
import math
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.graphs.build import Container, NamedFunction
from graphpatch_notebook.serialization.plain_values import UnstorableError, decoded_key, encoded_key
from graphpatch_notebook.serialization.schema import FunctionPart
from graphpatch_notebook.torch_compat import assert_that, native_namespaces, overload_path, set_grad_enabled
from graphpatch_notebook.values import take

Function: TypeAlias = Callable[..., Any]

REPAIR = (
    "make the PatchableGraph with such inputs and save it again, or give the model, which runs such calls where no "
    "patch or edit would be lost: PatchableGraph.load(file, model=model)"
)


def unchanged(value: Any, expected: Any, line: str) -> None:
    """Raises an error if what the model's code read into Python at `line` is not what it was in the example.

    Of the parts of a tensor, their number counts.
    """
    if isinstance(value, (tuple, list)) and isinstance(expected, int):
        value = len(value)
    if type(value) is not type(expected) or (value != expected and repr(value) != repr(expected)):
        raise GraphError(
            f"the loaded graph does not hold for this call: the code of the model reads a size or a value at {line}, "
            f"which is {value!r} now and was {expected!r} in the example, so it might do something else now; {REPAIR}"
        )


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
        self._missing: set[str] = set()

    def covers(self, name: str) -> bool:
        """Whether `name`, or a module that it is in, is allowed."""
        names = self._names
        return names is None or any(name == allowed or name.startswith(f"{allowed}.") for allowed in names)

    def imported(self, name: str) -> Any:
        """Imports what `module:name` names; `None` if it is not allowed, for which `check` refuses the file."""
        if not self.covers(name.replace(":", ".")):
            self._missing.add(name.replace(":", "."))
            return None
        return _imported(name)

    def operator(self, path: str) -> Any:
        """Returns an operator of `torch.ops`; `None` if it is not allowed."""
        if not _OPS_PATH.fullmatch(path) or "__" in path or any(map(_is_refused, path.split("."))):
            raise GraphError(f"{path[:80]!r} is not an operator that a file may call")
        space, name, *overload = path.split(".")
        if space not in _OPS and not self.covers(f"{space}.{name}"):
            self._missing.add(f"{space}.{name}")
            return None
        found: Any = getattr(getattr(torch.ops, space), name, None)
        if overload and found is not None:
            found = getattr(found, overload[0]) if overload[0] in found.overloads() else None
        if found is None or overload_path(found) != path:
            raise GraphError(f"the operator {path} is not registered here; import the library that defines it first")
        return found

    def check(self, file: str) -> None:
        """Refuses the file if it has asked for anything that is not allowed."""
        if self._missing:
            raise GraphError(
                f"{file}: its graphs use {', '.join(sorted(self._missing))}, which loading would import and run, as it "
                f"is not part of torch; if you trust it, allow it: load(file, allow={sorted(self._missing)!r})"
            )


def _imported(name: str) -> Any:
    module, _, qualified = name.partition(":")
    if not _are_plain([*module.split("."), *qualified.split(".")]):
        raise GraphError(f"{name[:60]!r} is not the name of a function or class")
    try:
        found: Any = importlib.import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise GraphError(f"{name.replace(':', '.')} cannot be imported here: {error}") from error
    return found


def name_of_object(value: Any) -> str:
    """Returns the name `module:qualified.name` under which `value` can be imported."""
    module, name = str(getattr(value, "__module__", "") or ""), str(getattr(value, "__qualname__", "") or "")
    try:
        if _imported(f"{module}:{name}") == value:
            return f"{module}:{name}"
    except GraphError:
        pass
    raise UnstorableError(f"it uses {name or repr(value)[:60]}, which cannot be imported by a name")


def _are_plain(parts: list[str]) -> bool:
    return all(part.isidentifier() and (not part.startswith("__") or part == "__main__") for part in parts)


# -- classes -----------------------------------------------------------------------------------------------------------

# Where transformers defines the outputs of its models; what is in these files runs when it is imported, as for any
# transformers model that is used at all.
_TRANSFORMERS = re.compile(r"transformers\.(modeling_outputs|models\.[a-z0-9_]+\.modeling_[a-z0-9_]+):\w+")


@cache
def known_classes() -> dict[str, type]:
    """Returns the classes of containers that files may name, by name."""
    found: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict, "torch.Size": torch.Size}
    found["collections.OrderedDict"] = collections.OrderedDict
    found["torch.nn.utils.rnn.PackedSequence"] = torch.nn.utils.rnn.PackedSequence
    for name, value in vars(torch.return_types).items():
        if isinstance(value, type) and issubclass(value, tuple) and not name.startswith("_"):
            found[f"torch.return_types.{name}"] = value
    return found


@cache
def class_name(cls: type) -> str:
    """Returns the name of any class."""
    return next((n for n, known in known_classes().items() if known is cls), f"{cls.__module__}:{cls.__qualname__}")


def _class_of(name: str, allowed: Allowed) -> type | None:
    """Returns the class of containers of that name; `None` if it is not allowed."""
    if name in known_classes():
        return known_classes()[name]
    is_transformers = _TRANSFORMERS.fullmatch(name) is not None and not allowed.covers(name.replace(":", "."))
    found = _imported(name) if is_transformers else allowed.imported(name)
    if found is None:
        return None
    if not isinstance(found, type) or not _is_container(found) or (is_transformers and not _is_output(found)):
        raise GraphError(f"{name.replace(':', '.')} is not a class of containers")
    return found


def _is_container(cls: type) -> bool:
    return issubclass(cls, (tuple, list, Mapping)) or dataclasses.is_dataclass(cls)


def _is_output(cls: type) -> bool:
    return any(base.__name__ == "ModelOutput" and base.__module__.startswith("transformers.") for base in cls.__mro__)


# -- functions ---------------------------------------------------------------------------------------------------------

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
        "torch.is_grad_enabled": torch.is_grad_enabled,
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


def encoded_function(function: Any) -> FunctionPart:
    """Returns the entry of a function that a graph calls."""
    if isinstance(function, NamedFunction):
        function = function.function
    if isinstance(function, Container):
        if not _is_container(function.type):
            raise UnstorableError(f"it makes a {function.type.__name__}, which is not a kind of container for files")
        is_known = function.type in known_classes().values()
        name = class_name(function.type) if is_known else name_of_object(function.type)
        return FunctionPart("container", name, [encoded_key(key) for key in function.keys])
    if (path := overload_path(function)) is not None:
        return FunctionPart("operator", path)
    if isinstance(function, Hashable) and function in _names():
        return FunctionPart("known", _names()[function])
    owner = getattr(function, "__self__", None)
    if getattr(function, "__name__", None) == "apply" and isinstance(owner, type):
        return FunctionPart("autograd", name_of_object(owner))
    module = str(getattr(function, "__module__", "") or "").split(".", maxsplit=1)[0]
    if module in ("torch", "builtins", "os", "sys", "subprocess", "_operator", ""):
        name = getattr(function, "__qualname__", None) or repr(function)[:60]
        raise UnstorableError(f"it calls {module}.{name}, which is not one of the operators that files may call")
    return FunctionPart("imported", name_of_object(function))


def decoded_function(part: FunctionPart, allowed: Allowed) -> Function:
    """Returns a function; one that is not allowed is noted in `allowed`, and must not be called."""
    found: Any = None
    if part.kind == "known":
        found = functions().get(part.name)
        if found is None:
            raise GraphError(f"{part.name[:80]!r} is not one of the functions that a file may call")
    elif part.kind == "container":
        cls = _class_of(part.name, allowed)
        found = None if cls is None else Container(cls, tuple(map(decoded_key, part.keys)))
    elif part.kind == "operator":
        found = allowed.operator(part.name)
    elif (value := allowed.imported(part.name)) is not None:
        if part.kind == "autograd" and not (isinstance(value, type) and issubclass(value, torch.autograd.Function)):
            raise GraphError(f"{part.name.replace(':', '.')} is not an autograd.Function")
        found = NamedFunction(value.apply if part.kind == "autograd" else value)
    return _not_allowed if found is None else found


def _not_allowed(*_args: Any, **_kwargs: Any) -> Any:
    """Placeholder for a function that is not allowed, until the whole file is refused."""
    raise AssertionError("a function that is not allowed is never called")


# -- methods and attributes --------------------------------------------------------------------------------------------


def check_method(name: str) -> None:
    """Raises an `UnstorableError` if graphs in files may not call this method of tensors."""
    if name not in _methods():
        raise UnstorableError(f"it calls the method {name[:60]!r}, which files may not call")


def check_attribute(function: Any, args: tuple[Any, ...]) -> None:
    """Raises an `UnstorableError` if such a call reads or writes attributes of tensors that are more than values."""
    if function not in (getattr, setattr, take):
        return
    name = args[1] if len(args) > 1 else None
    if function is take and type(name) is int:
        return
    is_write = function is setattr
    if type(name) is not str or not _may_access(name, is_write) or len(args) != (3 if is_write else 2):
        raise UnstorableError(f"it {'sets' if is_write else 'reads'} the attribute {name!r}")


def _may_access(name: str, is_write: bool) -> bool:
    if is_write:
        return name in _WRITABLE
    return name in _readable() or (name.isidentifier() and not name.startswith("_") and not hasattr(Tensor, name))
