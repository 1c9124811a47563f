"""Every op of PyTorch's own operator database, on simulated graphs; ``scripts/op_db.py`` takes more samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cases.forked import ForkServer

ROOT = Path(__file__).parents[2]
NUM_SAMPLES = {"trace": 1, "breakable": 2}
"""As many as there is time for."""
NUM_PARTS = 8


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("frontend", NUM_SAMPLES)
def test_no_op_is_wrong_or_crashes(frontend: str, part: int) -> None:
    from scripts.op_check import FAILURES, OPS, check_op  # here, because reading the database takes seconds

    ops = list(OPS.values())[part::NUM_PARTS]
    verdicts = [check_op(op, device="cpu", frontend=frontend, num_samples=NUM_SAMPLES[frontend]) for op in ops]
    failed = [f"{v.op} {v.verdict}, {v.sample}: {v.reason}" for v in verdicts if v.verdict in FAILURES]
    assert not failed, "\n".join(failed)
    assert sum(verdict.verdict == "equal" for verdict in verdicts) > 0.85 * len(ops)


def test_the_script_tells_a_verdict_for_each_op(forked: ForkServer, tmp_path: Path) -> None:
    arguments = ["--frontend", "breakable", "--only", "T,item,empty", "--samples", "1"]
    script = str(ROOT / "scripts" / "op_db.py")
    done = forked.run(script, *arguments, "-o", str(tmp_path / "ops.json"), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts = {verdict["op"]: verdict for verdict in json.loads((tmp_path / "ops.json").read_text())["ops"]}
    assert {op: verdict["verdict"] for op, verdict in verdicts.items()} == {
        "T": "equal",
        "item": "equal",
        "empty": "equal",
    }
    assert done.stdout.splitlines()[-1].endswith("run to run: empty")
