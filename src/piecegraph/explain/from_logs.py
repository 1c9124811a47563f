"""Logs in, a page out."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast

from piecegraph.base.progress import Bar, Progress
from piecegraph.errors import InputError
from piecegraph.explain.catalogue import load_catalogue
from piecegraph.explain.evidence import Evidence
from piecegraph.explain.known_issues import KnownIssue, log_line_matcher, watched_words
from piecegraph.explain.log.scan import Scanner
from piecegraph.explain.log.source import STANDARD_INPUT, Log, name_logs
from piecegraph.explain.page import Page, compose
from piecegraph.explain.root_cause import triage
from piecegraph.explain.runs import join_runs

_MIB = 1 << 20


def explain_logs(
    paths: Sequence[str | os.PathLike[str]],
    *,
    known: Iterable[Path] = (),
    progress: bool | Literal["auto"] = "auto",
) -> Page:
    """Explain a failing run from its logs.

    Args:
        paths: one log, or one for each process of a run; ``-`` is standard input, gzip is unpacked.
        known: files of known issues, beside those that come with piecegraph.
        progress: whether to show a bar on standard error; ``auto`` shows it on a terminal.

    Raises:
        InputError: a log cannot be read, is no text, or all of them are empty.
        ConfigError: a file of known issues is malformed.
    """
    catalogue = load_catalogue(known)
    return _explain([Log(os.fspath(path)) for path in paths], catalogue, progress=progress)


def explain_stream(stream: io.IOBase, catalogue: Sequence[KnownIssue]) -> Page:
    """Explain a failing run from what it prints, read until it ends. Raises what :func:`explain_logs` does."""
    return _explain([_StreamLog(stream=stream)], catalogue)


def explain_text(text: str, catalogue: Sequence[KnownIssue]) -> Page:
    """Explain a failing run from the text of its log."""
    return explain_stream(io.BytesIO(text.encode("utf-8", "replace")), catalogue)


@dataclass(slots=True, kw_only=True)
class _StreamLog(Log):
    """A log that is no file."""

    path: str = STANDARD_INPUT
    stream: io.IOBase

    def _open(self) -> IO[bytes]:
        return cast("IO[bytes]", self.stream)


def _explain(logs: Sequence[Log], catalogue: Sequence[KnownIssue], *, progress: bool | Literal["auto"] = False) -> Page:
    runs = join_runs(_read_evidence(logs, catalogue, progress=progress))
    # Of several runs in one log, the last that failed is the one somebody is waiting for.
    failed = [run for run in runs if (found := triage(run)).root is not None and not found.is_stopped]
    chosen = failed[-1] if failed else runs[-1]
    return compose(chosen, catalogue, other_runs=[run for run in runs if run is not chosen])


def _read_evidence(
    logs: Sequence[Log], catalogue: Sequence[KnownIssue], *, progress: bool | Literal["auto"]
) -> tuple[Evidence, ...]:
    """What the logs prove, a value for each run."""
    names = name_logs(list(logs))
    scanner = Scanner(
        is_one_log=len(logs) == 1,
        is_known_issue=log_line_matcher(catalogue),
        known_issue_words=watched_words(catalogue),
    )
    total = sum(log.num_bytes for log in logs) // _MIB
    with Progress(progress).bar("explain", total) as bar:
        meter = _Meter(bar, total, scanner)
        for log in logs:
            scanner.begin_log(log.name, names[log.path])
            for lines in log.blocks(meter.show):
                scanner.feed(lines)
            meter.end_log(log)
    empty = [log for log in logs if not log.num_lines]
    if len(empty) == len(logs):
        raise InputError(
            "PG602", f"{', '.join(log.name for log in empty)}: nothing to explain", why="the input is empty",
            hint="give the output of the run, standard error included",
        )  # fmt: skip
    scanner.add_notes([*(f"{log.name} is empty" for log in empty), *(note for log in logs for note in log.notes)])
    return scanner.finish()


class _Meter:
    """Moves the bar with the bytes that were read."""

    def __init__(self, bar: Bar, total: int, scanner: Scanner) -> None:
        self._bar, self._total, self._scanner = bar, total, scanner
        self._num_before = self._num_shown = 0

    def show(self, position: int) -> None:
        """The present log was read up to here."""
        while self._num_shown < min((self._num_before + position) // _MIB, self._total):
            self._num_shown += 1
            self._bar.advance(f"MiB, {self._scanner.num_failures} tracebacks")

    def end_log(self, log: Log) -> None:
        self._num_before += log.num_bytes
