"""transformers: whatever the example had (labels, masks, flags, caches), every call gives what the model gives."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, CustomPatch, GraphPatchWarning, PatchableGraph
from tests.laws.captures import identity, outside_fused_calls
from tests.zoo import CASES, Case
from tests.zoo.case import tokens
from tests.zoo.transformers_models import with_cache
from tests.zoo.values import bit_equal

BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
# The laws run each of these on all its calls, captured with the plainest inputs. Here the example is another one.
EXAMPLES = {
    "gpt2-eager": ("labels", "left_padding", "everything", "cache_step"),
    "llama-eager": ("cache_chunk_padded", "embeds", "cache_static"),
    "llama-sdpa": ("tuple",),
    "bert-eager": ("right_padding", "labels", "everything"),
    "bert-sdpa": ("embeds",),
    "t5-eager": ("labels", "cache_step"),
    "bart-sdpa": ("padding", "tuple"),
    "vit-eager": ("labels", "everything"),
    "vit-sdpa": ("tuple",),
}
each_example = pytest.mark.parametrize(
    ("name", "example"), [(name, e) for name, all_ in EXAMPLES.items() for e in all_]
)


@functools.cache
def model_and_reference(name: str) -> tuple[nn.Module, nn.Module]:
    return BY_NAME[name].build(), BY_NAME[name].build()


@each_example
def test_every_form_of_call_is_patched(name: str, example: str) -> None:
    case = BY_NAME[name]
    model, reference = model_and_reference(name)
    call = case.calls(reference)[example]
    pg = PatchableGraph(model, *call.args, **call.kwargs)
    patches = {path: identity(any_shape=True) for path in outside_fused_calls(pg)}
    with torch.no_grad(), warnings.catch_warnings():
        # Other calls take other branches.
        warnings.filterwarnings("ignore", ".not fired", GraphPatchWarning)
        expected = {key: other.run(reference) for key, other in case.calls(reference).items()}
        unpatched = {key: other.run(pg) for key, other in case.calls(reference).items()}
        with pg.patch(patches):
            patched = {key: other.run(pg) for key, other in case.calls(reference).items()}
    for key, output in expected.items():
        assert type(output) is type(unpatched[key]) is type(patched[key]), key
        assert bit_equal(output, unpatched[key]) is None, key
        assert bit_equal(output, patched[key]) is None, key


@pytest.mark.parametrize("name", ["gpt2-eager", "llama-eager", "bert-eager", "vit-eager"])
@pytest.mark.parametrize("end", ["hidden_states", "output"])
def test_what_the_model_collects_is_what_hooks_would_leave(name: str, end: str) -> None:
    """Hooks lie outside of what transformers 4 puts around the forwards of layers to collect their outputs."""
    case = BY_NAME[name]
    reference, call = case.build(), case.example()
    pg = PatchableGraph(case.build(), *call.args, **call.kwargs)
    asked = {**call.kwargs, "output_hidden_states": True, "output_attentions": True}
    reference(*call.args, **asked)  # transformers 5 hangs its own hooks now: the next one is the last
    layer = next(path for path, module in reference.named_modules() if path.endswith((".0", "_0")))
    nodes = [(path, node) for path, node in pg.nodes.items() if node.frame_path == layer.replace(".0", "_0")]
    kind = "output" if end == "output" else "input"
    path = next(path for path, node in nodes if node.shape and node.kind == kind and node.name.startswith(end))
    with pg.patch({path: AddPatch(value=0.5)}):
        found = pg(*call.args, **asked)
    module = reference.get_submodule(layer)
    if end == "output":
        handle = module.register_forward_hook(_raised_output)
    else:
        handle = module.register_forward_pre_hook(_raised_input, with_kwargs=True)
    try:
        expected = reference(*call.args, **asked)
    finally:
        handle.remove()
    assert bit_equal(expected, found) is None
    assert bit_equal(expected, reference(*call.args, **asked)) is not None


def _raised_output(module: nn.Module, args: Any, output: Any) -> Any:
    return (output[0] + 0.5, *output[1:]) if isinstance(output, tuple) else output + 0.5


def _raised_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (args[0] + 0.5, *args[1:]), kwargs


def _halved(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 0.5 if isinstance(output, Tensor) else (output[0] * 0.5, *output[1:])


@pytest.mark.parametrize("name", ["gpt2-eager", "llama-eager"])
def test_a_cache_goes_from_a_patched_call_to_the_next(name: str) -> None:
    """The cache that a call fills is the user's object, and holds what the patched call put there."""
    model, reference = model_and_reference(name)
    pg = PatchableGraph(model, input_ids=tokens(3, 7))
    layer = "transformer.h" if name == "gpt2-eager" else "model.layers"
    with reference.get_submodule(f"{layer}.0.mlp").register_forward_hook(_halved):
        expected = _two_calls(reference)
    with pg.patch({f"{layer}_0.mlp.output": CustomPatch(custom_op=lambda t: t * 0.5)}):
        found = _two_calls(pg)
    assert bit_equal(expected, found) is None


def _two_calls(model: Any) -> list[Any]:
    with torch.no_grad():
        first = model(tokens(2, 6), use_cache=True)
        cache = first.past_key_values
        second = model(tokens(2, 2, seed=1), **with_cache(getattr(model, "_module", model), cache), use_cache=True)
    assert second.past_key_values is cache
    return [
        first.logits,
        second.logits,
        *(layer.keys for layer in cache.layers),
        *(layer.values for layer in cache.layers),
    ]
