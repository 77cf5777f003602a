"""Every command of `%graphpatch`, typed into a real IPython shell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.notebook.magics.commands import commands, parsed_assignment
from graphpatch_notebook.notebook.search import parse_query
from graphpatch_notebook.notebook.session import session_file
from graphpatch_notebook.notebook.session.chosen_patch import PATCH_KINDS, ChosenPatch
from graphpatch_notebook.notebook.session.session import Session, session_of
from tests.notebook.shells import Mlp, Shell

pytestmark = pytest.mark.hosts


def chosen(shell: Shell, name: str = "pg") -> list[str]:
    return [str(patch) for patch in session_of(shell.namespace[name]).chosen.patches]


def lines(text: str) -> list[str]:
    return text.splitlines()


# --------------------------------------------------------------------------------------------------------------------
# wrap and use


def test_wrap(shell: Shell) -> None:
    ran = shell.ok("%graphpatch wrap pg = model(x)")
    assert re.fullmatch(r"pg: Mlp, 14 nodes \(\d+\.\d s\)\n", ran.out)
    assert ran.value is None
    assert isinstance(shell.namespace["pg"], PatchableGraph)
    origin = session_of(shell.namespace["pg"]).origin
    assert (origin.graph, origin.model, origin.arguments) == ("pg", "model", "x")


def test_use(pg: Shell) -> None:
    pg.ok("%graphpatch wrap other = model(x)")
    pg.ok("%graphpatch zero mul")
    assert pg.ok("%graphpatch use pg").out == "pg: Mlp, 14 nodes, 0 patches chosen\n"
    pg.ok("%graphpatch zero hidden")
    assert (chosen(pg), chosen(pg, "other")) == (["zero hidden"], ["zero mul"])
    assert pg.refused("%graphpatch use pgg") == "unknown variable 'pgg'; graphs: pg, other"
    assert pg.refused("%graphpatch use model").startswith("'model' is not a PatchableGraph but an object of Mlp")


# --------------------------------------------------------------------------------------------------------------------
# Choosing


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("zero hidden", "#1 zero hidden -> (3, 8)"),
        ("zero hidden[:, 0:4]", "#1 zero hidden[:, 0:4] -> (3, 4)"),
        ("zero hidden[ :,0 ]", "#1 zero hidden[:, 0] -> (3,)"),
        ("add mul[..., -1] 0.5 * x[0, 0]  # why", "#1 add mul[..., -1] 0.5 * x[0, 0] -> (3,)"),
        ("add hidden -1e-3", "#1 add hidden -1e-3 -> (3, 8)"),
        ('add hidden steer["a b"] + 1', '#1 add hidden steer["a b"] + 1 -> (3, 8)'),
        ("add hidden {'a': 1}['a']", "#1 add hidden {'a': 1}['a'] -> (3, 8)"),
        ("replace hidden [1, 2][0]", "#1 replace hidden [1, 2][0] -> (3, 8)"),
        ("probe hidden", "#1 probe hidden as hidden -> (3, 8)"),
        ("probe hidden[:, 0] h", "#1 probe hidden[:, 0] as h -> (3,)"),
        ("probe up.output as h", "#1 probe up.output as h -> (3, 8)"),
        ("probe down.output", "#1 probe down.output as down_output -> (3, 2)"),
        ("record mul[0] hs", "#1 record mul[0] as hs -> list of (8,)"),
        ("custom hidden lambda v: v * 2", "#1 custom hidden lambda v: v * 2 -> (3, 8)"),
        ("zero hidden --any-shape", "#1 zero hidden --any-shape -> (3, 8)"),
        ("zero --any-shape hidden[0]", "#1 zero hidden[0] --any-shape -> (8,)"),
        ("zero hidden[:, 8:16] --allow-empty", "#1 zero hidden[:, 8:16] --allow-empty -> (3, 0)"),
        ("add --steps 2 hidden 1", "#1 add hidden 1 --steps 2 -> (3, 8)"),
        ('add --steps "2, 4" hidden 1', '#1 add hidden 1 --steps "2, 4" -> (3, 8)'),
        ("add hidden 1 --steps 2, 4", '#1 add hidden 1 --steps "2, 4" -> (3, 8)'),
        (
            "add hidden 1 --positions 1: --position-dim=-2",
            "#1 add hidden 1 --positions 1: --position-dim -2 -> (3, 8)",
        ),
        ("zero hidden[:, k]", "#1 zero hidden[:, k]"),
    ],
)
def test_choosing_says_what_was_chosen(pg: Shell, line: str, said: str) -> None:
    pg.ok("steer, k = {'a b': 1}, 0")
    ran = pg.ok(f"%graphpatch {line}")
    assert ran.value is None
    assert lines(ran.out) == [said]
    # What is said can be typed.
    pg.ok("%graphpatch clear")
    pg.ok(f"%graphpatch {said.partition(' ')[2].partition(' -> ')[0]}")
    assert len(chosen(pg)) == 1


# --------------------------------------------------------------------------------------------------------------------
# Editing


@pytest.fixture
def four(pg: Shell) -> Shell:
    for line in ("zero hidden[:, 0]", "add hidden 1", "probe down.output as out", "zero up.bias"):
        pg.ok(f"%graphpatch {line}")
    return pg


@pytest.mark.parametrize(
    ("specs", "left"),
    [
        ("#2", ["zero hidden[:, 0]", "probe down.output as out", "zero up.bias"]),
        ("1 #4  # two", ["add hidden 1", "probe down.output as out"]),
        ("hidden", ["probe down.output as out", "zero up.bias"]),
        ("hidden[:,0]", ["add hidden 1", "probe down.output as out", "zero up.bias"]),
        ("*.bias down.*", ["zero hidden[:, 0]", "add hidden 1"]),
    ],
)
def test_rm(four: Shell, specs: str, left: list[str]) -> None:
    before = chosen(four)
    ran = four.ok(f"%graphpatch rm {specs}")
    assert ran.value is None
    assert chosen(four) == left
    removed = [text for text in before if text not in left]
    assert [re.sub(r"removed #\d ", "", line) for line in lines(ran.out)] == removed
    four.ok("%graphpatch undo")  # one step
    assert chosen(four) == before


# --------------------------------------------------------------------------------------------------------------------
# Looking


def test_status(plain_shell: Shell) -> None:
    plain_shell.ok("%load_ext graphpatch_notebook")
    assert "%graphpatch wrap pg = MODEL(EXAMPLE INPUTS)" in repr(plain_shell.ok("%graphpatch").value)
    plain_shell.ok("from tests.notebook.shells import Mlp\nimport torch\nnet = Mlp()")
    assert "%graphpatch wrap pg = net(EXAMPLE INPUTS)" in repr(plain_shell.ok("%graphpatch").value)
    plain_shell.ok("%graphpatch wrap g = net(torch.ones(3, 4))")
    status = lines(repr(plain_shell.ok("%graphpatch").value))
    assert status[0] == "g: Mlp, 14 nodes, 0 patches chosen"
    assert any("%graphpatch zero PATH" in line for line in status)
    plain_shell.ok("%graphpatch zero hidden[:, 0]")
    status = lines(repr(plain_shell.ok("%graphpatch").value))
    assert status[0] == "g: Mlp, 14 nodes, 1 patch chosen"
    assert any("%%graphpatch" in line for line in status)
    plain_shell.ok("%graphpatch wrap h = net(torch.ones(3, 4))")
    assert "other graphs: g" in repr(plain_shell.ok("%graphpatch").value)
    plain_shell.ok("%unload_ext graphpatch_notebook")


def test_show_code_and_shape(pg: Shell) -> None:
    assert repr(pg.ok("%graphpatch show").value) == repr(pg.namespace["pg"].graph)
    assert repr(pg.ok("tree = %graphpatch show up  # it\ntree").value) == repr(pg.namespace["pg"].graph.up)
    assert "hidden = torch.relu(self.up(x))" in str(pg.ok("%graphpatch code hidden").value)
    assert "linear" in str(pg.ok("%graphpatch code up").value)
    assert pg.ok("%graphpatch shape hidden").value == torch.Size([3, 8])
    assert pg.ok("%graphpatch shape hidden[:, 0:3]").value == (3, 3)
    assert pg.ok("%graphpatch shape up").value["weight"] == torch.Size([8, 4])
    assert pg.ok("%graphpatch show <root>").value.selected_path == ""


def test_find(four: Shell) -> None:
    assert four.ok("%graphpatch find op:linear # both").value.paths == ["up.linear", "down.linear"]
    assert four.ok("found = %graphpatch find is:patched\nfound").value.paths == ["up.bias", "hidden", "down.output"]
    assert len(four.ok("%graphpatch find").value) == 14


def test_help(pg: Shell) -> None:
    overview = pg.ok("%graphpatch help").out
    assert pg.ok("%graphpatch -h").out == overview
    for name, (parser, _) in commands().items():
        assert parser.line in overview
        said = pg.ok(f"%graphpatch help {name}").out
        assert said == pg.ok(f"%graphpatch {name} --help").out
        assert said.startswith(f"usage: {parser.line}\n\n{parser.description}\n")
        assert all(f"  {option}" in said for option in parser.options)
    assert "--only" in pg.ok("%graphpatch help %%graphpatch").out
    assert "Choose patches for a PyTorch model" in pg.ok("%graphpatch?").out


@pytest.mark.parametrize("name", commands())
def test_examples_can_be_typed(name: str) -> None:
    parser, _ = commands()[name]
    for example in re.findall(rf"^  %graphpatch {name}\b(.*)", str(parser.epilog), re.MULTILINE):
        found = parser.parse_line(example)
        if name in PATCH_KINDS:
            field, default = ("name", "free") if PATCH_KINDS[name].keeps else ("value", None)
            typed = " ".join(getattr(found, field, [])).replace("{i}", "0")
            texts = {what: text for what, text in vars(found).items() if what not in ("path", "name", "value")}
            assert ChosenPatch("x", name, **{field: typed or default}, **texts).kind == name  # type: ignore[arg-type]
        elif name == "find":
            assert parse_query(example)
        elif name == "wrap":
            assert parsed_assignment(example)[0] == "pg"


# --------------------------------------------------------------------------------------------------------------------
# Leaving


def test_export_to_a_file(four: Shell, tmp_path: Path) -> None:
    file = tmp_path / "my patches.py"
    assert four.ok(f'%graphpatch export -o "{file}"').out == f"the code is in {file}\n"
    scope = {"model": Mlp(), "x": torch.ones(3, 4)}
    exec(compile(file.read_text("utf8"), str(file), "exec"), scope)
    assert torch.equal(scope["out"], four.ok("%%graphpatch\npg(x)").value)
    assert "would be overwritten" in four.refused(f"%graphpatch export -o '{file}'")
    four.ok(f'%graphpatch export -o "{file}" --force')
    assert "cannot be written" in four.refused(f"%graphpatch export -o {tmp_path}/nope/a.py")


def test_save_and_load(four: Shell, tmp_path: Path) -> None:
    file = tmp_path / "patches.json"
    assert four.ok(f"%graphpatch save {file}").out == f"saved 4 patches to {file}\n"
    before = chosen(four)
    four.ok("%graphpatch clear")
    said = lines(four.ok(f"%graphpatch load {file}").out)
    assert said == [f"loaded 4 patches from {file}"]
    assert chosen(four) == before  # under numbers that none of them had before
    four.ok(f"%graphpatch save '{file}'")
    file.write_text("{}", "utf8")
    assert str(file) in four.refused(f"%graphpatch save {file}")
    four.ok(f"%graphpatch save {file} --force")
    assert "cannot be read" in four.refused(f"%graphpatch load {tmp_path}/nope.json")
    assert chosen(four) == before


def test_loading_says_which_variables_the_next_run_overwrites(four: Shell, tmp_path: Path) -> None:
    file, session = tmp_path / "patches.json", Session(four.namespace["pg"])
    session.extend([ChosenPatch("up.output", "probe", name="results"), ChosenPatch("output", "probe", name="new")])
    session_file.save(session, file)
    four.ok("results = 5")
    assert [line.split()[-1] for line in lines(four.ok(f"%graphpatch load {file}").out)[1:]] == ["results"]
    four.ok("%%graphpatch\npg(x)")
    assert len(lines(four.ok(f"%graphpatch load {file}").out)) == 1  # the variable holds what the probe kept
    session.change(2, name="torch")
    session.change(1, name="lines")
    session_file.save(session, file)
    four.ok("def lines(): pass")
    before, refusal = chosen(four), four.refused(f"%graphpatch load {file}")
    assert all(repr(name) in refusal for name in ("torch", "lines"))
    assert "'torch'" in four.refused("%graphpatch probe up.output torch")
    assert chosen(four) == before


LONG = "a" * 4000


@pytest.mark.parametrize(
    "line",
    [
        f"add up.output '{LONG}'",
        f"probe up.output {LONG}-",
        f"zero up.{LONG}",
        f"zero up.output --steps {LONG}",
        f"zero up.output --positions {LONG}",
        f"zero up.output[{LONG}()]",
        f"rm {LONG}",
    ],
    ids=lambda line: line[:30],
)
def test_long_values_are_cut_in_messages(four: Shell, line: str) -> None:
    assert len(four.refused(f"%graphpatch {line}")) < 600


def test_code_of_others_is_shown_and_not_run(four: Shell, tmp_path: Path) -> None:
    ours, file, canary = tmp_path / "ours.json", tmp_path / "their patches.json", tmp_path / "canary"
    code = f"__import__('pathlib').Path({str(canary)!r}).touch() or x[0, 0] * 2"
    four.ok(f"%graphpatch add down.output {code}")
    four.ok("%graphpatch add down.output 2 * x[0, 0]")
    four.ok(f"%graphpatch save {ours}")
    assert four.ok(f"%graphpatch load {ours}").out.startswith("loaded 6 patches")  # what was saved here is trusted
    file.write_text(ours.read_text("utf8").replace("2 * x", "4 * x"), "utf8")

    before, refused = chosen(four), four.refused(f"%graphpatch load '{file}'")
    assert f"down.output: {code}" in refused
    assert "2 * x" not in refused
    assert "--trust" in refused
    assert chosen(four) == before
    four.ok("%%graphpatch --only up.bias\npg(x)")
    assert not canary.exists()

    four.ok(f"%graphpatch load '{file}' --trust")
    four.ok("%%graphpatch --only down.output\npg(x)")
    assert canary.exists()
    four.ok(f"%graphpatch load '{file}'")


# --------------------------------------------------------------------------------------------------------------------
# All kinds, against plain patches


def test_patches_follow_the_variable_to_another_graph(pg: Shell) -> None:
    """Whoever runs the cell that makes the graph again keeps the choice, however that cell makes it."""
    pg.ok("%graphpatch zero hidden[:, 0]")
    pg.ok("%graphpatch probe mul kept")
    made = pg.ok("from graphpatch_notebook import PatchableGraph\npg = PatchableGraph(model, x)")
    assert "2 patches carried over" in made.out
    before = chosen(pg)
    assert "carried" not in pg.ok("%graphpatch list").out
    assert chosen(pg) == before
    assert pg.ok("%%graphpatch\n_ = pg(x)\nkept[:, 0].sum().item()").value == 0
    made = pg.ok("pg = PatchableGraph(torch.nn.ReLU(), x)")
    assert "dropped #1 zero hidden[:, 0]: no node 'hidden'" in made.out
    ran = pg.ok("%%graphpatch\npg(x)")
    assert torch.equal(ran.value, torch.relu(pg.namespace["x"]))
