"""Weights in a file: tied, shared, of all dtypes and strides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from graphpatch_notebook import GraphError, PatchableGraph
from graphpatch_notebook.files.documents import TensorTable, made_tensors
from graphpatch_notebook.patching.model_state import difference
from tests.files.files import reloaded, x


def through_a_file(*tensors: Tensor) -> list[Tensor]:
    table = TensorTable()
    for tensor in tensors:
        table.add(tensor, "tensor")
    return made_tensors(table.parts, table.contents())


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().contiguous().view(torch.uint8) if tensor.numel() and tensor.dim() else tensor


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3),
        torch.randn(2, 3).bfloat16(),
        torch.randn(2, 3).to(torch.float8_e4m3fn),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.zeros(0, 4),
        torch.randn(4, 6).T,
        torch.randn(4, 6)[1:3, ::2],
        torch.arange(3).expand(2, 3),
        nn.Parameter(torch.randn(3), requires_grad=False),
        nn.Parameter(torch.randn(3)),
        torch.randn(3, requires_grad=True),
        torch.tensor([float("nan"), -0.0, float("inf")]),
        torch.tensor([1, 2], dtype=torch.uint16),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_tensor_comes_back(tensor: Tensor) -> None:
    (found,) = through_a_file(tensor)
    assert type(found) is type(tensor)
    assert found.requires_grad == tensor.requires_grad
    assert found.stride() == tensor.stride()
    assert difference(as_bytes(found), as_bytes(tensor), "tensor") is None


def test_views_of_one_storage_stay_views_of_one_storage() -> None:
    base = torch.arange(10.0)
    first, second, other = through_a_file(base[2:6], base[4:8].view(torch.int32), base.clone())
    first[2] = -1.0
    assert second.view(torch.float32).tolist() == [-1.0, 5.0, 6.0, 7.0]
    assert other.tolist() == base.tolist()


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.register_buffer("head", self.first.bias.detach()[:2], persistent=False)
            self.attribute = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))[:, :2] * self.head + self.attribute[0]

    pg = PatchableGraph(Tied(), x())
    loaded = reloaded(pg, tmp_path)
    assert loaded.second.weight is loaded.first.weight
    with torch.no_grad():
        loaded.first.weight.zero_()
        loaded.first.bias.fill_(2.0)
    assert loaded.head.tolist() == [2.0, 2.0]
    assert list(loaded.state_dict()) == list(pg.state_dict())
    assert torch.equal(loaded(x()), loaded.second.bias[:2].expand(3, 2) * 2 + 1)
    stored = load_file(tmp_path / "graph.safetensors")
    assert torch.equal(stored["first.weight"], pg.first.weight)
    assert len([name for name in stored if "weight" in name]) == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, device="meta"),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, requires_grad=True) * 2,
        nn.LazyLinear(2).weight,
    ],
)
def test_tensors_that_cannot_be_written(tensor: Tensor) -> None:
    with pytest.raises(GraphError):
        TensorTable().add(tensor, "tensor")


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [4], "stride": [1]},
        {"shape": [2], "stride": [100]},
        {"offset": 2},
        {"shape": [2**40, 2**40], "stride": [1, 1]},
        {"shape": [3, 1]},
        {"dtype": "float31"},
        {"dtype": "int64", "shape": [1], "requires_grad": True},
        {"device": "cuda:99"},
        {"device": "nowhere"},
        {"storage": "other"},
    ],
)
def test_tables_that_do_not_fit_the_tensors(changes: dict[str, Any]) -> None:
    table = TensorTable()
    table.add(torch.ones(3), "a")
    with pytest.raises((GraphError, RuntimeError, LookupError, AssertionError)):
        made_tensors([msgspec.structs.replace(table.parts[0], **changes)], table.contents())
