"""The guides that redo tutorials of other tools: their numbers equal plain hooks, and no step is longer than there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from tests.hooks import registered

ROOT = Path(__file__).parents[1]
PAGES = {
    name: ROOT / "docs" / "guides" / f"{name}.md"
    for name in ("from_transformerlens_demo", "path_patching_ioi", "from_nnsight_tutorials")
}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WIDTH, SIZE, HEADS = 64, 16, 4
PARTS = {"q": 0, "k": WIDTH, "v": 2 * WIDTH}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Gives the variables of a page after its code ran."""
    known: dict[str, dict[str, Any]] = {}

    def of_page(page: str) -> dict[str, Any]:
        if page not in known:
            folder, found = tmp_path_factory.mktemp(page), dict[str, Any]()
            for number, source in enumerate(BLOCK.findall(PAGES[page].read_text("utf8"))):
                file = folder / f"block_{number}.py"  # capture reads the names of variables from the source
                file.write_text(source.replace('"examples/', f'"{ROOT.as_posix()}/examples/'), "utf8")
                with torch.enable_grad():
                    exec(compile(file.read_text("utf8"), str(file), "exec", dont_inherit=True), found)
            known[page] = found
        return known[page]

    return of_page


def tokens_of(page: dict[str, Any]) -> list[Tensor]:
    """Returns the tokens of the two texts of a page."""
    return [torch.tensor([page["tokenizer"].encode(page[name])]) for name in ("clean", "corrupted")]


@contextmanager
def hooked(*hooks: Any) -> Iterator[None]:
    """Adds forward hooks, given as (module, function), for the time of a block."""
    handles = [module.register_forward_hook(function) for module, function in hooks]
    with registered(handles):
        yield


def keep(into: dict[Any, Tensor], key: Any, *, of_input: bool = False) -> Callable[..., None]:
    def hook(module: Any, args: Any, out: Any) -> None:
        value = args[0] if of_input else out[0] if isinstance(out, tuple) else out
        into[key] = value
        if value.requires_grad:
            value.retain_grad()

    return hook


def values(model: Any, ids: Tensor, metric: Any = None) -> dict[Any, Tensor]:
    """Returns what hooks see in a run, by name and layer; with gradients of the metric, if one is given."""
    found: dict[Any, Tensor] = {}
    hooks: list[Any] = []
    for layer, block in enumerate(model.transformer.h):
        hooks += [(block.ln_1, keep(found, ("resid_pre", layer), of_input=True))]
        hooks += [(block.attn.c_attn, keep(found, ("qkv", layer)))]
        hooks += [(block.attn.c_proj, keep(found, ("z", layer), of_input=True))]
        hooks += [(block.attn, keep(found, ("attn_out", layer)))]
        hooks += [(block.ln_2, keep(found, ("resid_mid", layer), of_input=True))]
        hooks += [(block.mlp, keep(found, ("mlp_out", layer))), (block, keep(found, ("resid_post", layer)))]
    with hooked(*hooks):
        output = model(ids)
    if metric is not None:
        metric(output).backward()
        model.zero_grad()
    return found


def loaded(attention: str = "sdpa") -> Any:
    folder = ROOT / "examples" / "induction_model"
    return GPT2LMHeadModel.from_pretrained(folder, attn_implementation=attention).eval()


def written(index: Any, value: Any) -> Callable[..., Any]:
    """Returns a hook that writes into what a module returns."""

    def hook(module: Any, args: Any, out: Any) -> Any:
        new = (out[0] if isinstance(out, tuple) else out).clone()
        new[index] = value
        return (new, *out[1:]) if isinstance(out, tuple) else new

    return hook


@contextmanager
def with_z(model: Any, by_layer: dict[int, Tensor]) -> Iterator[None]:
    """Replaces the output of all heads of some layers, before the output projection."""

    def hook(value: Tensor) -> Callable[..., Any]:
        return lambda module, args: (value,)

    blocks = model.transformer.h
    handles = [blocks[i].attn.c_proj.register_forward_pre_hook(hook(value)) for i, value in by_layer.items()]
    with registered(handles):
        yield


