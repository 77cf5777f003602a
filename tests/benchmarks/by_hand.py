"""What the benchmarks compare with: the same work in plain torch, written for the model as well as we can."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.benchmarks.models import Benchmarked


class Keep(TorchFunctionMode):
    """A function mode that keeps what each call returns: the least that recording everything takes."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        self.kept.append(result)
        return result


@contextmanager
def hooks(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


@dataclass(eq=False)
class ByHand:
    """A GPT-2 or Llama of transformers in the hands of somebody who knows its code."""

    benchmarked: Benchmarked
    model: Any

    @cached_property
    def is_gpt2(self) -> bool:
        return hasattr(self.model, "transformer")

    @cached_property
    def blocks(self) -> list[Any]:
        return list(self.model.transformer.h if self.is_gpt2 else self.model.model.layers)

    @cached_property
    def body(self) -> Any:
        return self.model.transformer if self.is_gpt2 else self.model.model

    @cached_property
    def middle(self) -> Any:
        return self.model.get_submodule(self.benchmarked.attribute_path)

    # -- one run -------------------------------------------------------------------------------------------------------

    def zero(self, inputs: Tensor) -> Tensor:
        with hooks([self.middle.register_forward_hook(lambda _m, _a, output: torch.zeros_like(output))]):
            return self.model(inputs).logits  # type: ignore[no-any-return]

    def keep_one(self, inputs: Tensor) -> list[Any]:
        kept: list[Any] = []
        with hooks([self.middle.register_forward_hook(lambda _m, _a, output: kept.append(output))]):
            self.model(inputs)
        return kept

    def keep_modules(self, inputs: Tensor) -> dict[nn.Module, Any]:
        kept: dict[nn.Module, Any] = {}

        def keep(module: nn.Module, _args: Any, output: Any) -> None:
            kept[module] = output

        with hooks([module.register_forward_hook(keep) for module in self.model.modules()]):
            self.model(inputs)
        return kept

    def keep_everything(self, inputs: Tensor) -> list[Any]:
        with Keep() as mode:
            self.model(inputs)
        return mode.kept

    def streams(self, inputs: Tensor, *, has_first: bool = False) -> list[Tensor]:
        """The stream after each layer; the model ends after the last layer, and does not unembed."""
        kept: list[Tensor] = []
        handles = [
            block.register_forward_hook(lambda _m, _a, output: kept.append(first(output))) for block in self.blocks
        ]
        if has_first:
            handles.append(self.blocks[0].register_forward_pre_hook(lambda _m, args: kept.append(args[0])))
        with hooks(handles):
            self.body(inputs)
        return kept

    def lens(self, inputs: Tensor) -> Tensor:
        states = torch.cat(self.streams(inputs, has_first=True))
        return self.model.lm_head(self.norm(states))  # type: ignore[no-any-return]

    @cached_property
    def norm(self) -> Any:
        return self.body.ln_f if self.is_gpt2 else self.body.norm

    def pattern(self, inputs: Tensor) -> Tensor:
        """The pattern of the second head in the middle layer; the run ends at its attention."""
        attention, _, _ = self.parts(self.model.get_submodule(self.benchmarked.attribute_path.rpartition(".")[0]))
        seen: list[tuple[Any, Any]] = []

        def stop(_module: Any, args: Any, kwargs: Any) -> None:
            seen.append((args, kwargs))
            raise InterruptedError

        with hooks([attention.register_forward_pre_hook(stop, with_kwargs=True)]), suppress(InterruptedError):
            self.model(inputs)
        args, kwargs = seen[0]
        if self.is_gpt2:
            size = attention.head_dim
            query, key, _ = attention.c_attn(args[0])[0].split(attention.embed_dim, -1)
            query, key = query[:, size : 2 * size], key[:, size : 2 * size]
        else:
            from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

            size = attention.head_dim
            parts = [linear(kwargs["hidden_states"]).unflatten(-1, (-1, size)).transpose(1, 2)[:, 1:2]
                     for linear in (attention.q_proj, attention.k_proj)]  # fmt: skip
            query, key = (part[0, 0] for part in apply_rotary_pos_emb(*parts, *kwargs["position_embeddings"]))
        scores = query @ key.T / math.sqrt(size)
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), -torch.inf)
        return scores.softmax(-1)

    def scores(self, clean: Tensor, corrupted: Tensor, metric: Callable[[Any], Tensor]) -> list[Tensor]:
        """The gradient times the difference for the output of each module, by hooks: fewer values than nodes."""
        values: dict[nn.Module, Tensor] = {}

        def keep(module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(value := first(output), Tensor) and value.is_floating_point():
                values[module] = value

        with hooks([module.register_forward_hook(keep) for module in self.model.modules()]):
            with torch.no_grad():
                self.model(clean)
            others, values = values, {}
            result = metric(self.model(corrupted))
        values = {module: value for module, value in values.items() if value.requires_grad}
        gradients = torch.autograd.grad(result, list(values.values()), allow_unused=True)
        return [
            ((others[module] - value) * gradient).sum()
            for (module, value), gradient in zip(values.items(), gradients, strict=True)
            if gradient is not None
        ]

    # -- sweeps: one batch for each layer, from the patch on -----------------------------------------------------------

    def sweep(self, inputs: Tensor, values: list[Tensor], positions: list[int]) -> Tensor:
        """The metric with the MLP's output of each layer replaced at each position."""

        def changed(_layer: int, states: Tensor, value: Tensor) -> Iterator[Tensor]:
            for position in positions:
                other = states.clone()
                other[:, position] = value[:, position]
                yield other

        return self._swept(inputs, "mlp", lambda layer, output: changed(layer, output, values[layer]))

    def heads(self, inputs: Tensor) -> Tensor:
        """The metric with each head's result set to zero."""

        def changed(_layer: int, z: Tensor) -> Iterator[Tensor]:
            size = z.shape[-1] // self.benchmarked.heads
            for head in range(self.benchmarked.heads):
                other = z.clone()
                other[..., head * size : (head + 1) * size] = 0
                yield other

        return self._swept(inputs, "heads", changed)

    def _swept(self, inputs: Tensor, what: str, changed: Callable[[int, Tensor], Iterator[Tensor]]) -> Tensor:
        seen: list[list[Any]] = [[] for _ in self.blocks]  # for each layer: its arguments, and the values of the run
        handles = []
        for block, of_layer in zip(self.blocks, seen, strict=True):

            def keep(_module: Any, args: Any, kwargs: Any, of_layer: list[Any] = of_layer) -> None:
                of_layer[:] = args, kwargs

            def keep_input(_module: Any, args: Any, of_layer: list[Any] = of_layer) -> None:
                of_layer.append(args[0])

            def keep_output(_module: Any, _args: Any, output: Any, of_layer: list[Any] = of_layer) -> None:
                of_layer.append(output)

            handles.append(block.register_forward_pre_hook(keep, with_kwargs=True))
            _, projection, norm = self.parts(block)
            if what == "mlp":
                handles.append(norm.register_forward_pre_hook(keep_input))
                handles.append(block.mlp.register_forward_hook(keep_output))
            else:
                handles.append(projection.register_forward_pre_hook(keep_input))
        with hooks(handles):
            self.body(inputs, use_cache=False)
        found = []
        for layer, (block, (args, _, *values)) in enumerate(zip(self.blocks, seen, strict=True)):
            states = torch.cat(list(changed(layer, values[-1])))
            if what == "mlp":
                states = values[0] + states
            else:
                _, projection, norm = self.parts(block)
                states = args[0] + projection(states)
                states = states + block.mlp(norm(states))
            for later, (later_args, kwargs, *_) in zip(self.blocks[layer + 1 :], seen[layer + 1 :], strict=True):
                states = first(later(states, *later_args[1:], **kwargs))
            logits = self.model.lm_head(self.norm(states[:, -1]))
            found.append(logits[:, 5] - logits[:, 6])
        return torch.stack(found)

    def parts(self, block: Any) -> tuple[Any, Any, Any]:
        """The attention of a block, its output projection, and the norm before the MLP."""
        if self.is_gpt2:
            return block.attn, block.attn.c_proj, block.ln_2
        return block.self_attn, block.self_attn.o_proj, block.post_attention_layernorm
