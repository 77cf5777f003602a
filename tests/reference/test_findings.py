"""The docstrings of all public names are fit for the reference, and what is not would be found."""

from __future__ import annotations

from types import ModuleType

import pytest

import graphpatch_notebook
from graphpatch_notebook import experiments
from tests.reference.findings import findings


def test_docstrings_are_complete() -> None:
    assert findings([graphpatch_notebook, experiments]) == []


def module_of(source: str) -> ModuleType:
    module = ModuleType("made")
    exec(source, module.__dict__)
    module.__all__ = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == "made"]
    module.__doc__ = "Made for a test."
    return module


GOOD = '"""One. See `PatchableGraph.patch`, `pg.nodes` and `OrderedDict.keys`.\n\n>>> 1\n1\n"""'


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"def one(): {GOOD}", []),
        ("def one(): pass", ["made.one: no docstring"]),
        ("def one(): 'One.'", ["made.one: no example"]),
        ("class OneError(ValueError): 'One.'", []),
        (f"def one(): {GOOD.replace('patch`', 'path`')}", ["made.one: `PatchableGraph.path` leads nowhere"]),
        (f"def one(): {GOOD.replace('pg.nodes', 'NoSuchThing')}", ["made.one: `NoSuchThing` leads nowhere"]),
        (f"def one(): {GOOD.replace('pg.nodes', 'Tensor')}", []),
        (f"class One:\n {GOOD}\n def two(self): pass", ["made.One.two: no docstring"]),
        (f"class One:\n {GOOD}\n def two(self): 'Two.'", []),
        (f"class One:\n {GOOD}\n two: int", ["made.One.two: no docstring"]),
        (f"class One:\n {GOOD.replace('One.', 'One.  two:')}\n def _two(self): pass", []),
    ],
)
def test_what_is_wrong_is_found(source: str, found: list[str]) -> None:
    made = module_of(source)
    before = set(findings([graphpatch_notebook]))
    assert [one for one in findings([graphpatch_notebook, made]) if one not in before] == found
