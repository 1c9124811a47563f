"""The sweep: modes are opened, compared with eager, and take turns at being timed. A config in, a result out.

The one invariant: nothing is timed that was not compared before, in the same cell.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from piecegraph.base.extras import require_extra
from piecegraph.base.plan import Decision
from piecegraph.base.progress import Bar, Progress
from piecegraph.bench.config import WARM_UPS, BenchConfig, Cell
from piecegraph.bench.floors import floor, kernels_of
from piecegraph.bench.machine import bandwidth_bytes_s, fingerprint, now
from piecegraph.bench.ranks import all_say
from piecegraph.bench.result import BenchResult, Mode, Phase, Row, Startup, Timing, Verdict
from piecegraph.bench.runner import Runner, Subject, UnavailableError
from piecegraph.bench.timing import collection_off, wait
from piecegraph.errors import PiecegraphError


def run(config: BenchConfig, decisions: tuple[Decision, ...], progress: Progress) -> BenchResult:
    """Measure everything that a config asks for.

    Raises:
        PiecegraphError: the model cannot be loaded, or is not for such sizes. A mode that fails is a row that says so.
    """
    if config.device.type == "cuda":
        torch.cuda.set_device(config.device)  # what is waited for, and whose memory is read
    with progress.bar("load", 1):
        subject = _subject(config)
    groups = subject.groups
    num_rounds = len(config.cells) * len(subject.phases) * (WARM_UPS + config.repeats)
    num_compared = len(config.modes) * (1 + len(config.cells))
    with contextlib.closing(subject), progress.bar("bench", num_compared + len(groups) * num_rounds) as bar:
        sweep = _Sweep(subject, config, bar, bandwidth_bytes_s(config.device))
        rows = [row for modes in groups for row in sweep.rows(modes)]
    places = [(cell, phase) for cell in config.cells for phase in subject.phases]

    def place(row: Row) -> tuple[int, int]:
        cell = Cell(row.batch_size, row.input_len, row.output_len)
        return places.index((cell, row.phase)), config.modes.index(row.mode)

    return BenchResult(
        created=now(),
        model=config.model,
        machine=fingerprint(config.tensor_parallel_size * config.num_replicas),
        config=(*decisions, _turns(groups)),
        startup=tuple(sweep.startup),
        rows=tuple(sorted(rows, key=place)),
    )


def _subject(config: BenchConfig) -> Subject:
    if config.is_module:
        from piecegraph.bench.modules import AnyModule

        return AnyModule(config)
    require_extra("llm", ["transformers"], "language models need it")
    from piecegraph.bench.language import LanguageModel

    return LanguageModel(config)


def _turns(groups: Sequence[Sequence[Mode]]) -> Decision:
    if len(groups) == 1:
        return Decision("turns", "round by round", "what else the machine does meets all modes")
    return Decision("turns", "mode by mode", "the weights of all modes at once would not fit into memory")


@dataclass
class _Contender:
    """A mode in a group."""

    mode: Mode
    runner: Runner | None = None
    absent: Verdict | None = None
    """Why there is no runner."""
    held_bytes: int = 0
    """Of the device, since it was opened."""
    verdicts: dict[Phase, Verdict] = field(default_factory=dict)
    """In the cell at hand."""


class _Sweep:
    """Goes through all cells with a group of modes."""

    def __init__(self, subject: Subject, config: BenchConfig, bar: Bar, bytes_s: float | None) -> None:
        self._subject, self._config, self._bar, self._bytes_s = subject, config, bar, bytes_s
        self.startup: list[Startup] = []

    def rows(self, modes: Sequence[Mode]) -> list[Row]:
        """Those of all cells, for modes that are open at once."""
        contenders = [self._open(mode) for mode in modes]
        try:
            return [row for cell in self._config.cells for row in self._cell(cell, contenders)]
        finally:
            for each in contenders:
                if each.runner is not None:
                    self.startup.append(Startup(mode=each.mode, stages_s=dict(each.runner.stages_s)))
                    each.runner.close()
                    each.runner = None
            _tidy()

    def _open(self, mode: Mode) -> _Contender:
        found = _Contender(mode)
        with self._holding(found), _told(found.verdicts, ("forward",)):
            found.runner = self._subject.open(mode)
            found.held_bytes = found.runner.weight_bytes
        found.absent = found.verdicts.pop("forward", None)
        self._bar.advance(mode)
        return found

    def _cell(self, cell: Cell, contenders: Sequence[_Contender]) -> Iterator[Row]:
        for each in contenders:
            self._compare(cell, each)
            self._bar.advance(f"{each.mode}, {cell}")
        for phase in self._subject.phases:
            yield from self._phase(cell, phase, contenders)

    def _compare(self, cell: Cell, contender: _Contender) -> None:
        contender.verdicts = {}
        if contender.runner is None:
            assert contender.absent is not None, "what was not opened says why"
            contender.verdicts = dict.fromkeys(self._subject.phases, contender.absent)
            return
        with self._holding(contender), _told(contender.verdicts, self._subject.phases):
            contender.verdicts |= self._subject.judge(contender.runner, cell)
        for phase, verdict in contender.verdicts.items():
            if not all_say(verdict.is_timed) and verdict.is_timed:
                contender.verdicts[phase] = Verdict(state="differs", reason="the outputs of another rank differ")

    def _phase(self, cell: Cell, phase: Phase, contenders: Sequence[_Contender]) -> Iterator[Row]:
        samplers = [_Sampler(each, phase) for each in contenders if each.verdicts[phase].is_timed]
        for sampler in samplers:
            sampler.probe(cell, self._subject)
        with collection_off():
            for number in range(WARM_UPS + self._config.repeats):
                inputs = self._subject.inputs(cell, number + 2)  # other than those that were compared and probed
                first = number % max(1, len(samplers))
                for sampler in (*samplers[first:], *samplers[:first]):
                    sampler.take(inputs, counts=number >= WARM_UPS)
                self._bar.advance(f"{phase}, {cell}")
        taken = {sampler.contender.mode: sampler for sampler in samplers}
        for each in contenders:
            yield self._row(cell, phase, each, taken.get(each.mode))

    def _row(self, cell: Cell, phase: Phase, contender: _Contender, sampler: _Sampler | None) -> Row:
        verdict, runner = contender.verdicts[phase], contender.runner
        untimed = Row(
            mode=contender.mode,
            phase=phase,
            batch_size=cell.batch_size,
            input_len=cell.input_len,
            output_len=cell.output_len,
            ran_as="" if runner is None else runner.ran_as,
            verdict=verdict,
        )
        if sampler is None or runner is None or not verdict.is_timed:
            return untimed
        timing = Timing.of([seconds * 1e3 for seconds in sampler.seconds])
        counts = runner.counts(phase).since(sampler.counts)
        read_bytes = self._subject.read_bytes(cell, phase)
        return replace(
            untimed,
            timing=timing,
            tokens_s=self._subject.num_tokens(cell, phase) / timing.median_ms * 1e3,
            coverage=counts.coverage,
            padding=counts.padding,
            memory_bytes=sampler.memory_bytes,
            floor=floor(timing.median_ms, sampler.kernels_ms, read_bytes, self._bytes_s),
            fallbacks=runner.fallbacks,
        )

    @contextlib.contextmanager
    def _holding(self, contender: _Contender) -> Iterator[None]:
        """What the device has less of behind this belongs to the contender."""
        before = _used_bytes(self._config.device)
        yield
        used = zip(before, _used_bytes(self._config.device), strict=True)
        contender.held_bytes += max(0, *(after - earlier for earlier, after in used))  # others may free some meanwhile


class _Sampler:
    """Times one phase of one cell."""

    def __init__(self, contender: _Contender, phase: Phase) -> None:
        assert contender.runner is not None, "it was compared"
        self.contender, self._runner, self._phase = contender, contender.runner, phase
        self.seconds: list[float] = []
        self.counts = contender.runner.counts(phase)
        self.memory_bytes: int | None = None
        self.kernels_ms: float | None = None

    def probe(self, cell: Cell, subject: Subject) -> None:
        """What is measured on a GPU beside times."""
        if not torch.cuda.is_available():
            return
        inputs = subject.inputs(cell, 1)
        with _told(self.contender.verdicts, (self._phase,)):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self._runner.sample_s(self._phase, inputs)
            self.memory_bytes = self.contender.held_bytes + torch.cuda.max_memory_allocated() - before
            self.kernels_ms = kernels_of(self._runner, self._phase, cell, inputs)
        self.counts = self._runner.counts(self._phase)

    def take(self, inputs: object, *, counts: bool) -> None:
        """One sample."""
        if not self.contender.verdicts[self._phase].is_timed:
            return
        with _told(self.contender.verdicts, (self._phase,)):
            seconds = self._runner.sample_s(self._phase, inputs)
            if counts:
                self.seconds.append(seconds)


@contextlib.contextmanager
def _told(verdicts: dict[Phase, Verdict], phases: Sequence[Phase]) -> Iterator[None]:
    """A mode that cannot be had, or fails, is told as such, and the others go on."""
    try:
        yield
        return
    except UnavailableError as error:
        verdict = Verdict(state="not available", reason=str(error))
    except PiecegraphError as error:
        verdict = Verdict(state="not available", reason=str(error))
    except Exception as error:  # noqa: BLE001 - compilers and kernels raise whatever they like
        first = (str(error).splitlines() or [""])[0]
        verdict = Verdict(state="failed", reason=f"{type(error).__name__}: {first}"[:300])
    verdicts |= dict.fromkeys(phases, verdict)


def _used_bytes(device: torch.device) -> tuple[int, int]:
    """Of the device by all, and by torch's allocator in this process."""
    if device.type != "cuda":
        return 0, 0
    _tidy()
    free, total = torch.cuda.mem_get_info(device)
    return total - free, torch.cuda.memory_reserved(device)


def _tidy() -> None:
    gc.collect()
    wait()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
