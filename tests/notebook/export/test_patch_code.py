"""Chosen patches as Python that uses graphpatch: what a reader of the code gets to see."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import ExportError
from graphpatch_notebook.notebook.export import export
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import Origin
from graphpatch_notebook.notebook.session.session import Session


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.up(x).relu()
        return self.down(hidden), hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
        kept = []
        for layer in self.layers:
            x, hidden = layer(x)
            kept.append(hidden)
        return {"last": x * scale, "first hidden": kept[0]}


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    torch.manual_seed(0)
    return PatchableGraph(Model(), torch.ones(2, 3, 4))


@pytest.fixture
def session(pg: PatchableGraph) -> Session:
    return Session(pg, Origin("pg", "model", "x"))


def patch(path: str, kind: str, **fields: object) -> ChosenPatch:
    return ChosenPatch(path, kind, **fields)  # type: ignore[arg-type]


def is_clean(source: str) -> bool:
    """Whether the source compiles, and ruff finds nothing in it but names from outside."""
    compile(source, "<exported>", "exec")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F", "--ignore", "F821", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return True


def test_one_patch(session: Session) -> None:
    session.add(patch("layers_0.output|sub_0", "zero"))

    assert export(session) == (
        """\
# Needs: pg, x
from graphpatch import ZeroPatch

with pg.patch({"layers_0.output|sub_0": ZeroPatch()}):
    output = pg(x)
"""
    )


def test_several_patches_on_a_node_run_in_order_and_probes_are_named(session: Session) -> None:
    session.add(patch("layers_0.output|sub_0", "zero", slice=":, -1"))
    session.add(patch("layers_1.down.linear", "add", value="0.5 * steering", slice="..., 2:"))
    session.add(patch("layers_0.output|sub_0", "probe", slice=":, -1", name="hidden"))

    source = export(session)

    assert source == (
        """\
# Needs: pg, steering, x
from graphpatch import AddPatch, ProbePatch, ZeroPatch

hidden_probe = ProbePatch()
with pg.patch({
    "layers_0.output|sub_0": [ZeroPatch(slice=(slice(None), -1)), hidden_probe],
    "layers_1.down.linear": AddPatch(value=0.5 * steering, slice=(..., slice(2, None))),
}):
    output = pg(x)

hidden = hidden_probe.activation[:, -1]
"""
    )
    assert is_clean(source)


def test_records_functions_and_shapes(session: Session) -> None:
    session.add(patch("layers_0.up.linear", "record", name="acts", slice="0"))
    session.add(patch("layers_0.up.linear", "custom", value="torch.tanh", any_shape=True, allow_empty=True))
    session.add(patch("layers_1.up.linear", "custom", value="lambda t: t.flip(-1)", slice="tok, 1:3"))
    session.add(patch("x", "replace", value="torch.zeros(4)", slice="0, 1"))

    source = export(session)

    assert source == (
        """\
# Needs: pg, tok, x
import torch
from graphpatch import CustomPatch, RecordPatch, ReplacePatch

acts_record = RecordPatch()
with pg.patch({
    "layers_0.up.linear": [
        acts_record,
        CustomPatch(custom_op=torch.tanh, any_shape=True, allow_empty=True),
    ],
    "layers_1.up.linear": CustomPatch(
        custom_op=lambda t: t.flip(-1),
        slice=(tok, slice(1, 3)),
    ),
    "x": ReplacePatch(value=torch.zeros(4), slice=(0, 1)),
}):
    output = pg(x)

acts = [a[0] for a in acts_record.activations]
"""
    )
    assert is_clean(source)


def test_steps_and_positions(session: Session) -> None:
    fields = {"steps": "decoding", "positions": "2, 4", "position_dim": 1}
    session.add(patch("layers_0.output|sub_0", "zero", **fields))
    session.add(patch("layers_1.output|sub_0", "zero", steps="1:"))
    session.add(patch("layers_1.up.output", "zero", steps="3"))

    source = export(session)

    assert 'ZeroPatch(\n        steps="decoding",\n        positions=[2, 4],\n' in source
    assert "ZeroPatch(steps=slice(1, None))" in source
    assert "ZeroPatch(steps=3)" in source
    assert is_clean(source)


def test_a_file_makes_the_graph(session: Session) -> None:
    session.add(patch("layers_0.output|sub_0", "add", value="pg.layers[0].down.bias"))

    source = export(session, wrap=True)

    assert source == (
        """\
