"""What a server costs besides its model: microseconds of CPU a token, of each of its processes.

The model is the demo's, but no step is computed: each takes a given time, as on a device, and gives every request the
same tokens. What is left is scheduling, text, HTTP and what passes between processes. Answers are streamed to clients
in a process of their own, which checks how many tokens each had. The first line is the engine alone, called by
``generate``; streams that are behind join their tokens, so that there are fewer events than tokens.

python benchmarks/serve_cost.py
python benchmarks/serve_cost.py --api-processes 0,2 --requests 64 --step-ms 20
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import piecegraph
from piecegraph.bench.show import aligned
from piecegraph.llm.async_llm import AsyncLLM
from piecegraph.llm.run.engine import LLMEngine, _Launched
from piecegraph.serve.catalog import ModelSpec
from piecegraph.serve.http_server import loop_factory
from piecegraph.serve.listening import address_of, listen_all
from piecegraph.serve.models import Models
from piecegraph.serve.processes.engine_side import EngineServer
from piecegraph.serve.server import make_server
from piecegraph.serve.settings import ServeSettings

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


@contextmanager
def served(llm: piecegraph.LLM, num_processes: int) -> Iterator[tuple[str, list[int]]]:
    """The address of a server, and its other processes."""
    settings = ServeSettings(port=0, api_processes=num_processes)
    server = make_server(Models(settings, lambda _: AsyncLLM(llm)))
    is_ready = threading.Event()
    listening = listen_all(settings.host, settings.port, num_processes or 1)

    def run() -> None:
        spec = ModelSpec(name="demo", path="demo")
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(server.serve_models(listening, [spec], lambda _: is_ready.set()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert is_ready.wait(120)
    yield address_of(listening[0]), server.pids if isinstance(server, EngineServer) else []
    server.should_exit = True
    thread.join(60)


def send_all(commands: Any) -> None:
    """In a process of its own: ask, and read streams to their end, as often as it is told to."""
    while (command := commands.recv()) is not None:
        commands.send(asyncio.run(_send(*command)))


async def _send(address: str, num_requests: int, concurrency: int, num_new: int) -> int:
    """The number of events that came."""
    host, port = address.removeprefix("http://").split(":")
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": num_new, "ignore_eos": True, "temperature": 0}
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sent = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    turns = asyncio.Semaphore(concurrency)

    async def one() -> int:
        async with turns:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            parts = []
            while not parts or b"[DONE]" not in parts[-1][-64:]:
                parts.append(await reader.read(1 << 16))
                assert parts[-1], parts
            writer.close()
        text = b"".join(parts)
        assert f'"completion_tokens":{num_new}'.encode() in text, text[-400:]
        return text.count(b"data: ")

    return sum(await asyncio.gather(*(one() for _ in range(num_requests))))


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(llm: piecegraph.LLM, num_processes: int, options: argparse.Namespace, clients: Any) -> list[str]:
    num_tokens = options.requests * options.new_tokens
    with served(llm, num_processes) as (address, pids):
        for num_requests in (16, options.requests):  # the first are to warm it up
            before, start, begun = [cpu_s(pid) for pid in pids], time.process_time(), time.perf_counter()
            clients.send((address, num_requests, options.concurrency, options.new_tokens))
            num_events = clients.recv()
            engine_s, wall_s = time.process_time() - start, time.perf_counter() - begun
        apis_s = sum(cpu_s(pid) for pid in pids) - sum(before)
    figures = (engine_s * 1e6 / num_tokens, apis_s * 1e6 / num_tokens, num_events / num_tokens, wall_s)
    return [f"{num_processes} API processes", *(f"{each:.2f}" for each in figures)]


def generate(llm: piecegraph.LLM, options: argparse.Namespace) -> list[str]:
    prompts = [PROMPT] * options.requests
    start, begun = time.process_time(), time.perf_counter()
    llm.generate(prompts, max_new_tokens=options.new_tokens, ignore_eos=True)
    engine_s, wall_s = time.process_time() - start, time.perf_counter() - begun
    return ["generate", f"{engine_s * 1e6 / (options.requests * options.new_tokens):.2f}", "", "", f"{wall_s:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api-processes", default="0,1", help="comma-separated (0,1)")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=6.0, help="what a step takes the device (6)")
    options = parser.parse_args()
    clients, theirs = multiprocessing.Pipe()
    # Before there are threads.
    multiprocessing.get_context("fork").Process(target=send_all, args=(theirs,), daemon=True).start()
    arguments: dict[str, Any] = {"backend": "eager", "device": "cpu", "max_num_seqs": 256, "max_model_len": 512}
    llm = piecegraph.LLM("demo", **arguments, prefix_cache=False, cudagraph_mode="none")
    tokens = llm.tokenizer("the cat sat on the mat, and then it slept all day long.")["input_ids"]
    without_steps(llm.started.engine, tokens, options.step_ms / 1000)
    rows = [["", "engine, us a token", "APIs, us a token", "events a token", "seconds"], generate(llm, options)]
    rows += [measure(llm, int(number), options, clients) for number in options.api_processes.split(",")]
    print(aligned(rows))


if __name__ == "__main__":
    main()
