"""Many requests at once, as a service gets them, twice: what the first pass has to wait for, the second does not.

All requests are given to one call of ``generate``. Both passes are of the same requests, without reuse of prefixes, and
must give the same number of tokens each. A gap is the time between two tokens of a request.

python benchmarks/serving.py
python benchmarks/serving.py --model llama-8b --workload long --requests 50
python benchmarks/serving.py --arguments '{"max_batch_tokens": 8192, "options": {"record_seconds": 0}}'
python benchmarks/serving.py --tiny
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import piecegraph
from llm import shapes
from piecegraph.bench.latency import Latency, latency_of
from piecegraph.bench.machine import hardware
from piecegraph.bench.show import aligned
from piecegraph.bench.workloads import WORKLOADS, Request, Workload


@dataclass(frozen=True, kw_only=True)
class Pass(Latency):
    """What one pass over the requests took."""

    padding: float
    """The share of rows that belong to no token."""
    decode_steps: int
    mixed_steps: int
    larger_steps: int
    """In a larger size than the best, which was not recorded yet."""
    graphless_steps: int
    preemptions: int


def run_pass(llm: piecegraph.LLM, requests: Sequence[Request]) -> tuple[Pass, list[list[int]]]:
    """One call for all requests; the tokens of each."""
    before = llm.stats()["steps"]
    start = time.perf_counter()
    answers = llm.generate(
        [request.prompt for request in requests],
        max_new_tokens=[request.num_new for request in requests],
        ignore_eos=True,
    )
    seconds = time.perf_counter() - start
    if [len(answer.token_ids) for answer in answers] != [request.num_new for request in requests]:
        raise SystemExit("some requests did not get all their tokens")
    after = llm.stats()["steps"]
    steps = {kind: {name: count - before[kind][name] for name, count in after[kind].items()} for kind in after}
    return summary(seconds, answers, steps), [answer.token_ids for answer in answers]


def summary(seconds: float, answers: Sequence[piecegraph.Completion], steps: dict[str, dict[str, int]]) -> Pass:
    num_prompt = sum(answer.metrics.num_prompt_tokens for answer in answers)
    times = [answer.metrics.token_times_s for answer in answers]
    latency = latency_of(times, seconds=seconds, num_prompt=num_prompt, num_new=sum(map(len, times)))
    total = {name: sum(of_kind[name] for of_kind in steps.values()) for name in steps["decode"]}
    return Pass(
        **asdict(latency),
        padding=total["num_padding"] / (total["num_padding"] + total["num_tokens"]),
        decode_steps=steps["decode"]["num_steps"],
        mixed_steps=steps["mixed"]["num_steps"],
        larger_steps=total["num_larger"],
        graphless_steps=total["num_steps"] - total["num_replays"],
        preemptions=sum(answer.metrics.num_preemptions for answer in answers),
    )


def load(model: str, workload: Workload, arguments: dict[str, Any]) -> piecegraph.LLM:
    """A model of random weights: one of ``llm.py``, or of a folder with a config.json."""
    defaults: dict[str, Any] = {"load_format": "dummy", "prefix_cache": False, "max_model_len": workload.max_model_len}
    if not torch.cuda.is_available():
        defaults["backend"] = "eager"
    config = transformers.AutoConfig.from_pretrained(model) if Path(model).is_dir() else shapes()[model].config
    config.max_position_embeddings = max(config.max_position_embeddings, workload.max_model_len)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return piecegraph.LLM(folder, **{**defaults, **arguments})


def table(passes: Sequence[Pass]) -> str:
    rows = [["", *(f"pass {number}" for number in range(1, len(passes) + 1))]]
    for name in asdict(passes[0]):
        values = [getattr(each, name) for each in passes]
        shown = [f"{value:.1%}" if name == "padding" else f"{value:,.{_digits(value)}f}" for value in values]
        rows.append([name.replace("_", " "), *shown])
    return aligned(rows)


def _digits(value: float) -> int:
    return 0 if isinstance(value, int) or value >= 1000 else 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help=f"a folder, or one of {', '.join(shapes())}")
    parser.add_argument("--workload", default="chat", choices=WORKLOADS)
    parser.add_argument("--requests", type=int, help="how many, if not as many as the workload has")
    parser.add_argument("--warm-up", type=int, default=0, help="other requests before the first pass (0)")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arguments", type=json.loads, default={}, help="of LLM, as JSON")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and a tiny workload")
    parser.add_argument("--json", action="store_true", help="one document instead of the table")
    options = parser.parse_args()
    if options.tiny:
        options.model = options.workload = "tiny"
    return options


def main() -> None:
    options = parse()
    workload: Workload = WORKLOADS[options.workload]
    workload = replace(workload, num_requests=options.requests or workload.num_requests)
    start = time.perf_counter()
    with load(options.model, workload, options.arguments) as llm:
        start_s = time.perf_counter() - start
        vocab_size = llm.started.limits.vocab_size
        if options.warm_up:
            run_pass(llm, replace(workload, num_requests=options.warm_up).make(vocab_size, options.seed + 1))
        requests = workload.make(vocab_size, options.seed)
        passes, tokens = zip(*(run_pass(llm, requests) for _ in range(options.passes)), strict=True)
        print(llm.explain(), file=sys.stderr)
        stats = llm.stats()
    pairs = [pair for one, other in zip(tokens[0], tokens[-1], strict=True) for pair in zip(one, other, strict=True)]
    notes = {
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "new_tokens": sum(request.num_new for request in requests),
        "start_s": start_s,
        "worst_gap_ratio": passes[0].gap_worst_ms / passes[-1].gap_worst_ms,
        "same_tokens": sum(one == other for one, other in pairs) / len(pairs),
        "recorded": stats["num_recorded"],
        "recorded_idle": stats["num_recorded_idle"],
        "not_recorded": stats["num_missing"],
    }
    about = {"hardware": hardware(), "model": options.model, "workload": options.workload, "seed": options.seed}
    if options.json:
        print(
            json.dumps({**about, "arguments": options.arguments, **notes, "passes": [asdict(each) for each in passes]})
        )
        return
    print(f"{about['hardware']}\n{options.model}, {options.workload}, seed {options.seed}\n{table(passes)}")
    print(", ".join(f"{name.replace('_', ' ')} {round(value, 2):,}" for name, value in notes.items()))


if __name__ == "__main__":
    main()
