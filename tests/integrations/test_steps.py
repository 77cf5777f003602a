"""Patches for some steps of a generation, or some positions of the sequence: the same as with hooks that count."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    GraphPatchWarning,
    PatchableGraph,
    PatchMapError,
    PatchNotFiredError,
    PatchValueError,
    ProbePatch,
    RecordPatch,
    ZeroPatch,
)
from tests.hooks import registered
from tests.integrations.generations import LENGTH, NEW, WAYS, captured, generated, prompt, same
from tests.zoo import CASES
from tests.zoo.case import tokens
from tests.zoo.submodules import Submodules
from tests.zoo.transformers_models import with_cache

PATHS = {
    "gpt2-sdpa": ("transformer.h.0.mlp", "transformer.h_0.mlp.output"),
    "llama-eager": ("model.layers.1.mlp", "model.layers_1.mlp.output"),
    "t5-sdpa": ("decoder.block.1.layer.0", "decoder.block_1.layer_0.output|sub_0"),
}
SELECTIONS = [0, 1, range(2, 5), slice(3, None), [0, 4]]
WHERE = [
    *[(name, way, [0, 4]) for name in PATHS for way in ("greedy", "beams", "static-cache", "no-cache")],
    *[("llama-eager", "greedy", chosen) for chosen in SELECTIONS],
]
FROM_THE_END = [
    *[("llama-eager", way, chosen) for way in ("greedy", "no-cache") for chosen in (-1, [-2, 1], slice(-3, None))],
    ("t5-sdpa", "beams", -1),
]


def contains(chosen: Any, number: int) -> bool:
    """What a selection means, written anew."""
    if chosen in ("prefill", "decoding"):
        return (number == 0) == (chosen == "prefill")
    if isinstance(chosen, int):
        return number == chosen
    if isinstance(chosen, slice):
        return chosen.start <= number
    return number in chosen


@contextmanager
def hooked(model: nn.Module, attribute_path: str, change: Callable[[Tensor, int, int], Tensor]) -> Iterator[None]:
    """For the length of the block, changes a module's output: a function of it, the step and the past length."""
    step, past = -1, 0

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal step, past
        step += 1
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        past = int(cache.get_seq_length()) if cache is not None else 0

    def edit(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output, step, past)
        return (change(output[0], step, past), *output[1:])

    handles = [
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.get_submodule(attribute_path).register_forward_hook(edit),
    ]
    with registered(handles):
        yield


@pytest.mark.parametrize(
    ("name", "way", "chosen"),
    [*WHERE, ("gpt2-sdpa", "sampling", "prefill"), ("gpt2-sdpa", "no-cache", "decoding")],
    ids=str,
)
def test_steps_as_with_a_hook_that_counts(name: str, way: str, chosen: Any) -> None:
    model, pg = captured(name)
    attribute_path, path = PATHS[name]
    with hooked(model, attribute_path, lambda t, step, past: t + 0.5 if contains(chosen, step) else t):
        expected = generated(model, padded=True, **WAYS[way])
    with pg.patch({path: AddPatch(value=0.5, steps=chosen)}):
        found = generated(pg, padded=True, **WAYS[way])
    assert same(expected, found)


@pytest.mark.parametrize(("name", "way", "chosen"), [*WHERE, *FROM_THE_END], ids=str)
def test_positions_as_with_a_hook_that_counts(name: str, way: str, chosen: Any) -> None:
    model, pg = captured(name)
    attribute_path, path = PATHS[name]

    def change(t: Tensor, step: int, past: int) -> Tensor:
        t = t.clone()
        for index in range(t.shape[1]):
            if contains(chosen, past + index) or contains(chosen, index - t.shape[1]):
                t[:, index] = t[:, index] * 0.25 - 0.5
        return t

    with hooked(model, attribute_path, change):
        expected = generated(model, padded=True, **WAYS[way])
    with pg.patch({path: CustomPatch(custom_op=lambda t: t.mul_(0.25).sub_(0.5), positions=chosen)}):
        found = generated(pg, padded=True, **WAYS[way])
    assert same(expected, found)


