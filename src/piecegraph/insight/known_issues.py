"""Failures that others met before: rules that need both the exception and a frame to match."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from piecegraph.insight.failure import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIssue:
    """One known issue."""

    id: str
    title: str
    meaning: str
    fix: str
    fixed_in: str
    source: str
    exception: str
    frame: str

    @property
    def rule(self) -> str:
        return f"exception matches /{self.exception}/ and a frame matches /{self.frame}/"


def load_catalogue() -> tuple[KnownIssue, ...]:
    """Every known issue."""
    return (
        KnownIssue(
            id="thunder-stream-output",
            title="thunder sends a subgraph that returns a CUDA stream to Inductor",
            meaning="make_fx cannot trace a subgraph whose output is a torch.cuda.Stream.",
            fix="use a lightning-thunder that runs such a subgraph eagerly",
            fixed_in="lightning-thunder main, 2025-12-01; tags up to 0.2.6 lack it",
            source="Lightning-AI/lightning-thunder#2332, #2743, fixed by #2761",
            exception=r"argument of type: <class 'torch\.cuda\.streams\.Stream'>",
            frame=r"thunder/dynamo/",
        ),
    )


def log_line_matcher(catalogue: Iterable[KnownIssue]) -> Callable[[str], tuple[KnownIssue, ...]]:
    """A function that gives the entries which know their cause by a line."""
    return lambda line: ()


def describe(issue: KnownIssue) -> str:
    """An entry as a paragraph of a list."""
    return f"{issue.id}: {issue.title}\n  rule     {issue.rule}"


def match_known_issues(
    failure: Failure, catalogue: Iterable[KnownIssue], lines: Iterable[str] = ()
) -> tuple[KnownIssue, ...]:
    """Those whose rule holds for a failure."""
    texts = "\n".join(f"{raised.type}: {raised.message}" for raised in failure.chain)
    files = [frame.file for raised in failure.chain for frame in raised.frames]
    return tuple(
        issue
        for issue in catalogue
        if re.search(issue.exception, texts) and any(re.search(issue.frame, file) for file in files)
    )
