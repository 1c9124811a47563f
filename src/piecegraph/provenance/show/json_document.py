"""A table of kernels, what changed between two, and groups, as plain types for JSON. All times are in microseconds."""

from __future__ import annotations

import dataclasses
from typing import Any

from piecegraph.base.plan import SourceLine
from piecegraph.base.version import VERSION
from piecegraph.provenance.groups.group import Group, Groups
from piecegraph.provenance.show.group_wording import sentence
from piecegraph.provenance.tables.changes import Change, Diff
from piecegraph.provenance.tables.rows import Row, Site
from piecegraph.provenance.tables.table import Table

SCHEMA_VERSION = 1
"""Raised when a field is renamed or removed."""


def table_document(table: Table) -> dict[str, Any]:
    """The table and its sites; not every single launch, which can be much."""
    coverage = table.coverage
    return {
        "schema_version": SCHEMA_VERSION,
        "piecegraph": VERSION,
        "kind": "kernel table",
        "device": table.device,
        "notes": list(table.notes),
        "coverage": {
            "launches": coverage.num_launches,
            "total_us": coverage.total,
            "with_line_us": coverage.with_line,
            "with_module_us": coverage.with_module,
            "unattributed_us": coverage.unattributed,
            "by_how_us": dict(coverage.by_how),
            "span_us": coverage.span,
            "busy_us": coverage.busy,
            "idle_us": coverage.idle,
        },
        "rows": [_row(row) for row in table.rows],
    }


def diff_document(diff: Diff) -> dict[str, Any]:
    """The changes, the largest first."""
    return {
        "schema_version": SCHEMA_VERSION,
        "piecegraph": VERSION,
        "kind": "kernel diff",
        "device": diff.device,
        "before_us": diff.before_total,
        "after_us": diff.after_total,
        "equal_rows": diff.num_equal,
        "changes": [_change(change) for change in diff.changes],
    }


def groups_document(groups: Groups) -> list[dict[str, Any]]:
    """Every group, with its claim in words."""
    return [_group(group) for group in groups.groups]


def _row(row: Row) -> dict[str, Any]:
    return {
        "kernel": row.kernel,
        "full_names": list(dict.fromkeys(launch.name for launch in row.instances)),
        **_place(row),
        "how": row.how,
        "groups": list(row.groups),
        "percent": row.share,
        "total_us": row.times.total,
        "instances": row.times.num_instances,
        "avg_us": row.times.average,
        "med_us": row.times.median,
        "min_us": row.times.shortest,
        "max_us": row.times.longest,
        "stddev_us": row.times.deviation,
        "sites": [_site(site) for site in row.sites],
    }


def _place(row: Row) -> dict[str, Any]:
    return {"call": row.call, "module": row.module, "line": _line(row.line), "phase": row.phase}


def _site(site: Site) -> dict[str, Any]:
    origins = [
        {"op": origin.op, "module": origin.module, "stack": [_line(line) for line in origin.stack]}
        for origin in site.origins
    ]
    return {"module": site.module, "origins": origins, "total_us": site.total, "instances": len(site.instances)}


def _change(change: Change) -> dict[str, Any]:
    return {
        "state": change.state,
        "kernel": change.row.kernel,
        "kernel_before": change.before[0].kernel if change.before else None,
        **_place(change.row),
        "delta_us": change.delta,
        "before_us": change.before_total,
        "after_us": change.after_total,
        "delta_instances": change.delta_instances,
        "before_instances": change.before_instances,
        "after_instances": change.after_instances,
    }


def _group(group: Group) -> dict[str, Any]:
    document = dataclasses.asdict(group)
    for member, values in zip(group.members, document["members"], strict=True):
        values["confidence"] = member.confidence
    return {**document, "op": group.op, "support": group.support, "bound": group.bound, "sentence": sentence(group, "")}


def _line(line: SourceLine | None) -> dict[str, Any] | None:
    return dataclasses.asdict(line) if line else None
