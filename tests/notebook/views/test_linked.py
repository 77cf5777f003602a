"""One selection for all views of a graph, and what can be done with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import ChosenPatchError, SessionError
from graphpatch_notebook.notebook.session.session import Session, session_of
from graphpatch_notebook.notebook.views.selection import item_of, patches_of, selection_of
from tests.tiny_models import gpt2

HEAD = "layers[0].attn.heads[1].z"


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return PatchableGraph(gpt2(width=8), tokens())


def tokens() -> Tensor:
    return torch.randint(50, (2, 5))


def received(view: Any, **state: Any) -> None:
    """What the front end has set arrives."""
    view.set_state(state)


def test_the_selection_is_one_for_all_views(pg: PatchableGraph) -> None:
    one, other = pg.browse(), pg.browse()
    with contextlib.closing(one), contextlib.closing(other):
        assert one.group == other.group
        item = item_of(HEAD, position=3)
        received(one, selection=[item])
        assert other.selection == [item] == one.selection == selection_of(pg).items
        other.select("layers[1].resid_post")
        assert one.selection == [item_of("layers[1].resid_post")]
        before = one.selection
        for wrong in ([{"name": "x"}], "x", [{**item, "head": -1}], [{**item, "name": 3}]):
            received(one, selection=wrong)
        assert one.selection == before == other.selection
        assert PatchableGraph(nn.ReLU(), torch.ones(2)).browse().group != one.group


@pytest.fixture
def session(pg: PatchableGraph) -> Iterator[Session]:
    session = session_of(pg)
    session.clear()
    yield session
    session.clear()


def values(pg: PatchableGraph, session: Session, namespace: dict[str, Any], name: str, x: Tensor) -> Tensor:
    with pg.patch(session.resolve(namespace).patch_map):
        return pg.record(name, x)[name]


@pytest.mark.parametrize("named", [{"name": HEAD}, {"name": "layers[0].attn.z", "head": 1}])
@pytest.mark.parametrize("position", [None, 2])
@pytest.mark.parametrize("act", ["zero", "mean", "other_run", "steer"])
def test_each_action_does_what_it_says(
    pg: PatchableGraph, session: Session, act: Any, position: int | None, named: dict[str, Any]
) -> None:
    x, other = tokens(), tokens()
    typed = {"other_run": "other", "steer": "3.0"}.get(act)
    session.extend(patches_of(session, act, [item_of(**named, position=position)], typed, set()))
    clean = pg.record("layers[0].attn.z", x)["layers[0].attn.z"]
    there = pg.record("layers[0].attn.z", other)["layers[0].attn.z"]
    expected, part = clean.clone(), slice(None) if position is None else position
    expected[:, part, 1] = {
        "zero": torch.zeros(()),
        "mean": clean[:, :, 1].mean((0, 1)),
        "other_run": there[:, part, 1],
        "steer": clean[:, part, 1] + 3.0,
    }[act]
    patched = values(pg, session, {session.origin.graph: pg, "other": other}, "layers[0].attn.z", x)
    torch.testing.assert_close(patched, expected)
    assert not torch.equal(expected, clean)


def test_the_mean_pattern_of_a_head(pg: PatchableGraph, session: Session) -> None:
    x = torch.cat([tokens(), tokens().flip(1)])
    session.extend(patches_of(session, "mean", [item_of("layers[0].attn.pattern", head=1)], None, set()))
    expected = pg.record("layers[0].attn.pattern", x)["layers[0].attn.pattern"].clone()
    expected[:, 1] = expected[:, 1].mean(0)
    torch.testing.assert_close(values(pg, session, {}, "layers[0].attn.pattern", x), expected)


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (item_of(None, layer=3), "not a value"),
        (item_of("layers[0].resid_post", head=1), "does not have a head"),
        (item_of("layers[0].attn.heads[7].z"), "heads"),
    ],
)
def test_what_cannot_be_patched_is_refused(pg: PatchableGraph, session: Session, item: Any, why: str) -> None:
    with pytest.raises((SessionError, ChosenPatchError), match=why):
        patches_of(session, "zero", [item], None, set())
