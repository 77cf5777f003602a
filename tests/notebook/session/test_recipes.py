"""Sessions in files that were written with another version of a model's code: recipes of transformers 4, here."""

from __future__ import annotations

import json
import re

import pytest

from graphpatch_notebook import GraphPatchWarning
from graphpatch_notebook.notebook.session import session_file
from graphpatch_notebook.notebook.session.session import Session
from tests.notebook.session import recipes

NEAREST = re.compile(r"nearest: ('[^']+')")


@pytest.mark.parametrize("name", recipes.CASES)
def test_a_recipe_of_transformers_4(name: str) -> None:
    """What is there is chosen as it was; of the rest all is told, each with a path that exists."""
    text = (recipes.FOLDER / f"{name}.json").read_text("utf8")
    written = {entry["path"]: entry.get("op") for entry in json.loads(text)["patches"]}
    graph = recipes.graph_of(name)
    session = Session(graph)
    ops = {path: meta.op for path, meta in graph.nodes.items()}
    fitting = [path for path, op in written.items() if path in ops and op in (None, ops[path])]

    if len(fitting) == len(written):  # loaded with the version that wrote it
        assert [patch.path for patch in session_file.loads(session, text)] == list(written)
        return
    with pytest.warns(GraphPatchWarning, match="unresolved patch]") as warned:
        loaded = session_file.loads(session, text)

    assert [patch.path for patch in loaded] == fitting
    assert 0 < len(fitting) < len(written)
    (message,) = {str(warning.message) for warning in warned}
    missing = len(written) - len(fitting)
    assert f"{missing} of {len(written)} patches do not fit this graph, and were left out" in message
    problems = re.split(r"patches\[\d+\]: ", message)[1:]
    assert len(problems) == min(missing, 20)
    for problem in problems:
        near = NEAREST.search(problem)
        assert near is not None, problem
        assert {path.strip("'") for path in near.groups()} <= set(graph.nodes), problem
    with graph.patch(session.resolve({}).patch_map):
        recipes.call_of(name).run(graph)  # an unfired patch is an error here: all of these mean something
