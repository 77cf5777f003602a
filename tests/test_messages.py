"""What users do wrong, and the essential words of what they are told: what is wrong, where, and the repair."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CaptureError,
    CustomPatch,
    ExtractionOptions,
    GraphError,
    GraphPatchWarning,
    PatchableGraph,
    PatchMapError,
    PatchValueError,
    ReplacePatch,
    UnknownPathError,
    ZeroPatch,
)
from tests.notebook.shells import opened
from tests.zoo.submodules import Submodules

X = torch.ones(3, 4)


class Mlp(Submodules, up=(4, 8), down=(8, 2), other=(8, 2)):
    """Two linear maps, of which the second one may be left out, and a mask that need not be given."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, is_other: bool = False) -> Tensor:
        hidden = torch.relu(self.up(x))
        if mask is not None:
            hidden = hidden * mask
        return self.other(hidden) if is_other else self.down(hidden)


class Nested(Submodules, inner=[(4, 4)]):
    """A model with a module in a module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


class Autoencoder(nn.Module):
    """A sparse autoencoder that somebody gives as a patch."""

    def encode(self, x: Tensor) -> Tensor:
        return x

    def decode(self, latents: Tensor) -> Tensor:
        return latents


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    torch.manual_seed(0)
    return PatchableGraph(Mlp().eval(), X)


def patched(pg: PatchableGraph, path: str, patch: Any) -> Any:
    with pg.patch({path: patch}):
        return pg(X)


@pytest.mark.parametrize(
    ("path", "patch", "error", "words"),
    [
        (
            "other.output",
            ZeroPatch(),
            UnknownPathError,
            "'other.output': no node 'other' in the root graph; the submodule 'other' did not run on the example inputs"
            ": make the PatchableGraph with inputs that reach it",
        ),
        (
            "hidden",
            torch.ones(8),
            PatchMapError,
            "'hidden': give a patch or a list of patches, not Tensor; write Replace",
        ),
        ("hidden", torch.relu, PatchMapError, "write CustomPatch(function) to apply it"),
        ("hidden", Autoencoder(), PatchMapError, "not Autoencoder; write pg.splice({path: it}) for a graph"),
        ("hidden", [torch.ones(8)], PatchMapError, "a Tensor of shape (8,) is not a Patch; write ReplacePatch(value)"),
        ("hidden", ZeroPatch(any_shape="yes"), PatchMapError, "any_shape must be True or False, not 'yes'"),  # type: ignore[arg-type]
        (
            "hidden",
            ReplacePatch(torch.ones(2, 3)),
            PatchValueError,
            "ReplacePatch on 'hidden' (relu): the value here is of shape (3, 8) (float32, cpu), the patch's value is "
            "of shape (2, 3)",
        ),
        (
            "hidden",
            AddPatch(torch.ones(5), slice=(0, slice(0, 4))),
            PatchValueError,
            "the value here is of shape (3, 8) (float32, cpu), slice [0, 0:4], the patch's value is of shape (5,)",
        ),
        (
            "hidden",
            ZeroPatch(slice=7),
            PatchValueError,
            "ZeroPatch on 'hidden' (relu): the value here is of shape (3, 8) (float32, cpu), slice [7]: index 7 is out",
        ),
        (
            "mask",
            ZeroPatch(),
            PatchValueError,
            "'mask': ZeroPatch needs a tensor or a number, but the value here is None",
        ),
        (
            "hidden",
            CustomPatch(lambda t: None, slice=0),
            PatchValueError,
            "'hidden': custom_op returned None for slice=0: is a return statement missing?",
        ),
    ],
)
def test_patches(pg: PatchableGraph, path: str, patch: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        patched(pg, path, patch)


def test_built_in_patches_raise_one_error_that_says_all(pg: PatchableGraph) -> None:
    """Torch's own error, of a line in this package, would be printed above it with a traceback as long."""
    with pytest.raises(PatchValueError) as caught:
        patched(pg, "hidden", AddPatch(torch.ones(3)))
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_any_error_of_a_custom_function_names_the_patch(pg: PatchableGraph) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'foo'") as caught:
        patched(pg, "hidden", CustomPatch(lambda t: t.foo))
    assert "raised by CustomPatch on 'hidden' (relu): the value here is of shape (3, 8)" in "".join(
        caught.value.__notes__
    )


