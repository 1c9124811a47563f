"""A report as one HTML file: nothing of it is fetched, nothing in it is sent.

Note [Text is never markup]
    What is shown comes from traces and logs that anyone may have written. The template escapes every value; the script
    makes elements and sets their text, and the browser is told to refuse it anything else (trusted types). The data for
    the script stands in a block of JSON without a character that could end it. A Content-Security-Policy names style
    and script by their hashes and forbids everything else, the network first.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from piecegraph.base.plan import Cut, Piece
from piecegraph.base.text import bytes_text, count_of, duration, printable
from piecegraph.base.version import VERSION
from piecegraph.errors import NOTES, InputError
from piecegraph.report.charts import NUM_COLOURS, line_chart, series_classes, stacked_bar
from piecegraph.report.content import Bar, DataTable, PlanStrip, Report

if TYPE_CHECKING:
    from jinja2 import Template

SCHEMA_VERSION = 1
"""Of the data in a page. Raised when a field is renamed or removed."""
_SCRIPTS = ("page.js", "kernels.js", "timeline.js")
_FOLDER = Path(__file__).parent
_UNSAFE = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}
_WIDEST = 6
"""Classes of the style sheet for the widths of pieces: each is for twice as many ops."""


def write_report(report: Report, path: str | Path) -> Path:
    """Write a report to a file."""
    path = Path(path)
    try:
        path.write_text(to_html(report), encoding="utf-8")
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise InputError("PG601", f"{path} cannot be written", why=why, hint="choose another path") from error
    return path


def to_html(report: Report) -> str:
    """A report as one file. See Note [Text is never markup]."""
    style, script = _asset("page.css"), "\n".join(map(_asset, _SCRIPTS))
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    data = {"schema_version": SCHEMA_VERSION, "piecegraph": VERSION, "written": written, "title": report.title}
    kernels = {} if report.kernels is None else {"kernels": report.kernels}
    return _template().render(
        report=report,
        policy=_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        data=Markup(safe_json({**data, **report.data, **kernels})),
        version=VERSION,
        written=written,
    )


def safe_json(value: Any) -> str:
    r"""JSON that can stand inside of a script element.

    >>> safe_json({"kernel": "</script>"})
    '{"kernel":"\\u003c/script\\u003e"}'
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)


def _policy(style: str, script: str) -> str:
    rules = {
        "default-src": "'none'",
        "script-src": _hash_of(script),
        "style-src": _hash_of(style),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _asset(name: str) -> str:
    return (_FOLDER / name).read_text("utf-8")


@functools.cache
def _template() -> Template:
    from jinja2 import Environment  # takes a while, and most processes write no page

    made = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_clean)
    made.globals |= {
        "line_chart": line_chart,
        "series_classes": series_classes,
        "is_cut": lambda step: isinstance(step, Cut),
        "is_note": NOTES.__contains__,
    }
    made.filters |= {
        "bars": _bars,
        "bytes": bytes_text,
        "duration": duration,
        "key": _keys,
        "numeric": _numeric,
        "seconds": lambda seconds: duration(1e6 * seconds),
        "tip": _step_tip,
        "width": lambda piece: min(piece.num_ops.bit_length(), _WIDEST),
        "count_of": count_of,
    }
    return made.from_string(_asset("page.html"))


def _clean(value: Any) -> Any:
    """Without control characters, and those that turn the direction of a line."""
    return value if isinstance(value, Markup) else "\n".join(map(printable, str(value).split("\n")))


def _bars(bars: Sequence[Bar], unit: str) -> list[tuple[Bar, str, Markup]]:
    """Each bar with its total in words and its drawing; a part has one colour in all of them."""
    number = {name: index for index, name in enumerate(_keys(bars))}
    words = bytes_text if unit == "bytes" else lambda seconds: duration(1e6 * seconds)
    longest = max(bar.total for bar in bars)
    drawn = []
    for bar in bars:
        colours = [f"c{number[name] % NUM_COLOURS}" for name, _ in bar.parts]
        shown = [words(amount) for _, amount in bar.parts]
        drawn.append((bar, words(bar.total), stacked_bar(bar, longest, colours, shown)))
    return drawn


def _keys(bars: Iterable[Bar]) -> list[str]:
    """The names of all parts."""
    return list(dict.fromkeys(name for bar in bars for name, _ in bar.parts))


def _numeric(table: DataTable) -> list[bool]:
    """Which columns hold numbers."""
    columns = zip(*table.rows, strict=True) if table.rows else ()
    found = [all(not cell or cell[0].isdigit() or cell[0] in "+-\u2212" for cell in column) for column in columns]
    return found or [False] * len(table.head)


def _step_tip(step: Piece | Cut, strip: PlanStrip) -> str:
    """What is said of a step where it is pointed at."""
    if isinstance(step, Cut):
        lines = [f"cut {step.index}: {step.op}", step.reason]
        return "\n".join([*lines, str(step.source)] if step.source else lines)
    same = sum(isinstance(other, Piece) and other.key == step.key for other in strip.steps)
    lines = [f"{step}: {count_of(step.num_ops, 'op')}, {step.backend}"]
    lines += [f"one of {same} that are compiled once"] if same > 1 else []
    return "\n".join([*lines, f"from {step.first}"] if step.first else lines)
