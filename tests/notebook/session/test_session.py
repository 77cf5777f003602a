"""The session: every edit makes a new version or changes nothing; undo and redo; threads; what it gives `pg.patch`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import ChosenPatchError, GraphPatchWarning, SessionError
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, ChosenPatches
from graphpatch_notebook.notebook.session.expressions import Origin
from graphpatch_notebook.notebook.session.session import Session
from tests.zoo import case_by_name
from tests.zoo.submodules import Submodules


class Pair(Submodules, linear=(4, 3)):
    def forward(self, x: Tensor, scale: float = 2.0, bias: Tensor | None = None) -> dict[str, Any]:
        hidden = torch.relu(self.linear(x)) * scale
        return {"hidden": hidden, "sum": hidden.sum()}


X = torch.ones(2, 4)


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    torch.manual_seed(0)
    return PatchableGraph(Pair(), X)


@pytest.fixture
def session(pg: PatchableGraph) -> Session:
    return Session(pg, Origin("pg", "model", "x"))


def zero(path: str = "linear.linear", **fields: Any) -> ChosenPatch:
    return ChosenPatch(path, "zero", **fields)


# --------------------------------------------------------------------------------------------------------------------
# Edits

paths = st.sampled_from(["linear.linear", "relu", "hidden", "output|hidden", "linear.weight"])


class Edits(RuleBasedStateMachine):
    """Compares a session with the plainest model of one: a list of all states there were, and a position in it."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = PatchableGraph(Pair(), X)
        self.session = Session(self.graph)
        self.states: list[list[str]] = [[]]
        self.at = 0
        self.versions = [0]
        self.session.listen(lambda: self.versions.append(self.session.chosen.version))

    def now(self) -> list[str]:
        return self.states[self.at]

    def reach(self, state: list[str]) -> None:
        if state != self.now():
            self.states[self.at + 1 :] = [state]
            self.at += 1

    @rule(path=paths)
    def add(self, path: str) -> None:
        self.session.add(zero(path))
        self.reach([*self.now(), path])

    @rule(several=st.lists(paths, max_size=3))
    def extend(self, several: list[str]) -> None:
        self.session.extend(map(zero, several))
        self.reach([*self.now(), *several])

    @rule(several=st.lists(paths, max_size=3))
    def replace_all(self, several: list[str]) -> None:
        before = [patch.path for patch in self.session.chosen.patches]
        self.session.edit(lambda _: map(zero, several))
        if before or several:
            self.states[self.at + 1 :] = [several]
            self.at += 1

    @precondition(lambda self: self.now())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(self.now()) - 1))
        self.session.remove([self.session.chosen.patches[position].number])
        self.reach([path for i, path in enumerate(self.now()) if i != position])

    @precondition(lambda self: self.now())
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        before, after = (data.draw(st.integers(0, len(self.now()) - 1)) for _ in range(2))
        self.session.move(self.session.chosen.patches[before].number, after)
        if before != after:
            state = self.now().copy()
            state.insert(after, state.pop(before))
            self.states[self.at + 1 :] = [state]
            self.at += 1

    @rule()
    def clear(self) -> None:
        self.session.clear()
        self.reach([])

    @rule()
    def undo(self) -> None:
        assert self.session.undo() == (self.at > 0)
        self.at = max(0, self.at - 1)

    @rule()
    def redo(self) -> None:
        is_last = self.at == len(self.states) - 1
        assert self.session.redo() == (not is_last)
        self.at += not is_last

    @rule(path=st.sampled_from(["linear.linaer", "output", "linear.linear.x", "|", ""]))
    def refused(self, path: str) -> None:
        before = self.session.chosen
        with pytest.raises(ChosenPatchError):
            self.session.extend([zero(), zero(path)])
        assert self.session.chosen is before

    @rule(behind=st.integers(1, 3))
    def stale(self, behind: int) -> None:
        before = self.session.chosen
        with pytest.raises(ChosenPatchError, match="have changed"):
            self.session.add(zero(), based_on=before.version - behind)
        assert self.session.chosen is before

    @invariant()
    def agrees(self) -> None:
        patches = self.session.chosen.patches
        assert [patch.path for patch in patches] == self.now()
        assert len({patch.number for patch in patches}) == len(patches)
        assert self.versions == list(range(self.session.chosen.version + 1))
        assert (self.session.can_undo, self.session.can_redo) == (self.at > 0, self.at < len(self.states) - 1)


TestEdits = Edits.TestCase


def test_listeners_are_called_until_they_are_removed_and_one_that_raises_breaks_no_edit(session: Session) -> None:
    told: list[int] = []

    def raises() -> None:
        raise ValueError

    stop_raising = session.listen(raises)
    stop = session.listen(lambda: told.append(session.chosen.version))
    with pytest.warns(GraphPatchWarning, match="ValueError"):
        added = session.add(zero())
    assert session.chosen.patches == (added,)
    stop_raising()
    session.undo()
    stop()
    session.redo()
    assert told == [1, 2]


