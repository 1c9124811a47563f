"""A page as text, Markdown or HTML."""

from __future__ import annotations

import textwrap

from piecegraph.explain.page import Page
from piecegraph.explain.wording import PageRow, Section, headline, sections

WIDTH = 118
_LABEL = 14
_ANSI = {"strong": "\x1b[1m", "bad": "\x1b[31;1m", "good": "\x1b[32m", "quiet": "\x1b[2m", "": ""}


def to_text(page: Page, *, width: int = WIDTH, colour: bool = False) -> str:
    """The page for a terminal, ending in a line end."""
    paint = _paint if colour else lambda text, tone: text
    lines = [paint(headline(page), "strong"), paint(_about(page), "quiet")]
    for section in sections(page):
        lines += ["", paint(section.title, "strong")]
        for row in section.rows:
            lines += [paint(line, row.tone) for line in _text_lines(row, width)]
    lines += ["", *(f"note: {note}" for note in page.notes)] if page.notes else []
    lines += ["", *(f"other run, {run}" for run in page.other_runs)] if page.other_runs else []
    return "\n".join(_printable(line, colour) for line in lines) + "\n"


def to_markdown(page: Page) -> str:
    """The page for an issue or a chat."""
    lines = [f"# {_plain(headline(page))}", "", _plain(_about(page))]
    for section in sections(page):
        lines += ["", f"## {section.title}", "", *_markdown_rows(section)]
    lines += ["", *(f"- note: {_plain(note)}" for note in page.notes)] if page.notes else []
    lines += ["", *(f"- other run, {_plain(run)}" for run in page.other_runs)] if page.other_runs else []
    return "\n".join(_printable(line) for line in lines) + "\n"


def to_html(page: Page) -> str:
    """The page as one file without references to others."""
    from jinja2 import Environment

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_TEMPLATE)
    html = template.render(page=page, headline=headline(page), about=_about(page), sections=sections(page))
    return "\n".join(map(_printable, html.split("\n")))


def _about(page: Page) -> str:
    names = page.sources
    shown = ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"
    about = f"{shown}: {page.num_lines:,} lines" if page.num_lines else shown
    if not page.other_runs:
        return about
    which = "the last that failed" if page.outcome == "failure" else "the last"
    return f"{about}; run {page.run_number} of {1 + len(page.other_runs)} in this log, {which}"


def _text_lines(row: PageRow, width: int) -> list[str]:
    """A row with its label in front; labels stand in a column, words wrap, code does not."""
    indent = " " * (_LABEL + 2) if row.label or row.is_detail else "  "
    first = f"  {row.label:<{_LABEL}}" if row.label else indent
    if row.is_code:
        line = first + row.text
        return [line if len(line) <= width else line[: width - 3] + "..."]
    wrapped = textwrap.wrap(row.text, max(width - len(indent), 30), break_long_words=False, break_on_hyphens=False)
    return [first + wrapped[0], *(indent + line for line in wrapped[1:])] if wrapped else [first.rstrip()]


def _markdown_rows(section: Section) -> list[str]:
    if section.title == "STACK":
        return ["```text", *(row.text.replace("```", "'''") for row in section.rows), "```"]
    lines = []
    for row in section.rows:
        text = f"`{row.text.replace('`', chr(39))}`" if row.is_code else _plain(row.text)
        lines.append(f"- **{row.label}** {text}" if row.label else f"- {text}")
    return lines


def _plain(text: str) -> str:
    """Without what Markdown would read as markup."""
    return "".join(f"\\{char}" if char in r"\`*_[]<>#|" else char for char in text)


def _printable(line: str, colour: bool = False) -> str:
    """Without control characters, which a log may hold and a terminal would obey."""
    return "".join(c for c in line if c.isprintable() or c == " " or (colour and c == "\x1b"))


def _paint(text: str, tone: str) -> str:
    return f"{_ANSI[tone]}{text}\x1b[0m" if _ANSI[tone] else text


_TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ headline }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: .85rem; letter-spacing: .08em; margin: 1.6rem 0 .3rem; }
.about, .quiet { opacity: .65; } .bad { color: #c62828; font-weight: 600; } .good { color: #2e7d32; }
.strong { font-weight: 600; }
.row { display: grid; grid-template-columns: 8rem 1fr; gap: .8rem; }
.row .label { opacity: .65; } .code { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; }
.text { overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { .bad { color: #ff8a80; } .good { color: #a5d6a7; } }
</style>
</head>
<body>
<h1>{{ headline }}</h1>
<div class="about">{{ about }}</div>
{% for section in sections %}
<section>
<h2>{{ section.title }}</h2>
{% for row in section.rows %}
<div class="row"><span class="label">{{ row.label }}</span>
<span class="text {{ row.tone }}{{ ' code' if row.is_code }}">{{ row.text }}</span></div>
{% endfor %}
</section>
{% endfor %}
{% if page.notes or page.other_runs %}
<section>
{% for note in page.notes %}
<div class="about">note: {{ note }}</div>
{% endfor %}
{% for run in page.other_runs %}
<div class="about">other run, {{ run }}</div>
{% endfor %}
</section>
{% endif %}
</body>
</html>
"""
