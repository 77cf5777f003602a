"""Law 8: exported Python, run in a fresh interpreter, gives the same numbers; in both forms, to the last bit."""

from __future__ import annotations

import ast
import contextlib
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphpatch_notebook import GraphPatchWarning, PatchableGraph
from graphpatch_notebook.errors import ChosenPatchError, ExportError, SessionError
from graphpatch_notebook.notebook.chosen import ChosenPatch
from graphpatch_notebook.notebook.codegen import export
from graphpatch_notebook.notebook.origin import Origin
from graphpatch_notebook.notebook.session import Session
from tests.laws.exports import TENSORS, Outcome, Worker, arguments_of, captured, digest, inputs_of, namespace_of
from tests.zoo import seed_all

CASES = [
    "gpt2-eager",
    "awkward-own-words",
    "awkward-shadowed-names",
    "awkward-odd-child-names",
    "awkward-nested-modules",
]
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


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.stop()


@cache
def graph(case: str) -> PatchableGraph:
    return captured(case)


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GraphPatchWarning)
            resolved = session.resolve(namespace)
            inputs = inputs_of(case, call)
            with session.graph.patch(resolved.patch_map):
                output = session.graph(*inputs.args, **inputs.kwargs)
            results = resolved.results(namespace)
    except Exception as error:
        return Outcome({}, type(error).__name__, str(error))
    return Outcome({"": digest(output), **{name: digest(results.get(name)) for name in names}})


def check(session: Session, case: str, call: str, worker: Worker) -> dict[str, Outcome]:
    """Asserts that both forms give what the session gives; returns what came of each."""
    here = expected(session, case, call)
    found: dict[str, Outcome] = {}
    for form in ("graphpatch", "hooks"):
        try:
            source = export(session, form)  # type: ignore[arg-type]
        except ExportError:
            assert form == "hooks"
            continue
        results = {"": result_variable(source)}
        results |= {str(patch.name): str(patch.name) for patch in session.chosen.enabled if patch.name is not None}
        there = found[form] = worker.run(case, call, source, results)
        if not here.error or form == "graphpatch":
            context = f"{here.error}: {here.message}\n\n{there.error}: {there.message}\n\n{source}"
            assert bool(there.error) == bool(here.error), context
            assert there.digests == here.digests, context
    return found


@pytest.mark.parametrize("case", CASES)
def test_exported_code_gives_the_same_numbers(case: str, worker: Worker) -> None:
    counts = {"graphpatch": 0, "hooks": 0}

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(st.lists(chosen_patches(case, only_boundaries=True), min_size=1, max_size=4))
    def of_boundaries(patches: list[ChosenPatch]) -> None:
        session = session_of(case, "example", patches)
        assume(session.chosen.enabled)
        for form, outcome in check(session, case, "example", worker).items():
            counts[form] += not outcome.error

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(st.lists(chosen_patches(case, only_boundaries=False), min_size=1, max_size=4))
    def of_anything(patches: list[ChosenPatch]) -> None:
        session = session_of(case, "example", patches)
        assume(session.chosen.enabled)
        check(session, case, "example", worker)

    of_boundaries()
    of_anything()
    assert min(counts.values()) >= 10, counts
