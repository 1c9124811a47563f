"""Plans and pieces in torch's own log, and in what tlparse makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases.forked import ForkServer

ROOT = Path(__file__).parents[2]
TLPARSE = Path(sys.executable).with_name("tlparse")
PROGRAM = """
import piecegraph, torch
from tests.cases.modules import Stack, attention
fast = piecegraph.compile(Stack(attention, 3), splitting_ops=[attention], backend="eager")
with torch.no_grad():
    fast(torch.ones(4, 12))
"""


@pytest.mark.skipif(not TLPARSE.exists(), reason="there is no tlparse in this environment")
def test_tlparse_shows_the_plan_and_its_pieces(tmp_path: Path, forked: ForkServer) -> None:
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path / "trace")}
    # The process that programs are forked from has looked for the variable already.
    begin = "from torch._logging import _internal as it; it.LOG_TRACE_HANDLER = None; it._init_logs()\n"
    done = forked.run("-c", begin + PROGRAM, cwd=ROOT, environment=environment)
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "trace").iterdir()
    out = tmp_path / "out"
    subprocess.run([TLPARSE, log, "-o", out, "--no-browser"], check=True, capture_output=True)
    found = {path.stem.rpartition("_")[0]: path for path in out.rglob("piecegraph_*")}
    assert sorted(found) == [f"piecegraph_{name}" for name in ("piece_00", "piece_02", "piece_06", "plan", "split")]
    plan = json.loads(found["piecegraph_plan"].read_text())
    assert [step["kind"] for step in plan["steps"]] == ["piece", "cut"] * 3 + ["piece"]
    assert plan["name"] == "Stack"
    assert "def cut_01(" in found["piecegraph_split"].read_text()
    assert "torch._C._nn.gelu(" in found["piecegraph_piece_02"].read_text()
    graph = next(path for path in out.rglob("dynamo_output_graph_*"))
    assert graph.parent.name[:5] == found["piecegraph_plan"].parent.name[:5], "beside the graph that was cut"
    assert "piecegraph_plan" in (out / "index.html").read_text()
