"""The result of a benchmark on a page to share: the document that ``piecegraph bench --json`` prints comes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from piecegraph.base.events import Event
from piecegraph.base.plan import Decision
from piecegraph.base.text import bytes_text
from piecegraph.errors import NOTES
from piecegraph.report.content import Bar, Chart, DataTable, Figure, Point, Report, Series

Row = Mapping[str, Any]
_BASELINE = "eager"
_FLOORS = {"bandwidth_ms": "floor: weights once", "kernels_ms": "floor: kernels of a step"}
_HEAD = (
    *(
        "mode",
        "phase",
        "batch",
        "input",
        "output",
        "median ms",
        "p10 to p90",
        "tokens/s",
        "\N{MULTIPLICATION SIGN} eager",
    ),
    *("\N{MULTIPLICATION SIGN} floor", "replayed", "padding", "memory", "outcome"),
)

_TABLE_NOTE = (
    "Medians with the 10th and 90th percentile. A mode whose outputs are not those of the reference has no time. "
    "Over eager: less is faster. Over the floor: 1 is what the same kernels, or reading the weights once, would take."
)


def bench_report(document: Mapping[str, Any]) -> Report:
    """The page of a benchmark.

    Args:
        document: a result in plain types, as its JSON has it.
    """
    rows: Sequence[Row] = document["rows"]
    machine = document["machine"]
    config = [Decision(**each) for each in document["config"]]
    return Report(
        title=f"Benchmark of {document['model']}",
        about=f"{machine['device']}, {document['created']}",
        figures=tuple(_figures(rows)),
        notes=tuple(dict.fromkeys(f"{row['mode']}: {_outcome(row)}" for row in rows if not row["timing"])),
        latency=tuple(_charts(rows)),
        tables=(_table(rows),) if rows else (),
        startup=tuple(Bar(one["mode"], tuple(one["stages_s"].items())) for one in document["startup"]),
        memory=tuple(_memory(rows)),
        decisions=tuple(config),
        losses=tuple(_losses(rows)),
        machine={"fingerprint": machine["fingerprint"], **machine["environment"]},
        data={"bench": document},
    )


def _figures(rows: Sequence[Row]) -> Iterator[Figure]:
    """The quickest step, the most tokens, and what was lost."""
    timed = [row for row in rows if row["timing"]]
    steps = [row for row in timed if row["phase"] != "prefill"]
    if steps:
        smallest = min(row["batch_size"] for row in steps)
        best = min((row for row in steps if row["batch_size"] == smallest), key=_median)
        what = "a step of decoding" if best["phase"] == "decode" else "a call"
        ratio = best["floor"]["ratio"]
        floor = f", {ratio:.2f} \N{MULTIPLICATION SIGN} the floor" if ratio is not None else ""
        yield Figure(
            f"{_median(best):.3g} ms", f"{what}, batch {smallest}", f"{best['mode']}{_speedup(best, rows)}{floor}"
        )
    if throughput := [row for row in steps if row["tokens_s"]]:
        best = max(throughput, key=lambda row: float(row["tokens_s"]))
        yield Figure(
            f"{best['tokens_s']:,.0f}", "tokens a second at most", f"{best['mode']}, batch {best['batch_size']}"
        )
    lost = sum(each["count"] for row in rows for each in row["fallbacks"] if each["code"] not in NOTES)
    untimed = len(rows) - len(timed)
    without = f"{untimed} of {len(rows)} rows have no time" if untimed else "every row has a time"
    is_bad = lost or any(row["verdict"]["state"] in ("differs", "failed") for row in rows)
    yield Figure(f"{lost:,}", "fallbacks", without, "bad" if is_bad else "")


def _median(row: Row) -> float:
    return float(row["timing"]["median_ms"])


def _speedup(row: Row, rows: Sequence[Row]) -> str:
    ratio = _over_eager(row, rows)
    return f", {1 / ratio:.2f} \N{MULTIPLICATION SIGN} as fast as eager" if ratio and row["mode"] != _BASELINE else ""


def _over_eager(row: Row, rows: Sequence[Row]) -> float | None:
    """Its time over that of eager in the same phase, at the same size."""
    same = ("phase", "batch_size", "input_len", "output_len")
    for other in rows:
        if other["mode"] == _BASELINE and other["timing"] and all(other[name] == row[name] for name in same):
            return _median(row) / _median(other) if row["timing"] else None
    return None


# ------------------------------------------------------------------ latency


def _charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Prefills by their length for each batch; steps and calls by their batch for each length of the prompts."""
    for phase, fixed, varied in (
        ("prefill", "batch_size", "input_len"),
        ("decode", "input_len", "batch_size"),
        ("forward", "input_len", "batch_size"),
    ):
        mine = [row for row in rows if row["phase"] == phase and row["timing"]]
        for value in sorted({row[fixed] for row in mine}):
            together = [row for row in mine if row[fixed] == value]
            words = {"prefill": f"Prefill, batch {value}", "decode": f"A step of decoding behind {value} tokens"}
            yield Chart(words.get(phase, "A call"), "tokens", "ms", tuple(_series(together, varied, phase)))


