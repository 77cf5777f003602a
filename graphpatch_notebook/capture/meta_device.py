"""Runs on the meta device, which computes shapes only: models without weights, and captured models at other sizes.

A model on the meta device has parameters without values. What it computes from sizes and from the inputs alone (masks,
positions) has values as ever; what it computes from parameters has a shape and a dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture.frame_recorder import TRUTHS, VALUE_READS, is_call_sized_by_values, raw_name
from graphpatch_notebook.capture.modules import all_modules
from graphpatch_notebook.capture.records import map_leaves
from graphpatch_notebook.errors import CaptureError
from graphpatch_notebook.torch_compat import without_torch_functions

META = torch.device("meta")


def parameter_without_values(module: Module) -> str:
    """Returns the name of a parameter on the meta device; empty if there is none.

    Those that accelerate loads for each call of their module, or of one around it, have values.
    """
    held = [each for one in all_modules(module) for each in one._parameters.values()]
    return _parameter_on_meta(module) if [each for each in held if each is not None and each.is_meta] else ""


def _parameter_on_meta(module: Module) -> str:
    if "_hf_hook" in module.__dict__:
        return ""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            return name
    for name, child in module._modules.items():
        if child is not None and (found := _parameter_on_meta(child)):
            return f"{name}.{found}"
    return ""


def built_without_weights(build: Callable[[], Module], dtype: torch.dtype | None = None) -> Module:
    """Returns the module that `build` returns, with all parameters on the meta device, of `dtype` unless they choose.

    Other tensors have values, such as the frequencies of rotary positions, which weights from files do not include.
    The random state does not change.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype or default)
    try:
        with torch.random.fork_rng(devices=[]), _EmptyOnMeta():
            module = build()
    finally:
        torch.set_default_dtype(default)
    moved: dict[int, Parameter] = {}  # tied parameters remain tied
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in moved:
                moved[id(parameter)] = Parameter(parameter.to(META), requires_grad=parameter.requires_grad)
            setattr(owner, name, moved[id(parameter)])
    return module


class OnMeta(TorchFunctionMode):
    """Keeps tensors without values on the meta device, and reports `device` as their device to the model.

    What the model makes of plain numbers is made as ever: a table, say, that it keeps somewhere for the next run.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = raw_name(func), kwargs or {}
        if name in _THE_SAME:
            return func(*args, **kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        if has_values((args, kwargs)):
            return func(*args, **kwargs)
        if name == "device":
            return self._device
        if name in ("is_cuda", "is_meta"):
            return name == "is_cuda" and self._device.type == "cuda"
        if name in ("cpu", "cuda"):
            return args[0]
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], map_leaves(args[1], _any_index), *args[2:])
        if name in ("max", "min", "maximum", "minimum"):  # of two tensors: a number would be a dimension
            args = (args[0], *(each.to(META) if isinstance(each, Tensor) else each for each in args[1:]))
        args, kwargs = map_leaves(args, _moved), map_leaves(kwargs, _moved)
        if name == "to":
            args = tuple(META if isinstance(each, str) else each for each in args)
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = META
        if name in ("grouped_mm", "_grouped_mm"):  # on meta it supports one dtype only: torch 2.9 to 2.13
            wide = args[0].dtype
            args = tuple(each.bfloat16() if isinstance(each, Tensor) else each for each in args)
            return func(*args, **kwargs).to(wide)
        if name == "flex_attention" and kwargs.get("return_aux") is None and not kwargs.get("return_lse"):
            query, _, value = args[:3]  # it does not run on meta: torch 2.5 to 2.13
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return self.run(func, name, args, kwargs)

    def run(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function with tensors on the meta device."""
        return func(*args, **kwargs)


# What is asked of each value that is recorded.
_THE_SAME = frozenset(
    {"_version", "dtype", "grad_fn", "is_nested", "layout", "requires_grad", "shape", "untyped_storage"}
)


