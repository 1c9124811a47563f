"""A table of kernels as CSV. The first columns are those of nsys' ``cuda_gpu_kern_sum``: scripts for it still work."""

from __future__ import annotations

import csv
import io

from piecegraph.provenance.tables.rows import Row
from piecegraph.provenance.tables.table import Table

NSYS = (
    "Time (%)",
    "Total Time (ns)",
    "Instances",
    "Avg (ns)",
    "Med (ns)",
    "Min (ns)",
    "Max (ns)",
    "StdDev (ns)",
    "Name",
)
OURS = ("Call", "Origins", "Module", "Python Line", "Phase", "How", "Group", "Kind", "Full Names")


def table_csv(table: Table) -> str:
    """The table as CSV; lines end in ``\\n``."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(NSYS + OURS)
    writer.writerows(_cells(row) for row in table.rows)
    return file.getvalue()


def _cells(row: Row) -> list[object]:
    times = row.times
    whole = [round(1000 * time) for time in (times.total, times.shortest, times.longest)]
    average, median, deviation = (f"{1000 * time:.1f}" for time in (times.average, times.median, times.deviation))
    line = f"{row.line.file}:{row.line.line}" if row.line else ""
    names = dict.fromkeys(launch.name for launch in row.instances)
    return [
        *(
            f"{row.share:.1f}",
            whole[0],
            times.num_instances,
            average,
            median,
            whole[1],
            whole[2],
            deviation,
            row.kernel,
        ),
        *(row.call, row.num_more_origins + 1 if row.sites[0].origins else 0, row.module, line, row.phase, row.how),
        *(",".join(row.groups), row.instances[0].kind, " | ".join(names)),
    ]
