"""torch.profiler writes names as they are, and those of modules that were imported meanwhile are anything at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piecegraph.errors import InputError
from piecegraph.provenance.profile.event import decode_whole
from piecegraph.provenance.profile.file import ProfileFile
from piecegraph.provenance.profile.read import read_launches
from tests.cases.kernel_traces import TraceBuilder

PLACEHOLDER = "tvm.py(0): PLACEHOLDER"


def saved(folder: Path, name: str) -> Path:
    """A trace in which a name stands unescaped, and behind it an op and many more events."""
    trace = TraceBuilder()
    with trace.python(PLACEHOLDER), trace.op("aten::mm"):
        trace.kernel("gemm")
    for number in range(100):
        with trace.op(f"aten::op{number}"):
            trace.kernel("other")
    path = folder / "trace.json"
    text = json.dumps({"traceEvents": trace.events}, indent=2)
    path.write_text(text.replace(PLACEHOLDER, name), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "name",
    ['tvm.py(0): "nan_asserts"', "tvm.py(0): a\\", 'tvm.py(0): "', 'tvm.py(0): {"a": [", }, {\n"x', "tvm.py(0): \\u12"],
)
def test_an_event_with_such_a_name_is_read_and_so_is_what_follows(name: str, tmp_path: Path) -> None:
    trace, _ = read_launches(saved(tmp_path, name))
    assert len(trace.launches) == 101
    assert [(one.kind, one.name) for one in trace.launches[0].ranges] == [("op", "aten::mm"), ("python", name)]


def test_a_copy_of_it_is_json(tmp_path: Path) -> None:
    source = ProfileFile(str(saved(tmp_path, 'a "b"')), decode_whole, make=dict)
    assert 'a "b"' in [event["name"] for batch in source.batches() for event in batch]


def test_other_damage_is_still_told(tmp_path: Path) -> None:
    path = saved(tmp_path, "tvm.py(0): fine")
    path.write_text(path.read_text().replace('"pid": 100', '"pid" 100', 1))
    with pytest.raises(InputError, match="PG703"):
        read_launches(path)
