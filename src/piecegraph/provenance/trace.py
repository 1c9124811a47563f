"""What a user calls: ``with piecegraph.trace() as t``, and what it gives."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from piecegraph.base.environment import describe_environment
from piecegraph.base.text import to_json
from piecegraph.errors import InputError, KernelError, SelectionError
from piecegraph.provenance.groups.mining import mine
from piecegraph.provenance.launch import KernelProfile, Launch
from piecegraph.provenance.profile.read import read_profile
from piecegraph.provenance.profile.take import profiled
from piecegraph.provenance.show.json_document import groups_document, table_document
from piecegraph.provenance.show.markdown import groups_markdown, table_markdown
from piecegraph.provenance.show.nsys_csv import table_csv
from piecegraph.provenance.show.perfetto import write_perfetto
from piecegraph.provenance.show.printed import PrintedDiff, PrintedGroups, PrintedTable, printed
from piecegraph.provenance.show.report import trace_report
from piecegraph.provenance.show.text import table_text
from piecegraph.provenance.tables.changes import diff
from piecegraph.provenance.tables.table import Table, tabulate
from piecegraph.report.content import Report
from piecegraph.report.page import to_html, write_report

FORMATS = (".txt", ".csv", ".json", ".md", ".html", ".trace.json", ".trace.json.gz")
"""What a trace can be saved as: a table, a document, a page, a report, or a trace for Perfetto."""


class Trace:
    """What ran while a trace was taken, and which line launched it."""

    def __init__(self) -> None:
        self._source: _Source | None = None
        self._groups: dict[int, PrintedGroups] = {}
        """By the support they need."""

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Everything that ran, in the order of its launch."""
        return self._taken.profile.launches

    @property
    def notes(self) -> tuple[str, ...]:
        """What was lost, and what could not be attributed and why."""
        return self._taken.profile.notes

    def table(
        self,
        *,
        sort: str = "total",
        module: str | None = None,
        op: str | None = None,
        kernel: str | None = None,
        line: str | None = None,
    ) -> PrintedTable:
        """Which kernel, launched by which line, for how long; print it, or look into its rows.

        Args:
            sort: a column: ``total``, ``instances``, ``avg``, ``kernel``, ``module``, ``line``, ...
            module: only these, and what is inside them: ``layers.*.mlp``.
            op: only these calls: ``aten::mm``, ``aten.*``.
            kernel: only these kernels: ``nvjet*``.
            line: only what this line launches: ``model.py:12`` or ``model.py``.
        """
        table = printed(PrintedTable, tabulate(self._taken.profile, self.groups().group_of_instance))
        if module is not None or op is not None or kernel is not None or line is not None:
            table = table.filter(module=module, op=op, kernel=kernel, line=line)
        return table.sort(sort)

    def groups(self, *, min_support: int = 5) -> PrintedGroups:
        """Kernels that always come from one call, with the call that owns them: the place to intercept them.

        Args:
            min_support: how many calls a claim needs.
        """
        if min_support not in self._groups:
            self._groups[min_support] = printed(PrintedGroups, mine(self._taken.profile, min_support=min_support))
        return self._groups[min_support]

    def diff(self, after: Trace) -> PrintedDiff:
        """What has changed from this trace to a later one."""
        return printed(PrintedDiff, diff(self.table(), after.table()))

    def save(self, path: str | Path) -> Path:
        """Write the trace; the name's ending says how: ``.txt``, ``.csv`` (with the columns of ``nsys stats`` first),
        ``.json``, ``.md``, ``.html`` (a page to look into), or ``.trace.json`` and ``.trace.json.gz`` for Perfetto.
        """
        path = Path(path)
        ending = ending_of(path)
        _ = self._taken  # before a file is made
        try:
            with _open(path) as file:
                if ".trace." in ending:
                    write_perfetto(self._taken.path, self._taken.profile, self.groups().group_of_instance, file)
                else:
                    file.write(self._text(ending))
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise InputError("PG601", f"{path} cannot be written", why=why, hint="choose another path") from error
        return path

    def document(self, table: Table | None = None) -> dict[str, Any]:
        """Table and groups in plain types, for programs.

        Args:
            table: one of this trace, sorted or filtered; the whole by default.
        """
        shown = self.table() if table is None else table
        return {**table_document(shown), "groups": groups_document(self.groups())}

    def as_report(self, title: str = "Which line launched which kernel") -> Report:
        """What a page to share says of it."""
        return trace_report(self._taken.profile, self.table(), self.groups(), describe_environment(), title)

    def _text(self, ending: str) -> str:
        if ending == ".json":
            return to_json(self.document()) + "\n"
        if ending == ".html":
            return to_html(self.as_report())
        if ending == ".csv":
            return table_csv(self.table())
        if ending == ".md":
            page = table_markdown(self.table(), describe_environment())
            return page + "\n" + groups_markdown(self.groups())
        return f"{table_text(self.table())}\n{self.groups()}\n"

    @property
    def _taken(self) -> _Source:
        if self._source is None:
            raise KernelError(
                "PG734", "there is no trace yet", why="it is still being taken", hint="look at it behind the with block"
            )
        return self._source


@dataclass(frozen=True)
class _Source:
    """Where a trace comes from."""

    profile: KernelProfile
    path: Path


@contextlib.contextmanager
def trace() -> Iterator[Trace]:
    """Find out which line of Python launches every kernel that runs inside.

    Eager code, code that torch.compile compiled, and graphs of piecegraph are all attributed; graphs down to the kernel
    if they were recorded inside, or with ``options={"provenance": True}``. What runs inside is slowed down, what the
    GPU does is not. Without a GPU, the ops of the CPU take the place of kernels. Watched is the thread that takes the
    trace; what others launch is seen on a GPU only, and not attributed to ops. One trace is taken at a time.

    Example:
        >>> import torch
        >>> with trace() as t:
        ...     _ = torch.ones(8).cumsum(0)
        >>> t.table(op="aten::cumsum").rows[0].call
        'aten::cumsum'
    """
    taken = Trace()
    folder = tempfile.mkdtemp(prefix="piecegraph-trace-")
    weakref.finalize(taken, shutil.rmtree, folder, ignore_errors=True)
    with profiled(Path(folder)) as marked:
        yield taken
    taken._source = _Source(marked.read(), marked.path)


def report_with(report: Report, trace: Trace | None, path: str | os.PathLike[str]) -> Path:
    """Write how something runs, and what a trace has seen of it, on one page; what the trace tells comes first."""
    if trace is not None:
        report = replace(trace.as_report(), title=report.title).beside(report)
    return write_report(report, Path(path))


def open_trace(path: str | Path) -> Trace:
    """A trace that torch.profiler wrote, of any program, or one that was saved as ``.trace.json``."""
    taken = Trace()
    taken._source = _Source(read_profile(path), Path(path))
    return taken


def ending_of(path: Path) -> str:
    """Which of the formats a file's name asks for."""
    ending = next((end for end in sorted(FORMATS, key=len, reverse=True) if path.name.endswith(end)), None)
    if ending is None:
        raise SelectionError("PG714", f"{path.name} has no known ending", hint=f"use one of {', '.join(FORMATS)}")
    return ending


def _open(path: Path) -> TextIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "wt", encoding="utf-8")  # type: ignore[return-value]
    return path.open("w", encoding="utf-8")
