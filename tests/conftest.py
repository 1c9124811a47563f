"""Shared by all tests."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack

# One thread for each worker of pytest, and for each program it starts: threads that wait for each other spin, and two
# workers of two threads each took twice as long on two cores. Torch reads it when it is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests start hundreds of processes, and each would compile all of piecegraph again where the machine keeps no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What torch remembers of each op that it traced pays from a dozen equal layers on; models of tests have two or three.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

# Plans of earlier runs are not for tests, but for those that are about them.
os.environ["PIECEGRAPH_CACHE"] = "off"

import pytest
import torch

from tests.cases.browser import Browser, browser, missing_browser
from tests.cases.forked import ForkServer, fork_server
from tests.cases.linker import link_quickly

link_quickly()

FORK_SERVER = "TESTS_FORK_SERVER"
"""Where the workers of pytest find the server that all of them share."""

# Pytest listens to every logger that does not propagate, and torch writes each graph down, several times, while
# somebody listens to what TORCH_TRACE asks for.
if "TORCH_TRACE" not in os.environ:
    logging.getLogger("torch.__trace").handlers.clear()
    logging.getLogger("torch.__trace").propagate = True


def pytest_configure() -> None:
    sys.dont_write_bytecode = False  # as for the processes that tests start
    gc.disable()  # until all tests are collected: what is imported stays


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Few collections need be made: a trace makes millions of objects that end by themselves. Tests that ask what is
    left, and models that are closed, collect by themselves.
    """
    gc.set_threshold(100_000, 20, 20)
    gc.enable()
    _freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """What was imported and what earlier files left stays: no collection need walk through a million objects again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Start the server for all workers before they start: Python has then compiled most of what they import, which each
    of them would do at the same time.
    """
    stack = ExitStack()
    config.add_cleanup(stack.close)
    os.environ[FORK_SERVER] = stack.enter_context(fork_server())


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Runs Python programs that need not import torch first."""
    with ExitStack() as stack:
        address = os.environ.get(FORK_SERVER) or stack.enter_context(fork_server())
        yield ForkServer(address, tmp_path_factory.mktemp("forked"))


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests; each leaves it on an empty page."""
    reason = missing_browser()
    if reason is not None:
        pytest.skip(reason)
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found
