"""Settings of every test: one thread, offline, quiet."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

from tests.browser import leaving_out
from tests.frozen_imports import freeze
from tests.warm_kernels import warm_kernels

# A busy machine is no failure; nothing here is measured in seconds. The examples are the same in each run, so that a
# change meets no failure of another; `HYPOTHESIS_PROFILE=random` draws others.
hypothesis.settings.register_profile("patient", deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None, database=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "patient"))
# Of the processes that tests start, kernels for the most part: a fixture below says it to this one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-browser-tests", action="store_true", help="fail, rather than leave out tests, if no browser starts"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of pytest-xdist: this process starts the others
        leaving_out.begin()
        config.add_cleanup(leaving_out.end)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.scheduling import SetUpOnce

    config.option.loadscopereorder = False  # the order is that of `put_slow_tests_first`
    return SetUpOnce(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[Any]:
    """Collects the tests without garbage collection, which takes 40% of the time while so much is only being added."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Iterator[Any]:
    """Looks for no doctests in the tests: each process of a run would import all files for that."""
    return [found for found in (yield) if type(found) is pytest.Module]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from tests.scheduling import put_slow_tests_first

        put_slow_tests_first(items)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if line := leaving_out.summary():
        terminalreporter.write_line(line, yellow=True)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny operations on two threads take ten times as long while something else wants the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def kernels_are_warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What Jupyter starts as a Python kernel has torch and transformers imported already."""
    with warm_kernels(tmp_path_factory.mktemp("kernels")) as variables, pytest.MonkeyPatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def settings_of_torch_stay_as_they_were() -> Iterator[None]:
    """A test, or the engine in it, that left gradients switched off would spoil all tests after it."""
    assert torch.is_grad_enabled()
    yield
    was_left_enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert was_left_enabled
