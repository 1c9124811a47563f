"""The findings as a table for people and as a document for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from piecegraph.base.version import VERSION
from piecegraph.doctor.finding import Finding, FindingState, counts
from piecegraph.doctor.machine import Machine

SCHEMA_VERSION = 1

STYLES: dict[FindingState, str] = {"ok": "green", "warn": "yellow", "broken": "bold red", "not applicable": "dim"}
SHORT: dict[FindingState, str] = {"ok": "ok", "warn": "warn", "broken": "broken", "not applicable": "n/a"}


def as_table(machine: Machine, findings: tuple[Finding, ...]) -> RenderableType:
    """One row a check, and the counts below. Readable at 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("seen", overflow="fold", ratio=1)
    for finding in findings:
        state = Text(SHORT[finding.state], STYLES[finding.state])
        table.add_row(finding.name, state, _cell(finding))
    return Group(table, Text(), _last_line(machine, findings))


def as_document(machine: Machine, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """Everything seen and found, in plain types."""
    return {
        "schema_version": SCHEMA_VERSION,
        "piecegraph": VERSION,
        "counts": counts(findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "machine": dataclasses.asdict(machine),
    }


def _cell(finding: Finding) -> Text:
    # Text, not markup: what was seen may hold square brackets.
    cell = Text(finding.evidence)
    if finding.state in ("warn", "broken"):
        cell.append("\nbreaks: ", "bold").append(finding.consequence)
        cell.append("\nmend: ", "bold").append(finding.mend)
    elif finding.consequence:
        cell.append(f"\nfor: {finding.consequence}", "dim")
    return cell


def _last_line(machine: Machine, findings: tuple[Finding, ...]) -> Text:
    counted = counts(findings)
    line = Text(", ".join(f"{number} {state}" for state, number in counted.items()) + ".")
    if not machine.gpus:
        line.append("\nNo GPU here. One adds CUDA graphs, kernels traced inside them, and the checks that are n/a now.")
    return line
