"""The Triton kernels in Triton's interpreter, on the CPU.

The interpreter is chosen when Triton is imported, for the whole process, so the cases run in one of their own: it
prints a line for each, and the tests look theirs up.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from piecegraph.llm.attention import triton_paged
from piecegraph.llm.verdict import Accepted, Rejected
from tests.cases.attention import Sequences, check, latent_layer, layer, problem, run
from tests.unit.test_attention_reference import DECODE, LAYERS, MIXED, PADDED_DECODE, PREFILL

ROOT = Path(__file__).parents[2]
LONG_DECODE = Sequences(  # one split, several, and one that is not quite full; more blocks than one step has keys
    name="long decode", spans=((1, 200), (1, 3), (1, 129)), padded_tokens=1, padded_seqs=1, max_seq_len=256
)
LARGE_BLOCKS = Sequences(
    name="large blocks", spans=((3, 80), (1, 70), (5, 5)), padded_tokens=3, padded_seqs=1, block_size=32
)
MORE_LAYERS = {
    **LAYERS,
    "width 80": layer(2, 1, 80),
    "more heads than a tile": layer(20, 1, 16),
    "more latent heads than a tile": latent_layer(20, latent=24, rope=8, nope=8, value=8),
}
CASES = {
    f"{name}: {sequences.name}, {dtype}": (spec, sequences, dtype)
    for name, spec in MORE_LAYERS.items()
    for sequences in (DECODE, PADDED_DECODE, LONG_DECODE, PREFILL, MIXED, LARGE_BLOCKS)
    for dtype in (torch.float32, torch.float16)  # the interpreter multiplies the bits of bfloat16
    if name in ("gqa", "latent") or (dtype == torch.float32 and sequences in (LONG_DECODE, MIXED))
}


@functools.cache
def verdicts() -> dict[str, str]:
    """What the interpreter's process says of each case."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_attention_triton"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split(" = ", 1) for line in done.stdout.splitlines())


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_matches_the_definition(name: str) -> None:
    assert verdicts()[name] == "right"


@needs_triton
def test_many_launches_over_one_workspace() -> None:
    """The count of arrived splits is back at zero after each launch, whatever the batch was."""
    assert verdicts()["repeated"] == "right"


def test_says_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu = torch.device("cpu")
    supports = triton_paged.KERNEL.supports
    assert isinstance(supports(layer(2, 2, 64), torch.float32, cpu), Rejected)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert supports(layer(2, 2, 64), torch.float32, cpu) == Accepted()
    for spec in (layer(2, 2, 264), latent_layer(2, 1024, 64, 128, 128)):
        assert isinstance(supports(spec, torch.float32, cpu), Rejected)
    assert isinstance(supports(layer(2, 2, 64), torch.float64, cpu), Rejected)


def _repeated() -> None:
    for seed, spans in enumerate([((1, 200), (1, 3)), ((1, 60), (1, 61)), ((1, 1), (1, 250)), ((1, 200), (1, 199))]):
        sequences = Sequences(name="", spans=spans, max_seq_len=256)
        case = problem(layer(4, 2, 16), sequences, torch.float32, seed=seed)
        run(triton_paged.KERNEL, case)
        torch.testing.assert_close(case.arguments["out"].double(), case.expected, rtol=2e-5, atol=2e-5)


def _main() -> None:
    """Run every case and print its verdict."""
    jobs = {name: functools.partial(check, triton_paged.KERNEL, *case) for name, case in CASES.items()}
    for name, job in {**jobs, "repeated": _repeated}.items():
        try:
            job()
        except Exception as error:
            print(name, "=", f"{type(error).__name__}: {error}".replace("\n", " "))
        else:
            print(name, "=", "right")


if __name__ == "__main__":
    _main()
