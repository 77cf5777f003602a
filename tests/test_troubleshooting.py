"""The messages in the guide on troubleshooting are those that the code above them gives."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / ".github" / "TROUBLESHOOTING.md").read_text("utf8")
SETUP, *SOURCES = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
CASES = list(zip(SOURCES, re.findall(r"```text\n(.*?)```", GUIDE, re.DOTALL), strict=True))


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "guide"}
    exec(SETUP.replace('"examples/', f'"{ROOT.as_posix()}/examples/'), names)
    return names


def message_of(source: str, namespace: dict[str, Any], file: Path) -> str:
    """Returns what the code raises, or the one warning that it gives."""
    file.write_text(source, "utf8")  # capture reads the names of variables off the source
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            exec(compile(source, str(file), "exec", dont_inherit=True), namespace)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    (warning,) = given
    return f"{warning.category.__name__}: {warning.message}"


# In the order of the guide, in one namespace: later ones use classes of earlier ones.
@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_message_is_as_written(number: int, namespace: dict[str, Any], tmp_path: Path) -> None:
    for source, _ in CASES[:number]:
        for definition in re.findall(r"^class .*?(?=^\S)", source, re.MULTILINE | re.DOTALL):
            exec(definition, namespace)
    source, message = CASES[number]
    assert message_of(source, namespace, tmp_path / "guide.py").split() == message.split()


def test_there_are_messages() -> None:
    assert len(CASES) > 8


def test_calls_of_both_may_be_compared(namespace: dict[str, Any]) -> None:
    assert "Calls of the model itself are never patched" in GUIDE
    pg, model, ids = namespace["pg"], namespace["model"], namespace["ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pg.patch({"output|logits": namespace["ZeroPatch"]()}):
            assert model(ids).logits.any()
            assert not pg(ids).logits.any()
