"""Failures that really happen here are named by the catalogue."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from piecegraph.explain.catalogue import load_catalogue
from piecegraph.explain.evidence import Failure, Frame, Raised
from piecegraph.explain.known_issues import match_known_issues
from tests.cases.real_failures import REAL, Failing

CATALOGUE = load_catalogue()


def failure_of(error: BaseException) -> Failure:
    """What the process would have printed."""
    chain: list[Raised] = []
    following: BaseException | None = error
    link = ""
    while following is not None:
        kind = type(following)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        stack = traceback.extract_tb(following.__traceback__)
        frames = tuple(Frame(entry.filename, entry.lineno or 0, entry.name, entry.line or "") for entry in stack)
        before = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
        link = "" if before is None else "cause" if following.__cause__ else "context"
        chain.append(Raised(type=name, message=str(following), frames=frames, link=link))  # type: ignore[arg-type]
        following = before
    return Failure(chain=tuple(reversed(chain)))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("expected", "failing"), REAL, ids=[failing.__name__ for _, failing in REAL])
def test_a_real_failure_is_named(expected: str, failing: Failing, tmp_path: Path) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        failing(tmp_path)
    found = [issue.id for issue in match_known_issues(failure_of(caught.value), CATALOGUE)]
    assert found[:1] == [expected], f"{caught.type.__name__}: {caught.value}"
