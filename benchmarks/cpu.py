"""Greedy decoding on a CPU beside transformers' own ``generate``: same model, same dtype, one process.

A round gives the same new prompts to all, one after the other, so that what else the machine does meets all of them.
Prompts are not part of the time: it is that between a call's first and last tokens, over their number. The first round
is not timed; what it answers is compared.

python benchmarks/cpu.py
python benchmarks/cpu.py --batches 1 --context 900 --backends eager
python benchmarks/cpu.py --tiny
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import piecegraph
from piecegraph.base.progress import Progress
from piecegraph.bench.machine import hardware
from piecegraph.bench.result import Timing
from piecegraph.llm.model.demo_model import demo_folder
from results import Contender, save, table

Answers = list[list[int]]


@dataclass
class Runner:
    """One way to generate, and the milliseconds of its decode steps."""

    name: str
    generate: Callable[[Answers, int], tuple[float, Answers]]
    """Seconds between first and last tokens, and the new tokens of each prompt."""
    notes: dict[str, Any]
    steps: dict[str, list[float]] = field(default_factory=dict)


class Clock(transformers.StoppingCriteria):
    """Writes down when each step of ``generate`` is done, and stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def peer(path: str) -> Runner:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts: Answers, new: int) -> tuple[float, Answers]:
        tokens, clock = torch.tensor(prompts), Clock()
        settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "stopping_criteria": [clock]}
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
        return clock.times[-1] - clock.times[0], out[:, tokens.shape[1] :].tolist()

    return Runner("transformers", generate, {"threads": torch.get_num_threads()})


def ours(path: str, backend: str, batches: list[int], length: int) -> Runner:
    start = time.perf_counter()
    llm = piecegraph.LLM(
        path, backend=backend, device="cpu", dtype="float32", max_model_len=length, max_num_seqs=max(batches)
    )
    notes = {"start s": f"{time.perf_counter() - start:.1f}", "fallbacks": sum(llm.stats()["fallbacks"].values())}
    notes["threads"] = llm.started.engine.forward.step.num_threads
    print(f"\n{llm.explain()}", file=sys.stderr)

    def generate(prompts: Answers, new: int) -> tuple[float, Answers]:
        out = llm.generate(prompts, max_new_tokens=new, ignore_eos=True)
        first = max(answer.metrics.time_to_first_token_s for answer in out)
        return max(answer.metrics.total_s for answer in out) - first, [answer.token_ids for answer in out]

    return Runner(f"piecegraph, {backend}", generate, notes)


def compare(runners: list[Runner], prompts: Answers, new: int) -> None:
    """Also warms up."""
    _, expected = runners[0].generate(prompts, new)
    for runner in runners[1:]:
        _, found = runner.generate(prompts, new)
        pairs = [pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)]
        share = sum(a == b for a, b in pairs) / len(pairs)
        assert share > 0.9, f"{runner.name} answers differently: {share:.0%} of its tokens are the same"
        runner.notes["same tokens"] = f"{share:.0%}"


def take_turns(runners: list[Runner], batch: int, options: argparse.Namespace, vocab_size: int) -> None:
    numbers = torch.Generator().manual_seed(batch)
    for number in range(options.rounds + 1):
        prompts = torch.randint(vocab_size, (batch, options.context), generator=numbers).tolist()
        if number == 0:
            compare(runners, prompts, options.new)
            continue
        for runner in runners:
            seconds, _ = runner.generate(prompts, options.new)
            runner.steps.setdefault(f"batch {batch}", []).append(seconds / (options.new - 1) * 1e3)


def contender(runner: Runner) -> Contender:
    timings = {size: Timing(statistics.median(ms), min(ms), max(ms), len(ms)) for size, ms in runner.steps.items()}
    rates = {f"tokens/s, {size}": f"{int(size.split()[1]) / t.median_ms * 1e3:.1f}" for size, t in timings.items()}
    return Contender(runner.name, timings, rates | runner.notes)


def write_tiny(folder: str) -> str:
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.5,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder, or demo")
    parser.add_argument("--tiny", action="store_true", help="a model of random numbers in its place")
    parser.add_argument("--backends", default="eager,inductor", help="what compiles the pieces: a comma list")
    parser.add_argument("--batches", default="1,8", help="a comma list of prompts that run together")
    parser.add_argument("--context", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=17, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", type=Path, help="write JSON")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny(folder) if options.tiny else options.model
        path = str(demo_folder(Progress("auto"))) if path == "demo" else path
        runners = [peer(path)]
        length = options.context + options.new
        runners += [ours(path, backend, batches, length) for backend in options.backends.split(",")]
        vocab_size = transformers.AutoConfig.from_pretrained(path).get_text_config().vocab_size
    for batch in batches:
        take_turns(runners, batch, options, vocab_size)
    contenders = [contender(runner) for runner in runners]
    print(f"{hardware()}\n{table(contenders)}")
    if options.output:
        save(options.output, contenders)


if __name__ == "__main__":
    main()
