"""The documents in files, each part defined once, what they may hold, and the safetensors files that hold them.

`msgspec` writes the parts as JSON, and checks all types when it reads them. Numbers refer to the lists of the document:
modules, tensors, frames, lines of code, records of a frame, and the steps of a graph before. Values of arguments (`Any`
here), functions and classes are written like this:

1, 0.5, "a", None, [..]     ->  the same
(1, 2)                      ->  {"tuple": [1, 2]}        any other value: an object with one field, its kind
TensorSpec(...)             ->  {"tensor_spec": [..]}    likewise what describes a value, or a parameter of `forward`
the value of the step 3     ->  {"step": 3}
torch.relu, operator.add    ->  their name in `functions`, which files may call without being allowed
an operator of a library    ->  "torch.ops:mylib.op.default"
other functions and classes ->  "module:name", imported if the caller of `load` allows it
"""

from __future__ import annotations

import builtins
import collections
import importlib
import inspect
import keyword
import math
import operator
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from graphpatch_notebook._version import __version__
from graphpatch_notebook.capture.records import InputParameter, Kind
from graphpatch_notebook.errors import SerializationError, whole_file
from graphpatch_notebook.graphs.build import Container, NamedFunction
from graphpatch_notebook.graphs.edits import unchanged
from graphpatch_notebook.inspection.meanings import Meanings
from graphpatch_notebook.torch_compat import assert_that, native_namespaces, overload_path, set_grad_enabled
from graphpatch_notebook.values import (
    SEQUENCES,
    ContainerSpec,
    ObjectSpec,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    dict_key,
    dtype_name,
    fields_of,
    key_text,
    plain_dict_key,
    take,
)

