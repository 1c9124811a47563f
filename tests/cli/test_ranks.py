"""Commands that torchrun starts: the processes share one model, and the first of them answers."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from piecegraph.cli.main import group
from tests.cases.forked import ForkServer
from tests.cases.tiny_llm import tiny_model, tiny_tokenizer, write_tiny_llm

# As torchrun --standalone, but for the ranks, which are forked: each would import torch and transformers again. What
# comes in is one file for both, so that who reads it takes it from the other.
LAUNCH = """
import os, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def main():
    sys.stdin = os.fdopen(given)
    from piecegraph.cli.main import main
    main()

given = os.open("prompt.txt", os.O_RDONLY)
how = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork"}
elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, **how), main)()
"""


def test_generate_on_two_ranks_prints_what_one_process_would(forked: ForkServer, tmp_path: Path) -> None:
    path = write_tiny_llm(tmp_path / "model", chat=False)
    (tmp_path / "prompt.txt").write_text("ax by cz")
    words = shlex.split(f"generate {path} - --max-new-tokens 4 --device cpu")
    done = forked.run("-c", LAUNCH, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    prompt = tiny_tokenizer(chat=False)("ax by cz", return_tensors="pt").input_ids
    expected = tiny_model().generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :]
    assert done.stdout.split() == tiny_tokenizer(chat=False).decode(expected).split()
    assert done.stderr.count("4 tokens in ") == 1, "the first rank alone tells what it cost"


@pytest.mark.parametrize(("rank", "verbosity"), [("0", None), ("1", "error")])
def test_the_first_rank_alone_lets_transformers_warn(
    rank: str, verbosity: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "2", "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "")
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY")
    done = CliRunner().invoke(group, ["cache", "ls"])
    assert done.exit_code == 0, done.output
    assert os.environ.get("TRANSFORMERS_VERBOSITY") == verbosity
