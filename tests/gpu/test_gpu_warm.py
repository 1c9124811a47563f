"""A warm start on a GPU: no kernel is compiled or tuned, neither of Inductor's nor of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cases.llms import tiny_model

pytestmark = pytest.mark.gpu

WATCH = """
import sys
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.backends.nvidia import compiler
import piecegraph

compiled, tuned = [], []
make_cubin = compiler.CUDABackend.make_cubin
def watched(self, src, metadata, *rest):
    compiled.append(metadata["name"])
    return make_cubin(self, src, metadata, *rest)
compiler.CUDABackend.make_cubin = watched
benchmark_all_configs = CachingAutotuner.benchmark_all_configs
def watched_tuning(self, *args, **kwargs):
    tuned.append(self.fn.__name__)
    return benchmark_all_configs(self, *args, **kwargs)
CachingAutotuner.benchmark_all_configs = watched_tuning
"""
START_LLM = """
llm = piecegraph.LLM(sys.argv[1], dtype="bfloat16", max_model_len=128, max_num_seqs=4, max_batch_tokens=32)
llm.generate([[3, 4, 5], [6]], max_new_tokens=4, ignore_eos=True)
kind = next(decision.choice for decision in llm.started.decisions if decision.subject == "cache")
pieces = next(decision.choice for decision in llm.started.decisions if decision.subject == "pieces of decode steps")
print("FOUND", kind, pieces.replace(" ", "_"), *sorted(compiled), *tuned)
"""
START_FUNCTION = """
def normed(x):
    return torch.softmax(x.float() * 2, 1).sum(0)

fast = piecegraph.compile(normed, dynamic_dims={"x": 0}, capture_sizes=[512])
fast.capture(torch.ones(512, 40_000, device="cuda"))
kind = next(decision.choice for decision in fast.plan.decisions if decision.subject == "cache")
print("FOUND", kind, len(compiled), len(tuned))
"""


def start(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a program tells of its start, with the cache of a folder."""
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(folder / "cache"))
    file = folder / "program.py"  # a function without a file is not kept
    file.write_text(WATCH + program)
    words = [sys.executable, str(file), str(folder / "model")]
    run = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    found = [line for line in run.stdout.splitlines() if line.startswith("FOUND")]
    assert found, run.stderr[-3000:]
    return found[0].split()[1:]


def test_the_second_start_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what begins early (Note [Early launches]): Inductor launches such kernels in another way."""
    tiny_model("qwen3").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    kind, *_ = start(START_LLM, tmp_path, monkeypatch)
    assert kind == "cold"
    kind, pieces, *compiled = start(START_LLM, tmp_path, monkeypatch)
    assert (kind, pieces) == ("warm", "their_own")
    assert compiled == []


def test_the_second_start_tunes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel was tuned to is found, though where its source was is gone."""
    kind, _, tuned = start(START_FUNCTION, tmp_path, monkeypatch)
    assert kind == "cold"
    assert int(tuned) > 0
    assert start(START_FUNCTION, tmp_path, monkeypatch) == ["warm", "0", "0"]
