"""What states say is what the model's own final norm and unembedding say of them, without and with patches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExperimentError,
    PatchableGraph,
    PatchNotFiredError,
    StopPatch,
    ZeroPatch,
)
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.methods.lens import Readouts
from tests.components.families import captured_once
from tests.hooks import registered


@pytest.fixture(scope="module")
def gpt2() -> tuple[PatchableGraph, Tensor]:
    return captured_once("gpt2")


def by_hand(model: Any, given: Tensor, part: str, final: Any = lambda norm: norm) -> list[Tensor]:
    """Returns the probabilities that states of the first row give, by plain hooks and the model's own last modules."""
    kept: list[Tensor] = []

    def keep(_: nn.Module, args: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    blocks = model.transformer.h
    if part == "residual":
        hooks = [block.register_forward_pre_hook(lambda _, args: kept.append(args[0])) for block in blocks]
        hooks.append(blocks[-1].register_forward_hook(keep))
    else:
        hooks = [
            getattr(block, {"attention": "attn", "mlp": "mlp"}[part]).register_forward_hook(keep) for block in blocks
        ]
    with registered(hooks), torch.no_grad():
        model(given)
        return [model.lm_head(final(model.transformer.ln_f(state)))[0].softmax(-1) for state in kept]


@pytest.mark.parametrize("stream", ["residual", "attention", "mlp"])
def test_readouts_are_the_final_norm_and_the_unembedding_by_hand(gpt2: Any, stream: str) -> None:
    pg, given = gpt2
    model = pg._module
    target = list(range(given.shape[1]))
    expected = by_hand(model, given, stream)
    read = Readouts(pg, Inputs((given,)), target=target, top=4).read(stream)
    assert read.layers == ([None] if stream == "residual" else []) + list(range(len(model.transformer.h)))
    assert len(read.readouts) == len(read.names) == len(expected)
    for name, state, readout, probabilities in zip(read.names, read.states, read.readouts, expected, strict=True):
        assert state.shape == pg.components[name].shape
        top = probabilities.topk(4)
        assert np.array_equal(readout.tokens, top.indices)
        assert np.allclose(readout.probabilities, top.values, atol=1e-6)
        of_target = probabilities.gather(-1, torch.tensor(target)[:, None])
        assert np.allclose(readout.target, of_target[:, 0], atol=1e-6)
        assert np.array_equal(readout.rank, (probabilities > of_target).sum(-1))


def test_readouts_of_patched_states_and_of_patches_after_the_last_layer(gpt2: Any) -> None:
    pg, given = gpt2
    model = pg._module
    readouts = Readouts(pg, Inputs((given,)), top=4)
    with torch.no_grad():
        assert readouts.target == model(given).logits[0].argmax(-1).tolist()
    early = {"layers[1].mlp_out": [ZeroPatch()]}
    with model.transformer.h[1].mlp.register_forward_hook(lambda _, args, output: torch.zeros_like(output)):
        expected = by_hand(model, given, "residual")
    patched = readouts.read("residual", early)
    for number, readout in enumerate(patched.readouts):
        assert np.allclose(readout.probabilities, expected[number].topk(4).values, atol=1e-6)
    # A patch after the last layer, one that shares forwards and one that does not, acts on each state.
    for late in (AddPatch(value=2.0, slice=(..., 0)), CustomPatch(custom_op=lambda x: 2 * x)):
        changed = late.op if isinstance(late, CustomPatch) else lambda x: x + 2.0 * (torch.arange(x.shape[-1]) == 0)
        found = readouts.read("residual", {"@final_norm": [late], **early})
        with model.transformer.h[1].mlp.register_forward_hook(lambda _, args, output: torch.zeros_like(output)):
            expected = by_hand(model, given, "residual", changed)
        for number, readout in enumerate(found.readouts):
            assert np.allclose(readout.probabilities, expected[number].topk(4).values, atol=1e-6)


def test_what_cannot_be_read_is_an_error(gpt2: Any) -> None:
    pg, given = gpt2
    inputs = Inputs((given,))
    readouts = Readouts(pg, inputs)
    with pytest.raises(ExperimentError, match="heads"):
        readouts.read("heads")
    for options in ({"target": [1]}, {"target": 10**6}, {"row": 7}):
        with pytest.raises(ExperimentError):
            Readouts(pg, inputs, **options)
    with pytest.raises(ExperimentError, match="positions"):
        Readouts(pg, Inputs((given,), {"logits_to_keep": 1}))
    with pytest.raises(PatchNotFiredError):
        readouts.read("residual", {"layers[0].resid_post": [StopPatch()]})
    vit, image = captured_once("vit")
    with pytest.raises(ExperimentError):
        Readouts(vit, Inputs((image,)))
