"""Ranks of a job that fail: one report, no hang, and a clean way out. Real processes on gloo."""

from __future__ import annotations

import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from piecegraph.explain.rank_evidence import evidence_of_ranks, write_failure
from tests.cases.forked import ForkServer

JOB = """
import sys
import torch
import torch.distributed as dist
import piecegraph
from piecegraph.errors import PiecegraphError
from piecegraph.tape.simulated import SimulatedGraphs

dist.init_process_group("gloo")
rank, rows = dist.get_rank(), torch.ones(4, 2)
record = SimulatedGraphs.record
FAILING = {"none_fail": [], "one_fails": [1], "two_fail": [1, 2], "all_fail": [0, 1, 2]}

def fail(*args):
    raise RuntimeError("operation not permitted when stream is capturing")

def attempt(name, failing):
    def forward(x):
        return x + 1
    SimulatedGraphs.record = fail if rank in failing else record
    forward.__qualname__ = name
    arguments = {"frontend": "breakable", "dynamic_dims": {"x": 0}, "options": {"graph_device": "simulated"}}
    fast = piecegraph.compile(forward, capture_sizes=[4], **arguments)
    try:
        with torch.no_grad():
            fast.capture(rows)
    except PiecegraphError as error:
        notes = getattr(error, "__notes__", [])
        printed = f"{error.code} {error.phase} {error.size} {error.line.split(':')[0]} {notes}"
    else:
        printed = "fine"
    sys.stdout.write(f"{name} rank{rank}: {printed}\\n")  # a line in one piece, whoever else is writing
    sys.stdout.flush()

for name, failing in FAILING.items():
    attempt(name, failing)
    dist.barrier()
dist.destroy_process_group()
"""


LAUNCH = """
import runpy, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# As torchrun --standalone, but for the ranks, which are forked: each would import torch again.
how = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork"}
config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=3, **how)
elastic_launch(config, lambda: runpy.run_path(sys.argv[1], run_name="__main__") and None)()
"""


@pytest.fixture(scope="module")
def job(forked: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    script = tmp_path_factory.mktemp("job") / "job.py"
    script.write_text(JOB)
    return forked.run("-c", LAUNCH, str(script), cwd=script.parent, seconds=120)


def printed(job: subprocess.CompletedProcess[str], name: str) -> list[str]:
    return sorted(line.partition(" ")[2] for line in job.stdout.splitlines() if line.startswith(f"{name} "))


def test_the_job_itself_ends_well(job: subprocess.CompletedProcess[str]) -> None:
    assert job.returncode == 0, job.stderr[-3000:]


def test_no_rank_fails_and_nothing_is_said(job: subprocess.CompletedProcess[str]) -> None:
    assert printed(job, "none_fail") == ["rank0: fine", "rank1: fine", "rank2: fine"]
    assert "none_fail" not in job.stderr


def test_one_rank_fails_and_reports_itself(job: subprocess.CompletedProcess[str]) -> None:
    assert printed(job, "one_fails") == ["rank0: fine", "rank1: PG403 capture 4 job.py []", "rank2: fine"]
    assert job.stderr.count("one_fails failed on rank 1 of 3; 2 did not fail within 2 s: PG403 ") == 1


def test_without_rank_0_the_lowest_rank_that_failed_reports(job: subprocess.CompletedProcess[str]) -> None:
    printed_by_2 = "rank2: PG403 capture 4 job.py ['rank 1 prints the report of all 2 ranks that failed']"
    assert printed(job, "two_fail") == ["rank0: fine", "rank1: PG403 capture 4 job.py []", printed_by_2]
    assert job.stderr.count("two_fail failed on ") == 1
    assert "two_fail failed on ranks 1, 2 of 3; 1 did not fail" in job.stderr


def test_all_ranks_fail_and_rank_0_reports(job: subprocess.CompletedProcess[str]) -> None:
    note = "['rank 0 prints the report of all 3 ranks that failed']"
    own = "PG403 capture 4 job.py"
    assert printed(job, "all_fail") == [f"rank0: {own} []", f"rank1: {own} {note}", f"rank2: {own} {note}"]
    assert job.stderr.count("all_fail failed on ranks 0, 1, 2 of 3: PG403 ") == 1


def test_equal_failures_are_printed_once() -> None:
    def failure(message: str) -> str:
        try:
            raise ValueError(message)
        except ValueError as error:
            return write_failure(error)

    evidence = evidence_of_ranks({3: failure("size 3"), 1: failure("size 1"), 2: failure("another")}, 4)
    printed = [(found.chain[0].message, [process.rank for process in found.processes]) for found in evidence.failures]
    assert printed == [("size 3", [3, 1]), ("another", [2])]
    assert [process.rank for process in evidence.processes] == [0, 1, 2, 3]


def test_a_store_that_hangs_does_not_hang_us(forked: ForkServer, tmp_path: Path) -> None:
    script = """
        import time
        import torch.distributed as dist
        from piecegraph.explain import ranks
        from piecegraph.base import torch_compat
        ranks._is_in_job = lambda: True
        dist.get_rank, dist.get_world_size = lambda: 0, lambda: 2
        torch_compat.job_store = lambda: time.sleep(600)
        ranks._DEADLINE_SECONDS = -2.5
        ranks.report_failure("forward", ValueError())
        print("on we go")
        """
    done = forked.run("-c", dedent(script), cwd=tmp_path, seconds=60)
    assert done.stdout == "on we go\n", done.stderr


def test_our_commands_leave_the_job(forked: ForkServer, tmp_path: Path) -> None:
    script = f"""
        import atexit
        import torch.distributed as dist
        from piecegraph.cli import main as m
        from piecegraph.errors import ConfigError
        @m.group.command()
        def fail():
            dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=0, world_size=1)
            raise ConfigError("PG101", "it failed")
        atexit.register(lambda: print(dist.is_initialized()))
        m.main()
        """
    done = forked.run("-c", dedent(script), "fail", cwd=tmp_path, seconds=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "False\n", "error: PG101 it failed\n")
