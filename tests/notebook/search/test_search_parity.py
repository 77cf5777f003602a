"""The search of the widget finds what `find` finds: both are held to `js/tests/fixtures/queries.json`.

js/tests/tree/parity.test.ts reads it, too. `python -m tests.notebook.search.test_search_parity` writes it anew.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.notebook.search import find
from graphpatch_notebook.notebook.views.skeleton import skeleton_of
from tests.notebook.hostile import hostile_graph
from tests.zoo.submodules import Submodules, copies

FIXTURE = Path(__file__).parents[3] / "js" / "tests" / "fixtures" / "queries.json"


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, width).unbind(2)
        attn_weights = query @ key.transpose(1, 2) * self.scale
        if mask is not None:
            attn_weights = attn_weights.masked_fill(mask, -1e9)
        attn_weights = attn_weights.softmax(-1)
        return attn_weights @ value, attn_weights


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> dict[str, Any]:
        attended, pattern = self.attn(x)
        x = x + attended
        hidden = self.mlp(x).double()
        return {"hidden": hidden.float(), "weights": (pattern, hidden.shape[1]), "Größe.x": x.long()}


class Model(
    Submodules,
    embed=partial(nn.Embedding, 50, 8),
    h=copies(partial(Block, 8), 12),
    head=partial(nn.Linear, 8, 50, bias=False),
    unused=(3, 3),
):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = block(x)["hidden"]
        return self.head(x)


class Layer(
    Submodules,
    ln_1=partial(nn.LayerNorm, 8),
    ln_2=partial(nn.LayerNorm, 8),
    qkv=(8, 24),
    proj=(8, 8),
    mlp=[(8, 32), nn.GELU, (32, 8)],
):
    """A layer whose parts have component names."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1))
        z = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(z.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class Layered(
    Submodules, embed=partial(nn.Embedding, 50, 8), h=copies(Layer, 6), head=partial(nn.Linear, 8, 50, bias=False)
):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.h:
            x = layer(x)
        return self.head(x)


def layered_graph() -> PatchableGraph:
    return PatchableGraph(Layered().eval(), torch.arange(6).view(2, 3))


def transformer_graph() -> PatchableGraph:
    return PatchableGraph(Model().eval(), torch.arange(6).view(2, 3))


MODELS = {
    "hostile": cache(hostile_graph),
    "transformer": cache(transformer_graph),
    "components": cache(layered_graph),
}
PATCHED = {
    "hostile": ["blocks_1.linear", 'output|"a.b"'],
    "transformer": ["h_3.attn.attn_weights", "h_11.output|weights.sub_1", "ids"],
    "components": ["h_3.output"],
}

TERMS = """
attn ATTN h_1 h_1. mlp output| sub_0 größe GRÖSSE ß 名 b . _ relu "x a-b " x]
op:add op:ADD op:* op:*a*d* op:matmul op:soft* op:.* op:linear op:output op:nothing op:
shape:8 shape:[] shape:[*] shape:[2,3,8] shape:[2,*,8] shape:* shape:[8,] shape:x shape:-1 shape:[2,,3] shape: shape:[2,
shape:... shape:[,] shape:2,3 SHAPE:[*] shape:[8]x
is:patched is:opaque is:size is:tensor is:number is:input is:parameter is:buffer is:attribute is:op is:output
IS:Output is:nothing is: kind:op dtype:f32 module:Linear foo:bar http://x
h_*.attn *ATTN* h_*1*mul ***x *ids* b*.*w attn**weights *.qkv.* *größe*x h*|* *foo:bar -h_*.attn -*x*
layers[3].attn.pattern layers[*].mlp_out LAYERS[2].MLP_OUT resid_post attn.q @embed pattern layers[9].z -resid
-attn -op:add -shape:8 -is:size -is:tensor -is:patched --attn -
""".split("\n")
SENTENCES = ["", "   ", "attn\tmlp", "attn  -mlp", "shape:[2, 3, 8]", "shape:[ 2 , * ,8 ] -is:op", "two * words"]
SENTENCES += ["h_1 softmax", "is:size h_0", "-is:size shape", "h_*. op:linear -qkv", "attn - mlp", 'attn"x"']
SENTENCES += ["\u00a0attn\u2003mlp", "attn\x1cmlp", "attn\ufeffmlp", "shape:[2,3] x", "is:tensor is:number"]


def queries() -> Iterator[str]:
    terms = [term for line in TERMS for term in line.split()]
    yield from SENTENCES
    yield from terms
    chance = random.Random(0)
    for count in (2, 3):
        for _ in range(80):
            yield " ".join(chance.sample(terms, count))


def found_rows(pg: PatchableGraph, query: str, patched: list[str]) -> list[int] | None:
    try:
        paths = find(pg, query, patched).paths
    except ValueError:
        return None
    return [skeleton_of(pg).row(path) for path in paths]


def current() -> dict[str, Any]:
    """What the fixture has to be: of each model its rows, components and paths, and the rows that each query finds."""
    fixture = {}
    for name, model in MODELS.items():
        pg, patched = model(), PATCHED[name]
        skeleton = skeleton_of(pg)
        fixture[name] = {
            "columns": json.loads(zlib.decompress(skeleton.data)),
            "components": msgspec.to_builtins(skeleton.components()),
            "paths": [skeleton.path(row) for row in range(len(skeleton))],
            "patched": [skeleton.row(path) for path in patched],
            "queries": [[query, found_rows(pg, query, patched)] for query in queries()],
        }
    return fixture


def test_the_queries_that_the_widget_is_held_to_are_answered_like_this() -> None:
    written, now = json.loads(FIXTURE.read_text(encoding="utf-8")), json.loads(json.dumps(current()))
    assert written.keys() == now.keys()
    for model in now:
        for part in now[model]:
            assert written[model][part] == now[model][part], (
                f"{model}: write the fixture anew, as the top of this file says"
            )
    answers = [answer for model in now.values() for _, answer in model["queries"]]
    assert min(answers.count(None), answers.count([])) > 40  # they are of all sorts
    assert len({tuple(answer) for answer in answers if answer}) > 100


def write() -> None:
    """Writes the fixture anew."""
    FIXTURE.parent.mkdir(exist_ok=True)
    lines = []
    for name, model in current().items():
        parts = [f"{json.dumps(part)}: {json.dumps(value, ensure_ascii=False)}" for part, value in model.items()]
        lines.append(f"{json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n}")
    FIXTURE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
