"""A result for people."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph.bench.result import read_result
from piecegraph.bench.show import as_markdown, as_text, check_output, write
from piecegraph.errors import InputError
from tests.cases.bench import made_result


def test_the_table_has_the_baseline_first_and_a_ratio_to_it() -> None:
    lines = as_text(made_result()).splitlines()
    assert lines[0].split() == [
        *("batch", "input", "phase", "mode", "ms", "p10", "p90", "tokens/s", "x", "eager", "x", "floor"),
        *("coverage", "padding", "GiB"),
    ]
    assert lines[4].split() == "8 128 decode full 1.000 0.950 1.050 8,000 4.00 1.25 97% 12.5% 3.00".split()
    assert lines[5].split()[:5] == "8 128 decode compile differs".split()
    assert "  compile: differs: logits differ by 0.7, 0.05 is allowed" in lines
    assert "full   1.50    12.00    3.25  16.75" in lines, "stages in their order, and their sum"


def test_a_page_is_safe_whatever_the_model_is_called() -> None:
    page = as_markdown(made_result())
    assert "<b>" not in page
    assert '&lt;b&gt;"quoted"&lt;/b&gt;' in page
    rows = [line for line in page.splitlines() if line.startswith("| 8 |")]
    assert len(rows) == 6
    assert len({row.count("|") for row in rows}) == 1


def test_files_are_written_by_their_suffix(tmp_path: Path) -> None:
    result = made_result()
    write(result, tmp_path / "a.json")
    write(result, tmp_path / "a.md")
    write(result, tmp_path / "a.html")
    assert read_result(tmp_path / "a.json") == result
    assert (tmp_path / "a.md").read_text() == as_markdown(result)
    report = (tmp_path / "a.html").read_text()
    assert report.startswith("<!DOCTYPE html>")
    assert '<b>"quoted"' not in report
    with pytest.raises(InputError, match="no such folder"):
        check_output(tmp_path / "there" / "a.json")
    with pytest.raises(InputError, match=r"end its name with one of \.json, \.md, \.html"):
        check_output(tmp_path / "a.txt")
