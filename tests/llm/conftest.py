"""Shared by the tests of language models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cases.llm_shelf import Shelf


@pytest.fixture(scope="session")
def kept_models(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """What one file traced serves the next. Nobody may change a model on it."""
    return Shelf(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def models(kept_models: Shelf) -> Iterator[Shelf]:
    with kept_models.in_use():
        yield kept_models
