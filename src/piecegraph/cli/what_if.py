"""What a step of a language model would cost without some of its parts: measured, and shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from piecegraph.errors import KernelError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from piecegraph.provenance.live import LiveKernels
    from piecegraph.provenance.selection.cost import Cost
    from piecegraph.provenance.trace import Trace

_HEADS = ("Size", "Part", "Kernels", "With (us)", "Without (us)", "Saved (us)", "Saved %", "Spread (us)")
_NUM_WORDS = 2
"""The first columns; the others hold numbers."""


@dataclass(frozen=True, slots=True)
class PartCost:
    """What leaving out a part, or a part of it, saves."""

    glob: str
    """What was asked for."""
    cost: Cost
    is_whole: bool
    """Whether this is all that the glob means."""

    @property
    def part(self) -> str:
        return self.glob if self.is_whole else self.cost.title

    @property
    def percent(self) -> float:
        return 100 * self.cost.saved_us / self.cost.with_us


def require_gpu(model: str, *, is_gpu: bool) -> None:
    """Say at once what would be found out after the model is loaded."""
    if not is_gpu:
        raise KernelError(
            "PG731",
            f"what a part of {model} costs cannot be measured",
            why="without a GPU there are no graphs to leave kernels out of",
            hint="leave --what-if out, or run it on a GPU",
        )


def measure_parts(kernels: LiveKernels, taken: Trace, globs: Sequence[str]) -> list[PartCost]:
    """Time the sizes that ran with and without each part; the whole part first, then what it is made of."""
    recorded = {live.tape.phase for live in kernels.select().kernels}
    ran = [phase for phase in dict.fromkeys(launch.phase for launch in taken.launches) if phase in recorded]
    found: list[PartCost] = []
    for phase in ran:
        for glob in globs:
            # A selection of one group has no sum; that of several comes last.
            *parts, whole = kernels.select(module=glob, size=phase).time()
            found.append(PartCost(glob, whole, is_whole=True))
            found += [PartCost(glob, cost, is_whole=False) for cost in parts]
    return found


def parts_view(parts: Iterable[PartCost]) -> RenderableType:
    """A table for a rich console."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number, head in enumerate(_HEADS):
        drawn.add_column(head, justify="left" if number < _NUM_WORDS else "right", no_wrap=number != 1)
    for part in parts:
        cost = part.cost
        times = (cost.with_us, cost.without_us, cost.saved_us, part.percent, cost.spread_us)
        name = part.part if part.is_whole else f"  {part.part}"
        cells = (cost.phase, name, f"{cost.num_kernels:,}", *(f"{time:,.1f}" for time in times))
        drawn.add_row(*map(Text, cells), style="bold" if part.is_whole else "")
    return drawn


def parts_document(parts: Iterable[PartCost]) -> list[dict[str, Any]]:
    """The same in plain types."""
    return [
        {
            "module": part.glob,
            "size": part.cost.phase,
            "part": part.part,
            "is_whole": part.is_whole,
            "kernels": part.cost.num_kernels,
            "with_us": part.cost.with_us,
            "without_us": part.cost.without_us,
            "saved_us": part.cost.saved_us,
            "saved_percent": part.percent,
            "spread_us": part.cost.spread_us,
        }
        for part in parts
    ]
