"""Feature pages are what a plain loop over all examples finds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import ExperimentError, UnknownPathError
from graphpatch_notebook.experiments import FeaturePage, feature_pages, record_to, show_feature
from graphpatch_notebook.experiments.datasets.feature_pages import png_of
from tests.hooks import registered
from tests.tiny_models import gpt2

WIDTH, LENGTH, COUNT = 8, 6, 11


class Sae(nn.Module):
    def __init__(self, size: int = WIDTH, features: int = 12) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder, self.decoder = nn.Linear(size, features), nn.Linear(features, size)

    def encode(self, value: Tensor) -> Tensor:
        return torch.relu(self.encoder(value))

    def decode(self, latents: Tensor) -> Tensor:
        return self.decoder(latents)


class NotLinear(Sae):
    def decode(self, latents: Tensor) -> Tensor:
        return self.decoder(latents**2)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=10, num_hidden_layers=2, num_attention_heads=2, vocab_size=30
    )
    model = LlamaForCausalLM(config).eval()
    nn.init.normal_(model.model.norm.weight)  # not ones
    return model


def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=WIDTH, intermediate_size=10, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    return ViTForImageClassification(config).eval()


def examples(count: int = COUNT) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 30, (count, LENGTH), generator=random)
    lengths = torch.randint(1, LENGTH + 1, (count,), generator=random)
    return {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < lengths[:, None]).long()}


def output_of(module: nn.Module, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What a module returns in one run on all examples."""
    found: list[Tensor] = []
    hook = module.register_forward_hook(lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out))
    with registered([hook]), torch.no_grad():
        model(**inputs)
    return found[0]


