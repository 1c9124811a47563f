"""A model on ranks with NCCL: one process, which goes the way of several; its sums are captured with its pieces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases.checkpoints import save_checkpoint

pytestmark = pytest.mark.gpu

JOB = """
import json
import sys
import piecegraph
from piecegraph.base.job import leave_job
from piecegraph.llm.ranks.group import start_job

PROMPTS = [[5, 9, 17, 33, 21, 8, 90], [4, 8, 15, 16, 23, 42, 77, 12, 13, 14]]

def ask():
    arguments = {"dtype": "bfloat16", "max_num_seqs": 4, "max_batch_tokens": 64, "max_model_len": 256}
    with piecegraph.LLM(sys.argv[1], options={"progress": False, "cache": False}, **arguments) as llm:
        found = llm.generate(PROMPTS, max_new_tokens=12, logprobs=0, ignore_eos=True)
        return {
            "tokens": [each.token_ids for each in found],
            "logprobs": [[token.logprob for token in each.logprobs] for each in found],
            "modes": {kind: mode.choice for kind, mode in llm.started.engine.forward.modes.items()},
            "stats": {name: llm.stats()[name] for name in ("coverage", "fallbacks")},
            "explain": llm.explain(),
        }

alone = ask()
start_job("cuda")
ranks = ask()
leave_job()
print(json.dumps({"alone": alone, "ranks": ranks}))
"""


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next"])
def test_one_rank_with_nccl_is_captured_and_answers_the_same(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path / name, asks_all=True)  # in bfloat16 two ways of rounding may choose other experts
    script = tmp_path / "job.py"
    script.write_text(JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)]
    done = subprocess.run(
        [*command, str(tmp_path / name)], capture_output=True, text=True, timeout=400, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    alone, ranks = told["alone"], told["ranks"]
    assert ranks["tokens"] == alone["tokens"]
    assert ranks["logprobs"] == [pytest.approx(row, abs=0.05) for row in alone["logprobs"]]
    assert ranks["modes"] == alone["modes"], ranks["explain"]
    assert ranks["stats"] == {"coverage": 1.0, "fallbacks": {}}, ranks["explain"]
    assert "tensor parallel: rank 0 of 1" in ranks["explain"]
    assert "all_reduce" not in ranks["explain"], "what NCCL adds up is no cut"
