"""Many requests at once, as a service gets them, twice: what the first pass has to wait for, the second does not.

All requests are given to one call of ``generate``. Both passes are of the same requests, without reuse of prefixes, and
must give the same number of tokens each. A gap is the time between two tokens of a request.

With ``--http`` the same requests are then sent to the same model behind a server on loopback, by other processes: so
many open at once, and at fixed rates, with as many open as there are. ``of generate`` compares tokens a second with
the last pass of ``generate``. The cost is the CPU's, of this process, which runs the model, and of API processes. The
model has a tokenizer then, and ``generate`` makes texts, too. ``--url`` sends them to a server that is running already,
of whichever make, that knows such a model by the name "model"; nothing is loaded here. ``--write`` writes what such a
server needs: a configuration and a tokenizer, no weights.

python benchmarks/serving.py
python benchmarks/serving.py --http --concurrency 256 --rate 10 20 --api-processes 2
python benchmarks/serving.py --url http://127.0.0.1:8000 --model qwen3-0.6b --rate 10 20
python benchmarks/serving.py --model llama-8b --workload long --requests 50
python benchmarks/serving.py --arguments '{"max_batch_tokens": 8192, "options": {"record_seconds": 0}}'
python benchmarks/serving.py --tiny
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import piecegraph
from llm import shapes
from piecegraph.bench.latency import Latency, latency_of
from piecegraph.bench.machine import hardware
from piecegraph.bench.show import aligned
from piecegraph.bench.workloads import WORKLOADS, Request, Workload
from random_weights import config_of, loaded, write_model
from served import Address, Run

_WARM_UP = 16
"""Requests to a server before any is timed."""


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
    engine_us_token: float
    """CPU time of the process that runs the model, for each new token,"""
    engine_ms_request: float
    """and for each request."""


@dataclass(frozen=True, kw_only=True)
class GeneratePass(Pass):
    """By one call."""

    preemptions: int


@dataclass(frozen=True, kw_only=True)
class HttpPass(Pass):
    """Through a server."""

    apis_us_token: float
    apis_ms_request: float
    of_generate: float
    """Tokens a second, over those of ``generate``."""
    parts_a_token: float
    """Events over tokens: those that wait are one event."""
    client_busy: float
    """The share of a core that the busiest process of the client used."""


def run_pass(llm: piecegraph.LLM, requests: Sequence[Request]) -> tuple[GeneratePass, list[list[int]]]:
    """One call for all requests; the tokens of each."""
    before = llm.stats()["steps"]
    start, cpu_start = time.perf_counter(), time.process_time()
    answers = llm.generate(
        [request.prompt for request in requests],
        max_new_tokens=[request.num_new for request in requests],
        ignore_eos=True,
    )
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    if [len(answer.token_ids) for answer in answers] != [request.num_new for request in requests]:
        raise SystemExit("some requests did not get all their tokens")
    times = [answer.metrics.token_times_s for answer in answers]
    found = GeneratePass(
        **of_requests(requests, times, seconds, cpu_s),
        **of_steps(before, llm.stats()["steps"]),
        preemptions=sum(answer.metrics.num_preemptions for answer in answers),
    )
    return found, [answer.token_ids for answer in answers]


def run_http(llm: piecegraph.LLM, server: Address, requests: Sequence[Request], baseline: Pass, **how: Any) -> HttpPass:
    """The same requests through a server."""
    before = llm.stats()["steps"]
    run = send(server, requests, **how)
    times = [answer.times_s for answer in run.sent.answers]
    costs = of_requests(requests, times, run.sent.seconds, run.engine_s)
    num_new = sum(request.num_new for request in requests)
    return HttpPass(
        **costs,
        **of_steps(before, llm.stats()["steps"]),
        apis_us_token=run.apis_s * 1e6 / num_new,
        apis_ms_request=run.apis_s * 1e3 / len(requests),
        of_generate=costs["new_tokens_s"] / baseline.new_tokens_s,
        parts_a_token=sum(map(len, times)) / num_new,
        client_busy=max(run.sent.busy),
    )


def send(server: Address, requests: Sequence[Request], **how: Any) -> Run:
    return server.send([request.prompt for request in requests], [request.num_new for request in requests], **how)


def of_requests(
    requests: Sequence[Request], times: Sequence[Sequence[float]], seconds: float, cpu_s: float
) -> dict[str, Any]:
    """What they had to wait for, and what they cost the process that runs the model."""
    num_new = sum(request.num_new for request in requests)
    costs = {"engine_us_token": cpu_s * 1e6 / num_new, "engine_ms_request": cpu_s * 1e3 / len(requests)}
    return {**asdict(latency(requests, times, seconds)), **costs}


def latency(requests: Sequence[Request], times: Sequence[Sequence[float]], seconds: float) -> Latency:
    num_prompt, num_new = sum(len(request.prompt) for request in requests), sum(request.num_new for request in requests)
    return latency_of(times, seconds=seconds, num_prompt=num_prompt, num_new=num_new)


def of_steps(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> dict[str, Any]:
    """What the steps between two moments were."""
    steps = {kind: {name: count - before[kind][name] for name, count in after[kind].items()} for kind in after}
    total = {name: sum(of_kind[name] for of_kind in steps.values()) for name in steps["decode"]}
    return {
        "padding": total["num_padding"] / (total["num_padding"] + total["num_tokens"]),
        "decode_steps": steps["decode"]["num_steps"],
        "mixed_steps": steps["mixed"]["num_steps"],
        "larger_steps": total["num_larger"],
        "graphless_steps": total["num_steps"] - total["num_replays"],
    }


def http_passes(
    llm: piecegraph.LLM, requests: Sequence[Request], baseline: Pass, options: argparse.Namespace
) -> dict[str, HttpPass]:
    """By what was asked for: so many at once, then each rate."""
    from loopback import served  # what it needs, only those who serve have

    with served(llm, options.api_processes) as server:
        send(server, requests[:_WARM_UP], concurrency=options.concurrency)
        return {name: run_http(llm, server, requests, baseline, **how) for name, how in http_ways(options).items()}


def http_ways(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """How requests are sent: so many at once, then at each rate."""
    ways: dict[str, dict[str, Any]] = {f"HTTP, {options.concurrency}": {}}
    ways.update({f"HTTP, {rate:g}/s": {"rate": rate, "seed": options.seed} for rate in options.rate})
    return {name: {"concurrency": options.concurrency, **how} for name, how in ways.items()}


def other_server(requests: Sequence[Request], options: argparse.Namespace) -> dict[str, Latency]:
    """What a server gives that is running already."""
    server, passes = Address(options.url, ()), {}
    send(server, requests[:_WARM_UP], concurrency=options.concurrency)
    for name, how in http_ways(options).items():
        sent = send(server, requests, **how).sent
        times = [answer.times_s for answer in sent.answers]
        passes[name] = latency(requests, times, sent.seconds)
    return passes


def table(passes: Mapping[str, Latency]) -> str:
    figures = [asdict(each) for each in passes.values()]
    names = dict.fromkeys(name for each in figures for name in each)
    rows = [[name.replace("_", " "), *(_shown(name, each.get(name)) for each in figures)] for name in names]
    return aligned([["", *passes], *rows])


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name in ("padding", "of_generate", "client_busy"):
        return f"{value:.1%}"
    return f"{value:,.{0 if isinstance(value, int) or value >= 1000 else 2}f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help=f"a folder, or one of {', '.join(shapes())}")
    parser.add_argument("--workload", default="chat", choices=WORKLOADS)
    parser.add_argument("--requests", type=int, help="how many, if not as many as the workload has")
    parser.add_argument("--warm-up", type=int, default=0, help="other requests before the first pass (0)")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--http", action="store_true", help="then the same requests through a server")
    parser.add_argument("--url", help="only to this server, which has the model; none is loaded here")
    parser.add_argument("--write", type=Path, help="only write the model's files to this folder")
    parser.add_argument("--concurrency", type=int, default=256, help="requests open at once (256)")
    parser.add_argument("--rate", type=float, nargs="+", default=[], help="requests a second, too: a pass for each")
    parser.add_argument("--api-processes", type=int, help="of the server (4, on a CPU 0)")
    parser.add_argument("--arguments", type=json.loads, default={}, help="of LLM, as JSON")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and a tiny workload")
    parser.add_argument("--json", action="store_true", help="one document instead of the table")
    options = parser.parse_args()
    if options.tiny:
        options.model = options.workload = "tiny"
    if options.api_processes is None:
        options.api_processes = 4 if torch.cuda.is_available() else 0
    return options


def main() -> None:
    options = parse()
    workload: Workload = WORKLOADS[options.workload]
    workload = replace(workload, num_requests=options.requests or workload.num_requests)
    about = {"hardware": hardware(), "model": options.model, "workload": options.workload, "seed": options.seed}
    head = f"{about['hardware']}\n{options.model}, {options.workload}, seed {options.seed}"
    if options.write:
        write_model(options.model, workload.max_model_len, options.write, makes_text=True)
        return
    if options.url:
        found = other_server(workload.make(config_of(options.model).vocab_size, options.seed), options)
        shown = json.dumps({**about, "http": {name: asdict(each) for name, each in found.items()}})
        print(shown if options.json else f"{head}\n{table(found)}")
        return
    start = time.perf_counter()
    with loaded(options.model, workload.max_model_len, options.arguments, makes_text=options.http) as llm:
        start_s = time.perf_counter() - start
        vocab_size = llm.started.limits.vocab_size
        if options.warm_up:
            run_pass(llm, replace(workload, num_requests=options.warm_up).make(vocab_size, options.seed + 1))
        requests = workload.make(vocab_size, options.seed)
        passes, tokens = zip(*(run_pass(llm, requests) for _ in range(options.passes)), strict=True)
        by_http = http_passes(llm, requests, passes[-1], options) if options.http else {}
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
    if options.json:
        found = {"passes": [asdict(each) for each in passes], "http": {n: asdict(each) for n, each in by_http.items()}}
        print(json.dumps({**about, "arguments": options.arguments, **notes, **found}))
        return
    columns = {**{f"pass {number + 1}": each for number, each in enumerate(passes)}, **by_http}
    print(f"{head}\n{table(columns)}")
    print(", ".join(f"{name.replace('_', ' ')} {round(value, 2):,}" for name, value in notes.items()))


if __name__ == "__main__":
    main()
