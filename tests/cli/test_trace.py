"""``piecegraph trace``: scripts, models and recorded traces; what is shown, what is saved, and how it ends."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from piecegraph.cli.what_if import measure_parts, parts_document, parts_view
from piecegraph.provenance.selection.cost import Cost
from piecegraph.provenance.show.text import plain_text
from piecegraph.provenance.trace import open_trace
from tests.cases.commands import Run, runner
from tests.cases.kernel_traces import GPU_NAME, TraceBuilder
from tests.cases.tiny_llm import write_tiny_llm

SCRIPT = """
import sys
import torch
from torch import nn
import beside


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.up(x))
        return self.down(x)


if __name__ == "__main__":
    print("arguments", sys.argv[1:], beside.NUMBER)
    with torch.no_grad():
        Net()(torch.ones(2, 4))
    sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else None)
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner("trace", monkeypatch, capsys)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("NUMBER = 7\n")
    (tmp_path / "net.py").write_text(SCRIPT)
    return str(tmp_path / "net.py")


def record(path: Path, *, duration: float = 5.0) -> str:
    """Two lines that launch a GEMM, one of them with a reduction behind it."""
    trace = TraceBuilder()
    for _ in range(6):
        with trace.python("model.py(7): forward"), trace.op("aten::mm", dims=[[2, 8], [8, 8]]):
            trace.kernel("gemm_splitK", grid=(4, 1, 5), duration=duration)
            trace.kernel("splitKreduce_kernel")
        with trace.python("model.py(9): forward"), trace.op("aten::addmm", dims=[[2, 8], [8, 8]]):
            trace.kernel("gemm")
    return str(trace.save(path))


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    return record(tmp_path / "recorded.json")


# ------------------------------------------------------------------ scripts


def test_a_script_runs_as_python_runs_it(script: str, run: Run) -> None:
    path = list(sys.path)
    done = run(script, "0", "more", "--", "--own-option")
    assert done.code == 0
    said, *table = done.out.splitlines()
    assert said == "arguments ['0', 'more', '--own-option'] 7"
    row = next(line for line in table if "aten::addmm" in line and " down " in line)
    assert "net.py:16" in row
    assert "100.0 % to a line" in done.out
    assert sys.path == path


def test_the_script_says_how_it_ends(script: str, run: Run) -> None:
    done = run(script, "3")
    assert done.code == 3
    assert "aten::relu" in done.out


def test_a_script_may_end_with_words(tmp_path: Path, run: Run) -> None:
    (tmp_path / "ends.py").write_text("raise SystemExit('no more')")
    done = run(str(tmp_path / "ends.py"))
    assert (done.code, done.err) == (1, "no more\n")
    assert done.out.startswith("nothing ran while this trace was taken")


def test_the_traceback_of_a_script_is_its_own_and_there_is_no_table(tmp_path: Path, run: Run) -> None:
    failing = tmp_path / "failing.py"
    failing.write_text("import torch\ntorch.ones(2) + 1\nraise KeyError('here')\n")
    page = tmp_path / "why.html"
    done = run(str(failing), "-o", str(tmp_path / "half.csv"), "-o", str(page))
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{failing}", line 3, in <module>',
        "    raise KeyError('here')",
        "KeyError: 'here'",
        str(page),
    ]
    assert not (tmp_path / "half.csv").exists()
    assert "<title>KeyError: 1 process failed</title>" in page.read_text()
    assert "raise KeyError(&#39;here&#39;)" in page.read_text()


def test_what_started_the_command_is_not_on_the_stack(script: str, run: Run) -> None:
    found = json.loads(run(script, "--json", "--op", "aten::relu").out)
    (origin,) = found["rows"][0]["sites"][0]["origins"]
    assert [line["text"] for line in origin["stack"]] == ["Net()(torch.ones(2, 4))", "x = torch.relu(self.up(x))"]


# ------------------------------------------------------------------ what is shown


def test_one_document_whatever_the_script_prints(script: str, run: Run) -> None:
    done = run(script, "--json")
    found = json.loads(done.out)
    assert "arguments" in done.err
    assert {"rows", "groups", "coverage", "schema_version"} <= found.keys()
    assert {row["module"] for row in found["rows"] if row["call"] == "aten::addmm"} == {"up", "down"}