def _series(rows: Sequence[Row], varied: str, phase: str) -> Iterator[Series]:
    def tokens(row: Row) -> float:
        return float(row[varied] * (row["batch_size"] if phase == "prefill" else 1))

    ordered = sorted(rows, key=tokens)
    for mode in dict.fromkeys(row["mode"] for row in rows):
        yield Series(mode, tuple(_point(row, tokens) for row in ordered if row["mode"] == mode))
    for name, shown in _FLOORS.items():
        floors = [(tokens(row), row["floor"][name]) for row in ordered if row["floor"][name] is not None]
        lowest = {x: min(y for at, y in floors if at == x) for x, _ in floors}
        if lowest:
            yield Series(shown, tuple(Point(x, float(y)) for x, y in lowest.items()), is_floor=True)


def _point(row: Row, tokens: Callable[[Row], float]) -> Point:
    timing = row["timing"]
    return Point(tokens(row), _median(row), timing["p10_ms"], timing["p90_ms"], row["ran_as"])


# ------------------------------------------------------------------ the table, memory, losses


def _table(rows: Sequence[Row]) -> DataTable:
    """All rows, without columns that say nothing here."""
    columns = zip(_HEAD, *(_table_row(row, rows) for row in rows), strict=True)
    head, *cells = zip(*(column for column in columns if any(column[1:])), strict=True)
    return DataTable("All rows", head, tuple(cells), _TABLE_NOTE)


def _table_row(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    timing, floor = row["timing"], row["floor"]["ratio"]
    sizes = [f"{row[name]:,}" for name in ("batch_size", "input_len", "output_len")]
    ratio = _over_eager(row, rows)
    return (
        *(row["mode"], row["phase"], *sizes),
        f"{timing['median_ms']:,.3f}" if timing else "",
        f"{timing['p10_ms']:,.3f} to {timing['p90_ms']:,.3f}" if timing else "",
        f"{row['tokens_s']:,.0f}" if row["tokens_s"] is not None else "",
        f"{ratio:.2f}" if ratio is not None else "",
        f"{floor:.2f}" if floor is not None else "",
        f"{row['coverage']:.0%}" if row["coverage"] is not None else "",
        f"{row['padding']:.0%}" if row["padding"] is not None else "",
        bytes_text(row["memory_bytes"]) if row["memory_bytes"] is not None else "",
        _outcome(row),
    )


def _outcome(row: Row) -> str:
    verdict = row["verdict"]
    return verdict["state"] if row["timing"] else f"{verdict['state']}: {verdict['reason']}"


def _memory(rows: Sequence[Row]) -> Iterator[Bar]:
    for mode in dict.fromkeys(row["mode"] for row in rows):
        used = [row["memory_bytes"] for row in rows if row["mode"] == mode and row["memory_bytes"] is not None]
        if used:
            yield Bar(mode, (("of the device, at most", float(max(used))),))


def _losses(rows: Sequence[Row]) -> Iterator[tuple[Event, int]]:
    counts: dict[Event, int] = {}
    for row in rows:
        for lost in row["fallbacks"]:
            event = Event(lost["code"], f"{row['mode']}: {lost['subject']}", lost["reason"])
            counts[event] = counts.get(event, 0) + lost["count"]
    yield from counts.items()
