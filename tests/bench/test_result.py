"""A result as JSON: its schema, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from piecegraph.bench.result import BenchResult, Timing, read_result, result_schema
from piecegraph.errors import InputError
from tests.cases.bench import made_result

SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "bench.schema.json"


def test_the_schema_file_is_that_of_the_types() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == result_schema()


def test_a_result_keeps_the_schema_and_comes_back() -> None:
    result = made_result()
    document = json.loads(result.to_json())
    jsonschema.validate(document, result_schema(), jsonschema.Draft202012Validator)
    assert (document["kind"], document["schema"]) == ("bench", 1)
    assert BenchResult.from_json(result.to_json()) == result


def test_the_schema_refuses_what_is_no_result() -> None:
    document = json.loads(made_result().to_json())
    document["rows"][0]["verdict"]["state"] = "perhaps"
    with pytest.raises(jsonschema.ValidationError, match="'perhaps' is not one of"):
        jsonschema.validate(document, result_schema(), jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.pop("rows"), "it has no 'rows'"),
        (lambda d: d.update(schema=2), "its schema is 2, not 1"),
        (lambda d: d["rows"][1].update(batch_size="8"), "it.rows[1].batch_size is '8'"),
        (lambda d: d["startup"][0].update(stages_s=[]), "it.startup[0].stages_s is []"),
        (lambda d: d["machine"].update(num_ranks=True), "it.machine.num_ranks is True"),
    ],
)
def test_another_file_is_refused_with_the_place(tmp_path: Path, change: object, why: str) -> None:
    document = json.loads(made_result().to_json())
    change(document)  # type: ignore[operator]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError) as refused:
        read_result(path)
    assert (refused.value.code, refused.value.why) == ("PG604", why)


@pytest.mark.parametrize(("text", "code"), [("[]", "PG604"), ("no JSON", "PG604"), (None, "PG601")])
def test_what_is_no_document_is_refused(tmp_path: Path, text: str | None, code: str) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=code):
        read_result(path)


def test_losses_are_told_once() -> None:
    assert made_result().losses == (
        "full: PG402 size 64: out of memory while recording",
        "compile: differs: logits differ by 0.7, 0.05 is allowed",
        "reduce-overhead: not available: cpu has no graphs",
    )


def test_a_spread_lies_within_the_times() -> None:
    assert Timing.of([5.0]) == Timing(5.0, 5.0, 5.0, 1)
    timing = Timing.of([4.0, 1.0, 3.0, 2.0, 10.0])
    assert (timing.median_ms, timing.repeats) == (3.0, 5)
    assert 1.0 <= timing.p10_ms < 3.0 < timing.p90_ms <= 10.0