def test_steps_that_were_not_reached_are_listed(pg: PatchableGraph) -> None:
    with pytest.warns(GraphPatchWarning, match=re.escape("its steps (9, 2) were not reached: the last call had step")):
        patched(pg, "hidden", ZeroPatch(steps=[9, 2]))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: PatchableGraph("gpt2", X), TypeError, "not str: PatchableGraph(model, *example_inputs)"),  # type: ignore[arg-type]
        (lambda: PatchableGraph(Mlp, X), TypeError, "not the class Mlp"),  # type: ignore[arg-type]
        (
            lambda: PatchableGraph(Mlp(), ExtractionOptions(skip_compilation="no"), X),  # type: ignore[arg-type]
            CaptureError,
            "skip_compilation takes True or False, not 'no'",
        ),
        (
            lambda: PatchableGraph(Mlp(), ExtractionOptions(decompose="scaled_dot_product_attention"), X),
            CaptureError,
            "of scaled_dot_product_attention, multi_head_attention_forward, not 'scaled_dot_product_attention'",
        ),
        (
            lambda: PatchableGraph(Mlp(), X).to_fx(X),  # type: ignore[arg-type]
            TypeError,
            "to_fx takes inputs as a tuple, and those by name as a dict: pg.to_fx((x,), {'mask': mask})",
        ),
        (
            lambda: PatchableGraph(Mlp(), X).to_fx((X,))(torch.ones(7, 4)),
            GraphError,
            "dimension 0 of 'x' is 7, and was 3 in the example; pg.to_fx(..., any_size=True) makes a graph",
        ),
        (
            lambda: PatchableGraph(Mlp(), X).to_fx((X,))(X, is_other=True),
            GraphError,
            "the input 'is_other' is True, and was False in the example; make another graph",
        ),
        (
            lambda: PatchableGraph(Mlp(), X, is_other=False).to_fx((X,))(X, is_other=None),
            GraphError,
            "the input 'is_other' is None, and was False in the example; call it with is_other=False",
        ),
    ],
)
def test_graphs(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        make()


def test_a_model_without_example_inputs_is_an_error_that_says_how_to_give_some() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        PatchableGraph(Mlp())
    assert "give some: PatchableGraph(model, *example_inputs)" in "".join(caught.value.__notes__)
    with pytest.raises(TypeError) as caught:
        PatchableGraph(Mlp(), {"x": X})
    assert "give inputs as you would call the model: PatchableGraph(model, **inputs)" in "".join(caught.value.__notes__)


def test_files(pg: PatchableGraph, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"the folder does not exist: {str(tmp_path / 'no')!r}")):
        pg.save(tmp_path / "no" / "file")
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        pg.save(tmp_path)
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        PatchableGraph.load(tmp_path)
    assert not list(tmp_path.iterdir())


def test_models_of_another_file(pg: PatchableGraph, tmp_path: Path) -> None:
    file = tmp_path / "graph"
    pg.save(file)
    trained = copy.deepcopy(pg._module)
    trained.up.train()
    for model, words in (
        (
            nn.Linear(4, 2).eval(),
            "is not a Linear, as in the file: give the model whose graph it is",
        ),
        (trained, "'up' of the model was in eval mode when the graph was saved; call model.eval()"),
    ):
        with pytest.raises(GraphError, match=re.escape(words)):
            PatchableGraph.load(file, model=model)


def test_files_of_exported_programs(tmp_path: Path) -> None:
    file = tmp_path / "program.pt2"
    with pytest.raises(FileNotFoundError, match=r"the file does not exist: .*program\.pt2"):
        PatchableGraph.from_exported(file)
    file.write_text("hello")
    with pytest.raises(GraphError, match=r"program\.pt2' is not a file that torch\.export\.save wrote"):
        PatchableGraph.from_exported(file)


@pytest.mark.parametrize(
    ("cell", "most"),
    [
        ("pg.patch({'hiden': ZeroPatch()}).__enter__()", 16),
        ("pg.graph.hiden", 16),
        ("pg.graph['hiden']", 16),
    ],
)
def test_tracebacks_in_notebooks_leave_the_way_through_this_package_out(cell: str, most: int) -> None:
    with opened() as shell:
        shell.namespace.update(pg=PatchableGraph(Mlp(), X), ZeroPatch=ZeroPatch)
        ran = shell.run(cell)
    assert isinstance(ran.error, UnknownPathError)
    assert len(ran.out.splitlines()) <= most, ran.out
