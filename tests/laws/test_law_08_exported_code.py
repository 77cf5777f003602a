"""Law 8: exported Python, run in a fresh interpreter, gives the same numbers, to the last bit."""

from __future__ import annotations

import ast
import contextlib
import random
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpatch_notebook import GraphPatchWarning, PatchableGraph
from graphpatch_notebook.errors import ChosenPatchError, SessionError
from graphpatch_notebook.notebook.export import export
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import Origin
from graphpatch_notebook.notebook.session.session import Session
from tests.laws.exports import TENSORS, Outcome, Worker, arguments_of, captured, digest, inputs_of, namespace_of
from tests.notebook.replies import kept_by
from tests.zoo import seed_all

CASES = [
    "gpt2-eager",
    "torch-lstm-cell",
    "awkward-called-by-steps",
    "awkward-calls-parent",
    "awkward-dataclasses",
    "awkward-in-place",
    "awkward-named-tuples",
    "awkward-nested-containers",
    "awkward-nested-modules",
    "awkward-nones",
    "awkward-odd-child-names",
    "awkward-random-ops",
    "awkward-scalar-inputs",
    "awkward-shadowed-names",
    "awkward-shared-submodule",
    "awkward-signatures",
    "awkward-user-hooks",
]
UNFIRED = ("not fired", "repeated call")
VALUES = [
    "0.5",
    "-2",
    "True",
    "1j",
    "float('nan')",
    "-steering",
    "0.5 * steering",
    "table['key']",
    "torch.randn(())",
    "torch.rand(()) + output",
    "(steering +\n 1)  # two lines",
    "module if module > 0 else args",
    "[hook for hook in (hooks, kept)][0]",
    "sum(calls for calls in (1, 2))",
    "input",
    *TENSORS,
]
FUNCTIONS = [
    "double",
    "torch.neg",
    "lambda output: output * 2",
    "lambda t, hook=2: t + hook * kept",
    "(lambda f: f)(abs)",
]
SLICES = ["0", "...", "-1", ":, -1", "..., 0", "tok", "..., tok:", "[0, -1]", "None", ":1", "0, ..., ::2", "copy"]
NAMES = [
    "hidden",
    "acts",
    "output",
    "hooks",
    "calls",
    "kept",
    "module",
    "result",
    "steering",
    "tok",
    "torch",
    "Counter",
]


# Tests of one model of the zoo stay together, so those of this file do not; all in one process share one interpreter.
@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.stop()


@cache
def graph(case: str) -> PatchableGraph:
    state = random.getstate()  # which hypothesis wants to stay as it is
    try:
        return captured(case)
    finally:
        random.setstate(state)


@cache
def paths(case: str) -> tuple[list[str], list[str]]:
    """The paths at the boundaries of modules, and all others."""
    nodes = graph(case).nodes
    boundary = [path for path, meta in nodes.items() if meta.kind in ("input", "output")]
    return boundary, [path for path in nodes if path not in set(boundary)]


@st.composite
def chosen_patches(draw: Any, case: str, *, only_boundaries: bool) -> ChosenPatch:
    boundary, inner = paths(case)
    path = draw(st.sampled_from(boundary if only_boundaries or not inner else boundary + inner))
    kind = draw(st.sampled_from(["zero", "add", "replace", "probe", "record", "custom"]))
    value = {"add": VALUES, "replace": VALUES, "custom": FUNCTIONS}.get(kind)
    return ChosenPatch(
        path,
        kind,
        slice=draw(st.none() | st.sampled_from(SLICES)),
        value=None if value is None else draw(st.sampled_from(value)),
        name=draw(st.sampled_from(NAMES)) if kind in ("probe", "record") else None,
        is_enabled=draw(st.sampled_from([True, True, True, False])),
        any_shape=draw(st.sampled_from([False, False, True])),
        steps=None if only_boundaries else draw(st.sampled_from([None, None, "prefill", "0", "1:"])),
        positions=None if only_boundaries else draw(st.sampled_from([None, None, "1", "0, 2", "1:", "-1"])),
    )


