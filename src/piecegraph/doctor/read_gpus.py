"""The driver and its GPUs, from the driver's own tool. Read only: nothing is set."""

from __future__ import annotations

import re
from pathlib import Path

from piecegraph.doctor.commands import Shell
from piecegraph.doctor.machine import Gpu

FIELDS = (
    "name",
    "compute_cap",
    "memory.total",
    "persistence_mode",
    "clocks.sm",
    "clocks.max.sm",
    "compute_mode",
    "driver_version",
)
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def read_gpus(shell: Shell) -> tuple[tuple[Gpu, ...], str, str]:
    """The GPUs, the driver's version, and why none were listed."""
    tool = shell.find("nvidia-smi")
    if not tool:
        return (), _driver_of_kernel_module(), "nvidia-smi is not installed"
    answer = shell.run([tool, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"])
    if answer.trouble:
        return (), _driver_of_kernel_module(), f"nvidia-smi {answer.trouble}"
    gpus, driver = parse_gpus(answer.out)
    return gpus, driver or _driver_of_kernel_module(), "" if gpus else "nvidia-smi lists no GPU"


def parse_gpus(text: str) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs and the driver's version from the tool's table. Lines that are not of the table are left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(FIELDS)]
    return tuple(map(_gpu, rows)), rows[0][-1] if rows else ""


def _gpu(row: list[str]) -> Gpu:
    name, capability, memory_mib, persistence, clock, max_clock, compute_mode, _ = row
    memory = _number(memory_mib)
    return Gpu(
        name=name,
        architecture=int(capability.replace(".", "")) if re.fullmatch(r"\d+\.\d", capability) else None,
        memory_bytes=memory * 2**20 if memory is not None else None,
        persistence={"Enabled": True, "Disabled": False}.get(persistence),
        clock_mhz=_number(clock),
        max_clock_mhz=_number(max_clock),
        compute_mode=compute_mode if compute_mode[:1].isalpha() else "",
    )


def _number(cell: str) -> int | None:
    # "[N/A]", "[Not Supported]", "[Unknown Error]" stand where a number cannot be read.
    return int(cell) if cell.isdecimal() else None


def _driver_of_kernel_module() -> str:
    try:
        found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", DRIVER_FILE.read_text())
    except OSError:
        return ""
    return found[1] if found else ""
