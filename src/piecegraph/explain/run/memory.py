"""How many processes the kernel has killed for want of memory: in our own control group, and on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OomKills:
    """So many kills, since the machine or the group was started or between two counts."""

    in_group: int = 0
    """Of processes that share the memory limit of this one; 0 too where the kernel does not say."""
    on_machine: int = 0

    def since(self, before: OomKills) -> OomKills:
        return OomKills(max(0, self.in_group - before.in_group), max(0, self.on_machine - before.on_machine))


def count_oom_kills(root: Path = Path("/")) -> OomKills:
    """As the kernel counts them by now. ``root`` is where its files are mounted."""
    in_group = next((found for file in _group_files(root) if (found := _count(file)) is not None), 0)
    return OomKills(in_group, _count(root / "proc/vmstat") or 0)


def _group_files(root: Path) -> Iterator[Path]:
    """Where the count of the own group may be. Inside of a container the group is mounted as if it were the root."""
    mounted = root / "sys/fs/cgroup"
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            yield mounted / "memory" / path.lstrip("/") / "memory.oom_control"
            yield mounted / "memory/memory.oom_control"
        elif not controllers:  # version 2
            yield mounted / path.lstrip("/") / "memory.events"
            yield mounted / "memory.events"


def _count(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
