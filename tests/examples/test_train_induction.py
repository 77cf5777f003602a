"""The model that the example notebooks run on has its skill, and the script that trains it runs."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from examples import train_induction
from examples.train_induction import (
    MODEL_FOLDER,
    build_model,
    fresh_accuracy,
    train,
)

TWO_MEGABYTES = 2_000_000


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel.from_pretrained(MODEL_FOLDER).eval()


def test_shipped_files_are_small() -> None:
    assert {"config.json", "model.safetensors"} <= {file.name for file in MODEL_FOLDER.iterdir()}
    assert sum(file.stat().st_size for file in MODEL_FOLDER.iterdir()) < TWO_MEGABYTES


def test_shipped_model_is_a_small_gpt2_without_dropout(model: GPT2LMHeadModel) -> None:
    config = model.config
    assert (config.n_layer, config.n_head, config.vocab_size) == (2, 4, 64)
    assert config.attn_pdrop == config.embd_pdrop == config.resid_pdrop == 0.0


@pytest.mark.parametrize("length", [4, 8, 16, 24, 31])
def test_shipped_model_continues_fresh_sequences(model: GPT2LMHeadModel, length: int) -> None:
    assert fresh_accuracy(model, length, seed=1000 + length) > 0.95


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("threads_as_before")
def test_training_is_seeded_and_saves_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_induction.py", "--steps", "2", "--seed", "5", "--out", str(tmp_path)])
    runpy.run_path(train_induction.__file__, run_name="__main__")
    assert "accuracy on the second half" in capsys.readouterr().out
    saved = GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    torch.manual_seed(5)
    again = build_model()
    train(again, 2)
    assert all(torch.equal(saved[name], value) for name, value in again.state_dict().items())