def input_of(module: nn.Module, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What a module reads in one run on all examples."""
    found: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with registered([hook]), torch.no_grad():
        model(**inputs)
    return found[0]


def check(page: FeaturePage, activations: Tensor, mask: Tensor, top: int) -> None:
    """Compares a page with all activations of its feature, (examples, positions)."""
    peaks = torch.tensor([float(row[kept].max()) for row, kept in zip(activations, mask.bool(), strict=True)])
    best = sorted(range(len(peaks)), key=lambda at: (-peaks[at].item(), at))[:top]
    np.testing.assert_allclose(page.peaks, peaks.topk(min(top, len(peaks))).values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(peaks[page.examples], peaks[best], rtol=1e-5, atol=1e-6)
    for at, found in zip(page.examples, page.activations, strict=True):
        np.testing.assert_allclose(found, activations[at][mask[at].bool()], rtol=1e-5, atol=1e-6)
    every = activations[mask.bool()]
    assert page.positions == len(every) == page.counts.sum()
    assert page.density == pytest.approx(float((every > 0).double().mean()))
    near = np.abs(page.edges[:, None] - every[every != 0].numpy()).min(initial=1.0)
    if near > 1e-6:  # rounding may move what is at an edge
        np.testing.assert_array_equal(page.counts, np.histogram(every, page.edges)[0])
    assert page.counts[[0, -1]].all()


def check_logits(page: FeaturePage, effects: Tensor, count: int = 4) -> None:
    """Compares the logits of a page with the effects on all of them."""
    assert page.unknown == ""
    for found, end in ((page.promoted, effects.topk(count)), (page.suppressed, effects.topk(count, largest=False))):
        assert [token for token, _ in found] == end.indices.tolist()
        np.testing.assert_allclose([effect for _, effect in found], end.values, rtol=1e-4, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), batch=st.integers(1, 4), top=st.integers(1, 5), scale=st.sampled_from([1e-3, 1.0, 300.0]))
def test_a_stream_of_batches_finds_what_all_examples_have(
    data: st.DataObject, batch: int, top: int, scale: float
) -> None:
    """Few different numbers, so that there are ties: of equal examples, the first of the dataset comes first."""
    length, features = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    count = data.draw(st.integers(1, 9))
    numbers = data.draw(st.lists(st.integers(-3, 9), min_size=(n := count * length * features), max_size=n))
    growing = torch.arange(1, count + 1)[:, None, None]  # bins are joined on the way
    values = torch.tensor(numbers).reshape(count, length, features) * growing * scale
    model = nn.Sequential(nn.Identity())
    pg = PatchableGraph(model, values[:1])
    pages = feature_pages(pg, "sub_0.output", values, batch_size=batch, top=top)
    flat = values.reshape(count, -1)
    assert len(pages) == flat.shape[1]
    for column, page in zip(flat.T, pages.values(), strict=True):
        order = column.sort(descending=True, stable=True)
        assert page.examples.tolist() == order.indices[:top].tolist()
        assert page.peaks.tolist() == column.topk(min(top, count)).values.tolist()
        assert page.counts.tolist() == np.histogram(column, page.edges)[0].tolist()
        assert page.counts.sum() == page.positions == count
        assert np.log2(page.edges[1] - page.edges[0]) % 1 == 0


def test_latents_of_gpt2() -> None:
    model, inputs, sae = gpt2(width=WIDTH, vocabulary=30), examples(), Sae()
    nn.init.normal_(model.transformer.ln_f.weight)
    pg = PatchableGraph(model, **{name: each[:2] for name, each in inputs.items()})
    spliced = pg.splice({"layers[0].resid_post": sae, "layers[1].mlp_out": sae})
    latents = "layers[0].resid_post.sae.latents"
    both = [f"{latents}[*]", "layers[1].mlp_out.sae.latents[3]"]
    pages = feature_pages(spliced, both, inputs, batch_size=4, top=3, logits=4)
    assert list(pages) == [*(f"{latents}[{n}]" for n in range(12)), "layers[1].mlp_out.sae.latents[3]"]
    vectors = sae.decoder.weight.detach().mT
    effects = (vectors - vectors.mean(-1, keepdim=True)) * model.transformer.ln_f.weight @ model.lm_head.weight.mT
    with torch.no_grad():
        wanted = sae.encode(output_of(model.transformer.h[0], model, inputs))
        other = sae.encode(output_of(model.transformer.h[1].mlp, model, inputs))
    for number in range(12):
        page = pages[f"{latents}[{number}]"]
        check(page, wanted[..., number], inputs["attention_mask"], 3)
        check_logits(page, effects[number].detach())
        for at, tokens in zip(page.examples, page.tokens or (), strict=True):
            assert tokens.tolist() == inputs["input_ids"][at][inputs["attention_mask"][at].bool()].tolist()
    check(pages[both[1]], other[..., 3], inputs["attention_mask"], 3)
    check_logits(pages[both[1]], effects[3].detach())
    whole = feature_pages(spliced, latents, inputs, batch_size=11, top=3)
    assert list(whole) == list(pages)[:12]
    assert all((whole[name].counts == pages[name].counts).all() for name in whole)


@pytest.mark.parametrize("side", ["left", "right"])
def test_neurons_of_a_llama(side: str) -> None:
    model, inputs = llama(), examples()
    if side == "left":
        inputs = {name: each.flip(1) for name, each in inputs.items()}
    pg = PatchableGraph(model, **{name: each[:2] for name, each in inputs.items()})
    names = ["layers[*].mlp.post[..., 5]", "layers[1].attn.heads[1].z[..., 2]"]
    pages = feature_pages(pg, names, iter([{n: each[:5] for n, each in inputs.items()},
                                           {n: each[5:] for n, each in inputs.items()}]), top=4, logits=4)  # fmt: skip
    norm, unembedding = model.model.norm.weight.detach(), model.lm_head.weight.detach().mT
    for number, layer in enumerate(model.model.layers):
        page = pages[f"layers[{number}].mlp.post[..., 5]"]
        read = input_of(layer.mlp.down_proj, model, inputs)
        check(page, read[..., 5], inputs["attention_mask"], 4)
        check_logits(page, layer.mlp.down_proj.weight.detach()[:, 5] * norm @ unembedding)
    head, out = pages["layers[1].attn.heads[1].z[..., 2]"], model.model.layers[1].self_attn.o_proj
    check(head, input_of(out, model, inputs)[..., 4 + 2], inputs["attention_mask"], 4)
    check_logits(head, out.weight.detach()[:, 4 + 2] * norm @ unembedding)


def test_latents_of_a_vit(tmp_path: Path) -> None:
    model, sae = vit(), Sae()
    images = torch.randn(COUNT, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    pg = PatchableGraph(model, images[:2]).splice({"layers[1].resid_post": sae})
    name = "layers[1].resid_post.sae.latents[4]"
    page = show_feature(pg, name, images, batch_size=4, top=3, logits=4)
    with torch.no_grad():
        latents = sae.encode(output_of(model.vit.layers[1], model, {"pixel_values": images}))
    assert latents.shape == (COUNT, 5, 12)
    check(page, latents[..., 4], torch.ones(COUNT, 5), 3)
    vector = sae.decoder.weight.detach()[:, 4]
    effects = (vector - vector.mean()) * model.vit.layernorm.weight @ model.classifier.weight.mT
    check_logits(page, effects.detach())
    assert page.tokens is None
    assert all(torch.equal(row, images[at]) for row, at in zip(page.inputs, page.examples, strict=True))
    page.save_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text("utf8").count("data:image/png") == 3


@pytest.mark.parametrize(("shard_bytes", "positions"), [(1, None), (500, slice(1, None)), (2**28, -1)])
def test_pages_of_a_store_are_those_of_the_dataset(tmp_path: Path, shard_bytes: int, positions: Any) -> None:
    model, inputs = llama(), examples()
    inputs["attention_mask"][:, :2] = 1
    pg = PatchableGraph(model, **{name: each[:2] for name, each in inputs.items()})
    names = ["layers[0].mlp.post", "layers[1].mlp.post[..., 5]"]
    store = record_to(pg, tmp_path, "layers[*].mlp.post", inputs, batch_size=4, shard_bytes=shard_bytes)
    pages = feature_pages(pg, names, inputs, batch_size=3, top=4, positions=positions)
    stored = feature_pages(pg, names, store, top=4, positions=positions)
    assert list(stored) == list(pages)
    for name, page in pages.items():
        np.testing.assert_allclose(stored[name].peaks, page.peaks, rtol=1e-4)
        assert stored[name].positions == page.positions
        assert stored[name].promoted == page.promoted
        for one, other in zip(stored[name].tokens or (), page.tokens or (), strict=True):
            assert one.tolist() == other.tolist()
        for one, other in zip(stored[name].activations, page.activations, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    with pytest.raises(KeyError, match="attn"):
        feature_pages(pg, "layers[0].attn_out", store)


def test_directions_and_positions() -> None:
    model, inputs = gpt2(width=WIDTH, vocabulary=30), examples()
    inputs["attention_mask"][:] = 1
    pg = PatchableGraph(model, **{name: each[:2] for name, each in inputs.items()})
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
    names = {"along": ("layers[0].resid_post", vector), "against": ("layers[0].resid_post", -vector)}
    options: dict[str, Any] = {"batch_size": 3, "top": 2, "logits": 4}
    pages = feature_pages(pg, names, inputs, positions=slice(1, None), **options)
    activations = output_of(model.transformer.h[0], model, inputs) @ vector
    mask = torch.ones(COUNT, LENGTH)
    mask[:, 0] = 0
    later = pages["along"].activations[0]
    assert later.shape == (LENGTH,), "pages show all tokens"
    assert pages["along"].peaks[0] == pytest.approx(float(activations[:, 1:].max()), rel=1e-4)
    assert pages["along"].positions == COUNT * (LENGTH - 1)
    assert pages["along"].promoted == [(token, -effect) for token, effect in pages["against"].suppressed]
    norm, matrix = model.transformer.ln_f.weight, model.lm_head.weight.mT
    check_logits(pages["along"], ((vector - vector.mean()) * norm @ matrix).detach())


def test_what_cannot_be_is_an_error_before_anything_runs() -> None:
    model, inputs = gpt2(width=WIDTH, vocabulary=30), examples()
    pg = PatchableGraph(model, **{name: each[:2] for name, each in inputs.items()})
    for names, dataset, named in (
        ("layers[9].mlp.post[..., 5]", inputs, "layers"),
        ({"a": ("layers[0].mlp_out", torch.ones(3))}, inputs, r"layers\[0\].mlp_out"),
        ({"a": ("layers[*].mlp_out", torch.ones(WIDTH))}, inputs, r"layers\[\*\].mlp_out"),
        ([], inputs, ""),
        ("layers[0].mlp.post", [], ""),
    ):
        with pytest.raises((ExperimentError, UnknownPathError), match=named):
            feature_pages(pg, names, dataset, batch_size=2 if dataset else None)
    model.transformer.h[0].mlp.c_fc.bias.data[0] = torch.nan
    with pytest.raises(ExperimentError):
        feature_pages(pg, "layers[0].mlp.post", inputs, batch_size=2)


def test_logits_that_are_not_known_are_said_so() -> None:
    model, inputs = gpt2(width=WIDTH, vocabulary=30), examples()
    pg = PatchableGraph(model, **{name: each[:2] for name, each in inputs.items()})
    spliced = pg.splice({"layers[0].ln2": Sae(), "layers[1].mlp_out": NotLinear()})
    for place in ("layers[0].ln2", "layers[1].mlp_out"):
        page = show_feature(spliced, f"{place}.sae.latents[3]", inputs, batch_size=4)
        assert not page.promoted
        assert not page.suppressed
        assert page.unknown
        assert re.search("Logits: ", page._repr_html_())


def same(pages: dict[str, FeaturePage], others: dict[str, FeaturePage]) -> bool:
    return all(
        page._repr_html_() == others[name]._repr_html_() and page.examples.tolist() == others[name].examples.tolist()
        for name, page in pages.items()
    )


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_pages_are_continued(tmp_path: Path, kind: str) -> None:
    """After an interrupt, the batches that were read are not read again; the pages are those of one pass."""
    inputs: Any
    if kind == "texts":
        model, inputs = llama(), [{name: each[at : at + 3] for name, each in examples().items()} for at in (0, 3, 6, 9)]
        pg = PatchableGraph(model, **inputs[0])
    else:
        model, inputs = vit(), [*torch.randn(4, 3, 3, 8, 8, generator=torch.Generator().manual_seed(0))]
        pg = PatchableGraph(model, inputs[0])
    names, runs = ["layers[*].mlp.post[..., 5]", "layers[0].mlp.post[..., 1]"], []
    whole = feature_pages(pg, names, iter(inputs), top=4)

    def interrupted() -> Any:
        yield from inputs[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        feature_pages(pg, names, interrupted(), top=4, folder=tmp_path)
    inner = next(each for each in model.modules() if isinstance(each, nn.Linear))
    with registered([inner.register_forward_hook(lambda *_: runs.append(1))]):
        assert same(whole, feature_pages(pg, names, iter(inputs), top=4, folder=tmp_path))
        assert len(runs) == 2
        assert same(whole, feature_pages(pg, names, iter(inputs), top=4, folder=tmp_path))
        assert len(runs) == 2
    for wrong in ({"top": 5}, {"names": names[:1]}, {"dataset": iter(inputs[1:])}):
        given = {"names": names, "dataset": iter(inputs), "top": 4, **wrong}
        with pytest.raises(ExperimentError, match=re.escape(str(tmp_path))):
            feature_pages(pg, folder=tmp_path, **given)
    with torch.no_grad():
        next(iter(model.parameters())).add_(1.0)
    with pytest.raises(ExperimentError, match=re.escape(str(tmp_path))):
        feature_pages(pg, names, iter(inputs), top=4, folder=tmp_path)


def strengths(page: FeaturePage) -> dict[str, float]:
    return dict((*page.heads, *page.features))


def test_heads_and_neurons_that_write_to_a_neuron() -> None:
    """Queries and keys do not count; what is read goes through a norm, whose weights count, and whose mean does not."""
    model = gpt2(width=WIDTH, vocabulary=30)
    for block in model.transformer.h:
        nn.init.normal_(block.ln_2.weight)
    pg = PatchableGraph(model, torch.arange(LENGTH)[None])
    neuron = "layers[1].mlp.post[..., 5]"
    page = show_feature(pg, neuron, examples(), batch_size=4, logits=1000)
    read = model.transformer.h[1].mlp.c_fc.weight.detach()[:, 5] * model.transformer.h[1].ln_2.weight.detach()
    read = read - read.mean()
    expected = {}
    for layer, block in enumerate(model.transformer.h):
        values, out = block.attn.c_attn.weight.detach()[:, 2 * WIDTH :], block.attn.c_proj.weight.detach()
        heads = model.config.n_head
        for head, (v, o) in enumerate(zip(values.chunk(heads, 1), out.chunk(heads), strict=True)):
            expected[f"layers[{layer}].attn.heads[{head}].z"] = (v @ o @ read).norm() / (v @ o).norm() / read.norm()
    written = model.transformer.h[0].mlp.c_proj.weight.detach()
    expected |= {
        f"layers[0].mlp.post[..., {number}]": torch.cosine_similarity(row, read, dim=0)
        for number, row in enumerate(written)
    }
    found = strengths(page)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), abs=1e-5)
    for pairs in (page.heads, page.features):
        sizes = [abs(value) for _, value in pairs]
        assert sizes == sorted(sizes, reverse=True)
    few = show_feature(pg, neuron, examples(), batch_size=4, logits=3)
    assert (few.heads, few.features) == (page.heads[:3], page.features[:3])
    assert "Written by" in few._repr_html_()
    direction = show_feature(pg, {"a": ("layers[0].resid_post", read)}, examples(), batch_size=4, logits=1000)
    earlier = {name for name in expected if name.startswith("layers[0]")}
    assert strengths(direction).keys() == earlier
    assert strengths(direction)["layers[0].mlp.post[..., 3]"] == pytest.approx(
        float(torch.cosine_similarity(written[3], read, dim=0)), abs=1e-5
    )


def test_texts_in_pages_are_escaped() -> None:
    class Words:
        def decode(self, ids: list[int]) -> str:
            return f"<b>{ids[0]}\n"

    model, inputs = gpt2(width=WIDTH, vocabulary=30), examples()
    pg = PatchableGraph(model, **{name: each[:2] for name, each in inputs.items()}, tokenizer=None)
    page = show_feature(pg, {"<i>": ("layers[0].mlp_out", torch.ones(WIDTH))}, inputs, batch_size=4)
    object.__setattr__(page, "tokenizer", Words())
    text = page._repr_html_()
    assert "<i>" not in text
    assert f"&lt;b&gt;{page.tokens[0][0]}⏎" in text  # type: ignore[index]


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_written_as_png(tmp_path: Path, channels: int) -> None:
    from matplotlib import image

    pixels = torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8).numpy()
    (tmp_path / "a.png").write_bytes(png_of(pixels.transpose(1, 2, 0)))
    read = (image.imread(tmp_path / "a.png") * 255).round()
    np.testing.assert_array_equal(
        read if channels == 1 else read.transpose(2, 0, 1), pixels[0] if channels == 1 else pixels
    )