SCHEMA = 5
"""The version of documents. Increased whenever an older reader would misread a newer document, or the reverse."""

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class DocumentPart(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a document."""


class TensorPart(DocumentPart):
    """A tensor: a view of one of the stored arrays, which several tensors may share."""

    storage: str
    dtype: str
    shape: list[Number]
    stride: list[Number]
    offset: Number = 0
    device: str = "cpu"
    is_parameter: bool = False
    requires_grad: bool = False


class FunctionPart(DocumentPart):
    """A function by name (see `values`); with `keys`, what makes a container of this class with children there."""

    name: str
    keys: list[Any] | None = None


class StepPart(DocumentPart):
    """A node of an `fx.Graph`: `target` is its path, method or parameter, `record` the number of its record."""

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: str
    target: str | FunctionPart = ""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    record: Number | None = None


class RecordPart(DocumentPart):
    """The record of a value. A call has the number of its frame, its index, and the number of calls of that module."""

    kind: Kind
    name: str
    op: str
    spec: dict[str, Any]
    target: str | None = None
    lines: list[Number] = []
    flags: list[Literal["is_size", "is_hidden", "is_mutated_later", "is_view_filled_later"]] = []
    written_argument: Number | str | None = None
    call: tuple[Number, int, int] | None = None


class FramePart(DocumentPart):
    """A call of a module, with its graph, or the reason why none is stored; `is_own`: the graph *is* the module.

    `grad_mode` is that of the root, if the graphs hold for no other.
    """

    module: Number
    attribute_path: str
    training: bool
    parameters: list[dict[str, Any]]
    records: list[RecordPart]
    graph: list[StepPart] = []
    unstored: str | None = None
    is_own: bool = False
    same_inputs: Any = None
    grad_mode: bool | None = None


class ModulePart(DocumentPart):
    """A module, without its code: `path` is where the model has it.

    `names` are attributes that graphs read: tensors and modules, by number.
    """

    cls: str
    path: str | None
    training: bool
    parameters: dict[str, Number | None]
    buffers: dict[str, Number | None]
    not_persistent: list[str] = []
    children: dict[str, Number | None] = {}
    names: dict[str, tuple[Literal["tensor", "module"], Number]] = {}


class Document(msgspec.Struct, kw_only=True):
    """What each document has."""

    schema: int = SCHEMA
    written_by: str = __version__


class DimensionsPart(DocumentPart):
    """What is known about the sizes of values: see `StoredRuns`."""

    groups: list[list[tuple[Number, Number]]] = []
    runs: list[tuple[Number | None, Number]] = []
    shapes: list[list[list[Number] | None]] = []
    tensors: list[Number] = []


class GraphDocument(Document, forbid_unknown_fields=True, kw_only=True):
    """The document of `pg.save`. `sizes` are those of the inputs, `None` for those that the graph does not fix."""

    default_dtype: str
    sizes: list[list[Number | None]]
    frames: list[FramePart]
    modules: list[ModulePart]
    tensors: list[TensorPart]
    lines: list[tuple[str, int, str, str]]
    dimensions: DimensionsPart = msgspec.field(default_factory=DimensionsPart)


class PatchPart(DocumentPart):
    """A patch: its kind, and its fields as plain values."""

    path: str
    kind: str
    fields: dict[str, Any]


class PatchDocument(Document, forbid_unknown_fields=True, kw_only=True):
    """The document of `save_patches`, with what the names of a graph mean, if that was given."""

    patches: list[PatchPart]
    tensors: list[TensorPart]
    meanings: Meanings = msgspec.field(default_factory=dict)


# -- files -------------------------------------------------------------------------------------------------------------

_T = TypeVar("_T", bound=Document)


def checked_file(file: Any, method: str) -> Path | IO[bytes]:
    """Returns a path, or an open binary file with this method, as it is.

    Raises:
        TypeError: It is neither the name of a file nor a file that is open for bytes.
    """
    if isinstance(file, (str, os.PathLike)):
        return Path(file)
    if not hasattr(file, method) or hasattr(file, "encoding"):
        raise TypeError(f"give the name of a file, or a file that is open for bytes, not {type(file).__name__}")
    return file  # type: ignore[no-any-return]


def name_of(file: Path | IO[bytes]) -> str:
    """Returns the name of a file for messages."""
    return file.name if isinstance(file, Path) else f"the {type(file).__name__}"


def write_document(file: Path | IO[bytes], key: str, document: Document, tensors: dict[str, Tensor]) -> None:
    """Writes a document, under this key, and its tensors."""
    from safetensors.torch import save, save_file

    metadata = {"format": "pt", key: msgspec.json.encode(document).decode()}
    if not isinstance(file, Path):
        file.write(save(tensors, metadata))
        return
    if not file.parent.is_dir():
        raise FileNotFoundError(f"the folder does not exist: {str(file.parent)!r}: make it first, or choose another")
    with whole_file(file) as written:
        save_file(tensors, written, metadata=metadata)


def read_document(file: Any, key: str, kind: type[_T], writer: str) -> tuple[str, _T, dict[str, Tensor]]:
    """Returns the name of a file for messages, its document and its tensors; nothing in it is run.

    Raises:
        SerializationError: `writer`, a call, did not write the file, or it is damaged.
        FileNotFoundError, IsADirectoryError: The file does not exist, or is a folder.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load, load_file

    source = checked_file(file, "read")
    if isinstance(source, Path):
        source.open("rb").close()  # which raises the usual errors
    try:
        if isinstance(source, Path):
            with safe_open(source, framework="pt") as opened:
                metadata, tensors = opened.metadata(), load_file(source)
        else:
            data = source.read()
            metadata = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            tensors = load(data)
        document = metadata[key].encode()
        version = msgspec.json.decode(document, type=Document).schema
        if version != SCHEMA:
            raise ValueError(f"it has version {version} of the format, and this graphpatch-notebook reads {SCHEMA}")
        return name_of(source), msgspec.json.decode(document, type=kind), tensors
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise SerializationError(
            f"{name_of(source)} is not a file that this version's {writer} wrote, or it is damaged: {error}; pickles "
            "and files of torch.save are never read, as these run code"
        ) from error


Function: TypeAlias = Callable[..., Any]

# -- plain values ------------------------------------------------------------------------------------------------------


@cache
def _constants(kind: type) -> dict[str, Any]:
    return {str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is kind}


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of this name, or raises a `LookupError`."""
    return _constants(torch.dtype)[name]  # type: ignore[no-any-return]


def _ends(value: Any) -> list[Any]:
    return [value.start, value.stop, value.step]


_BASES: dict[str, type] = {"tuple": tuple, "list": list, "mapping": Mapping, "object": object}


def _container_parts(spec: ContainerSpec) -> list[Any]:
    base = next(name for name, base in _BASES.items() if issubclass(spec.type, base))
    return [class_name(spec.type), base, [[key, child] for _, key, child in spec.children]]


def _container_spec(parts: list[Any]) -> ContainerSpec:
    name, base, keyed = parts
    cls = known_classes().get(name) or _stand_in(name, base)
    return ContainerSpec(cls, tuple((key_text(key), key, child) for key, child in keyed))


@cache
def _stand_in(name: str, base: str) -> type:
    """Returns a class in place of one that is not imported: its instances are never made."""
    module, _, qualified = name.rpartition(":")
    bases = (collections.UserDict if base == "mapping" else _BASES[base],)
    return type(qualified.rsplit(".", 1)[-1], bases, {"__module__": module, "__qualname__": qualified})


def _parameter_parts(parameter: InputParameter) -> list[Any]:
    default = [] if parameter.default is inspect.Parameter.empty else [parameter.default]
    return [parameter.name, int(parameter.kind), *default]


def _parameter(parts: list[Any]) -> InputParameter:
    name, kind, *default = parts
    if not is_name(name):
        raise ValueError(f"{name[:60]!r} is not the name of a parameter")
    return InputParameter(name, inspect._ParameterKind(kind), *(default or [inspect.Parameter.empty]))


def is_name(name: str) -> bool:
    """Whether Python code can use the name for a variable."""
    return name.isidentifier() and not keyword.iskeyword(name)


# For each kind its class, the plain value that is written for a value, and what makes the value of that again.
_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "size": (torch.Size, list, torch.Size),
    "dict": (dict, lambda value: list(map(list, value.items())), dict),
    "key": (type(dict_key(0)), plain_dict_key, dict_key),
    "slice": (slice, _ends, lambda ends: slice(*ends)),
    "range": (range, _ends, lambda ends: range(*ends)),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "float": (float, repr, float),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "ellipsis": (type(Ellipsis), lambda _: True, lambda _: Ellipsis),
    "device": (torch.device, str, torch.device),
    "dtype": (torch.dtype, dtype_name, dtype_of),
    "layout": (torch.layout, dtype_name, lambda name: _constants(torch.layout)[name]),
    "memory_format": (torch.memory_format, dtype_name, lambda name: _constants(torch.memory_format)[name]),
    "parameter": (InputParameter, _parameter_parts, _parameter),
    "tensor_spec": (
        TensorSpec,
        lambda spec: [spec.shape, spec.dtype, spec.device, spec.type_name],
        lambda parts: TensorSpec(*parts),
    ),
    "container_spec": (ContainerSpec, _container_parts, _container_spec),
    "value_spec": (ScalarSpec, lambda spec: spec.value, ScalarSpec),
    "object_spec": (ObjectSpec, str, ObjectSpec),
    "unknown_spec": (UnknownSpec, lambda _: True, lambda _: UnknownSpec()),
}
_KIND_OF = {kind: name for name, (kind, _, _) in _KINDS.items()}


def refused(value: Any) -> Any:
    """Raises an error for a value that a file cannot hold."""
    raise SerializationError(f"it holds an object of type {type(value).__name__}, or a number that is too large")


def encoded(value: Any, leaf: Callable[[Any], Any] = refused) -> Any:
    """Returns the JSON of `value`: plain values, in tuples, lists, dicts and slices; `leaf` writes all others."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if (kind is int and abs(value) < 2**63) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, list):  # containers of fx are immutable subclasses
        return [encoded(item, leaf) for item in value]
    name = _KIND_OF.get(kind) or ("dict" if isinstance(value, dict) else "")
    return {name: encoded(_KINDS[name][1](value), leaf)} if name else leaf(value)


_NO_LEAVES: Mapping[str, Callable[[Any], Any]] = {}


def decoded(value: Any, leaves: Mapping[str, Callable[[Any], Any]] = _NO_LEAVES) -> Any:
    """Returns the value that JSON encodes; `leaves` read other kinds than those of plain values, by kind.

    Raises:
        ValueError, TypeError, LookupError: It does not encode a value.
    """
    if type(value) is list:
        return [decoded(item, leaves) for item in value]
    if type(value) is not dict:
        return value
    ((kind, inside),) = value.items()
    return leaves[kind](inside) if kind in leaves else _KINDS[kind][2](decoded(inside, leaves))


# -- functions and classes ---------------------------------------------------------------------------------------------

_NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.Tensor": Tensor,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
    "torch.functional": torch.functional,
}
# Methods that are not in torch's list of operators, as they only read the dtype and device of a tensor.
_FACTORIES = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros"
_OPERATORS = (
    "abs add and_ concat contains eq floordiv ge getitem gt iadd iand ifloordiv ilshift imatmul imod imul index invert "
    "ior ipow irshift is_ is_not isub itruediv ixor le lshift lt matmul mod mul ne neg not_ or_ pos pow rshift setitem "
    "sub truediv truth xor"
)
_BUILTINS = "abs bool float getattr int len list max min range round setattr slice sum tuple"
_MATH = "ceil cos exp floor gcd isqrt log log2 prod sin sqrt tan tanh trunc"
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
# Operators that trust the indices and addresses that they are given.
_UNCHECKED = ("unsafe_index", "unsafe_masked", "reinterpret_tensor", "from_blob", "_test_")
_WRITABLE = frozenset({"data", "grad", "imag", "real", "requires_grad"})
_OPS = "torch.ops:"
_KNOWN_OPS = (f"{_OPS}aten.", f"{_OPS}prims.")
# Where transformers defines the outputs of its models; what is in these files runs when it is imported, as for any
# transformers model that is used at all.
_TRANSFORMERS = re.compile(r"transformers\.(modeling_outputs|models\.[a-z0-9_]+\.modeling_[a-z0-9_]+):\w+")


