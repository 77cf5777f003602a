"""The lens view sends what the model's own last modules say of each state, and follows the patches."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import traitlets
from torch import Tensor

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import show_lens
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.session import session_of
from graphpatch_notebook.notebook.views.lens import LensView
from tests.components.families import captured_model
from tests.hooks import registered


class Words:
    """A tokenizer whose tokens need escapes."""

    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(part) for part in text.strip("<>").split("><")]


@pytest.fixture(scope="module")
def gpt2() -> tuple[PatchableGraph, Tensor]:
    return captured_model("gpt2")


@pytest.fixture
def view(gpt2: tuple[PatchableGraph, Tensor]) -> Iterator[LensView]:
    pg, ids = gpt2
    pg.tokenizer = Words()
    with contextlib.closing(show_lens(pg, ids, target="<5>", row=1)) as view:
        yield view
    session_of(pg).clear()
    pg._module.train(False)


def states_of(model: Any, ids: Tensor) -> list[Tensor]:
    """Returns the states of the stream, by plain hooks."""
    kept: list[Tensor] = []
    blocks = model.transformer.h
    hooks = [block.register_forward_pre_hook(lambda _, args: kept.append(args[0])) for block in blocks]
    hooks.append(
        blocks[-1].register_forward_hook(lambda _, args, out: kept.append(out if isinstance(out, Tensor) else out[0]))
    )
    with registered(hooks), torch.no_grad():
        model(ids)
    return kept


def received(view: LensView) -> list[dict[str, dict[str, np.ndarray[Any, Any]]]]:
    """Returns the numbers of each run and stream, as the front end reads them."""
    data, at = zlib.decompress(view.cells), 0

    def take(kind: str, *shape: int) -> np.ndarray[Any, Any]:
        nonlocal at
        found = np.frombuffer(data, kind, int(np.prod(shape)), at).reshape(shape)
        at += found.nbytes
        return found

    lens, runs = view.lens, []
    for _ in range(lens["runs"]):
        streams = {}
        for stream in lens["streams"]:
            shape = len(stream["rows"]), len(lens["target"])
            tokens = take("<u4", *shape, lens["top"])
            texts = np.array(lens["vocabulary"])[tokens]
            numbers = [take("<f4", *shape, lens["top"]), take("<f4", *shape), take("<u4", *shape)]
            streams[stream["name"]] = dict(
                zip(("texts", "probabilities", "target", "rank"), [texts, *numbers], strict=True)
            )
        runs.append(streams)
    assert at == len(data)
    return runs


def check(found: dict[str, np.ndarray[Any, Any]], model: Any, states: list[Tensor]) -> None:
    assert len(found["target"]) == len(states)
    for row, state in enumerate(states):
        with torch.no_grad():
            expected = model.lm_head(model.transformer.ln_f(state))[1].softmax(-1)
        top = expected.topk(10)
        assert np.allclose(found["probabilities"][row], top.values, atol=1e-6)
        assert found["texts"][row].tolist() == [[f"<{token}>" for token in tokens] for tokens in top.indices.tolist()]
        assert np.allclose(found["target"][row], expected[:, 5], atol=1e-6)
        assert np.array_equal(found["rank"][row], (expected > expected[:, 5:6]).sum(-1))


def test_what_is_sent_is_what_the_models_last_modules_say(view: LensView, gpt2: tuple[PatchableGraph, Tensor]) -> None:
    pg, ids = gpt2
    model = pg._module
    check(received(view)[0]["residual"], model, states_of(model, ids))
    assert view.lens["positions"] == [f"<{token}>" for token in ids[1].tolist()]
    assert [row["layer"] for row in view.lens["streams"][0]["rows"]] == [None, 0, 1]
    assert repr(view) == "<LensView of pg, residual, 3 x 7>"
    html = view._static_html() or ""
    assert "&lt;5&gt;" in html or "&lt;" in html
    assert "<5>" not in html


def test_the_view_follows_the_patches(view: LensView, gpt2: tuple[PatchableGraph, Tensor]) -> None:
    pg, ids = gpt2
    model, session = pg._module, session_of(pg)
    answers: list[Any] = []
    view.send = lambda content, buffers=None: answers.append(content)  # type: ignore[method-assign]

    def ask(stream: str | None = None) -> dict[str, Any]:
        view._answer({"id": 1, "request": "lens", "payload": {"stream": stream}})
        while answers[-1].get("result", {}).get("state") == "running":
            time.sleep(0.01)
            view._answer({"id": 1, "request": "lens", "payload": {"stream": stream}})
        return answers[-1]

    assert ask()["result"]["state"] == "done"
    session.add(ChosenPatch("layers[0].mlp_out", "zero"))
    assert ask()["result"]["state"] == "done"
    with model.transformer.h[0].mlp.register_forward_hook(lambda _, args, output: torch.zeros_like(output)):
        expected = states_of(model, ids)
    assert view.lens["runs"] == 2
    assert view.lens["version"] == session.chosen.version
    clean, patched = received(view)
    check(clean["residual"], model, states_of(model, ids))
    check(patched["residual"], model, expected)
    # Another stream, for both runs; a probe changes nothing, and is not a patch here.
    assert ask("mlp")["result"]["state"] == "done"
    view.stream = "mlp"
    assert set(received(view)[1]) == {"residual", "mlp"}
    assert np.array_equal(received(view)[1]["residual"]["rank"], patched["residual"]["rank"])
    session.edit(lambda _: [ChosenPatch("layers[0].mlp_out", "probe", name="kept")])
    view.update()
    assert view.lens["runs"] == 1
    # What fails is said, and the numbers before stay.
    session.edit(lambda _: [ChosenPatch("layers[0].mlp_out", "add", value="unknown")])
    assert "unknown" in ask()["error"]["message"]
    session.edit(lambda _: [ChosenPatch("layers[0].mlp_out", "add", value="__import__('torch').ones(9)")])
    answer = ask()
    assert answer["result"]["state"] == "failed"
    assert answer["result"]["error"]
    assert view.lens["runs"] == 1


def test_the_front_end_sets_what_it_may(view: LensView) -> None:
    view.set_state({"stream": "attention", "cells": b"x"})
    assert view.stream == "residual"
    assert view.cells != b"x"
    with pytest.raises(traitlets.TraitError, match="show_stream"):
        view.stream = "attention"
    view.show_stream("attention")
    assert view.stream == "attention"
