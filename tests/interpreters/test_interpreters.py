"""The checks of this folder, in this interpreter."""

from __future__ import annotations

import importlib

import pytest

from tests.interpreters.without_torch import CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_this_interpreter(name: str) -> None:
    assert list(importlib.import_module(f"tests.interpreters.{name}").problems()) == []
