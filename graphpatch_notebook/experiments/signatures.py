"""How classes of this package are called, as `help` and tooltips show it."""

from __future__ import annotations

import inspect
import re
from typing import TypeVar

Class = TypeVar("Class", bound=type)


def called_as_initialized(cls: Class) -> Class:
    """Returns a class, whose signature is that of its `__init__`.

    Python shows that of `__new__` where a class has one, and `InitVar` where a dataclass does not keep an argument.

    Example:
        >>> @called_as_initialized
        ... class Point:
        ...     def __new__(cls, *args, **kwargs):
        ...         return super().__new__(cls)
        ...     def __init__(self, x: int, *, y: int = 0) -> None:
        ...         pass
        >>> inspect.signature(Point)
        <Signature (x: 'int', *, y: 'int' = 0)>
    """
    initializer = vars(cls)["__init__"]
    for name, annotation in initializer.__annotations__.items():
        initializer.__annotations__[name] = re.sub(r"^InitVar\[(.*)\]$", r"\1", str(annotation))
    parameters = [
        parameter.replace(annotation=initializer.__annotations__.get(parameter.name, parameter.annotation))
        for parameter in list(inspect.signature(initializer).parameters.values())[1:]
    ]
    type.__setattr__(cls, "__signature__", inspect.Signature(parameters))
    return cls
