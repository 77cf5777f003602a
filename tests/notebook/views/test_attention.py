"""What the attention view sends: patterns as eager attention computes them, up to the steps of bytes."""

from __future__ import annotations

import base64
import contextlib
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import traitlets
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.experiments import show_attention
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.session import session_of
from graphpatch_notebook.notebook.views.attention import AttentionView
from graphpatch_notebook.notebook.views.linked import answer
from graphpatch_notebook.notebook.views.selection import item_of, patches_of
from tests.notebook.shells import Shell

LENGTH = 7
SPECIAL: Any = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def models() -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    ids = torch.randint(2, 50, (3, LENGTH))
    yield (
        "gpt2",
        GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=50, **SPECIAL)),
        {"input_ids": ids},
    )
    shared = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 50, **SPECIAL}
    llama = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **shared))
    yield "llama", llama, {"input_ids": ids}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "vocab_size": 50, "forced_eos_token_id": 1}
    bart = BartForConditionalGeneration(BartConfig(**heads, **sizes, **SPECIAL, decoder_start_token_id=0))
    yield "bart", bart, {"input_ids": ids, "decoder_input_ids": ids[:, :5]}


MODELS = {name: (model.eval(), inputs) for name, model, inputs in models()}


def sent(view: AttentionView, run: str = "clean") -> list[tuple[np.ndarray, np.ndarray | None, float]]:
    """Reads the trait as the front end does: of each layer the patterns, the lengths of values, the largest step.

    Of the mean over the batch, there are the patterns times the lengths in place of the lengths.
    """
    data, at, found = zlib.decompress(view.cells), 0, {}

    def take(dtype: str, count: int) -> np.ndarray:
        nonlocal at
        part = np.frombuffer(data, dtype, count, at)
        at += part.nbytes
        return part.astype(np.float32)

    for name in view.attention["runs"]:
        layers: list[tuple[np.ndarray, np.ndarray | None, float]] = []
        for layer in view.attention["layers"]:
            heads, values, shape = layer["heads"], layer["value_heads"], layer["shape"]
            scales, lengths = take("<f4", heads), None
            if values:
                length_scales = take("<f4", values)
                lengths = (take("u1", values * layer["full"][1]) / 255).reshape(values, -1) ** 2 * length_scales[
                    :, None
                ]
            cells = take("u1", heads * shape[0] * shape[1]).reshape(heads, *shape)
            layers.append(((cells / 255) ** 2 * scales[:, None, None], lengths, 2 * float(scales.max()) / 255))
        found[name] = layers
    assert at == len(data)
    return found[run]


