"""A sweep does no more work than the loop, whose numbers it returns: linear layers and attention are counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphpatch_notebook import PatchableGraph, ZeroPatch

transformers = pytest.importorskip("transformers")

LAYERS, HEADS, TOKENS = 4, 4, 512


def gpt2(width: int) -> Any:
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_head=HEADS, n_embd=width, vocab_size=50, n_positions=TOKENS, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


def difference_of_two(output: Any) -> Tensor:
    return output.logits[0, -1, 3] - output.logits[0, -1, 5]


class Products(TorchDispatchMode):
    """Counts multiplications; torch's own counter adds hooks to all modules, with which no work is shared."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.default:
            self.count += args[1].numel() * args[2].shape[1]
        elif "scaled_dot_product" in func.__name__:
            self.count += 2 * args[0].numel() * args[1].shape[-2]
        return func(*args, **(kwargs or {}))


def operations(run: Callable[[], object]) -> int:
    with Products() as products:
        run()
    return products.count


@pytest.mark.parametrize("heads", [1, HEADS])
@torch.no_grad()
def test_cells_of_which_each_needs_a_forward_do_less_than_the_loop(heads: int) -> None:
    model = gpt2(16)
    ids = torch.arange(TOKENS)[None] % 50
    pg = PatchableGraph(model, ids)
    width = model.config.n_embd // HEADS
    axes = {"layer": range(LAYERS), "head": range(heads)}

    def patches(layer: int, head: int) -> dict[str, ZeroPatch]:
        return {f"transformer.h_{layer}.attn.c_proj.x": ZeroPatch(slice=(..., slice(head * width, (head + 1) * width)))}

    def loop() -> list[float]:
        found = []
        for layer in range(LAYERS):
            for head in range(heads):
                with pg.patch(patches(layer, head)):
                    found.append(difference_of_two(pg(ids)).item())
        return found

    def sweep() -> list[float]:
        found = pg.sweep(axes, patches, ids, metric=difference_of_two, progress=False)
        return found.values.reshape(-1).tolist()

    assert sweep() == pytest.approx(loop(), abs=1e-6)
    # Few cells run as in the loop, after a run without patches.
    assert operations(sweep) <= operations(loop) + (0 if heads > 1 else operations(lambda: pg(ids)))
