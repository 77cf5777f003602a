"""The generation view shows what `generate` does by itself, with hooks for patches, and branches at a token."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import show_generation
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.session import session_of
from graphpatch_notebook.notebook.views.generation import GenerationView
from tests.components.families import captured_model

STEPS = 6


@pytest.fixture(scope="module")
def llama() -> tuple[PatchableGraph, Tensor]:
    pg, ids = captured_model("llama")
    return pg, ids[:1]


@pytest.fixture
def view(llama: tuple[PatchableGraph, Tensor]) -> Iterator[GenerationView]:
    pg, ids = llama
    with contextlib.closing(show_generation(pg, ids, max_new_tokens=STEPS)) as view:
        yield view
    session_of(pg).clear()


def _scaled(by: Tensor, _: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * by


def by_hand(model: Any, ids: Tensor, forced: list[int], zeroed: int | None = None) -> tuple[list[int], Tensor]:
    """Returns the tokens of a greedy generation without a cache, and their logits.

    Args:
        model: The model.
        ids: The prompt.
        forced: The first tokens.
        zeroed: The step after the first in which the first MLP writes zeros.
    """
    tokens: list[int] = []
    rows: list[Tensor] = []
    for step in range(STEPS):
        whole = torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], 1)
        kept = torch.ones(1, whole.shape[1], 1)
        if zeroed is not None:
            kept[:, ids.shape[1] + zeroed - 1 :][:, :1] = 0
        write = partial(_scaled, kept)
        with model.model.layers[0].mlp.register_forward_hook(write), torch.no_grad():
            rows.append(model(whole).logits[0, -1])
        tokens.append(forced[step] if step < len(forced) else int(rows[-1].argmax()))
    return tokens, torch.stack(rows)


def received(view: GenerationView) -> list[dict[str, Any]]:
    """Returns the numbers of each line, as the front end reads them."""
    data, at, lines = zlib.decompress(view.numbers), 0, []
    top, texts = view.generation["top"], np.array(view.generation["vocabulary"])
    for line in view.generation["lines"]:
        found = {}
        forms = {
            "tokens": ("<u4", 1),
            "log": ("<f4", 1),
            "entropy": ("<f4", 1),
            "top": ("<u4", top),
            "part": ("<f4", top),
        }
        for name, (kind, size) in forms.items():
            found[name] = np.frombuffer(data, kind, line["steps"] * size, at).reshape(line["steps"], size)
            at += found[name].nbytes
        lines.append({**found, "tokens": texts[found["tokens"][:, 0]], "top": texts[found["top"]]})
    assert at == len(data)
    return lines


def check(line: dict[str, Any], tokens: list[int], logits: Tensor) -> None:
    logs = logits.log_softmax(-1)
    assert line["tokens"].tolist() == [str(token) for token in tokens]
    assert np.allclose(line["log"][:, 0], logs.gather(-1, torch.tensor(tokens)[:, None])[:, 0], atol=1e-4)
    assert np.allclose(line["entropy"][:, 0], torch.distributions.Categorical(logits=logits).entropy(), atol=1e-4)
    assert np.allclose(line["part"], logs.exp().topk(line["part"].shape[1]).values, atol=1e-5)


def test_lines_are_what_generate_gives_without_and_with_patches_and_at_branches(
    view: GenerationView, llama: tuple[PatchableGraph, Tensor]
) -> None:
    pg, ids = llama
    model, session = pg._module, session_of(pg)
    clean, logits = by_hand(model, ids, [])
    check(received(view)[0], clean, logits)
    assert view.generation["prompt"] == [str(token) for token in ids[0].tolist()]
    other = int(logits[2].topk(2).indices[1])
    view.branch(2, other)
    expected = by_hand(model, ids, [*clean[:2], other])
    check(received(view)[1], *expected)
    assert view.generation["lines"][1] == {"name": "Branch at step 2", "steps": STEPS, "branch": 0, "start": 2}
    # A patch for one step, in both; branches of the line with patches have them at the same steps.
    session.add(ChosenPatch("model.layers_0.mlp.output", "zero", steps="3"))
    view.update()
    patched = by_hand(model, ids, [], zeroed=3)
    for line, right in zip(received(view), (by_hand(model, ids, []), patched, expected), strict=True):
        check(line, *right)
    view.branch(1, other, line=1)
    check(received(view)[3], *by_hand(model, ids, [patched[0][0], other], zeroed=3))
    # Without the patches, that branch is one without them.
    session.clear()
    view.update()
    assert len(received(view)) == 3
    check(received(view)[2], *by_hand(model, ids, [patched[0][0], other]))
    assert str(clean[0]) in view._static_html()


def test_requests_of_the_front_end(view: GenerationView) -> None:
    answers: list[Any] = []
    view.send = lambda content, buffers=None: answers.append(content)  # type: ignore[method-assign]

    def ask(**payload: int | None) -> dict[str, Any]:
        whole = {"line": None, "step": None, "token": None, "remove": None, **payload}
        view._answer({"id": 1, "request": "generation", "payload": whole})
        if view._job is not None:
            view._job.wait()
            whole = dict.fromkeys(whole)
            view._answer({"id": 1, "request": "generation", "payload": whole})
            return answers[-2]
        return answers[-1]

    assert ask()["result"]["state"] == "done"
    assert "result" in ask(line=0, step=1, token=5)
    assert [line["branch"] for line in view.generation["lines"]] == [None, 0]
    for wrong in ({"line": 7}, {"step": 99}, {"token": 10**6}):
        assert "error" in ask(**{"line": 0, "step": 1, "token": 5, **wrong})
    assert "error" in ask(remove=4)
    ask(remove=0)
    assert len(view.generation["lines"]) == 1
