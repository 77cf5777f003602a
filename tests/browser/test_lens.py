"""The lens view in JupyterLab: a click on a cell patches it; a generation branches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.notebook_page import NotebookPage

MODEL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from graphpatch_notebook import PatchableGraph
from graphpatch_notebook import ZeroPatch
from graphpatch_notebook.experiments import show_generation, show_heatmap, show_lens

torch.manual_seed(0)
config = GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=40, bos_token_id=None, eos_token_id=None)
model = GPT2LMHeadModel(config).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.4)
ids = torch.arange(6)[None]
pg = PatchableGraph(model, ids)
"""
SHOW = """
lens = show_lens(pg, ids, target=7)
lens
"""
GENERATE = """
generation = show_generation(pg, ids, max_new_tokens=5)
generation
"""

SWEEP = """
names = [f"layers[{layer}].resid_post" for layer in range(3)]
result = pg.sweep(
    {"path": names, "position": range(6)},
    lambda path, position: {path: ZeroPatch(slice=(slice(None), position))},
    ids, metric=lambda output: output.logits[0, -1, 7], progress=False,
)
heatmap = show_heatmap(result, pg=pg, title="Zero")
heatmap
"""

# Log-probabilities of greedy tokens by plain torch: each step runs the whole text, in which position 4 of the first
# block's output is zero.
BY_HOOKS = """
def said_by_hooks(is_patched):
    def zero(block, args, output):
        if is_patched:
            (output[0] if isinstance(output, tuple) else output)[:, 4] = 0
    handle, text, said = model.transformer.h[0].register_forward_hook(zero), ids, []
    with torch.no_grad():
        for _ in range(5):
            best = model(text).logits[:, -1:].log_softmax(-1).max(-1)
            said.append(best.values.item())
            text = torch.cat([text, best.indices], 1)
    handle.remove()
    return said
"""


def test_a_cell_is_patched_by_a_click_and_generated_tokens_branch(
    notebook: NotebookPage, write: Callable[..., str], take_picture: Callable[[str], Path]
) -> None:
    notebook.open(write(MODEL, SHOW, GENERATE, BY_HOOKS, SWEEP))
    for cell in range(5):
        notebook.run(cell)
    lens = notebook.cell(1).get_by_role("region", name="Logit lens")
    canvas = lens.get_by_role("img").first
    expect(canvas).to_be_visible()
    box = canvas.bounding_box()
    assert box is not None
    # The lowest row is that of the embeddings.
    canvas.click(position={"x": 4.5 * box["width"] / 6, "y": 2.5 * box["height"] / 4})
    expect(lens).to_contain_text("layers[0].resid_post[:, 4]")
    lens.get_by_role("button", name="Zero").click()
    expect(lens.get_by_text("With the patches").first).to_be_visible()
    expect(lens.get_by_role("img")).to_have_count(3)
    notebook.wait_for_value("[lens.lens['runs'], lens.selection[0]['layer'], lens.selection[0]['position']]", [2, 0, 4])
    take_picture("lens")
    generation = notebook.cell(2).get_by_role("region", name="Generation")
    # The patch is for a position of the text, which only the step of the prompt computes.
    patched = generation.get_by_role("group", name="With the patches")
    for line, is_patched in ((generation.get_by_role("group", name="Without patches"), False), (patched, True)):
        expect(line.get_by_role("button")).to_have_count(5)
        labels = [token.get_attribute("aria-label") or "" for token in line.get_by_role("button").all()]
        said = [float(label.split()[-1].strip("<>%")) / 100 for label in labels]
        logs = notebook.value(f"said_by_hooks({is_patched})")
        assert said == pytest.approx([math.exp(log) for log in logs], abs=0.001)
    lens.get_by_role("button", name="Undo").click()
    expect(patched).not_to_be_visible()
    generation.get_by_role("button", name=re.compile("^step 2:")).first.click()
    generation.get_by_role("button", name=re.compile("^Branch with .* at step 2$")).first.click()
    expect(generation.get_by_role("group", name=re.compile("^Branch at step 2"))).to_be_visible()
    assert notebook.value("len(generation.generation['lines'])") == 2
    take_picture("generation")
    # A cell of a result over a component of each layer is patched like one of the lens, which follows.
    result = notebook.cell(4).get_by_role("region", name="Heatmap")
    notebook.scroll_to(4)
    canvas = result.get_by_role("img")
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": 4.5 * box["width"] / 6, "y": 2.5 * box["height"] / 3})
    expect(result.get_by_role("toolbar", name="Selection")).to_contain_text("layers[0].resid_post[:, 4]")
    result.get_by_role("button", name="Zero").click()
    expect(result.get_by_role("group", name="Patches")).to_contain_text("#")
    take_picture("result")
    notebook.wait_for_value("lens.lens['runs']", 2)
    patch = "lens.session['patches'][0]"
    expected = ["zero", "layers[0].resid_post", "4"]
    assert notebook.value(f"[{patch}['kind'], {patch}['path'], {patch}['positions']]") == expected
