"""The law of sharded models on architectures of transformers, by their own plans for tensor parallelism."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn

from graphpatch_notebook import PatchableGraph
from tests.architectures.building import NotSmall, case_of
from tests.architectures.families import Architecture, architectures
from tests.distributed.law import Comparison, compare
from tests.distributed.processes import run_on_ranks

SIX = ("llama", "qwen3", "gemma2", "phi3", "mixtral", "deepseek_v3")


def with_plan() -> list[Architecture]:
    """The causal architectures that have a plan for tensor parallelism."""
    found = [each for each in architectures() if each.family == "causal"]
    return [each for each in found if _plan(each)]


def _plan(architecture: Architecture) -> Any:
    try:
        return getattr(architecture.config_class, "base_model_tp_plan", None)
    except Exception:  # its module needs a library
        return None


def examine(
    architecture: Architecture, ranks: int, *, seconds: float, most: int | None, most_gradients: int | None
) -> Comparison:
    """Returns what the law says of an architecture on so many ranks.

    Raises:
        NotSmall: It cannot be built small, or not split.
        ProcessesFailed: A rank failed.
    """
    try:
        return _examined(architecture, ranks, {}, seconds, most, most_gradients)
    except NotSmall:
        # Each rank needs a head of keys, and small models have two.
        heads = {"num_attention_heads": 2 * ranks, "num_key_value_heads": ranks}
        return _examined(architecture, ranks, heads, seconds, most, most_gradients)


def _examined(
    architecture: Architecture,
    ranks: int,
    settings: dict[str, int],
    seconds: float,
    most: int | None,
    most_gradients: int | None,
) -> Comparison:
    case = case_of(architecture, settings)
    model = case.build().eval()
    disturb(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        call = case.example()
        found = run_on_ranks(ranks, _compared, architecture, folder, call, most, most_gradients, seconds=seconds)
    if isinstance(found[0], str):
        raise NotSmall(found[0])
    return found[0]


def _compared(
    architecture: Architecture, folder: str, call: Any, most: int | None, most_gradients: int | None
) -> Comparison | str:
    kind = architecture.model_class
    plain = kind.from_pretrained(folder, dtype=torch.float32).eval()
    try:
        sharded = kind.from_pretrained(folder, dtype=torch.float32, tp_plan="auto").eval()
        with torch.no_grad():
            own = call.run(sharded).logits
    except Exception as error:
        return f"is not sharded by transformers: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
    with torch.no_grad():
        if not torch.allclose(call.run(plain).logits, own, atol=1e-3, rtol=1e-3):
            return "computes other numbers when it is sharded, without this package"
    with torch.no_grad():
        graphs = [PatchableGraph(each, *call.args, **call.kwargs) for each in (plain, sharded)]

    def run(pg: PatchableGraph) -> torch.Tensor:
        return call.run(pg).logits  # type: ignore[no-any-return]

    return compare(*graphs, run, most=most, most_gradients=most_gradients)


def disturb(model: nn.Module) -> None:
    """Makes weights random that are all zeros or ones: these would hide what is done with them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def named(names: tuple[str, ...]) -> list[Architecture]:
    """The causal architectures of these model types."""
    return [each for each in with_plan() if each.model_type in names]
