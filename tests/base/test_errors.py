"""Errors: stable codes, one order of text, one tree."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

import piecegraph
from piecegraph import errors
from piecegraph.errors import CODES, PiecegraphError, TraceError

SOURCES = sorted(Path(piecegraph.__file__).parent.rglob("*.py"))


def test_text_says_what_where_why_and_what_to_do_in_this_order() -> None:
    error = TraceError("PG201", "f cannot be traced", where="a.py:3", why="it branches on data.", hint="use torch.cond")
    assert str(error) == "PG201 f cannot be traced at a.py:3: it branches on data. hint: use torch.cond"


def test_errors_survive_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(TraceError("PG201", "f", where="a.py:3", hint="h")))
    assert (type(error), error.code, error.where, error.hint) == (TraceError, "PG201", "a.py:3", "h")


def test_all_errors_derive_from_one_base() -> None:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]
    assert all(issubclass(c, (PiecegraphError, Warning)) for c in classes)
    assert issubclass(errors.ConfigError, ValueError)


def test_every_code_is_used_and_every_used_code_exists() -> None:
    used = {
        code for path in SOURCES if path.name != "errors.py" for code in re.findall(r'"(PG\d{3})"', path.read_text())
    }
    assert used == set(CODES)


def test_every_code_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    assert set(re.findall(r"^## (PG\d{3}) ", page, re.MULTILINE)) == set(CODES)


def test_an_unknown_code_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        PiecegraphError("PG999", "no such code")


def test_what_was_given_is_not_shown_at_any_length() -> None:
    error = TraceError("PG201", f"x is {['spam'] * 1000!r}", why="it is too long")
    assert len(str(error)) < 700
    assert str(error).startswith("PG201 x is ['spam', ")
    assert str(error).endswith("'spam']: it is too long")
