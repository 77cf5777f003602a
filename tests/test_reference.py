"""What is wrong with docstrings fails the build of the documents."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

CONF = """
import importlib.util

spec = importlib.util.spec_from_file_location("settings_of_the_site", {settings!r})
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)
import made

site.MODULES.append(made)
globals().update({{name: value for name, value in vars(site).items() if not name.startswith("_")}})
root_doc, include_patterns, exclude_patterns = "index", ["**"], []
"""
MADE = '''
"""Made for a test."""
__all__ = "good bare plain FineError wrong_member unknown_class of_torch Members forgotten".split()

def good():
    """One. See `PatchableGraph.patch`, `pg.nodes`, `ExtractionOptions.decompose` and `Members.field`, `if x`.

    >>> 1
    1
    """

def bare(): pass

def plain():
    """No example."""

class FineError(ValueError):
    """Errors need no example."""

def wrong_member():
    """See `pg.path`. >>> 1"""

def unknown_class():
    """See `NoSuchThing`. >>> 1"""

def of_torch():
    """See `Tensor`, `DataArray`, `pg.graph.linear` and `KeyError`. >>> 1"""

forgotten = 1

class Members:
    """Has members. >>> 1

    Args:
        field: One that is documented here.
    """

    field: int
    lost: int
    def _private(self): pass
    def public(self): pass
    def documented(self):
        """Does nothing."""
'''
INDEX = """
Made
====

.. automodule:: graphpatch_notebook
   :no-members:
.. autoclass:: graphpatch_notebook.PatchableGraph
.. autoclass:: graphpatch_notebook.ExtractionOptions
.. autofunction:: made.good
.. autofunction:: made.bare
.. autofunction:: made.plain
.. autofunction:: made.wrong_member
.. autofunction:: made.unknown_class
.. autofunction:: made.of_torch
.. autoexception:: made.FineError
.. autoclass:: made.Members
"""


def test_what_is_wrong_with_docstrings_is_found(tmp_path: Path) -> None:
    conf = CONF.format(settings=str(ROOT / "docs" / "conf.py"))
    for name, text in {"conf.py": conf, "made.py": MADE, "index.rst": INDEX}.items():
        (tmp_path / name).write_text(text, "utf8")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-N", "-b", "dummy", str(tmp_path), str(tmp_path / "out")],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )
    found = re.findall(r"^.*\bmade\..*$", built.stderr, re.MULTILINE)  # names outside of these pages are missing here
    assert sorted(re.sub(r".*WARNING: | \[[\w.]+\]$", "", line) for line in found) == [
        "made.Members.lost: no docstring",
        "made.Members.public: no docstring",
        "made.bare: no docstring",
        "made.forgotten: not in the reference",
        "made.plain: no example",
        "py:obj reference target not found: NoSuchThing",
        "py:obj reference target not found: pg.path",
    ]