# Needs: model, x
from graphpatch import AddPatch, PatchableGraph

pg = PatchableGraph(model, x)
with pg.patch({"layers_0.output|sub_0": AddPatch(value=pg.layers[0].down.bias)}):
    output = pg(x)
"""
    )
    assert is_clean(source)


def test_options_are_for_making_the_graph_only(pg: PatchableGraph) -> None:
    session = Session(pg, Origin("graph", "make()", "x, extraction_options=options, mask=None"))
    session.add(patch("layers_0.output|sub_0", "zero"))

    assert "graph = PatchableGraph(make(), x, extraction_options=options, mask=None)" in export(session, wrap=True)
    assert "    output = graph(x, mask=None)\n" in export(session)
    assert export(session, wrap=True).startswith("# Needs: make, x, options\n")
    assert export(session).startswith("# Needs: graph, x\n")


def test_a_graph_whose_inputs_are_not_known_leaves_them_to_the_reader(pg: PatchableGraph) -> None:
    session = Session(pg)
    session.add(patch("layers_0.output|sub_0", "zero"))

    assert export(session) == (
        """\
# Needs: pg
from graphpatch import ZeroPatch

with pg.patch({"layers_0.output|sub_0": ZeroPatch()}):
    # Fill in your inputs.
    output = pg(...)
"""
    )
    assert export(session, wrap=True) == (
        """\
# Needs: model
from graphpatch import PatchableGraph, ZeroPatch

# Fill in your inputs.
pg = PatchableGraph(model, ...)
with pg.patch({"layers_0.output|sub_0": ZeroPatch()}):
    # Fill in your inputs.
    output = pg(...)
"""
    )
    session.add(patch("layers_0.output|sub_0", "probe", name="model"))
    assert export(session, wrap=True).startswith("# Needs: model_1\n")


def test_patches_that_are_off_are_left_out(session: Session) -> None:
    session.add(patch("layers_0.output|sub_0", "zero"))
    session.add(patch("layers_0.up.linear", "zero", is_enabled=False))

    assert export(session).splitlines()[1] == "# Left out: 1 patch that is off"
    assert "up.linear" not in export(session)

    session.change(1, is_enabled=False)
    with pytest.raises(ExportError, match=r"nothing to export; all 2 are disabled: enable one first"):
        export(session)


def test_names_of_the_users_are_never_taken(session: Session) -> None:
    session.add(patch("layers_0.output|sub_0", "add", value="output + ZeroPatch + hidden_probe[0]"))
    session.add(patch("layers_0.up.linear", "zero"))
    session.add(patch("layers_0.up.linear", "probe", name="hidden"))
    session.add(patch("layers_1.up.linear", "probe", name="result"))

    source = export(session)

    assert source.startswith("# Needs: pg, output, ZeroPatch, hidden_probe, x\n")
    assert "from graphpatch import AddPatch, ProbePatch, ZeroPatch as ZeroPatch_1\n" in source
    assert "output_1 = pg(x)" in source
    assert "hidden = hidden_probe_1.activation" in source
    assert "result = result_probe.activation" in source


def test_slices_mean_variables_as_they_were_before_probes_overwrite_them(session: Session) -> None:
    session.add(patch("layers_0.up.linear", "probe", name="tok"))
    session.add(patch("layers_1.up.linear", "probe", name="second", slice=":, tok"))

    source = export(session)

    assert "\nlayers_1_up_linear_slice = (slice(None), tok)\n" in source
    assert source.endswith(
        "\n\ntok = tok_probe.activation\nsecond = second_probe.activation[layers_1_up_linear_slice]\n"
    )
    assert source.startswith("# Needs: tok, pg, x\n")
    assert is_clean(source)


def test_values_are_evaluated_in_the_order_of_the_session(session: Session) -> None:
    session.add(patch("layers_0.up.linear", "add", value="torch.randn(8)"))
    session.add(patch("layers_1.up.linear", "add", value="scale"))
    session.add(patch("layers_1.up.linear", "add", value="2 * torch.randn(8)"))
    session.add(patch("layers_0.up.linear", "add", value="torch.randn(1)"))

    source = export(session)

    assert (
        """
