"""Which tests stay together on one process of a parallel run, and which come first."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.zoo import CASES

_ZOO = {case.name for case in CASES}


class SetUpOnce(LoadScopeScheduling):
    """Keeps together the tests that share what takes long to set up.

    Those of a file share its fixtures, those of a model of the zoo its capture, and those that drive a browser one
    JupyterLab. Pages of the documents share nothing: together, they would keep one process busy after all others.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        parameters = test.partition("[")[2].removesuffix("]")
        if parameters in _ZOO:
            return parameters
        if file == "tests/test_docs.py":
            return nodeid
        return "browser" if file.startswith("tests/browser/") else file


def put_slow_tests_first(items: list[pytest.Item]) -> None:
    """Sorts the tests, so that no process is left alone with a long one in the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
