"""The package's own files: this version of Python has nothing to say against them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "graphpatch_notebook"


def problems() -> Iterator[str]:
    """Yields what the compiler warns of."""
    for file in sorted(PACKAGE.rglob("*.py")):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            compile(file.read_text("utf8"), str(file), "exec", dont_inherit=True)
        yield from (f"{file.name}: {warning.message}" for warning in given)