def head(number: int, start: int = 0) -> Any:
    return (..., slice(start + SIZE * number, start + SIZE * number + SIZE))


def mixed(z: Tensor, other: Tensor, number: int) -> Tensor:
    result = z.clone()
    result[head(number)] = other[head(number)]
    return result


def close(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    expected = expected.detach().numpy() if isinstance(expected, Tensor) else expected
    np.testing.assert_allclose(np.asarray(found), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("page", PAGES)
def test_no_step_has_more_lines_than_there(page: str) -> None:
    sections = PAGES[page].read_text("utf8").split("\n## ")[1:]
    counted = 0
    for section in sections:
        stated = re.search(r"^(\d+) lines? there, (\d+) here\.$", section, re.MULTILINE)
        if stated is None:
            continue
        lines = [line for source in BLOCK.findall(section) for line in source.splitlines()]
        own = [line for line in lines if line.strip() and not re.match(r"\s*(#|print\(|from |import )", line)]
        assert len(own) == int(stated[2]), section
        assert len(own) <= int(stated[1]), section
        counted += 1
    assert counted > 2


def test_steps_of_the_main_demo_equal_hooks(names: Callable[[str], dict[str, Any]]) -> None:
    page = names("from_transformerlens_demo")
    model, ids, metric = loaded(), page["ids"], page["metric"]
    clean, corrupted = tokens_of(page)
    by_hook, blocks = values(model, ids), model.transformer.h
    for (name, layer), value in by_hook.items():
        if name not in ("z", "qkv"):
            close(page["cache"][f"layers[{layer}].{name}"].detach(), value)
    patterns = loaded("eager")(ids, output_attentions=True).attentions
    for layer, pattern in enumerate(patterns):
        close(page["cache"][f"layers[{layer}].attn.pattern"].detach(), pattern)
        close(page["scores"].sel(layer=layer), pattern[0][:, [5, 6, 7, 8], [2, 3, 4, 5]].mean(-1))
    close(page["first"].detach(), patterns[0])
    by_position = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    close(page["by_position"].detach(), by_position)
    close(page["loss"].detach(), model(ids, labels=ids).loss)
    with hooked((blocks[0].attn.c_attn, written(head(3, PARTS["v"]), 0))):
        close(page["ablated_loss"].detach(), model(ids, labels=ids).loss)
    assert torch.equal(page["tokens"], model.generate(ids, max_new_tokens=4, do_sample=False))

    stream = values(model, clean)
    ends = [metric(model(tokens)) for tokens in (corrupted, clean)]
    for layer, position in np.ndindex(2, 7):
        place = (slice(None), position)
        before = model.transformer.drop if layer == 0 else blocks[0]
        with hooked((before, written(place, stream["resid_pre", layer][place]))):
            close(page["patched"][layer, position], (metric(model(corrupted)) - ends[0]) / (ends[1] - ends[0]))

    for layer, number in np.ndindex(2, HEADS):
        attention = blocks[layer].attn
        value = attention.c_attn.weight[head(number, PARTS["v"])]
        in_stream = value @ attention.c_proj.weight[SIZE * number : SIZE * number + SIZE]
        token_by_token = model.transformer.wte.weight @ in_stream @ model.lm_head.weight.T
        for name, matrix in (("in_stream", in_stream), ("copying", token_by_token)):
            eigenvalues = torch.linalg.eigvals(matrix.double())
            score = eigenvalues.sum().real / eigenvalues.abs().sum()
            close(page[name][layer, number].detach(), score, 1e-3)


def test_steps_of_the_attribution_patching_demo_equal_hooks(names: Callable[[str], dict[str, Any]]) -> None:
    page = names("from_transformerlens_demo")
    model, metric = loaded(), page["metric"]
    clean, corrupted = tokens_of(page)
    at_clean, at_corrupted = values(model, clean), values(model, corrupted, metric)
    of_entries = {key: (at_clean[key] - value) * value.grad for key, value in at_corrupted.items()}
    for layer in range(2):
        for name in ("attn_out", "mlp_out"):
            close(page["of_parts"].sel(layer=layer, component=name), of_entries[name, layer].sum((0, 2)))
        for name in ("resid_pre", "resid_mid"):
            close(page["of_stream"].sel(layer=layer, component=name), of_entries[name, layer].sum((0, 2)))
        for number in range(HEADS):
            place = {"layer": layer, "head": number}
            expected = of_entries["z", layer][head(number)].sum((0, 2))
            close(page["of_heads"].sel(component="attn.heads[*].z", **place), expected)
            for name, start in PARTS.items():
                expected = of_entries["qkv", layer][head(number, start)].sum((0, 2))
                close(page["of_heads"].sel(component=f"attn.heads[*].{name}", **place), expected)

    unfused = loaded("eager")
    runs = [unfused(tokens, output_attentions=True) for tokens in (clean, corrupted)]
    gradients = [torch.autograd.grad(metric(run), run.attentions) for run in runs]
    close(page["of_patterns"].detach(), torch.stack(runs[0].attentions) * torch.stack(gradients[0]))
    change = torch.stack(runs[0].attentions) - torch.stack(runs[1].attentions)
    close(page["of_pattern"], (change * torch.stack(gradients[1])).sum((1, 3, 4)))
    for layer, number in np.ndindex(2, HEADS):
        with with_z(model, {layer: mixed(at_corrupted["z", layer], at_clean["z", layer], number)}):
            close(page["exact"].sel(layer=layer, head=number), metric(model(corrupted)))


@torch.no_grad()
def test_steps_of_nnsights_tutorials_equal_hooks(names: Callable[[str], dict[str, Any]]) -> None:
    page = names("from_nnsight_tutorials")
    model, metric = loaded(), page["metric"]
    clean, corrupted = tokens_of(page)
    blocks, everything = model.transformer.h, slice(None)
    at_clean, logits = values(model, clean), model(clean).logits
    close(page["hidden"].detach(), at_clean["resid_post", 1])
    close(page["logits"].detach(), logits)
    close(page["early"].detach(), at_clean["mlp_out", 0])
    close(page["inside"].detach().flatten(2), at_clean["z", 0])
    changed_part = at_clean["mlp_out", 0].clone()
    changed_part[..., 0] = 0
    close(page["after"].detach(), changed_part)
    with hooked((blocks[0], written(everything, at_clean["resid_post", 0] + page["noise"]))):
        close(page["noisy"].detach(), model(clean).logits)
    with hooked((blocks[0], written(everything, page["noise"]))):
        close(page["changed"].detach(), model(clean).logits)
    with hooked((blocks[1], written(everything, at_clean["resid_post", 0]))):
        close(page["skipped"].detach(), model(clean).logits)
    assert torch.equal(page["tokens"], model.generate(clean, max_new_tokens=3, do_sample=False))
    close(page["record"].activations[-1].detach(), values(model, page["tokens"][:, :-1])["resid_post", 1])
    states = [at_clean["resid_pre", 0], at_clean["resid_post", 0], at_clean["resid_post", 1]]
    for layer, state in enumerate(states):
        close(page["lens"].sel(layer=layer), model.lm_head(model.transformer.ln_f(state)))
    ends = [metric(model(tokens)) for tokens in (corrupted, clean)]
    for layer, position in np.ndindex(2, 7):
        place = (everything, position)
        with hooked((blocks[layer], written(place, at_clean["resid_post", layer][place]))):
            close(page["patched"][layer, position], (metric(model(corrupted)) - ends[0]) / (ends[1] - ends[0]))
    with torch.enable_grad():
        at_clean = values(model, clean, lambda output: output.logits.sum())
        close(page["gradient"], at_clean["resid_post", 0].grad)
        at_corrupted = values(model, corrupted, metric)
    for layer, number in np.ndindex(2, HEADS):
        z = at_corrupted["z", layer]
        products = (at_clean["z", layer] - z) * z.grad
        close(page["scores"].sel(layer=layer, head=number).squeeze(), products[head(number)][:, -1].sum())
