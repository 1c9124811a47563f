"""The page to share: in a browser, with clicks and keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piecegraph.base.plan import Decision
from piecegraph.errors import InputError
from piecegraph.report.content import Figure, Report
from piecegraph.report.page import safe_json, to_html, write_report
from tests.cases.browser import DOWN, END, ENTER, ESCAPE, RIGHT, TAB, Browser, until
from tests.cases.reports import EVIL, LONG, SHOWN, distinct_kernels, everything, evil_trace, replays, trace_of

KERNELS = "#grid tbody .two b"
Visit = Callable[[Report], Browser]


@pytest.fixture
def visit(chromium: Browser, tmp_path: Path) -> Iterator[Visit]:
    """Opens pages that complain of nothing and fetch nothing."""

    def opened(report: Report) -> Browser:
        chromium.open(write_report(report, tmp_path / "report.html").as_uri())
        return chromium

    chromium.look(height=1400)
    yield opened
    assert chromium.problems() == []
    assert chromium.run("return performance.getEntriesByType('resource').length") == 0
    chromium.look()
    chromium.open("about:blank")


def traced(title: str = "Trace of a model", **others: Any) -> Report:
    return replace(trace_of(replays(4)).as_report(title), machine={}, **others)


def data_of(html: str) -> Any:
    return json.loads(html.partition('id="data">')[2].partition("</script>")[0])


# -- the file


def test_it_is_one_file_that_may_fetch_nothing() -> None:
    html = to_html(everything().beside(traced()))
    assert html.startswith("<!DOCTYPE html>")
    assert set(re.findall(r"https?://[^\s'\"]+", html)) == {"http://www.w3.org/2000/svg"}  # a name, and no address
    assert not re.search(r"\b(src|srcset|@import|url)\b\s*[=(]", html)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy[1].replace("&#39;", "'").split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", rules[f"{each}-src"]) for each in ("script", "style"))


def test_only_what_there_is_has_a_section() -> None:
    def sections(report: Report) -> list[str]:
        return re.findall(r"<h2[^>]*>(.*?)</h2>", to_html(report))

    whole = "Failure Plan Latency Numbers Start-up Memory Timeline Kernels Groups Decisions Fallbacks Machine Data"
    assert sections(everything().beside(traced())) == whole.split()
    assert sections(Report(title="nothing")) == ["Data"]
    assert sections(Report(title="nothing lost", losses=())) == ["Fallbacks", "Data"]


def test_two_reports_on_one_page() -> None:
    one = Report(title="one", notes=("a",), data={"a": 1}, figures=(Figure("1", "one"),))
    other = Report(title="other", notes=("b",), data={"b": 2}, losses=(), decisions=(Decision("a", "b", "c"),))
    both = one.beside(other)
    assert (both.title, both.notes, both.data, both.losses) == ("one", ("a", "b"), {"a": 1, "b": 2}, ())
    assert (both.figures, both.decisions) == (one.figures, other.decisions)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="PG601"):
        write_report(Report(title=""), tmp_path / "no" / "report.html")


def test_no_character_of_the_data_ends_it() -> None:
    text = safe_json({EVIL: [EVIL, "\ud800", "é"]})
    assert json.loads(text) == {EVIL: [EVIL, "\ud800", "é"]}
    assert not set("<>&\u2028\u2029") & set(text)
    assert text.isascii()


# -- the table of kernels


def test_rows_are_sorted_by_the_column_that_is_clicked(visit: Visit) -> None:
    page = visit(traced())

    def order(column: str) -> tuple[list[str], str]:
        page.click(f"[data-key={column}] button")
        sort = page.run("return document.querySelector(arguments[0]).ariaSort", f"[data-key={column}]")
        return page.texts(f"#grid tbody .col-{column}"), sort

    _, sort = order("kernel")
    kernels = page.texts(KERNELS)
    assert (kernels, sort) == (sorted(kernels), "ascending")
    assert order("kernel")[1] == "descending"
    assert page.texts(KERNELS) == sorted(kernels, reverse=True)
    numbers, sort = order("instances")
    assert ([int(each) for each in numbers], sort) == (sorted(map(int, numbers), reverse=True), "descending")
    assert len(page.find("[aria-sort]")) == 1


def test_rows_are_filtered_as_one_types(visit: Visit) -> None:
    page = visit(traced())
    assert page.text("#count").endswith("(100.0 %)")
    page.press("/")
    assert page.run("return document.activeElement.id") == "filter"
    page.press("UP_PROJ splitk")  # both words, in any column, large or small
    assert {text.splitlines()[-1] for text in page.texts("#grid tbody .two")} == {"model.layers.*.mlp.up_proj"}
    assert page.text("#count") == "2 rows, 120.0 us (47.6 %)"
    page.press("x")
    assert page.texts(KERNELS) == []
    page.click("#modules [data-module]")  # a colour of the timeline
    shown = page.run("return document.getElementById('filter').value")
    assert all(text.splitlines()[-1].startswith(shown) for text in page.texts("#grid tbody .two"))
    assert page.run("return document.querySelector('[aria-pressed=true]').dataset.module") == shown


def test_a_row_leads_to_its_source_line(visit: Visit) -> None:
    page = visit(traced())
    page.type("#filter", "reduce up_proj")
    page.click("#grid tbody [aria-rowindex]")
    text = page.text("#detail")
    assert "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>" in text
    assert "Launched from 2 places" in text
    assert "model.layers.0.mlp.up_proj 4 launches, 8.0 us" in text
    first = page.texts("#detail details[open] .stack li")
    assert [each.splitlines()[-1] for each in first] == ["line 180", "line 400"]
    assert first[0].startswith("modeling_llama.py:180 /site-packages/transformers/models/llama/")
    page.click("#detail .close")
    assert page.find("#detail[hidden]")


def test_all_of_it_by_keys(visit: Visit) -> None:
    page = visit(traced())
    page.run("document.getElementById('grid').focus()")
    name = "document.getElementById('grid').getAttribute('aria-activedescendant')"
    active = f"return document.getElementById({name}).ariaRowIndex"
    assert page.run(active) == "2"
    page.press(DOWN + DOWN)
    assert page.run(active) == "4"
    page.press(ENTER)
    assert page.texts("#grid [aria-selected=true] b") == [page.text("#detail h3")]
    page.press(ESCAPE)
    assert page.find("#detail[hidden]")
    assert page.run("return document.activeElement.id") == "grid"
    page.press(END)
    assert page.run(active) == str(len(page.texts(KERNELS)) + 1)
    page.run("document.querySelector('[data-key=kernel] button').focus()")
    page.press(ENTER)
    assert page.texts(KERNELS) == sorted(page.texts(KERNELS))


def test_of_many_rows_only_those_are_made_that_are_seen(visit: Visit) -> None:
    page = visit(replace(trace_of(distinct_kernels(2_000)).as_report("many"), machine={}))
    assert page.text("#count").startswith("2,000 rows")
    assert len(page.texts(KERNELS)) < 60
    page.run("document.getElementById('rows').scrollTop = 46 * 1500")
    until(lambda: len(page.texts("[aria-rowindex='1502']")) == 1)
    page.run("document.getElementById('grid').focus()")
    page.press(END)
    assert page.texts("#grid .active [class^=col-instances]") == ["1"]
    assert len(page.texts(KERNELS)) < 60
    assert page.run("return document.getElementById('grid').ariaRowCount") == "2001"


# -- the timeline


def test_a_replay_is_shown_and_the_next_one(visit: Visit) -> None:
    page = visit(traced())
    assert page.text("#told") == "decode 16, replay 3: 60.0 us"
    page.click("#after")
    assert page.text("#told") == "decode 16, replay 4: 60.0 us"
    assert page.find("#after:disabled")
    page.click("#whole")
    assert page.text("#told") == "the whole trace, 305.0 us"
    names = page.texts("#window option")
    assert names == ["the whole trace", *(f"decode 16, replay {number}: 60.0 us" for number in (1, 2, 3, 4))]


def test_a_kernel_of_the_timeline_leads_to_its_row(visit: Visit) -> None:
    page = visit(traced())
    page.point("#canvas", x=-400, y=0)
    tip = until(lambda: page.text("#tip"))
    page.point("#canvas", x=-400, y=0, click=True)
    assert page.text("#detail h3") == tip.splitlines()[0]
    assert page.text("#told").startswith(tip.splitlines()[0])
    page.run("document.getElementById('canvas').focus()")
    page.press(ESCAPE)
    page.run("document.getElementById('canvas').focus()")
    before = page.text("#told")
    page.press(RIGHT)
    assert page.text("#told") != before
    page.press("+" + RIGHT + "-" + ENTER)
    assert page.text("#detail h3") in page.text("#told")
    assert page.run("return document.activeElement.id") == "detail"


# -- what can be pointed at, and what can be taken along


def test_reasons_are_told_to_a_pointer_and_to_the_keyboard(visit: Visit) -> None:
    page = visit(everything("my::attention"))
    page.point(".cut button")
    assert page.text("#tip") == "cut 1: my::attention\nmy::attention\nmy::attention.py:3"
    page.point("h1")
    assert page.find("#tip[hidden]")
    page.run("document.querySelector('.piece button').focus()")
    assert page.text("#tip").startswith("piece 0: 5 ops")
    page.press(TAB)
    assert page.text("#tip").startswith("cut 1")
    page.press(ESCAPE)
    assert page.find("#tip[hidden]")
    page.point("circle")
    assert page.text("#tip").splitlines()[1] == "1 my::attention: 2 my::attention"
    page.point("#startup rect")
    assert page.text("#tip") == "my::attention\n1.50 s, 75 % of all"


def test_the_data_can_be_taken_along(visit: Visit, tmp_path: Path) -> None:
    report = evil_trace().as_report("a trace, of <something>").beside(everything(EVIL))
    page = visit(report)
    page.keep_downloads(tmp_path)
    page.click("#download")
    file = tmp_path / "a-trace-of-something.json"
    until(file.exists)
    found = json.loads(file.read_text())
    assert found == data_of((tmp_path / "report.html").read_text())
    assert (found["said"], found["schema_version"]) == (EVIL, 1)
    kernels = found["kernels"]
    rows = [kernels["rows"][number]["full_names"] for number in kernels["launches"]["row"]]
    assert rows[:2] == [[EVIL], [LONG]]
    assert kernels["lines"][0][1:] == [400, "line 400"]


# -- whoever looks at it, and whatever it shows


def test_text_is_never_taken_for_html(visit: Visit) -> None:
    page = visit(everything(EVIL).beside(evil_trace().as_report(EVIL)))
    assert page.run("return document.title") == SHOWN.replace("  ", " ")
    page.click("#grid tbody tr:nth-child(3)")
    for selector in (
        "h1",
        ".remark",
        "#detail .full",
        "#detail .wide dd",
        ".text",
        ".losses .what b",
        ".card p",
        ".facts dt",
    ):
        assert "<img src=x onerror=window.isOwned=1>" in page.text(selector), selector
    for selector in (".cut button", "circle", "#memory rect"):
        page.run("document.querySelector(arguments[0]).focus()", selector)
        assert "</script>" in page.text("#tip"), selector
    assert page.find("img, main script, main style, iframe") == []
    assert page.run("return window.isOwned ?? null") is None
    assert page.run("try { document.body.innerHTML = 'x' } catch (error) { return error.name }") == "TypeError"
    assert len(page.problems()) == 1  # that it was refused


def test_it_is_seen_and_read(visit: Visit) -> None:
    """Light and dark, on a phone, on paper, and by those who only hear it."""
    page = visit(everything("a" * 200).beside(evil_trace().as_report("evil")))
    page.click("#grid tbody [aria-rowindex]")
    focusable = "input, select, button:not(:disabled), canvas, #grid, circle, rect[tabindex], [role=region], nav, aside"
    for element in page.find(focusable):
        if page.call("GET", f"/element/{element}/displayed"):
            assert page.call("GET", f"/element/{element}/computedlabel"), element
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
        page.look(width=width, height=844, scheme=scheme)
        assert page.run("return document.documentElement.scrollWidth") <= width
        assert page.contrast() >= 4.5, (width, scheme)
    assert page.run("return document.querySelector('.figures').offsetHeight") < 600  # names are not all of it
    page.look(media="print")
    assert not page.run("return document.getElementById('kernel-view').checkVisibility()")
    assert page.run("return document.querySelector('.still').checkVisibility()")
    assert page.contrast() >= 4.5


def test_it_can_be_read_without_its_script(visit: Visit, chromium: Browser) -> None:
    chromium.let_run(scripts=False)
    try:
        visit(traced().beside(everything()))
        shown = [chromium.call("GET", f"/element/{each}/text") for each in chromium.find("section")]
    finally:
        chromium.let_run(scripts=True)
    whole = "\n".join(shown)
    assert "cublasLt::splitKreduce_kernel" in whole
    assert "aten::mm" in whole
    assert "Download" not in whole
