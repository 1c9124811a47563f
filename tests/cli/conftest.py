"""Shared by the tests of commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def traced_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands find what an earlier one has traced: these tests are about what is done with a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIECEGRAPH_CACHE", str(tmp_path_factory.mktemp("plans")))
        yield
