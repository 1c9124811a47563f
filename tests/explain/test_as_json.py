"""``--json``: a schema that every page keeps, and a certainty for every statement."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from piecegraph.explain.as_json import SCHEMA, page_schema, to_dict
from piecegraph.explain.catalogue import load_catalogue
from piecegraph.explain.evidence import Evidence, Exit, Failure, Frame, Milestone, Process, Raised
from piecegraph.explain.from_logs import explain_text
from piecegraph.explain.page import Page, compose
from piecegraph.explain.render import to_text
from piecegraph.explain.statements import statements_of

LOGS = Path(__file__).parents[1] / "logs"
CATALOGUE = load_catalogue()
FIRST = 'Traceback (most recent call last):\n  File "/srv/a.py", line 3, in f\n    g()\nValueError: boom\n'
SECOND = FIRST.replace("ValueError: boom", "RuntimeError: CUDA error: misaligned address")


def recorded() -> Evidence:
    frames = (Frame("/srv/a.py", 3, "f", "g()"),)
    one = Failure(chain=(Raised(type="ValueError", message="boom", frames=frames),), certainty="recorded")
    dead = Failure(
        chain=(Raised(type="SIGKILL", message="sent by no recorded process", frames=()),),
        kind="killed",
        certainty="recorded",
        processes=(Process("rank3", 3, 77, "n1"),),
        last_lines=("step 2", "step 3"),
    )
    exits = (Exit(process=Process("rank3", 3), code=-9, is_first=True), Exit(process=Process("rank0", 0), code=1))
    milestones = (Milestone("load", "failed", "ValueError: boom"),)
    return Evidence(sources=("records",), failures=(dead, one), exits=exits, milestones=milestones)


PAGES = {
    "a call chain": lambda: explain_text('  File "/srv/a.py", line 3, in f\n    g()\n', CATALOGUE),
    "nothing": lambda: explain_text("hello\nbye\n", CATALOGUE),
    "one failure": lambda: explain_text(FIRST, CATALOGUE),
    "two failures": lambda: explain_text(f"{FIRST}{SECOND}", CATALOGUE),
    "late": lambda: explain_text(SECOND, CATALOGUE),
    "killed": lambda: explain_text("loading\nKilled\n", CATALOGUE),
    "recorded": lambda: compose(recorded(), CATALOGUE),
    "eight ranks": lambda: explain_text(
        gzip.decompress((LOGS / "eight_ranks_capture.log.gz").read_bytes()).decode(), CATALOGUE
    ),
}


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> Page:
    return PAGES[request.param]()


def test_every_page_keeps_the_schema(page: Page) -> None:
    document = json.loads(json.dumps(to_dict(page)))
    jsonschema.validate(document, page_schema(), jsonschema.Draft202012Validator)
    assert document["schema"] == SCHEMA == 2


def test_every_statement_that_is_printed_has_a_certainty(page: Page) -> None:
    printed = " ".join(to_text(page, width=10_000).split())
    statements = statements_of(page)
    assert {statement.certainty for statement in statements} <= {"certain", "likely", "unknown"}
    for statement in statements:
        assert " ".join(f"{statement.label} {statement.text}".split()) in printed
    said = sum(len(statement.label.split()) + len(statement.text.split()) for statement in statements)
    heads = "ROOT CAUSE WHO PHASE STACK ADVICE ARTEFACTS".split()
    about = to_text(page, width=10_000).splitlines()[1].split()
    colons = sum(statement.section == "NOTES" for statement in statements)
    assert len(printed.split()) <= said + len(heads) + len(about) + colons, "nothing is printed beside them"


def test_the_schema_refuses_what_is_not_a_page() -> None:
    document = json.loads(json.dumps(to_dict(PAGES["one failure"]())))
    document["statements"][0]["certainty"] = "perhaps"
    with pytest.raises(jsonschema.ValidationError, match="'perhaps' is not one of"):
        jsonschema.validate(document, page_schema(), jsonschema.Draft202012Validator)


def certainty(name: str, section: str, label: str) -> set[str]:
    found = [s for s in statements_of(PAGES[name]()) if (s.section, s.label) == (section, label)]
    assert found
    return {statement.certainty for statement in found}


@pytest.mark.parametrize(
    ("name", "section", "label", "expected"),
    [
        ("one failure", "ROOT CAUSE", "raised at", "certain"),
        ("one failure", "HEADLINE", "", "certain"),
        ("two failures", "HEADLINE", "", "likely"),
        ("two failures", "WHO", "also failed", "likely"),
        ("late", "ROOT CAUSE", "raised at", "likely"),
        ("late", "ADVICE", "known issue", "likely"),
        ("late", "ADVICE", "rule", "certain"),
        ("recorded", "HEADLINE", "", "certain"),
        ("recorded", "ROOT CAUSE", "last printed", "certain"),
        ("recorded", "WHO", "ended", "certain"),
        ("eight ranks", "ROOT CAUSE", "raised at", "certain"),
        ("eight ranks", "WHO", "cannot tell", "unknown"),
        ("eight ranks", "ADVICE", "does not fit", "likely"),
    ],
)
def test_what_is_certain(name: str, section: str, label: str, expected: str) -> None:
    assert certainty(name, section, label) == {expected}


def test_the_schema_is_printed() -> None:
    command = [sys.executable, "-m", "piecegraph", "explain", "--schema"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == page_schema()
    jsonschema.Draft202012Validator.check_schema(json.loads(printed))
