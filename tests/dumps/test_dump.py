"""What a dump holds, when there is one, and that it breaks nothing."""

from __future__ import annotations

import errno
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.errors import ConfigError
from tests.cases.modules import Stack, attention

OPS = ["pgtest::attention"]


def compile_stack(num_layers: int = 3, options: dict[str, Any] | None = None, **arguments: Any) -> Any:
    settings = {"backend": "eager", "capture_sizes": [8, 4], **arguments}
    torch.manual_seed(0)
    return piecegraph.compile(Stack(attention, num_layers), splitting_ops=OPS, options=options or {}, **settings)


def call(fast: Any, rows: int = 8) -> Tensor:
    with torch.no_grad():
        result: Tensor = fast(torch.ones(rows, 12))
    return result


@contextmanager
def executed_lines() -> Iterator[dict[str, set[int]]]:
    """Where a debugger could have stopped, by file."""
    lines: dict[str, set[int]] = {}

    def on_event(frame: FrameType, event: str, arg: Any) -> Any:
        lines.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        yield lines
    finally:
        sys.settrace(before)


def test_an_index_leads_to_everything(tmp_path: Path) -> None:
    fast = compile_stack(options={"dump": tmp_path, "graph_device": "simulated"})
    assert torch.equal(call(fast), call(compile_stack(options={"graph_device": "simulated"})))
    folder = tmp_path / "Stack"
    index = (folder / "index.md").read_text()
    assert "4 pieces, 3 distinct (each compiled once), 3 cuts; complete" in index
    assert "| 1 | cut pgtest::attention |  | modules.py:122 | listed in splitting_ops |" in index
    assert re.search(
        r"\| 2 \| piece \| 14 \| modules.py:122 \| eager \| \d+\.\d\d \| 0\.00\d \| \[piece_02.py\]", index
    )
    assert "| 4 | piece | 14 | modules.py:122 | eager, as piece 2 |" in index
    assert re.search(r"^\| 8 \| 4 \| 3 \| \d+\.\d+ \| \d+\.\d \|$", index, re.MULTILINE)
    listed = re.findall(r"^- \[(.*)\]", index, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in folder.iterdir())
    assert set(listed) == {"index.md", "plan.json", "traced.py", "split.py", *(f"piece_0{i}.py" for i in (0, 2, 6))}
    plan = json.loads((folder / "plan.json").read_text())
    assert [step["kind"] for step in plan["steps"]] == ["piece", "cut"] * 3 + ["piece"]
    assert plan["complete"]
    assert not plan["failure"]


def test_graphs_are_python_with_the_lines_of_the_model(tmp_path: Path) -> None:
    call(compile_stack(2, {"dump": tmp_path}))
    traced, split = ((tmp_path / "Stack" / name).read_text() for name in ("traced.py", "split.py"))
    for text in (traced, split):
        compile(text, "graph", "exec")
        assert re.search(r"# File: .*modules.py:122 in forward, code: x = x \+ self.out", text)
    assert "argument x" in traced
    assert "weight layers.0.qkv.weight" in traced
    assert "# a cut at pgtest::attention (modules.py:122): listed in splitting_ops\ndef cut_01(" in split
    assert re.search(r"def forward\(self, .*\n    q, k, v, = piece_00\(self, s\d+, ", split)


def test_pieces_run_from_their_files(tmp_path: Path) -> None:
    fast = compile_stack(options={"dump": tmp_path})
    call(fast)
    with executed_lines() as lines:
        call(fast)
    for index in (0, 2, 6):
        path = tmp_path / "Stack" / f"piece_0{index}.py"
        text = path.read_text().partition("def make_piece")[0].splitlines()
        computing = {number for number, line in enumerate(text, 1) if re.match(r'        \w+(: ".*")? = ', line)}
        assert computing < lines[str(path)], "every line that computes was run from the file"


def test_code_of_inductor_runs_from_its_file(tmp_path: Path) -> None:
    fast = compile_stack(backend="inductor", capture_sizes=[8], options={"dump": tmp_path})
    call(fast)
    with executed_lines() as lines:
        call(fast)
    path = tmp_path / "Stack" / "piece_02_inductor.py"
    launches = [n for n, line in enumerate(path.read_text().splitlines(), 1) if "extern_kernels.addmm(" in line]
    assert set(launches) < lines[str(path)]
    assert "- `aten::addmm`: aten::linear modules.py:" in (tmp_path / "Stack" / "index.md").read_text()


