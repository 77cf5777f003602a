"""Flex attention is one operation, whether it is compiled or not, and a model that calls it can be patched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphpatch_notebook import PatchableGraph, ZeroPatch

flex: Any = pytest.importorskip("torch.nn.attention.flex_attention")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
CODE = flex.flex_attention.__code__, flex.create_block_mask.__code__


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():  # torch does not compute gradients of flex attention on CPUs
        yield
    assert (flex.flex_attention.__code__, flex.create_block_mask.__code__) == CODE


class Attention(nn.Module):
    """A bias by distance, and a causal mask."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.q = function, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[2]
        mask = flex.create_block_mask(
            lambda b, h, i, j: i >= j, B=None, H=None, Q_LEN=length, KV_LEN=length, device="cpu"
        )
        return self.function(self.q(x), x, x, lambda score, b, h, i, j: score - (i - j), mask)  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["plain", "compiled"])
def test_a_call_is_one_operation(form: str) -> None:
    model = Attention(
        flex.flex_attention if form == "plain" else torch.compile(flex.flex_attention, backend="eager")
    ).eval()
    x, seen = torch.randn(2, 2, 5, 4), []
    pg = PatchableGraph(model, x)
    assert [node.op for node in pg.nodes.values() if node.kind == "op" and not node.frame_path][-1] == "flex_attention"
    assert "arange" not in {node.op for node in pg.nodes.values()}  # nothing inside of it, or of the mask
    torch.testing.assert_close(pg(x), model(x), rtol=0, atol=0)
    model.q.register_forward_hook(lambda *_: torch.zeros_like(x))
    expected = model(x)
    model.q._forward_hooks.clear()

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with pg.patch({"q.output": ZeroPatch()}):
        torch.testing.assert_close(pg(x), expected, rtol=0, atol=0)
        with Mode():  # on which dynamo would fail, in a model that calls what it compiled
            torch.testing.assert_close(pg(x), expected, rtol=0, atol=0)
    assert seen.count(flex.flex_attention) == 1
