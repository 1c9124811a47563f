"""Pages to share with something in every part, and names that nobody should trust."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from piecegraph.base.events import Event
from piecegraph.base.origin import LaunchCall
from piecegraph.base.plan import Cut, Decision, Piece, SourceLine
from piecegraph.provenance.launch import KernelProfile, Launch
from piecegraph.provenance.trace import Trace, _Source
from piecegraph.report.content import (
    Bar,
    Chart,
    DataTable,
    Figure,
    GroupCard,
    PlanStrip,
    Point,
    Report,
    Series,
)
from piecegraph.report.statements import PageRow, Section
from tests.cases.launches import launch, layer, origin

EVIL = (
    "</script></style><script>window.isOwned=1</script><img src=x onerror=window.isOwned=1>\"'`&amp;\u2028\u202e{{7*7}}"
)
SHOWN = EVIL.replace("\u2028", " ").replace("\u202e", " ")
"""How a page shows it: without what ends or turns a line."""
LONG = "void " + "very::long::name<" * 400 + "int" + ">" * 400 + "(int)"


def replays(number: int, num_layers: int = 2) -> KernelProfile:
    """A tape that is replayed, and a copy behind each replay."""
    launches: list[Launch] = []
    now = 0.0
    for replay in range(number):
        for count in range(num_layers):
            for one in layer(count, now):
                launches.append(
                    launch(
                        one.name,
                        one.start,
                        one.duration,
                        one.call,
                        kind=one.kind,
                        instance=len(launches),
                        replay=replay,
                    )
                )
            now += 30
        launches.append(launch("Memcpy DtoH", now + 2, 3, kind="memcpy", stream="13", phase="", how="none"))
        now += 20
    return KernelProfile(tuple(launches), device="NVIDIA H200")


def trace_of(profile: KernelProfile) -> Trace:
    taken = Trace()
    taken._source = _Source(profile, Path())
    return taken


def distinct_kernels(number: int) -> KernelProfile:
    """As many rows as launches."""

    def made() -> Iterator[Launch]:
        for i in range(number):
            call = LaunchCall(f"op_{i}", (origin("aten::mul", f"layers.{i % 30}.part_{i % 7}", 400, i % 90),))
            yield launch(f"kernel_{i}", 5.0 * i, 1 + i % 4, call, instance=i, replay=i // 400)

    return KernelProfile(tuple(made()), device="NVIDIA H200")


def evil_trace() -> Trace:
    call = LaunchCall(EVIL, (origin(EVIL, EVIL, 400, 250),), (EVIL,))
    launches = [
        launch(EVIL, 0, 9, call, phase=EVIL, instance=1, stream=EVIL),
        launch(LONG, 9, 4, call, instance=2, stream=EVIL),
        *layer(0, 20),
    ]
    return trace_of(KernelProfile(tuple(launches), device=EVIL, notes=(EVIL,)))


def everything(text: str = "aten::mm") -> Report:
    """Every part that a page can have, without kernels; the text is in each of them."""
    line = SourceLine(f"/a/{text}.py", 3, text)
    steps = (Piece(0, 5, "a", line, text), Cut(1, text, text, line), Piece(2, 40, "b", None, "eager"))
    points = (Point(1, 2.0, 1.9, 2.2, text), Point(64, 3.0))
    return Report(
        title=text,
        about=text,
        figures=(Figure("1.41 ms", text, text), Figure("3", "fallbacks", "", "bad"), Figure("9 s", "start-up")),
        failure=(Section("ROOT CAUSE", (PageRow(text, text, "bad"), PageRow("", text, is_code=True, is_detail=True))),),
        notes=(text,),
        plans=(PlanStrip(text, text, steps),),
        latency=(Chart(text, text, text, (Series(text, points), Series("floor", (Point(1, 1.0),), is_floor=True))),),
        tables=(DataTable(text, (text, "ms"), ((text, "1.5"), (text, "12")), text),),
        startup=(Bar("", ((text, 1.5), ("trace", 0.5))),),
        memory=(Bar(text, ((text, 2.0**30), ("cache", 2.0**20))), Bar("other", (("cache", 2.0**29),))),
        groups=(GroupCard(text, text, ((text, "100 %", text),), text),),
        decisions=(Decision(text, text, text),),
        losses=((Event("PG501", text, text, text), 2), (Event("PG515", text, text), 1)),
        machine={text: text},
        data={"said": text},
    )


def bench_document() -> dict[str, Any]:
    """A result of a benchmark in plain types: two modes, of which one is wrong at one size and falls back."""
    sizes = [(phase, batch, length) for phase in ("prefill", "decode") for batch in (1, 8) for length in (128, 1024)]
    rows = [_bench_row(mode, *size) for size in sizes for mode in ("eager", "piecewise")]
    return {
        "kind": "bench",
        "schema": 1,
        "created": "2026-11-16T12:00:00Z",
        "model": "tiny",
        "machine": {
            "fingerprint": "ab12",
            "device": "NVIDIA H200",
            "num_threads": 16,
            "num_ranks": 1,
            "environment": {"torch": "2.11"},
        },
        "config": [{"subject": "dtype", "choice": "bfloat16", "reason": "the checkpoint's"}],
        "startup": [{"mode": "piecewise", "stages_s": {"import": 1.0, "compile": 4.0}}],
        "rows": rows,
    }


def _bench_row(mode: str, phase: str, batch: int, length: int) -> dict[str, Any]:
    is_wrong = (mode, phase, batch, length) == ("piecewise", "prefill", 8, 1024)
    median = (8.0 if mode == "eager" else 2.0) + batch * length / 1024
    state = "differs" if is_wrong else "reference" if mode == "eager" else "same"
    lost = [{"code": "PG501", "subject": "call", "reason": "gradients", "count": 3}]
    timing = {"median_ms": median, "p10_ms": median - 0.1, "p90_ms": median + 0.2, "repeats": 30}
    return {
        "mode": mode,
        "phase": phase,
        "batch_size": batch,
        "input_len": length,
        "output_len": 32,
        "ran_as": "graphs",
        "verdict": {"state": state, "reason": "off by 0.3", "difference": 0.3, "allowed": 0.02},
        "timing": None if is_wrong else timing,
        "tokens_s": None if is_wrong else 1000 * batch / median,
        "coverage": None if mode == "eager" else 1.0,
        "padding": None,
        "memory_bytes": 2**30 if mode == "eager" else 3 * 2**29,
        "floor": {"kernels_ms": 1.5, "bandwidth_ms": 0.5, "ratio": None if is_wrong else median / 1.5},
        "fallbacks": lost if mode == "piecewise" and batch == 8 else [],
    }
