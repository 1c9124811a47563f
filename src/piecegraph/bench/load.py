"""A server under load: requests of a workload, so many at a time, or so many a second."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from piecegraph.base.plan import Decision
from piecegraph.base.progress import Progress
from piecegraph.base.text import to_json
from piecegraph.bench.client import Client
from piecegraph.bench.latency import Latency, latency_of
from piecegraph.bench.machine import fingerprint, now
from piecegraph.bench.result import SCHEMA, Machine
from piecegraph.bench.sending import Sent, default_processes, send_all
from piecegraph.bench.show import aligned
from piecegraph.bench.workloads import WORKLOADS, Workload

_WORDS = "the of and to in is that it for was on are as with his they at be this from have or by one had not but what"
_VOCABULARY = tuple(_WORDS.split())
"""Words that most tokenizers know as one token. How many there were is told by the server."""
_CLIENT_BOUND = "The client was the limit: a process of it had no time left. Give it more by --processes."


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
    client_busy: tuple[float, ...]
    """The share of a core that each process of the client used."""
    is_client_bound: bool
    """Whether one of them had no time left, so that the figures are the client's own."""

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
    num_processes: int
    """That requests are sent by."""
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

    def send(self, progress: Progress) -> Sent:
        """Send all, and read the answers."""
        requests = [self.client.request_for(body) for body in self.bodies()]
        moments_s = None if self.rate is None else moments(len(requests), self.rate, self.seed)
        with progress.bar("requests", len(requests)) as bar:
            return send_all(
                self.client.target(),
                requests,
                bar,
                concurrency=self.concurrency,
                num_processes=self.num_processes,
                moments_s=moments_s,
            )


def moments(count: int, rate: float, seed: int) -> list[float]:
    """Random moments, so many a second; the first is 0.

    >>> moments(2, 10.0, 0) == moments(3, 10.0, 0)[:2]
    True
    """
    numbers = random.Random(seed)
    return [0.0, *itertools.accumulate(numbers.expovariate(rate) for _ in range(count - 1))]


def prepare(
    client: Client,
    workload: str,
    *,
    num_requests: int | None,
    model: str | None,
    concurrency: int,
    processes: int | None = None,
    **how: Any,
) -> Load:
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
        concurrency=concurrency,
        num_processes=processes or default_processes(concurrency),
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
        Decision(
            "client processes",
            str(load.num_processes),
            "asked for" if processes else "by the requests open at once, and the cores",
        ),
        Decision("seed", str(load.seed), "the same prompts and moments for the same seed"),
    )
    return replace(load, decisions=decisions)


def run_load(load: Load, progress: Progress | None = None) -> LoadResult:
    """Send a workload, and tell what became of it."""
    sent = load.send(progress or Progress("auto"))
    answers = sent.answers
    whole = [answer for answer in answers if answer.is_whole]
    num_prompt, num_new = sum(each.num_prompt for each in whole), sum(each.num_new for each in whole)
    latency = None
    if whole:
        times = [answer.times_s for answer in whole]
        latency = latency_of(times, seconds=sent.seconds, num_prompt=num_prompt, num_new=num_new)
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
        client_busy=sent.busy,
        is_client_bound=sent.is_client_bound,
    )


def as_text(result: LoadResult) -> str:
    """For people."""
    statuses = ", ".join(f"{count} x {status}" for status, count in result.statuses.items())
    rows = [
        ("requests", f"{result.num_requests:,}"),
        ("answered", f"{result.num_whole:,}"),
        ("by status", statuses),
        ("prompt tokens", f"{result.prompt_tokens:,}"),
        ("new tokens", f"{result.new_tokens:,}"),
        ("client busy", ", ".join(f"{share:.0%}" for share in result.client_busy)),
    ]
    latency = {} if result.latency is None else asdict(result.latency)
    rows += [(name.replace("_", " "), f"{value:,.2f}") for name, value in latency.items()]
    table = aligned(rows, num_labels=1)
    return f"{table}\n\n{_CLIENT_BOUND}" if result.is_client_bound else table
