"""torch's one-shot all-reduce on a real GPU: a group of one process, in which a sum is what was there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

JOB = """
import torch
from torch import distributed
from piecegraph.base import torch_compat
from piecegraph.base.job import leave_job
from piecegraph.llm.ranks.group import start_job
from piecegraph.llm.ranks.one_shot import OneShot

start_job("cuda")
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
data = distributed.new_group([0], backend="nccl")
sums = OneShot(torch_compat.symmetric_bytes(65536, device, data), data.group_name)
for dtype in (torch.bfloat16, torch.float32):
    tensor = torch.randn(8, 256, device=device, dtype=dtype)
    expected = tensor.clone()
    sums.all_reduce(tensor)
    assert torch.equal(tensor, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums.all_reduce(tensor)
    for _ in range(3):
        tensor.normal_()
        expected.copy_(tensor)
        graph.replay()
        assert torch.equal(tensor, expected)
print(len(torch_compat.nvlinks()) == torch.cuda.device_count())
leave_job()
"""


def test_the_kernel_runs_and_is_captured() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", JOB],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "True"