def test_eight_threads_lose_no_edit_and_report_versions_in_order(session: Session) -> None:
    versions: list[int] = []
    session.listen(lambda: versions.append(session.chosen.version))

    def edit() -> None:
        for _ in range(25):
            number = session.add(zero()).number
            session.change(number, slice="0")
            if number % 2:
                session.remove([number])

    run_in_threads(edit, 8)
    assert versions == sorted(versions)
    assert versions[-1] == session.chosen.version
    numbers = [patch.number for patch in session.chosen.patches]
    assert len(set(numbers)) == len(numbers)
    assert all(number % 2 == 0 for number in numbers)
    while session.undo():
        pass
    assert session.chosen.patches == ()


def run_in_threads(function: Callable[[], None], count: int) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# --------------------------------------------------------------------------------------------------------------------
# Checks


@pytest.mark.parametrize(
    ("patch", "field", "message"),
    [
        (zero("linear.linaer"), "path", "linear.linear"),
        (zero("output"), "path", r"output\|hidden"),
        (zero("output|hiden"), "path", "hiden"),
        (zero("relu", slice=":, :, 0"), "slice", "relu"),
        (zero("relu", slice=":, 3:6"), "slice", "allow_empty=True"),
        (zero("scale", slice="0"), "slice", "scale"),
        (ChosenPatch("relu", "probe", name="pg"), "name", "pg"),
        (ChosenPatch("relu", "probe", name="x"), "name", "x"),
    ],
    ids=str,
)
def test_what_cannot_be_applied_is_refused(session: Session, patch: ChosenPatch, field: str, message: str) -> None:
    with pytest.raises(ChosenPatchError, match=message) as caught:
        session.add(patch)
    assert caught.value.field == field
    assert session.chosen == ChosenPatches()


@pytest.mark.parametrize(
    "text", ["0:2:9223372036854775807", "9223372036854775808", "0:99999999999999999999", "[1, -99999999999999999999]"]
)
@pytest.mark.parametrize("field", ["slice", "positions", "steps"])
def test_numbers_too_large_for_torch_are_errors_of_their_field(field: str, text: str) -> None:
    with pytest.raises(ChosenPatchError) as caught:
        ChosenPatch("relu", "zero", **{field: text})
    assert caught.value.field == field


@pytest.mark.parametrize("value", [math, math.sqrt, range, nn.ReLU(), lambda: 0])
def test_variables_with_code_are_not_filled(session: Session, value: Any) -> None:
    session.variables = lambda: {"mine": value, "results": 5}
    with pytest.raises(ChosenPatchError) as caught:
        session.add(ChosenPatch("relu", "probe", name="mine"))
    assert caught.value.field == "name"
    session.add(ChosenPatch("relu", "probe", name="results"))
    session.variables = lambda: {"results": value}
    session.change(1, is_enabled=False)  # what was chosen before can still be disabled


def test_a_check_returns_shapes_and_warnings(session: Session) -> None:
    check = session.check(zero("relu", slice="7"))
    assert (check.shape, check.sliced) == (torch.Size([2, 3]), None)
    assert "slice [7] is out of range: dimension 0 of the value recorded here" in str(check.warning)
    assert session.check(zero("scale")).shape is None
    assert session.check(zero("bias", slice="0")).sliced is None  # the example did not have it
    assert session.chosen.version == 0


def test_a_path_is_kept_in_its_usual_spelling(session: Session) -> None:
    assert session.add(zero('output|"hidden"')).path == "output|hidden"


def test_two_probes_cannot_share_a_variable(session: Session) -> None:
    session.add(ChosenPatch("relu", "probe", name="kept"))
    with pytest.raises(ChosenPatchError, match="kept"):
        session.add(ChosenPatch("hidden", "record", name="kept"))
    session.change(1, slice="0")  # its own name is no obstacle


@pytest.mark.parametrize(
    "user",
    [
        ChosenPatch("relu", "add", value="0.5 * kept"),
        ChosenPatch("relu", "custom", value="lambda t: t + kept"),
        ChosenPatch("relu", "zero", slice="kept, 0"),
        ChosenPatch("relu", "probe", slice="kept:", name="other"),
    ],
)
def test_a_patch_that_uses_what_a_probe_keeps_has_a_warning(session: Session, user: ChosenPatch) -> None:
    probe = ChosenPatch("hidden", "probe", name="kept")
    for first, second in ((probe, user), (user, probe)):
        assert "'kept'" in str(session.check(first, [second]).warning)
    assert session.check(user, [zero()]).warning is None


def test_patches_on_a_value_and_on_its_part_do_not_take_turns() -> None:
    call = case_by_name("gpt2-eager").example()
    pg = PatchableGraph(case_by_name("gpt2-eager").build(), *call.args, **call.kwargs)
    session = Session(pg)
    whole, part = "layers[0].attn.z", "layers[0].attn.heads[0].z"
    session.extend([zero(whole), zero(part)])
    assert list(session.resolve({}).patch_map) == [whole, part]
    session.add(zero(whole))
    with pytest.raises(SessionError, match="take turns"):
        session.resolve({})


# --------------------------------------------------------------------------------------------------------------------
# Use
