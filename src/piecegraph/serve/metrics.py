"""What is counted, for Prometheus: under vLLM's names where it has one, so that its dashboards fit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from piecegraph.llm.async_llm import AsyncLLM
from piecegraph.llm.run.results import Completion, RequestMetrics

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_OF_STEPS = {
    "piecegraph:steps": ("num_steps", "Steps."),
    "piecegraph:replayed_steps": ("num_replays", "Steps that were replayed from a tape."),
    "piecegraph:larger_steps": ("num_larger", "Of these, such as ran larger than they need be."),
    "piecegraph:step_tokens": ("num_tokens", "Tokens of steps."),
    "piecegraph:padding_tokens": ("num_padding", "Tokens that steps were padded with."),
}
_MOST_UNCOUNTED = 1024
_TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))


class Metrics:
    """The counters of one server: of each of its models, by name."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._ended: deque[tuple[str, str, RequestMetrics]] = deque()
        """Answers that are not counted yet: that takes longer than to write down that there was one."""
        self._llms: dict[str, AsyncLLM] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels or ("model_name",), registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("model_name",), buckets=buckets, registry=self._registry)

        self._prompt = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._new = counter("vllm:generation_tokens", "Generated tokens.")
        self._cached = counter("vllm:prefix_cache_hits", "Tokens of prompts found in the cache.")
        self._queried = counter("vllm:prefix_cache_queries", "Tokens of prompts looked for.")
        self._ends = counter("vllm:request_success", "Answers, by why they ended.", "model_name", "finished_reason")
        self._preempted = counter("vllm:num_preemptions", "Requests that gave their blocks back.")
        self._first = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._between = histogram(
            "vllm:inter_token_latency_seconds", "A token after the first, on average.", _PER_TOKEN
        )
        self._total = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._prompts = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answers = histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._responses = counter("piecegraph:http_responses", "Answers of the server, by status.", "status")
        counters = (self._prompt, self._new, self._cached, self._queried, self._preempted)
        histograms = (self._first, self._between, self._total, self._prompts, self._answers)
        self._of_models: tuple[Counter | Histogram, ...] = (*counters, *histograms)
        self._registry.register(self)

    def watch(self, name: str, llm: AsyncLLM) -> None:
        """Tell about a model from now on."""
        self._llms[name] = llm
        for family in self._of_models:  # they are there from the beginning, at 0
            family.labels(name)

    def forget(self, name: str) -> None:
        """The model is about to go. What it has done stays counted."""
        self._llms.pop(name, None)

    def observe(self, name: str, answer: Completion) -> None:
        """An answer of a model has come to its end."""
        self.observe_later(name, answer.finish_reason, answer.metrics)

    def observe_later(self, name: str, finish_reason: str, metrics: RequestMetrics) -> None:
        """The same, from another process."""
        self._ended.append((name, finish_reason, metrics))
        if len(self._ended) >= _MOST_UNCOUNTED:
            self._count()

    def _count(self) -> None:
        while self._ended:
            self._count_one(*self._ended.popleft())

    def _count_one(self, name: str, finish_reason: str, metrics: RequestMetrics) -> None:
        self._prompt.labels(name).inc(metrics.num_prompt_tokens)
        self._queried.labels(name).inc(metrics.num_prompt_tokens)
        self._cached.labels(name).inc(metrics.num_cached_tokens)
        self._new.labels(name).inc(metrics.num_new_tokens)
        self._preempted.labels(name).inc(metrics.num_preemptions)
        self._ends.labels(name, finish_reason).inc()
        self._prompts.labels(name).observe(metrics.num_prompt_tokens)
        self._answers.labels(name).observe(metrics.num_new_tokens)
        self._total.labels(name).observe(metrics.total_s)
        if metrics.time_to_first_token_s is not None:
            self._first.labels(name).observe(metrics.time_to_first_token_s)
        if metrics.seconds_per_token is not None:
            self._between.labels(name).observe(metrics.seconds_per_token)

    def count_response(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def page(self) -> bytes:
        """As Prometheus reads it."""
        self._count()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What is read when it is asked for."""
        families: dict[str, Metric] = {}
        for name, llm in self._llms.items():
            for family in _read(name, llm):
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples += family.samples
        yield from families.values()


def _read(name: str, llm: AsyncLLM) -> Iterator[Metric]:
    """What a model's own counters say now."""
    load, engine = llm.load(), llm.llm.started.engine
    gauges = {
        "vllm:num_requests_running": ("Requests in the batch.", load.num_running),
        "vllm:num_requests_waiting": ("Requests that wait for a place in it.", load.num_waiting),
        "vllm:kv_cache_usage_perc": ("Share of the blocks that requests hold, from 0 to 1.", load.cache_usage),
        "piecegraph:recorded_sizes": ("Steps that are recorded.", len(engine.forward.library.tapes)),
    }
    for family, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(family, text, labels=["model_name"])
        gauge.add_metric([name], value)
        yield gauge
    failed = CounterMetricFamily("piecegraph:failed_steps", "Steps that failed.", labels=["model_name"])
    failed.add_metric([name], load.num_failed_steps)
    yield failed
    for family, (field, text) in _OF_STEPS.items():
        count = CounterMetricFamily(family, text, labels=["model_name", "kind"])
        for kind, counts in engine.counts.kinds.items():
            count.add_metric([name, kind], getattr(counts, field))
        yield count
    losses = CounterMetricFamily("piecegraph:fallbacks", "What was lost, by code.", labels=["model_name", "code"])
    codes: dict[str, int] = {}
    for event, number in llm.llm.events.distinct:
        codes[event.code] = codes.get(event.code, 0) + number
    for code, number in codes.items():
        losses.add_metric([name, code], number)
    yield losses
