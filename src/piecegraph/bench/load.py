"""A server under load: requests of a workload, so many at a time, or so many a second."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from piecegraph.base.plan import Decision
from piecegraph.base.progress import Bar, Progress
from piecegraph.base.text import to_json
from piecegraph.bench.client import Answer, Client
from piecegraph.bench.latency import Latency, latency_of
from piecegraph.bench.machine import fingerprint, now
from piecegraph.bench.result import SCHEMA, Machine
from piecegraph.bench.show import aligned
from piecegraph.bench.workloads import WORKLOADS, Workload

_WORDS = "the of and to in is that it for was on are as with his they at be this from have or by one had not but what"
_VOCABULARY = tuple(_WORDS.split())
"""Words that most tokenizers know as one token. How many there were is told by the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Everything that ``piecegraph bench serve URL`` tells."""

    kind: Literal["bench-serve"] = "bench-serve"
    schema: int = SCHEMA
    created: str
    url: str
    model: str
    machine: Machine
    """That of the client."""
    config: tuple[Decision, ...]
    num_requests: int
    num_whole: int
    """Requests that were answered to their end."""
    statuses: dict[str, int]
    """How many ended how: by the status of HTTP, or by what broke the connection."""
    prompt_tokens: int
    new_tokens: int
    latency: Latency | None
    """Of those that were answered; None if none was."""

    def to_json(self) -> str:
        return to_json(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent, and how."""

    client: Client
    model: str
    workload: Workload
    num_requests: int
    concurrency: int
    """Requests that are open at once at most."""
    rate: float | None
    """Requests a second, at random moments; None: each as soon as there is room for it."""
    ignore_eos: bool
    """Ask for answers of full length, which some servers know."""
    seed: int
    decisions: tuple[Decision, ...] = ()

    def bodies(self) -> list[dict[str, Any]]:
        """Requests as OpenAI's API takes them."""
        more = {"ignore_eos": True} if self.ignore_eos else {}
        workload = replace(self.workload, num_requests=self.num_requests)
        return [
            {
                "model": self.model,
                "prompt": " ".join(_VOCABULARY[token] for token in request.prompt),
                "max_tokens": request.num_new,
                "temperature": 0,
                **more,
            }
            for request in workload.make(len(_VOCABULARY), self.seed)
        ]


def prepare(client: Client, workload: str, *, num_requests: int | None, model: str | None, **how: Any) -> Load:
    """Resolve what was left to us; the server is asked for its model.

    Raises:
        CommandError: it does not answer.
    """
    chosen = WORKLOADS[workload]
    load = Load(
        client=client,
        model=model or client.model_name(),
        workload=chosen,
        num_requests=num_requests or chosen.num_requests,
        **how,
    )
    (shortest, longest), (fewest, most) = chosen.prompt, chosen.new
    lengths = f"prompts of {shortest} to {longest} words, {fewest} to {most} new tokens"
    pace = f"{load.rate:g} a second" if load.rate is not None else "as fast as it answers"
    decisions = (
        Decision("server", client.url, "asked for"),
        Decision("model", load.model, "asked for" if model else "the first that the server names"),
        Decision("workload", workload, lengths),
        Decision("requests", str(load.num_requests), "asked for" if num_requests else "of the workload"),
        Decision("pace", pace, f"at most {load.concurrency} open at once"),
        Decision("seed", str(load.seed), "the same prompts and moments for the same seed"),
    )
    return replace(load, decisions=decisions)


def run_load(load: Load, progress: Progress | None = None) -> LoadResult:
    """Send a workload, and tell what became of it."""
    bodies = load.bodies()
    with (progress or Progress("auto")).bar("requests", len(bodies)) as bar:
        seconds, answers = _send_all(load, bodies, bar)
    whole = [answer for answer in answers if answer.is_whole]
    num_prompt, num_new = sum(each.num_prompt for each in whole), sum(each.num_new for each in whole)
    latency = None
    if whole:
        times = [answer.times_s for answer in whole]
        latency = latency_of(times, seconds=seconds, num_prompt=num_prompt, num_new=num_new)
    return LoadResult(
        created=now(),
        url=load.client.url,
        model=load.model,
        machine=fingerprint(),
        config=load.decisions,
        num_requests=len(answers),
        num_whole=len(whole),
        statuses=dict(Counter(answer.status for answer in answers).most_common()),
        prompt_tokens=num_prompt,
        new_tokens=num_new,
        latency=latency,
    )


def _send_all(load: Load, bodies: Sequence[dict[str, Any]], bar: Bar) -> tuple[float, list[Answer]]:
    """Seconds from the first request to the last answer, and the answers."""
    numbers = random.Random(load.seed)
    answers: list[Future[Answer]] = []
    start = due = time.perf_counter()
    with ThreadPoolExecutor(load.concurrency) as pool:
        for body in bodies:
            if load.rate is not None:
                time.sleep(max(0.0, due - time.perf_counter()))
                due += numbers.expovariate(load.rate)
            answers.append(pool.submit(load.client.complete, body))
            answers[-1].add_done_callback(lambda answer: bar.advance(answer.result().status))
    return time.perf_counter() - start, [answer.result() for answer in answers]


def as_text(result: LoadResult) -> str:
    """For people."""
    statuses = ", ".join(f"{count} x {status}" for status, count in result.statuses.items())
    rows = [
        ("requests", f"{result.num_requests:,}"),
        ("answered", f"{result.num_whole:,}"),
        ("by status", statuses),
        ("prompt tokens", f"{result.prompt_tokens:,}"),
        ("new tokens", f"{result.new_tokens:,}"),
    ]
    latency = {} if result.latency is None else asdict(result.latency)
    rows += [(name.replace("_", " "), f"{value:,.2f}") for name, value in latency.items()]
    return aligned(rows, num_labels=1)
