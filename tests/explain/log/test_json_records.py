"""Logs of JSON, one record a line: the traceback in a field of its own, and nothing of the record in its message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from piecegraph.explain.evidence import Process
from piecegraph.explain.log.json_records import unwrapped
from tests.explain.log.test_lines import TRACEBACK, WHOLE, scan, shape
from tests.explain.test_page import page_of

TIME = "2026-05-04T10:00:00.123Z"
RECORDS: dict[str, dict[str, Any]] = {
    "python-json-logger": {"asctime": TIME, "levelname": "ERROR", "message": "step failed", "exc_info": TRACEBACK},
    "ECS, nested": {
        "@timestamp": TIME,
        "message": "step failed",
        "error": {"message": "loss is nan", "stack_trace": TRACEBACK},
    },
    "ECS, dotted": {"log.level": "error", "message": "step failed", "error.stack_trace": TRACEBACK, "ecs.version": "1"},
    "a cloud's text": {"severity": "ERROR", "textPayload": TRACEBACK + "\n", "timestamp": TIME, "insertId": "a1"},
    "a cloud's record": {"severity": "ERROR", "jsonPayload": {"message": TRACEBACK, "worker": "w3"}, "insertId": "a1"},
    "structlog": {"event": "step failed", "level": "error", "exception": TRACEBACK, "timestamp": TIME},
    "loguru": {"text": f"step failed\n{TRACEBACK}\n", "record": {"message": "step failed", "exception": {"type": "E"}}},
    "message": {"level": "ERROR", "msg": TRACEBACK, "node": "n1"},
    "unknown field": {"level": "ERROR", "oops": TRACEBACK, "node": "n1"},
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_traceback_in_a_field(record: dict[str, Any]) -> None:
    beside = json.dumps({"level": "INFO", "message": "step 7"})
    (failure,) = scan(f"{beside}\n{json.dumps(record)}\n{beside}").failures
    assert shape(failure) == WHOLE
    assert failure.kind == "exception"


@pytest.mark.parametrize("shown", [json.dumps({"a": 1, "error": TRACEBACK, "b": 2}), repr({"e": TRACEBACK, "x": 1})])
@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "ERROR 05-08 19:06:38 [core.py:962] request failed: "])
def test_a_traceback_in_one_line_ends_where_its_text_does(prefix: str, shown: str) -> None:
    (failure,) = scan(prefix + shown).failures
    assert shape(failure) == WHOLE
    assert failure.processes == ((Process("rank3", rank=3),) if "rank" in prefix else ())


def test_the_level_of_a_record_is_that_of_its_traceback() -> None:
    def outcome(level: str) -> str:
        later = json.dumps({"level": "INFO", "message": "step 7"})
        return page_of(
            "\n".join([json.dumps({"level": level, "msg": "retry", "exc_info": TRACEBACK}), *[later] * 5])
        ).outcome

    assert (outcome("WARNING"), outcome("ERROR")) == ("nothing", "failure")


def test_a_record_in_which_only_the_level_tells_of_an_error() -> None:
    page = page_of(json.dumps({"level": "ERROR", "timestamp": TIME, "message": "the disk is full", "disk": "a"}))
    assert page.error_lines == (("the disk is full", 1),)


@pytest.mark.parametrize(
    "line",
    [
        '{"a": 1}',
        '{"message": 7}',
        '{"message": "cut o',
        'sent {"message": "hello"}',
        '{"exc_info": "True"}',
        '[{"message": "x"}]',
    ],
)
def test_what_is_no_record_stays_as_it_is(line: str) -> None:
    assert unwrapped(line) == line