def session_of(case: str, call: str, patches: list[ChosenPatch]) -> Session:
    session = Session(graph(case), Origin("pg", "model", arguments_of(case, call)))
    for patch in patches:
        with contextlib.suppress(ChosenPatchError):
            session.add(patch)
    return session


def result_variable(source: str) -> str:
    """Returns the variable that the code puts the output of the model in."""
    calls = [
        node.targets[0].id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id in ("pg", "model")
    ]
    assert len(calls) == 1, source
    return calls[0]


def expected(session: Session, case: str, call: str) -> Outcome:
    """Returns what the session itself gives here."""
    namespace = {**namespace_of(case, call), "torch": torch, "pg": session.graph, "model": session.graph._module}
    names = [str(patch.name) for patch in session.chosen.enabled if patch.name is not None]
    seed_all()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", GraphPatchWarning)
            resolved = session.resolve(namespace)
            inputs = inputs_of(case, call)
            with session.graph.patch(resolved.patch_map):
                output = session.graph(*inputs.args, **inputs.kwargs)
            results = kept_by(resolved, namespace)
    except Exception as error:
        return Outcome({}, type(error).__name__, str(error))
    digests = {"": digest(output), **{name: digest(results.get(name)) for name in names}}
    return Outcome(digests, has_unfired=any(getattr(w.message, "kind", "") in UNFIRED for w in told))


def check(session: Session, case: str, call: str, worker: Worker) -> Outcome:
    """Asserts that the code gives what the session gives; returns what came of it.

    Where a patch never fires, or cannot be applied, which is told by a warning or an error, code may raise instead.
    """
    here = expected(session, case, call)
    source = export(session)
    results = {"": result_variable(source)}
    results |= {str(patch.name): str(patch.name) for patch in session.chosen.enabled if patch.name is not None}
    there = worker.run(case, call, source, results)
    is_told = here.error == there.error or (here.has_unfired and there.error == "TypeError")
    assert there.digests == here.digests or is_told, f"{here}\n\n{there}\n\n{source}"
    return there


@pytest.mark.parametrize("case", CASES)
def test_exported_code_gives_the_same_numbers(case: str, worker: Worker) -> None:
    equal = 0

    def compared(patches: list[ChosenPatch]) -> None:
        nonlocal equal
        session = session_of(case, "example", patches)
        if session.chosen.enabled:
            equal += not check(session, case, "example", worker).error

    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(st.lists(chosen_patches(case, only_boundaries=True), min_size=1, max_size=4))
    def of_boundaries(patches: list[ChosenPatch]) -> None:
        compared(patches)

    @settings(max_examples=4, deadline=None, derandomize=True, database=None)
    @given(st.lists(chosen_patches(case, only_boundaries=False), min_size=1, max_size=4))
    def of_anything(patches: list[ChosenPatch]) -> None:
        compared(patches)

    of_boundaries()
    of_anything()
    assert equal >= 5


VARIANTS = [
    ("gpt2-eager", "left_padding"),
    ("awkward-shadowed-names", "keywords"),
    ("awkward-odd-child-names", "other_size"),
    ("torch-lstm-cell", "other_size"),
    ("awkward-assignment-forms", "flag"),
    ("awkward-signatures", "defaults_given"),
    ("awkward-signatures", "more"),
]


@pytest.mark.parametrize(("case", "call"), VARIANTS)
def test_other_inputs_than_the_examples(case: str, call: str, worker: Worker) -> None:
    @settings(max_examples=6, deadline=None, derandomize=True, database=None)
    @given(st.lists(chosen_patches(case, only_boundaries=True), min_size=1, max_size=3))
    def of_boundaries(patches: list[ChosenPatch]) -> None:
        session = session_of(case, call, patches)
        if session.chosen.enabled:
            check(session, case, call, worker)

    of_boundaries()


