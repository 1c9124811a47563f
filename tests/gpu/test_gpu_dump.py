"""Repros on a GPU: the piece is captured and replayed, too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from tests.cases.modules import Stack, attend_into

pytestmark = pytest.mark.gpu


@torch.library.custom_op("pgtest::reads_on_the_host", mutates_args=())
def reads_on_the_host(x: torch.Tensor) -> torch.Tensor:
    return x + float(x.sum().cpu() * 0)


@reads_on_the_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def dump(model: Any, folder: Path, **arguments: Any) -> Path:
    fast = piecegraph.compile(model, capture_sizes=[8], on_fallback="ignore", options={"dump": folder}, **arguments)
    with torch.no_grad():
        fast(torch.ones(8, 12, device="cuda"))
    (found,) = (path.parent for path in folder.glob("*/index.md"))
    return found


def test_a_piece_is_captured_and_replayed(tmp_path: Path) -> None:
    folder = dump(Stack(attend_into, 2).cuda(), tmp_path, splitting_ops=["pgtest::attention_out"])
    command = [sys.executable, folder / "piece_02.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^captured  the same$", done.stdout, re.MULTILINE)


def test_a_capture_that_fails_is_cut_down_to_the_op(tmp_path: Path) -> None:
    folder = dump(lambda x: reads_on_the_host(x * 2).relu() + 1, tmp_path, dynamic_dims={"x": 0})
    index = (folder / "index.md").read_text()
    assert "PG401" in index
    assert "pgtest::reads_on_the_host" in index
    assert "reads_on_the_host" in (folder / "piece_00_smallest.py").read_text()
