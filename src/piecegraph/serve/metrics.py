"""What is counted, for Prometheus: under vLLM's names where it has one, so that its dashboards fit."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from piecegraph.llm.async_llm import AsyncLLM
from piecegraph.llm.run.results import Completion

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
_TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))


class Metrics:
    """The counters of one server."""

    def __init__(self, model_name: str) -> None:
        self._name = model_name
        self._registry = CollectorRegistry()
        self._llm: AsyncLLM | None = None

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, ("model_name",), buckets=buckets, registry=self._registry)
            return family.labels(model_name)

        self._prompt = counter("vllm:prompt_tokens", "Tokens of prompts.").labels(model_name)
        self._new = counter("vllm:generation_tokens", "Generated tokens.").labels(model_name)
        self._cached = counter("vllm:prefix_cache_hits", "Tokens of prompts found in the cache.").labels(model_name)
        self._queried = counter("vllm:prefix_cache_queries", "Tokens of prompts looked for.").labels(model_name)
        self._ends = counter("vllm:request_success", "Answers, by why they ended.", "finished_reason")
        self._preempted = counter("vllm:num_preemptions", "Requests that gave their blocks back.").labels(model_name)
        self._first = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._between = histogram(
            "vllm:inter_token_latency_seconds", "A token after the first, on average.", _PER_TOKEN
        )
        self._total = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._prompts = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answers = histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._responses = counter("piecegraph:http_responses", "Answers of the server, by status.", "status")
        self._registry.register(self)

    def watch(self, llm: AsyncLLM) -> None:
        """Tell about a model from now on."""
        self._llm = llm

    def observe(self, answer: Completion) -> None:
        """An answer has come to its end."""
        metrics = answer.metrics
        self._prompt.inc(metrics.num_prompt_tokens)
        self._queried.inc(metrics.num_prompt_tokens)
        self._cached.inc(metrics.num_cached_tokens)
        self._new.inc(metrics.num_new_tokens)
        self._preempted.inc(metrics.num_preemptions)
        self._ends.labels(self._name, answer.finish_reason).inc()
        self._prompts.observe(metrics.num_prompt_tokens)
        self._answers.observe(metrics.num_new_tokens)
        self._total.observe(metrics.total_s)
        if metrics.time_to_first_token_s is not None:
            self._first.observe(metrics.time_to_first_token_s)
        if metrics.seconds_per_token is not None:
            self._between.observe(metrics.seconds_per_token)

    def count_response(self, status: int) -> None:
        self._responses.labels(self._name, str(status)).inc()

    def page(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What is read when it is asked for."""
        if self._llm is None:
            return
        load, engine = self._llm.load(), self._llm.llm.started.engine
        library = engine.forward.library
        gauges = {
            "vllm:num_requests_running": ("Requests in the batch.", load.num_running),
            "vllm:num_requests_waiting": ("Requests that wait for a place in it.", load.num_waiting),
            "vllm:kv_cache_usage_perc": ("Share of the blocks that requests hold, from 0 to 1.", load.cache_usage),
            "piecegraph:recorded_sizes": ("Steps that are recorded.", len(library.tapes)),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._name], value)
            yield gauge
        failed = CounterMetricFamily("piecegraph:failed_steps", "Steps that failed.", labels=["model_name"])
        failed.add_metric([self._name], load.num_failed_steps)
        yield failed
        for name, (field, text) in _OF_STEPS.items():
            count = CounterMetricFamily(name, text, labels=["model_name", "kind"])
            for kind, counts in engine.counts.kinds.items():
                count.add_metric([self._name, kind], getattr(counts, field))
            yield count
        losses = CounterMetricFamily("piecegraph:fallbacks", "What was lost, by code.", labels=["model_name", "code"])
        codes: dict[str, int] = {}
        for event, number in self._llm.llm.events.distinct:
            codes[event.code] = codes.get(event.code, 0) + number
        for code, number in codes.items():
            losses.add_metric([self._name, code], number)
        yield losses