def test_nothing_else_is_on_either_stream(tmp_path: Path) -> None:
    (tmp_path / "shell.py").write_text("import os, torch\ntorch.ones(2).cos()\nos.system('echo from a child')")
    code = "from piecegraph.cli.main import main; main()"
    command = [sys.executable, "-c", code, "trace", str(tmp_path / "shell.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "aten::cos" in {row["call"] for row in json.loads(done.stdout)["rows"]}
    assert (done.returncode, done.stderr) == (0, "from a child\n")


def test_filters_narrow_table_and_document(recorded: str, run: Run) -> None:
    for option in (("--op", "aten::addmm"), ("--line", "model.py:9"), ("--kernel", "gemm")):
        shown = run("--from", recorded, *option).out
        assert "model.py:9" in shown
        assert "model.py:7" not in shown
        (row,) = json.loads(run("--from", recorded, "--json", *option).out)["rows"]
        assert (row["kernel"], row["instances"]) == ("gemm", 6)


def test_sort_and_limit(recorded: str, run: Run) -> None:
    first = run("--from", recorded, "--sort", "kernel", "--limit", "1").out
    assert [name for name in ("gemm ", "gemm_splitK", "splitKreduce") if name in first] == ["gemm "]
    assert "not shown: 2 of 3 rows" in first
    assert "not shown" not in run("--from", recorded, "--limit", "0").out


def test_groups_stand_below_the_table(recorded: str, run: Run) -> None:
    table, _, groups = run("--from", recorded, "--groups").out.partition("\n\nG1  ")
    assert GPU_NAME not in groups
    assert "gemm_splitK" in table
    assert groups.startswith("always, in 6 calls of aten::mm (6 in all)")


def test_a_terminal_is_filled_and_not_more(recorded: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    rows = [line for line in run("--from", recorded).out.splitlines() if "model.py:" in line]
    assert len(rows) == 3
    assert all(len(line) <= 70 and "stack" not in line for line in rows)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    wide = [line for line in run("--from", recorded).out.splitlines() if "model.py:" in line]
    assert all(" stack" in line for line in wide)


# ------------------------------------------------------------------ files


def test_every_format(recorded: str, run: Run, tmp_path: Path) -> None:
    names = ["a.txt", "a.csv", "a.json", "a.md", "a.trace.json", "a.trace.json.gz", "a.html"]
    paths = [tmp_path / name for name in names]
    done = run("--from", recorded, *(word for path in paths for word in ("-o", str(path))))
    assert done.code == 0
    assert done.err.splitlines() == list(map(str, paths))
    assert "splitKreduce_kernel" in paths[0].read_text()
    assert len(list(csv.reader(paths[1].read_text().splitlines()))) == 4
    assert len(json.loads(paths[2].read_text())["rows"]) == 3
    assert "## G1" in paths[3].read_text()
    whole = open_trace(recorded)
    assert f"<title>Trace of {recorded}</title>" in paths[6].read_text()
    for path in paths[4:6]:
        again = open_trace(path)
        assert again.launches == whole.launches
        assert str(again.table()) == str(whole.table())
        assert again.groups() == whole.groups()


def test_a_saved_trace_of_a_script_is_as_it_was(script: str, run: Run, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved.trace.json.gz")
    first = run(script, "-o", saved)
    again = run("--from", saved)
    assert first.out.partition("\n")[2] == again.out
    assert "rows: 0 differ" in run("--from", saved, "--diff", saved).out


def test_diff_shows_what_changed_since(recorded: str, run: Run, tmp_path: Path) -> None:
    later = record(tmp_path / "later.json", duration=8.0)
    shown = run("--from", later, "--diff", recorded).out
    assert "+18.0" in shown
    assert "90.0 us before, 108.0 us after: +20.0 % of GPU time" in shown
    document = json.loads(run("--from", later, "--diff", recorded, "--json").out)
    (change,) = document["diff"]["changes"]
    assert (change["kernel"], change["delta_us"]) == ("gemm_splitK", 18.0)


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "PG702"), ("no JSON", "PG703"), ("{}", "PG704"), ('{"traceEvents": [{"ph": "X"', "PG705")],
)
@pytest.mark.parametrize("option", ["--from", "--diff"])
def test_files_that_are_no_traces(option: str, text: str, code: str, recorded: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    arguments = (option, str(tmp_path / "bad.json"), *(("--from", recorded) if option == "--diff" else ()))
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {code} ")


def test_what_piecegraph_keeps_in_a_trace_must_be_whole(recorded: str, run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "saved.trace.json"
    run("--from", recorded, "-o", str(saved))
    document = json.loads(saved.read_text())
    del document["piecegraph"]["calls"][1:]
    saved.write_text(json.dumps(document))
    done = run("--from", str(saved))
    assert done.code == 2
    assert "error: PG703 the trace cannot be read back" in done.err


def test_a_later_version_of_what_is_kept_is_passed_over(recorded: str, run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "saved.trace.json"
    run("--from", recorded, "-o", str(saved))
    document = json.loads(saved.read_text())
    document["piecegraph"]["version"] += 1
    saved.write_text(json.dumps(document))
    assert run("--from", str(saved)).out.splitlines()[:5] == run("--from", recorded).out.splitlines()[:5]


# ------------------------------------------------------------------ wrong calls


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Give a script or a model, or --from"),
        (("net.py", "--from", "trace.json"), "one of them"),
        (("model", "prompt"), "A model takes no arguments, but got 'prompt'"),
        (("net.py", "--prompt", "x"), "--prompt needs a model"),
        (("model", "--prompt", "x", "--prompt-tokens", "3"), "Give --prompt or --prompt-tokens"),
        (("model", "--prompt-tokens", "0"), "--prompt-tokens"),
        (("net.py", "--what-if", "layers.*"), "--what-if needs a model"),
        (("--from", "trace.json", "--dtype", "auto"), "--dtype needs a model"),
        (("net.py", "--diff", "t.json", "--op", "x"), "leave --op out"),
        (("net.py", "--sort", "colour"), "--sort"),
        (("net.py", "--limit", "-1"), "--limit"),
        (("nowhere.py",), "PG601 nowhere.py cannot be read"),
        (("net.py", "-o", "table.xlsx"), "PG714 table.xlsx has no known ending"),
        (("net.py", "-o", "no/such/folder/table.csv"), "PG601 no/such/folder/table.csv cannot be written"),
        (("net.py", "--line", "model.py:x"), "PG713"),
    ],
)
def test_wrong_calls_are_told_before_anything_runs(arguments: tuple[str, ...], said: str, run: Run) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_what_matches_nothing_is_told_and_the_trace_is_saved(recorded: str, run: Run, tmp_path: Path) -> None:
    done = run("--from", recorded, "--op", "aten::cos", "-o", str(tmp_path / "all.csv"))
    assert done.code == 2
    assert "error: PG712 no kernel matches op='aten::cos': the table has aten::mm, aten::addmm" in done.err
    assert (tmp_path / "all.csv").exists()


def test_an_interrupt_ends_without_a_traceback(tmp_path: Path, run: Run) -> None:
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt")
    assert run(str(tmp_path / "interrupted.py")) == (130, "", "\n")


# ------------------------------------------------------------------ models


def test_a_model(run: Run, tmp_path: Path) -> None:
    model = write_tiny_llm(tmp_path)
    page = tmp_path / "page.html"
    asked = ("--prompt", "ax by", "--max-new-tokens", "2", "--backend", "eager")
    done = run(model, *asked, "--json", "-o", str(page))
    assert done.code == 0, done.err
    for words in (f"<title>How {model} runs</title>", 'id="plan"', 'id="startup"', 'id="timeline"'):
        assert words in page.read_text()
    found = json.loads(done.out)
    module = "model.layers.*.mlp.down_proj"
    (row,) = (row for row in found["rows"] if (row["module"], row["kernel"]) == (module, "aten::mm"))
    assert row["instances"] == 2 * 2, "two steps of two layers: the warm-up is not in the trace"
    assert [site["module"] for site in sorted(row["sites"], key=lambda site: site["module"])] == [
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    ]


def test_a_model_without_a_tokenizer(run: Run, tmp_path: Path) -> None:
    model = write_tiny_llm(tmp_path)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    how = ("--max-new-tokens", "1", "--backend", "eager", "--json")
    refused, done = run(model, *how), run(model, "--prompt-tokens", "40", *how)
    assert "error: PG666 " in refused.err
    assert "piecegraph trace has --prompt-tokens" in refused.err
    assert done.code == 0, done.err
    rows = [row for row in json.loads(done.out)["rows"] if row["module"] == "model.layers.*.mlp.down_proj"]
    assert [row["instances"] for row in rows if row["kernel"] == "aten::mm"] == [2], "one step of two layers"


def test_a_model_that_is_not_there(run: Run, tmp_path: Path) -> None:
    done = run(str(tmp_path))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: PG661 ")


def test_a_prompt_that_is_refused(run: Run, tmp_path: Path) -> None:
    done = run(write_tiny_llm(tmp_path), "--prompt", "ax " * 70)
    assert (done.code, done.out) == (1, "")
    assert "error: PG652 " in done.err


def test_without_a_gpu_nothing_can_be_left_out_and_that_is_told_first(run: Run) -> None:
    done = run("no/such/model", "--device", "cpu", "--what-if", "layers.*.mlp")
    assert (done.code, done.out) == (1, "")
    assert "error: PG731 what a part of no/such/model costs cannot be measured: without a GPU" in done.err


class FakeKernels:
    """Knows three recorded sizes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def select(self, **asked: Any) -> Any:
        if not asked:
            return SimpleNamespace(kernels=[SimpleNamespace(tape=SimpleNamespace(phase=str(n))) for n in (1, 2, 4)])
        module, size = asked["module"], asked["size"]
        self.asked.append((module, size))
        whole = Cost(size, "all of them", 3, 200.0, 150.0, 1.5)
        part = Cost(size, "aten::mm in layers.*.mlp", 2, 200.0, 160.0, 1.0)
        return SimpleNamespace(time=lambda: (part, whole) if module == "mlp" else (part,))


def test_parts_are_measured_at_the_sizes_that_ran() -> None:
    kernels = FakeKernels()
    launches = [SimpleNamespace(phase=phase) for phase in ("4", "", "1", "4", "an annotation")]
    parts = measure_parts(kernels, SimpleNamespace(launches=launches), ["mlp", "attn"])  # type: ignore[arg-type]
    assert kernels.asked == [("mlp", "4"), ("attn", "4"), ("mlp", "1"), ("attn", "1")]
    assert [(part.part, part.is_whole) for part in parts[:3]] == [
        ("mlp", True),
        ("aten::mm in layers.*.mlp", False),
        ("attn", True),
    ]
    first = parts_document(parts)[0]
    assert (first["module"], first["size"], first["kernels"]) == ("mlp", "4", 3)
    assert (first["saved_us"], first["saved_percent"], first["spread_us"]) == (50.0, 25.0, 1.5)
    shown = plain_text(parts_view(parts[:2]), 120).splitlines()
    assert shown[0].split() == "Size Part Kernels With (us) Without (us) Saved (us) Saved % Spread (us)".split()
    assert shown[1].split() == ["4", "mlp", "3", "200.0", "150.0", "50.0", "25.0", "1.5"]
    assert shown[2].split()[-5:] == ["200.0", "160.0", "40.0", "20.0", "1.0"]


def test_a_row_is_looked_into(run: Run, tmp_path: Path) -> None:
    trace = TraceBuilder()
    for _ in range(7):
        with trace.python("net.py(9): forward"), trace.op("aten::mm", dims=[[2, 8], [8, 8]], types=["float", "float"]):
            trace.kernel("gemm", grid=(4, 1, 5))
    with trace.op("aten::relu"):
        trace.kernel("clamp")
    path = str(trace.save(tmp_path / "run.json"))
    done = run("--from", path, "--row", "1")
    assert done.code == 0, done.err
    head, times, _, sites, site, *_ = done.out.splitlines()
    assert head == "gemm, called by aten::mm"
    assert times.startswith("7 launches, ")
    assert (sites, site.partition(": ")[0]) == ("sites", "  aten::mm at net.py:9")
    assert "  net.py:9" in done.out.splitlines()
    assert done.out.count("grid (4, 1, 5)") == 5
    assert done.out.endswith("  and 2 more\n")
    (row,) = json.loads(run("--from", path, "--row", "2", "--json").out)["rows"]
    assert row["kernel"] == "clamp"


def test_a_row_that_is_not_there(run: Run, tmp_path: Path) -> None:
    trace = TraceBuilder()
    with trace.op("aten::relu"):
        trace.kernel("clamp")
    path = str(trace.save(tmp_path / "run.json"))
    done = run("--from", path, "--row", "2")
    assert (done.code, "PG712 there is no row 2: the table has 1" in done.err) == (2, True)
    assert run("--from", path, "--row", "1", "--diff", path).code == 2