class WithoutWeights(OnMeta):
    """Runs a model on the meta device that has never had values.

    If the code reads a value into Python that depends on parameters, it reads 0 or `False`. If a size depends on such
    values, it is the largest possible: a mask selects everything. `guessed` has the names of these functions, in order.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.guessed: dict[str, None] = {}

    def run(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in VALUE_READS:
            self.guessed[name] = None
            return _read(func, name, args)
        if is_call_sized_by_values(name, args):
            self.guessed[name] = None
            return result_of_size(func, name, args, kwargs, _most(name, args, kwargs))
        return func(*args, **kwargs)


class _EmptyOnMeta(WithoutWeights):
    """Builds a model: tensors that are created without values, or with very many values, are on the meta device.

    Code that initializes weights may read them.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = raw_name(func)
        if name in _WITHOUT_VALUES or (name in _WITH_VALUES and _count(args, kwargs) > _MOST_VALUES):
            kwargs = {**(kwargs or {}), "device": META}
        return super().__torch_function__(func, types, args, kwargs)


_WITHOUT_VALUES = frozenset({"empty", "empty_strided", "new_empty", "empty_like"})
_WITH_VALUES = frozenset({"zeros", "ones", "full", "rand", "randn"})
_MOST_VALUES = 2**24


def _count(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> int:
    """Returns how many entries a new tensor has."""
    size = args[0] if args and not isinstance(args[0], int) else args or (kwargs or {}).get("size", ())
    return math.prod(size)


def has_values(arguments: Any) -> bool:
    """Whether all tensors among some arguments have values."""
    found: list[Any] = []
    map_leaves(arguments, found.append)
    with without_torch_functions():
        return not any(isinstance(each, Tensor) and each.is_meta for each in found)


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device):
        return META
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_like(value, device=META) if value.dim() else value.item()


def _any_index(value: Any) -> Any:
    """Which entry is taken does not matter for the shape."""
    is_number = isinstance(value, Tensor) and value.is_meta and value.dim() == 0 and value.dtype not in TRUTHS
    return 0 if is_number else value


def _read(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Any:
    """Returns the result of a function that reads values into Python, as if the values were zero."""
    if name in ("numpy", "__array__") or any(isinstance(each, Tensor) and each.numel() > 2**20 for each in args):
        raise CaptureError(
            f"the model reads values into Python ({name}) that depend on its weights, and the weights are on the meta "
            "device; load them before the capture"
        )
    zeros = [torch.zeros(each.shape, dtype=each.dtype) if isinstance(each, Tensor) else each for each in args]
    return name != "__bool__" and func(*zeros)


def _most(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Returns the largest number of entries that the result of a function can have, if it depends on values."""
    if name != "__getitem__":
        return int((args[0] if args else kwargs["input"]).numel())
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    masks = [index for index in indices if isinstance(index, Tensor) and index.dtype in TRUTHS]
    return math.prod(masks[0].shape)


def result_of_size(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int
) -> Any:
    """Returns a result of `count` entries, for a function with a result size that depends on values."""

    def entries(*more: int) -> Tensor:
        return torch.empty((count, *more), dtype=torch.long, device=META)

    if name == "__getitem__":
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        is_mask = [isinstance(index, Tensor) and index.dtype in TRUTHS for index in indices]
        given = [(entries(),) * i.dim() if mask else (i,) for i, mask in zip(indices, is_mask, strict=True)]
        return func(args[0], tuple(index for part in given for index in part))
    of = args[0] if args else kwargs["input"]
    if name == "where" or (name == "nonzero" and kwargs.get("as_tuple")):
        return (entries(),) * of.dim()
    if name in ("nonzero", "argwhere"):
        return entries(of.dim())
    if name == "bincount":
        return entries()
    if name in ("masked_select", "unique", "unique_consecutive") and len(args) <= 2 and not kwargs:
        return entries().to(of.dtype)
    raise CaptureError(f"the size of the result of {name} depends on values, and the weights are on the meta device")
