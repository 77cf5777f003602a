"""Names of what lies outside of torch (functions, classes): looked up only where the caller allows it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

from graphpatch_notebook.errors import SerializationError
from graphpatch_notebook.serialization.codecs.values import UnstorableError


class Allowed:
    """The names that the caller of `load` allows, and those that it would have to allow.

    Args:
        names: Dotted names: of a function or class, or of a package or module with all that is in it.

    Example:
        >>> Allowed(["mylib"]).covers("mylib.ops.foo"), Allowed(["mylib.ops.foo"]).covers("mylib.ops.foobar")
        (True, False)
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        if isinstance(names, str):
            raise TypeError(f"allow takes a list of names: allow=[{names!r}]")
        self._names = {str(name).replace("::", ".") for name in names}
        self.missing: dict[str, None] = {}

    def covers(self, name: str) -> bool:
        """Whether `name`, or what it lies in, is allowed."""
        return any(name == allowed or name.startswith(f"{allowed}.") for allowed in self._names)

    def require(self, name: str) -> bool:
        """Whether `name` is allowed; notes it for `check` if not."""
        if self.covers(name):
            return True
        self.missing[name] = None
        return False

    def check(self, file: str) -> None:
        """Refuses the file if it has asked for anything that is not allowed.

        Raises:
            SerializationError: It has; the message lists all that is to be allowed.
        """
        if self.missing:
            names = sorted(self.missing)
            raise SerializationError(
                f"{file}: its graphs use {', '.join(names)}, which {'is' if len(names) == 1 else 'are'} not part of "
                f"torch: loading imports and runs that code; if you trust it, allow it: load(file, allow={names!r})"
            )


def name_of_object(value: Any) -> str:
    """Returns the name `module:qualified.name` under which `value` can be imported.

    Raises:
        UnstorableError: There is none.
    """
    module, name = str(getattr(value, "__module__", "") or ""), str(getattr(value, "__qualname__", "") or "")
    if not module or not _are_plain([*module.split("."), *name.split(".")]):
        raise UnstorableError(f"it uses {name or repr(value)[:60]}, which no name leads to from outside")
    if _found(module, name) != value:
        raise UnstorableError(f"it uses {module}.{name}, but that name now means something else")
    return f"{module}:{name}"


def is_name(text: str) -> bool:
    """Whether `text` has the form of what `name_of_object` returns."""
    module, _, name = text.partition(":")
    return _are_plain([*module.split("."), *name.split(".")])


def dotted(text: str) -> str:
    """Returns a name as people, and `allow`, write it."""
    return text.replace(":", ".")


def imported(text: str, where: str) -> Any:
    """Imports what `text` (of `name_of_object`) names; only for names that are allowed.

    Raises:
        SerializationError: There is no such thing here.
    """
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