def test_parts_positions_variables_and_functions_of_the_users(worker: Worker) -> None:
    case = "gpt2-eager"
    patches = [
        ChosenPatch("transformer.h_0.attn.output|sub_0", "add", slice=":, -1", value="0.5 * steering"),
        ChosenPatch("layers[1].mlp_out[:, :, 2:]", "custom", value="double", slice="..., 3:"),
        ChosenPatch("layers[1].resid_post", "probe", slice=":, tok", name="kept"),
        ChosenPatch("lm_head.output", "replace", slice="0, 0", value="torch.randn(())"),
    ]
    session = session_of(case, "example", patches)
    assert len(session.chosen.enabled) == 4
    assert check(session, case, "example", worker).digests.keys() == {"", "kept"}


FRAGMENTS = [
    "'", '"', "\\", "\n", "#", "(", ")", "[", "]", "{", "}", ",", ";", ":", "=", " ", "f'", "r'", "lambda: ", "x", "1",
    "{x}", "'''", '"""', "*", "**", "->", ":=", "\t", "\u2028", "\x0c", "\ud800", "ａ", "await ", "yield ", "\0", "\r",
]  # fmt: skip
ATOMS = [
    "x", "1", "-1.5e-3", "'\"'", '"\'"', "'\\n'", "'''a\nb'''", "f'{x!r}'", "(x)", "(lambda: x)", "{'a': 1}['a']",
    "[y for y in x]", "f(*x, **y)",
    "__import__('pathlib').Path(canary).touch()", "ａ", "'\u202e'", "x[:, ...]", "(\nx\n)", "x # '\n", "(x, # (\n)",
]  # fmt: skip
JOINTS = [" + ", "\r+ ", "\n+ ", "+\n", ", ", " if x else ", " # )\n", ".", "][", ") + (", "=", ": ", "\f"]
WHY = {"not the arguments of a call", "cannot await, yield or assign", "cannot be written on one line"}
BROKEN = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=8).map("".join)
WHOLE = st.lists(st.sampled_from(ATOMS) | st.sampled_from(JOINTS), min_size=1, max_size=5).map("".join)
TEXTS = WHOLE | WHOLE.map("({})".format) | BROKEN


def test_hostile_texts_are_refused_or_come_out_as_they_are(tmp_path: Path) -> None:
    case = "awkward-odd-child-names"
    boundary, _ = paths(case)
    accepted, refused = 0, set()

    @settings(max_examples=250, deadline=None, derandomize=True, database=None)
    @given(path=st.sampled_from(boundary), value=TEXTS, index=TEXTS, name=TEXTS, arguments=TEXTS)
    def of_texts(path: str, value: str, index: str, name: str, arguments: str) -> None:
        nonlocal accepted
        try:
            origin = Origin("pg", "model", arguments)
        except SessionError:
            origin = Origin("pg", "model", "x")
        session = Session(graph(case), origin)
        for fields in (
            {"value": value, "slice": index},
            {"value": value},
            {"name": name, "slice": index},
            {"name": name},
        ):
            kind = "probe" if "name" in fields else "replace"
            with contextlib.suppress(ChosenPatchError):
                session.add(ChosenPatch(path, kind, **fields))  # type: ignore[arg-type]
        if not session.chosen.enabled:
            return
        try:
            source = export(session)
        except SessionError as error:
            refused.add(next((why for why in WHY if why in str(error)), str(error)))
            return
        tree = ast.parse(source)
        accepted += 1
        written = [ast.dump(node) for node in ast.walk(tree) if isinstance(node, ast.expr)]
        for patch in session.chosen.enabled:
            if patch.value is not None:
                assert ast.dump(ast.parse(patch.value, mode="eval").body) in written

    of_texts()
    assert accepted >= 50
    assert refused <= WHY
    assert not (tmp_path / "canary").exists()
