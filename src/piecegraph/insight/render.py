"""A page in, text out."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from piecegraph.insight.page import Page


def to_text(page: Page) -> str:
    """A page for a terminal."""
    return "\n".join(_lines(page)) + "\n"


def to_markdown(page: Page) -> str:
    """A page as Markdown."""
    return f"```\n{to_text(page)}```\n"


def to_html(page: Page) -> str:
    """A page as one HTML file."""
    return f"<!doctype html><meta charset=utf-8><pre>{html.escape(to_text(page))}</pre>\n"


def to_dict(page: Page) -> dict[str, Any]:
    """A page for programs."""
    return asdict(page.evidence)


def _lines(page: Page) -> Iterator[str]:
    for i, failure in enumerate(page.evidence.failures):
        who = ", ".join(process.label or f"pid {process.pid}" for process in failure.processes)
        yield f"{'ROOT CAUSE' if i == 0 else 'THEN'} ({failure.kind}, {failure.count} x): {who}"
        for raised in failure.chain:
            yield f"  {raised.link and raised.link + ': '}{raised.type}: {raised.message}"
            yield from (f"    {frame.file}:{frame.line} {frame.function}" for frame in raised.frames)
    yield from (f"PHASE {milestone.phase} {milestone.state}" for milestone in page.evidence.milestones)
