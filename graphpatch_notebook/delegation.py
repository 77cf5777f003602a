"""A module that delegates to another module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn import Module

# Attributes of `nn.Module` that the module may override: always read from the module.
_DELEGATED = (
    "add_module apply bfloat16 buffers children cpu cuda double eval float get_buffer get_extra_state get_parameter "
    "get_submodule half ipu load_state_dict modules mtia named_buffers named_children named_modules named_parameters "
    "parameters register_buffer register_module register_parameter requires_grad_ set_extra_state set_submodule "
    "share_memory state_dict to to_empty train type xpu zero_grad _apply"
).split()


class ModuleDelegate(Module):
    """A module with the parameters, buffers, children and modes of another module, `_module`.

    Abstract: the subclass delegates attributes that `torch.nn.Module` does not define.
    """

    _module: Module

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._module)})


def _delegated(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Module, name))
    def method(self: ModuleDelegate, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._module, name)(*args, **kwargs)
        return self if result is self._module else result

    return method


for _name in _DELEGATED:
    if hasattr(Module, _name):  # not every version of torch has all of them
        setattr(ModuleDelegate, _name, _delegated(_name))


def _training(self: ModuleDelegate) -> bool:
    return bool(self._module.training)


def _set_training(self: ModuleDelegate, value: bool) -> None:
    if "_module" in self.__dict__:
        self._module.training = value


ModuleDelegate.training = property(_training, _set_training)  # type: ignore[assignment]
