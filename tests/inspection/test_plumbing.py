"""What trees fold away as plumbing: never what a user would look for."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components import find
from graphpatch_notebook.inspection.resolution import resolve
from graphpatch_notebook.inspection.tree import plumbing
from tests.laws.captures import some_cases
from tests.zoo.case import Case, seed_all
from tests.zoo.submodules import Submodules


def folded(root: Frame, frame: Frame | None = None) -> list[str]:
    found = plumbing(root)
    return [node.name for node in (frame or root).nodes if id(node) in found]


class Inner(nn.Module):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        scores = x @ x.mT + bias
        return scores.softmax(-1) @ x


class Masks(nn.Module):
    def forward(self, keep: Tensor) -> Tensor:
        return (1 - keep[:, None, :].float()) * torch.full((), -1e4)


class Attention(
    Submodules, embed=partial(nn.Embedding, 9, 4), places=partial(nn.Embedding, 9, 4), masks=Masks, inner=Inner
):
    """Masks and positions as models write them: made in a module of their own, and added to scores."""

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]) + 0
        x = self.embed(ids) + self.places(positions)
        return self.inner(x, self.masks(keep))


def test_masks_and_positions_are_plumbing_what_they_are_added_to_is_not() -> None:
    pg = PatchableGraph(Attention(), torch.arange(3)[None], torch.ones(1, 3, dtype=torch.int64))
    root = pg.nodes.root
    assert [name for name in folded(root) if "size" not in name and "shape" not in name] == [
        "arange",
        "positions",
        "masks",
    ]
    inner = root.names["inner"]
    assert folded(root, inner.frame) == ["bias"]
    assert "plumbing" not in str(pg.graph)  # a tree that is shown whole hides nothing


@some_cases(every=7)
def test_zoo_components_parameters_outputs_and_inputs_of_the_model_are_never_plumbing(case: Case) -> None:
    seed_all()
    call = case.example()
    root = PatchableGraph(case.build(), *call.args, **call.kwargs).nodes.root
    found = plumbing(root)
    for frame in root.walk():
        for node in frame.nodes:
            is_tensor_input = frame is root and node.kind == "input" and hasattr(node.spec, "shape")
            if node.kind in ("parameter", "output") or is_tensor_input:
                assert id(node) not in found, node
    for component in find(root).values():
        assert id(resolve(root, component.path).node) not in found, component.name
