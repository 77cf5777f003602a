"""Texts as inputs: the same numbers as tokens that plain transformers makes, at each entrance."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from graphpatch_notebook import GraphError, PatchableGraph, ZeroPatch
from graphpatch_notebook import experiments as ex
from tests import tiny_models

WORDS = "<pad> <s> The cat sat on the mat . When Mary and John went to store a drink user assistant :".split()
ONE, SEVERAL, OTHER = "The cat sat on", ["The cat sat on", "Mary drink"], "The mat sat on"
CHAT = [{"role": "user", "content": "The cat"}]
TEMPLATE = """\
{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}\
{% if add_generation_prompt %}assistant :{% endif %}"""


def tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", **options)
    found.chat_template = TEMPLATE
    return found


gpt2 = functools.partial(tiny_models.gpt2, vocabulary=len(WORDS), bos_token_id=1, eos_token_id=1)


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), bos_token_id=1, eos_token_id=1, **sizes))


class Nano(nn.Module):
    """Its tokens are called `idx`, and it takes no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(len(WORDS), 8), nn.Linear(8, len(WORDS))

    def forward(self, idx: Tensor) -> Tensor:
        return self.out(self.table(idx).cumsum(1))


each_model = pytest.mark.parametrize("build", [gpt2, llama])


def given(texts: Any, side: str) -> dict[str, Tensor]:
    found = tokenizer(padding_side=side)(texts, return_tensors="pt", padding=True)
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}


@pytest.mark.parametrize("side", ["left", "right"])
@each_model
def test_texts_are_the_tokens_that_the_tokenizer_makes(build: Any, side: str) -> None:
    torch.manual_seed(0)
    model = build().eval()
    pg = PatchableGraph(model, ONE, tokenizer=tokenizer(padding_side=side))
    inputs = given(SEVERAL, side)
    if side == "left":
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        assert torch.equal(pg(SEVERAL).logits, model(**inputs).logits)
        alone = model(**given(SEVERAL[1], side)).logits[0, -1]
        row = pg(SEVERAL).logits[1]
    torch.testing.assert_close(row[-1 if side == "left" else 1], alone)
    assert torch.equal(pg.to_tokens(SEVERAL), inputs["input_ids"])


@each_model
def test_generation_pads_on_the_left(build: Any) -> None:
    torch.manual_seed(0)
    model = build().eval()
    pg = PatchableGraph(model, ONE, tokenizer=tokenizer(padding_side="right"))
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(pg.generate(SEVERAL, **options), model.generate(**given(SEVERAL, "left"), **options))


def test_chats_go_through_the_template() -> None:
    pg = PatchableGraph(gpt2().eval(), CHAT, tokenizer=tokenizer())
    asked = tokenizer().apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False, return_tensors="pt")
    answered = [*CHAT, {"role": "assistant", "content": "sat"}]
    told = tokenizer().apply_chat_template(answered, return_dict=False, return_tensors="pt")
    assert torch.equal(pg.to_tokens(CHAT), asked)
    assert torch.equal(pg.to_tokens([CHAT, answered])[1, None], told)
    assert torch.equal(pg(CHAT).logits, pg(asked).logits)


def test_a_model_with_inputs_of_other_names() -> None:
    model = Nano()
    letters = SimpleNamespace(encode=lambda text: [WORDS.index(word) for word in text.split()], decode=str)
    pg = PatchableGraph(model, ONE, tokenizer=letters)
    same_length = ["The cat", "on Mary"]
    assert torch.equal(pg(same_length), model(pg.to_tokens(same_length)))
    with pytest.raises(ValueError, match="Nano"):
        pg(SEVERAL)
    with pytest.raises(ValueError, match="1"):
        pg(["The", ""])


def test_an_encoder_takes_texts_and_a_decoder_tokens() -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": len(WORDS)}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    start = torch.zeros(2, 1, dtype=torch.long)
    pg = PatchableGraph(model, SEVERAL, tokenizer=tokenizer(), decoder_input_ids=start)
    expected = model(**given(SEVERAL, "right"), decoder_input_ids=start).logits
    assert torch.equal(pg(SEVERAL, decoder_input_ids=start).logits, expected)


def metric(output: Any) -> Tensor:
    return output.logits[:, -1, 3].sum()


def without_head(head: int) -> dict[str, ZeroPatch]:
    return {f"layers[0].attn.heads[{head}].z": ZeroPatch()}


QUIET: dict[str, Any] = {"metric": metric, "progress": False}
OF_PAIRS: dict[str, Any] = {
    "causal_trace": lambda pg, a, b: ex.causal_trace(pg, a, b, "layers[*].resid_post", True, **QUIET),
    "path_patch": lambda pg, a, b: ex.path_patch(pg, "layers[0].attn_out", None, a, b, **QUIET),
    "attribute": lambda pg, a, b: ex.attribute(pg, metric, a, b),
    "attribute_edges": lambda pg, a, b: ex.attribute_edges(pg, metric, a, b),
}
OF_ONE: dict[str, Any] = {
    "sweep": lambda pg, *a, **k: pg.sweep({"head": range(2)}, without_head, *a, **QUIET, **k),
    "ablate": lambda pg, *a, **k: ex.ablate(pg, ["layers[*].mlp_out"], *a, **QUIET, **k),
    "logit_lens": ex.logit_lens,
    "direct_logit_attribution": lambda pg, *a, **k: ex.direct_logit_attribution(pg, *a, target=3, **k).embed,
}