def _members(holder: Any, names: str) -> dict[str, Function]:
    prefix = "torch.Tensor" if holder is Tensor else holder.__name__
    return {f"{prefix}.{name}": getattr(holder, name) for name in names.split()}


@cache
def functions() -> dict[str, Function]:
    """Returns all functions that a file may call without being allowed, by name: of torch, and arithmetic of Python."""
    torchs = {id(f) for group in torch.overrides.get_overridable_functions().values() for f in group}
    overridable = {
        f"{space}.{name}": function
        for space, holder in _NAMESPACES.items()
        for name in dir(holder)
        if id(function := getattr(holder, name, None)) in torchs and callable(function)
    }
    native = {
        f"{space}.{name}": getattr(holder, name)
        for space, holder in native_namespaces().items()
        for name in dir(holder)
        if not name.startswith("__")
    }
    found = {**overridable, **native, **overridable}  # in the order of names that people know
    return {
        **{name: function for name, function in found.items() if not _is_refused(name.rsplit(".", 1)[1])},
        **_members(Tensor, _FACTORIES), **_members(math, _MATH), **_members(builtins, _BUILTINS),
        **_members(operator, _OPERATORS),
        "torch.is_grad_enabled": torch.is_grad_enabled, "torch.set_grad_enabled": set_grad_enabled,
        "graphpatch.take": take, "graphpatch.unchanged": unchanged, "torch._assert": assert_that,
        "torch.Size": torch.Size,
    }  # fmt: skip


