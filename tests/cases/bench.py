"""A result of a benchmark that nobody ran: every kind of row."""

from __future__ import annotations

from piecegraph.base.plan import Decision
from piecegraph.bench.result import BenchResult, Fallback, Floor, Machine, Mode, Phase, Row, Startup, Timing, Verdict

REFERENCE = Verdict(state="reference", reason="transformers, eager")
SAME = Verdict(state="same", reason="logits differ by 0.002, 0.05 is allowed", difference=0.002, allowed=0.05)


def made_row(
    mode: Mode, phase: Phase, ms: float, *, batch_size: int = 8, spread: float = 0.05, verdict: Verdict = SAME
) -> Row:
    """A row whose times are spread around a median."""
    num_tokens = batch_size * (128 if phase == "prefill" else 1)
    return Row(
        mode=mode,
        phase=phase,
        batch_size=batch_size,
        input_len=128,
        output_len=32,
        ran_as=mode,
        verdict=verdict,
        timing=Timing(ms, ms * (1 - spread), ms * (1 + spread), 7),
        tokens_s=num_tokens / ms * 1e3,
        coverage=0.97 if mode == "full" else None,
        padding=0.125 if mode == "full" else None,
        memory_bytes=3 << 30,
        floor=Floor(kernels_ms=ms * 0.8, bandwidth_ms=ms * 0.6, ratio=1.25),
    )


def made_result() -> BenchResult:
    lost = Fallback(code="PG402", subject="size 64", reason="out of memory while recording", count=2)
    wrong = Verdict(state="differs", reason="logits differ by 0.7, 0.05 is allowed", difference=0.7, allowed=0.05)
    absent = Verdict(state="not available", reason="cpu has no graphs")
    full = made_row("full", "decode", 1.0)
    rows = [
        made_row("eager", "prefill", 9.0, verdict=REFERENCE),
        made_row("eager", "decode", 4.0, verdict=REFERENCE),
        made_row("full", "prefill", 3.0),
        Row(**{**{name: getattr(full, name) for name in Row.__slots__}, "fallbacks": (lost,)}),
        *(
            Row(mode=mode, phase="decode", batch_size=8, input_len=128, output_len=32, ran_as=mode, verdict=verdict)
            for mode, verdict in (("compile", wrong), ("reduce-overhead", absent))
        ),
    ]
    return BenchResult(
        created="2026-11-16T12:00:00Z",
        model='tiny <b>"quoted"</b>',
        machine=Machine(
            fingerprint="0123456789ab",
            device="NVIDIA H200",
            num_threads=16,
            num_ranks=1,
            environment={"python": "3.12.3", "torch": "2.11.0"},
        ),
        config=(Decision("batch sizes", "8", "asked for"), Decision("repeats", "7", "the default")),
        startup=(
            Startup(mode="eager", stages_s={"load": 1.5}),
            Startup(mode="full", stages_s={"load": 1.5, "compile": 12.0, "record": 3.25}),
        ),
        rows=tuple(rows),
    )