@pytest.fixture(scope="module")
def graphs() -> tuple[PatchableGraph, PatchableGraph]:
    """A graph that takes texts, and one of the same model that takes tokens."""
    model = gpt2()
    return PatchableGraph(model, ONE, tokenizer=tokenizer()), PatchableGraph(model, **given(ONE, "right"))


@pytest.mark.parametrize("name", [*OF_PAIRS, *OF_ONE])
def test_every_experiment_takes_texts(name: str, graphs: tuple[PatchableGraph, PatchableGraph]) -> None:
    clean, other = (given(text, "right") for text in (ONE, OTHER))
    pg, plain = graphs
    if name in OF_PAIRS:
        found, expected = OF_PAIRS[name](pg, ONE, OTHER), OF_PAIRS[name](plain, clean, other)
    else:
        found, expected = OF_ONE[name](pg, ONE), OF_ONE[name](plain, **clean)
    assert found.equals(expected)
    if name in ("causal_trace", "attribute", "sweep", "logit_lens"):
        assert found.attrs["tokens"] == ONE.split()


@pytest.mark.parametrize("name", OF_PAIRS)
def test_several_texts_are_one_batch(name: str, graphs: tuple[PatchableGraph, PatchableGraph]) -> None:
    pg, plain = graphs
    clean, other = given([ONE, OTHER], "right"), given([OTHER, ONE], "right")
    assert OF_PAIRS[name](pg, [ONE, OTHER], [OTHER, ONE]).equals(OF_PAIRS[name](plain, clean, other))


def test_tokens_are_texts_in_readouts() -> None:
    pg = PatchableGraph(gpt2(), ONE, tokenizer=tokenizer())
    mary, cat = (pg.to_single_token(word) for word in ("Mary", "cat"))
    lens = ex.logit_lens(pg, ONE, target=["Mary", "cat"])
    assert lens.token.values.tolist() == ["Mary", "cat"]
    assert np.array_equal(lens, ex.logit_lens(pg, ONE, target=[mary, cat]))
    assert np.array_equal(lens.sel(token="cat"), ex.logit_lens(pg, ONE, target="cat"))
    parts = ex.direct_logit_attribution(pg, ONE, target="Mary", minus="cat")
    assert parts.equals(ex.direct_logit_attribution(pg, ONE, target=mary, minus=cat))
    several = ex.direct_logit_attribution(pg, [ONE, OTHER], target="Mary", batch_size=1, progress=False)
    assert several.equals(ex.direct_logit_attribution(pg, [ONE, OTHER], target=mary, batch_size=1, progress=False))
    with pytest.raises(ValueError, match="no such word"):
        ex.logit_lens(pg, ONE, target="no such word")


def test_datasets_are_lists_of_texts(tmp_path: Any) -> None:
    pg = PatchableGraph(gpt2(), ONE, tokenizer=tokenizer())
    texts = [*SEVERAL, "When Mary and John", "a"]
    batches = [given(texts[:3], "right"), given(texts[3:], "right")]
    path = "layers[1].resid_post"
    means = ex.mean_values(pg, path, texts, batch_size=3)
    torch.testing.assert_close(means[path], ex.mean_values(pg, path, batches)[path])
    store = ex.record_to(pg, tmp_path / "store", path, texts, batch_size=3)
    assert store[path].shape == (sum(len(text.split()) for text in texts), 16)


def test_texts_of_tokens() -> None:
    pg = PatchableGraph(gpt2(), ONE, tokenizer=tokenizer())
    assert pg.to_str_tokens(ONE) == ONE.split()
    assert pg.to_str_tokens(pg.to_tokens(SEVERAL)) == [ONE.split(), ["Mary", "drink", "<pad>", "<pad>"]]
    assert pg.to_single_token("Mary") == WORDS.index("Mary")
    with pytest.raises(ValueError, match="The cat"):
        pg.to_single_token("The cat")
    result = ex.causal_trace(pg, ONE, OTHER, "layers[*].resid_post", True, metric, progress=False)
    ticks = ex.plot_heatmap(result[:, [1, 3]]).get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["cat", "on"]


def test_the_tokenizer_goes_with_copies_and_can_be_given_later() -> None:
    model = gpt2().eval()
    pg = PatchableGraph(model, **given(ONE, "right"))
    with pytest.raises(GraphError):
        pg.to_tokens(ONE)
    with pytest.raises(AttributeError) as raised:  # GPT-2's own
        pg(ONE)
    assert "tokenizer=" in "".join(raised.value.__notes__)
    with pytest.raises(TypeError):
        pg.tokenizer = "gpt2"
    pg.tokenizer = tokenizer()
    edited = pg.edit({"layers[0].mlp_out": ZeroPatch()})
    assert torch.equal(edited(ONE).logits, edited(**given(ONE, "right")).logits)
    assert not torch.equal(edited(ONE).logits, pg(ONE).logits)
