"""Component names in notebooks: commands, cells, files of chosen patches and exported code."""

from __future__ import annotations

import pytest
import torch
from IPython.core.completer import provisionalcompleter

from graphpatch_notebook import GraphPatchWarning, ProbePatch, ZeroPatch
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.views.skeleton import Skeleton
from tests.hooks import registered

MODELS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from graphpatch_notebook import PatchableGraph

torch.manual_seed(0)
x = torch.arange(10).reshape(2, 5)
tokens = dict(vocab_size=20, bos_token_id=0, eos_token_id=0)
gpt = GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=4, n_embd=16, n_positions=16, **tokens)).eval()
sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2)
llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes, **tokens)).eval()
pg, other = PatchableGraph(gpt, x), PatchableGraph(llama, x)
"""


@pytest.fixture
def models(plain_shell):
    plain_shell.ok("%load_ext graphpatch_notebook")
    plain_shell.ok(MODELS)
    plain_shell.ok("%graphpatch use pg")
    return plain_shell


def logits(shell, graph, patch_map):
    pg, x = shell.namespace[graph], shell.namespace["x"]
    with pg.patch(patch_map):
        return pg(x).logits


def test_commands_and_cells(models):
    models.ok("%graphpatch zero layers[-1].attn.heads[2].z[:, -1]")
    models.ok("%graphpatch zero @embed[0]")
    models.ok("%graphpatch probe layers[0].resid_mid")
    assert "#1" in models.ok("%graphpatch rm layers[2].attn.heads[2].z").out
    models.ok("%graphpatch undo")
    models.ok("%%graphpatch\nout = pg(x)")
    probe = ProbePatch()
    expected = logits(
        models,
        "pg",
        {
            "transformer.h_2.attn.attn_output": ZeroPatch(slice=(slice(None), 2, -1)),
            "transformer.wte.output": ZeroPatch(slice=0),
            "transformer.h_0.hidden_states_1": probe,
        },
    )
    assert torch.equal(models.namespace["out"].logits, expected)
    assert torch.equal(models.namespace["layers_0_resid_mid"], probe.activation)


def test_loops_and_completion(models):
    models.ok("for i in range(2):\n    %graphpatch zero layers[{i}].mlp_out[:, i]")
    assert "layers[1].mlp_out[:, i]" in str(models.ok("%graphpatch list").value)
    for text, offer in (
        ("%graphpatch zero layers[0].att", "layers[0].attn.z"),
        ('pg.patch({"layers[1].mlp', "layers[1].mlp.post"),
        ("%graphpatch zero @", "@embed"),
    ):
        with provisionalcompleter():
            offers = [found.text for found in models.ip.Completer.completions(text, len(text))]
        assert offer in offers
    assert "transformer.h_2.mlp.output" in str(models.ok("%graphpatch find layers[2].mlp_out").value)
    assert "there are 3 layers" in str(models.ok("%graphpatch find layers[3].mlp_out").value)


def test_a_session_of_one_model_loads_on_another(models, tmp_path):
    models.ok("%graphpatch zero layers[1].attn.heads[2].z[:, -1]")
    models.ok("%graphpatch add layers[0].mlp_out 0.5 --positions 3")
    models.ok("%graphpatch zero layers[2].mlp_out")
    models.ok(f"%graphpatch save {tmp_path}/session.json")
    models.ok("%graphpatch use other")
    with pytest.warns(GraphPatchWarning, match=r"layers\[2\].mlp_out"):
        ran = models.ok(f"%graphpatch load {tmp_path}/session.json")
    assert "loaded 2 patches" in ran.out
    assert "layers[1].attn.heads[2].z is model.layers_1.self_attn.attn_output here" in ran.out
    source = str(models.ok("%graphpatch export").value)
    assert '"layers[1].attn.heads[2].z": ZeroPatch(slice=(slice(None), -1))' in source
    models.ok("%%graphpatch\nout = other(x)")
    models.ok(source)  # the same numbers as the cell
    assert torch.equal(models.namespace["out"].logits, models.namespace["output"].logits)
    assert not torch.equal(models.namespace["out"].logits, logits(models, "other", {}))


def test_the_last_position_in_cells_exported_code_and_files_is_that_of_hooks(models, tmp_path):
    model, x = models.namespace["gpt"], models.namespace["x"]

    def hook(_, args, output):
        output = output.clone()
        output[:, -1] = 0
        return output

    def expected(ids, **options):
        with torch.no_grad(), registered([model.transformer.h[1].mlp.register_forward_hook(hook)]):
            return model.generate(ids, **options) if options else model(ids).logits

    models.ok("%graphpatch zero layers[1].mlp_out --positions -1")
    assert "--positions -1" in str(models.ok("%graphpatch list").value)
    models.ok("%%graphpatch\nout = pg(x)")
    assert torch.equal(models.namespace["out"].logits, expected(x))
    source = str(models.ok("%graphpatch export").value)
    assert "ZeroPatch(positions=-1)" in source
    models.ok(source)
    assert torch.equal(models.namespace["output"].logits, expected(x))
    models.ok(f"%graphpatch save {tmp_path}/session.json")
    models.ok("%graphpatch clear")
    models.ok(f"%graphpatch load {tmp_path}/session.json")
    models.ok("%%graphpatch\nshort = pg(x[:, :3])")
    assert torch.equal(models.namespace["short"].logits, expected(x[:, :3]))
    models.ok("%%graphpatch\ntokens = pg.generate(x, max_new_tokens=3, do_sample=False)")
    assert torch.equal(models.namespace["tokens"], expected(x, max_new_tokens=3, do_sample=False))


def test_the_browser_knows_the_node_and_shows_the_part(models):
    models.ok("pass")
    graph = models.namespace["pg"]
    skeleton = Skeleton(graph.nodes)
    row = skeleton.row("layers[1].attn.heads[2].z")
    assert skeleton.path(row) == "transformer.h_1.attn.attn_output"
    check = Session(graph).check(ChosenPatch("layers[1].attn.heads[2].z", "zero", slice=":, 1:"))
    assert (check.shape, check.sliced) == ((2, 5, 4), (2, 4, 4))
