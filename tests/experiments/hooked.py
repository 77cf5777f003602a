"""Experiments by hand: small models, and edits of their values by plain torch forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

Edit = Callable[[Tensor], Tensor]


def gpt2(layers: int = 3) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=16, n_head=4, n_layer=layers, vocab_size=23, n_positions=32, use_cache=False, initializer_range=0.5
    )
    return GPT2LMHeadModel(config).eval()


_LAYER = gpt2(1).transformer.h[0]
GPT2_OUTPUT = "output" if isinstance(_LAYER(torch.zeros(1, 1, 16)), Tensor) else "output|sub_0"
"""What a layer of GPT-2 hands on: in older transformers, the one value of a tuple."""


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=23, use_cache=False, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@contextmanager
def edited(model: nn.Module, edits: Mapping[str, Edit], *, of_inputs: bool = False) -> Iterator[None]:
    """Edits what submodules return (or are given, as their first argument), for the length of the block."""

    def on_output(edit: Edit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(output)

        return hook

    def on_input(edit: Edit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if args:
                return (edit(args[0]), *args[1:]), kwargs
            name = next(iter(kwargs))
            return args, kwargs | {name: edit(kwargs[name])}

        return hook

    with ExitStack() as stack:
        for name, edit in edits.items():
            module = model.get_submodule(name)
            if of_inputs:
                handle = module.register_forward_pre_hook(on_input(edit), with_kwargs=True)
            else:
                handle = module.register_forward_hook(on_output(edit))
            stack.callback(handle.remove)
        yield


def outputs(model: nn.Module, names: list[str], run: Callable[[], object], *, of_inputs: bool = False) -> list[Tensor]:
    """Returns copies of what submodules return (or are given) in a run."""
    kept: dict[str, Tensor] = {}

    def keeping(name: str) -> Edit:
        def edit(value: Tensor) -> Tensor:
            kept[name] = value.detach().clone()
            return value

        return edit

    with torch.no_grad(), edited(model, {name: keeping(name) for name in names}, of_inputs=of_inputs):
        run()
    return [kept[name] for name in names]


def attended(run: Callable[[], Any], edit: Callable[[Tensor], Tensor]) -> tuple[Any, list[Tensor]]:
    """Returns what comes out of a run in which what attention gives is edited, and what it gave."""
    attend, given = nn.functional.scaled_dot_product_attention, []

    def edited(*args: Any, **kwargs: Any) -> Tensor:
        given.append(attend(*args, **kwargs))
        return edit(given[-1])

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "scaled_dot_product_attention", edited)
        return run(), given


def putting(value: Tensor, index: Any = ...) -> Edit:
    """Returns an edit that puts `value[index]` in."""

    def edit(original: Tensor) -> Tensor:
        result = original.clone()
        result[index] = value[index]
        return result

    return edit
