"""Strict reading of JSON: each value must have the expected type, or an error names its place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from graphpatch_notebook.errors import SerializationError

MOST_ITEMS = 2_000_000
_MOST_TEXT = 1_000_000
_SHOWN = 40


class JsonValue:
    """A value of a JSON document, and its position there.

    Example:
        >>> JsonValue({"a": [1, 2]}, "file").fields("a")["a"].items()[1].whole(0, 9)
        2
        >>> JsonValue({"a": [1, 2]}, "file").fields("b")
        Traceback (most recent call last):
        graphpatch_notebook.errors.SerializationError: file: the field 'b' is missing
    """

    __slots__ = ("value", "where")

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self.where = where

    def error(self, problem: str) -> SerializationError:
        """Returns an error that names the place of the problem."""
        return SerializationError(f"{self.where}: {problem}")

    def _expected(self, what: str) -> SerializationError:
        shown = repr(self.value)[:_SHOWN] if not isinstance(self.value, (dict, list)) else type(self.value).__name__
        return self.error(f"there should be {what}, not {shown}")

    @property
    def is_null(self) -> bool:
        """Whether it is null."""
        return self.value is None

    def text(self) -> str:
        """Returns it as text."""
        if type(self.value) is not str or len(self.value) > _MOST_TEXT:
            raise self._expected("text")
        return self.value

    def one_of(self, choices: Sequence[str]) -> str:
        """Returns it as text, which must be one of the given ones."""
        if type(self.value) is not str or self.value not in choices:
            raise self._expected(f"one of {', '.join(choices)}")
        return self.value

    def whole(self, least: int = 0, most: int = 2**63 - 1) -> int:
        """Returns it as a whole number from `least` to `most`."""
        if type(self.value) is not int or not least <= self.value <= most:
            raise self._expected(f"a whole number from {least} to {most}")
        return self.value

    def flag(self) -> bool:
        """Returns it as a bool."""
        if type(self.value) is not bool:
            raise self._expected("true or false")
        return self.value

    def items(self, length: int | None = None) -> list[JsonValue]:
        """Returns the items of a list, of the given length if there is one."""
        if type(self.value) is not list or len(self.value) > MOST_ITEMS:
            raise self._expected("a list")
        if length is not None and len(self.value) != length:
            raise self.error(f"there should be {length} items, not {len(self.value)}")
        return [JsonValue(item, f"{self.where}[{i}]") for i, item in enumerate(self.value)]

    def fields(self, *required: str, optional: Sequence[str] = ()) -> dict[str, JsonValue]:
        """Returns the fields of an object that has all of `required`, and otherwise only `optional` ones."""
        if type(self.value) is not dict:
            raise self._expected("an object")
        for name in required:
            if name not in self.value:
                raise self.error(f"the field {name!r} is missing")
        for name in self.value:
            if name not in required and name not in optional:
                raise self.error(f"the field {name[:_SHOWN]!r} is unknown")
        return {name: JsonValue(value, f"{self.where}.{name}") for name, value in self.value.items()}

    def check_schema(self, known: int) -> None:
        """Makes sure that an object has this version of its layout in the field `schema`, and who wrote it."""
        fields = self.entries()
        schema = fields["schema"].value if "schema" in fields else None
        if type(schema) is int and schema != known:
            version = str(self.value.get("written_by"))[:_SHOWN]
            raise self.error(
                f"it is of schema {schema}, and this version reads schema {known}: graphpatch-notebook {version}"
                f"{' or newer' if schema > known else ''} reads it"
            )
        if "schema" in fields:
            fields["schema"].whole(known, known)

    def entries(self) -> dict[str, JsonValue]:
        """Returns the fields of an object with any names."""
        if type(self.value) is not dict:
            raise self._expected("an object")
        return {name: JsonValue(value, f"{self.where}.{name[:_SHOWN]}") for name, value in self.value.items()}


def parsed(text: str, where: str) -> JsonValue:
    """Returns the JSON document in `text`."""
    try:
        return JsonValue(json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_number), where)
    except RecursionError:
        raise SerializationError(f"{where}: it is nested too deeply") from None
    except ValueError as error:
        raise SerializationError(f"{where}: it does not hold valid JSON ({error})") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:_SHOWN]!r} is given twice in one object")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number")