def test_kernels_are_listed_where_provenance_is_on(tmp_path: Path) -> None:
    options = {"dump": tmp_path, "graph_device": "simulated", "provenance": True}
    call(compile_stack(2, options, capture_sizes=[8]))
    kernels = (tmp_path / "Stack" / "kernels.md").read_text()
    assert "## piece 2 at 8" in kernels
    assert "- op `aten::gelu` by `aten::gelu`: aten::gelu modules.py:109" in kernels


def test_the_nearest_wish_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_DUMP", str(tmp_path / "environment"))
    call(compile_stack(1))
    call(compile_stack(1, {"dump": tmp_path / "option"}))
    with piecegraph.dump(tmp_path / "around"):
        call(compile_stack(1, {"dump": tmp_path / "option"}))
    monkeypatch.delenv("PIECEGRAPH_DUMP")
    call(compile_stack(1))
    found = sorted(str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("index.md"))
    assert found == ["around/Stack", "environment/Stack", "option/Stack"]


def test_each_plan_and_each_rank_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    fast = compile_stack(1, {"dump": tmp_path})
    call(fast)
    first = (tmp_path / "rank3" / "Stack" / "index.md").read_text()
    with piecegraph.intercept(torch.nn.functional.gelu, before=lambda *args: None):
        call(fast)
    assert (tmp_path / "rank3" / "Stack" / "index.md").read_text() == first
    assert "| cut aten::gelu |" in (tmp_path / "rank3" / "Stack-2" / "index.md").read_text()


def test_a_function_that_is_not_traced_has_an_index(tmp_path: Path) -> None:
    call(compile_stack(1, {"dump": tmp_path, "graph_device": "simulated"}, frontend="breakable"))
    index = (tmp_path / "Stack" / "index.md").read_text()
    assert "runs as it is, without a trace (asked for): there are no pieces" in index
    assert "cut pgtest::attention" in index
    assert "| 8 | 2 | 1 |" in index


def test_lines_of_a_dump_are_nobodys_code(tmp_path: Path) -> None:
    from piecegraph.base.user_code import is_user_file

    call(compile_stack(1, {"dump": tmp_path}))
    assert not is_user_file(str(tmp_path / "Stack" / "piece_00.py"))
    assert is_user_file(str(tmp_path / "model.py"))


# --- a dump that cannot be written


@pytest.mark.parametrize("wrong", [3, "", True])
def test_a_folder_must_be_a_name(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"PG101 options\['dump'\]"):
        piecegraph.compile(nn.Linear(2, 2), options={"dump": wrong})


def test_a_folder_that_cannot_be_made_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    fast = compile_stack(1, {"dump": tmp_path / "file"}, on_fallback="raise")
    assert torch.equal(call(fast), call(compile_stack(1)))
    assert fast.stats()["events"] == {"PG321": 1}
    assert "PG321" in fast.explain()
    assert "PG321" in caplog.text


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def fails(path: Path, text: str, **arguments: Any) -> int:
        if "piece_02" in path.name:
            write(path, text[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text, **arguments)

    monkeypatch.setattr(Path, "write_text", fails)
    fast = compile_stack(3, {"dump": tmp_path}, on_fallback="raise")
    assert torch.equal(call(fast), call(compile_stack(3)))
    folder = tmp_path / "Stack"
    names = {path.name for path in folder.iterdir()}
    assert names == {"index.md", "plan.json", "traced.py", "split.py", "piece_00.py", "piece_06.py"}
    assert "piece_02" not in (folder / "index.md").read_text().partition("## Files")[2]
    assert fast.stats()["events"].keys() == {"PG321"}
    assert "No space left on device" in fast.explain()


def test_a_graph_that_cannot_be_written_down_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> str:
        raise TypeError("no words for it")

    monkeypatch.setattr("piecegraph.dumps.plan_dump.split_text", fails)
    monkeypatch.setattr("piecegraph.dumps.pieces.write_repro", fails)
    fast = compile_stack(1, {"dump": tmp_path}, on_fallback="raise")
    assert torch.equal(call(fast), call(compile_stack(1)))
    assert "PG321 the dump in" in fast.explain()
    assert "no words for it" in (tmp_path / "Stack" / "index.md").read_text()
