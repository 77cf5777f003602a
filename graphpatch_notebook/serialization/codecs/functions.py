"""The functions that graphs call, by name: operators of torch, a few of Python, and what the caller allows.

A name is looked up in tables of functions that are known to do nothing but compute. There is no way from a name to
`torch.load`, `eval` or the file system, whatever a file says.
"""

from __future__ import annotations

import builtins
import math
import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.graphs.targets import Container, NamedFunction
from graphpatch_notebook.serialization.codecs.classes import class_of, name_of_class
from graphpatch_notebook.serialization.codecs.names import Allowed, dotted, imported, is_name, name_of_object
from graphpatch_notebook.serialization.codecs.reading import Item
from graphpatch_notebook.serialization.codecs.value_reads import unchanged
from graphpatch_notebook.serialization.codecs.values import UnstorableError, decoded_key, encoded_key
from graphpatch_notebook.torch_compat import assert_that, native_namespaces, overload_path, set_grad_enabled
from graphpatch_notebook.values import take

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
# Functions that read files, hand out memory or call back, or change what lies outside of the graph.
_REFUSED = frozenset(
    "from_file apply_ map_ map2_ register_hook register_post_accumulate_grad_hook share_memory_ storage numpy backward "
    "untyped_storage typed_storage data_ptr const_data_ptr set_ module_load as_subclass to_dlpack from_dlpack "
    "frombuffer from_numpy "
    "_make_subclass _make_wrapper_subclass pin_memory save load _backward _print _set_data reinforce is_shared "
    "__array__ __array_wrap__ __reduce_ex__ __reduce__ __setstate__ __deepcopy__ __dlpack__ __dlpack_device__ __dir__ "
    "__cuda_array_interface__ __torch_dispatch__ __torch_function__ __hash__ __repr__ __format__ __init__ __new__ "
    "__del__ __getattr__ __getattribute__ __setattr__ __delattr__ __class__ __init_subclass__ __subclasshook__".split()
)
# Methods that torch leaves out of its list of operators, as no tensor goes into them but for its dtype.
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
    """Returns all functions that a file may call without leave, by name."""
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
    """Returns the JSON of a function that a graph calls.

    Raises:
        UnstorableError: No name leads to it.
    """
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
        raise UnstorableError(f"it calls {module}.{name}, which is none of the operators that files may call")
    return {"function": name_of_object(function)}


def check_method(name: str) -> str:
    """Returns the name of a method of tensors that graphs may call.

    Raises:
        UnstorableError: It is none.
    """
    if name not in _methods():
        raise UnstorableError(f"it calls the method {name[:60]!r}, which is none of the operators that files may call")
    return name


def check_attribute(function: Any, args: tuple[Any, ...]) -> None:
    """Refuses to read or write attributes that are more than a value: methods, private ones.

    Args:
        function: What the graph calls.
        args: With these arguments; the second is the name of the attribute.

    Raises:
        UnstorableError: It is such a call.
    """
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


def decoded_function(item: Item, allowed: Allowed) -> Function:
    """Returns the function of a JSON item; one that is not allowed is noted in `allowed`, and must not be called.

    Raises:
        SerializationError: It is none, or not to be found here.
    """
    if type(item.value) is str:
        function = functions().get(item.text())
        if function is None:
            raise item.error(f"{item.text()[:80]!r} is none of the functions that a file may call")
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


def _decoded_op(item: Item, allowed: Allowed) -> Function:
    path = item.text()
    if not _OPS_PATH.fullmatch(path) or "__" in path or any(map(_is_refused, path.split("."))):
        raise item.error(f"{path[:80]!r} is no operator that a file may call")
    space, name, *overload = path.split(".")
    if space not in _OPS and not allowed.require(f"{space}.{name}"):
        return not_allowed
    found: Any = getattr(getattr(torch.ops, space), name, None)
    if overload and found is not None:
        found = getattr(found, overload[0], None) if overload[0] in found.overloads() else None
    if found is None or overload_path(found) != path:
        raise item.error(f"the operator {path} is not registered here; import the library that defines it first")
    return found  # type: ignore[no-any-return]


def _decoded_other(item: Item, allowed: Allowed) -> Function:
    fields = item.fields(optional=("apply", "function"))
    if len(fields) != 1:
        raise item.error("there should be one function")
    ((kind, inside),) = fields.items()
    name = inside.text()
    if not is_name(name):
        raise inside.error(f"{name[:60]!r} is no name of a function")
    if not allowed.require(dotted(name)):
        return not_allowed
    found = imported(name, item.where)
    if kind == "apply":
        if not isinstance(found, type) or not issubclass(found, torch.autograd.Function):
            raise inside.error(f"{dotted(name)} is no autograd.Function")
        return NamedFunction(found.apply)
    if not callable(found):
        raise inside.error(f"{dotted(name)} is no function")
    return NamedFunction(found)


def not_allowed(*_args: Any, **_kwargs: Any) -> Any:
    """Stands for a function that is not allowed, until the whole file is refused for it."""
    raise AssertionError("a function that is not allowed is never called")
