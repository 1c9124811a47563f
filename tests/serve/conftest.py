"""Shared by the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import piecegraph
from tests.cases.serving import Served, served
from tests.cases.tiny_llm import write_tiny_llm


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> piecegraph.LLM:
    folder = write_tiny_llm(tmp_path_factory.mktemp("tiny"))
    return piecegraph.LLM(folder, backend="eager", device="cpu", max_num_seqs=8, options={"progress": False})


@pytest.fixture(scope="session")
def running(tiny: piecegraph.LLM) -> Iterator[Served]:
    with served(tiny) as found:
        yield found
