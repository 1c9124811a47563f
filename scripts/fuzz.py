"""Run random programs plain and through ``piecegraph.compile`` for some minutes; whatever differs becomes a script.

Programs are drawn in rounds, each from a seed of its own, by processes that may crash: the same seed gives the same
programs. It needs hypothesis, and nothing else of the development packages.

    python scripts/fuzz.py --minutes 60 --jobs 2
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fuzzing import judge
from tests.fuzzing.campaign import Fault, Summary, fuzz
from tests.fuzzing.programs import GROUPS

_PROGRAMS_A_ROUND = 20
_SHRINK_SECONDS = 60.0


@click.command()
@click.option("--minutes", default=60.0, show_default=True, help="How long.")
@click.option("--seed", default=0, show_default=True, help="Of the first round; each round takes the next.")
@click.option("--rounds", type=int, help=f"How many rounds of {_PROGRAMS_A_ROUND} programs at most. Default: no limit.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--jobs", default=1, show_default=True, help="Rounds that run together.")
@click.option("--without", multiple=True, type=click.Choice(GROUPS), help="Leave out lines of this kind.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("fuzz-faults"), show_default=True)
def main(
    minutes: float, seed: int, rounds: int | None, device: str, jobs: int, without: Sequence[str], out: Path
) -> None:
    """Look for programs that do something else when they are compiled. Ends with 1 if there are any."""
    end = time.monotonic() + 60 * minutes
    last = float("inf") if rounds is None else seed + rounds
    workers = [_Worker(device, without, end) for _ in range(jobs)]
    total, crashes, next_seed = Summary(), 0, seed
    click.echo(f"seed {seed}, {device}, {minutes:g} minutes, {jobs} at a time")
    while any(worker.seed is not None for worker in workers) or (time.monotonic() < end and next_seed < last):
        for worker in workers:
            if worker.seed is None and time.monotonic() < end and next_seed < last:
                worker.start(next_seed)
                next_seed += 1
        for worker in [w for w in workers if w.seed is not None and w.is_done()]:
            number, summary = worker.take()
            if summary is None:
                crashes += 1
                click.echo(f"seed {number}: the process crashed; again: --seed {number} --rounds 1")
                continue
            _write(summary.faults, number, out)
            total.add(summary)
            if number % 5 == 0 or summary.faults:
                click.echo(f"seed {number}: {_in_short(total)}, {max(0.0, end - time.monotonic()):.0f} s left")
        time.sleep(0.05)
    _tell(total, crashes)
    sys.exit(1 if total.titles or crashes else 0)


class _Worker:
    """A process that runs rounds, one after the other, and is replaced if it crashes."""

    def __init__(self, device: str, without: Sequence[str], end: float) -> None:
        self._arguments = (device, tuple(without), end)
        self._process: Any = None
        self._pipe: Any = None
        self.seed: int | None = None
        """Of the round under way."""

    def start(self, seed: int) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_work, args=(theirs, *self._arguments), daemon=True)
            self._process.start()
            theirs.close()
        self.seed = seed
        self._pipe.send(seed)

    def is_done(self) -> bool:
        return self._pipe.poll() or not self._process.is_alive()

    def take(self) -> tuple[int, Summary | None]:
        """Seed and outcome of the round; None if the process crashed."""
        assert self.seed is not None
        seed, self.seed = self.seed, None
        try:
            return seed, self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            self._process = None
            return seed, None


def _work(pipe: Connection, device: str, without: Sequence[str], end: float) -> None:
    judge.DEVICE = device
    known = Summary()
    while (seed := _next(pipe)) is not None:
        summary = fuzz(
            seed,
            _PROGRAMS_A_ROUND,
            without=without,
            max_seconds=end - time.monotonic(),
            shrink_seconds=_SHRINK_SECONDS,
            known=set(known.titles),
        )
        known.titles.update(summary.titles)
        pipe.send(summary)


def _next(pipe: Connection) -> int | None:
    """The next seed; None when nobody asks for more."""
    try:
        seed: int = pipe.recv()
    except EOFError:
        return None
    return seed


def _write(faults: Sequence[Fault], seed: int, folder: Path) -> None:
    for number, fault in enumerate(faults):
        folder.mkdir(parents=True, exist_ok=True)
        name = "".join(c if c.isalnum() else "_" for c in fault.title)
        (folder / f"{name}_{seed}_{number}.py").write_text(fault.script)


def _in_short(total: Summary) -> str:
    counts = f"{total.num_programs} programs, {total.num_calls} calls, {total.num_warm} kept plans"
    return f"{counts}, {sum(total.titles.values())} faults"


def _tell(total: Summary, crashes: int) -> None:
    click.echo(f"\n{_in_short(total)}, {crashes} crashes")
    click.echo("verdicts: " + _counts(total.verdicts))
    click.echo("refused: " + _counts(total.refused))
    click.echo("calls that ran without graphs or eagerly: " + _counts(total.events))
    for title, count in total.titles.most_common():
        click.echo(f"fault, {count} times: {title}")


def _counts(counter: Any) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"


if __name__ == "__main__":
    main()
