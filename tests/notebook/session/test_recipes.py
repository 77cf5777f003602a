"""Sessions in files that were written with another version of a model's code: recipes of transformers 4, here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import GraphPatchWarning, PatchableGraph
from graphpatch_notebook.notebook.session import session_file
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
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


class Mlp(nn.Module):
    """As it was; `names` renames its modules, and `is_later` puts another operation under a name."""

    def __init__(self, names: tuple[str, str] = ("up", "down"), is_later: bool = False) -> None:
        super().__init__()
        self.names, self.is_later = names, is_later
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = getattr(self, self.names[0])(x)
        activation = torch.tanh if self.is_later else torch.relu
        hidden = activation(hidden)
        hidden = hidden * 2
        return getattr(self, self.names[1])(hidden)


def session(**changes: object) -> tuple[PatchableGraph, Session]:
    graph = PatchableGraph(Mlp(**changes), torch.ones(2, 4))  # type: ignore[arg-type]
    return graph, Session(graph)


@pytest.fixture
def recipe() -> str:
    _graph, written = session()
    written.extend(
        [
            ChosenPatch("up.output", "zero"),
            ChosenPatch("down.weight", "zero"),
            ChosenPatch("hidden", "probe", name="seen"),
            ChosenPatch("output", "add", value="seen.sum()"),
            ChosenPatch("hidden_1", "zero"),
        ]
    )
    return session_file.dumps(written)


def test_a_renamed_module(recipe: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(recipe, "utf8")
    graph, other = session(names=("up", "lower"))

    with pytest.warns(GraphPatchWarning, match="recipe.json': 1 of 5 .* no node 'down' .*'lower.weight'"):
        loaded = session_file.load(other, file)

    assert [patch.path for patch in loaded] == ["up.output", "hidden", "output", "hidden_1"]
    assert other.undo()
    assert other.chosen.patches == ()
    assert "lower.weight" in graph.nodes


def test_a_name_that_another_operation_has_now(recipe: str) -> None:
    _, other = session(is_later=True)
    with pytest.warns(GraphPatchWarning, match="unresolved patch]") as warned:
        loaded = session_file.loads(other, recipe)

    assert "'hidden' is of tanh here, and was of relu where it was stored; nearest: " in str(warned[0].message)
    assert [patch.path for patch in loaded] == ["up.output", "down.weight", "output", "hidden_1"]