def eager(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Returns the patterns that the model returns itself, with eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        with torch.no_grad():
            found = model(**inputs, output_attentions=True)
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
    if "decoder_attentions" not in found:
        return list(found.attentions)
    both = zip(found.decoder_attentions, found.cross_attentions, strict=True)
    return [*found.encoder_attentions, *(one for pair in both for one in pair)]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_sent_is_what_eager_attention_computes(name: str) -> None:
    model, inputs = MODELS[name]
    pg = PatchableGraph(model, **inputs)
    expected = eager(model, inputs)
    with contextlib.closing(show_attention(pg)) as view:
        assert [layer["full"] for layer in view.attention["layers"]] == [[*one.shape[2:]] for one in expected]
        assert view.attention["is_whole"]
        for row in (-1, 0, 2):
            view.row = row
            for (patterns, _, step), one in zip(sent(view), expected, strict=True):
                wanted = (one.mean(0) if row < 0 else one[row]).numpy()
                assert np.abs(patterns - wanted).max() <= step / 2 + 1e-6
                assert patterns.max() > 0.1
        assert len(view.cells) < 20_000


class Front:
    """A front end, as far as requests go."""

    def __init__(self, view: AttentionView) -> None:
        self.view = view

    def send(self, request: str, **payload: Any) -> tuple[dict[str, Any], list[bytes]]:
        context = self.view._request_context
        return answer(context, {"id": 1, "request": request, "payload": payload}, self.view._handlers())

    def ask(self, request: str, **payload: Any) -> dict[str, Any]:
        reply, _ = self.send(request, **payload)
        assert "result" in reply, reply
        found: dict[str, Any] = reply["result"]
        return found

    def attend(self) -> None:
        status = self.ask("update")
        end = time.monotonic() + 60
        while status["state"] == "running" and time.monotonic() < end:
            time.sleep(0.01)
            status = self.ask("update")
        assert status["state"] == "done"


def test_patched_patterns_are_shown_with_the_clean_ones() -> None:
    model, inputs = MODELS["gpt2"]
    pg = PatchableGraph(model, **inputs)
    with contextlib.closing(show_attention(pg)) as view:
        front, session = Front(view), session_of(pg)
        clean = sent(view)
        weight = item_of("layers[0].attn.heads[1].pattern", position=4, key=0)
        for item in (weight, item_of("layers[0].attn.heads[2].z")):
            version = session.chosen.version
            edit = {"action": "act", "act": "zero", "items": [item], "value": None, "steps": None}
            front.ask("edit", based_on=version, edit=edit)
        assert view.session["version"] == 2 != view.attention["patches"]
        front.attend()
        assert view.attention["patches"] == 2
        assert view.attention["runs"] == ["clean", "patched"]
        with pg.patch(session.resolve({}).patch_map), torch.no_grad():
            names = [f"layers[{layer}].attn.pattern" for layer in (0, 1)]
            wanted = pg.record(names, **inputs)
        for layer, (patterns, _, step) in enumerate(sent(view, "patched")):
            assert np.abs(patterns - wanted[names[layer]][0].numpy()).max() <= step / 2 + 1e-6
        assert sent(view, "patched")[0][0][1, 4, 0] == 0 != clean[0][0][1, 4, 0]
        assert all(np.array_equal(one[0], other[0]) for one, other in zip(sent(view), clean, strict=True))
        session.clear()
        front.attend()
        assert view.attention["runs"] == ["clean"]


def test_long_inputs_are_sent_as_smaller_pictures_and_heads_on_demand() -> None:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 9, "n_embd": 18, "vocab_size": 50, "n_positions": 700}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **SPECIAL)).eval()
    ids = torch.randint(50, (1, 700))
    pg = PatchableGraph(model, ids)
    with contextlib.closing(show_attention(pg)) as view:
        front, about = Front(view), view.attention
        (layer,) = about["layers"]
        exact = eager(model, {"input_ids": ids})[0][0]
        rows, columns = layer["shape"]
        assert not about["is_whole"]
        assert max(rows, columns) <= 48
        assert len(view.cells) < 700_000
        ((pictures, _, step),) = sent(view)
        block = -(-ids.shape[1] // 48)
        wanted = torch.nn.functional.max_pool2d(exact, block, ceil_mode=True).numpy()
        assert np.abs(pictures - wanted).max() <= step / 2 + 1e-6
        reply, (cells,) = front.send("head", version=about["version"], run="clean", layer=0, head=2)
        numbers = (np.frombuffer(cells, np.uint8) / 255).reshape(exact.shape[1:]) ** 2 * reply["result"]["scale"]
        assert np.abs(numbers - exact[2].numpy()).max() <= step / 2 + 1e-6
        small = exact[2].numpy()[-1]  # weights of about 1 in 700
        assert np.abs(numbers[-1] - small).max() < 0.1 * small.mean()
        for wrong in ({"head": 9}, {"layer": 1}, {"run": "patched"}, {"version": 0}):
            place = {"version": about["version"], "run": "clean", "layer": 0, "head": 0, **wrong}
            assert "error" in front.send("head", **place)[0]


class Words:
    def decode(self, tokens: list[int]) -> str:
        return " ".join(f"t{token}" for token in tokens)


def test_positions_have_their_tokens() -> None:
    model, inputs = MODELS["bart"]
    pg = PatchableGraph(model, tokenizer=Words(), **inputs)
    with contextlib.closing(show_attention(pg)) as view:
        about = view.attention
        texts = [(about["tokens"][one["queries"]], about["tokens"][one["keys"]]) for one in about["layers"]]
    encoder, decoder = ([f"t{int(token)}" for token in inputs[name][0]] for name in ("input_ids", "decoder_input_ids"))
    assert texts == [(encoder, encoder), (decoder, decoder), (decoder, encoder)]
    model, inputs = MODELS["gpt2"]
    rows = [["same", *(f"{row}{at}" for at in range(1, LENGTH))] for row in range(3)]
    with contextlib.closing(show_attention(PatchableGraph(model, **inputs), tokens=rows)) as view:
        assert view.attention["tokens"] == [rows[0]]
        view.row = -1
        assert view.attention["tokens"] == [["same", *map(str, range(1, LENGTH))]]


def test_a_row_beyond_the_batch_is_an_error_and_changes_nothing() -> None:
    model, inputs = MODELS["gpt2"]
    with contextlib.closing(show_attention(PatchableGraph(model, **inputs))) as view:
        view.row = 2
        before = view.cells
        for row in (3, 99, -2):
            with pytest.raises(traitlets.TraitError):
                view.row = row
            assert (view.row, view.cells) == (2, before)


def test_the_magic_the_browser_and_pages_without_scripts(shell: Shell) -> None:
    model, inputs = MODELS["gpt2"]
    shell.namespace["pg"] = pg = PatchableGraph(model, **inputs)
    view = shell.ok("from graphpatch_notebook.experiments import show_attention\nshow_attention(pg)").value
    assert repr(view) == "<AttentionView of pg: 8 heads in 2 layers, 7 x 7>"
    html = view._static_html()
    picture = base64.b64decode(html.partition("base64,")[2].partition('"')[0])
    assert picture.startswith(b"\x89PNG")
    assert f"gp-static-{view._own_id}" in str(view._marked_html())
    assert "<script" not in html
    browser = pg.browse(views=("attention",))
    browser.select("layers[1].attn.heads[3].z")
    assert [one["head"] for one in browser.views[0].selection] == [3] == [one["head"] for one in view.selection]
    with pytest.raises(ValueError, match="'lens_'"):
        pg.browse(views=("lens_",))
    assert patches_of(session_of(pg), "zero", view.selection, None, set())[0].path == "layers[1].attn.heads[3].z"


class Merged(nn.Module):
    """A language model whose prompt has the patches of an image at some positions, as in LLaVA."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 40}
        self.language = GPT2LMHeadModel(GPT2Config(**sizes, **SPECIAL))
        self.patches = nn.Conv2d(3, 8, 4, 4)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        embeddings = self.language.transformer.wte(input_ids)
        patches = self.patches(pixel_values).flatten(2).transpose(1, 2)
        embeddings = embeddings.masked_scatter((input_ids == 7)[..., None], patches)
        logits: Tensor = self.language(inputs_embeds=embeddings).logits
        return logits


def vision() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = ViTForImageClassification(ViTConfig(image_size=(12, 20), patch_size=4, **sizes)).eval()
    return model, {"pixel_values": torch.rand(2, 3, 12, 20)}


def merged() -> tuple[nn.Module, dict[str, Tensor]]:
    ids = torch.tensor([[1, 2, *[7] * 15, 3]])
    return Merged().eval(), {"input_ids": ids, "pixel_values": torch.rand(1, 3, 12, 20)}


@pytest.mark.parametrize(("make", "first"), [(vision, 1), (merged, 2)], ids=["vision", "merged"])
def test_tokens_that_are_patches_of_an_image_are_those_that_change_with_it(make: Any, first: int) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    pg = PatchableGraph(model, **inputs)
    with contextlib.closing(show_attention(pg)) as view:
        about = view.attention
        (image,) = about["images"]
        assert image == {"positions": [*range(first, first + 15)], "grid": [3, 5]}
        assert [layer["image"] for layer in about["layers"]] == [0, 0]
        picture = base64.b64decode(about["picture"].partition(",")[2])
        assert struct.unpack(">II", picture[16:24]) == (20, 12)
        # The patch in a row and column of the image is the one at that place of the grid.
        name = next(name for name in pg.components if name.endswith("layers[0].resid_pre"))
        changed = inputs["pixel_values"].clone()
        changed[:, :, 4:8, 12:16] += 1
        before, after = (pg.record(name, **given)[name] for given in (inputs, {**inputs, "pixel_values": changed}))
        assert (before != after).any(-1)[0].nonzero().flatten().tolist() == [first + 1 * 5 + 3]


def test_an_image_that_no_token_is_a_patch_of_is_refused() -> None:
    model, inputs = MODELS["gpt2"]
    with pytest.raises(GraphError, match="patches of an image"):
        show_attention(PatchableGraph(model, **inputs), image=np.zeros((4, 4, 3)))
    model, given = vision()
    pg = PatchableGraph(model, **given)
    with pytest.raises(GraphError, match=r"\[2, 3, 4, 5\]"):
        show_attention(pg, image=np.zeros((2, 3, 4, 5)))
    with contextlib.closing(show_attention(pg, image=np.zeros((24, 40, 3), np.uint8))) as view:
        assert view.attention["images"][0]["grid"] == [3, 5]


@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_of_a_generation_appear_as_they_are_generated(use_cache: bool) -> None:
    model, inputs = MODELS["gpt2"]
    prompt = inputs["input_ids"][:1]
    handle = model.register_forward_pre_hook(lambda *_: time.sleep(0.1))
    pg = PatchableGraph(model, prompt)
    given = {"attention_mask": torch.ones_like(prompt), "use_cache": use_cache}
    try:
        with contextlib.closing(show_attention(pg, prompt, max_new_tokens=4, **given)) as view:
            front, rows = Front(view), list[int]()
            assert view.attention["layers"][0]["full"] == [LENGTH, LENGTH]
            assert view.attention["patches"] != view.session["version"]  # so that the front end asks
            while front.ask("update")["state"] == "running":
                rows.append(view.attention["layers"][0]["full"][0])
                time.sleep(0.02)
            assert {LENGTH, LENGTH + 1, LENGTH + 2} <= {*rows}
            assert rows == sorted(rows)
            with torch.no_grad():
                ids = model.generate(prompt, max_new_tokens=4, do_sample=False)
            length = ids.shape[1] - 1
            expected = eager(model, {"input_ids": ids[:, :-1]})
            for (patterns, lengths, step), wanted in zip(sent(view), expected, strict=True):
                assert patterns.shape[1:] == (length, length)
                assert np.abs(patterns - wanted[0].numpy()).max() <= step / 2 + 1e-6
                assert lengths is not None
            session_of(pg).add(ChosenPatch("layers[0].attn.heads[1].pattern", "zero"))
            front.attend()
            (patched, _, _), _ = sent(view, "patched")
            assert patched.shape[1:] == (length, length)
            assert patched[1].max() == 0
    finally:
        handle.remove()


def test_a_generation_needs_one_prompt() -> None:
    model, inputs = MODELS["gpt2"]
    with pytest.raises(GraphError, match="not 3"):
        show_attention(PatchableGraph(model, **inputs), max_new_tokens=2)
