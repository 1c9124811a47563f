"""What a server costs besides its model: microseconds of CPU a token, of each of its processes.

The model is the demo's, but no step is computed: each takes a given time, as on a device, and gives every request the
same tokens. What is left is scheduling, text, HTTP and what passes between processes. Answers are streamed to clients
in processes of their own; how busy those were is told, as a client without time left would be what is measured. The
first line is the engine alone, called by ``generate``; streams that are behind join their tokens, so that there are
fewer events than tokens.

python benchmarks/serve_cost.py
python benchmarks/serve_cost.py --api-processes 0,2 --requests 64 --step-ms 20
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import piecegraph
from loopback import served
from piecegraph.bench.show import aligned
from piecegraph.llm.run.engine import LLMEngine, _Launched

PROMPT = "The capital of France is"


def without_steps(engine: LLMEngine, tokens: list[int], step_s: float) -> None:
    """Have the host do nothing for a step but wait for it: each sequence gets the next of some tokens."""
    count, done_at = 0, 0.0

    def launch(plan: Any, behind: Any = None, **_: Any) -> _Launched:
        nonlocal count, done_at
        count += 1
        token, done_at = tokens[count % len(tokens)], max(done_at, time.perf_counter()) + step_s
        end = done_at

        def read() -> list[int]:
            time.sleep(max(0.0, end - time.perf_counter()))
            return [token] * plan.num_seqs

        return _Launched(plan, None, None, True, None, read)  # type: ignore[arg-type]

    engine._launch = launch  # type: ignore[method-assign, assignment]


def measure(llm: piecegraph.LLM, num_processes: int, options: argparse.Namespace) -> list[str]:
    num_tokens = options.requests * options.new_tokens
    with served(llm, num_processes) as address:
        for num_requests in (16, options.requests):  # the first are to warm it up
            counts = [options.new_tokens] * num_requests
            run = address.send([PROMPT] * num_requests, counts, concurrency=options.concurrency)
    num_events = sum(len(answer.times_s) for answer in run.sent.answers)
    costs = (run.engine_s * 1e6 / num_tokens, run.apis_s * 1e6 / num_tokens)
    figures = (*costs, num_events / num_tokens, run.sent.seconds, max(run.sent.busy))
    return [f"{num_processes} API processes", *(f"{each:.2f}" for each in figures)]


def generate(llm: piecegraph.LLM, options: argparse.Namespace) -> list[str]:
    prompts = [PROMPT] * options.requests
    start, begun = time.process_time(), time.perf_counter()
    llm.generate(prompts, max_new_tokens=options.new_tokens, ignore_eos=True)
    engine_s, wall_s = time.process_time() - start, time.perf_counter() - begun
    figure = engine_s * 1e6 / (options.requests * options.new_tokens)
    return ["generate", f"{figure:.2f}", "", "", f"{wall_s:.2f}", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api-processes", default="0,1", help="comma-separated (0,1)")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=6.0, help="what a step takes the device (6)")
    options = parser.parse_args()
    arguments: dict[str, Any] = {"backend": "eager", "device": "cpu", "max_num_seqs": 256, "max_model_len": 512}
    llm = piecegraph.LLM("demo", **arguments, prefix_cache=False, cudagraph_mode="none")
    tokens = llm.tokenizer("the cat sat on the mat, and then it slept all day long.")["input_ids"]
    without_steps(llm.started.engine, tokens, options.step_ms / 1000)
    head = ["", "engine, us a token", "APIs, us a token", "events a token", "seconds", "client busy"]
    rows = [head, generate(llm, options)]
    rows += [measure(llm, int(number), options) for number in options.api_processes.split(",")]
    print(aligned(rows))


if __name__ == "__main__":
    main()
