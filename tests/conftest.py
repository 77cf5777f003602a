"""Settings of every test: one thread, offline, quiet."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# A busy machine is no failure; nothing here is measured in seconds.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny operations on two threads take ten times as long while something else wants the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def settings_of_torch_stay_as_they_were() -> Iterator[None]:
    """A test, or the engine in it, that left gradients switched off would spoil all tests after it."""
    assert torch.is_grad_enabled()
    yield
    was_left_enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert was_left_enabled
