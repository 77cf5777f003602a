"""The front end's types of messages are those of the kernel."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_the_generated_types_are_current() -> None:
    script = Path(__file__).parents[2] / "js" / "messages.py"
    spec = importlib.util.spec_from_file_location("js_messages", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FILE.read_text("utf8") == module.typescript(), "run: python js/messages.py"