def test_a_position_from_the_end_is_no_padding() -> None:
    model, pg = captured("llama-eager")
    ids = torch.arange(1, 13).reshape(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    path = PATHS["llama-eager"][1]
    with pg.patch({path: ZeroPatch(positions=-1)}), pytest.raises(PatchValueError, match="attention_mask"):
        pg(ids, attention_mask=mask)
    with pytest.raises(PatchValueError, match="attention_mask"):
        pg.record(path, ids, attention_mask=mask, positions=-1)
    with pg.patch({path: ZeroPatch(positions=-1)}):
        found = pg(ids, attention_mask=mask.flip(1)).logits

    def last(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return torch.cat([output[:, :-1], torch.zeros_like(output[:, -1:])], 1)

    with registered([model.get_submodule(PATHS["llama-eager"][0]).register_forward_hook(last)]):
        assert torch.equal(found, model(ids, attention_mask=mask.flip(1)).logits)


# -- recording ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PATHS)
def test_records_keep_one_activation_for_each_step(name: str) -> None:
    model, pg = captured(name)
    attribute_path, path = PATHS[name]
    seen: list[Tensor] = []

    def keep(t: Tensor, step: int, past: int) -> Tensor:
        seen.append(t)
        return t

    with hooked(model, attribute_path, keep):
        generated(model)
    records = [
        RecordPatch(),
        RecordPatch(steps="prefill"),
        RecordPatch(steps="decoding"),
        RecordPatch(steps=[2, 3]),
        RecordPatch(positions=slice(LENGTH - 2, None)),
    ]
    with pg.patch({path: records}):
        generated(pg)
    last = [t for step, t in enumerate(seen) if step >= LENGTH - 2]  # where decoding begins with one token
    if seen[0].shape[1] == LENGTH:
        last = [seen[0][:, LENGTH - 2 :], *seen[1:]]
    expected = [seen, seen[:1], seen[1:], seen[2:4], last]
    for record, those in zip(records, expected, strict=True):
        assert len(record.activations) == len(those)
        assert all(torch.equal(a, b) for a, b in zip(record.activations, those, strict=True))


# -- a loop of one's own -----------------------------------------------------------------------------------------------


def test_steps_are_counted_in_a_loop_of_the_user() -> None:
    model, pg = captured("llama-eager")
    path = PATHS["llama-eager"][1]
    ids = prompt()["input_ids"]

    def loop(run: Any, steps: int = 4) -> list[Tensor]:
        cache, given, logits = None, ids, []
        for _ in range(steps):
            with torch.no_grad():
                output = run(given, **with_cache(model, cache), use_cache=True)
            cache, given = output.past_key_values, output.logits[:, -1:].argmax(-1)
            logits.append(output.logits)
        return logits

    def change(t: Tensor, step: int, past: int) -> Tensor:
        return t * 0 if step in (0, 2) else t

    with hooked(model, PATHS["llama-eager"][0], change):
        expected = loop(model)
    with pg.patch({path: ZeroPatch(steps=[0, 2])}):
        for _ in range(2):  # each loop begins anew with the call without a cache
            assert all(torch.equal(a, b) for a, b in zip(expected, loop(pg), strict=True))
    record = RecordPatch(positions=[LENGTH - 1, LENGTH + 2])
    with pg.patch({path: record}):
        loop(pg)
    assert [value.shape for value in record.activations] == [(3, 1, 48)] * 2


def test_a_cache_filled_before_the_context_counts_as_step_one() -> None:
    model, pg = captured("gpt2-sdpa")
    path = PATHS["gpt2-sdpa"][1]
    records = [RecordPatch(steps="prefill"), RecordPatch(steps=1), RecordPatch(positions=4)]
    with torch.no_grad():
        cache = model(tokens(1, 4), use_cache=True).past_key_values
        with pytest.warns(GraphPatchWarning, match="in this context"), pg.patch({path: records}):
            pg(tokens(1, 1), **with_cache(model, cache))
    assert [len(record.activations) for record in records] == [0, 1, 1]


class WithLegacyCache(Submodules, embed=partial(nn.Embedding, 9, 6)):
    """Keys and values of its layers in plain tuples, as models had them before caches were objects."""

    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> tuple[Tensor, Any]:
        hidden = self.embed(input_ids)
        keys = hidden[:, None]
        if past_key_values is not None:
            keys = torch.cat([past_key_values[0][0], keys], dim=2)
        return hidden, ((keys, keys),)


def test_tuples_as_caches() -> None:
    ids = tokens(2, 4) % 9
    pg, record, steps = PatchableGraph(WithLegacyCache(), ids), RecordPatch(positions=[1, 5]), RecordPatch(steps=2)
    with pg.patch({"embed.output": [record, steps]}):
        past = pg(ids)[1]
        for _ in range(2):
            past = pg(ids[:, :1], past_key_values=past)[1]
    assert [value.shape for value in record.activations] == [(2, 1, 6)] * 2
    assert [value.shape for value in steps.activations] == [(2, 1, 6)]


# -- encoders and decoders ---------------------------------------------------------------------------------------------


def test_positions_of_encoder_and_decoder() -> None:
    """The example's encoder sees 11 positions, its decoder 7."""
    _, pg = captured("t5-sdpa")
    encoder, decoder, keys = RecordPatch(), RecordPatch(), RecordPatch()
    some = [dataclasses.replace(record, positions=[1, 3]) for record in (encoder, decoder, keys)]
    paths = [
        "encoder.block_0.layer_0.SelfAttention.q.output",
        "decoder.block_0.layer_0.SelfAttention.q.output",
        "decoder.block_0.layer_1.EncDecAttention.k.output",
    ]
    with pg.patch({path: [a, b] for path, a, b in zip(paths, (encoder, decoder, keys), some, strict=True)}):
        generated(pg)
    assert torch.equal(some[0].activations[0], encoder.activations[0][:, [1, 3]])
    assert [torch.equal(some[1].activations[i], decoder.activations[step]) for i, step in enumerate((1, 3))] == [
        True
    ] * 2
    assert len(keys.activations) == len(some[2].activations) == 1  # later steps take them from the cache
    assert torch.equal(some[2].activations[0], keys.activations[0][:, [1, 3]])
    whole, columns = RecordPatch(), RecordPatch(positions=[1, 3], position_dim=3)
    with pg.patch({"decoder.block_0.layer_1.EncDecAttention.pattern": [whole, columns]}):
        generated(pg)
    assert all(map(torch.equal, [value[..., [1, 3]] for value in whole.activations], columns.activations))
    assert len(whole.activations) == len(columns.activations) == NEW


def test_sequences_of_equal_length_are_not_confused() -> None:
    case = next(case for case in CASES if case.name == "t5-sdpa")
    pg = PatchableGraph(case.build(), input_ids=tokens(3, 7), decoder_input_ids=tokens(3, 7))
    keys, queries = (f"decoder.block_0.layer_1.EncDecAttention.{name}.output" for name in "kq")
    records = {path: [RecordPatch(), RecordPatch(positions=4)] for path in (keys, queries)}
    with pg.patch(records):
        pg(input_ids=tokens(3, 5), decoder_input_ids=tokens(3, 9))
    lengths = [(whole.activations[0].shape[1], part.activations[0]) for whole, part in records.values()]
    assert [length for length, _ in lengths] == [5, 9]
    for whole, part in records.values():
        assert torch.equal(part.activations[0], whole.activations[0][:, 4:5])


# -- what is never reached ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "missed"),
    [
        ({"positions": [2, 60]}, "positions 60 (of 2, 60)"),
        ({"positions": {1, 7, 9}}, "positions 7, 9 (of 1, 7, 9)"),
        ({"positions": [[2], [60], [3]]}, "positions 60 (of [2], [60], [3])"),
        ({"steps": [0, 7]}, "steps 7 (of 0, 7)"),
        ({"steps": 0, "positions": [2, 60]}, "positions 60 (of 2, 60)"),
    ],
    ids=str,
)
def test_what_is_listed_and_not_reached_is_reported(where: dict[str, Any], missed: str) -> None:
    """An index out of range is an error; a position may be that of a token that is not there yet, so it is reported."""
    _, pg = captured("llama-eager")
    path, ids = PATHS["llama-eager"][1], tokens(3, 7)
    message = re.escape(f"a patch never fired in this context: {path!r}: ")
    warned = pytest.warns(GraphPatchWarning, match=f"] {message}at {re.escape(missed)}$")
    with warned, pg.patch({path: ZeroPatch(**where)}):
        pg(ids)
    with pytest.raises(PatchNotFiredError, match=message), pg.patch({path: ZeroPatch(**where)}, strict=True):
        pg(ids)
    with pytest.warns(GraphPatchWarning, match="during this call: .* at "), pg.patch({path: ZeroPatch(**where)}):
        pg.generate(ids, max_new_tokens=2, min_new_tokens=2, pad_token_id=0)


# -- gradients, in-place operations, inputs ----------------------------------------------------------------------------


def test_parameters_for_some_steps() -> None:
    model, pg = captured("llama-eager")
    with hooked(model, "model.layers.1.mlp.down_proj", lambda t, step, past: t * 0 if step == 2 else t):
        expected = generated(model)
    with pg.patch({"model.layers_1.mlp.down_proj.weight": ZeroPatch(steps=2)}):
        assert same(expected, generated(pg))


# -- errors on entry ---------------------------------------------------------------------------------------------------

MLP = "transformer.h_0.mlp.output"


@pytest.mark.parametrize(
    ("path", "patch"),
    [
        (MLP, ZeroPatch(steps="foo")),
        (MLP, AddPatch(value=1.0, steps=1.5)),
        (MLP, ProbePatch(steps=-1)),
        (MLP, CustomPatch(custom_op=lambda t: t, positions="prefill")),
        (MLP, ZeroPatch(position_dim=1)),
        (MLP, ZeroPatch(positions=1, position_dim=3)),
        (MLP, ZeroPatch(positions=1, position_dim=1.0)),  # type: ignore[arg-type]
        (MLP, ZeroPatch(positions=1, position_dim=2)),  # not that of the example
        ("transformer.h_0.mlp.c_fc.weight", ZeroPatch(positions=1)),  # has none
        ("transformer.h_0.attn.kwargs|use_cache", ZeroPatch(positions=1)),
    ],
)
def test_bad_values_are_errors_on_entry(path: str, patch: Any) -> None:
    _, pg = captured("gpt2-sdpa")
    with pytest.raises(PatchMapError, match=re.escape(path)), pg.patch({path: patch}):
        pass


@pytest.mark.parametrize("batch", [7, 48])
def test_sizes_that_coincide_are_not_confused(batch: int) -> None:
    """As many sequences as positions, and a hidden size of as many as there are sequences, or positions."""
    case = next(case for case in CASES if case.name == "llama-eager")
    pg = PatchableGraph(case.build(), tokens(batch, batch))
    record = RecordPatch(positions=1)
    with pg.patch({"model.layers_0.mlp.output": record}):
        pg(tokens(2, 5))
    assert record.activations[0].shape == (2, 1, 48)


def test_models_without_tokens_have_no_positions() -> None:
    pg = PatchableGraph(nn.Linear(3, 4), torch.ones(2, 3))
    for dim in (None, 0):
        patches = {"linear": ZeroPatch(positions=1, position_dim=dim)}
        with pytest.raises(PatchMapError, match="not known which input has the positions"), pg.patch(patches):
            pass


# -- errors in a run ---------------------------------------------------------------------------------------------------


def test_fewer_logits_than_tokens() -> None:
    """`generate` computes the logits of the last token of the prompt only."""
    _, pg = captured("llama-eager")
    with (
        pg.patch({"lm_head.output": ZeroPatch(positions=LENGTH - 1)}),
        pytest.raises(PatchValueError, match="has 1 entries in dimension 1 at step 0, where there are 7 tokens"),
    ):
        generated(pg)
    record = RecordPatch(positions=LENGTH + 1)
    with pg.patch({"lm_head.output": record}):
        generated(pg)
    assert len(record.activations) == 1


def test_generations_of_models_without_known_positions() -> None:
    case = next(case for case in CASES if case.name == "mamba")
    pg = PatchableGraph(case.build(), tokens(3, 7))
    path = "backbone.layers_0.mixer.output"
    record = RecordPatch(steps="decoding")
    with pg.patch({path: record}):
        generated(pg)
    assert len(record.activations) == NEW - 1
    with pg.patch({path: ZeroPatch(positions=1)}), pytest.raises(PatchValueError, match="are not known"):
        generated(pg)


# -- reports -----------------------------------------------------------------------------------------------------------


def test_steps_that_no_direct_call_reaches_are_reported_when_the_context_ends() -> None:
    _, pg = captured("gpt2-sdpa")
    path = PATHS["gpt2-sdpa"][1]
    steps = r"its steps \('decoding'\) were not reached"
    why = f"a patch never fired in this context: '{path}': {steps}"

    def twice(patches: list[Any], strict: bool = False) -> None:
        with pg.patch({path: patches}, strict=strict):
            pg(tokens(1, 4))
            pg(tokens(1, 4))

    with pytest.warns(GraphPatchWarning, match=why):
        twice([ZeroPatch(steps="decoding"), ZeroPatch()])
    with pytest.raises(PatchNotFiredError, match=why):
        twice([ZeroPatch(steps="decoding")], strict=True)
    failing = CustomPatch(custom_op=lambda t: t.no_such_method())
    with pytest.raises(AttributeError):
        twice([ZeroPatch(steps="decoding"), failing], strict=True)


# -- methods that are no generation ------------------------------------------------------------------------------------


def test_steps_that_cannot_be_counted() -> None:
    """A method that calls a part of the model again and again, and never the model."""

    class Looping(Submodules, part=(2, 2)):
        def forward(self, x: Tensor) -> Tensor:
            return self.part(x)

        def loop(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.part(x)
            return x

    x = torch.ones(1, 2)
    pg = PatchableGraph(Looping(), x)
    with (
        pg.patch({"part.output": ZeroPatch(steps=1)}),
        pytest.raises(PatchValueError, match="Linear is called repeatedly"),
    ):
        pg.loop(x)
