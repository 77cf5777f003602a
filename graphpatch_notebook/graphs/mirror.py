"""A module that stands for another one, with which it shares parameters, buffers, hooks and attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

# What every module has: parameters, buffers, hooks. Plain flags among them are read off the user's module.
_SHARED = tuple(
    (name, type(value))
    for name, value in vars(Module()).items()
    if isinstance(value, (dict, set)) and name != "_modules"
)
_MAKE_MODULES = type(vars(Module())["_modules"])


class Mirror(Module):
    """A module that stands for another one, with which it shares all but the submodules. Abstract."""

    # Set without `Module.__init__`: a hierarchy may have thousands of these.
    _original_module: Module

    def __init__(self, module: Module) -> None:
        state = self.__dict__
        original = module.__dict__
        for name, make in _SHARED:
            # Modules of torchscript do not have all of them.
            state[name] = original[name] if name in original else make()
        state["_modules"] = _MAKE_MODULES()
        state["_original_module"] = module

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__
        for registry in ("_parameters", "_buffers", "_modules"):
            if name in state.get(registry, ()):
                return state[registry][name]
        if "_original_module" not in state:  # being copied or unpickled
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r} yet")
        return getattr(state["_original_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name) or name in self.__dict__:
            object.__setattr__(self, name, value)
        elif isinstance(value, (Tensor, Module)) and not hasattr(self._original_module, name):
            # For an edited graph: the user's module stays as it is.
            own: dict[str, Any] = self._modules if isinstance(value, Module) else self.__dict__
            own[name] = value
        else:
            setattr(self._original_module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self._original_module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._modules, *dir(self._original_module)})

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Gives this module, for its graph, a tensor that the user's module does not have."""
        setattr(self, name, tensor)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Gives this module, for its graph, a parameter that the user's module does not have."""
        setattr(self, name, param)

    @property
    def training(self) -> bool:
        """The flag of the user's module."""
        return self._original_module.training

    @training.setter
    def training(self, value: bool) -> None:
        self._original_module.training = value

    def train(self, mode: bool = True) -> Any:
        """Puts the user's module in training mode, or in evaluation mode."""
        self._original_module.train(mode)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Any:  # what `to`, `half`, `cuda`, ... are made of
        self._original_module._apply(*args, **kwargs)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state dict of the user's module."""
        return self._original_module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a state dict into the user's module."""
        return self._original_module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yields the parameters of the user's module under its names."""
        return self._original_module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yields the buffers of the user's module under its names."""
        return self._original_module.named_buffers(*args, **kwargs)
