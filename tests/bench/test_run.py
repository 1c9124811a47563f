"""A sweep: modes are compared before they are timed, and what cannot run says why."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch

from piecegraph.base.progress import Progress
from piecegraph.bench import language
from piecegraph.bench.compare import compare_results
from piecegraph.bench.config import BenchConfig, Cell, resolve
from piecegraph.bench.ours import LLMRunner, step_seconds
from piecegraph.bench.result import BenchResult, Fallback, Mode, Phase, Row, Timing, Verdict, result_schema
from piecegraph.bench.run import run
from piecegraph.bench.runner import Counts, UnavailableError
from piecegraph.errors import CommandError, ConfigError

SMALL: dict[str, Any] = {"batch_sizes": (2,), "input_lens": (8,), "output_len": 3, "repeats": 1, "device": "cpu"}


def rows_of(result: BenchResult, mode: str) -> list[Row]:
    return [row for row in result.rows if row.mode == mode]


def test_every_mode_has_a_row_in_every_phase_of_every_cell(measured: BenchResult) -> None:
    modes = ("eager", "reduce-overhead", "breakable", "full")
    assert [(row.batch_size, row.phase, row.mode) for row in measured.rows] == [
        (batch, phase, mode) for batch in (1, 3) for phase in ("prefill", "decode") for mode in modes
    ]
    assert {(row.input_len, row.output_len) for row in measured.rows} == {(20, 4)}
    assert {each.subject: each.choice for each in measured.config}["modes"] == ", ".join(modes)


def test_what_ran_has_times_that_fit_together(measured: BenchResult) -> None:
    for row in (*rows_of(measured, "eager"), *rows_of(measured, "breakable")):
        assert row.timing is not None
        assert 0 < row.timing.p10_ms <= row.timing.median_ms <= row.timing.p90_ms
        assert row.timing.repeats == 3
        num_tokens = row.batch_size * (20 if row.phase == "prefill" else 1)
        assert row.tokens_s == pytest.approx(num_tokens / row.timing.median_ms * 1e3)
        assert row.floor.ratio is None, "a floor is measured on a GPU"
    assert {row.verdict.state for row in rows_of(measured, "eager")} == {"reference"}
    for row in rows_of(measured, "breakable"):
        assert (row.verdict.state, row.coverage, row.padding, row.fallbacks) == ("same", 0.0, 0.0, ())
        assert row.ran_as == "direct: eager pieces, no graphs on a CPU"


def test_what_a_cpu_has_not_has_no_number_but_a_reason(measured: BenchResult) -> None:
    for mode, instead in (("full", "piecewise"), ("reduce-overhead", "compile")):
        for row in rows_of(measured, mode):
            assert (row.timing, row.tokens_s, row.verdict.state) == (None, None, "not available")
            assert row.verdict.reason == f"a CPU has no graphs: what would run is what {instead} runs"
    assert {each.mode for each in measured.startup} == {"eager", "breakable"}
    assert len(measured.losses) == 3, "direct calls are told, too"


def test_a_real_result_keeps_the_schema_and_does_not_differ_from_itself(measured: BenchResult) -> None:
    jsonschema.validate(json.loads(measured.to_json()), result_schema(), jsonschema.Draft202012Validator)
    found = compare_results(measured, BenchResult.from_json(measured.to_json()))
    assert found.counts == {"no change": 8, "no number": 8}
    assert not found.notes


def test_a_mode_that_is_wrong_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LLMRunner.logits

    def wrong(self: LLMRunner, prompts: torch.Tensor, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """As if the first step of decoding looked at the last token alone."""
        for number, logits in enumerate(right(self, prompts, tokens)):
            yield logits.roll(1, -1) if number == 1 else logits

    monkeypatch.setattr(LLMRunner, "logits", wrong)
    config, decisions = resolve("tiny", modes=("eager", "breakable"), **SMALL)
    prefill, decode = rows_of(run(config, decisions, Progress(False)), "breakable")
    assert (prefill.verdict.state, decode.verdict.state) == ("same", "differs")
    assert prefill.timing is not None
    assert decode.timing is None
    assert "is allowed" in decode.verdict.reason


@dataclass
class FakeRunner:
    """A mode that runs nothing."""

    mode: Mode
    seen: list[tuple[str, int]]
    fails_at: int | None = None
    """The sample that there is no memory for."""
    ran_as: str = "nothing"
    weight_bytes: int = 0
    stages_s: dict[str, float] = field(default_factory=dict)
    fallbacks: tuple[Fallback, ...] = ()

    def sample_s(self, phase: Phase, inputs: int) -> float:
        self.seen.append((self.mode, inputs))
        if sum(mode == self.mode for mode, _ in self.seen) == self.fails_at:
            raise torch.OutOfMemoryError("no memory\nand more")
        return inputs / 1e3

    def counts(self, phase: Phase) -> Counts:
        return Counts()

    def close(self) -> None:
        self.seen.append((f"{self.mode} closed", 0))


class FakeSubject:
    """Eager, and modes that fail somewhere."""

    phases: tuple[Phase, ...] = ("forward",)

    def __init__(self, config: BenchConfig) -> None:
        self.groups = (config.modes,)
        self.seen: list[tuple[str, int]] = []
        self._fails_at = {"compile": 3}

    def open(self, mode: Mode) -> FakeRunner:
        if mode == "piecewise":
            raise RuntimeError("no compiler\nand more")
        if mode == "full":
            raise ConfigError("PG301", "it cannot be one graph")
        return FakeRunner(mode, self.seen, self._fails_at.get(mode))

    def inputs(self, cell: Cell, number: int) -> int:
        return number

    def judge(self, runner: FakeRunner, cell: Cell) -> dict[Phase, Verdict]:
        if runner.mode == "breakable":
            raise ValueError("other shapes")
        return {"forward": Verdict(state="same", reason="")}

    def num_tokens(self, cell: Cell, phase: Phase) -> int:
        return 6

    def read_bytes(self, cell: Cell, phase: Phase) -> int:
        return 0

    def close(self) -> None:
        self.seen.append(("closed", 0))


def run_fake(monkeypatch: pytest.MonkeyPatch, *modes: Mode, repeats: int = 2) -> tuple[BenchResult, FakeSubject]:
    config, decisions = resolve("tiny", modes=modes, **{**SMALL, "repeats": repeats})
    subject = FakeSubject(config)
    monkeypatch.setattr(language, "LanguageModel", lambda config: subject)
    return run(config, decisions, Progress(False)), subject


def test_modes_take_turns_with_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    result, subject = run_fake(monkeypatch, "eager", "reduce-overhead")
    eager, reduced = "eager", "reduce-overhead"
    # Inputs 0 and 1 are those that modes are compared and probed with; the first two rounds are not counted.
    assert subject.seen[:8] == [
        *((eager, 2), (reduced, 2), (reduced, 3), (eager, 3)),
        *((eager, 4), (reduced, 4), (reduced, 5), (eager, 5)),
    ]
    assert [row.timing for row in result.rows] == [Timing(4.5, 4.1, 4.9, 2)] * 2
    assert [row.tokens_s for row in result.rows] == [pytest.approx(6 / 4.5e-3)] * 2
    assert subject.seen[8:] == [("eager closed", 0), ("reduce-overhead closed", 0), ("closed", 0)]


def test_a_mode_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run_fake(monkeypatch, "eager", "compile", "breakable", "piecewise", "full")
    assert [(row.mode, row.verdict.state, row.verdict.reason) for row in result.rows] == [
        ("eager", "same", ""),
        ("compile", "failed", "OutOfMemoryError: no memory"),
        ("breakable", "failed", "ValueError: other shapes"),
        ("piecewise", "failed", "RuntimeError: no compiler"),
        ("full", "not available", "PG301 it cannot be one graph"),
    ]
    assert [row.timing is not None for row in result.rows] == [True, False, False, False, False]
    assert [each.mode for each in result.startup] == ["eager", "compile", "breakable"]


def test_a_graph_that_pads_and_replays_is_told() -> None:
    config, decisions = resolve(
        "tiny", modes=("breakable",), graph_device="simulated", **{**SMALL, "batch_sizes": (3,)}
    )
    prefill, decode = run(config, decisions, Progress(False)).rows
    assert (prefill.coverage, decode.coverage) == (1.0, 1.0)
    assert decode.ran_as == "eager pieces, piecewise"
    assert decode.padding is not None
    assert not decode.loss


def test_steps_are_counted_while_all_requests_run() -> None:
    def answer(*times: float) -> Any:
        return SimpleNamespace(metrics=SimpleNamespace(token_times_s=times))

    # The first began a step earlier and ended a step earlier.
    assert step_seconds([answer(1.0, 2.0, 2.5, 3.0), answer(2.0, 2.5, 3.0, 3.25)]) == 0.5
    with pytest.raises(UnavailableError, match="longer --output-len"):
        step_seconds([answer(1.0, 2.0), answer(3.0, 4.0)])


def test_weights_that_a_step_must_read() -> None:
    weights = language.WeightBytes(total=900, dense=100, experts=800, chosen_share=0.25, vocab_size=8)
    assert [weights.read(count) for count in (1, 2, 4, 64)] == [300, 500, 900, 900]


def test_what_does_not_fit_the_model_is_refused() -> None:
    config, decisions = resolve("tiny", input_lens=(4096,), device="cpu")
    with pytest.raises(ConfigError, match="made for 4096 tokens"):
        run(config, decisions, Progress(False))
    with pytest.raises(ConfigError, match="'fast' is no mode"):
        resolve("tiny", modes=("fast",))


def test_language_models_need_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    config, decisions = resolve("tiny", device="cpu")
    with pytest.raises(CommandError, match="PG615 transformers is not installed: language models need it"):
        run(config, decisions, Progress(False))
