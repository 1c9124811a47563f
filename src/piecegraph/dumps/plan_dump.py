"""The dump of one plan while it is made: told of each stage, it writes what there is to write, at once.

So a plan that fails leaves all that was known by then. What cannot be written is an event and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.events import EventLog
from piecegraph.base.plan import Cut, Piece
from piecegraph.dumps.folder import DumpFolder
from piecegraph.dumps.index import DumpedPiece, DumpedPlan, DumpedSize, index_text, plan_json
from piecegraph.dumps.kernels import captured_text, launched_lines
from piecegraph.dumps.listing import input_origins, split_text, traced_text
from piecegraph.dumps.pieces import PieceFiles
from piecegraph.dumps.target import Target
from piecegraph.errors import PiecegraphError
from piecegraph.graph.compile import CompilePiece
from piecegraph.graph.program import Program, Step
from piecegraph.graph.split import Segment
from piecegraph.graph.tracer import Traced
from piecegraph.tape.library import TapeLibrary
from piecegraph.tape.tape import EagerStep, Tape

_INDEX = "index.md"


class PlanDump:
    """A :class:`~piecegraph.graph.compile.PieceWatch` and a :class:`~piecegraph.tape.library.TapeWatch`.

    Args:
        target: where to dump, and what.
        name: of what is compiled.
        events: what is told there is in the index, too.
        seconds: of each stage; looked at again whenever the index is written.
        settings: Inductor's.
    """

    def __init__(
        self,
        target: Target,
        name: str,
        events: EventLog,
        seconds: Mapping[str, float],
        settings: Mapping[str, Any],
    ) -> None:
        self._folder = DumpFolder.make(target.folder, name, events)
        self._saves_inputs = target.saves_inputs
        self._name, self._events, self._seconds, self._settings = name, events, seconds, settings
        self._pieces: dict[str, PieceFiles] = {}
        self._keys: dict[int, str] = {}
        self._segments: Sequence[Segment] = ()
        self._origins: Sequence[Sequence[str]] = ()
        self._steps: tuple[Piece | Cut, ...] = ()
        self._sizes: dict[str, DumpedSize] = {}
        self._failure = ""
        self._failed_step: int | None = None
        self._is_complete = False
        self._why_untraced = ""

    # -- it is traced, cut and compiled

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Whatever goes wrong inside is the dump's own loss and nobody else's."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - graphs may hold anything, and the run is to go on
            self._folder.tell(error)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """What is raised inside ended the making of the plan."""
        try:
            yield
        except Exception as error:
            self.failed(error)
            raise

    def traced(self, traced: Traced) -> None:
        """There is a graph."""
        with self._harmless():
            self._folder.write("traced.py", traced_text(traced))

    def cut(self, traced: Traced, segments: Sequence[Segment]) -> None:
        """The graph was cut."""
        self._segments = segments
        with self._harmless():
            self._origins = [input_origins(traced, segment) for segment in segments]
            self._folder.write("split.py", split_text(traced, segments))

    def compiling(
        self, index: int, key: str, module: torch.fx.GraphModule, compile_piece: CompilePiece
    ) -> torch_compat.PlaceSource:
        self._keys[index] = key
        with self._harmless():
            title, origins = f"Piece {index} of {self._name}", self._origins[index]
            piece = PieceFiles(self._folder, title, index, module, origins, self._settings, compile_piece)
            self._pieces[key] = piece
            return piece.place
        return lambda source: None

    def compile_failed(self, key: str, error: Exception) -> str:
        with self._harmless():
            piece = self._pieces[key]
            piece.compile_failed(error)
            self._write_index()
            return self._hint(piece.entry)
        return ""

    def compiled(self, key: str) -> None:
        if key in self._pieces:
            self._pieces[key].compiled()

    def finish(self, program: Program) -> Program:
        """The plan is made. Returns the program with steps that tell what goes into them, and when they fail."""
        self._is_complete = True
        self._steps = tuple(step.label for step in program.steps)
        with self._harmless():
            for step in program.steps:
                if isinstance(step.label, Piece) and self._is_own(step.label):
                    piece = self._pieces[step.label.key]
                    piece.entry = replace(piece.entry, kernels=launched_lines(step.source))
            self._write_index()
        return replace(program, steps=tuple(map(self._watched, program.steps)), _at={})

    def finish_untraced(self, reason: str) -> None:
        """The function runs as it is."""
        self._is_complete, self._why_untraced = True, reason or "asked for"
        with self._harmless():
            self._write_index()

    def _is_own(self, label: Piece) -> bool:
        """Whether a piece is the one that its kind was compiled from; not so of what another plan has compiled."""
        return label.key in self._pieces and self._pieces[label.key].entry.index == label.index

    # -- it runs

    def _watched(self, step: Step) -> Step:
        function, label = step.function, step.label
        piece = self._pieces.get(label.key) if isinstance(label, Piece) else None
        is_first = isinstance(label, Piece) and self._is_own(label)

        @functools.wraps(function, updated=())
        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_first
            if is_first and piece is not None and not _is_capturing():
                is_first = False
                with self._harmless():
                    piece.note_inputs(args, saves=self._saves_inputs)
            try:
                return function(*args, **kwargs)
            except Exception as error:
                with self._harmless():
                    self._step_failed(label, piece, error, args)
                raise

        return replace(step, function=watched)

    def _step_failed(self, label: Piece | Cut, piece: PieceFiles | None, error: Exception, args: Sequence[Any]) -> None:
        if _is_capturing():  # nothing can be tried now, and it may do without a graph: the library tells
            return
        if piece is not None:
            piece.run_failed(error, args)
        self._failed_step = label.index
        self._failure = f"{label}: {type(error).__name__}: {error}"
        self._write_index()
        self._add_note(error)

    def recorded(self, library: TapeLibrary[Any]) -> None:
        with self._harmless():
            for size in library.recorded:
                self._sizes[str(size.key)] = DumpedSize(
                    str(size.key), size.num_graphs, size.num_eager_steps, size.seconds, size.num_bytes
                )
            self._tell_uncapturable(library)
            tapes = [tape for tape in library.tapes.values() if isinstance(tape, Tape)]
            self._steps = self._steps or _cuts_of(tapes)
            kernels = captured_text(tapes)
            if kernels:
                self._folder.write("kernels.md", kernels)
            self._write_index()

    def _tell_uncapturable(self, library: TapeLibrary[Any]) -> None:
        for step in self._steps:
            if isinstance(step, Piece) and step.index in library.uncapturable and step.key in self._pieces:
                self._pieces[step.key].capture_failed(library.uncapturable[step.index], library.can_capture)

    def failed(self, error: Exception) -> None:
        self._failure = self._failure or str(error)
        if isinstance(error, PiecegraphError) and error.piece is not None:
            self._failed_step = error.piece
        with self._harmless():
            self._write_index()
            self._add_note(error)

    # -- what is written

    def _write_index(self) -> None:
        plan = self._plan()
        self._folder.write("plan.json", plan_json(plan))
        # Last, so that it names what is there.
        self._folder.write(_INDEX, index_text(replace(plan, files=tuple(self._folder.files))))

    def _plan(self) -> DumpedPlan:
        return DumpedPlan(
            name=self._name,
            steps=self._steps or self._planned_steps(),
            pieces={key: piece.entry for key, piece in self._pieces.items()},
            sizes=tuple(self._sizes.values()),
            seconds=dict(self._seconds),
            events=tuple(f"{times} x {event}" for event, times in self._events.distinct),
            files=tuple(self._folder.files),
            failure=self._failure,
            failed_step=self._failed_step,
            is_complete=self._is_complete,
            why_untraced=self._why_untraced,
        )

    def _planned_steps(self) -> tuple[Piece | Cut, ...]:
        """The steps of a plan that is not compiled to its end."""
        steps: list[Piece | Cut] = []
        for index, segment in enumerate(self._segments):
            if segment.verdict is None:
                key = self._keys.get(index, "")
                steps.append(Piece(index, len(segment.nodes), key, segment.first_line, "" if key else "not reached"))
            else:
                steps.append(Cut(index, segment.title, segment.verdict.reason, segment.first_line))
        return tuple(steps)

    def _hint(self, entry: DumpedPiece) -> str:
        folder, files = self._folder.path, entry.files
        if folder is None or not files or entry.why_no_repro:
            return ""
        return f"python {folder / files[0]} --check"

    def _add_note(self, error: Exception) -> None:
        """Let the text of an error end with the files that are about it."""
        folder = self._folder.path
        if folder is None or any(str(folder) in note for note in getattr(error, "__notes__", ())):
            return
        failed = [file for piece in self._pieces.values() if piece.entry.failure for file in piece.entry.files]
        shown = [_INDEX, *failed, *(name for name in ("split.py", "traced.py") if name in self._folder.files)]
        error.add_note("\n".join(["what was dumped of it:", *(f"  {folder / file}" for file in dict.fromkeys(shown))]))


def _cuts_of(tapes: Sequence[Tape]) -> tuple[Cut, ...]:
    """Of a function that was not traced they are known when it was recorded."""
    steps = tapes[0].steps if tapes else ()
    return tuple(step.label for step in steps if isinstance(step, EagerStep) and isinstance(step.label, Cut))


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
