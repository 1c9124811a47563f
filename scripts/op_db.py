"""Run every op of PyTorch's own operator database through ``compile``, and write down which of them are right.

Ops are judged (``op_check.py``) in processes of their own, with a limit on time: a crash or a hang is a verdict too,
and the next op gets a new process. On a CPU graphs are simulated.

    python scripts/op_db.py --device cuda --frontend breakable --jobs 8 -o ops.json
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import click

from piecegraph.base.progress import Progress

Verdict = dict[str, Any]


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where ops run.")
@click.option("--frontend", type=click.Choice(["trace", "breakable"]), default="trace", show_default=True)
@click.option("--samples", default=8, show_default=True, help="Samples of an op, of different dtypes and kinds.")
@click.option("--only", default="", help="Ops to run, with commas between them. Default: all.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option("--timeout", default=120.0, show_default=True, help="Seconds for one op.")
@click.option("-o", "output", type=click.Path(path_type=Path), help="Write all verdicts here, as JSON.")
def main(device: str, frontend: str, samples: int, only: str, jobs: int, timeout: float, output: Path | None) -> None:
    """Compare every op with itself; exits with 1 if one is wrong or crashes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    known = importlib.import_module("op_check").OPS
    names = [name for name in only.split(",") if name] or sorted(known)
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"the database has no op called {', '.join(unknown)}")
    verdicts: list[Verdict] = []
    with Progress("auto").bar("ops", len(names)) as bar:
        for verdict in _judge(names, (device, frontend, samples), jobs, timeout):
            verdicts.append(verdict)
            bar.advance(f"{verdict['op']}: {verdict['verdict']}")
            if verdict["verdict"] in ("wrong", "crashed"):
                click.echo(_line(verdict))
    if output is not None:
        about = {"torch": importlib.import_module("torch").__version__, "device": device, "frontend": frontend}
        output.write_text(json.dumps({**about, "samples": samples, "ops": verdicts}, indent=1))
    _print_table(verdicts)
    sys.exit(any(verdict["verdict"] in ("wrong", "crashed") for verdict in verdicts))


def _line(verdict: Verdict) -> str:
    return f"{verdict['op']:<36} {verdict['verdict']:<9} {verdict['sample']}: {verdict['reason'][:300]}"


def _print_table(verdicts: Sequence[Verdict]) -> None:
    counts = Counter((verdict["verdict"], verdict["code"]) for verdict in verdicts)
    click.echo(f"{'verdict':<12}{'code':<14}{'ops':>5}")
    for (verdict, code), number in sorted(counts.items()):
        click.echo(f"{verdict:<12}{code:<14}{number:>5}")
    loose = [verdict["op"] for verdict in verdicts if verdict["is_structure_only"]]
    click.echo(f"compared without their values, which differ from run to run: {', '.join(loose) or 'none'}")


@dataclass
class _Worker:
    """A process that judges one op after the other."""

    process: Any
    pipe: Connection
    op: str = ""
    """What it is at; empty until its imports are done."""
    since: float = field(default_factory=time.monotonic)

    @staticmethod
    def start(settings: tuple[str, str, int]) -> _Worker:
        ours, theirs = multiprocessing.Pipe()
        # A forked process need not import torch again, but cannot use CUDA if its parent has looked for it.
        way = multiprocessing.get_context("fork" if settings[0] == "cpu" else "spawn")
        process = way.Process(target=_work, args=(theirs, *settings), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def ask(self, op: str) -> None:
        self.op, self.since = op, time.monotonic()
        self.pipe.send(op)

    def answer(self) -> Verdict:
        """What has come: the verdict, or that the process ended without one. The first answer is empty."""
        try:
            verdict: Verdict = self.pipe.recv()
        except EOFError:
            self.process.join()
            verdict = self.failed(f"the process ended with exit code {self.process.exitcode}")
        return verdict | {"seconds": round(time.monotonic() - self.since, 1)}

    def failed(self, reason: str) -> Verdict:
        from op_check import OpVerdict

        if not self.op:
            raise click.ClickException(f"no op can be judged: {reason}")
        return asdict(OpVerdict(op=self.op, verdict="crashed", reason=reason))

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def _judge(names: Sequence[str], settings: tuple[str, str, int], jobs: int, timeout: float) -> Iterator[Verdict]:
    """The verdict on each op, as they come."""
    waiting: list[str] = list(names)
    workers: list[_Worker] = []
    while waiting or workers:
        workers += [_Worker.start(settings) for _ in range(min(jobs, len(waiting)) - len(workers))]
        ready = wait([worker.pipe for worker in workers], timeout=1.0)
        for worker in list(workers):
            if worker.pipe in ready:
                answer = worker.answer()
            elif time.monotonic() - worker.since > timeout:
                answer = worker.failed(f"no end after {timeout:.0f} s") | {"seconds": timeout}
            else:
                continue
            if worker.op:
                yield answer
            if waiting and answer.get("verdict") != "crashed":
                worker.ask(waiting.pop(0))
            else:  # what a crash leaves behind, say on a GPU, is not for the next op
                worker.stop()
                workers.remove(worker)


def _work(pipe: Connection, device: str, frontend: str, samples: int) -> None:
    """In a process of its own."""
    from op_check import OPS, check_op

    pipe.send({})
    while True:
        op = OPS[pipe.recv()]
        pipe.send(asdict(check_op(op, device=device, frontend=frontend, num_samples=samples)))


if __name__ == "__main__":
    main()
