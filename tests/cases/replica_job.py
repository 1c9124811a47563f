"""Replicas as real processes: ``python -c "from tests.cases.replica_job import main; main()" FOLDER`` prints JSON."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch

import piecegraph
from piecegraph.errors import PiecegraphError
from piecegraph.llm.run.forward import Forward
from tests.cases.checkpoints import save_checkpoint
from tests.cases.rank_job import load, run_ranks

PROMPTS = [[number + 3, 2 * number + 1, 7, 9, 11 + number] for number in range(5)]
TOO_LONG = [1, 2, 3, 4] * 200


def calls(llm: piecegraph.LLM) -> dict[str, Any]:
    """What is the same with replicas."""

    def tokens(prompts: Any, **how: Any) -> list[list[int]]:
        return [each.token_ids for each in llm.generate(prompts, ignore_eos=True, **how)]

    found: dict[str, Any] = {"greedy": tokens(PROMPTS, max_new_tokens=4), "one": tokens(PROMPTS[0], max_new_tokens=3)}
    found["seeded"] = tokens(PROMPTS[:3], max_new_tokens=4, n=2, temperature=1.0, seed=[1, 2, 3])
    drawn = tokens([PROMPTS[0]] * 4, max_new_tokens=8, temperature=1.5)
    found["distinct"] = len(set(map(tuple, drawn)))
    returned = llm.generate([*PROMPTS, TOO_LONG], max_new_tokens=2, ignore_eos=True, on_error="return")
    found["errors"] = [str(each.error) for each in returned]
    found["raised"] = _refused(lambda: llm.generate([*PROMPTS, TOO_LONG], max_new_tokens=2))
    return found


def _refused(call: Any) -> str:
    try:
        call()
    except PiecegraphError as error:
        return str(error)
    return "not refused"


def _four(folder: Path, rank: int) -> dict[str, Any]:
    """Two replicas of two ranks; then the first rank of the second fails in a step."""
    llm = load(folder, "llama", 2, data_parallel_size=2, options={"self_check": False})
    found = {"calls": calls(llm), "follows": llm.follows}
    found["explain"] = [line.strip() for line in llm.explain().splitlines() if "parallel:" in line]
    found["processors"] = _refused(lambda: llm.generate(PROMPTS, logits_processors=[lambda tokens, logits: logits]))
    found["chunks"] = [chunk.index for chunk in llm.generate(PROMPTS, max_new_tokens=2, stream=True)]
    if rank == 2:
        Forward.run_step = functools.partial(_raise)  # type: ignore[assignment]
    try:
        llm.generate(PROMPTS, max_new_tokens=4)
    except (PiecegraphError, RuntimeError) as error:
        found["ended"] = str(error)
    return found


def _raise(*_: Any) -> None:
    raise RuntimeError("out of order")


def _two(folder: Path, rank: int) -> dict[str, Any]:
    """Two replicas of one process each, with random weights: those of the first, which then makes all calls."""
    torch.manual_seed(rank)
    options = {"self_check": False}
    with load(folder, "llama", data_parallel_size=2, load_format="dummy", options=options) as llm:
        found: dict[str, Any] = {
            "ranks": llm.ranks,
            "weights": float(next(llm.started.loaded.model.parameters()).sum()),
        }
        found["serve"] = _refused(lambda: piecegraph.AsyncLLM(llm))
        found["size"] = _refused(lambda: load(folder, "llama", data_parallel_size=3))
        if llm.follows:
            llm.follow()
        else:
            found["answers"] = len(llm.generate(PROMPTS, max_new_tokens=2))
    return found


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    save_checkpoint("llama", folder / "llama", num_layers=1)
    with load(folder, "llama", options={"self_check": False}) as llm:
        alone = calls(llm)
    four, two = (run_ranks(size, functools.partial(story, folder)) for size, story in ((4, _four), (2, _two)))
    print(json.dumps({"alone": alone, "four": four, "two": two}))
