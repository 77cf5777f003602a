"""Completion, asked of the completer of a real IPython shell, as a terminal or a kernel asks it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.core.completer import CompletionContext, provisionalcompleter, rectify_completions

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.inspection.node_path import Location, is_child
from graphpatch_notebook.inspection.resolution import resolve
from graphpatch_notebook.notebook.completion import PathCompleter, next_segments
from graphpatch_notebook.notebook.magics.commands import commands
from tests.notebook.hostile import hostile_graph
from tests.notebook.shells import Shell, opened
from tests.zoo import case_by_name

pytestmark = pytest.mark.hosts

hostile = cache(hostile_graph)


@pytest.fixture(scope="module")
def typing() -> Iterator[Shell]:
    """A shell with the extension, a graph of hostile names, and variables."""
    with opened() as shell:
        shell.ok("%load_ext graphpatch_notebook")
        shell.ip.Completer.use_jedi = False
        shell.namespace.update(
            pg=hostile(),
            graphs={"first": hostile()},
            inside=hostile().graph.output,
            steer=torch.ones(2),
            stride=2,
            model=torch.nn.ReLU(),
            Path=Path,
        )
        yield shell


@pytest.fixture(params=[True, False], ids=["jedi", "no jedi"])
def also_jedi(typing: Shell, request: pytest.FixtureRequest) -> Iterator[None]:
    typing.ip.Completer.use_jedi = request.param
    yield
    typing.ip.Completer.use_jedi = False


def completed(shell: Shell, text: str, after: str = "") -> list[str]:
    """Returns what the text becomes by each completion."""
    with provisionalcompleter():
        found = rectify_completions(text + after, shell.ip.Completer.completions(text + after, len(text)))
        return [text[: completion.start] + completion.text for completion in found]


def texts(shell: Shell, text: str) -> list[str]:
    with provisionalcompleter():
        return [completion.text for completion in shell.ip.Completer.completions(text, len(text))]


def matched(shell: Shell, text: str) -> dict[str, Any]:
    """Returns what the matcher of this package says, alone."""
    context = CompletionContext(token="", full_text=text, cursor_position=0, cursor_line=text.count("\n"), limit=None)
    context.cursor_position = len(context.line_with_cursor)
    return shell.ip.Completer.custom_matchers[-1](context)


# --------------------------------------------------------------------------------------------------------------------
# Magics

BLOCKS = ["blocks_0", "blocks_1", "blocks_2"]


@pytest.mark.usefixtures("also_jedi")
@pytest.mark.parametrize("before", ["%graphpatch ", "x = %graphpatch ", "if 1:\n    %graphpatch ", "graphpatch "])
def test_commands_and_paths_are_completed_wherever_the_magic_is_allowed(typing: Shell, before: str) -> None:
    assert completed(typing, f"{before}ze") == [f"{before}zero"]
    assert completed(typing, f"{before}zero bl") == [f"{before}zero {name}." for name in BLOCKS]
    assert completed(typing, f"{before}code bl") == [f"{before}code {name}" for name in BLOCKS]
    assert completed(typing, f"%%graphpatch pg\nx = 1\n{before}zero bl")[0].endswith("zero blocks_0.")


def test_every_command_is_completed_and_none_else(typing: Shell) -> None:
    assert texts(typing, "%graphpatch ") == list(commands())
    assert texts(typing, "%graphpatch help sav") == ["save"]
    for name, (parser, _) in commands().items():
        assert set(texts(typing, f"%graphpatch {name} x -")) >= set(parser.options) or name == "find"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("zero blocks_0.", ["output", "input", "weight", "bias", "linear"]),
        ("zero blocks_0.li", ["linear"]),
        ("zero outp", ["output|"]),
        ("zero output|inn", ["inner."]),
        ("zero output|inner.", ["sub_0.", "sub_1"]),
        ("zero output|inner.sub_0.", ['"deep.est"']),
        ('zero output|"two w', ['"two words"']),
        ("zero output|it", ["it's"]),
        ("zero output|größ", ["größe"]),
        ("zero output|lam", ["lambda"]),
        ("code output|inner.sub_0.", ['"deep.est"']),
        ("code skip", ["skipped"]),
        ("zero BLOCKS_1", ["blocks_1."]),  # what begins otherwise is offered where nothing begins so
        ("zero ocks_1", ["blocks_1."]),
        ("zero size_sh", ["size_shape|"]),  # sizes by their names only
        ("zero relu[:, str", ["stride"]),
        ("add relu 0.5 * ste", ["steer"]),
        ("add relu[:, -1] f(ste", ["steer"]),
        ("add relu 1 --any", ["--any-shape"]),
        ("add relu 1 --steps ", ["prefill", "decoding"]),
        ("zero relu --steps d", ["decoding"]),
        ("use ", ["pg"]),
        ("wrap new = mo", ["model"]),
        ("wrap new = model(ste", ["steer"]),
        ("find is:patch", ["patched"]),
        ("find attn -op:batch", ["batch_norm"]),
        ("find sh", ["shape:"]),
        ("find blo", ["blocks_0", "blocks_1", "blocks_2"]),
        ("find mlp -batch_n", ["batch_norm"]),
        ('zero "bl', ["blocks_0.", "blocks_1.", "blocks_2."]),
        ('zero "blocks_0.li', ["linear"]),
        ("zero relu[:, 0]", ["relu[:, 0] "]),  # nothing that would stick to the bracket
        ("add blocks_0.linear[:, [0, 1]]", ["blocks_0.linear[:, [0, 1]] "]),
        ("probe blocks_0.linear ", ["blocks_0_linear"]),
        ("record --steps 1 blocks_0.linear[:, 0] bl", ["blocks_0_linear"]),
        ("probe relu other ", ["--steps", "--positions", "--position-dim", "--any-shape", "--allow-empty"]),
        ("zero relu ", ["--steps", "--positions", "--position-dim", "--any-shape", "--allow-empty"]),
        ("find op:zzzz", ["op:zzzz"]),  # rather than what IPython makes of it
        ("export --c", ["--cell"]),
    ],
)
def test_arguments_of_commands(typing: Shell, typed: str, expected: list[str]) -> None:
    assert texts(typing, f"%graphpatch {typed}") == expected


def test_values_are_variables_of_the_user_likely_ones_first(typing: Shell) -> None:
    offered = texts(typing, "%graphpatch add relu ")
    assert offered[:2] == ["steer", "stride"]
    assert "pg" in offered
    assert not {"get_ipython", "exit", "In", "Out", "_"} & set(offered)


def test_the_first_line_of_a_cell(typing: Shell) -> None:
    assert texts(typing, "%%graphpatch p") == ["pg"]
    assert texts(typing, "%%graphpatch pg --on") == ["--only"]
    assert texts(typing, "\n%%graphpatch p") == ["pg"]


# --------------------------------------------------------------------------------------------------------------------
# Python text


@pytest.mark.parametrize(
    "before",
    [
        'pg.patch({"',
        "pg.patch({'",
        "with pg.patch({",
        'pg.patch(patch_map={"',
        'pg.patch(\n    {\n        "x": [ZeroPatch(), AddPatch(value=f(1)[0])],\n        "',
        'pg.patch({"x": {"a": 1}, "',
        'x = """a "quoted" {text}"""\npg.patch({"',
        "# it's a comment\npg.patch({'",
        "!echo don't\npg.patch({'",
        "y = %graphpatch find \"x\npg.patch({'",
        "%timeit pg.patch({'",
        "%%time\npg.patch({'",
        "%%graphpatch pg\npg.patch({'",
        'pg.nodes["',
        "pg.graph['",
        'pg.graph._shape["',
    ],
)
def test_keys_of_patch_maps_and_items(typing: Shell, before: str) -> None:
    before = before if before.endswith(("'", '"')) else f"{before}'"
    dot = "" if ".graph" in before else "."
    assert completed(typing, f"{before}bl") == [f"{before}{name}{dot}" for name in BLOCKS]
    assert f"{before}blocks_1.linear" in completed(typing, f"{before}blocks_1.", after='"})')


@pytest.mark.usefixtures("also_jedi")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pg.graph.bl", BLOCKS),
        ("pg.graph.blocks_0.l", ["linear"]),
        ("pg.graph.output.inner.", ["sub_0", "sub_1", "_code", "_shape"]),
        ("pg.graph['blocks_0'].l", ["linear"]),
        ("pg.graph['blocks_0']['l", ["linear"]),
        ("x = [pg.graph._shape.blocks_0.l", ["linear"]),
    ],
)
def test_attributes_and_items_of_the_graph(typing: Shell, text: str, expected: list[str]) -> None:
    assert texts(typing, text) == expected


@pytest.mark.usefixtures("also_jedi")
@pytest.mark.parametrize(
    "text",
    [
        "pri",
        "pg.patch({'x': ['bl",
        "pg.patch({'x': 'bl",
        "pg.patch(['bl",
        "pg.patches({'bl",
        "f(pg).patch({'bl",
        "unknown.patch({'bl",
        "{'bl",
        "pg.nodes['x', 'bl",
        "pg.patch({'unknown.",
        "pg.patch({'blocks_0|",
        "pg.patch({'x.y.z",
        "%graphpatch clear bl",
        "%graphpatch unknown bl",
        "%timeit bl",
        "other = graphpatch zero bl",
        "x = 1\n%%graphpatch p",
    ],
)
def test_where_there_is_nothing_to_say_others_speak(typing: Shell, text: str) -> None:
    assert matched(typing, text) == {"completions": [], "suppress": False}
    assert not {f"{name}{dot}" for name in BLOCKS for dot in (".", "")} & set(texts(typing, text))
    if text == "pri":
        assert "print" in texts(typing, text)


class Trap:
    """Every access is noticed."""

    touched = False

    def __getattribute__(self, name: str) -> Any:
        Trap.touched = Trap.touched or name not in ("__class__", "__dict__", "touched")
        return object.__getattribute__(self, name)

    @property
    def graph(self) -> Any:
        raise AssertionError("a property ran")


def test_no_code_of_the_user_runs(typing: Shell) -> None:
    typing.namespace["trap"] = Trap()
    Trap.touched = False
    for text in ("trap.patch({'", "trap.graph.patch({'", "trap.graph['", "trap.pg.nodes['", "%graphpatch add relu tr"):
        expected = ["trap"] if text.startswith("%") else []
        assert [completion.text for completion in matched(typing, text)["completions"]] == expected
    assert not Trap.touched


# --------------------------------------------------------------------------------------------------------------------
# In general


def leaf_paths(root: Location, *, patchable: bool = True) -> Iterator[str]:
    """Yields all paths to which one comes by taking offers, one after the other."""
    todo = [""]
    while todo:
        typed = todo.pop()
        start, offers = next_segments(root, typed, patchable=patchable, limit=10_000)
        assert start == len(typed)
        for offer in offers:
            path = typed + offer.text
            start, again = next_segments(root, path, patchable=patchable)
            if path.endswith((".", "|")):
                assert again
                todo.append(path)
            else:
                assert path in [path[:start] + other.text for other in again]
                yield path


@pytest.mark.parametrize("name", ["gpt2-eager", "llama-eager", "bert-eager", "hostile"])
def test_taking_offers_leads_to_every_value_that_can_be_patched(name: str) -> None:
    if name == "hostile":
        pg = hostile()
    else:
        case = case_by_name(name)
        call = case.example()
        pg = PatchableGraph(case.build(), *call.args, **call.kwargs)
    root = pg.nodes.root
    offered = list(leaf_paths(Location.of_root(root)))
    assert len(offered) == len(set(offered))
    targets = [resolve(root, path) for path in offered]  # which raises where it leads to nothing
    given = {target.path for target in targets if target.path in pg.nodes}
    assert all(target.node.kind == "input" for target in targets if target.path not in pg.nodes)
    hidden = {path for path, meta in pg.nodes.items() if meta.is_size or not is_child(resolve(root, path).node)}
    assert given == set(pg.nodes) - hidden


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("pg.atch({['\"\\|# \n%!,:=rf}])") | st.characters(), max_size=40))
def test_any_text_is_completed_or_not(text: str) -> None:
    shell = types.SimpleNamespace(user_ns={"pg": hostile()}, user_ns_hidden={}, automagic=True)
    for before in ("", "pg.patch({", "%graphpatch ", "%graphpatch zero "):
        start, _ = PathCompleter(shell, lambda: None).offers((before + text).split("\n"))
        assert 0 <= start <= len(before + text)