def _is_refused(name: str) -> bool:
    return name in _REFUSED or any(part in name for part in _UNCHECKED)


@cache
def _names() -> dict[Function, str]:
    return {function: name for name, function in reversed(functions().items())}


@cache
def known_classes() -> dict[str, type]:
    """Returns the classes of containers that files may name without being allowed, by name."""
    returned = [cls for cls in vars(torch.return_types).values() if isinstance(cls, type) and issubclass(cls, tuple)]
    own = (tuple, list, dict, torch.Size, collections.OrderedDict, torch.nn.utils.rnn.PackedSequence)
    return {class_name(cls): cls for cls in (*own, collections.deque, SimpleNamespace, *returned)}


def class_name(cls: type) -> str:
    """Returns the name of any class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _imported(name: str) -> Any:
    """Returns what `module:name` names, and imports it."""
    module, _, inside = name.partition(":")
    parts = [*module.split("."), *inside.split(".")]
    if not all(part.isidentifier() and (not part.startswith("__") or part == "__main__") for part in parts):
        raise SerializationError(f"{name[:80]!r} is not the name of a function that a file may call, nor of a class")
    try:
        found: Any = torch.ops if name.startswith(_OPS) else importlib.import_module(module)
        for part in inside.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SerializationError(f"{name} cannot be imported, or is not registered, here: {error}") from error
    return found


def _is_container(cls: Any) -> bool:
    is_class = isinstance(cls, type)
    return is_class and (issubclass(cls, (*SEQUENCES, Mapping)) or fields_of(cls) is not None)


def encoded_function(function: Any) -> FunctionPart:
    """Returns the entry of a function that a graph calls."""
    if isinstance(function, NamedFunction):
        function = function.function
    keys = None if not isinstance(function, Container) else list(map(encoded, function.keys))
    named = function.type if isinstance(function, Container) else function
    if keys is None and (path := overload_path(function)) is not None:
        return FunctionPart(f"{_OPS}{path}")
    if keys is None and isinstance(function, Hashable) and function in _names():
        return FunctionPart(_names()[function])
    owner = getattr(named, "__self__", None)  # of the `apply` of an `autograd.Function`
    name = f"{class_name(owner)}.{named.__name__}" if isinstance(owner, type) else _qualified(named)
    if name not in known_classes() and _imported(name) != named:
        raise SerializationError(f"it uses {name}, which cannot be imported by that name")
    return FunctionPart(name, keys)


def _qualified(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', repr(function)[:60])}"


class Names:
    """The functions and classes that names in a file refer to.

    Args:
        allow: Dotted names: of a function or class, or of a package or module with everything in it; `None` for all.

    Example:
        >>> Names(["mylib"]).covers("mylib:ops.foo"), Names(["mylib.ops.foo"]).covers("mylib.ops:foobar")
        (True, False)
    """

    def __init__(self, allow: Iterable[str] | None = ()) -> None:
        if isinstance(allow, str):
            raise TypeError(f"allow takes a list of names: allow=[{allow!r}]")
        self._allow = None if allow is None else {str(name).replace("::", ".") for name in allow}

    def covers(self, name: str) -> bool:
        """Whether the caller allows `name`, or a module that it is in."""
        dotted = _dotted(name)
        return self._allow is None or any(f"{dotted}.".startswith(f"{allowed}.") for allowed in self._allow)

    def check(self, parts: Iterable[FunctionPart]) -> None:
        """Raises an error that lists the functions and classes of a file that are not known and not allowed."""
        known = functions().keys() | known_classes().keys()
        missing = sorted(
            {
                _dotted(part.name)
                for part in parts
                if ":" in part.name
                and not (part.name in known or part.name.startswith(_KNOWN_OPS) or self.covers(part.name))
                and not (part.keys is not None and _TRANSFORMERS.fullmatch(part.name))
            }
        )
        if missing:
            raise SerializationError(
                f"its graphs use {', '.join(missing)}, which loading would import and run; "
                f"if you trust it, allow it: load(file, allow={missing!r})"
            )

    def function(self, part: FunctionPart) -> Function:
        """Returns a function that was checked."""
        name = part.name
        if part.keys is not None:
            cls = known_classes().get(name) or _imported(name)
            is_output = any(base.__name__ == "ModelOutput" for base in getattr(cls, "__mro__", ()))
            if not _is_container(cls) or not (name in known_classes() or self.covers(name) or is_output):
                raise SerializationError(f"{name} is not a class of containers")
            return Container(cls, tuple(map(decoded, part.keys)))
        if name in functions():
            return functions()[name]
        found = _imported(name)
        if not name.startswith(_OPS):
            return NamedFunction(found)
        if overload_path(found) != name.removeprefix(_OPS) or any(map(_is_refused, name.split("."))):
            raise SerializationError(f"{name[:80]!r} is not an operator that a file may call")
        return found  # type: ignore[no-any-return]


def _dotted(name: str) -> str:
    return name.removeprefix(_OPS).replace(":", ".")


def check_method(name: str) -> None:
    """Raises an error if graphs in files may not call this method of tensors."""
    if f"torch.Tensor.{name}" not in functions():
        raise SerializationError(f"it calls the method {name[:60]!r}, which files may not call")


def check_attribute(function: Any, args: tuple[Any, ...]) -> None:
    """Raises an error if such a call reads or writes attributes of tensors that are more than values."""
    name: Any = args[1] if len(args) > 1 else None
    if function not in (getattr, setattr, take) or (function is take and type(name) is int):
        return
    is_plain = type(name) is str and name.isidentifier() and not name.startswith("_") and name != "grad_fn"
    is_value = name in _WRITABLE if function is setattr else is_plain and not callable(getattr(Tensor, name, None))
    if not is_plain or not is_value or len(args) != (3 if function is setattr else 2):
        raise SerializationError(f"it {'sets' if function is setattr else 'reads'} the attribute {name!r}")


# -- tensors -----------------------------------------------------------------------------------------------------------

# The dtypes of all versions of safetensors; other dtypes are written as bytes.
_NATIVE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip


class TensorTable:
    """The tensors to write, each with a number.

    Each storage is written once, and each tensor is a view of it: one tensor under two names stays one tensor, and
    views of one storage stay views of it. A storage has the dtype and shape of its tensor if that fills it, so that
    other tools can read the file.
    """

    def __init__(self) -> None:
        self.parts: list[TensorPart] = []
        self._tensors: list[Tensor] = []  # also keeps their ids valid
        self._numbers: dict[int, int] = {}
        self._storages: dict[Any, tuple[str, Tensor]] = {}

    def add(self, tensor: Tensor, name: str) -> int:
        """Returns the number of `tensor`; `name` becomes the name of its storage if the storage is new."""
        if id(tensor) in self._numbers:
            return self._numbers[id(tensor)]
        _check_storable(tensor)
        number = self._numbers[id(tensor)] = len(self._tensors)
        self._tensors.append(tensor)
        key = (tensor.device, tensor.untyped_storage().data_ptr() or -number)
        name = f"{name}.{number}" if any(name == other for other, _ in self._storages.values()) else name
        self.parts.append(
            TensorPart(
                storage=self._storages.setdefault(key, (name, tensor))[0],
                dtype=dtype_name(tensor.dtype),
                shape=list(tensor.shape),
                stride=list(tensor.stride()),
                offset=int(tensor.storage_offset()),
                device=str(tensor.device),
                is_parameter=isinstance(tensor, Parameter),
                requires_grad=tensor.requires_grad,
            )
        )
        return number

    def contents(self) -> dict[str, Tensor]:
        """Returns each storage by name."""
        return {name: _content(tensor.detach()) for name, tensor in self._storages.values()}


def _check_storable(tensor: Tensor) -> None:
    """Raises an error if a tensor is not a plain view of a storage with values."""
    if is_lazy(tensor) or tensor.device.type == "meta":
        raise SerializationError("its weights are not loaded (they are lazy, or on the device 'meta', as if offloaded)")
    is_plain = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    is_computed = tensor.requires_grad and not tensor.is_leaf
    if not is_plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or is_computed:
        raise SerializationError(
            f"files cannot hold a {type(tensor).__name__} of this kind ({tensor.layout}, or computed)"
        )


def _content(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    is_whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == storage.nbytes()
    if is_whole and tensor.dtype in _NATIVE:
        return tensor.cpu()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).cpu()


def made_tensors(parts: Sequence[TensorPart], contents: dict[str, Tensor]) -> list[Tensor]:
    """Returns the tensors of a file with new storages, each on its original device."""
    storages: dict[tuple[str, str], Tensor] = {}
    result = []
    for part in parts:
        dtype, key = dtype_of(part.dtype), (part.storage, part.device)
        if key not in storages:
            # Copied, as the file is only mapped into memory: it may be overwritten while the tensors live.
            flat = contents[part.storage].reshape(-1).view(torch.uint8)
            storages[key] = flat.to(torch.device(part.device), copy=True)
        whole = storages[key][: len(storages[key]) // dtype.itemsize * dtype.itemsize]
        # `as_strided` refuses what reaches beyond the end.
        view = whole.view(dtype).as_strided(part.shape, part.stride, part.offset)
        tensor = torch.empty(0, dtype=dtype, device=view.device)  # to autograd, no view
        tensor.set_(view.untyped_storage(), part.offset, part.shape, part.stride)
        made = Parameter(tensor, part.requires_grad) if part.is_parameter else tensor.requires_grad_(part.requires_grad)
        result.append(made)
    return result