layers_0_up_linear_value = torch.randn(8)
layers_1_up_linear_value = scale
layers_1_up_linear_value_1 = 2 * torch.randn(8)
layers_0_up_linear_value_1 = torch.randn(1)
with pg.patch({
"""
        in source
    )
    assert "AddPatch(value=layers_1_up_linear_value),\n        AddPatch(value=layers_1_up_linear_value_1),\n" in source
    assert is_clean(source)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("1, 2", "(1, 2)"),
        ("a # one", "a"),
        ("(a +\n b)", "a + b"),
        ("(a +\r b)", "a + b"),
        ("'it''s'", "'its'"),
        ("{'a': 1}['a']", "{'a': 1}['a']"),
        ("f'{a!r}'", "f'{a!r}'"),
        ("'\\n'", "'\\n'"),
        ("a if b else c", "a if b else c"),
        ("(*a, b)", "(*a, b)"),
        ("lambda t: (t,\n t)", "lambda t: (t, t)"),
        ("'''two\nlines'''", "'two\\nlines'"),
    ],
)
def test_values_are_written_on_one_line(session: Session, value: str, written: str) -> None:
    session.add(patch("layers_0.up.linear", "custom", value=value))

    assert f"CustomPatch(custom_op={written})" in export(session)


def test_the_first_line_lists_builtins_that_are_meant_as_variables(pg: PatchableGraph) -> None:
    session = Session(pg, Origin("pg", "model", "input"))
    session.add(patch("layers_0.up.linear", "add", value="float(id) + sum([1])"))
    session.add(patch("layers_0.up.linear", "custom", value="abs"))

    assert export(session).startswith("# Needs: pg, id, input\n")


def test_torch_is_imported_where_it_is_used_as_a_module(session: Session) -> None:
    session.add(patch("layers_0.up.linear", "add", value="torch.ones(8)"))
    assert "import torch\n" in export(session)
    session.add(patch("layers_1.up.linear", "add", value="2 * torch"))
    assert "import torch\n" not in export(session)
    assert export(session).startswith("# Needs: torch, pg, x\n")


HOSTILE_KEYS = [
    'a"b',
    "a'b",
    "a\nb",
    "a\\b",
    "{a}",
    "ä\u202e",
    "'''\"\"\"",
    "__import__('os').system('true')",
    "\ud800",
]


def hostile_names() -> Iterator[tuple[PatchableGraph, str]]:
    class Returns(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {key: x + number for number, key in enumerate(HOSTILE_KEYS)}

    pg = PatchableGraph(Returns(), torch.ones(2))
    for path in pg.nodes:
        if path.startswith("output"):
            yield pg, path


def test_hostile_paths_are_text() -> None:
    found = 0
    for pg, path in hostile_names():
        session = Session(pg, Origin("pg", "model", "x"))
        session.add(patch(path, "zero"))
        session.add(patch(path, "probe", name="kept"))
        source = export(session)
        namespace = {"pg": pg, "model": pg._module, "x": torch.ones(2)}
        exec(compile(source, "<exported>", "exec"), namespace)
        assert not namespace["kept"].any()
        assert source.isascii() or "ä" in source
        assert not any(letter in source for letter in "\u202e\ud800")
        found += 1
    assert found == len(HOSTILE_KEYS)


def test_what_cannot_be_written_on_one_line_is_refused(session: Session) -> None:
    session.add(patch("layers_0.up.linear", "replace", value="f'''{\"\"\"a\nb\"\"\"}'''"))

    with pytest.raises(ExportError, match=r"#1 .*cannot be written on one line.*put it in a variable, and use that"):
        export(session)
