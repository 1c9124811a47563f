"""Tables of kernels and their changes in every format. ``UPDATE_GOLDEN=1`` writes the golden files anew."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from piecegraph.base.text import to_json
from piecegraph.provenance.launch import KernelProfile, Launch
from piecegraph.provenance.show.json_document import diff_document, table_document
from piecegraph.provenance.show.markdown import table_markdown
from piecegraph.provenance.show.nsys_csv import table_csv
from piecegraph.provenance.show.perfetto import annotate, launch_args, write_events
from piecegraph.provenance.show.printed import PrintedDiff, PrintedTable, printed
from piecegraph.provenance.show.text import diff_text, diff_view, table_text, table_view
from piecegraph.provenance.tables.changes import Diff, diff
from piecegraph.provenance.tables.table import Table, tabulate
from tests.cases.launches import FUSED, GEMM, GROUPS, decode_trace, launch, slower

FOLDER = Path(__file__).parents[2] / "golden"
ENVIRONMENT = {"piecegraph": "1.0", "python": "3.11.0", "torch": "2.13.0", "platform": "not shown"}


@pytest.fixture
def table() -> Table:
    return tabulate(decode_trace(), GROUPS)


@pytest.fixture
def changes() -> Diff:
    trace = decode_trace()
    after = slower(replace(trace, launches=trace.launches[:-1]), 0.75)
    added = launch("_paged_decode_kernel", 100, 2.5, how="call")
    return diff(tabulate(trace), tabulate(replace(after, launches=(*map(recompiled, after.launches), added))))


def recompiled(one: Launch) -> Launch:
    """Inductor numbers its kernels anew."""
    if one.name != FUSED or one.call is None:
        return one
    name = FUSED.replace("_0", "_3")
    return replace(one, name=name, call=replace(one.call, op=name))


def check_golden(name: str, text: str) -> None:
    path = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_text_word_for_word(table: Table, changes: Diff) -> None:
    part = table.filter(module="layers.0")
    texts = [table_text(table), table_text(table, width=80), table_text(part, limit=2), diff_text(changes)]
    check_golden("kernels.txt", "\n\n".join(texts) + "\n")


def test_markdown_word_for_word(table: Table) -> None:
    check_golden("kernels.md", table_markdown(table, ENVIRONMENT, limit=7))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 140, 200])
def test_lines_fit_the_width(table: Table, changes: Diff, width: int) -> None:
    for text in (table_text(table, width=width), diff_text(changes, width=width)):
        assert max(map(len, text.splitlines())) <= width
        assert "Kernel" in text
        assert "Module" in text


def test_a_terminal_gets_colours_and_a_file_does_not(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for is_terminal in (True, False):
        file = io.StringIO()
        console = Console(file=file, width=142, force_terminal=is_terminal)
        console.print(table_view(table), diff_view(diff(table, table)))
        assert ("\x1b[" in file.getvalue()) == is_terminal


def test_what_a_user_is_given_prints_itself(table: Table, changes: Diff) -> None:
    given = printed(PrintedTable, table)
    assert str(given) == table_text(table)
    assert str(given.filter(module="layers.0").sort("avg")) == table_text(table.filter(module="layers.0").sort("avg"))
    assert str(printed(PrintedDiff, changes)) == diff_text(changes)


def test_long_times_are_in_milliseconds() -> None:
    text = table_text(tabulate(KernelProfile((launch("k", 0, 123456.0),))))
    assert "(ms)" in text
    assert "123.456" in text


def test_csv_can_be_read_as_one_of_nsys(table: Table) -> None:
    rows = list(csv.DictReader(io.StringIO(table_csv(table))))
    assert list(rows[0])[:9] == [
        *("Time (%)", "Total Time (ns)", "Instances", "Avg (ns)", "Med (ns)", "Min (ns)", "Max (ns)", "StdDev (ns)"),
        "Name",
    ]
    assert sum(int(row["Total Time (ns)"]) for row in rows) == 80_000
    first = rows[0]
    assert (first["Time (%)"], first["Instances"], first["Avg (ns)"], first["Name"]) == ("32.5", "2", "13000.0", GEMM)
    assert (first["Module"], first["Python Line"].rpartition("/")[2]) == (
        *("model.layers.*.mlp.up_proj", "modeling_llama.py:180"),
    )
    (add,) = (row for row in rows if row["Name"] == "vectorized_elementwise_kernel[CUDAFunctor_add]")
    assert "std::array<char*, 3ul>" in add["Full Names"]


def test_json_holds_sites_and_stacks(table: Table) -> None:
    found = json.loads(to_json(table_document(table)))
    assert (found["schema_version"], found["device"], found["coverage"]["idle_us"]) == (1, "NVIDIA H200", 30)
    assert sum(row["total_us"] for row in found["rows"]) == 80
    (fused,) = (row for row in found["rows"] if row["kernel"] == FUSED)
    assert [origin["op"] for origin in fused["sites"][0]["origins"]] == ["aten::silu", "aten::mul", "aten::add"]
    assert [line["line"] for line in fused["sites"][0]["origins"][0]["stack"]] == [400, 180]
    assert [site["instances"] for site in fused["sites"]] == [1, 1]


def test_json_of_changes(changes: Diff) -> None:
    found = json.loads(to_json(diff_document(changes)))
    assert (found["before_us"], found["after_us"], found["equal_rows"]) == (80, 55, 0)
    assert sum(change["delta_us"] for change in found["changes"]) == pytest.approx(-25)
    assert {change["state"] for change in found["changes"]} == {"new", "gone", "changed"}


def test_markdown_survives_bars_and_backticks() -> None:
    text = table_markdown(tabulate(KernelProfile((launch("a|b`c", 0, 1),), notes=("<b>|",))), ENVIRONMENT)
    assert "`a\\|b'c`" in text
    assert "note: \\<b\\>\\|" in text


def test_a_name_cannot_command_a_terminal() -> None:
    table = tabulate(KernelProfile((launch("evil\x1b[2J\nname", 0, 1),), notes=("\x1b]0;title\x07",)))
    for text in (
        table_text(table),
        diff_text(diff(table, tabulate(KernelProfile(())))),
        table_markdown(table, ENVIRONMENT),
    ):
        assert "\x1b" not in text
        assert "evil [2J name" in text


def test_every_format_of_nothing() -> None:
    empty = tabulate(KernelProfile(()))
    assert table_csv(empty).count("\n") == 1
    assert table_document(empty)["rows"] == []
    assert "nothing ran" in table_markdown(empty, ENVIRONMENT)
    assert "nothing ran" in table_text(empty)
    assert "nothing ran" in diff_text(diff(empty, empty))


def test_a_trace_is_copied_with_what_is_known() -> None:
    (first, *_, last) = decode_trace().launches
    events = [
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "args": {"grid": [1, 1, 1]}},
        {"ph": "X", "cat": "cpu_op", "name": "b", "ts": 2},
        {"ph": "X", "cat": "kernel", "name": "c", "ts": 3},
    ]
    known = {1: launch_args(first, "4"), 3: launch_args(last)}
    file = io.StringIO()
    head = {"schemaVersion": 1, "traceEvents": "the old ones"}
    assert write_events(annotate(events, lambda event: known.get(event["ts"])), file, head) == 3
    written = json.loads(file.getvalue())
    assert written["schemaVersion"] == 1
    assert written["traceEvents"][0]["args"] == {
        "grid": [1, 1, 1],
        "call": "aten::mm",
        "module": "model.layers.0.self_attn.q_proj",
        "py": f"{first.call.origins[0].line.file}:250",  # type: ignore[union-attr]
        "group": "4",
        "how": "position",
    }
    assert written["traceEvents"][1] == events[1]
    assert written["traceEvents"][2]["args"] == {"how": "none"}
    assert "args" not in events[2]


def test_copying_reads_one_event_at_a_time() -> None:
    file = io.StringIO()
    written = []

    def events() -> object:
        for number in range(3):
            yield {"ts": number}
            written.append(f'"ts": {number}' in file.getvalue())

    write_events(annotate(events(), lambda event: None), file)  # type: ignore[arg-type]
    assert written == [True, True, True]
    assert json.loads(file.getvalue()) == {"traceEvents": [{"ts": 0}, {"ts": 1}, {"ts": 2}]}
