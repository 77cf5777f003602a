"""Flex attention is one call with inner nodes, whether it is compiled or not, and opens to torch's own numbers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphpatch_notebook import AddPatch, ExtractionOptions, GraphPatchError, PatchableGraph, ProbePatch, ZeroPatch

flex: Any = pytest.importorskip("torch.nn.attention.flex_attention")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
HEADS, LENGTH = 4, 5
CODE = flex.flex_attention.__code__, flex.create_block_mask.__code__


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():  # torch does not compute gradients of flex attention on CPUs
        yield
    assert (flex.flex_attention.__code__, flex.create_block_mask.__code__) == CODE


class Attention(nn.Module):
    """Grouped heads, a bias by head and distance, and a mask with a key that nobody sees."""

    def __init__(self, function: Callable[..., Any], *, has_lse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.has_lse = function, has_lse
        self.q, self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.slopes = nn.Parameter(torch.randn(HEADS))

    def operands(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))

    def forward(self, x: Tensor) -> Tensor:
        length, slopes = x.shape[1], self.slopes
        mask = flex.create_block_mask(
            lambda b, h, i, j: (i >= j) & (j != 1), B=None, H=None, Q_LEN=length, KV_LEN=length, device="cpu"
        )

        def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + slopes[h] * (i - j)

        more = {"return_lse": True} if self.has_lse else {}
        z = self.function(*self.operands(x), biased, mask, scale=0.3, enable_gqa=True, **more)
        return z[0] * z[1][..., None] if self.has_lse else z  # type: ignore[no-any-return]

    def by_hand(self, x: Tensor, edit: Callable[[Tensor], Tensor] = lambda pattern: pattern) -> dict[str, Tensor]:
        q, k, v = self.operands(x)
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        at = torch.arange(x.shape[1])
        distance = at[:, None] - at[None]
        scores = q @ k.transpose(-2, -1) * 0.3 + self.slopes[:, None, None] * distance
        scores = scores.masked_fill((distance < 0) | (at == 1), -math.inf)
        pattern = edit(scores.softmax(-1))
        z = pattern @ v
        output = z * scores.logsumexp(-1, keepdim=True) if self.has_lse else z
        return {"scores": scores, "pattern": pattern, "output": output}


FORMS: dict[str, Callable[[], Attention]] = {
    "plain": lambda: Attention(flex.flex_attention),
    "compiled": lambda: Attention(torch.compile(flex.flex_attention, backend="eager")),
    "with-lse": lambda: Attention(flex.flex_attention, has_lse=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_scores_and_pattern_are_nodes_of_one_call(form: str) -> None:
    model = FORMS[form]()
    x, other = torch.randn(2, LENGTH, 8), torch.randn(3, LENGTH + 2, 8)
    pg = PatchableGraph(model, x)
    assert pg.nodes["scores"].shape == pg.nodes["pattern"].shape == (2, HEADS, LENGTH, LENGTH)
    assert not {"arange", "vmap", "getitem_2", "where"} & set(pg.nodes)  # nothing inside of it, or of the mask
    torch.testing.assert_close(pg(x), model(x), rtol=0, atol=0)
    with pg.patch({"q.output": ProbePatch()}):  # does not open it
        torch.testing.assert_close(pg(x), model(x), rtol=0, atol=0)
    for inputs in (x, other):
        scores, pattern = ProbePatch(), ProbePatch()
        with pg.patch({"scores": scores, "pattern": pattern}):
            output = pg(inputs)
        expected = model.by_hand(inputs)
        torch.testing.assert_close(output, model(inputs))
        torch.testing.assert_close(
            {"scores": scores.activation, "pattern": pattern.activation, "output": output}, expected
        )

        def edit(pattern: Tensor) -> Tensor:
            return torch.cat([pattern[:, :1], pattern[:, 1:2] * 0, pattern[:, 2:]], 1)

        with pg.patch({"pattern": ZeroPatch(slice=(slice(None), 1))}):
            torch.testing.assert_close(pg(inputs), model.by_hand(inputs, edit)["output"])


def test_function_modes_around_a_patched_call_see_it() -> None:
    """Methods have modes of their own: dynamo would fail on them, if a model calls what it compiled."""
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    model, x = FORMS["compiled"](), torch.randn(2, LENGTH, 8)
    pg = PatchableGraph(model, x)
    with pg.patch({"q.output": ZeroPatch()}):
        plain = pg(x)
        with Mode():
            torch.testing.assert_close(pg(x), plain)
    assert seen.count(flex.flex_attention) == 1


def test_its_steps_are_nodes_if_the_options_say_so() -> None:
    model, x = FORMS["plain"](), torch.randn(2, LENGTH, 8)
    pg = PatchableGraph(model, x, extraction_options=ExtractionOptions(decompose=["flex_attention"]))
    with pg.patch({"dot_products": AddPatch(value=0.0)}):
        torch.testing.assert_close(pg(x), model(x))


def test_blocks_that_the_mask_function_does_not_know_are_refused() -> None:
    """Kernels skip them, and torch's own code without a compiler computes them."""

    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            none = torch.zeros(1, 1, 1, dtype=torch.int32)
            mask = flex.BlockMask.from_kv_blocks(none, none[..., None], seq_lengths=(LENGTH, LENGTH))
            return flex.flex_attention(x, x, x, block_mask=mask)  # type: ignore[no-any-return]

    x = torch.randn(1, 1, LENGTH, 4)
    pg = PatchableGraph(Sparse(), x)
    with pg.patch({"pattern": ProbePatch()}), pytest.raises(GraphPatchError, match="mask_mod"):
        pg(x)


def test_other_threads_run_their_own_calls() -> None:
    model, x = FORMS["plain"](), torch.randn(2, LENGTH, 8)
    pg, probe, found = PatchableGraph(model, x), ProbePatch(), []

    def run() -> None:
        with torch.no_grad():
            found.append(model(x))

    class Elsewhere(ProbePatch):
        def op(self, original_output: Tensor) -> Tensor:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            return super().op(original_output)

    with pg.patch({"pattern": Elsewhere(), "scores": probe}):
        pg(x)
    torch.testing.assert_close(found, [model(x)], rtol=0, atol=0)
